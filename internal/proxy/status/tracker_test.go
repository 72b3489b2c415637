package status

import (
	"encoding/json"
	"errors"
	"fmt"
	"net/http/httptest"
	"net/netip"
	"net/url"
	"reflect"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/verdict-proxy/verdict/internal/system/testkit"
	"github.com/verdict-proxy/verdict/sync/dataplane"
	"github.com/verdict-proxy/verdict/sync/reconcile"
	"github.com/verdict-proxy/verdict/sync/snapshot"
)

func name(text string) snapshot.Name {
	n, err := ParseName(text)
	if err != nil {
		panic(err)
	}
	return n
}

// TestDigestFields: every field of a Service and its slices changes the digest, but for when a change began,
// its version, and the names of pods, which only nodes with records read.
func TestDigestFields(t *testing.T) {
	testkit.Compares(t, func(a, b *snapshot.Service) bool { return Of(a, nil) == Of(b, nil) }, "Version")
	svc := testkit.Filled[snapshot.Service]()
	of := func(sl *snapshot.Slice) Digest { return Of(svc, map[string]*snapshot.Slice{"x": sl}) }
	testkit.Compares(t, func(a, b *snapshot.Slice) bool { return of(a) == of(b) }, "Triggered", "Version",
		"Endpoints[].Pod")
	if Of(nil, nil) != 0 {
		t.Error("nothing has a digest")
	}
}

// world is a Tracker and a cluster that it follows.
type world struct {
	*Tracker
	snap        *snapshot.Snapshot
	progress    snapshot.Progress
	quarantined []reconcile.Quarantined
	unread      []Unread
}

func newWorld() *world {
	w := &world{snap: snapshot.New()}
	w.Tracker = New(Options{Version: "v1", Backend: "nftables", Node: "n",
		Progress:    func() snapshot.Progress { return w.progress },
		Quarantined: func() []reconcile.Quarantined { return w.quarantined },
		Unread:      func() []Unread { return w.unread },
		Ejected: func() []EjectedEndpoint {
			return []EjectedEndpoint{{"shop/web", "10.0.0.1:80", "refused", time.Time{}}}
		}})
	return w
}

// apply has the loop program a delta.
func (w *world) apply(d snapshot.Delta) {
	c := w.snap.Apply(d)
	w.Listener().InSync(reconcile.InSync{Snapshot: w.snap, Change: c})
}

func service(text string, ready bool) snapshot.Delta {
	n := name(text)
	sl := snapshot.Name{Namespace: n.Namespace, Name: n.Name + "-1"}
	return snapshot.Delta{
		Services: map[snapshot.Name]*snapshot.Service{n: {Name: n}},
		Slices: map[snapshot.Name]*snapshot.Slice{sl: {Name: sl, Service: n.Name,
			Endpoints: []snapshot.Endpoint{{Node: "a", Ready: ready}}}},
	}
}

func gone(text string) snapshot.Delta {
	return snapshot.Delta{Services: map[snapshot.Name]*snapshot.Service{name(text): nil}}
}

// TestLedger: the status says where the ledger ends now, and nothing if the node keeps none.
func TestLedger(t *testing.T) {
	w := newWorld()
	if l := w.Status().Ledger; l != nil {
		t.Errorf("without a ledger: %+v", l)
	}
	end := Ledger{}
	w.o.Ledger = func() Ledger { return end }
	for _, want := range []string{`"ledger":{"record":0,"dir":""}`,
		`"ledger":{"record":7,"digest":"ab","missing":2,"error":"full","dir":"/l"}`} {
		text, err := json.Marshal(w.Status())
		if err != nil || !strings.Contains(string(text), want) {
			t.Errorf("%s, error %v; want %s", text, err, want)
		}
		end = Ledger{7, "ab", 2, "full", "/l"}
	}
}

