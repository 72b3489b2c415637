package ipvsplugin

import (
	"context"
	"fmt"
	"io"
	"net/netip"

	"github.com/verdict-proxy/verdict/sync/dataplane"
	"github.com/verdict-proxy/verdict/sync/reconcile"
)

// Inspector adds what IPVS has to the answers of the backend that leaves packets to it.
type Inspector struct {
	reconcile.Inspector
	// read reads one virtual service; a test puts another one here.
	read func(dataplane.Key) (ServiceStatistics, bool, error)
}

var _ reconcile.Inspector = (*Inspector)(nil)

// Inspect gives an inspector of another backend's rules and IPVS. It never loads IPVS, and closes the other one with
// itself.
func Inspect(of reconcile.Inspector) *Inspector { return &Inspector{of, ReadService} }

// Settings implements reconcile.Inspector.
func (i *Inspector) Settings(ctx context.Context) (*dataplane.Settings, error) {
	s, err := i.Inspector.Settings(ctx)
	if err == nil {
		s.Scheduler = Loaded()
	}
	return s, err
}

// Trace implements reconcile.Inspector.
func (i *Inspector) Trace(ctx context.Context, p dataplane.Packet, node dataplane.LocalNode) (*dataplane.Trace, error) {
	t, err := i.Inspector.Trace(ctx, p, node)
	if err != nil || t.Cause != dataplane.FrontendScheduled {
		return t, err
	}
	vs, ok, err := i.read(dataplane.Key{Addr: p.Destination, Protocol: p.Protocol, Port: p.Port})
	if err != nil {
		return nil, err
	}
	if !ok {
		t.Unclear = append(t.Unclear, "IPVS has no virtual service for it: the packet is rejected")
		return t, nil
	}
	t.Scheduler = vs.Config.String()
	for _, d := range vs.Destinations {
		t.Destinations = append(t.Destinations, dataplane.Destination{AddrPort: d.AddrPort, Weight: d.Weight,
			Connections: d.Connections})
	}
	return t, nil
}

// Differences implements reconcile.Inspector.
func (i *Inspector) Differences(ctx context.Context, wanted *dataplane.State) (*dataplane.Differences, error) {
	d, err := i.Inspector.Differences(ctx, wanted)
	if err != nil {
		return nil, err
	}
	if wanted != nil {
		lines, err := Differences(wanted)
		if err != nil {
			return nil, err
		}
		for _, line := range lines {
			d.Wrong = append(d.Wrong, "IPVS: "+line)
		}
	}
	if len(d.Scheduled) == 0 {
		return d, nil
	}
	services, err := ReadStatistics()
	if err != nil {
		return nil, err
	}
	there := map[dataplane.Key]bool{}
	for _, s := range services {
		there[s.Key] = true
	}
	for _, k := range d.Scheduled {
		if !there[k] {
			d.Wrong = append(d.Wrong,
				fmt.Sprintf("the address %s is left to IPVS, which has no virtual service there: clients are rejected", k))
		}
	}
	return d, nil
}

// Print implements reconcile.Inspector: IPVS as ipvsadm -Sn lists it, with the connections that it has.
func (i *Inspector) Print(ctx context.Context, w io.Writer) error {
	if err := i.Inspector.Print(ctx, w); err != nil {
		return err
	}
	services, err := ReadStatistics()
	if err != nil {
		return err
	}
	for _, s := range services {
		name := option(s.Key.Protocol) + " " + netip.AddrPortFrom(s.Key.Addr, s.Key.Port).String()
		if _, err := fmt.Fprintf(w, "-A %s -s %s\n", name, s.Config); err != nil {
			return err
		}
		for _, d := range s.Destinations {
			if _, err := fmt.Fprintf(w, "-a %s -r %s -m -w %d # %d active, %d inactive\n", name, d.AddrPort, d.Weight, d.Active,
				d.Inactive); err != nil {
				return err
			}
		}
	}
	return nil
}

// Counters implements reconcile.Inspector.
func (i *Inspector) Counters(ctx context.Context, ask dataplane.CountersAsked) (*dataplane.Counters, error) {
	c, err := i.Inspector.Counters(ctx, ask)
	if err != nil {
		return nil, err
	}
	for n := range ask.Endpoints {
		if fe := &ask.Endpoints[n]; fe.Scheduled {
			if err := i.scheduled(fe.Key, c); err != nil {
				return nil, err
			}
		}
	}
	return c, nil
}

// scheduled adds what IPVS has counted at a frontend, and of its endpoints.
func (i *Inspector) scheduled(k dataplane.Key, c *dataplane.Counters) error {
	vs, there, err := i.read(k)
	if err != nil || !there {
		return err
	}
	c.Scheduled = append(c.Scheduled, dataplane.SchedulerCount{Frontend: k, SchedulerStatistics: vs.Statistics})
	for n := range vs.Destinations {
		d := &vs.Destinations[n]
		c.Scheduled = append(c.Scheduled, dataplane.SchedulerCount{Frontend: k, Endpoint: d.AddrPort, Weight: d.Weight,
			Active: uint64(d.Active), Inactive: uint64(d.Inactive), SchedulerStatistics: d.Statistics})
	}
	c.Read += len(vs.Destinations)
	return nil
}
