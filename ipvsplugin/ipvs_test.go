package ipvsplugin

import (
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"os"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/verdict-proxy/verdict/internal/lab"
	"github.com/verdict-proxy/verdict/internal/lab/labtest"
	"github.com/verdict-proxy/verdict/internal/system/ipfamily"
	"github.com/verdict-proxy/verdict/internal/system/testkit"
	"github.com/verdict-proxy/verdict/sync/dataplane"
	"github.com/verdict-proxy/verdict/sync/reconcile"
	"github.com/verdict-proxy/verdict/sync/snapshot"
)

// flow is one way to a Service, and what must come of it.
type flow struct {
	from *lab.Host
	to   netip.AddrPort
	// localOnly says that the policy is Local for the sender; masqueraded that the endpoint sees the node.
	localOnly, masqueraded bool
}

// flows works out from the contract who is served how: every kind of frontend, from everywhere.
func (w *world) flows(a app, f ipfamily.Family) (list []flow) {
	i := map[ipfamily.Family]int{ipfamily.IPv4: 0, ipfamily.IPv6: 1}[f]
	cluster := vip(a.number, f)
	external := []netip.AddrPort{netip.AddrPortFrom(lab.Nth(lab.ExternalRange[i], a.number), 80),
		netip.AddrPortFrom(lab.Nth(lab.ExternalRange[i], 100+a.number),
			80), netip.AddrPortFrom(w.Node.IP(f), uint16(30000+a.number))}
	for _, from := range []*lab.Host{w.Pods[0], w.Pods[2], w.RemotePods[2], w.Node, w.Outside} {
		// By their interface only the pods of this node are known.
		byRange := w.planner.Config().DetectLocal.Mode != dataplane.DetectInterfaceNamePrefix
		pod := slices.Contains(w.Pods, from) || byRange && slices.Contains(w.RemotePods, from)
		list = append(list, flow{from, cluster, a.internalLocal, !pod})
		for _, to := range external {
			list = append(list, flow{from, to, a.externalLocal && !pod && from != w.Node, !a.externalLocal || from == w.Node})
		}
	}
	return list
}

// TestIPVSFlows sends flows from everywhere to every kind of frontend, under every policy, with endpoints here,
// elsewhere and nowhere. IPVS schedules, and everything else is as it is without.
func TestIPVSFlows(t *testing.T) {
	byPrefix := func(p string) dataplane.DetectLocal {
		return dataplane.DetectLocal{Mode: dataplane.DetectInterfaceNamePrefix, Interface: p}
	}
	for _, test := range []struct {
		name   string
		bridge string
		detect dataplane.DetectLocal
	}{
		{"ranges", "", dataplane.DetectLocal{ClusterCIDRs: lab.PodRange}},
		{"interfaces", "", byPrefix("veth")},
		{"ranges, on a bridge", "cni0", dataplane.DetectLocal{ClusterCIDRs: lab.PodRange}},
		{"interfaces, on a bridge", "cni0", byPrefix("cni")},
	} {
		t.Run(test.name, func(t *testing.T) {
			w := newWorldOf(t, lab.Config{LocalPods: 3, RemotePods: 3, PodBridge: test.bridge}, dataplane.IPVSAlways)
			c := w.planner.Config()
			c.DetectLocal = test.detect
			w.planner.SetConfig(c)
			w.allFlows()
		})
	}
}

// allFlows sends packets from everywhere to Services with endpoints here, there, both or nowhere, of all policies.
func (w *world) allFlows() {
	var apps []app
	var all []snapshot.Delta
	for _, ends := range [][2][]endpoint{{ready(0, 1), ready(0, 1)}, {nil, ready(0, 1)}, {ready(0, 1), nil}, {nil, nil}} {
		for policy := range 4 {
			apps = append(
				apps,
				app{number: len(apps) + 1, external: true, internalLocal: policy&1 != 0, externalLocal: policy&2 != 0,
					here: ends[0], there: ends[1]},
			)
			all = append(all, w.delta(apps[len(apps)-1]))
		}
	}
	w.apply(all...)
	w.wants()
	var wg sync.WaitGroup
	slots := make(chan struct{}, 48)
	n := 0
	for _, a := range apps {
		for _, f := range lab.Families() {
			for _, fl := range w.flows(a, f) {
				p := protocols[n%3]
				n++
				slots <- struct{}{}
				wg.Go(func() {
					defer func() { <-slots }()
					w.send(a, fl, p)
				})
			}
		}
	}
	wg.Wait()
	w.t.Logf("%d flows", n)
	w.wants()
}

// send sends one flow.
func (w *world) send(a app, fl flow, p snapshot.Protocol) {
	var by []string
	for n, list := range [][]endpoint{a.here, a.there} {
		for _, e := range list {
			if n == 0 || !fl.localOnly {
				by = append(by, [][]*lab.Host{w.Pods, w.RemotePods}[n][e.pod].Name)
			}
		}
	}
	want := lab.Answered
	switch {
	case len(by) > 0:
	case len(a.there) > 0:
		want = lab.TimedOut
	default:
		want = lab.Refused
	}
	wait := patience
	if want == lab.TimedOut {
		wait = time.Second
	}
	r := fl.from.Dial(p, fl.to, lab.Options{Timeout: wait})
	what := fmt.Sprintf("%s to %s/%s (internal local %v, external local %v): %v", fl.from.Name, fl.to, p, a.internalLocal,
		a.externalLocal, r)
	switch {
	case r.Outcome != want:
		w.t.Errorf("%s; want %v by %v", what, want, by)
	case want != lab.Answered:
	case !slices.Contains(by, r.Endpoint):
		w.t.Errorf("%s; want one of %v", what, by)
	default:
		masqueraded := fl.masqueraded || r.Endpoint == fl.from.Name
		node := slices.Contains(w.nodeAddrs(), r.Source.Addr())
		if masqueraded != node && fl.from != w.Node || fl.from == w.Node && !node {
			w.t.Errorf("%s; masqueraded should be %v", what, masqueraded)
		}
	}
}

