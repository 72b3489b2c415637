package conntrack

import (
	"context"
	"encoding/binary"
	"fmt"
	"net/netip"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/verdict-proxy/verdict/internal/lab/labtest"
	"github.com/verdict-proxy/verdict/internal/system/ipfamily"
	"github.com/verdict-proxy/verdict/sync/dataplane"
	"github.com/verdict-proxy/verdict/sync/reconcile"
	"github.com/verdict-proxy/verdict/sync/reconcile/reconciletest"
	"github.com/verdict-proxy/verdict/sync/snapshot"
)

// tcpTable is a table of TCP flows, each with a client of its own.
type tcpTable struct{ fakeTable }

func (t *tcpTable) remove(flows []flow) (int, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	n := len(t.flows)
	t.flows = slices.DeleteFunc(t.flows, func(f flow) bool {
		return slices.ContainsFunc(flows, func(o flow) bool { return o.client == f.client })
	})
	return n - len(t.flows), nil
}

// list lists what a query asks for alone.
func (t *tcpTable) list(q query, do func([]flow) error) error {
	return t.fakeTable.list(q, func(flows []flow) error {
		return do(slices.DeleteFunc(flows, func(f flow) bool { return !q.matches(&f) }))
	})
}

// hold adds a flow that its endpoint answers.
func (t *tcpTable) hold(frontend, endpoint string) *flow {
	t.mu.Lock()
	defer t.mu.Unlock()
	n := len(t.flows)
	t.flows = append(t.flows, flow{frontend: key(frontend), endpoint: netip.MustParseAddrPort(endpoint),
		client: clientOf(n, key(frontend).Addr.Is6()), answered: true, id: binary.BigEndian.AppendUint32(nil, uint32(n)),
		tcp: tcpInfo{established: true, left: 431999}})
	return &t.flows[n]
}

// wait adds a flow whose client waits for an answer since 10 s.
func (t *tcpTable) wait(frontend, endpoint string) *flow {
	f := t.hold(frontend, endpoint)
	f.tcp.unacknowledged, f.tcp.left = true, 289
	return f
}

// open adds a flow that its endpoint has not answered yet.
func (t *tcpTable) open(frontend, endpoint string) {
	f := t.hold(frontend, endpoint)
	t.mu.Lock()
	defer t.mu.Unlock()
	f.answered = false
}

// releasing is a Releaser at work in a bubble of synctest.
type releasing struct {
	t     *testing.T
	table *tcpTable
	loop  *reconciletest.Loop
	told  []Released
	// alive are the endpoints that answer probes. probed counts the probes.
	alive  map[string]bool
	probed int
	// probing is how long a probe takes.
	probing time.Duration
	st      *dataplane.State
	stop    func()
}

const webKey, otherKey = "10.96.0.1:80/tcp", "10.96.0.2:80/tcp"

func newReleasing(t *testing.T, table *tcpTable, services ...*dataplane.Service) *releasing {
	r := &releasing{t: t, table: table, alive: map[string]bool{}, probing: 500 * time.Millisecond}
	r.start()
	r.apply(services...)
	rest(2 * time.Second)
	return r
}

func (r *releasing) start() { r.startOn(r.table) }

func (r *releasing) startOn(t table) {
	ctx, cancel := context.WithCancel(context.Background())
	releaser := newReleaser(t, ReleaserOptions{
		Probe: func(_ context.Context, endpoints []netip.AddrPort) (answers []bool) {
			time.Sleep(r.probing)
			r.table.mu.Lock()
			defer r.table.mu.Unlock()
			for _, e := range endpoints {
				r.probed++
				answers = append(answers, r.alive[e.String()])
			}
			return answers
		},
		Report: func(l ReleaseResult) { r.told = append(r.told, l.Released...) },
	})
	var run sync.WaitGroup
	run.Go(func() { releaser.walker.Run(ctx) })
	r.stop = func() { cancel(); run.Wait() }
	r.t.Cleanup(func() { r.stop() })
	r.loop = &reconciletest.Loop{Listeners: []reconcile.Listener{releaser.Listener()}, Writer: backendFunc(fine)}
}

// revive makes an endpoint answer probes.
func (r *releasing) revive(endpoint string) {
	r.table.mu.Lock()
	defer r.table.mu.Unlock()
	r.alive[endpoint] = true
}

