package collector

import (
	"crypto/tls"
	"fmt"
	"io"
	"net"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/verdict-proxy/verdict/internal/proxy/everywhere"
	"github.com/verdict-proxy/verdict/internal/proxy/status"
	"github.com/verdict-proxy/verdict/internal/system/testkit"
	"github.com/verdict-proxy/verdict/sync/snapshot"
)

// say sends a first line to a collector, and returns its answer.
func say(t *testing.T, address, line string) string {
	t.Helper()
	c, err := tls.Dial("tcp", address, &tls.Config{InsecureSkipVerify: true})
	if err != nil {
		return err.Error()
	}
	defer c.Close()
	if _, err := io.WriteString(c, line+"\n"); err != nil {
		return err.Error()
	}
	_ = c.SetReadDeadline(time.Now().Add(10 * time.Second))
	answer := make([]byte, 1000)
	n, err := c.Read(answer)
	if err != nil {
		return err.Error()
	}
	return string(answer[:n])
}

func hello(token string) string { return fmt.Sprintf(`{"hello":{"schema":1,"token":%q}}`, token) }

// TestTokens: only a token that the API server accepts, of the right account and with a node, makes a node. One that is
// wrong by its own words costs the API server nothing, and after a wrong one its host is not listened to.
func TestTokens(t *testing.T) {
	good := token("n0", time.Now().Add(time.Hour))
	other := strings.Replace(good, "c2ln", "Zm9y", 1)
	revoked := token("n0", time.Now().Add(2*time.Hour))
	for _, test := range []struct {
		what, line, want string
		reviews          int
	}{
		{"a good one", hello(good), `{"welcome":{"seconds":3`, 1},
		{"a signature that the API server refuses", hello(other), "not valid for verdict-collector", 1},
		{"a revoked one", hello(revoked), "not valid for verdict-collector", 1},
		{"one without a node", hello(token("", time.Now().Add(time.Hour))), "of which node", 1},
		{"an expired one", hello(token("n0", time.Now().Add(-time.Second))), "has expired", 0},
		{"no token", hello("a.b"), "no token", 0},
		{"no hello", `{"have":[1]}`, "EOF", 0},
		{"no line", strings.Repeat("x", 20<<10), "EOF", 0},
	} {
		t.Run(test.what, func(t *testing.T) {
			api := newFakeAPI(t, "n0")
			api.revoked[revoked] = true
			c, _ := newCollector(t, api, "only")
			testkit.Eventually(t, 5*time.Second, "it leads", func() bool { _, leads := c.Stats(); return leads })
			if got := say(t, c.o.Listen, test.line); !strings.Contains(got, test.want) &&
				!(test.want == "EOF" && strings.Contains(got, "reset")) {
				t.Errorf("%s", got)
			}
			if n := api.count("POST tokenreviews"); n != test.reviews {
				t.Errorf("%d reviews", n)
			}
			if strings.Contains(test.want, "welcome") || test.want == "EOF" {
				return
			}
			if got := say(t, c.o.Listen, hello(good)); !strings.Contains(got, "try again later") {
				t.Errorf("afterwards: %s", got)
			}
		})
	}
}

// TestAPIServerDown: a token that cannot be reviewed is no reason not to listen to a node later.
func TestAPIServerDown(t *testing.T) {
	api := newFakeAPI(t, "n0")
	c, _ := newCollector(t, api, "only")
	testkit.Eventually(t, 5*time.Second, "it leads", func() bool { _, leads := c.Stats(); return leads })
	set := func(down bool) {
		api.mu.Lock()
		defer api.mu.Unlock()
		api.down = down
	}
	set(true)
	good := hello(token("n0", time.Now().Add(time.Hour)))
	if got := say(t, c.o.Listen, good); !strings.Contains(got, "cannot be reviewed") {
		t.Error(got)
	}
	set(false)
	if got := say(t, c.o.Listen, good); !strings.Contains(got, "welcome") {
		t.Error(got)
	}
}