// count dials n times and counts who answers.
func (w *world) count(from *lab.Host, p snapshot.Protocol, to netip.AddrPort, n int) map[string]int {
	w.t.Helper()
	count := map[string]int{}
	for range n {
		r := from.Dial(p, to, lab.Options{Timeout: patience})
		if r.Outcome != lab.Answered {
			w.t.Errorf("%s to %v/%s: %v", from.Name, to, p, r)
		}
		count[r.Endpoint]++
	}
	return count
}

// TestIPVSSchedulers has schedulers do what no random choice does.
func TestIPVSSchedulers(t *testing.T) {
	w := newWorld(t, 4, 0, dataplane.IPVSAlways)
	all := ready(0, 1, 2)
	weighted := ready(0, 1, 2)
	weighted[0].weight = 5
	w.apply(w.delta(app{number: 1, scheduling: scheduler("rr"), here: all}),
		w.delta(app{number: 2, scheduling: scheduler("wrr"), here: weighted}),
		w.delta(app{number: 3, scheduling: scheduler("lc"), here: all}),
		w.delta(app{number: 4, scheduling: &snapshot.Scheduling{Scheduler: "sh", Port: true, Fallback: true}, here: all}),
		w.delta(app{number: 5, scheduling: scheduler("rr"), affinity: time.Minute, here: all}),
		w.delta(app{number: 6, here: weighted})) // the node's default is rr, which would ignore weights
	w.wants()
	for _, f := range lab.Families() {
		for _, c := range []struct {
			number int
			want   map[string]int
		}{
			{1, map[string]int{"pod-1": 7, "pod-2": 7, "pod-3": 7}},
			{2, map[string]int{"pod-1": 15, "pod-2": 3, "pod-3": 3}},
			{6, map[string]int{"pod-1": 15, "pod-2": 3, "pod-3": 3}},
		} {
			if got := w.count(w.Pods[3], snapshot.TCP, vip(c.number, f), 21); !maps.Equal(got, c.want) {
				t.Errorf("%v: %v, want %v", vip(c.number, f), got, c.want)
			}
		}
		if got := w.count(w.Pods[3], snapshot.TCP, vip(5, f), 10); len(got) != 1 {
			t.Errorf("with affinity %v answer", got)
		}
		w.leastConnections(f)
	}
}

// leastConnections holds connections to one endpoint: new ones go to the others until they have as many.
func (w *world) leastConnections(f ipfamily.Family) {
	w.t.Helper()
	held := map[string]int{}
	for range 12 {
		c, r := w.Pods[3].Open(snapshot.TCP, vip(3, f), lab.Options{Timeout: patience})
		if c == nil {
			w.t.Fatal(r)
		}
		held[r.Endpoint]++
		if r.Endpoint == "pod-1" { // its connections end at once, so that it always has the fewest
			labtest.Check(w.t, c.Close())
			time.Sleep(20 * time.Millisecond)
		}
	}
	if held["pod-2"]+held["pod-3"] > 10 || held["pod-2"] == 0 || held["pod-3"] == 0 {
		w.t.Errorf("lc: %v", held)
	}
	w.t.Logf("lc over %v: %v", f, held)
}

// TestIPVSHashes counts how many clients get another endpoint when one of ten begins to drain, and when it is gone.
func TestIPVSHashes(t *testing.T) {
	w := newWorld(t, 5, 6, dataplane.IPVSAuto)
	client := w.RemotePods[5]
	for n, name := range []string{"sh", "mh"} {
		a := app{number: n + 1, scheduling: &snapshot.Scheduling{Scheduler: name, Port: true},
			here: ready(0, 1, 2, 3, 4), there: ready(0, 1, 2, 3, 4)}
		w.apply(w.delta(a))
		ask := func() (who []string) {
			for i := range 120 {
				r := client.Dial(snapshot.TCP, vip(a.number, ipfamily.IPv4), lab.Options{Timeout: patience,
					From: netip.AddrPortFrom(client.IP4, uint16(20000+i))})
				if r.Outcome != lab.Answered {
					t.Errorf("%s: %v", name, r)
				}
				who = append(who, r.Endpoint)
			}
			return who
		}
		before := ask()
		if again := ask(); !slices.Equal(before, again) {
			t.Errorf("%s does not choose the same again", name)
		}
		held, r := client.Open(snapshot.TCP, vip(a.number, ipfamily.IPv4), lab.Options{Timeout: patience})
		for r.Endpoint != "pod-1" {
			labtest.Check(t, held.Close())
			held, r = client.Open(snapshot.TCP, vip(a.number, ipfamily.IPv4), lab.Options{Timeout: patience})
		}
		a.here = a.here[1:]
		w.apply(w.delta(a))
		draining := moved(before, ask())
		t.Logf("%s: while pod-1 drains %s", name, draining)
		if draining.others > 0 && name == "sh" || draining.others > 15 || draining.gone > 0 {
			t.Errorf("%s: %s", name, draining)
		}
		if r := held.Ping(patience); r.Outcome != lab.Answered {
			t.Errorf("%s: the connection to the endpoint that drains: %v", name, r)
		}
		labtest.Check(t, held.Close())
	}
}

// TestIPVSRemoves counts how many clients get another endpoint when one of ten is gone. UDP has it gone at once.
func TestIPVSRemoves(t *testing.T) {
	w := newWorld(t, 5, 6, dataplane.IPVSAuto)
	client := w.RemotePods[5]
	labtest.Run(t, w.Node, "", "ipvsadm", "--set", "0", "0", "1") // what is asked again is a new flow
	for n, name := range []string{"sh", "mh"} {
		a := app{number: n + 1, scheduling: &snapshot.Scheduling{Scheduler: name, Port: true},
			here: ready(0, 1, 2, 3, 4), there: ready(0, 1, 2, 3, 4)}
		w.apply(w.delta(a))
		ask := func() (who []string) {
			for i := range 120 {
				r := client.Dial(snapshot.UDP, vip(a.number, ipfamily.IPv4), lab.Options{Timeout: patience,
					From: netip.AddrPortFrom(client.IP4, uint16(20000+i))})
				if r.Outcome != lab.Answered {
					t.Errorf("%s: %v", name, r)
				}
				who = append(who, r.Endpoint)
			}
			return who
		}
		before := ask()
		a.here = a.here[1:]
		w.apply(w.delta(a))
		w.forgotten()
		m := moved(before, ask())
		t.Logf("%s: after pod-1 is gone %s", name, m)
		if m.gone > 0 || name == "mh" && m.others > m.of/4 || name == "sh" && m.others < m.of/4 {
			t.Errorf("%s: %s", name, m)
		}
		w.forgotten()
	}
}