// TestDigestOfAll: two nodes that got to the same objects by other ways have the same digests; a readiness that one has
// not seen, or a Service in quarantine, makes the digest of all and that of the Service differ.
func TestDigestOfAll(t *testing.T) {
	a, b := newWorld(), newWorld()
	for _, d := range []snapshot.Delta{service("shop/web", true), service("shop/cart", true), service("x/y", true)} {
		a.apply(d)
	}
	for _, d := range []snapshot.Delta{service("shop/cart", false), service("z/z", true), service("x/y", true),
		gone("z/z"),
		service("shop/web", true)} {
		b.apply(d)
	}
	if a.Status().Digest == b.Status().Digest {
		t.Error("a readiness makes no difference")
	}
	b.apply(service("shop/cart", true))
	b.apply(snapshot.Delta{Node: &snapshot.Node{Name: "b", Zone: "z"}})
	if x, y := a.Status(), b.Status(); x.Digest != y.Digest || x.Services != 3 || y.Services != 3 {
		t.Errorf("digests %v and %v", x, y)
	}
	b.quarantined = []reconcile.Quarantined{{Name: name("shop/cart"), Err: errors.New("no")}}
	one := func(w *world) Digest {
		s, err := w.Answer(url.Values{"service": {"shop/cart", "shop/none"}})
		if err != nil || len(s.Digests) != 1 {
			t.Fatal(s, err)
		}
		return s.Digests[0].Digest
	}
	if a.Status().Digest == b.Status().Digest || one(a) == one(b) {
		t.Error("a quarantine makes no difference")
	}
	b.quarantined = nil
	if one(a) != one(b) {
		t.Error("it is still different")
	}
}

// TestDigestOfBackends: the digest of a Service that names backends is that of its own slices, as whoever reads the API
// computes it, though nodes program those of its backends.
func TestDigestOfBackends(t *testing.T) {
	w := newWorld()
	d := service("edge/db", true)
	n := name("edge/db")
	d.Services[n].Backends = &snapshot.Backends{Ports: []snapshot.PortBackends{{To: []snapshot.Backend{
		{Service: name("shop/db"), Port: 80, Weight: 1}}}}}
	holds := func(of snapshot.Delta) bool {
		g := Goal{n, Versions{"9", "9"}, Of(d.Services[n], map[string]*snapshot.Slice{"x": of.Slices[name("edge/db-1")]})}
		return w.Holds([]Goal{g})[0]
	}
	w.apply(d)
	later := snapshot.Delta{Slices: service("edge/db", false).Slices}
	if !holds(d) || holds(later) {
		t.Error("the digest is not that of the own slices")
	}
	w.apply(service("shop/db", true))
	if !holds(d) {
		t.Error("a backend's slice changes it")
	}
	if w.apply(later); !holds(later) {
		t.Error("a change of the own slice alone does not")
	}
}

// TestUnread: manifests that cannot be read are named, if they are not too many.
func TestUnread(t *testing.T) {
	w := newWorld()
	if s := w.Status(); len(s.Unread) > 0 {
		t.Errorf("%+v", s.Unread)
	}
	for range 2 * maxNamed {
		w.unread = append(w.unread, Unread{File: "a.yaml", Error: strings.Repeat("x", 2*maxText)})
	}
	s := w.Status()
	if len(s.Unread) != maxNamed || s.Unread[0].File != "a.yaml" || len(s.Unread[0].Error) > maxText+len("…") {
		t.Errorf("%d are named, such as %+v", len(s.Unread), s.Unread[0])
	}
}

