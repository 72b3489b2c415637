package status

import (
	"errors"
	"fmt"
	"log/slog"
	"net/http/httptest"
	"net/netip"
	"net/url"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/verdict-proxy/verdict/internal/system/testkit"
	"github.com/verdict-proxy/verdict/sync/dataplane"
	"github.com/verdict-proxy/verdict/sync/reconcile"
	"github.com/verdict-proxy/verdict/sync/snapshot"
)

// pen is a Writer that writes nowhere, rejects Services called bad, and fails when it is told to.
type pen struct {
	mu   sync.Mutex
	fail error
}

func (p *pen) Apply(want *dataplane.State, _ dataplane.Change) (r dataplane.Receipt, err error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if bad := name("shop/bad"); want.Services[bad] != nil {
		return r, &dataplane.Refused{Services: map[snapshot.Name]error{bad: errors.New("too many for a set")}}
	}
	return r, p.fail
}

func (p *pen) Check() ([]string, time.Duration, error) { return nil, 0, nil }
func (p *pen) Remove() error                           { return nil }

func (p *pen) set(err error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.fail = err
}

var addr = netip.MustParseAddr

// objects is a Service at a cluster IP with one port, and endpoints on these nodes, 10.1.N.1 and up.
func objects(n int, text string, nodes ...string) snapshot.Delta {
	svc := &snapshot.Service{Name: name(text), Age: snapshot.Age{Created: int64(n) + 1},
		ClusterIPs: []netip.Addr{addr(fmt.Sprintf("10.96.0.%d", n))},
		Ports:      []snapshot.Port{{Name: "http", Protocol: snapshot.TCP, Port: 80}}}
	of := snapshot.Name{Namespace: svc.Name.Namespace, Name: svc.Name.Name + "-1"}
	sl := &snapshot.Slice{Name: of, Service: svc.Name.Name,
		Ports: []snapshot.SlicePort{{Name: "http", Protocol: snapshot.TCP, Port: 8080}}}
	for i, node := range nodes {
		sl.Endpoints = append(sl.Endpoints, snapshot.Endpoint{Addr: addr(fmt.Sprintf("10.1.%d.%d", n, i+1)), Node: node,
			Ready: true, Serving: true})
	}
	return snapshot.Delta{Services: map[snapshot.Name]*snapshot.Service{svc.Name: svc},
		Slices: map[snapshot.Name]*snapshot.Slice{of: sl}}
}

// shopping is a Board beside a loop.
type shopping struct {
	*Board
	pen   pen
	queue *snapshot.Queue
}

func newShopping(t *testing.T) *shopping {
	s := &shopping{queue: snapshot.NewQueue(1)}
	loop := &reconcile.Loop{Queue: s.queue, Writer: &s.pen, Log: slog.New(slog.DiscardHandler),
		Planner: dataplane.NewPlanner(dataplane.Config{NodeName: "here", SecondChance: snapshot.SecondChanceOn})}
	tracker := New(Options{Node: "here", Progress: s.queue.Progress, Quarantined: loop.Quarantined})
	s.Board = NewBoard(BoardOptions{Backend: "nftables", Status: tracker.Status, Queued: s.queue.Queued,
		Quarantined: loop.Quarantined, Unscheduled: func() []reconcile.Quarantined {
			return []reconcile.Quarantined{{Name: name("shop/ipvs"), Err: errors.New("no module")}}
		}})
	loop.Listeners = []reconcile.Listener{tracker.Listener(), s.Listener()}
	ended := make(chan error, 1)
	go func() { ended <- loop.Run(t.Context()) }()
	t.Cleanup(func() { <-ended })
	return s
}

// says is what the board says of the Services that a query asks for, one a line.
func (s *shopping) says(query string) string {
	values, err := url.ParseQuery(query)
	if err != nil {
		return err.Error()
	}
	list, err := s.List(values)
	if err != nil {
		return err.Error()
	}
	var lines []string
	for i := range list.Services {
		v := &list.Services[i]
		lines = append(lines, fmt.Sprintf("%s %s %d/%d %s", v.Service, v.State, v.Usable, v.Endpoints, v.Why))
	}
	return strings.Join(lines, "\n")
}