// apply programs Services, all of them.
func (r *releasing) apply(services ...*dataplane.Service) {
	r.t.Helper()
	change := dataplane.Change{}
	for _, s := range services {
		change.Services = append(change.Services, s.Name)
	}
	r.st = state(services...)
	_, err := r.loop.Apply(r.st, change)
	labtest.Check(r.t, err)
}

func (r *releasing) expect(after time.Duration, what string, flows int) {
	r.t.Helper()
	rest(after)
	if n := len(r.table.left()); n != flows {
		r.t.Fatalf("%s: %d flows are left after %v, want %d; told %v", what, n, after, flows, r.told)
	}
}

// web is a Service that ejects.
func web(ports ...string) *dataplane.Service { return chance("web", ports...) }

func chance(name string, ports ...string) *dataplane.Service {
	s := service(name, ports...)
	for _, sp := range s.Ports {
		sp.SecondChance = snapshot.SecondChanceOn
	}
	return s
}

// draining gives a Service a drain deadline, and takes its second chance.
func draining(s *dataplane.Service, d time.Duration) *dataplane.Service {
	for _, sp := range s.Ports {
		sp.Drain, sp.SecondChance = d, snapshot.SecondChanceOff
	}
	return s
}

const webBoth, webOne = webKey + ">10.0.0.1:80,10.0.0.2:80", webKey + ">10.0.0.2:80"

// TestReleaseUnanswered: only what nobody answers is released, and only once its endpoint is gone.
func TestReleaseUnanswered(t *testing.T) {
	for _, ends := range [][3]string{{webKey, "10.0.0.1:80", "10.0.0.2:80"},
		{"[fd00::1]:80/tcp", "[fd00:1::1]:80", "[fd00:1::2]:80"}} {
		synctest.Test(t, func(t *testing.T) {
			table := &tcpTable{}
			both := ends[0] + ">" + ends[1] + "," + ends[2]
			r := newReleasing(t, table, web(both))
			table.wait(ends[0], ends[1]).zoned = true
			for range 3 {
				table.wait(ends[0], ends[1])
				table.wait(ends[0], ends[2])
				table.hold(ends[0], ends[1])
			}
			r.expect(5*time.Minute, "all serve", 10)
			r.apply(web(ends[0] + ">" + ends[2]))
			r.expect(900*time.Millisecond, "first look", 10)
			r.expect(1200*time.Millisecond, "second look", 7)
			r.expect(time.Hour, "at last", 7)
			want := []Released{{r.st.Services[name("web")].Ports[0].Name, netip.MustParseAddrPort(ends[1]),
				ReleasedUnanswered, 3}}
			if !slices.Equal(r.told, want) {
				t.Errorf("told %v, want %v", r.told, want)
			}
			if len(table.ends) != 3 || table.ends[0].peer != netip.AddrPortFrom(key(ends[0]).Addr, 80) {
				t.Errorf("reset %v", table.ends)
			}
		})
	}
}

// TestNotReleased: a removed endpoint keeps its connections in each of these cases.
func TestNotReleased(t *testing.T) {
	tests := []struct {
		what string
		now  *dataplane.Service
		do   func(*releasing)
		flow func(*flow)
	}{
		{"still serves", web(webBoth), nil, nil},
		{"alive, with another label", web(webOne), func(r *releasing) { r.revive("10.0.0.1:80") }, nil},
		{"serves again, as another pod", web(webOne), func(r *releasing) { r.apply(web(webBoth)) }, nil},
		{"no second chance", service("web", webOne), nil, nil},
		{"no deadline yet", draining(web(webOne), 24*time.Hour), nil, nil},
		{"client sends without a pause", web(webOne), nil, func(f *flow) { f.tcp.left = 299 }},
		{"acknowledged", web(webOne), nil, func(f *flow) { f.tcp.unacknowledged = false }},
		{"the client closes", web(webOne), nil, func(f *flow) { f.tcp.established = false }},
		{"not translated", web(webOne), nil, func(f *flow) {
			f.endpoint = netip.AddrPortFrom(key(webKey).Addr, 80)
		}},
		{"the Service is gone", service("another", otherKey), nil, nil},
		{"scheduled by IPVS", func() *dataplane.Service {
			s := draining(web(webOne), time.Second)
			s.Ports[0].Scheduling = &dataplane.Scheduling{Scheduler: "lc"}
			return s
		}(), nil, nil},
		{"more endpoints than allowed", func() *dataplane.Service {
			s := draining(web(webOne), time.Second)
			s.OverCapacity = true
			return s
		}(), nil, nil},
	}
	for _, test := range tests {
		t.Run(test.what, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				table := &tcpTable{}
				r := newReleasing(t, table, web(webBoth))
				table.wait(webKey, "10.0.0.1:80")
				r.apply(test.now)
				if test.do != nil {
					test.do(r)
				}
				if test.flow != nil {
					table.mu.Lock()
					test.flow(&table.flows[0])
					table.mu.Unlock()
				}
				r.expect(time.Hour, test.what, 1)
			})
		})
	}
}

