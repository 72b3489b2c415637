package gateway

import (
	"fmt"
	"io"
	"log/slog"
	"runtime"
	"strings"
	"sync"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"

	"github.com/verdict-proxy/verdict/internal/system/testkit"
	"github.com/verdict-proxy/verdict/internal/system/wake"
)

// look has the world looked at now, and not in half a minute.
func (r *rig) look() {
	if l := r.controller.leads(); l != nil {
		wake.Up(l.world.again)
	}
}

// watched counts the watches.
func (r *rig) watched() (n int) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, w := range r.watches {
		n += w
	}
	return n
}

// TestNoDefinitions: without the definitions of Gateway API nothing is watched and one line is logged. Once they come,
// in any version, Gateways are served; a kind that goes for a moment changes nothing.
func TestNoDefinitions(t *testing.T) {
	r := newRig(t)
	served := r.served
	r.served = map[string][]string{}
	log := &lines{}
	r.leadWith(t, slog.New(slog.NewTextHandler(log, nil)))
	for range 3 {
		before := r.count()
		testkit.Eventually(t, 10*time.Second, "it has looked", func() bool { r.look(); return r.count() >= before+3 })
	}
	if n := r.watched(); n != 0 || log.count("") != 1 || log.count("not installed") != 1 {
		t.Errorf("%d watches; logged was %s", n, log)
	}
	r.put(t, edgeDB)
	r.put(t, shopDB(1, 1))
	r.mu.Lock()
	r.served = map[string][]string{"v1": {classes, gateways}, "v1beta1": {"referencegrants"},
		"v1alpha2": {tcpRoutes, udpRoutes}}
	r.mu.Unlock()
	r.look()
	r.eventually(t, "Accepted", theRoute)
	r.calm()
	r.mu.Lock()
	r.served = map[string][]string{"v1": {classes, gateways}}
	r.mu.Unlock()
	r.look()
	r.expect(t, "while the server does not know TCPRoutes")
	r.mu.Lock()
	r.served = served
	r.mu.Unlock()
	r.look()
	testkit.Eventually(t, 20*time.Second, "TCPRoutes are watched as v1", func() bool {
		return log.count("tcproutes v1,") > 0
	})
	r.put(t, shopDB(1, 2))
	r.eventually(t, "Accepted", theRoute)
}

// lines is a log.
type lines struct {
	mu   sync.Mutex
	text strings.Builder
}

func (l *lines) Write(b []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.text.Write(b)
}

func (l *lines) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.text.String()
}

// count counts the lines that have a text in them.
func (l *lines) count(text string) (n int) {
	for line := range strings.Lines(l.String()) {
		if strings.Contains(line, text) {
			n++
		}
	}
	return n
}

// TestKilledBetweenWrites: wherever a process ends, the next one completes what is missing, and no status says what is
// not.
func TestKilledBetweenWrites(t *testing.T) {
	for after := range 5 {
		t.Run(fmt.Sprint(after), func(t *testing.T) {
			r := newRig(t)
			r.put(t, edgeDB)
			r.put(t, shopDB(1, 1))
			made := 0
			r.fail = func(method, _ string) int {
				if method != "GET" {
					if made++; made > after {
						return 503
					}
				}
				return 0
			}
			r.lead(t)
			testkit.Eventually(t, 20*time.Second, "it has come so far", func() bool {
				r.mu.Lock()
				defer r.mu.Unlock()
				return made > after
			})
			r.stop()
			r.mu.Lock()
			r.fail = nil
			r.mu.Unlock()
			r.lead(t)
			r.eventually(t, "Programmed", theGateway)
			r.eventually(t, ProgrammedCondition, theRoute)
			if w := r.calm(); len(w) > 7 {
				t.Errorf("written was %q", w)
			}
		})
	}
}

