package metrics

import (
	"maps"
	"net/netip"
	"slices"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/verdict-proxy/verdict/sync/dataplane"
)

// IPVS reads what IPVS counts of the frontends that it schedules. Its methods are called one at a time.
type IPVS interface {
	// Services reads all frontends at once; one may be missing.
	Services(do func(dataplane.Key, dataplane.SchedulerStatistics)) error
	// Endpoints reads those behind one frontend.
	Endpoints(of dataplane.Key, do func(netip.AddrPort, IPVSEndpoint)) error
}

// IPVSEndpoint is an endpoint behind a frontend.
type IPVSEndpoint struct {
	dataplane.SchedulerStatistics
	// Active is how many connections it has now.
	Active uint32
}

// since gives what was counted since an earlier reading, without rates; everything, if the count began anew meanwhile.
func since(before, now dataplane.SchedulerStatistics) dataplane.SchedulerStatistics {
	if now.Connections < before.Connections || now.PacketsIn < before.PacketsIn || now.PacketsOut < before.PacketsOut {
		before = dataplane.SchedulerStatistics{}
	}
	return dataplane.SchedulerStatistics{Connections: now.Connections - before.Connections,
		PacketsIn: now.PacketsIn - before.PacketsIn, PacketsOut: now.PacketsOut - before.PacketsOut,
		BytesIn: now.BytesIn - before.BytesIn, BytesOut: now.BytesOut - before.BytesOut}
}

// ipvsLedger adds up what IPVS counts, as the ledger does for the elements of maps. It holds what has counted
// something.
type ipvsLedger struct {
	// read says that there was a reading: what was counted before the first one is left out.
	read  bool
	last  map[dataplane.Key]*ipvsFrontend
	ports map[dataplane.PortName]*ipvsPort
}

type ipvsFrontend struct {
	last dataplane.SchedulerStatistics
	// active says that it had open connections, so that they are looked at again.
	active    bool
	endpoints map[netip.AddrPort]IPVSEndpoint
}

type ipvsPort struct {
	dataplane.SchedulerStatistics
	endpoints map[netip.AddrPort]*dataplane.SchedulerStatistics
}

func newIPVSLedger() *ipvsLedger {
	return &ipvsLedger{last: map[dataplane.Key]*ipvsFrontend{}, ports: map[dataplane.PortName]*ipvsPort{}}
}

// enter takes a reading of all frontends, and gives those whose endpoints are worth reading.
func (g *ipvsLedger) enter(
	read map[dataplane.Key]dataplane.SchedulerStatistics,
	portAt func(dataplane.Key) (dataplane.PortName, bool),
) (due []dataplane.Key) {
	maps.DeleteFunc(g.last, func(k dataplane.Key, _ *ipvsFrontend) bool { _, there := read[k]; return !there })
	for k, counts := range read {
		fe := g.last[k]
		if fe == nil {
			fe = &ipvsFrontend{endpoints: map[netip.AddrPort]IPVSEndpoint{}}
			if !g.read {
				fe.last = counts
			}
			g.last[k] = fe
		}
		more := since(fe.last, counts)
		fe.last = counts
		if more == (dataplane.SchedulerStatistics{}) && !fe.active && g.read {
			continue
		}
		if name, known := portAt(k); known && more != (dataplane.SchedulerStatistics{}) {
			g.port(name).Add(&more)
		}
		if counts.Connections > 0 {
			due = append(due, k)
		}
	}
	slices.SortFunc(due, dataplane.Key.Compare)
	return due
}

func (g *ipvsLedger) port(n dataplane.PortName) *ipvsPort {
	p := g.ports[n]
	if p == nil {
		p = &ipvsPort{endpoints: map[netip.AddrPort]*dataplane.SchedulerStatistics{}}
		g.ports[n] = p
	}
	return p
}

// enterEndpoints takes a reading of the endpoints behind a frontend. First says that nothing of it was read before.
func (g *ipvsLedger) enterEndpoints(
	k dataplane.Key,
	name dataplane.PortName,
	read map[netip.AddrPort]IPVSEndpoint,
	first bool,
) {
	fe := g.last[k]
	if fe == nil {
		return
	}
	fe.active = false
	for at, ep := range read {
		fe.active = fe.active || ep.Active > 0
		before := fe.endpoints[at]
		if _, known := fe.endpoints[at]; !known && first {
			before = ep
		}
		if more := since(before.SchedulerStatistics, ep.SchedulerStatistics); more != (dataplane.SchedulerStatistics{}) {
			p := g.port(name)
			if p.endpoints[at] == nil {
				p.endpoints[at] = &dataplane.SchedulerStatistics{}
			}
			p.endpoints[at].Add(&more)
		}
	}
	fe.endpoints = read
}

// forget drops the ports that are gone.
func (g *ipvsLedger) forget(gone func(dataplane.PortName) bool) {
	maps.DeleteFunc(g.ports, func(n dataplane.PortName, _ *ipvsPort) bool { return gone(n) })
}