// forgotten waits until IPVS has no connection.
func (w *world) forgotten() {
	w.t.Helper()
	w.until("no connection is left", func() bool {
		return strings.Count(labtest.Run(w.t, w.Node, "", "cat", "/proc/net/ip_vs_conn"), "\n") <= 1
	})
}

// movement says how many clients changed.
type movement struct{ of, others, gone int }

func (m movement) String() string {
	return fmt.Sprintf("%d of %d clients of other endpoints changed, %d were still sent to it", m.others, m.of, m.gone)
}

func moved(before, after []string) (m movement) {
	for i := range before {
		switch {
		case after[i] == "pod-1":
			m.gone++
		case before[i] == "pod-1":
		default:
			m.of++
			if before[i] != after[i] {
				m.others++
			}
		}
	}
	return m
}

// TestIPVSDrains has endpoints go, with connections and without, across a restart, and come back.
func TestIPVSDrains(t *testing.T) {
	w := newWorld(t, 3, 0, dataplane.IPVSAuto)
	a := app{number: 1, scheduling: scheduler("rr"), here: ready(0, 1)}
	w.apply(w.delta(a))
	conns := map[string]*lab.Conn{}
	for range 2 {
		c, r := w.Outside.Open(snapshot.TCP, vip(1, ipfamily.IPv4), lab.Options{Timeout: patience})
		if c == nil {
			t.Fatal(r)
		}
		conns[r.Endpoint] = c
	}
	alive := func() {
		t.Helper()
		for name, c := range conns {
			if r := c.Ping(patience); r.Outcome != lab.Answered {
				t.Errorf("the connection to %s: %v", name, r)
			}
		}
	}
	a.here = ready(0)
	w.apply(w.delta(a))
	w.has("-a -t 10.96.0.1:80 -r 10.244.1.11:8080 -m -w 0")
	w.lacks("-u 10.96.0.1:80 -r 10.244.1.11:8080", "[fd00:10:244:1::b]:8080 -m -w 1")
	alive()
	if got := w.count(w.Pods[2], snapshot.TCP, vip(1, ipfamily.IPv4), 6); got["pod-1"] != 6 {
		t.Errorf("new connections: %v", got)
	}

	// It comes back.
	a.here = ready(0, 1)
	w.apply(w.delta(a))
	w.wants()
	alive()

	// It goes again, and the proxy is another one.
	a.here = ready(0)
	w.apply(w.delta(a))
	w.close()
	w.open()
	if r := w.apply(); !r.Adopted || r.Added+r.Replaced+r.Removed > 0 {
		t.Errorf("a new process wrote %+v", r)
	}
	w.has("-a -t 10.96.0.1:80 -r 10.244.1.11:8080 -m -w 0")
	alive()
	labtest.Check(t, w.tcp["pod-2"].Close()) // by RST, which IPVS remembers for 10 seconds only
	delete(conns, "pod-2")
	w.until("the destination goes", func() bool { return !strings.Contains(w.list(), "10.244.1.11") })
	alive()
	w.wants()

	// The Service goes back to nftables: what it has goes on, and new connections are nftables'.
	a.scheduling, a.here = scheduler("nftables"), ready(0, 1)
	w.apply(w.delta(a))
	w.has("-a -t 10.96.0.1:80 -r 10.244.1.10:8080 -m -w 0")
	alive()
	if got := w.count(w.Pods[2], snapshot.UDP, vip(1, ipfamily.IPv4), 12); got["pod-2"] == 0 {
		t.Errorf("new connections: %v", got)
	}
	// And away.
	w.apply(snapshot.Delta{Services: map[snapshot.Name]*snapshot.Service{a.name(): nil}})
	alive()
	labtest.Check(t, w.tcp["pod-1"].Close())
	w.until("all goes", func() bool { return w.list() == "" && !strings.Contains(w.routes(), "86") })
}

// TestIPVSLimit gives an endpoint up whose connections do not end.
func TestIPVSLimit(t *testing.T) {
	w := newWorld(t, 3, 0, dataplane.IPVSAuto)
	a := app{number: 1, scheduling: scheduler("rr"), here: ready(0)}
	w.apply(w.delta(a))
	c, r := w.Pods[2].Open(snapshot.TCP, vip(1, ipfamily.IPv4), lab.Options{Timeout: patience})
	if c == nil {
		t.Fatal(r)
	}
	a.here = ready(1)
	w.apply(w.delta(a))
	w.close()
	w.open()
	w.apply()
	w.has("-r 10.244.1.10:8080 -m -w 0")
	for range 3 {
		w.check()
		time.Sleep(drainEvery)
	}
	w.has("-r 10.244.1.10:8080 -m -w 0")
	w.backend.now = func() time.Time { return time.Now().Add(DefaultDrainLimit) }
	w.until("the destination is given up", func() bool { return !strings.Contains(w.list(), "10.244.1.10") })
}

func (w *world) has(lines ...string) {
	w.t.Helper()
	for _, l := range lines {
		if list := w.list(); !strings.Contains(list, l) {
			w.t.Errorf("ipvsadm lists\n%swithout %q", list, l)
		}
	}
}

