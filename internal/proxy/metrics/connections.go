package metrics

import (
	"net/netip"
	"slices"

	"github.com/verdict-proxy/verdict/internal/system/ipfamily"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/verdict-proxy/verdict/sync/dataplane"
)

// connections shows what the kernel counts. A scrape has the counters read, if the last reading is not fresh.
type connections struct {
	r *reader
	o *Options
}

// others names the sum of the Service ports that have no series of their own. No object of the API can have such a
// name.
const others = "_others"

// portLabels name a Service port. Namespace, service and endpoint would be nicer, but those Prometheus gives to what it
// scrapes: the proxy's own pod.
func portLabels(more ...string) []string {
	return append([]string{"service_namespace", "service_name", "service_port", "protocol"}, more...)
}

var (
	serviceConnectionsMetric = scrapedCounter("verdict_service_connections_total",
		"New connections to a Service port that were sent to an endpoint.", portLabels()...)
	serviceRefusedMetric = scrapedCounter("verdict_service_refused_packets_total",
		"Packets to a Service port without an endpoint, or over its limits, by what happened to them: reject or drop.",
		portLabels("verdict")...)
	endpointConnectionsMetric = scrapedCounter("verdict_endpoint_connections_total",
		"New connections to a Service port that were sent to this endpoint.", portLabels("endpoint_address")...)
	refusedMetric = scrapedCounter("verdict_refused_packets_total",
		"Packets that were sent to no endpoint, by reason and by what happened to them.", ipFamily, "reason", "verdict")
	leftOutMetric = scrapedGauge("verdict_series_left_out",
		"Service ports or endpoints with traffic that have no series of their own (metricsMaxSeries).", "metric")
	mapElementsMetric = scrapedGauge("verdict_map_elements",
		"Elements in a map or set of Verdict's tables.", ipFamily, "map")
	mapMaxElementsMetric = scrapedGauge("verdict_map_max_elements",
		"Maximum number of elements of a map or set; absent for those without a limit.", ipFamily, "map")
	affinityEntriesMetric = scrapedGauge("verdict_affinity_entries",
		"Entries of a Service in the session affinity map; reported while the map is three quarters full, for the "+
			"Services with the most entries.", ipFamily, "service_namespace", "service_name")
	readDurationMetric = scrapedGauge("verdict_counters_read_duration_seconds",
		"Duration of the last read of the kernel's counters.")
	readFailuresMetric = scrapedCounter("verdict_counters_read_failures_total", "Failed reads of the kernel's counters.")
)

// connectionMetrics are those of connections.
var connectionMetrics = append([]scraped{serviceConnectionsMetric, serviceRefusedMetric, endpointConnectionsMetric,
	refusedMetric, leftOutMetric, mapElementsMetric, mapMaxElementsMetric, affinityEntriesMetric, readDurationMetric,
	readFailuresMetric}, ipvsMetrics...)

// picture is everything that is shown of the ledger, copied so that nobody waits for a scrape.
type picture struct {
	ports   []sample
	ipvs    []ipvsSample
	others  totals
	refused ipfamily.Per[[dataplane.NumRefusals]uint64]
	// leftOut counts Service ports and endpoints.
	leftOut         ipfamily.Per[int]
	remembered      [len(RememberingSets)]ipfamily.Per[int]
	seconds, failed float64
}

// sample is a Service port.
type sample struct {
	name      dataplane.PortName
	now       totals
	endpoints []endpointSample
}

type endpointSample struct {
	at          netip.AddrPort
	connections uint64
}

// picture copies what there is.
func (r *reader) picture() (p picture) {
	r.locked(func() {
		g := r.ledger
		p = picture{ports: make([]sample, 0, g.shown), others: g.others, refused: g.refused, remembered: r.remembered,
			seconds: r.took.Seconds(), failed: float64(r.failures)}
		for _, port := range g.ports {
			if port.hidden {
				p.leftOut[0]++
			}
			if !port.shown {
				continue
			}
			s := sample{name: port.name, now: port.totals}
			for at, ep := range port.endpoints {
				if ep.shown {
					s.endpoints = append(s.endpoints, endpointSample{at, ep.connections})
				} else {
					p.leftOut[1]++
				}
			}
			p.ports = append(p.ports, s)
		}
		p.ipvs = r.scheduled.samples(g)
	})
	return p
}

func (c *connections) send(ch chan<- prometheus.Metric) {
	c.r.waitFresh()
	p := c.r.picture()
	if c.o.Counters != nil {
		c.collectRefused(ch, &p)
		readDurationMetric.put(ch, p.seconds)
		readFailuresMetric.put(ch, p.failed)
		for i := range p.ports {
			collectPort(ch, &p.ports[i])
		}
		for i := range p.ipvs {
			p.ipvs[i].collect(ch)
		}
		if p.others.any() {
			collectOthers(ch, &p.others)
		}
		if c.o.Detail != Off {
			leftOutMetric.put(ch, float64(p.leftOut[0]), "verdict_service_connections_total")
		}
		if c.o.Detail == PerEndpoint {
			leftOutMetric.put(ch, float64(p.leftOut[1]), "verdict_endpoint_connections_total")
		}
	}
	if c.o.Fill != nil {
		c.collectFill(ch, &p)
	}
	if c.o.AffinityShares != nil {
		for _, s := range c.o.AffinityShares() {
			affinityEntriesMetric.put(ch, float64(s.Entries), families[s.Family], s.Service.Namespace, s.Service.Name)
		}
	}
}

func collectPort(ch chan<- prometheus.Metric, s *sample) {
	collectTotals(ch, &s.now, s.name.Service.Namespace, s.name.Service.Name, s.name.Port, s.name.Protocol.String())
	for i := range s.endpoints {
		endpointConnectionsMetric.put(ch, float64(s.endpoints[i].connections),
			s.name.Service.Namespace, s.name.Service.Name, s.name.Port, s.name.Protocol.String(), s.endpoints[i].at.String())
	}
}

func collectOthers(ch chan<- prometheus.Metric, t *totals) { collectTotals(ch, t, "", others, "", "") }

func collectTotals(ch chan<- prometheus.Metric, t *totals, namespace, service, port, protocol string) {
	serviceConnectionsMetric.put(ch, float64(t.connections), namespace, service, port, protocol)
	for verdict, packets := range t.refused {
		if packets > 0 {
			serviceRefusedMetric.put(ch, float64(packets),
				namespace, service, port, protocol, dataplane.Verdict(verdict).String())
		}
	}
}

func (c *connections) collectRefused(ch chan<- prometheus.Metric, p *picture) {
	for i, f := range families {
		for r := range dataplane.NumRefusals {
			if c.o.Detail == Off && (r == dataplane.RefusedNoEndpoints || r == dataplane.RefusedNoLocalEndpoints) {
				continue // these are counted at the Services
			}
			refusedMetric.put(ch, float64(p.refused[i][r]), f, r.String(), r.Verdict().String())
		}
	}
}

func (c *connections) collectFill(ch chan<- prometheus.Metric, p *picture) {
	for _, f := range c.o.Fill() {
		if i := slices.Index(RememberingSets[:], f.Set); i >= 0 {
			f.Elements = p.remembered[i][f.Family]
		}
		if f.Elements < 0 && f.Set == RememberingSets[1] { // there is none without a device
			continue
		}
		if f.Elements >= 0 {
			mapElementsMetric.put(ch, float64(f.Elements), families[f.Family], f.Set)
		}
		if f.Size > 0 {
			mapMaxElementsMetric.put(ch, float64(f.Size), families[f.Family], f.Set)
		}
	}
}