// readIPVS reads what IPVS counts: all frontends and, if endpoints are shown, those behind frontends that have counted
// more.
func (r *reader) readIPVS(deadline time.Time) error {
	if r.ipvs == nil {
		return nil
	}
	read := map[dataplane.Key]dataplane.SchedulerStatistics{}
	if err := r.ipvs.Services(func(k dataplane.Key, c dataplane.SchedulerStatistics) { read[k] = c }); err != nil {
		return err
	}
	var due []dataplane.Key
	var first bool
	r.locked(func() {
		g := r.scheduled
		first = !g.read
		due = g.enter(read, r.ledger.portAt)
		g.forget(func(n dataplane.PortName) bool { return r.ledger.ports[n] == nil })
		g.read = true
	})
	if r.ledger.detail != PerEndpoint {
		return nil
	}
	for _, k := range due {
		if !first && time.Now().After(deadline) {
			return nil // what it did not come to is added up when that has counted more
		}
		endpoints := map[netip.AddrPort]IPVSEndpoint{}
		if err := r.ipvs.Endpoints(k, func(at netip.AddrPort, e IPVSEndpoint) { endpoints[at] = e }); err != nil {
			return err
		}
		r.locked(func() {
			if name, known := r.ledger.portAt(k); known {
				r.scheduled.enterEndpoints(k, name, endpoints, first)
			}
		})
	}
	return nil
}

// portAt gives whose frontend it is.
func (g *ledger) portAt(k dataplane.Key) (dataplane.PortName, bool) {
	fe := g.frontends[k]
	if fe == nil || fe.gone {
		return dataplane.PortName{}, false
	}
	return fe.port.name, true
}

var (
	ipvsConnectionsMetric = scrapedCounter("verdict_ipvs_connections_total",
		"New connections to a Service port that IPVS sent to an endpoint.", portLabels()...)
	ipvsPacketsMetric = scrapedCounter("verdict_ipvs_packets_total",
		"Packets that IPVS forwarded for a Service port, from clients (in) and to them (out).", portLabels("direction")...)
	ipvsBytesMetric = scrapedCounter("verdict_ipvs_bytes_total",
		"Bytes that IPVS forwarded for a Service port, from clients (in) and to them (out).", portLabels("direction")...)
	ipvsEndpointConnectionsMetric = scrapedCounter("verdict_ipvs_endpoint_connections_total",
		"New connections to a Service port that IPVS sent to this endpoint.", portLabels("endpoint_address")...)
	ipvsEndpointBytesMetric = scrapedCounter("verdict_ipvs_endpoint_bytes_total",
		"Bytes that IPVS forwarded to an endpoint (in) and from it (out).", portLabels("endpoint_address", "direction")...)
	ipvsEndpointActiveMetric = scrapedGauge("verdict_ipvs_endpoint_active_connections",
		"Connections of an endpoint that are established now, as IPVS sees them.", portLabels("endpoint_address")...)
)

var ipvsMetrics = []scraped{ipvsConnectionsMetric, ipvsPacketsMetric, ipvsBytesMetric, ipvsEndpointConnectionsMetric,
	ipvsEndpointBytesMetric, ipvsEndpointActiveMetric}

// ipvsSample is a Service port that IPVS schedules.
type ipvsSample struct {
	name dataplane.PortName
	dataplane.SchedulerStatistics
	endpoints map[netip.AddrPort]IPVSEndpoint
}

// samples copies the ports that have a series of their own, and as many of their endpoints as may have one.
func (g *ipvsLedger) samples(of *ledger) (all []ipvsSample) {
	open := map[dataplane.PortName]map[netip.AddrPort]uint32{}
	for k, fe := range g.last {
		name, known := of.portAt(k)
		if !known {
			continue
		}
		for at, ep := range fe.endpoints {
			if ep.Active > 0 {
				if open[name] == nil {
					open[name] = map[netip.AddrPort]uint32{}
				}
				open[name][at] += ep.Active
			}
		}
	}
	room := of.room
	for _, n := range slices.SortedFunc(maps.Keys(g.ports), dataplane.PortName.Compare) {
		if port := of.ports[n]; port == nil || !port.shown {
			continue
		}
		p := g.ports[n]
		s := ipvsSample{n, p.SchedulerStatistics, map[netip.AddrPort]IPVSEndpoint{}}
		for at, counts := range p.endpoints {
			if room > 0 {
				room--
				s.endpoints[at] = IPVSEndpoint{SchedulerStatistics: *counts, Active: open[n][at]}
			}
		}
		all = append(all, s)
	}
	return all
}

func (s *ipvsSample) collect(ch chan<- prometheus.Metric) {
	labels := []string{s.name.Service.Namespace, s.name.Service.Name, s.name.Port, s.name.Protocol.String()}
	show := func(m scraped, value uint64, more ...string) {
		m.put(ch, float64(value), append(slices.Clip(labels), more...)...)
	}
	show(ipvsConnectionsMetric, s.Connections)
	show(ipvsPacketsMetric, s.PacketsIn, "in")
	show(ipvsPacketsMetric, s.PacketsOut, "out")
	show(ipvsBytesMetric, s.BytesIn, "in")
	show(ipvsBytesMetric, s.BytesOut, "out")
	for at, ep := range s.endpoints {
		show(ipvsEndpointConnectionsMetric, ep.Connections, at.String())
		show(ipvsEndpointActiveMetric, uint64(ep.Active), at.String())
		show(ipvsEndpointBytesMetric, ep.BytesIn, at.String(), "in")
		show(ipvsEndpointBytesMetric, ep.BytesOut, at.String(), "out")
	}
}