func (w *world) lacks(lines ...string) {
	w.t.Helper()
	for _, l := range lines {
		if list := w.list(); strings.Contains(list, l) {
			w.t.Errorf("ipvsadm lists\n%swith %q", list, l)
		}
	}
}

func (w *world) routes() string {
	w.t.Helper()
	return labtest.Run(w.t, w.Node, "", "ip", "route", "show", "table", "local", "proto", "86") +
		labtest.Run(w.t, w.Node, "", "ip", "-6", "route", "show", "table", "local", "proto", "86")
}

// TestIPVSOthers leaves alone what others have, through start, change and cleanup; and restores what it changed.
func TestIPVSOthers(t *testing.T) {
	w := newWorld(t, 2, 0, dataplane.IPVSAuto)
	theirs := `-A -t 10.96.0.2:80 -s wlc
-a -t 10.96.0.2:80 -r 10.244.1.10:8080 -m -w 7
-A -t 192.0.2.10:443 -s rr -p 60
-a -t 192.0.2.10:443 -r 10.244.1.10:8080 -m -w 0
-A -f 7 -s rr
`
	labtest.Run(t, w.Node, theirs, "ipvsadm", "-R")
	theirs = w.list()
	before := w.sysctls()
	w.backend.options.Timeouts = Timeouts{TimeoutTCP: time.Hour, TimeoutUDP: 7 * time.Second}
	labtest.Run(
		t,
		w.Node,
		"",
		"ip",
		"route",
		"add",
		"local",
		"203.0.113.77",
		"dev",
		"lo",
		"table",
		"local",
		"proto",
		"static",
	)

	w.apply(w.delta(app{number: 1, scheduling: scheduler("rr"), here: ready(0)}))
	_, err := w.try(w.delta(app{number: 2, scheduling: scheduler("rr"), here: ready(0, 1)}))
	w.lacks("-t 10.96.0.2:80 -r 10.244.1.11")
	refused, ok := err.(*dataplane.Refused)
	if !ok || len(refused.Services) != 1 || refused.Services[app{number: 2}.name()] == nil ||
		!strings.Contains(err.Error(), "10.96.0.2:80/tcp belongs to another program") {
		t.Errorf("%v", err)
	}
	w.apply(snapshot.Delta{Services: map[snapshot.Name]*snapshot.Service{app{number: 2}.name(): nil}})
	for line := range strings.Lines(theirs) {
		w.has(strings.TrimSpace(line))
	}
	if after := w.sysctls(); after != "1 1 1 1" {
		t.Errorf("sysctls %s", after)
	}
	if out := labtest.Run(t, w.Node, "", "ipvsadm", "-L", "--timeout"); !strings.Contains(out, ": 3600 120 7") {
		t.Error(out)
	}
	w.close()
	w.open()
	w.inside(w.backend.Remove)
	if got := w.list(); got != theirs {
		t.Errorf("left are\n%swant\n%s", got, theirs)
	}
	if after := w.sysctls(); after != before {
		t.Errorf("sysctls were %s, are %s", before, after)
	}
	if out := labtest.Run(t, w.Node, "", "ipvsadm", "-L", "--timeout"); !strings.Contains(out, ": 900 120 300") {
		t.Error(out)
	}
	if r := w.routes(); r != "" {
		t.Errorf("routes: %s", r)
	}
	if r := labtest.Run(t, w.Node, "", "ip", "route", "show", "table", "local"); !strings.Contains(r, "203.0.113.77") {
		t.Errorf("routes: %s", r)
	}
	if left := labtest.Run(t, w.Node, "", "nft", "list", "tables"); left != "" {
		t.Errorf("tables: %s", left)
	}
}

func (w *world) sysctls() string {
	w.t.Helper()
	d := "/proc/sys/net/ipv4/vs/"
	out := labtest.Run(w.t, w.Node, "", "cat", d+"conntrack", d+"expire_nodest_conn", d+"expire_quiescent_template",
		d+"conn_reuse_mode")
	return strings.Join(strings.Fields(out), " ")
}

// TestIPVSForeignHands repairs what others do to ours.
func TestIPVSForeignHands(t *testing.T) {
	w := newWorld(t, 2, 0, dataplane.IPVSAuto)
	w.apply(w.delta(app{number: 1, scheduling: scheduler("lc"), here: ready(0, 1), external: true}))
	want := sortedLines(w.list())
	for _, do := range [][]string{
		{"ipvsadm", "-C"},
		{"ipvsadm", "-d", "-t", "10.96.0.1:80", "-r", "10.244.1.10:8080"},
		{"ipvsadm", "-e", "-t", "10.96.0.1:80", "-r", "10.244.1.10:8080", "-m", "-w", "9"},
		{"ipvsadm", "-a", "-u", "10.96.0.1:80", "-r", "10.244.1.99:8080", "-m"},
		{"ipvsadm", "-D", "-u", "[fd00:10:96::1]:80"},
		{"ipvsadm", "-E", "-t", "192.0.2.10:30001", "-s", "rr"},
		{"ip", "route", "del", "local", "10.96.0.1", "dev", "lo", "table", "local"},
		{"ip", "-6", "route", "flush", "table", "local", "proto", "86"},
		{"nft", "delete", "table", "arp", guardTable},
		{"nft", "flush", "set", "ip", guardTable, guardSet},
		{"nft", "flush", "ruleset"},
	} {
		labtest.Run(t, w.Node, "", do[0], do[1:]...)
		var found []string
		for start := time.Now(); found == nil && time.Since(start) < 20*time.Second; time.Sleep(50 * time.Millisecond) {
			found = w.check()
		}
		t.Logf("%v: %q", do, found)
		w.apply()
		if got := sortedLines(w.list()); found == nil || got != want {
			t.Errorf("%v: found %q; left are\n%s", do, found, got)
		}
		for start := time.Now(); time.Since(start) < 3*time.Second; time.Sleep(100 * time.Millisecond) {
			if again := w.check(); again != nil {
				t.Errorf("%v: after the repair: %q", do, again)
				w.apply()
			}
		}
		w.guarded(true)
	}
}