// TestBoard: the board says of each Service how it fares, before and after it is programmed.
func TestBoard(t *testing.T) {
	s := newShopping(t)
	drops := objects(3, "shop/drops", "there")
	drops.Services[name("shop/drops")].InternalLocal = true
	thief := objects(1, "shop/thief", "here")
	thief.Services[name("shop/thief")].Age.Created = 99
	shares := objects(8, "shop/shares")
	shares.Services[name("shop/shares")].Backends = &snapshot.Backends{For: "Gateway shop/x",
		Ports: []snapshot.PortBackends{{Port: "http", To: []snapshot.Backend{
			{Service: name("shop/ejects"), Port: 80, Weight: 3}, {Service: name("shop/none"), Port: 80, Weight: 1}}}}}
	var all snapshot.Delta
	for _, d := range []snapshot.Delta{shares, objects(1, "shop/good", "here", "there"), objects(2, "shop/none"), drops,
		objects(4, "shop/ejects", "here", "there", "there"), objects(5, "shop/bad", "here"), thief,
		objects(6, "shop/ipvs", "here"), {Health: map[snapshot.Name]*snapshot.Health{name("shop/ejects"): {
			Unhealthy: []snapshot.Unhealthy{{Endpoint: netip.MustParseAddrPort("10.1.4.2:8080")}}}}}} {
		all.Merge(d)
	}
	s.queue.Put(all)
	if got := s.says("name=good"); got != "shop/good waiting 0/0 not programmed yet" {
		t.Errorf("before: %s", got)
	}
	s.queue.Synced()
	want := `shop/bad rejected 0/1 too many for a set
shop/drops drops 0/1 no endpoint on this node
shop/ejects ejects 2/3 1 ejected
shop/good programmed 2/2 
shop/ipvs unscheduled 1/1 IPVS does not schedule it: no module
shop/none refuses 0/0 no endpoint
shop/shares refuses 3/3 25% of connections: backends without endpoints
shop/thief unaddressed 0/1 other Services have its addresses`
	says := func() string { return s.says("") }
	testkit.Eventually(t, time.Minute, "all are programmed", func() bool { return says() == want }, says)

	keeps := objects(9, "shop/keeps", "there")
	keeps.Services[name("shop/keeps")].LoadBalancerIPs = []netip.Addr{addr("203.0.113.9")}
	keeps.Services[name("shop/keeps")].ClientAddress = snapshot.ClientAddressKeep
	s.queue.Put(keeps)
	kept := func() string { return s.says("name=keeps") }
	testkit.Eventually(t, time.Minute, "it is masqueraded", func() bool {
		return kept() == "shop/keeps masquerades 1/1 this node's address is on no Ethernet device"
	}, kept)
	if c := s.o.Status().ClientAddresses; c == nil || c.Kept != 0 || c.Masqueraded != 1 || len(c.Services) != 1 ||
		c.Services[0].Service != "shop/keeps" || c.Services[0].Reason != "device" {
		t.Errorf("of the clients' addresses: %+v", c)
	}
	s.queue.Put(snapshot.Delta{Link: &snapshot.Link{Device: "eth0", Nodes: map[string]snapshot.Neighbour{
		"there": {Addrs: [2]netip.Addr{addr("192.0.2.3")}}}}})
	testkit.Eventually(t, time.Minute, "it is kept", func() bool { return kept() == "shop/keeps programmed 1/1 " }, kept)
	if c := s.o.Status().ClientAddresses; c == nil || c.Kept != 1 || c.Masqueraded != 0 || c.Services != nil {
		t.Errorf("of the clients' addresses: %+v", c)
	}
	s.queue.Put(snapshot.Delta{Services: map[snapshot.Name]*snapshot.Service{name("shop/keeps"): nil}})
	testkit.Eventually(t, time.Minute, "it is gone", func() bool { return s.o.Status().ClientAddresses == nil }, kept)
	if got := s.says("for=true"); !strings.HasPrefix(got, "shop/shares ") || strings.Contains(got, "\n") {
		t.Errorf("with backends that somebody asked for: %s", got)
	}
	s.pen.set(errors.New("no memory"))
	s.queue.Put(objects(7, "store/late", "here"))
	late := func() string { return s.says("namespace=store&trouble=true") }
	testkit.Eventually(t, time.Minute, "it fails", func() bool {
		return late() == "store/late waiting 0/0 not programmed yet: no memory"
	}, late)
	s.pen.set(nil)
	testkit.Eventually(t, time.Minute, "it is programmed", func() bool { return late() == "" }, late)
	s.queue.Put(snapshot.Delta{Services: map[snapshot.Name]*snapshot.Service{name("shop/good"): nil}})
	testkit.Eventually(t, time.Minute, "it is gone, and its address goes to the other", func() bool {
		return !strings.Contains(says(), "good") && strings.Contains(says(), "thief programmed 1/1")
	}, says)
}

// TestBoardPages: many Services come in pages, and what an answer says of one is bounded.
func TestBoardPages(t *testing.T) {
	s := newShopping(t)
	var all snapshot.Delta
	for i := range boardPage + 3 {
		n := name(fmt.Sprintf("shop/%05d", i))
		all.Merge(snapshot.Delta{Services: map[snapshot.Name]*snapshot.Service{n: {Name: n,
			Ports: slices.Repeat([]snapshot.Port{{Port: 80, NodePort: 30080}}, maxItems+1)}}})
	}
	s.queue.Put(all)
	first, err := s.List(url.Values{})
	if err != nil || len(first.Services) != boardPage || first.Next != fmt.Sprintf("shop/%05d", boardPage-1) ||
		len(first.Services[0].Ports) != maxItems || first.Services[0].Type != "NodePort" {
		t.Fatalf("%v, %d Services, next %q", err, len(first.Services), first.Next)
	}
	rest, err := s.List(url.Values{"after": {first.Next}})
	if err != nil || len(rest.Services) != 3 || rest.Next != "" {
		t.Errorf("%v, %d Services, next %q", err, len(rest.Services), rest.Next)
	}
	for path, code := range map[string]int{"/services?after=x": 400, "/services": 200} {
		w := httptest.NewRecorder()
		if s.ServeHTTP(w, httptest.NewRequest("GET", path, nil)); w.Code != code {
			t.Errorf("%s: %d; want %d", path, w.Code, code)
		}
	}
}