// TestReleaseRenamed: ports that get other names, or swap them, keep the endpoints that have departed from them, also
// those that depart at that moment.
func TestReleaseRenamed(t *testing.T) {
	named := func(first, second string, serving string) *dataplane.Service {
		s := web(webKey+">"+serving, otherKey+">"+serving)
		s.Ports[0].Name.Port, s.Ports[1].Name.Port = first, second
		return draining(s, 30*time.Second)
	}
	const both, one, none = "10.0.0.1:80,10.0.0.2:80", "10.0.0.2:80", ""
	for _, names := range [][2]string{{"http", "b"}, {"b", "a"}, {"b", "c"}} {
		t.Run(fmt.Sprint(names), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				table := &tcpTable{}
				r := newReleasing(t, table, named("a", "b", both))
				for _, endpoint := range []string{"10.0.0.1:80", "10.0.0.2:80"} {
					table.hold(webKey, endpoint)
					table.hold(otherKey, endpoint)
				}
				r.apply(named("a", "b", one))
				rest(10 * time.Second)
				r.apply(named(names[0], names[1], none))
				r.expect(19900*time.Millisecond, "before the first deadline", 4)
				r.expect(200*time.Millisecond, "after the first deadline", 2)
				r.expect(9700*time.Millisecond, "before the second deadline", 2)
				r.expect(200*time.Millisecond, "after the second deadline", 0)
			})
		})
	}
}

// TestReleaseLater: a client that only waits to read is released soon after it sends.
func TestReleaseLater(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		table := &tcpTable{}
		r := newReleasing(t, table, web(webBoth))
		f := table.hold(webKey, "10.0.0.1:80")
		r.apply(web(webOne))
		r.expect(time.Hour, "waits", 1)
		if looks := len(table.listed); looks > 80 {
			t.Errorf("%d looks in an hour", looks)
		}
		table.mu.Lock()
		f.tcp.unacknowledged, f.tcp.left = true, 280
		table.mu.Unlock()
		r.expect(longestPause+3*time.Second, "has sent", 0)
	})
}

// TestReleaseCounted: where the kernel counts packets, a client that sends without a pause is released as soon as any
// other, unless its endpoint sends something.
func TestReleaseCounted(t *testing.T) {
	for _, answers := range []bool{false, true} {
		synctest.Test(t, func(t *testing.T) {
			table := &tcpTable{}
			r := newReleasing(t, table, web(webBoth))
			f := table.wait(webKey, "10.0.0.1:80")
			f.tcp.left, f.counted, f.replies = 299, true, 7
			r.apply(web(webOne))
			left := 0
			for range 20 {
				rest(500 * time.Millisecond)
				if answers {
					table.mu.Lock()
					f.replies++
					table.mu.Unlock()
					left = 1
				}
			}
			r.expect(0, fmt.Sprint("the endpoint answers: ", answers), left)
		})
	}
}

// TestReleaseQuiet: a client that only listens is released if flows of the same client, or of two others, had to be,
// and nobody was answered since.
func TestReleaseQuiet(t *testing.T) {
	const quiet = 5
	for _, test := range []struct {
		what   string
		others []int
		do     func(*releasing)
		left   int
	}{
		{"nobody sends", nil, nil, 1},
		{"the same client sends", []int{quiet}, nil, 0},
		{"another client sends", []int{1}, nil, 1},
		{"two others send", []int{1, 2}, nil, 0},
		{"one of them is answered later", []int{1, 2, 3}, func(r *releasing) {
			time.Sleep(800 * time.Millisecond)
			r.table.mu.Lock()
			defer r.table.mu.Unlock()
			r.table.flows[3].tcp.unacknowledged = false
		}, 2},
		{"it had a packet", []int{1, 2}, func(r *releasing) {
			r.table.mu.Lock()
			defer r.table.mu.Unlock()
			r.table.flows[0].tcp.left = 431999
		}, 1},
	} {
		t.Run(test.what, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				table := &tcpTable{}
				r := newReleasing(t, table, web(webBoth))
				client := func(f *flow, n int) {
					f.client = netip.AddrPortFrom(netip.AddrFrom4([4]byte{10, 9, 9, byte(n)}), f.client.Port())
				}
				f := table.hold(webKey, "10.0.0.1:80")
				f.tcp.left = 100
				client(f, quiet)
				for _, n := range test.others {
					client(table.wait(webKey, "10.0.0.1:80"), n)
				}
				r.apply(web(webOne))
				if test.do != nil {
					test.do(r)
				}
				r.expect(10*time.Second, test.what, test.left)
			})
		})
	}
}

