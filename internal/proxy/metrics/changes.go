package metrics

import "github.com/prometheus/client_golang/prometheus"

var (
	ledgerRecordsMetric = scrapedCounter("verdict_ledger_records_total", "Records written to the ledger.")
	ledgerMissingMetric = scrapedCounter("verdict_ledger_missing_records_total",
		"Records that are missing in the ledger, because the disk failed or was too slow, or somebody removed the file.")
	ledgerErrorsMetric = scrapedCounter("verdict_ledger_errors_total", "Failures to write the ledger.")
	ledgerBytesMetric  = scrapedGauge("verdict_ledger_bytes", "Size of the ledger's files.")
)

// sendLedger shows the ledger of changes.
func (o *Options) sendLedger(ch chan<- prometheus.Metric) {
	now := o.Ledger()
	ledgerRecordsMetric.put(ch, float64(now.Records))
	ledgerMissingMetric.put(ch, float64(now.Missing))
	ledgerErrorsMetric.put(ch, float64(now.Errors))
	ledgerBytesMetric.put(ch, float64(now.Bytes))
}