// TestExpiry: a connection ends when its token expires, and the node connects again before, with a new one.
func TestExpiry(t *testing.T) {
	api := newFakeAPI(t, "n0", "n1")
	c, _ := newCollector(t, api, "only")
	n := newNode(t, api, "n0")
	n.mu.Lock()
	n.life = 3 * time.Second
	n.mu.Unlock()
	testkit.Eventually(t, 30*time.Second, "it has connected three times", func() bool {
		s, _ := c.Stats()
		return s.Accepted >= 3
	})
	raw, err := tls.Dial("tcp", c.o.Listen, &tls.Config{InsecureSkipVerify: true})
	if err != nil {
		t.Fatal(err)
	}
	defer raw.Close()
	begin := time.Now()
	_, _ = io.WriteString(raw, hello(token("n1", begin.Add(2*time.Second)))+"\n")
	_ = raw.SetReadDeadline(begin.Add(10 * time.Second))
	if text, err := io.ReadAll(raw); err != nil || !strings.Contains(string(text), "welcome") ||
		time.Since(begin) > 5*time.Second {
		t.Errorf("after %v: %s %v", time.Since(begin), text, err)
	}
}

// TestGreetings: connections that show no token are bounded, by host and in all, and end.
func TestGreetings(t *testing.T) {
	h := newHub(tls.Certificate{}, nil, nil, nil)
	for i := range maxGreetingOfHost {
		if !h.enter("a") {
			t.Fatalf("number %d is too many", i)
		}
	}
	if h.enter("a") {
		t.Error("a host has no bound")
	}
	for i := range maxGreeting - maxGreetingOfHost {
		if !h.enter(fmt.Sprint("host ", i)) {
			t.Fatalf("number %d is too many", i)
		}
	}
	if h.enter("b") {
		t.Error("there is no bound")
	}
	h.leave("a")
	if !h.enter("b") {
		t.Error("a place is lost")
	}
}

// TestHeartbeat: a node hears from a collector that has nothing to ask.
func TestHeartbeat(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ours, theirs := net.Pipe()
		h := newHub(tls.Certificate{}, nil, newBarrier(nil, nil), nil)
		var running sync.WaitGroup
		running.Go(func() {
			s := &stream{Stream: everywhere.NewStream(ours), node: "n", waits: map[uint64]*waiter{}}
			h.run(t.Context(), s, time.Now().Add(time.Hour))
		})
		begin, node := time.Now(), everywhere.NewStream(theirs)
		for i := range 3 {
			var m everywhere.FromCollector
			err := node.Receive(&m, begin.Add(time.Hour))
			took := time.Since(begin)
			if err != nil || m != (everywhere.FromCollector{}) || took != time.Duration(i+1)*everywhere.Beat {
				t.Fatalf("after %v: %+v %v", took, m, err)
			}
		}
		node.Close()
		running.Wait()
	})
}

// TestTurns: a namespace with many Services does not hold up another one.
func TestTurns(t *testing.T) {
	q := turns{of: map[string][]*service{}}
	for i := range 5 {
		q.add(&service{name: snapshot.Name{Namespace: "many", Name: fmt.Sprint(i)}})
	}
	q.add(&service{name: snapshot.Name{Namespace: "one", Name: "x"}})
	q.add(&service{name: snapshot.Name{Namespace: "two", Name: "y"}})
	var got []string
	for s := q.next(); s != nil; s = q.next() {
		got = append(got, s.name.String())
	}
	if want := "[many/0 one/x two/y many/1 many/2 many/3 many/4]"; fmt.Sprint(got) != want || len(q.of) != 0 {
		t.Errorf("%v; want %s", got, want)
	}
}

