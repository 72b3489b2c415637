package everywhere

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"os"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/verdict-proxy/verdict/internal/proxy/status"
	"github.com/verdict-proxy/verdict/sync/reconcile"
	"github.com/verdict-proxy/verdict/sync/snapshot"
)

var cart = snapshot.Name{Namespace: "shop", Name: "cart"}

// newAgent returns an agent that finds no collector, and knows of two endpoints of a Service, one of them its own.
func newAgent() *Agent {
	a := New(Options{Node: "n", Log: slog.New(slog.DiscardHandler),
		Leader: func(context.Context) (map[string]string, error) { return nil, errors.New("nobody leads") },
		Holds:  func(goals []status.Goal) []bool { return make([]bool, len(goals)) }})
	snap := snapshot.New()
	slice := snapshot.Name{Namespace: "shop", Name: "cart-1"}
	c := snap.Apply(snapshot.Delta{Services: map[snapshot.Name]*snapshot.Service{cart: {Name: cart}},
		Slices: map[snapshot.Name]*snapshot.Slice{slice: {Name: slice, Service: "cart", Endpoints: []snapshot.Endpoint{
			{Addr: netip.MustParseAddr("10.244.0.1"), Node: "n"}, {Addr: netip.MustParseAddr("10.244.1.1"), Node: "o"},
		}}}})
	a.Listener().InSync(reconcile.InSync{Snapshot: snap, Change: c})
	return a
}

// ask asks an agent from an address.
func ask(h http.Handler, from, query string) *httptest.ResponseRecorder {
	r := httptest.NewRequest(http.MethodGet, "/everywhere?"+query, nil)
	r.RemoteAddr = from + ":1234"
	w := httptest.NewRecorder()
	h.ServeHTTP(w, r)
	return w
}

// TestStrangers: processes of the host may ask about every Service, a pod of this node about those that it is an
// endpoint of, and nobody else at all.
func TestStrangers(t *testing.T) {
	a := newAgent()
	for _, test := range []struct {
		from, service string
		code          int
	}{
		{"127.0.0.1", "shop/cart", 200}, {"127.0.0.1", "shop/other", 200}, {"10.244.0.1", "shop/cart", 200},
		{"10.244.0.1", "shop/other", 403}, {"10.244.1.1", "shop/cart", 403}, {"10.244.0.2", "shop/cart", 403},
		{"127.0.0.1", "cart", 400}, {"127.0.0.1", "", 400}, {"127.0.0.1", strings.Repeat("a", 600) + "/b", 400},
	} {
		w := ask(a, test.from, "timeout=1ms&service="+test.service)
		if w.Code != test.code {
			t.Errorf("%s asks about %.30s: %d %s", test.from, test.service, w.Code, w.Body)
		}
	}
	for _, timeout := range []string{"61s", "-1s", "soon", "0s"} {
		if w := ask(a, "127.0.0.1", "service=shop/cart&timeout="+timeout); w.Code != http.StatusBadRequest {
			t.Errorf("timeout %s: %d", timeout, w.Code)
		}
	}
	w := ask(http.HandlerFunc(Off), "192.0.2.9", "service=shop/cart")
	if w.Code != http.StatusNotImplemented || !strings.Contains(w.Body.String(), "is off") {
		t.Errorf("without an agent: %d %s", w.Code, w.Body)
	}
	if s := a.Stats(); s.Answers[outcomeRefused] != 3 || s.Answers[outcomeUnknown] != 3 || s.Waiting != 0 {
		t.Errorf("%+v", s)
	}
}