// TestReleaseConfirmsAgain: a client that sends after a long time is released soon, also if an earlier look found that
// the endpoint still lived.
func TestReleaseConfirmsAgain(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		table := &tcpTable{}
		r := newReleasing(t, table, web(webBoth))
		f := table.hold(webKey, "10.0.0.1:80")
		sends := func(answered, alive bool) {
			table.mu.Lock()
			defer table.mu.Unlock()
			f.tcp.unacknowledged, f.tcp.left, r.alive["10.0.0.1:80"] = !answered, 280, alive
		}
		sends(true, true)
		r.apply(web(webOne))
		rest(10 * time.Minute)
		sends(false, true)
		r.expect(5*time.Minute, "it lives", 1)
		sends(true, true)
		rest(5 * time.Minute)
		sends(false, false)
		r.expect(longestPause+3*time.Second, "it is dead", 0)
	})
}

// TestReleaseConnecting: a connection that has not even begun is released, too.
func TestReleaseConnecting(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		table := &tcpTable{}
		r := newReleasing(t, table, web(webBoth))
		f := table.hold(webKey, "10.0.0.1:80")
		f.answered, f.tcp = false, tcpInfo{left: 119}
		r.apply(web(webOne))
		r.expect(3*time.Second, "connecting", 0)
		if len(table.ends) > 0 {
			t.Errorf("reset %v", table.ends)
		}
	})
}

// TestReleaseOpening: who opens a connection to an endpoint that has just gone is sent elsewhere by the next SYN, after
// a second. That needs no probe, and an endpoint that answers in the meantime keeps the connection.
func TestReleaseOpening(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		table := &tcpTable{}
		r := newReleasing(t, table, web(webKey+">10.0.0.1:80,10.0.0.2:80"))
		r.revive("10.0.0.1:80")
		for range 2 {
			table.open(webKey, "10.0.0.1:80")
		}
		r.apply(web(webKey + ">10.0.0.2:80"))
		rest(10 * time.Millisecond)
		table.mu.Lock()
		table.flows[0].answered = true
		table.mu.Unlock()
		r.expect(800*time.Millisecond, "one was answered late", 1)
		if f := table.left(); !f[0].answered {
			t.Error("the wrong one is left")
		}
		r.expect(time.Minute, "it is answered", 1)
	})
}

// TestReleaseOpeningDuringProbe: who opens a connection does not wait until an endpoint is probed because of others,
// neither the one it goes to nor another one. These are released once the probe has ended.
func TestReleaseOpeningDuringProbe(t *testing.T) {
	const three, two, one = ">10.0.0.1:80,10.0.0.2:80,10.0.0.3:80", ">10.0.0.2:80,10.0.0.3:80", ">10.0.0.3:80"
	synctest.Test(t, func(t *testing.T) {
		table := &tcpTable{}
		r := newReleasing(t, table, web(webKey+three))
		r.probing = 1500 * time.Millisecond
		for _, endpoint := range []string{"10.0.0.1:80", "10.0.0.2:80"} {
			table.wait(webKey, endpoint)
			table.open(webKey, endpoint)
		}
		r.apply(web(webKey + two))
		r.expect(600*time.Millisecond, "one departed", 3)
		r.apply(web(webKey + one))
		r.expect(600*time.Millisecond, "another one departed", 2)
		r.expect(800*time.Millisecond, "the first probe has ended", 1)
		r.expect(800*time.Millisecond, "the second probe has ended", 0)
	})
}