// TestPace: so many at once, then so many each second.
func TestPace(t *testing.T) {
	var p pace
	now := time.Now()
	if wait := p.take(now, 10, 10, 5); wait > 0 {
		t.Errorf("the burst waits %v", wait)
	}
	if wait := p.take(now, 1, 10, 5); wait != 200*time.Millisecond {
		t.Errorf("the next one waits %v", wait)
	}
	if wait := p.take(now.Add(time.Second), 0, 10, 5); wait > 0 {
		t.Errorf("a second later it waits %v", wait)
	}
}

// noCluster is a cluster that nobody asks.
type noCluster struct{ cluster }

// silent gives a stream of a node that reads and says nothing.
func silent(t *testing.T, node string) *stream {
	a, b := net.Pipe()
	go func() { _, _ = io.Copy(io.Discard, b) }()
	t.Cleanup(func() { b.Close() })
	return &stream{Stream: everywhere.NewStream(a), node: node, waits: map[uint64]*waiter{}}
}

// TestNodeAsksTooMuch: a node has a bound of waits, at once and for each second.
func TestNodeAsksTooMuch(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		crowded := 0
		b := newBarrier(noCluster{}, func(outcome string, _ time.Duration) {
			if outcome == outcomeCrowded {
				crowded++
			}
		})
		s := silent(t, "n0")
		for i := range maxOfNode + 50 {
			b.wait(s, &everywhere.Wait{ID: uint64(i + 1), Service: "shop/cart", Milliseconds: 1000})
		}
		if n := b.snapshot().Waiting; n != maxOfNode || crowded != 50 {
			t.Errorf("%d wait, %d find no place", n, crowded)
		}
		time.Sleep(1100 * time.Millisecond) // they are answered
		if n := b.snapshot().Waiting; n != 0 || len(b.services) != 0 && !b.services[cart].busy {
			t.Errorf("%d wait, %d Services", n, len(b.services))
		}
		for i := range 200 {
			b.wait(s, &everywhere.Wait{ID: uint64(i + 1), Service: "shop/cart", Milliseconds: 1000})
		}
		if n := b.snapshot().Waiting; n < 90 || n > 120 {
			t.Errorf("a second later %d more wait", n)
		}
		time.Sleep(2 * time.Second)
	})
}

// TestRound: how answers, nodes that are gone and those that are missing add up.
func TestRound(t *testing.T) {
	r := newRound(1, nil, status.Goal{}, "", newRoster(map[string]bool{"a": true, "b": true, "c": true}))
	if !r.answered("b") || r.answered("b") || r.answered("x") || r.left != 2 {
		t.Errorf("%+v", r)
	}
	r.excuse("c")
	r.excuse("c")
	if fmt.Sprint(r.missingNodes(), r.gone, r.left) != "[a] [c] 1" || r.waitsFor("b") || !r.waitsFor("a") {
		t.Errorf("%+v", r)
	}
}

// TestEvictedAtOnce: a waiter whose place another one takes just as it comes is answered, and does not wait without a
// place.
func TestEvictedAtOnce(t *testing.T) {
	b := newBarrier(noCluster{}, nil)
	b.room = everywhere.NewRoom(2)
	var streams []*stream
	for i := range 8 {
		streams = append(streams, silent(t, fmt.Sprint("n", i)))
	}
	for round := range 2000 {
		var all sync.WaitGroup
		for i, s := range streams {
			all.Go(func() {
				service := fmt.Sprintf("namespace-%d-%d/cart", round, i/2)
				b.wait(s, &everywhere.Wait{ID: 1, Service: service, Milliseconds: 60_000})
			})
			all.Go(func() { b.snapshot() }) // so that they have to wait for the lock
		}
		all.Wait()
		testkit.Eventually(t, 10*time.Second, "only those with a place wait", func() bool {
			b.mu.Lock()
			defer b.mu.Unlock()
			waiting := 0
			for _, s := range streams {
				waiting += len(s.waits)
			}
			return waiting == b.room.Taken()
		})
		for _, s := range streams {
			b.part(s)
			s.pace = pace{}
		}
	}
}