// TestHandover: a process that ends after it has written a Service, and before nodes have it, leaves it to the next one
// to say so: that one asks nodes before it believes what statuses say.
func TestHandover(t *testing.T) {
	r := newRig(t)
	r.put(t, edgeDB)
	r.put(t, shopDB(1, 1))
	r.lead(t)
	r.eventually(t, ProgrammedCondition, theRoute)
	r.calm()
	r.nodes.set("edge/db-verdict", true)
	r.put(t, shopDB(1, 2))
	r.expect(t, "by the first", "PATCH "+theService)
	r.stop()
	r.lead(t)
	testkit.Eventually(t, 30*time.Second, "the route says that it waits", func() bool {
		if r.is(theRoute, ProgrammedCondition, "True") {
			t.Fatal("it says that nodes have what they lack")
		}
		return r.is(theRoute, ProgrammedCondition, "False") && r.is(theGateway, "Programmed", "False")
	})
	r.nodes.set("edge/db-verdict", false)
	r.eventually(t, ProgrammedCondition, theRoute)
	r.eventually(t, "Programmed", theGateway)
}

// TestServerGone: while the API server answers nothing, nothing is undone; afterwards everything is as it should be,
// with one write for each change.
func TestServerGone(t *testing.T) {
	r := newRig(t)
	r.put(t, edgeDB)
	r.put(t, shopDB(1, 1))
	log := &lines{}
	r.leadWith(t, slog.New(slog.NewTextHandler(log, nil)))
	r.eventually(t, ProgrammedCondition, theRoute)
	r.calm()
	before := log.count("")
	r.mu.Lock()
	r.fail = func(string, string) int { return 503 }
	r.mu.Unlock()
	r.CloseClientConnections()
	r.put(t, shopDB(1, 2))
	failed := r.count()
	testkit.Eventually(t, 30*time.Second, "it has tried", func() bool { return r.count() > failed+15 })
	if n := log.count("") - before; n > 16 {
		t.Errorf("%d lines were logged: %s", n, log)
	}
	r.mu.Lock()
	r.fail = nil
	r.mu.Unlock()
	testkit.Eventually(t, time.Minute, "the route is as it should be", func() bool {
		return r.is(theRoute, ProgrammedCondition, "True")
	})
	r.expect(t, "afterwards", "PATCH "+theService, "PATCH "+theRoute+"/status")
}

// TestTwo: two that lead at once, which a Lease prevents but for moments, come to an end of their writes.
func TestTwo(t *testing.T) {
	r := newRig(t)
	r.lead(t)
	r.lead(t)
	r.put(t, edgeDB)
	r.put(t, shopDB(1, 1))
	r.eventually(t, ProgrammedCondition, theRoute)
	for i := range 10 {
		r.put(t, shopDB(1, i+2))
	}
	r.eventually(t, ProgrammedCondition, theRoute)
	r.calm()
	if w := r.calm(); len(w) > 0 {
		t.Errorf("they go on writing: %q", w)
	}
	var s corev1.Service
	if !r.get(theService, &s) || !strings.Contains(s.Annotations["verdict-proxy.github.io/backends"], `"weight":11`) {
		t.Errorf("the Service is %+v", s.Annotations)
	}
}

// manyRoutes are Gateways with listeners, and a route with a Service of its own for each.
func manyRoutes(gateways, listeners int) string {
	var text []string
	for i := range gateways {
		var list []string
		for j := range listeners {
			list = append(list, fmt.Sprintf("{name: l%d, port: %d, protocol: TCP, allowedRoutes: {namespaces: {from: All}}}",
				j, 1000+j))
			text = append(text, fmt.Sprintf("kind: Service\nmetadata: {namespace: shop, name: s%d-%d}\n"+
				"spec: {type: ClusterIP, ports: [{port: 80, protocol: TCP}]}", i, j), manyRoute(i, j))
		}
		text = append(text, fmt.Sprintf("kind: Gateway\nmetadata: {namespace: edge, name: g%d}\n"+
			"spec: {gatewayClassName: verdict, listeners: [%s]}", i, strings.Join(list, ", ")))
	}
	return strings.Join(text, "\n---\n")
}