// TestReleaseOpeningFirst: who opens a connection to an endpoint that departs is sent elsewhere soon, at whatever
// moment that is, although each look at the flows to others, which departed earlier, takes long.
func TestReleaseOpeningFirst(t *testing.T) {
	endpoints := func(from int) (list string) {
		for i := from; i <= 8; i++ {
			list += fmt.Sprintf(",10.0.0.%d:80", i)
		}
		return webKey + ">" + list[1:]
	}
	for at := 2 * time.Second; at < 4*time.Second; at += 50 * time.Millisecond {
		synctest.Test(t, func(t *testing.T) {
			table := &tcpTable{}
			r := newReleasing(t, table, web(endpoints(1)))
			for i := 1; i <= 6; i++ {
				table.hold(webKey, fmt.Sprintf("10.0.0.%d:80", i))
			}
			table.takes = 30 * time.Millisecond
			r.apply(web(endpoints(7)))
			rest(at)
			table.open(webKey, "10.0.0.7:80")
			r.apply(web(endpoints(8)))
			r.expect(900*time.Millisecond, fmt.Sprint("departed after ", at), 6)
			before := table.looks()
			rest(10 * time.Second)
			if looks := table.looks() - before; looks < 6*4 {
				t.Errorf("%d lists of the others in 10 s", looks)
			}
		})
	}
}

// TestReleaseAmongUrgent: a flow that nobody answers is released soon although each look takes long, and others, at
// which clients open connections, go first all the time. What a probe found must not be too old by then. How many
// seconds that takes depends on how a look and a departure at the same moment are ordered; how many looks does not.
func TestReleaseAmongUrgent(t *testing.T) {
	// One in mostInFront+1 looks is for all: one that finds the flow, one after the probe, and the one meanwhile.
	const mostLooks = 2*(mostInFront+1) + 1
	endpoints := func(from int) *dataplane.Service {
		list := ""
		for i := from; i <= 60; i++ {
			list += fmt.Sprintf(",10.0.0.%d:80", i)
		}
		return web(webKey + ">" + list[1:])
	}
	for _, takes := range []time.Duration{300 * time.Millisecond, 600 * time.Millisecond, 900 * time.Millisecond} {
		synctest.Test(t, func(t *testing.T) {
			table := &tcpTable{}
			r := newReleasing(t, table, endpoints(1))
			table.takes = takes
			dead := table.wait(webKey, "10.0.0.1:80").client
			held := func() bool {
				return slices.ContainsFunc(table.left(), func(f flow) bool { return f.client == dead })
			}
			for i := 2; i < 60 && held() && table.looks() <= mostLooks; i++ {
				r.apply(endpoints(i))
				table.open(webKey, fmt.Sprintf("10.0.0.%d:80", i))
				rest(900 * time.Millisecond)
			}
			if held() {
				t.Errorf("lists of %v: it is not released after %d looks; probed %d times", takes, table.looks(), r.probed)
			}
		})
	}
}

// TestReleaseTogether: where many endpoints depart every second or so, and have no flows, one list serves those that
// have just departed and those that are looked at for the second time.
func TestReleaseTogether(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const steps, each = 10, 20
		endpoints := func(step int) *dataplane.Service {
			list := ""
			for i := range each {
				list += fmt.Sprintf(",10.0.%d.%d:80", step, i)
			}
			return web(webKey + ">" + list[1:])
		}
		table := &tcpTable{}
		r := newReleasing(t, table, endpoints(0))
		table.takes = 20 * time.Millisecond
		before := table.looks()
		for step := range steps {
			r.apply(endpoints(step + 1))
			rest(1200 * time.Millisecond)
		}
		if looks := table.looks() - before; looks > steps+1 || looks < steps {
			t.Errorf("%d lists for %d steps", looks, steps)
		}
		before = table.looks()
		rest(time.Minute)
		if looks := table.looks() - before; looks != 1 {
			t.Errorf("%d lists after the last step", looks)
		}
	})
}

// TestReleaseBacksOff: flows that nobody answers, and that may not be released all the same, are looked at less and
// less often, however long a probe takes.
func TestReleaseBacksOff(t *testing.T) {
	for _, probing := range []time.Duration{500 * time.Millisecond, 1500 * time.Millisecond} {
		synctest.Test(t, func(t *testing.T) {
			table := &tcpTable{}
			r := newReleasing(t, table, web(webBoth))
			r.probing = probing
			table.wait(webKey, "10.0.0.1:80").tcp.left = 299 // the client sends without a pause
			r.apply(web(webOne))
			r.expect(time.Hour, "never released", 1)
			if looks := table.looks(); looks > 250 || r.probed > 250 {
				t.Errorf("probes of %v: %d looks and %d probes in an hour", probing, looks, r.probed)
			}
		})
	}
}