// TestStatus: failures, drift and what waits are told until they are over, in bounded texts, and survive JSON.
func TestStatus(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld()
		if s := w.Status(); s.First != nil || s.Failing != nil || s.Drift.Checked != nil {
			t.Errorf("before the first: %+v", s)
		}
		w.apply(service("shop/web", true))
		w.progress = snapshot.Progress{Received: snapshot.Versions{Services: "9", Slices: "8"},
			Programmed: snapshot.Versions{Services: "7", Slices: "6"},
			Waiting:    snapshot.Waiting{Services: 1, Slices: 2, Since: time.Now()}}
		began := time.Now()
		l := w.Listener()
		l.Failed(reconcile.Failure{Err: errors.New("x"), Replan: true})
		if w.Status().Failing != nil {
			t.Error("a transaction that is planned anew counts as failing")
		}
		long := make([]byte, 5000)
		l.Failed(reconcile.Failure{Err: errors.New(string(long))})
		time.Sleep(2 * time.Second)
		l.Failed(reconcile.Failure{Err: errors.New("no room")})
		l.Checked(reconcile.Check{Found: make([]string, 20)})
		s := w.Status()
		if s.Failing.Error != "no room" || !s.Failing.Since.Equal(began) || s.Pending != (Pending{1, 2, 2}) ||
			!s.Drift.Open() || s.Drift.Found != 20 || len(s.Drift.Last) != maxFindings {
			t.Errorf("%+v", s)
		}
		time.Sleep(time.Second)
		l.Written(reconcile.Transaction{Foreign: 20})
		w.apply(service("shop/web", false))
		if s = w.Status(); s.Drift.Open() || s.Failing != nil {
			t.Errorf("it is over: %+v", s)
		}
		r := httptest.NewRecorder()
		w.ServeHTTP(r, httptest.NewRequest("GET", "/status?digests=all", nil))
		var back Status
		if err := json.Unmarshal(r.Body.Bytes(), &back); err != nil {
			t.Fatal(err)
		}
		if back.Programmed != s.Programmed || back.Digest != s.Digest || len(back.Digests) != 1 ||
			back.Digests[0].Digest == 0 || !reflect.DeepEqual(back.Ejected.Endpoints[0].Endpoint, "10.0.0.1:80") {
			t.Errorf("%s becomes %+v", r.Body, back)
		}
	})
}

// TestPages: all digests come in pages of a bounded size, each Service once; wrong questions are refused.
func TestPages(t *testing.T) {
	w := newWorld()
	for i := range pageSize + 3 {
		w.apply(service(fmt.Sprintf("ns/s%05d", i), true))
	}
	query, seen := url.Values{"digests": {"all"}}, map[string]bool{}
	for range 3 {
		s, err := w.Answer(query)
		if err != nil || len(s.Digests) > pageSize {
			t.Fatal(len(s.Digests), err)
		}
		for _, d := range s.Digests {
			seen[d.Service] = true
		}
		if s.Next == "" {
			break
		}
		query.Set("after", s.Next)
	}
	if len(seen) != pageSize+3 {
		t.Errorf("%d Services in all pages", len(seen))
	}
	for _, wrong := range []url.Values{{"service": {"x"}}, {"digests": {"some"}}, {"digests": {"all"}, "after": {"/"}},
		{"service": make([]string, maxAsked+1)}} {
		if _, err := w.Answer(wrong); err == nil {
			t.Errorf("%.60v is answered", wrong)
		}
	}
}