// guarded checks routes and guard of app 1.
func (w *world) guarded(want bool) {
	w.t.Helper()
	routes := w.routes()
	sets := ""
	for _, f := range []string{"arp", "ip", "ip6"} {
		out, _ := w.Node.Run("nft", "list", "table", f, guardTable)
		sets += out
	}
	for _, a := range []string{"10.96.0.1", "203.0.113.1", "fd00:10:96::1", "2001:db8:cb::1"} {
		times := 2 // in arp and ip
		if strings.Contains(a, ":") {
			times = 1
		}
		if got := strings.Contains(routes, a+" "); got != want {
			w.t.Errorf("a route to %s: %v:\n%s", a, got, routes)
		}
		if got := strings.Count(strings.NewReplacer(",", " ").Replace(sets), a+" ") >= times; got != want {
			w.t.Errorf("a guard of %s: %v:\n%s", a, got, sets)
		}
	}
}

// TestIPVSGuard has nobody reach at a Service's address what is no Service's.
func TestIPVSGuard(t *testing.T) {
	w := newWorld(t, 2, 1, dataplane.IPVSAuto)
	_, err := w.Node.Serve(snapshot.TCP, 22)
	labtest.Check(t, err)
	_, err = w.Node.Serve(snapshot.UDP, 22)
	labtest.Check(t, err)
	w.apply(w.delta(app{number: 1, scheduling: scheduler("rr"), here: ready(0), external: true}))
	for _, p := range []string{"10.96.0.1", "203.0.113.1", "fd00:10:96::1", "2001:db8:cb::1"} {
		addr := netip.MustParseAddr(p)
		for _, from := range []*lab.Host{w.Pods[0], w.Outside, w.Node} {
			for _, proto := range protocols[:2] {
				if r := from.Dial(proto, netip.AddrPortFrom(addr, 22), lab.Options{Timeout: patience}); r.Outcome != lab.Refused {
					t.Errorf("%s to %s port 22/%s: %v", from.Name, p, proto, r)
				}
			}
			if out, err := from.Run("ping", "-c", "1", "-W", "1", p); err == nil {
				t.Errorf("%s pings %s: %s", from.Name, p, out)
			}
		}
	}
	r := w.Outside.Dial(snapshot.TCP, netip.AddrPortFrom(w.Node.IP4, 22), lab.Options{Timeout: patience})
	if r.Outcome != lab.Answered {
		t.Errorf("the node itself: %v", r)
	}
	// ARP: node2 is on the same wire, and believes that the address is, too.
	labtest.Run(t, w.Node2, "", "ip", "route", "add", "203.0.113.1", "dev", "eth0")
	arp := func() bool {
		_, _ = w.Node2.Run("ping", "-c", "1", "-W", "1", "203.0.113.1")
		return strings.Contains(labtest.Run(t, w.Node2, "", "ip", "neigh", "show", "203.0.113.1"), "lladdr")
	}
	if arp() {
		t.Error("the node answers ARP")
	}
	// An address that is put on a device is the node's own.
	labtest.Check(t, w.Node.AddAddr("eth0", netip.MustParsePrefix("203.0.113.1/32")))
	w.until("the address is not guarded", func() bool {
		return w.Outside.Dial(snapshot.TCP, netip.MustParseAddrPort("203.0.113.1:22"),
			lab.Options{Timeout: time.Second}).Outcome == lab.Answered
	})
	labtest.Run(t, w.Node2, "", "ip", "neigh", "flush", "all")
	if !arp() {
		t.Error("the node does not answer ARP for an address of its own")
	}
	r = w.Outside.Dial(snapshot.TCP, netip.MustParseAddrPort("203.0.113.1:80"), lab.Options{Timeout: patience})
	if r.Endpoint != "pod-1" {
		t.Errorf("the Service there: %v", r)
	}
	labtest.Check(t, w.Node.DelAddr("eth0", netip.MustParsePrefix("203.0.113.1/32")))
	w.until("the address is guarded again", func() bool {
		return w.Outside.Dial(snapshot.TCP, netip.MustParseAddrPort("203.0.113.1:22"),
			lab.Options{Timeout: time.Second}).Outcome == lab.Refused
	})
}

// TestIPVSStatistics counts.
func TestIPVSStatistics(t *testing.T) {
	w := newWorld(t, 3, 0, dataplane.IPVSAuto)
	if s, err := w.backend.Statistics(); err != nil || s != nil {
		t.Errorf("before: %v, %v", s, err)
	}
	w.apply(w.delta(app{number: 1, scheduling: scheduler("rr"), here: ready(0, 1)}))
	w.count(w.Pods[2], snapshot.TCP, vip(1, ipfamily.IPv4), 10)
	var of ServiceStatistics
	w.until("ten connections are counted", func() bool {
		all, err := w.backend.Statistics()
		labtest.Check(t, err)
		of = all[slices.IndexFunc(all, func(s ServiceStatistics) bool { return s.Key.String() == "10.96.0.1:80/tcp" })]
		return len(all) == 6 && of.Connections == 10 && of.ConnectionRate > 0
	})
	w.inside(func() error {
		all, err := ReadStatistics()
		if len(all) != 6 {
			t.Errorf("another process reads %v", all)
		}
		return err
	})
	var err error
	of.Destinations, err = w.backend.DestinationStatistics(of.Key)
	labtest.Check(t, err)
	t.Logf("%+v", of)
	if len(of.Destinations) != 2 || of.Destinations[0].Connections != 5 || of.BytesIn < 10*40 || of.PacketsIn < 20 ||
		of.BytesOut == 0 {
		t.Errorf("%+v", of)
	}
}