// TestReleaseDrain: the deadline ends connections that are answered, and not before.
func TestReleaseDrain(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		table := &tcpTable{}
		r := newReleasing(t, table, draining(web(webBoth), 30*time.Second))
		for range 5 {
			table.hold(webKey, "10.0.0.1:80")
			table.hold(webKey, "10.0.0.2:80")
		}
		r.expect(time.Hour, "all serve", 10)
		r.apply(draining(web(webOne), 30*time.Second))
		r.expect(29900*time.Millisecond, "before the deadline", 10)
		before := table.looks()
		r.expect(200*time.Millisecond, "after the deadline", 5)
		if looks := table.looks() - before; looks != 1 {
			t.Errorf("%d looks at the deadline", looks)
		}
		if r.probed > 0 {
			t.Errorf("%d probes", r.probed)
		}
		if len(r.told) != 1 || r.told[0].Reason != ReleasedDrain || r.told[0].Flows != 5 || len(table.ends) != 2*5 {
			t.Errorf("told %v, reset %v", r.told, table.ends)
		}
	})
}

// TestReleaseByDefaults: nobody asks for reports, and no endpoint is probed.
func TestReleaseByDefaults(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithCancel(t.Context())
		table := &tcpTable{}
		table.hold(webKey, "10.0.0.1:80")
		releaser := newReleaser(table, ReleaserOptions{})
		go releaser.walker.Run(ctx)
		loop := &reconciletest.Loop{Listeners: []reconcile.Listener{releaser.Listener()}, Writer: backendFunc(fine)}
		_, err := loop.Apply(state(draining(web(webOne), time.Second)), dataplane.Change{})
		labtest.Check(t, err)
		rest(time.Minute)
		if n := len(table.left()); n > 0 {
			t.Errorf("%d flows are left after the deadline", n)
		}
		cancel()
		synctest.Wait()
	})
}

// TestReleaseAddressReused: the deadline begins anew when another pod with the address departs.
func TestReleaseAddressReused(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		table := &tcpTable{}
		both, one := draining(web(webBoth), 30*time.Second), draining(web(webOne), 30*time.Second)
		r := newReleasing(t, table, both)
		r.apply(one)
		rest(20 * time.Second)
		r.apply(both)
		table.hold(webKey, "10.0.0.1:80")
		rest(time.Minute)
		r.apply(one)
		r.expect(29*time.Second, "before the deadline", 1)
		r.expect(2*time.Second, "after the deadline", 0)
	})
}

// TestReleaseSharedEndpoint: of two Services with the same endpoint, one drops it.
func TestReleaseSharedEndpoint(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		table := &tcpTable{}
		other := chance("other", otherKey+">10.0.0.1:80")
		r := newReleasing(t, table, web(webBoth), other)
		table.wait(webKey, "10.0.0.1:80")
		table.wait(otherKey, "10.0.0.1:80")
		r.apply(web(webOne), other)
		r.expect(time.Minute, "one drops it", 1)
		if f := table.left()[0]; f.frontend != key(otherKey) {
			t.Errorf("left: %v", f)
		}
	})
}

// TestReleaseAfterRestart: an endpoint departed while no proxy ran.
func TestReleaseAfterRestart(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		table := &tcpTable{}
		r := newReleasing(t, table, web(webBoth))
		table.wait(webKey, "10.0.0.1:80")
		table.wait(webKey, "10.0.0.2:80")
		table.hold(webKey, "10.0.0.1:80")
		r.stop()
		r.start()
		r.apply(web(webOne))
		r.expect(5*time.Second, "restarted", 2)
		r.stop()
		r.start()
		r.apply(draining(web(webOne), time.Minute))
		r.expect(time.Minute, "restarted, before the deadline", 2)
		r.expect(3*time.Second, "restarted, after the deadline", 1)
	})
}

// TestReleaseDiscoversAgain: endpoints that departed while no proxy ran are found, although the first lists fail.
func TestReleaseDiscoversAgain(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		table := &tcpTable{}
		table.wait(webKey, "10.0.0.1:80")
		table.wait(webKey, "10.0.0.2:80")
		table.fails = 2
		r := newReleasing(t, table, web(webOne))
		r.expect(time.Minute, "discovered", 1)
	})
}

