package nft

import (
	"net/netip"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/verdict-proxy/verdict/internal/system/ipfamily"
	"github.com/verdict-proxy/verdict/sync/dataplane"
	"github.com/verdict-proxy/verdict/sync/snapshot"
)

// TestUnhealthyEndpoints: of every endpoint that is unhealthy the tables hold an element, of which everything is read
// again; also if the Service's name leaves no room for it in the comment.
func TestUnhealthyEndpoints(t *testing.T) {
	at := time.Date(2026, 11, 26, 12, 3, 4, 0, time.UTC)
	for _, name := range []snapshot.Name{{Namespace: "shop", Name: "web"},
		{Namespace: strings.Repeat("n", 63), Name: strings.Repeat("s", 63)}} {
		web := webService()
		web.Name = name
		st := stateOf(web, 1, 2)
		pool := st.Services[name].Ports[0].Cluster
		pool.Ejected = []snapshot.Unhealthy{{Endpoint: netip.MustParseAddrPort("10.0.0.9:8080"), Cause: snapshot.Refused,
			Since: at.Add(500 * time.Millisecond)}}
		pool.Kept = []snapshot.Unhealthy{{Endpoint: pool.Endpoints[0].AddrPort, Since: at.Add(time.Hour)},
			{Endpoint: pool.Endpoints[1].AddrPort, Cause: snapshot.Resort, Since: at}}
		st.Settings = []string{"second-chance=on", "ping-services=true"}

		var m Model
		m.Load(st)
		l := List(st)
		found := Found{}
		for set := range l[0].Elements {
			for _, e := range l[0].Elements[set] {
				found.Elements[set] = append(found.Elements[set], e.Element)
			}
		}
		if held := DigestsOfElements(ipfamily.IPv4, StructureOf(st, ipfamily.IPv4), &found); held != m.Digests(0) {
			t.Errorf("%v: the digest of the elements is another one than the model's", name)
		}
		if got := SettingsOf(l[1].Elements[SettingsSet]); !slices.Equal(got, st.Settings) {
			t.Errorf("the settings are %q", got)
		}
		var got []dataplane.EndpointHealth
		for _, e := range found.Elements[UnhealthyEndpoints] {
			h, ok := e.Health(&found.Elements[Endpoints][0])
			if len(e.Comment) >= maxComment || !ok {
				t.Errorf("comment %q", e.Comment)
			}
			if bucket := bucketFor(name.String()); e.bucket() != bucket {
				t.Errorf("bucket %d of %q, want %d", e.bucket(), e.Comment, bucket)
			}
			got = append(got, h)
		}
		slices.SortFunc(got, func(a, b dataplane.EndpointHealth) int { return a.Endpoint.Compare(b.Endpoint) })
		var want []dataplane.EndpointHealth
		for i, u := range []snapshot.Unhealthy{pool.Ejected[0], pool.Kept[0], pool.Kept[1]} {
			u.Since = u.Since.Truncate(time.Second)
			// Of the longest names, the slot has no port either.
			port, _ := dataplane.ParsePortName(commentOf(name.String()+":a"), snapshot.TCP)
			want = append(want, dataplane.EndpointHealth{Port: port, Pool: found.Elements[Endpoints][0].ID(), Unhealthy: u,
				Ejected: i == 0})
		}
		slices.SortFunc(want, func(a, b dataplane.EndpointHealth) int { return a.Endpoint.Compare(b.Endpoint) })
		if !reflect.DeepEqual(got, want) {
			t.Errorf("%+v\nwant %+v", got, want)
		}
	}
	for _, text := range []string{"", "a/b, ejected", "a/b, ejected, tired since 2026-11-26T12:03:04Z",
		"a/b, kept, refused",
		"a/b, gone, refused since 2026-11-26T12:03:04Z", "b, kept, refused since 2026-11-26T12:03:04Z"} {
		e := memberElement(UnhealthyEndpoints, 1, netip.MustParseAddrPort("10.0.0.9:8080"))
		if e.Comment = text; text == "" || len(e.Comment) > 0 {
			if h, ok := e.Health(nil); ok {
				t.Errorf("%q is read as %+v", text, h)
			}
		}
	}
}

// TestUnhealthyEndpointsChange: what changes of an endpoint's health alone is one element.
func TestUnhealthyEndpointsChange(t *testing.T) {
	at := time.Date(2026, 11, 26, 12, 3, 4, 0, time.UTC)
	state := func(since time.Time, settings ...string) *dataplane.State {
		st := stateOf(webService(), 1, 2)
		pool := st.Services[webService().Name].Ports[0].Cluster
		pool.Kept = []snapshot.Unhealthy{{Endpoint: pool.Endpoints[0].AddrPort, Since: since}}
		st.Settings = settings
		return st
	}
	var m Model
	m.Plan(state(at, "a=1", "b=1"), dataplane.Change{}, 0)
	change := dataplane.Change{Services: []snapshot.Name{webService().Name}, Globals: true}
	for _, c := range []struct {
		st                       *dataplane.State
		added, replaced, removed int
	}{
		{state(at.Add(time.Millisecond), "a=1", "b=1"), 0, 0, 0},
		{state(at.Add(time.Second), "a=1", "b=1"), 0, 1, 0},
		{state(at.Add(time.Second), "a=2", "b=1", "c=1"), 2, 2, 0}, // of both tables
		{stateOf(webService(), 1, 2), 0, 0, 1 + 6},
	} {
		if c.added == 0 && c.removed > 0 {
			c.st.Settings = nil
		}
		added, replaced, removed := m.Plan(c.st, change, 0).Counts()
		if added != c.added || replaced != c.replaced || removed != c.removed {
			t.Errorf("%d added, %d replaced, %d removed; want %+v", added, replaced, removed, c)
		}
	}
}