// TestIPVSProbe names what is missing.
func TestIPVSProbe(t *testing.T) {
	needIPVS(t)
	h := labtest.NewHost(t, labtest.NewNet(t), "node")
	labtest.Check(t, h.Do(func() error {
		if err := Probe("rr", "lc", "wlc", "sh", "mh"); err != nil {
			t.Error(err)
		}
		err := Probe("rr", "nosuch")
		if missing, ok := err.(*Missing); !ok || !slices.Equal(missing.Modules, []string{"ip_vs_nosuch"}) {
			t.Error(err)
		}
		before := descriptors(t)
		for range 5 {
			_ = Probe("rr")
			_, _ = Differences(&dataplane.State{})
		}
		if after := descriptors(t); after > before {
			t.Errorf("%d descriptors are open, before there were %d", after, before)
		}
		return nil
	}))
	if left := labtest.Run(t, h, "", "ipvsadm", "-Sn"); left != "" {
		t.Errorf("the probe left %s", left)
	}
}

// descriptors counts those that this process has open.
func descriptors(t *testing.T) int {
	t.Helper()
	list, err := os.ReadDir("/proc/self/fd")
	labtest.Check(t, err)
	return len(list)
}

// TestIPVSLeaves has a client leave an endpoint that drains; and a UDP client leave one that is gone, within its flow.
func TestIPVSLeaves(t *testing.T) {
	w := newWorld(t, 3, 0, dataplane.IPVSAlways)
	a := app{number: 1, scheduling: scheduler("rr"), affinity: time.Hour, here: ready(0, 1)}
	w.apply(w.delta(a))
	for _, f := range lab.Families() {
		c, r := w.Pods[2].Open(snapshot.UDP, vip(1, f), lab.Options{Timeout: patience})
		if c == nil {
			t.Fatal(r)
		}
		tcp, r2 := w.Pods[2].Open(snapshot.TCP, vip(1, f), lab.Options{Timeout: patience})
		if tcp == nil {
			t.Fatal(r2)
		}
		for _, who := range []string{"pod-2", "pod-1"} {
			a.here = ready(int(who[4] - '1'))
			w.apply(w.delta(a))
			for start := time.Now(); ; {
				r := c.Ping(time.Second)
				if r.Outcome == lab.Answered && r.Endpoint == who {
					break
				}
				if time.Since(start) > 10*time.Second {
					t.Fatalf("UDP: %v, want %s", r, who)
				}
			}
			if got := w.count(w.Pods[2], snapshot.TCP, vip(1, f), 3); got[who] != 3 {
				t.Errorf("%v answer a client with affinity, want %s", got, who)
			}
			if r := tcp.Ping(patience); r.Outcome != lab.Answered {
				t.Errorf("its connection: %v", r)
			}
		}
		labtest.Check(t, errors.Join(c.Close(), tcp.Close()))
	}
}

// TestIPVSSource gives connections of the node the node's address, also where nothing is masqueraded, and follows it.
func TestIPVSSource(t *testing.T) {
	w := newWorld(t, 1, 1, dataplane.IPVSAuto)
	w.planner = dataplane.NewPlanner(dataplane.Config{NodeName: "node", IPVS: dataplane.IPVS{Mode: dataplane.IPVSAuto}})
	w.apply(w.delta(app{number: 1, scheduling: scheduler("rr"), there: ready(0)}))
	from := func() netip.Addr {
		r := w.Node.Dial(snapshot.TCP, vip(1, ipfamily.IPv4), lab.Options{Timeout: patience})
		return r.Source.Addr()
	}
	if a := from(); a != w.Node.IP4 {
		t.Errorf("a connection of the node has %v", a)
	}
	second := netip.MustParseAddr("192.0.2.11")
	labtest.Check(t, w.Node.AddAddr("eth0", netip.PrefixFrom(second, 24)))
	w.inside(func() error {
		w.backend.options.NodeAddrs = func() []netip.Addr { return []netip.Addr{second, w.Node.IP6} }
		return nil
	})
	w.repairs("the node's address has changed")
	if a := from(); a != second {
		t.Errorf("a connection of the node has %v", a)
	}
	// The kernel takes the routes away with the address.
	labtest.Check(t, w.Node.DelAddr("eth0", netip.PrefixFrom(second, 24)))
	w.repairs("")
	if a := from(); a != w.Node.IP4 {
		t.Errorf("a connection of the node has %v", a)
	}
}

// repairs waits for a finding, and repairs it.
func (w *world) repairs(want string) {
	w.t.Helper()
	for start := time.Now(); ; time.Sleep(50 * time.Millisecond) {
		if found := w.check(); found != nil {
			if want != "" && found[0] != want {
				w.t.Errorf("found %q", found)
			}
			break
		}
		if time.Since(start) > 20*time.Second {
			w.t.Fatal("nothing is found")
		}
	}
	w.apply()
}

// TestIPVSUnused leaves IPVS alone as long as no Service asks for it.
func TestIPVSUnused(t *testing.T) {
	w := newWorld(t, 1, 0, dataplane.IPVSAuto)
	before := w.sysctls()
	w.apply(w.delta(app{number: 1, here: ready(0), external: true}))
	w.check()
	tables := labtest.Run(t, w.Node, "", "nft", "list", "tables")
	if after := w.sysctls(); after != before || w.list() != "" || w.routes() != "" ||
		strings.Contains(tables, guardTable) {
		t.Errorf("sysctls %s, services %s, routes %s, tables %s", after, w.list(), w.routes(), tables)
	}
	w.inside(w.backend.Remove)
}