// TestKubelet: a hook of the kubelet's, which takes every status for success, fails where nobody waits for anything.
func TestKubelet(t *testing.T) {
	a := newAgent()
	mux := http.NewServeMux()
	mux.Handle("/on", a)
	mux.HandleFunc("/off", Off)
	server := httptest.NewServer(mux)
	defer server.Close()
	for question, works := range map[string]bool{
		"/on?timeout=1ms&service=shop/cart": true, "/on?timeout=soon&service=shop/cart": false,
		"/on?service=cart": false, "/off?service=shop/cart": false, "/off?service=cart": false,
	} {
		for agent, fails := range map[string]bool{"kube-lifecycle/1.37": !works, "curl/8": false} {
			r, err := http.NewRequest(http.MethodGet, server.URL+question, nil)
			if err != nil {
				t.Fatal(err)
			}
			r.Header.Set("User-Agent", agent)
			answer, err := server.Client().Do(r)
			if (err != nil) != fails {
				t.Errorf("%s asks %s: %v", agent, question, err)
			}
			if err == nil {
				answer.Body.Close()
			}
		}
	}
	if s := a.Stats(); s.Waiting != 0 {
		t.Errorf("%d wait", s.Waiting)
	}
}

// TestPlaces: a pod has a few requests at once, a node a few hundred, and a namespace that has most of them makes room
// for the others.
func TestPlaces(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		a := newAgent()
		a.lost = time.Now() // so that they wait
		var all sync.WaitGroup
		defer all.Wait()
		answers := make(chan string, 2*maxWaiting)
		start := func(from, service string) {
			all.Go(func() { answers <- ask(a, from, "timeout=20s&service="+service).Body.String() })
			synctest.Wait()
		}
		for range maxOfPod {
			start("10.244.0.1", "shop/cart")
		}
		if w := ask(a, "10.244.0.1", "service=shop/cart"); w.Code != http.StatusForbidden {
			t.Errorf("a pod that asks again and again: %d", w.Code)
		}
		for i := range maxWaiting - maxOfPod {
			start("127.0.0.1", fmt.Sprint("shop/s", i))
		}
		start("127.0.0.1", "shop/late")
		var crowded response
		if err := json.Unmarshal([]byte(<-answers), &crowded); err != nil || crowded.Service != "shop/late" ||
			crowded.Why != "too many wait on this node" {
			t.Errorf("one more of the same namespace: %+v %v", crowded, err)
		}
		start("127.0.0.1", "other/one")
		if err := json.Unmarshal([]byte(<-answers), &crowded); err != nil || crowded.Service != "shop/cart" ||
			crowded.Why != "too many wait on this node" {
			t.Errorf("who makes room for another namespace: %+v %v", crowded, err)
		}
		if s := a.Stats(); s.Waiting != maxWaiting || len(answers) != 0 {
			t.Errorf("%d wait, %d are answered", s.Waiting, len(answers))
		}
	})
}

// TestStoppedCollector: a node leaves a collector that has gone silent, and waits for one that lives but does not ask.
func TestStoppedCollector(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ours, theirs := net.Pipe()
		defer theirs.Close()
		collector := NewStream(theirs)
		var running sync.WaitGroup
		running.Go(func() {
			for range 6 {
				time.Sleep(Beat)
				if err := collector.Send(FromCollector{}, time.Second); err != nil {
					t.Error(err)
				}
			}
		})
		begin := time.Now()
		err := newAgent().read(&session{stream: NewStream(ours), silence: 5 * Beat / 2})
		if took := time.Since(begin); !errors.Is(err, os.ErrDeadlineExceeded) || took != 6*Beat+5*Beat/2 {
			t.Errorf("it left after %v: %v", took, err)
		}
		running.Wait()
	})
}

// TestRoom: places are shared by namespaces, and given back once.
func TestRoom(t *testing.T) {
	r := NewRoom(4)
	evicted := make(chan string, 9)
	enter := func(namespace string) (leave func(), ok bool) {
		return r.Enter(namespace, func() { evicted <- namespace })
	}
	first, _ := enter("a")
	for range 3 {
		enter("a")
	}
	if _, ok := enter("a"); ok {
		t.Error("a fifth of the same")
	}
	for _, n := range []string{"b", "c"} {
		if _, ok := enter(n); !ok || <-evicted != "a" {
			t.Errorf("%s finds no place", n)
		}
	}
	if _, ok := enter("b"); ok {
		t.Error("two namespaces with two places each take them from each other")
	}
	first()
	first()
	if n := r.Taken(); n != 4 {
		t.Errorf("%d places are taken", n)
	}
}
