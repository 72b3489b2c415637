package ipvsplugin

import (
	"context"
	"net/netip"
	"reflect"
	"testing"

	"github.com/verdict-proxy/verdict/internal/lab/labtest"
	"github.com/verdict-proxy/verdict/sync/dataplane"
	"github.com/verdict-proxy/verdict/sync/reconcile"
	"github.com/verdict-proxy/verdict/sync/snapshot"
)

// leaving is a backend that leaves everything to IPVS.
type leaving struct{ reconcile.Inspector }

func (leaving) Trace(context.Context, dataplane.Packet, dataplane.LocalNode) (*dataplane.Trace, error) {
	return &dataplane.Trace{Cause: dataplane.FrontendScheduled}, nil
}

func (leaving) Counters(context.Context, dataplane.CountersAsked) (*dataplane.Counters, error) {
	return &dataplane.Counters{}, nil
}

// TestInspect: IPVS' endpoints and numbers stand in the answers about frontends that are left to it.
func TestInspect(t *testing.T) {
	key := dataplane.Key{Addr: netip.MustParseAddr("10.96.0.1"), Protocol: snapshot.TCP, Port: 80}
	ep := netip.MustParseAddrPort("10.244.1.1:8080")
	vs := ServiceStatistics{Key: key, Config: Config{Scheduler: "lc"}, Statistics: Statistics{Connections: 5, BytesIn: 7},
		Destinations: []DestinationStatistics{{AddrPort: ep, Weight: 2, Active: 3, Inactive: 4,
			Statistics: Statistics{Connections: 5}}}}
	i := &Inspector{leaving{}, func(k dataplane.Key) (ServiceStatistics, bool, error) { return vs, k == key, nil }}
	p := dataplane.Packet{Destination: key.Addr, Protocol: key.Protocol, Port: key.Port}
	trace, err := i.Trace(t.Context(), p, dataplane.LocalNode{})
	labtest.Check(t, err)
	if want := []dataplane.Destination{{AddrPort: ep, Weight: 2, Connections: 5}}; !reflect.DeepEqual(trace.Destinations,
		want) ||
		trace.Scheduler != vs.Config.String() || trace.Unclear != nil {
		t.Errorf("%+v", trace)
	}
	p.Port++
	if trace, err = i.Trace(t.Context(), p, dataplane.LocalNode{}); err != nil || len(trace.Unclear) != 1 {
		t.Errorf("without a virtual service: %+v, %v", trace, err)
	}
	other := dataplane.FrontendCount{Counted: dataplane.Counted{Key: dataplane.Key{Addr: key.Addr,
		Protocol: key.Protocol, Port: 81}}}
	c, err := i.Counters(t.Context(), dataplane.CountersAsked{Endpoints: []dataplane.FrontendCount{other,
		{Counted: dataplane.Counted{Key: key}, Scheduled: true}}})
	labtest.Check(t, err)
	want := []dataplane.SchedulerCount{{Frontend: key, SchedulerStatistics: Statistics{Connections: 5, BytesIn: 7}},
		{Frontend: key, Endpoint: ep, Weight: 2, Active: 3, Inactive: 4, SchedulerStatistics: Statistics{Connections: 5}}}
	if !reflect.DeepEqual(c.Scheduled, want) {
		t.Errorf("%+v", c.Scheduled)
	}
}