// TestIPVSAdopts takes a virtual service of kube-proxy as it is, with a connection.
func TestIPVSAdopts(t *testing.T) {
	w := newWorld(t, 3, 0, dataplane.IPVSAuto)
	labtest.Run(t, w.Node, "-A -t 10.96.0.1:80 -s wlc\n-a -t 10.96.0.1:80 -r 10.244.1.10:8080 -m -w 1\n", "ipvsadm", "-R")
	labtest.Run(t, w.Node, "", "ip", "link", "add", "kube-ipvs0", "type", "dummy")
	labtest.Check(t, w.Node.AddAddr("kube-ipvs0", netip.MustParsePrefix("10.96.0.1/32")))
	labtest.Check(t, w.Node.Sysctl("net/ipv4/vs/conntrack", "1"))
	c, r := w.Pods[2].Open(snapshot.TCP, vip(1, ipfamily.IPv4), lab.Options{Timeout: patience})
	if c == nil {
		t.Fatal(r)
	}
	var asked []VirtualService
	w.backend.options.Adopt = func(vs VirtualService) bool { asked = append(asked, vs); return true }
	w.apply(w.delta(app{number: 1, scheduling: scheduler("rr"), here: ready(1)}))
	if len(asked) != 1 || len(asked[0].Destinations) != 1 || asked[0].Scheduler != "wlc" {
		t.Errorf("asked about %+v", asked)
	}
	w.has("-A -t 10.96.0.1:80 -s rr", "-r 10.244.1.10:8080 -m -w 0", "-r 10.244.1.11:8080 -m -w 1")
	if r := c.Ping(patience); r.Outcome != lab.Answered {
		t.Error(r)
	}
	w.close()
	w.open()
	if r := w.apply(); !r.Adopted {
		t.Errorf("a new process wrote %+v", r)
	}
}

// TestIPVSYields leaves a virtual service of ours to a program that has taken it, with a connection and the parameters
// it needs.
func TestIPVSYields(t *testing.T) {
	w := newWorld(t, 2, 0, dataplane.IPVSAuto)
	labtest.Check(t, w.Node.Sysctl("net/ipv4/vs/conntrack", "0"))
	w.apply(w.delta(app{number: 1, scheduling: scheduler("rr"), here: ready(0)}))
	c, r := w.Pods[1].Open(snapshot.TCP, vip(1, ipfamily.IPv4), lab.Options{Timeout: patience})
	if c == nil {
		t.Fatal(r)
	}
	yield := map[dataplane.Key]bool{}
	w.backend.options.Yield = func(k dataplane.Key) bool { yield[k] = true; return true }
	labtest.Run(t, w.Node, "", "ip", "link", "add", "kube-ipvs0", "type", "dummy")
	labtest.Check(t, w.Node.AddAddr("kube-ipvs0", netip.MustParsePrefix("10.96.0.1/32")))
	labtest.Run(t, w.Node, "", "ipvsadm", "-E", "-t", "10.96.0.1:80", "-s", "rr")
	testkit.Eventually(t, patience, "Check notices that", func() bool { return w.check() != nil }, w.list)
	var refused *dataplane.Refused
	if _, err := w.try(snapshot.Delta{}); !errors.As(err, &refused) || len(refused.Services) != 1 || len(yield) != 1 {
		t.Errorf("asked about %v; %v", yield, err)
	}
	w.inside(w.backend.Remove)
	w.has("-A -t 10.96.0.1:80 -s rr", "-r 10.244.1.10:8080 -m -w 1")
	if got := w.sysctls(); !strings.HasPrefix(got, "1 ") {
		t.Errorf("parameters %s", got)
	}
	if r := c.Ping(patience); r.Outcome != lab.Answered {
		t.Error(r)
	}
}

// TestIPVSTogether reads and checks while changes are written.
func TestIPVSTogether(t *testing.T) {
	w := newWorld(t, 2, 0, dataplane.IPVSAuto)
	stop := make(chan struct{})
	var wg sync.WaitGroup
	for _, f := range []func() error{
		func() error { _, err := w.backend.Statistics(); return err },
		func() error { _, _, err := w.backend.Check(); return err },
	} {
		wg.Go(func() {
			for {
				select {
				case <-stop:
					return
				default:
				}
				if err := w.Node.Do(f); err != nil {
					t.Error(err)
				}
			}
		})
	}
	for n := range 30 {
		w.apply(w.delta(app{number: 1 + n%3, scheduling: scheduler([]string{"rr", "lc"}[n%2]), here: ready(n % 2)}))
	}
	close(stop)
	wg.Wait()
	w.until("what drained is gone", func() bool { return !strings.Contains(w.list(), "-w 0") })
	w.wants()
}

// BenchmarkIPVS writes a thousand Services with ten endpoints each, and changes one.
func BenchmarkIPVS(b *testing.B) {
	w := newWorld(b, 0, 1, dataplane.IPVSAuto)
	delta := func(i, generation int) snapshot.Delta {
		d := w.delta(app{number: i, scheduling: scheduler("rr")})
		for _, sl := range d.Slices {
			for e := range 10 {
				a := netip.AddrFrom4([4]byte{10, 244, 3, byte(1 + e)})
				if e == 0 {
					a = netip.AddrFrom4([4]byte{10, 244, 4, byte(generation)})
				}
				sl.Endpoints = append(sl.Endpoints, snapshot.Endpoint{Addr: a, Ready: true, Serving: true})
			}
			sl.Ports = sl.Ports[:1]
		}
		for _, svc := range d.Services {
			svc.Ports, svc.ClusterIPs = svc.Ports[:1], svc.ClusterIPs[:1]
		}
		return d
	}
	var all snapshot.Delta
	for i := range 1000 {
		all.Merge(delta(1+i, 0))
	}
	start := time.Now()
	r := w.apply(all)
	b.Logf("1,000 Services in %v: %+v", time.Since(start), r)
	for i := 0; b.Loop(); i++ {
		r = w.apply(delta(1+i%1000, 1+i%250))
	}
	b.Logf("a change: %+v", r)
	w.close()
	w.open()
	start = time.Now()
	r = w.apply()
	b.Logf("a new process in %v: %+v", time.Since(start), r)
}

