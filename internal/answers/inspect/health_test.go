package inspect

import (
	"encoding/json"
	"fmt"
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/verdict-proxy/verdict/internal/lab/labtest"
	"github.com/verdict-proxy/verdict/internal/proxy/preflight"
	"github.com/verdict-proxy/verdict/internal/system/terminal"
	"github.com/verdict-proxy/verdict/sync/dataplane"
	"github.com/verdict-proxy/verdict/sync/snapshot"
)

// TestExplainUnhealthy: ejected endpoints are named with the reason, and of those that stay is said why.
func TestExplainUnhealthy(t *testing.T) {
	name, at := snapshot.Name{Namespace: "shop", Name: "web"}, time.Date(2026, 11, 22, 10, 0, 0, 0, time.UTC)
	const since = " since 2026-11-22T10:00:00Z"
	for _, test := range []struct {
		chance         snapshot.SecondChance
		endpoints      int
		ejected, kept  string
		keptIs, leftIs string
	}{
		{snapshot.SecondChanceOn, 3, "10.0.0.1:80", "10.0.0.2:80",
			"refused" + since + ", kept: half of the pool is ejected already", "unanswered" + since + ", ejected on this node"},
		{snapshot.SecondChanceObserve, 3, "", "10.0.0.1:80", "unanswered" + since + ", observe only", ""},
		{snapshot.SecondChanceOn, 1, "", "10.0.0.1:80", "unanswered" + since + ", kept: there is no other endpoint", ""},
		{snapshot.SecondChanceOff, 3, "", "", "", ""},
	} {
		sl := &snapshot.Slice{Name: name, Service: name.Name,
			Ports: []snapshot.SlicePort{{Protocol: snapshot.TCP, Port: 80}}}
		for i := range test.endpoints {
			sl.Endpoints = append(sl.Endpoints,
				snapshot.Endpoint{Addr: netip.AddrFrom4([4]byte{10, 0, 0, byte(i + 1)}), Ready: true})
		}
		snap := snapshot.New()
		snap.Apply(snapshot.Delta{
			Services: map[snapshot.Name]*snapshot.Service{name: {Name: name, ClusterIPs: []netip.Addr{preflight.Outside[0]},
				Ports: []snapshot.Port{{Protocol: snapshot.TCP, Port: 80}}}},
			Slices: map[snapshot.Name]*snapshot.Slice{name: sl},
			Health: map[snapshot.Name]*snapshot.Health{name: {Unhealthy: []snapshot.Unhealthy{
				{Endpoint: netip.MustParseAddrPort("10.0.0.1:80"), Since: at},
				{Endpoint: netip.MustParseAddrPort("10.0.0.2:80"), Cause: snapshot.Refused, Since: at}}}}})
		o := &Objects{Snap: snap, Config: dataplane.Config{SecondChance: test.chance}}
		a := &Answer{}
		a.fillObjects(dataplane.Explain(o.Config, snap, dataplane.Question{Source: netip.MustParseAddr("10.0.0.9"),
			Key: dataplane.Key{Addr: preflight.Outside[0], Protocol: snapshot.TCP, Port: 80}}), o, &Policy{}, "")
		view := a.Objects
		kept, left := map[string]string{}, map[string]string{}
		for _, e := range view.Endpoints {
			if e.Kept != "" {
				kept[e.AddrPort().String()] = e.Kept
			}
		}
		for _, e := range view.Excluded {
			left[fmt.Sprint(e.Address, ":", e.Port)] = e.Why
		}
		if kept[test.kept] != test.keptIs || left[test.ejected] != test.leftIs {
			t.Errorf("%+v: kept %v, left out %v", test, kept, left)
		}
		if test.keptIs != "" {
			var text strings.Builder
			a.Print(terminal.NewPrinter(&text), TextOptions{})
			if !strings.Contains(text.String(), test.keptIs) || !strings.Contains(text.String(), test.leftIs) {
				t.Errorf("the text is\n%s", &text)
			}
		}
	}
}

// TestTopEjected: top shows how many endpoints of a Service are ejected, and which, and leaves out those that are kept.
func TestTopEjected(t *testing.T) {
	since := time.Date(2026, 11, 22, 14, 2, 7, 0, time.UTC)
	of := func(addr string, ejected bool) dataplane.EndpointHealth {
		o := dataplane.EndpointHealth{Port: dataplane.PortName{Service: snapshot.Name{Namespace: "team", Name: "web-1"}},
			Ejected: ejected}
		o.Endpoint, o.Since = netip.MustParseAddrPort(addr), since
		return o
	}
	_, s, _ := newFakeSampler(3)
	labtest.Check(t, s.Sample(t.Context(), nil, nil, time.Second, false))
	// The same endpoint is ejected from two pools.
	dead := of("10.9.0.1:80", true)
	s.unhealthy = []dataplane.EndpointHealth{dead, dead, of("10.9.0.2:80", false)}
	sample := s.Result(ByName, time.Second)
	var out strings.Builder
	sample.Print(terminal.NewPrinter(&out), len(sample.Ports))
	for want, times := range map[string]int{
		"team/web-1:http  1 ejected\n": 1, "  10.9.0.1:80  unanswered since 2026-11-22T14:02:07Z, ejected\n": 1,
		"10.9.0.2": 0, "ejected": 2,
	} {
		if n := strings.Count(out.String(), want); n != times {
			t.Errorf("%q is there %d times, want %d:\n%s", want, n, times, out.String())
		}
	}
	v := NewTopView("node-1", ByName, time.Second)
	v.Show(sample, nil)
	screen := func() string { return strings.Join(v.Render(terminal.NewPrinter(&strings.Builder{})), "\n") }
	if got := screen(); !strings.Contains(got, "web-1:http  1 ejected") || strings.Contains(got, "10.9.0.1") {
		t.Errorf("the screen is\n%s", got)
	}
	v.Key("down")
	v.Key("enter")
	if got := screen(); !strings.Contains(got, "10.9.0.1:80  unanswered") {
		t.Errorf("with its endpoints the screen is\n%s", got)
	}
	const want = `[{"address":"10.9.0.1","port":80,"cause":"unanswered","since":"2026-11-22T14:02:07Z"}]`
	if got, err := json.Marshal(sample.Ports[1].Ejected); string(got) != want || err != nil {
		t.Errorf("as JSON: %s, %v", got, err)
	}
}
