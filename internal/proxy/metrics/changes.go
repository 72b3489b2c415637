package metrics

import "github.com/prometheus/client_golang/prometheus"

// changes shows the ledger of changes.
type changes struct{ o *Options }

var (
	ledgerRecordsDesc = prometheus.NewDesc("verdict_ledger_records_total", "Records written to the ledger.", nil, nil)
	ledgerMissingDesc = prometheus.NewDesc("verdict_ledger_missing_records_total",
		"Records that are missing in the ledger, because the disk failed or was too slow, or somebody removed the file.",
		nil, nil)
	ledgerErrorsDesc = prometheus.NewDesc("verdict_ledger_errors_total", "Failures to write the ledger.", nil, nil)
	ledgerBytesDesc  = prometheus.NewDesc("verdict_ledger_bytes", "Size of the ledger's files.", nil, nil)
)

func (changes) Describe(ch chan<- *prometheus.Desc) {
	for _, d := range []*prometheus.Desc{ledgerRecordsDesc, ledgerMissingDesc, ledgerErrorsDesc, ledgerBytesDesc} {
		ch <- d
	}
}

func (c changes) Collect(ch chan<- prometheus.Metric) {
	now := c.o.Ledger()
	count := func(d *prometheus.Desc, n uint64) {
		ch <- prometheus.MustNewConstMetric(d, prometheus.CounterValue, float64(n))
	}
	count(ledgerRecordsDesc, now.Records)
	count(ledgerMissingDesc, now.Missing)
	count(ledgerErrorsDesc, now.Errors)
	ch <- prometheus.MustNewConstMetric(ledgerBytesDesc, prometheus.GaugeValue, float64(now.Bytes))
}