// BenchmarkInSync measures what the digests cost the loop, and who asks: of a first list of 10,000 Services with 10
// endpoints each, and of one Service with 10,000 endpoints that changes.
func BenchmarkInSync(b *testing.B) {
	slice := func(n snapshot.Name, endpoints int) *snapshot.Slice {
		sl := &snapshot.Slice{Name: n, Service: n.Name, Ports: []snapshot.SlicePort{{Name: "http", Port: 80}}}
		for i := range endpoints {
			sl.Endpoints = append(sl.Endpoints, snapshot.Endpoint{Node: "node-17", Ready: true, Serving: true,
				Addr: netip.AddrFrom4([4]byte{10, byte(i >> 16), byte(i >> 8), byte(i)}), ForZones: []string{"zone-a"}})
		}
		return sl
	}
	cluster := func(services, endpoints int) (*snapshot.Snapshot, snapshot.Change) {
		s, d := snapshot.New(), snapshot.Delta{Services: map[snapshot.Name]*snapshot.Service{},
			Slices: map[snapshot.Name]*snapshot.Slice{}}
		for i := range services {
			n := snapshot.Name{Namespace: "shop", Name: fmt.Sprintf("service-%05d", i)}
			d.Services[n] = &snapshot.Service{Name: n, ClusterIPs: []netip.Addr{netip.MustParseAddr("10.96.0.1")},
				Ports: []snapshot.Port{{Name: "http", Port: 80}}}
			d.Slices[n] = slice(n, endpoints)
		}
		return s, s.Apply(d)
	}
	for _, c := range []struct{ services, endpoints int }{{10000, 10}, {1, 10000}, {1, 10}} {
		b.Run(fmt.Sprintf("%dx%d", c.services, c.endpoints), func(b *testing.B) {
			s, change := cluster(c.services, c.endpoints)
			for b.Loop() {
				w := newWorld()
				w.inSync(reconcile.InSync{Snapshot: s, Change: change})
			}
		})
		b.Run(fmt.Sprintf("asked/%dx%d", c.services, c.endpoints), func(b *testing.B) {
			s, change := cluster(c.services, c.endpoints)
			for b.Loop() {
				w := newWorld()
				w.inSync(reconcile.InSync{Snapshot: s, Change: change})
				w.Status()
			}
		})
	}
}

// TestRecent: the last transactions are told, the newest first, with the first few of the Services that they changed,
// also of one that is gone.
func TestRecent(t *testing.T) {
	w := newWorld()
	web, cart := &dataplane.Service{Name: name("shop/web")}, &dataplane.Service{Name: name("shop/cart")}
	for i := range maxRecent + 5 {
		w.Listener().Committed(reconcile.Commit{Before: []*dataplane.Service{web, nil, cart, cart, nil},
			After:   []*dataplane.Service{web, nil, nil, cart, web},
			Receipt: dataplane.Receipt{Added: i, Plan: time.Millisecond, Commit: 2 * time.Millisecond}})
	}
	recent := w.Status().Recent
	if len(recent) != maxRecent || recent[0].Added != maxRecent+4 || recent[maxRecent-1].Added != 5 {
		t.Fatalf("the last transactions are %+v", recent)
	}
	want := Change{At: recent[0].At, Services: []string{"shop/web", "shop/cart", "shop/cart"}, Count: 4,
		Added: maxRecent + 4, Seconds: 0.003}
	if !reflect.DeepEqual(recent[0], want) {
		t.Errorf("the last one is %+v; want %+v", recent[0], want)
	}
}

// TestHolds: a node has reached a goal by the digest of the Service, or by the versions of both resources; not while
// its kernel rejects the Service, and never by the digest of a Service that it does not have.
func TestHolds(t *testing.T) {
	w := newWorld()
	web, gone := service("shop/web", true), name("shop/gone")
	w.apply(web)
	d := Of(web.Services[name("shop/web")], w.snap.Slices[name("shop/web")])
	w.progress.Programmed = snapshot.Versions{Services: "10", Slices: "20"}
	at := func(services, slices snapshot.Version) Versions { return Versions{services, slices} }
	goals := []Goal{
		{name("shop/web"), at("10", "30"), d},
		{name("shop/web"), at("10", "30"), d + 1},
		{name("shop/web"), at("10", "20"), d + 1},
		{name("shop/web"), at("11", "20"), 0},
		{gone, at("10", "21"), 0},
		{gone, at("9", "19"), 7},
	}
	if got, want := w.Holds(goals), []bool{true, false, true, false, false, true}; !reflect.DeepEqual(got, want) {
		t.Errorf("%v; want %v", got, want)
	}
	w.quarantined = []reconcile.Quarantined{{Name: name("shop/web"), Err: errors.New("no")}}
	if got := w.Holds(goals[:3]); !reflect.DeepEqual(got, []bool{false, false, false}) {
		t.Errorf("quarantined: %v", got)
	}
}