// TestReleaseEjected: an ejected endpoint loses the flows that it does not answer, as long as it is ejected. The
// deadline of the Service does not matter: the endpoint serves.
func TestReleaseEjected(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		table := &tcpTable{}
		r := newReleasing(t, table, web(webBoth))
		ejects := func(cause snapshot.Cause) *dataplane.Service {
			s := web(webBoth)
			s.Ports[0].Drain = time.Second
			s.Ports[0].Cluster.Ejected = []snapshot.Unhealthy{
				{Endpoint: netip.MustParseAddrPort("10.0.0.1:80"), Cause: cause, Since: time.Now()}}
			return s
		}
		table.wait(webKey, "10.0.0.1:80")
		table.hold(webKey, "10.0.0.1:80")
		table.wait(webKey, "10.0.0.2:80")
		r.apply(ejects(snapshot.Refused))
		r.expect(time.Minute, "refuses", 3)
		r.apply(ejects(snapshot.Unanswered))
		r.expect(2*time.Second, "just ejected", 3)
		r.apply(web(webBoth))
		r.expect(time.Minute, "back", 3)
		r.apply(ejects(snapshot.Unanswered))
		r.expect(ejectedFor+2*time.Second, "ejected", 2)
		r.expect(time.Hour, "ejected for long", 2)
		table.wait(webKey, "10.0.0.2:80")
		doubts := web(webBoth)
		doubts.Ports[0].Cluster.Kept = []snapshot.Unhealthy{{Endpoint: netip.MustParseAddrPort("10.0.0.2:80"),
			Cause: snapshot.Unanswered, Since: time.Now(), Doubtful: true}}
		r.apply(doubts)
		r.expect(ejectedFor+2*time.Second, "doubted", 1)
	})
}

// TestReleaseDepartsDuringLook: an ejected endpoint departs while its flows are listed. Who opens a connection to it in
// that moment does not wait for the look after the next pause.
func TestReleaseDepartsDuringLook(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		table := &tcpTable{}
		r := newReleasing(t, table, web(webBoth))
		table.hold(webKey, "10.0.0.1:80") // so that its flows are looked at again
		ejects := web(webBoth)
		ejects.Ports[0].Cluster.Ejected = []snapshot.Unhealthy{
			{Endpoint: netip.MustParseAddrPort("10.0.0.1:80"), Cause: snapshot.Unanswered, Since: time.Now()}}
		r.apply(ejects)
		rest(500 * time.Millisecond)
		departed := make(chan struct{})
		table.mu.Lock()
		table.takes = 10 * time.Millisecond
		table.during = func() { r.apply(web(webOne)); close(departed) }
		table.mu.Unlock()
		<-departed
		time.Sleep(time.Millisecond)
		table.open(webKey, "10.0.0.1:80")
		r.expect(900*time.Millisecond, "it departed during a look", 1)
	})
}

// TestReleaseFailure: while nobody knows what is programmed, nothing is judged.
func TestReleaseFailure(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		table := &tcpTable{}
		r := newReleasing(t, table, web(webBoth))
		table.wait(webKey, "10.0.0.1:80")
		r.apply(web(webOne))
		r.loop.Writer = backendFunc(func(*dataplane.State) (dataplane.Receipt, error) {
			return dataplane.Receipt{}, errTable
		})
		if _, err := r.loop.Apply(r.st, dataplane.Change{}); err != errTable {
			t.Fatal(err)
		}
		r.expect(time.Hour, "a failed transaction", 1)
		r.loop.Writer = backendFunc(fine)
		table.fails = 3
		r.apply(web(webOne))
		r.expect(30*time.Second, "in sync again", 0)
	})
}

// TestReleaseBackDuringLook: the endpoint serves again while its flows are listed.
func TestReleaseBackDuringLook(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		table := &tcpTable{}
		r := newReleasing(t, table, web(webBoth))
		table.wait(webKey, "10.0.0.1:80")
		r.apply(web(webOne))
		rest(800 * time.Millisecond)
		table.mu.Lock()
		table.during = func() { r.apply(web(webBoth)) }
		table.mu.Unlock()
		r.expect(time.Minute, "serves again", 1)
	})
}

