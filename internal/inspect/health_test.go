package inspect

import (
	"context"
	"fmt"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"reflect"
	"strings"
	"testing"
	"time"

	"github.com/verdict-proxy/verdict/internal/lab/labtest"
	"github.com/verdict-proxy/verdict/internal/terminal"
	"github.com/verdict-proxy/verdict/sync/dataplane"
	"github.com/verdict-proxy/verdict/sync/snapshot"
)

func serveHealth(t *testing.T, answer func(http.ResponseWriter)) netip.AddrPort {
	t.Helper()
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.Method != http.MethodGet || r.URL.Path != "/outliers" {
			t.Errorf("the request is %s %s", r.Method, r.URL)
		}
		answer(w)
	}))
	t.Cleanup(server.Close)
	addr, err := netip.ParseAddrPort(strings.TrimPrefix(server.URL, "http://"))
	labtest.Check(t, err)
	return addr
}

func TestLoadOutliers(t *testing.T) {
	addr := serveHealth(t, func(w http.ResponseWriter) {
		fmt.Fprint(w, `{"services":[{"service":"shop/web","endpoints":[
			{"endpoint":"10.0.0.2:80","cause":"refused","since":"2026-11-22T10:00:01.5Z","ejected":true},
			{"endpoint":"10.0.0.1:80","cause":"unanswered","since":"2026-11-22T10:00:00Z","nextProbe":"2026-11-22T10:00:09Z"},
			{"endpoint":"10.0.0.2:80","cause":"refused","since":"2026-11-22T11:00:00Z"}]}]}`)
	})
	at := time.Date(2026, 11, 22, 10, 0, 0, 0, time.UTC)
	want := map[snapshot.Name]*snapshot.Health{{Namespace: "shop", Name: "web"}: {Unhealthy: []snapshot.Unhealthy{
		{Endpoint: netip.MustParseAddrPort("10.0.0.1:80"), Since: at},
		{Endpoint: netip.MustParseAddrPort("10.0.0.2:80"), Cause: snapshot.Refused, Since: at.Add(1500 * time.Millisecond)},
	}}}
	for _, a := range []netip.AddrPort{addr, netip.AddrPortFrom(netip.IPv4Unspecified(), addr.Port())} {
		got, err := LoadOutliers(t.Context(), a)
		if health := healthOf(got); err != nil || !reflect.DeepEqual(health, want) {
			t.Errorf("from %v: %+v, %v", a, health, err)
		}
		if len(got) != 3 || !got[0].Ejected || got[1].Ejected || !got[1].NextProbe.Equal(at.Add(9*time.Second)) {
			t.Errorf("from %v: %+v", a, got)
		}
	}
}

// TestLoadOutliersErrors: whatever answers at that address, the error says it, is short, and comes in time.
func TestLoadOutliersErrors(t *testing.T) {
	defer func(d time.Duration) { healthTimeout = d }(healthTimeout)
	healthTimeout = time.Minute // the largest report takes seconds with the race detector, on a busy machine
	long := strings.Repeat("x", 1<<20)
	for want, answer := range map[string]func(http.ResponseWriter){
		"status 404":                func(w http.ResponseWriter) { w.WriteHeader(http.StatusNotFound) },
		"the report cannot be read": func(w http.ResponseWriter) { fmt.Fprint(w, "ok") },
		"is no namespace/name": func(w http.ResponseWriter) {
			fmt.Fprintf(w, `{"services":[{"service":"%s"}]}`, long)
		},
		`is no cause`:                 func(w http.ResponseWriter) { fmt.Fprintf(w, endpointJSON, "10.0.0.1:80", long) },
		"unexpected EOF":              func(w http.ResponseWriter) { fmt.Fprint(w, strings.Repeat(" ", maxHealthBytes)) },
		"the report cannot be read: ": func(w http.ResponseWriter) { fmt.Fprintf(w, endpointJSON, "nowhere", "refused") },
	} {
		addr := serveHealth(t, answer)
		got, err := LoadOutliers(t.Context(), addr)
		if err == nil || !strings.Contains(err.Error(), want) || got != nil || len(err.Error()) > 400 {
			t.Errorf("%v, %.500v; want %s", got, err, want)
		}
	}
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	silent := serveHealth(t, func(http.ResponseWriter) { time.Sleep(300 * time.Millisecond) })
	if _, err := LoadOutliers(ctx, silent); err == nil {
		t.Error("a server that does not answer is no error")
	}
}

const endpointJSON = `{"services":[{"service":"a/b","endpoints":[{"endpoint":"%s","cause":"%s"}]}]}`

// TestTruncatedHealth: what there is is used, and that there is more is said.
func TestTruncatedHealth(t *testing.T) {
	addr := serveHealth(t, func(w http.ResponseWriter) {
		fmt.Fprint(w, `{"services":[{"service":"a/b","endpoints":[{"endpoint":"10.0.0.1:80","cause":"refused"}]}],
			"truncated":true}`)
	})
	got, err := LoadOutliers(t.Context(), addr)
	if len(got) != 1 || err == nil || !strings.Contains(err.Error(), "only the first endpoints") {
		t.Errorf("%v, %v", got, err)
	}
}

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
			Services: map[snapshot.Name]*snapshot.Service{name: {Name: name, ClusterIPs: []netip.Addr{unusedAddrs[0]},
				Ports: []snapshot.Port{{Protocol: snapshot.TCP, Port: 80}}}},
			Slices: map[snapshot.Name]*snapshot.Slice{name: sl},
			Health: map[snapshot.Name]*snapshot.Health{name: {Unhealthy: []snapshot.Unhealthy{
				{Endpoint: netip.MustParseAddrPort("10.0.0.1:80"), Since: at},
				{Endpoint: netip.MustParseAddrPort("10.0.0.2:80"), Cause: snapshot.Refused, Since: at}}}}})
		o := &Objects{Snap: snap, Config: dataplane.Config{SecondChance: test.chance}}
		a := &Answer{}
		a.fillObjects(dataplane.Explain(o.Config, snap, dataplane.Question{Source: netip.MustParseAddr("10.0.0.9"),
			Key: dataplane.Key{Addr: unusedAddrs[0], Protocol: snapshot.TCP, Port: 80}}), o, &Policy{})
		view := a.JSON(false).Objects
		kept, left := map[string]string{}, map[string]string{}
		for _, e := range view.Endpoints {
			if e.Unhealthy != "" {
				kept[fmt.Sprint(e.Address, ":", e.Port)] = e.Unhealthy
			}
		}
		for _, e := range view.LeftOut {
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
	outlier := func(addr string, ejected bool) Outlier {
		o := Outlier{Service: snapshot.Name{Namespace: "team", Name: "web-1"}, Ejected: ejected}
		o.Endpoint, o.Since = netip.MustParseAddrPort(addr), since
		return o
	}
	_, s, _ := newFakeSampler(3)
	labtest.Check(t, s.Sample(t.Context(), nil, nil, time.Second, false))
	sample := s.Result(ByName, time.Second)
	sample.addOutliers([]Outlier{outlier("10.9.0.1:80", true), outlier("10.9.0.2:80", false)})
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
	want := []OutlierJSON{{Address: "10.9.0.1", Port: 80, Cause: "unanswered", Since: since}}
	if got := sample.JSON(len(sample.Ports)).Ports[1].Ejected; !reflect.DeepEqual(got, want) {
		t.Errorf("as JSON: %+v", got)
	}
}