func manyRoute(i, j int) string {
	return fmt.Sprintf(`kind: TCPRoute
metadata: {namespace: shop, name: r%d-%d}
spec:
  parentRefs: [{namespace: edge, name: g%d, sectionName: l%d}]
  rules: [{backendRefs: [{name: s%d-%d, port: 80}]}]`, i, j, i, j, i, j)
}

// TestMany: 1,000 routes on 100 Gateways get two writes each at most, and changes of one Gateway concern no other.
func TestMany(t *testing.T) {
	r := newRig(t)
	r.put(t, manyRoutes(100, 10))
	begin := time.Now()
	r.leadWith(t, slog.New(slog.NewTextHandler(io.Discard, nil)))
	testkit.Eventually(t, 3*time.Minute, "all are programmed", func() bool {
		r.mu.Lock()
		defer r.mu.Unlock()
		n := 0
		for _, w := range r.writes {
			if strings.HasPrefix(w, "PATCH tcproutes/") {
				n++
			}
		}
		return n >= 1000 && r.controller.Stats().Programmed == 100
	})
	took := time.Since(begin)
	writes := r.calm()
	most, last, times := 0, "", 0
	for _, w := range writes {
		if times++; w != last {
			last, times = w, 1
		}
		most = max(most, times)
	}
	var m runtime.MemStats
	runtime.GC()
	runtime.ReadMemStats(&m)
	t.Logf("all programmed after %v, with %d writes, %d of one object at most; heap with the server's objects %d MB",
		took, len(writes), most, m.HeapAlloc>>20)
	if most > 2 {
		t.Errorf("an object was written %d times", most)
	}
	r.put(t, strings.ReplaceAll(manyRoute(0, 0), "port: 80}", "port: 80, weight: 7}"))
	r.eventually(t, "Accepted", "tcproutes/shop/r0-0")
	r.expect(t, "after a change of one route", "PATCH services/edge/g0-verdict", "PATCH tcproutes/shop/r0-0/status")
}

// BenchmarkPass looks at a world in which nothing is to be written, and at one whose routes are all to be written.
func BenchmarkPass(b *testing.B) {
	for _, size := range [][3]int{{100, 10, 1}, {1, 10, 1000}} {
		for _, settled := range []bool{true, false} {
			b.Run(fmt.Sprintf("gateways=%d/listeners=%d/routes=%d/settled=%v", size[0], size[1], size[2], settled),
				func(b *testing.B) { benchmarkPass(b, size[0], size[1], size[2], settled) })
		}
	}
}

// benchmarkPass has a controller settle a world, or only read it, and stops it.
func benchmarkPass(b *testing.B, many, listeners, each int, settled bool) {
	r := newRig(b)
	r.put(b, manyRoutes(many, listeners))
	for i := range listeners {
		for j := 1; j < each; j++ {
			r.put(b, strings.Replace(manyRoute(0, i), "name: r0", fmt.Sprintf("name: r%d", 1000+j), 1))
		}
	}
	r.fail = func(method, _ string) int {
		if method != "GET" && !settled {
			return 503
		}
		return 0
	}
	r.leadWith(b, slog.New(slog.DiscardHandler))
	l := r.controller.leads()
	for ; l == nil; l = r.controller.leads() {
		time.Sleep(time.Millisecond)
	}
	testkit.Eventually(b, 5*time.Minute, "the world is read", func() bool {
		s := r.controller.Stats()
		return s.Objects[tcpRoutes] == many*listeners*each && (!settled || s.Programmed == many &&
			s.Writes[Write{tcpRoutes + "/status", Outcomes[0]}] == uint64(many*listeners*each))
	})
	r.stop()
	b.ReportAllocs()
	for b.Loop() {
		l.pass(b.Context())
	}
}

// leads returns the work under way; nil if there is none.
func (c *Controller) leads() *leader {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.leading
}
