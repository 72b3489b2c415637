package main

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/spf13/pflag"

	"github.com/verdict-proxy/verdict/internal/answers/inspect"
	"github.com/verdict-proxy/verdict/internal/lab/labtest"
	"github.com/verdict-proxy/verdict/internal/proxy/backends"
	"github.com/verdict-proxy/verdict/internal/proxy/config"
	"github.com/verdict-proxy/verdict/sync/dataplane"
	"github.com/verdict-proxy/verdict/sync/reconcile"
	"github.com/verdict-proxy/verdict/sync/snapshot"
)

// toy is a backend whose kernel is a map: it knows of one pool for each frontend, and counts what a test says.
type toy struct {
	settings dataplane.Settings
	held     map[dataplane.Key]toyFrontend
}

type toyFrontend struct {
	port        dataplane.PortName
	pool        *dataplane.Pool
	connections uint64
}

var (
	_ reconcile.Inspector = (*toy)(nil)
	_ reconcile.Writer    = (*toy)(nil)
)

func (t *toy) Apply(want *dataplane.State, change dataplane.Change) (dataplane.Receipt, error) {
	t.held, t.settings = toyFrontends(want), dataplane.Settings{LocalhostNodePorts: want.LocalhostNodePorts}
	return dataplane.Receipt{Added: len(t.held)}, nil
}

func (t *toy) Check() ([]string, time.Duration, error) { return nil, 0, nil }

func (t *toy) Remove() error {
	t.held = nil
	return nil
}

func (t *toy) open(context.Context, backends.OpenOptions) (*backends.Opened, error) {
	return &backends.Opened{Writer: t, Mode: "toy", Close: t.Close}, nil
}

// toyFrontends gives what a State asks for, for packets from anyone.
func toyFrontends(st *dataplane.State) map[dataplane.Key]toyFrontend {
	out := map[dataplane.Key]toyFrontend{}
	for _, s := range st.Services {
		for _, p := range s.Ports {
			for _, f := range p.Frontends {
				out[f.Key] = toyFrontend{port: p.Name, pool: f.Routes[len(f.Routes)-1].Pool}
			}
		}
	}
	return out
}

func (t *toy) Name() string                                          { return "toy" }
func (t *toy) Close() error                                          { return nil }
func (t *toy) Present(context.Context) (bool, error)                 { return len(t.held) > 0, nil }
func (t *toy) Settings(context.Context) (*dataplane.Settings, error) { return &t.settings, nil }

func (t *toy) Trace(_ context.Context, p dataplane.Packet, _ dataplane.LocalNode) (*dataplane.Trace, error) {
	k := dataplane.Key{Addr: p.Destination, Protocol: p.Protocol, Port: p.Port}
	f, ok := t.held[k]
	step := dataplane.TraceStep{Chain: "toys", Rule: "lookup " + k.String(), Matched: ok}
	out := &dataplane.Trace{Steps: []dataplane.TraceStep{step}}
	switch {
	case !ok:
		out.Endings = []dataplane.Ending{{Outcome: dataplane.Untouched, Share: 1, Of: 1}}
		return out, nil
	case len(f.pool.Endpoints) == 0:
		out.Cause, out.Endings = dataplane.NoEndpoints, []dataplane.Ending{{Outcome: dataplane.Rejected, Share: 1, Of: 1}}
	default:
		out.Cause = dataplane.FrontendFound
		for _, ep := range f.pool.Endpoints {
			out.Endings = append(out.Endings, dataplane.Ending{Outcome: dataplane.Sent, Endpoint: ep.AddrPort, Share: 1,
				Of: len(f.pool.Endpoints)})
		}
	}
	out.Port, out.Connections = f.port, &f.connections
	return out, nil
}

func (t *toy) Differences(_ context.Context, wanted *dataplane.State) (*dataplane.Differences, error) {
	d := &dataplane.Differences{Quiet: true, Tables: []dataplane.InspectedTable{
		{Family: "toy", Name: "the box", There: len(t.held) > 0, Elements: len(t.held), Unit: "toys"}}}
	if wanted == nil {
		return d, nil
	}
	want := toyFrontends(wanted)
	differ := func(a, b map[dataplane.Key]toyFrontend, wanted bool) {
		for _, k := range slices.SortedFunc(maps.Keys(a), dataplane.Key.Compare) {
			if _, both := b[k]; !both {
				d.Differences = append(d.Differences, dataplane.Difference{Wanted: wanted, Family: "toy", Object: k.String(),
					Line: "toy " + k.String(), Port: a[k].port})
			}
		}
	}
	differ(t.held, want, false)
	differ(want, t.held, true)
	return d, nil
}