// TestReleaseMany: more endpoints than are looked at at a time depart.
func TestReleaseMany(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		table := &tcpTable{}
		s, gone := draining(web(webKey), time.Minute), draining(web(webKey), time.Minute)
		for i := range maxGone + 100 {
			e := netip.AddrPortFrom(netip.AddrFrom4([4]byte{10, 1, byte(i >> 8), byte(i)}), 80)
			s.Ports[0].Serving = append(s.Ports[0].Serving, dataplane.Endpoint{AddrPort: e})
			if i%100 == 0 {
				table.hold(webKey, e.String())
			}
		}
		r := newReleasing(t, table, s)
		r.apply(gone)
		r.expect(10*time.Minute, "all departed", 0)
	})
}

// TestReleaseMissing compares lists of endpoints, each a digit.
func TestReleaseMissing(t *testing.T) {
	list := func(digits string) (out []dataplane.Endpoint) {
		for _, d := range []byte(digits) {
			e := netip.AddrPortFrom(netip.AddrFrom4([4]byte{10, 0, 0, d}), 80)
			out = append(out, dataplane.Endpoint{AddrPort: e})
		}
		return out
	}
	for _, test := range [][3]string{{"123", "123", ""}, {"123", "", "123"}, {"", "123", ""}, {"123", "2", "13"},
		{"135", "0246", "135"}, {"13579", "3456", "179"}, {"2", "123", ""}} {
		got := ""
		eachMissing(list(test[0]), list(test[1]), func(e netip.AddrPort) { got += string(e.Addr().AsSlice()[3:]) })
		if got != test[2] {
			t.Errorf("of %q, %q misses %q", test[0], test[1], got)
		}
	}
}

// BenchmarkReleaseFollow is what the sync path pays for a change of one endpoint of 5,000.
func BenchmarkReleaseFollow(b *testing.B) {
	var versions [2]*dataplane.Service
	for v := range versions {
		versions[v] = web(webKey)
		for i := range 5000 - v {
			e := netip.AddrPortFrom(netip.AddrFrom4([4]byte{10, 0, byte(i >> 8), byte(i)}), 80)
			versions[v].Ports[0].Serving = append(versions[v].Ports[0].Serving, dataplane.Endpoint{AddrPort: e})
		}
	}
	h := newReleaser(&tcpTable{}, ReleaserOptions{}).Listener()
	b.ReportAllocs()
	for i := 0; b.Loop(); i++ {
		h.Writing()
		h.Committed(reconcile.Commit{Before: versions[i%2:][:1], After: versions[1-i%2:][:1]})
	}
}

// TestReleaseQueries: few endpoints get a query each, many one for their port, or for their family.
func TestReleaseQueries(t *testing.T) {
	look := func(endpoints ...string) *releaseLook {
		l := &releaseLook{due: map[goneKey]*lookedAt{}}
		for _, e := range endpoints {
			l.due[goneKey{endpoint: netip.MustParseAddrPort(e)}] = nil
		}
		return l
	}
	all4, all6 := query{protocol: snapshot.TCP}, query{family: ipfamily.IPv6, protocol: snapshot.TCP}
	one4 := query{protocol: snapshot.TCP, endpoint: netip.MustParseAddrPort("10.0.0.1:80")}
	port6 := query{family: ipfamily.IPv6, protocol: snapshot.TCP, endpoint: netip.MustParseAddrPort("[::]:80")}
	port4 := query{protocol: snapshot.TCP, endpoint: netip.MustParseAddrPort("0.0.0.0:80")}
	var many, ports []string
	for i := range maxSingleEndpoints + 1 {
		many = append(many, fmt.Sprintf("10.0.0.%d:80", i))
		ports = append(ports, fmt.Sprintf("10.0.0.%d:%d", i, 80+i%(maxPorts+1)))
	}
	everything := look()
	everything.all = true
	for i, test := range []struct {
		look    *releaseLook
		filters bool
		want    []query
	}{
		{look("10.0.0.1:80"), true, []query{one4}},
		{look("[fd00::1]:80", "[fd00::2]:80"), true, []query{port6}},
		{look(many...), true, []query{port4}},
		{look(ports...), true, []query{all4}},
		{look("10.0.0.1:80", "[fd00::1]:80"), false, []query{{}, {family: ipfamily.IPv6}}},
		{everything, true, []query{all4, all6}},
	} {
		if got := test.look.queries(test.filters); !slices.Equal(got, test.want) {
			t.Errorf("%d: %v, want %v", i, got, test.want)
		}
	}
	got := look(many[:maxSingleEndpoints]...).queries(true)
	if len(got) != maxSingleEndpoints || slices.Contains(got, all4) {
		t.Errorf("as many as may have one each: %v", got)
	}
}