// TestIPVSMoves has connections go on while their Service goes from nftables to IPVS and back.
func TestIPVSMoves(t *testing.T) {
	w := newWorld(t, 2, 1, dataplane.IPVSAuto)
	a := app{number: 1, here: ready(0), there: ready(0)}
	w.apply(w.delta(a))
	var conns []*lab.Conn
	open := func() {
		t.Helper()
		for _, f := range lab.Families() {
			for _, p := range protocols[:2] {
				for _, from := range []*lab.Host{w.Pods[1], w.Node, w.Outside} {
					c, r := from.Open(p, vip(1, f), lab.Options{Timeout: patience})
					if c == nil {
						t.Fatalf("%s to %v/%s: %v", from.Name, vip(1, f), p, r)
					}
					conns = append(conns, c)
				}
			}
		}
	}
	alive := func(what string) {
		t.Helper()
		for i, c := range conns {
			r := c.Ping(time.Second)
			for start := time.Now(); r.Outcome == lab.TimedOut && time.Since(start) < 5*time.Second; { // a datagram may be lost
				r = c.Ping(time.Second)
			}
			if r.Outcome != lab.Answered {
				t.Errorf("%s: connection %d: %v", what, i, r)
			}
		}
	}
	open()
	for range 2 {
		a.scheduling = scheduler("lc")
		w.apply(w.delta(a))
		alive("to IPVS")
		open()
		a.scheduling = nil
		w.apply(w.delta(a))
		alive("to nftables")
		open()
	}
}

// failing is a backend that fails.
type failing struct {
	reconcile.Writer
	err error
}

func (f failing) Apply(*dataplane.State, dataplane.Change) (dataplane.Receipt, error) {
	return dataplane.Receipt{}, f.err
}

// TestIPVSBreaksLater takes nothing away as long as the other backend still sends there.
func TestIPVSBreaksLater(t *testing.T) {
	w := newWorld(t, 3, 0, dataplane.IPVSAuto)
	a := app{number: 1, scheduling: scheduler("rr"), here: ready(0)}
	b := app{number: 2, scheduling: scheduler("rr"), here: ready(0)}
	w.apply(w.delta(a), w.delta(b))
	w.backend.inner = failing{w.nft, errors.New("no")}
	a.here = ready(1)
	d := w.delta(a)
	d.Merge(snapshot.Delta{Services: map[snapshot.Name]*snapshot.Service{b.name(): nil}})
	for range 2 {
		if _, err := w.try(d); err == nil || err.Error() != "no" {
			t.Errorf("%v", err)
		}
		w.has("-a -t 10.96.0.1:80 -r 10.244.1.10:8080 -m -w 1", "-a -t 10.96.0.1:80 -r 10.244.1.11:8080 -m -w 1",
			"-a -t 10.96.0.2:80 -r 10.244.1.10:8080 -m -w 1", "-a -u 10.96.0.1:80 -r 10.244.1.10:8080 -m -w 1")
		if got := w.count(w.Pods[2], snapshot.TCP, vip(2, ipfamily.IPv4), 2); got["pod-1"] != 2 {
			t.Errorf("%v", got)
		}
		d = snapshot.Delta{}
	}
	w.backend.inner = w.nft
	w.apply()
	w.until("the rest goes", func() bool { return !strings.Contains(w.list(), "-w 0") })
	w.wants()
}

// inParts is a backend that leaves something of what it is asked for first, fails at that, and then goes on.
type inParts struct {
	reconcile.Writer
	told []dataplane.Change
}

func (p *inParts) Apply(want *dataplane.State, change dataplane.Change) (dataplane.Receipt, error) {
	switch p.told = append(p.told, change); len(p.told) {
	case 1:
		return dataplane.Receipt{Left: change.Services}, nil
	case 2:
		return dataplane.Receipt{}, errors.New("no")
	}
	return p.Writer.Apply(want, change)
}

// TestIPVSTellsAgain: the other backend acknowledges a part and fails at the rest. Whoever calls both believes then
// that neither wrote anything, and may not name the Service again, since it wants again what was there before. So the
// other backend is told again what it was told.
func TestIPVSTellsAgain(t *testing.T) {
	w := newWorld(t, 2, 0, dataplane.IPVSAuto)
	a := app{number: 1, scheduling: scheduler("rr"), here: ready(0)}
	w.apply(w.delta(a))
	inner := &inParts{Writer: w.nft}
	w.backend.inner = inner
	a.here = ready(1)
	if _, err := w.try(w.delta(a)); err == nil {
		t.Fatal("there was no error")
	}
	for _, want := range []int{1, 0} {
		before := len(inner.told)
		w.apply()
		named := 0
		for _, c := range inner.told[before:] {
			named += len(c.Services)
		}
		if named != want {
			t.Errorf("the other backend was told of %d Services: %+v; want %d", named, inner.told[before:], want)
		}
	}
}

// TestIPVSRefuses refuses one Service, by name, and serves the other.
func TestIPVSRefuses(t *testing.T) {
	w := newWorld(t, 1, 0, dataplane.IPVSAlways)
	w.planner = dataplane.NewPlanner(dataplane.Config{
		NodeName: "node", DetectLocal: dataplane.DetectLocal{ClusterCIDRs: lab.PodRange},
		// Only the operator can name a scheduler that Verdict does not know.
		IPVS: dataplane.IPVS{Mode: dataplane.IPVSAlways, Default: dataplane.Scheduling{Scheduler: "nosuch"}},
	})
	good, bad := app{number: 1, scheduling: scheduler("rr"), here: ready(0)}, app{number: 2, here: ready(0)}
	_, err := w.try(w.both(good, bad))
	refused, ok := err.(*dataplane.Refused)
	if !ok || len(refused.Services) != 1 || refused.Services[bad.name()] == nil ||
		!strings.Contains(err.Error(), "ip_vs_nosuch") {
		t.Errorf("%v", err)
	}
	w.apply(snapshot.Delta{Services: map[snapshot.Name]*snapshot.Service{bad.name(): nil}})
	w.wants()
	bad.scheduling = scheduler("lc")
	w.apply(w.delta(bad))
	w.wants()
	for _, number := range []int{1, 2} {
		if got := w.count(w.Outside, snapshot.TCP, vip(number, ipfamily.IPv4), 2); got["pod-1"] != 2 {
			t.Errorf("%v", got)
		}
	}
}

func (w *world) both(a, b app) snapshot.Delta {
	d := w.delta(a)
	d.Merge(w.delta(b))
	return d
}