func (t *toy) Print(_ context.Context, w io.Writer) error {
	_, err := fmt.Fprintln(w, len(t.held), "frontends")
	return err
}

func (t *toy) Counters(_ context.Context, ask dataplane.CountersAsked) (*dataplane.Counters, error) {
	out := &dataplane.Counters{Version: "1", Whole: true}
	for k, f := range t.held {
		c := dataplane.FrontendCount{Counted: dataplane.Counted{Key: k}, Endpoints: len(f.pool.Endpoints),
			Packets: f.connections}
		if ask.All || slices.ContainsFunc(ask.Frontends, func(a dataplane.FrontendCount) bool { return a.Key == k }) {
			out.Frontends = append(out.Frontends, dataplane.NamedCount{FrontendCount: c, Port: f.port})
		}
	}
	for _, a := range ask.Endpoints {
		for i, ep := range t.held[a.Key].pool.Endpoints {
			out.Endpoints = append(out.Endpoints, dataplane.EndpointCount{Endpoint: ep.AddrPort,
				Place: dataplane.Place{Slot: uint32(i)}})
		}
	}
	return out, nil
}

// TestToyBackend: a backend is one package and one line that registers it. Its Writer applies a State, and explain,
// verify, diff and top answer from its Inspector as from any other.
func TestToyBackend(t *testing.T) {
	host := labtest.NewHost(t, labtest.NewNet(t), "node")
	flags := explainFrom["cluster"]
	var o inspect.ObjectFlags
	f := pflag.NewFlagSet("", pflag.ContinueOnError)
	o.AddFlags(f)
	labtest.Check(t, f.Parse(flags))
	var st *dataplane.State
	labtest.Check(t, host.Do(func() error {
		objects, err := o.Load(t.Context(), nil, true)
		if err == nil {
			st, _ = dataplane.Compute(objects.Config, objects.Snap)
		}
		return err
	}))
	box := &toy{}
	all := backends.All
	t.Cleanup(func() { backends.All = all })
	backends.All = append(slices.Clone(all), backends.Backend{Name: "toy", Open: box.open, Inspect: box.inspect})
	opened, err := backends.Open(t.Context(), backends.OpenOptions{Settings: &config.Settings{Backend: "toy"}})
	labtest.Check(t, err)
	_, err = opened.Apply(st, dataplane.Change{Globals: true})
	labtest.Check(t, err)

	run := func(want int, args ...string) string {
		t.Helper()
		out, status := "", 0
		labtest.Check(t, host.Do(func() (err error) {
			out, err = command(args...)
			if s, ok := err.(exitStatus); ok {
				status, err = int(s), nil
			}
			return err
		}))
		if status != want {
			t.Errorf("%v: %d\n%s", args, status, out)
		}
		return out
	}
	shows := func(out string, wants ...string) {
		t.Helper()
		for _, want := range wants {
			if !strings.Contains(out, want) {
				t.Errorf("%q is missing:\n%s", want, out)
			}
		}
	}
	shows(run(0, "explain", "10.244.1.7", "10.96.20.3:8080", "--live", "--trace"), "shop/catalog:http",
		"0 connections so far",
		"> toys", "lookup 10.96.20.3:8080/tcp")
	shows(run(exitSame, "verify"), "the box "+fmt.Sprint(len(box.held))+" toys", "right:")
	shows(run(exitSame, append([]string{"diff"}, flags...)...), "same:")
	shows(run(0, "top", "--once", "--interval", "100ms", "--service", "shop/catalog"), "shop/catalog:http")

	name := snapshot.Name{Namespace: "shop", Name: "catalog"}
	maps.DeleteFunc(box.held, func(_ dataplane.Key, f toyFrontend) bool { return f.port.Service == name })
	var got inspect.ComparisonJSON
	labtest.Check(t, json.Unmarshal([]byte(run(exitDiffers, append([]string{"diff", "--json"}, flags...)...)), &got))
	if len(got.Services) != 1 || got.Services[0].Service != name.String() ||
		got.Services[0].Missing != len(got.Differences) {
		t.Errorf("%+v", got)
	}
	explain := append([]string{"explain", "10.244.1.7", "10.96.20.3:8080", "--live"}, flags...)
	shows(run(0, explain...), "does something else", "the objects say endpoint, the kernel untouched")
}

func (t *toy) inspect(context.Context, backends.InspectOptions) (reconcile.Inspector, error) {
	return t, nil
}
