package xtables

import (
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/verdict-proxy/verdict/internal/lab"
	"github.com/verdict-proxy/verdict/internal/lab/labtest"
	"github.com/verdict-proxy/verdict/internal/system/ipfamily"
	"github.com/verdict-proxy/verdict/internal/system/testkit"
	"github.com/verdict-proxy/verdict/nft/iptshim"
	"github.com/verdict-proxy/verdict/sync/dataplane"
	"github.com/verdict-proxy/verdict/sync/snapshot"
)

// world is a host with a backend, and the objects it was told of.
type world struct {
	t       *testing.T
	host    *lab.Host
	variant Variant
	backend *Backend
	snap    *snapshot.Snapshot
	planner *dataplane.Planner
}

func newWorld(t *testing.T, v Variant) *world {
	t.Helper()
	w := &world{t: t, host: newHost(t), variant: v, snap: snapshot.New(),
		planner: dataplane.NewPlanner(dataplane.Config{NodeName: "node",
			DetectLocal: dataplane.DetectLocal{ClusterCIDRs: lab.PodRange}, LocalhostNodePorts: true})}
	p := programsOf(t, w.host, v)
	w.open(p)
	addrs := []netip.Addr{netip.MustParseAddr("127.0.0.1"), netip.MustParseAddr("192.0.2.10"),
		netip.MustParseAddr("2001:db8:2::a")}
	cidrs := lab.ServiceRange
	w.put(snapshot.Delta{HostAddrs: &addrs, ServiceCIDRs: &cidrs, Node: &snapshot.Node{Name: "node",
		Addresses: addrs[1:]}})
	return w
}

// open opens a backend as a new process would.
func (w *world) open(p *Programs) {
	w.t.Helper()
	labtest.Check(w.t, w.host.Do(func() (err error) {
		w.backend, err = Open(p, Options{Log: testLog(w.t)})
		return err
	}))
	w.t.Cleanup(func() { w.backend.cancel() })
}

// restart opens another backend that knows nothing.
func (w *world) restart() {
	w.t.Helper()
	w.open(findOn(w.t, w.host))
}

// put changes objects and gives what changed in the state.
func (w *world) put(d snapshot.Delta) dataplane.Change {
	change, _ := w.planner.Apply(w.snap, w.snap.Apply(d))
	return change
}

// apply writes what changes.
func (w *world) apply(d snapshot.Delta) (dataplane.Receipt, error) {
	change := w.put(d)
	return w.backend.Apply(w.planner.State(), change)
}

// write is apply for what must succeed.
func (w *world) write(d snapshot.Delta) dataplane.Receipt {
	w.t.Helper()
	r, err := w.apply(d)
	labtest.Check(w.t, err)
	return r
}

// saved gives the tables of both families.
func (w *world) saved() string {
	w.t.Helper()
	all := ""
	for _, f := range ipfamily.All {
		all += withoutComments(labtest.Run(w.t, w.host, "", program(f)+"-"+w.variant.String()+"-save"))
	}
	return all
}

// harm runs iptables on the host.
func (w *world) harm(f ipfamily.Family, args ...string) {
	w.t.Helper()
	labtest.Run(w.t, w.host, "", program(f)+"-"+w.variant.String(), append([]string{"-w", "5"}, args...)...)
}

// web is a Service with some endpoints.
func web(n, endpoints int) snapshot.Delta {
	name := snapshot.Name{Namespace: "default", Name: fmt.Sprintf("web-%d", n)}
	d := snapshot.Delta{Slices: map[snapshot.Name]*snapshot.Slice{}, Services: map[snapshot.Name]*snapshot.Service{name: {
		Name: name, Ports: []snapshot.Port{{Name: "http", Protocol: snapshot.TCP, Port: 80, NodePort: uint16(30000 + n)}}}}}
	for i := range lab.ServiceRange {
		d.Services[name].ClusterIPs = append(d.Services[name].ClusterIPs, lab.Nth(lab.ServiceRange[i], n))
		s := &snapshot.Slice{Name: snapshot.Name{Namespace: "default", Name: fmt.Sprintf("web-%d-%d", n, i)},
			Service: name.Name,
			Ports:   []snapshot.SlicePort{{Name: "http", Protocol: snapshot.TCP, Port: 8080}}}
		for e := range endpoints {
			s.Endpoints = append(s.Endpoints, snapshot.Endpoint{Addr: lab.Nth(lab.NodePodRange[i], 10+e), Node: "node",
				Ready: true, Serving: true})
		}
		d.Slices[s.Name] = s
	}
	return d
}

func merged(deltas ...snapshot.Delta) (all snapshot.Delta) {
	for _, d := range deltas {
		all.Merge(d)
	}
	return all
}

// eachVariant runs a test with both.
func eachVariant(t *testing.T, test func(t *testing.T, w *world)) {
	for _, v := range variants {
		t.Run(v.String(), func(t *testing.T) { test(t, newWorld(t, v)) })
	}
}

// found calls Check until it has found something, and gives that.
func (w *world) found() []string {
	w.t.Helper()
	var found []string
	testkit.Eventually(w.t, 20*time.Second, "something is found", func() bool {
		var err error
		found, _, err = w.backend.Check()
		labtest.Check(w.t, err)
		return len(found) > 0
	})
	return found
}

// calm calls Check until a look that began now has ended, which must find nothing.
func (w *world) calm() {
	w.t.Helper()
	i := &w.backend.drift
	i.next, i.due = time.Time{}, time.Time{}
	for begun := false; !begun || i.result != nil; time.Sleep(5 * time.Millisecond) {
		found, _, err := w.backend.Check()
		if labtest.Check(w.t, err); len(found) > 0 {
			w.t.Errorf("it finds %q", found)
		}
		begun = begun || i.result != nil
	}
	if i.suspect {
		w.t.Error("it takes its own transactions for somebody else's")
	}
}

// TestWrites: a change writes only what changes, in one call for each family, and nothing is not written.
func TestWrites(t *testing.T) {
	eachVariant(t, func(t *testing.T, w *world) {
		begin := time.Now()
		r := w.write(merged(web(1, 2), web(2, 2)))
		if !r.Full || r.Messages != 2 || r.Added == 0 {
			t.Errorf("the first: %+v", r)
		}
		if i := &w.backend.drift; i.due.Before(begin.Add(i.lastDuration + r.Commit + driftInterval)) {
			t.Errorf("the first is checked %v after its beginning, of which it took %v", i.due.Sub(begin), r.Commit)
		}
		w.calm()
		before := w.saved()
		r = w.write(web(2, 3))
		if r.Full || r.Messages != 2 || r.Replaced > 2*2+4 {
			t.Errorf("one endpoint more: %+v", r)
		}
		if r := w.write(snapshot.Delta{}); r.Messages+r.Bytes+r.Added+r.Replaced+r.Removed+len(r.Left) > 0 || r.Full ||
			r.Adopted {
			t.Errorf("nothing: %+v", r)
		}
		w.write(web(2, 2))
		w.calm()
		if after := w.saved(); after != before {
			t.Errorf("there and back:\n%s", labtest.FirstDifference(after, before))
		}
		labtest.Check(t, w.backend.Remove())
		left := w.saved()
		for line := range strings.Lines(left) {
			if strings.Contains(line, "KUBE-") && !strings.Contains(line, "KUBE-FIREWALL") &&
				!strings.Contains(line, "KUBE-IPTABLES-HINT") {
				t.Errorf("it stays: %s", line)
			}
		}
		labtest.Check(t, w.backend.Remove())
		if r := w.write(snapshot.Delta{}); !r.Full || sortedLines(w.saved()) != sortedLines(before) {
			t.Errorf("after it was removed: %+v\n%s", r, labtest.FirstDifference(sortedLines(w.saved()), sortedLines(before)))
		}
	})
}

// TestRestart: what a former process left is adopted, or corrected where it differs; a kube-proxy's chains are taken
// over in place.
func TestRestart(t *testing.T) {
	eachVariant(t, func(t *testing.T, w *world) {
		w.write(merged(web(1, 2), web(2, 2)))
		before := w.saved()
		w.restart()
		if r := w.write(snapshot.Delta{}); !r.Adopted || r.Bytes > 0 || w.saved() != before {
			t.Errorf("nothing has changed: %+v", r)
		}
		w.restart()
		if r := w.write(web(2, 3)); r.Adopted || r.Replaced == 0 || r.Replaced > 10 {
			t.Errorf("a Service has changed: %+v", r)
		}
		w.write(web(2, 2))
		// Somebody's chains with kube-proxy's names, of Services that are not there any more.
		w.harm(ipfamily.IPv4, "-t", "nat", "-N", "KUBE-SVC-AAAAAAAAAAAAAAAA")
		w.harm(ipfamily.IPv4, "-t", "nat", "-I", "KUBE-SERVICES", "-d", "10.96.0.77", "-j", "KUBE-SVC-AAAAAAAAAAAAAAAA")
		w.harm(ipfamily.IPv6, "-t", "filter", "-F", "KUBE-FORWARD")
		w.restart()
		if r := w.write(snapshot.Delta{}); r.Adopted || w.saved() != before {
			t.Errorf("%+v; it differs:\n%s", r, labtest.FirstDifference(w.saved(), before))
		}
		w.calm()
	})
}

// TestForeignHands: what others do to the rules is found, named and repaired; what they do elsewhere is left alone.
func TestForeignHands(t *testing.T) {
	eachVariant(t, func(t *testing.T, w *world) {
		w.write(merged(web(1, 2), web(2, 2)))
		w.calm()
		before := w.saved()
		for _, harm := range []struct {
			f    ipfamily.Family
			args string
			says string
		}{
			{ipfamily.IPv4, "-t nat -F", "IPv4 nat: chain KUBE-SERVICES"},
			{ipfamily.IPv4, "-t filter -F FORWARD", `IPv4 filter: the rule "FORWARD`},
			{ipfamily.IPv6, "-t nat -D KUBE-POSTROUTING 1", "IPv6 nat: chain KUBE-POSTROUTING"},
			{ipfamily.IPv6, "-t mangle -X KUBE-PROXY-CANARY", "IPv6 mangle: chain KUBE-PROXY-CANARY"},
			{ipfamily.IPv4, "-t nat -I KUBE-SERVICES -j ACCEPT", "IPv4 nat: chain KUBE-SERVICES"},
		} {
			w.harm(harm.f, strings.Fields(harm.args)...)
			w.backend.drift.next = time.Time{}
			if found := w.found(); !strings.Contains(strings.Join(found, "\n"), harm.says) {
				t.Errorf("%s: it finds %q", harm.args, found)
			}
			w.write(snapshot.Delta{})
			if after := w.saved(); sortedLines(after) != sortedLines(before) {
				t.Errorf("%s:\n%s", harm.args, labtest.FirstDifference(sortedLines(after), sortedLines(before)))
			}
			w.calm()
		}
		// A change that comes before anybody has looked does not hide what others did.
		w.harm(ipfamily.IPv4, "-t", "nat", "-F", "KUBE-SERVICES")
		w.backend.drift.next = time.Time{}
		w.write(web(3, 1))
		w.write(merged(snapshot.Delta{Services: map[snapshot.Name]*snapshot.Service{{Namespace: "default",
			Name: "web-3"}: nil}}))
		if after := w.saved(); sortedLines(after) != sortedLines(before) {
			t.Errorf("a change came first:\n%s", labtest.FirstDifference(sortedLines(after), sortedLines(before)))
		}
		w.harm(ipfamily.IPv4, "-t", "filter", "-A", "INPUT", "-p", "icmp", "-j", "ACCEPT")
		w.calmAgain()
		if !strings.Contains(w.saved(), "-A INPUT -p icmp -j ACCEPT") {
			t.Error("a rule of others is gone")
		}
	})
}

// TestOvertaken: a look during which we wrote says nothing. It makes a change wait for a reading of all tables only if
// others wrote, too, or if it happens again and again.
func TestOvertaken(t *testing.T) {
	eachVariant(t, func(t *testing.T, w *world) {
		w.write(web(1, 2))
		i := &w.backend.drift
		overtake := func(endpoints int) {
			t.Helper()
			i.next, i.due = time.Time{}, time.Time{}
			for i.result == nil {
				_, _, err := w.backend.Check()
				labtest.Check(t, err)
			}
			w.write(web(1, endpoints))
			for overtaken := i.result; i.result == overtaken; time.Sleep(time.Millisecond) {
				if found, _, err := w.backend.Check(); err != nil || len(found) > 0 {
					t.Fatalf("it finds %q, %v", found, err)
				}
			}
		}
		overtake(3)
		if i.suspect || i.due.After(i.next) {
			t.Errorf("after our own change it suspects others (%v), or does not look again soon", i.suspect)
		}
		w.harm(ipfamily.IPv4, "-t", "nat", "-F", "KUBE-POSTROUTING")
		overtake(2)
		if !i.suspect {
			t.Error("what others wrote before a look that came to nothing is forgotten")
		}
		i.next = time.Time{}
		w.write(web(1, 3))
		w.calm()
		for range maxWastedChecks {
			overtake(2 + i.wasted%2)
		}
		if i.suspect {
			t.Errorf("it suspects others after %d looks", i.wasted)
		}
		if overtake(4); !i.suspect {
			t.Error("it never reads all when there is never time for a look")
		}
		if i.next = (time.Time{}); w.write(web(1, 2)).Bytes == 0 || i.suspect || i.wasted > 0 {
			t.Errorf("all was read, and still it suspects others (%v, %d)", i.suspect, i.wasted)
		}
	})
}

// calmAgain is calm after others wrote what is theirs.
func (w *world) calmAgain() {
	w.t.Helper()
	w.backend.drift.next = time.Time{}
	w.calm()
}

// sortedLines puts the lines of a text in order: a jump that was repaired stands at the beginning of its chain.
func sortedLines(text string) string {
	lines := slices.Sorted(strings.SplitSeq(text, "\n"))
	return strings.Join(lines, "\n")
}

// refusing has restore refuse each text in which a word stands: with the number of its line, or as the legacy variant's
// kernel does, with that of the COMMIT behind it.
func (w *world) refusing(word string, atCommit bool) {
	w.t.Helper()
	real := w.backend.programs.sets[ipfamily.IPv4].restore
	dir := w.t.TempDir()
	script := fmt.Sprintf(`#!/bin/sh
cat > %[1]s/text
n=$(grep -n -m1 -e '%[2]s' %[1]s/text | cut -d: -f1)
if [ -n "$n" ]; then
	if %[3]v; then n=$(awk -v n=$n 'NR > n && /^COMMIT$/ {print NR; exit}' %[1]s/text); fi
	echo "iptables-restore: line $n failed" >&2
	exit 1
fi
exec %[4]s "$@" < %[1]s/text
`, dir, word, atCommit, real)
	path := filepath.Join(dir, "restore")
	labtest.Check(w.t, os.WriteFile(path, []byte(script), 0o755))
	w.backend.programs.sets[ipfamily.IPv4].restore = path
}

// TestRefused: a Service of which a rule is refused is named, whether the line is told or only that something is wrong;
// without it the rest is written.
func TestRefused(t *testing.T) {
	for _, atCommit := range []bool{false, true} {
		t.Run(fmt.Sprintf("at commit %v", atCommit), func(t *testing.T) {
			w := newWorld(t, Legacy)
			w.write(merged(web(1, 1), web(2, 1)))
			w.refusing("--dport 81 ", atCommit)
			bad := web(3, 1)
			for _, s := range bad.Services {
				s.Ports[0].Port = 81
			}
			change := w.put(merged(web(1, 3), bad, web(4, 2)))
			_, err := w.backend.Apply(w.planner.State(), change)
			if saved := w.saved(); !strings.Contains(saved, "10.96.0.1/32") || !strings.Contains(saved, "10.96.0.2/32") {
				t.Errorf("what was there is gone:\n%s", saved)
			}
			var refused *dataplane.Refused
			name := snapshot.Name{Namespace: "default", Name: "web-3"}
			if !errors.As(err, &refused) || len(refused.Services) != 1 || refused.Services[name] == nil {
				t.Fatalf("it says %v", err)
			}
			left := *w.planner.State()
			left.Services = map[snapshot.Name]*dataplane.Service{}
			for n, svc := range w.planner.State().Services {
				if n != name {
					left.Services[n] = svc
				}
			}
			_, err = w.backend.Apply(&left, dataplane.Change{Services: change.Services})
			labtest.Check(t, err)
			for ip, want := range map[string]bool{"10.96.0.1/32": true, "10.96.0.3/32": false, "10.96.0.4/32": true} {
				if strings.Contains(w.saved(), ip) != want {
					t.Errorf("%s: %v", ip, !want)
				}
			}
		})
	}
}

// TestTooLarge: a Service that would have too many rules is refused by name before anything is made of it, and is
// written once it is smaller.
func TestTooLarge(t *testing.T) {
	w := newWorld(t, Legacy)
	large := web(2, 0)
	for _, s := range large.Slices {
		for i := range iptshim.MaxRules / 3 {
			a := netip.AddrFrom4([4]byte{10, 200, byte(i >> 8), byte(i)})
			if s.Name.Name == "web-2-1" {
				a = netip.AddrFrom16([16]byte{0: 0xfd, 14: byte(i >> 8), 15: byte(i)})
			}
			s.Endpoints = append(s.Endpoints, snapshot.Endpoint{Addr: a, Ready: true, Serving: true})
		}
	}
	name := snapshot.Name{Namespace: "default", Name: "web-2"}
	for _, first := range []bool{true, false} {
		_, err := w.apply(merged(web(1, 1), large))
		var refused *dataplane.Refused
		var why *iptshim.TooManyRules
		if !errors.As(err, &refused) || len(refused.Services) != 1 || !errors.As(refused.Services[name], &why) ||
			len(err.Error()) > 200 {
			t.Fatalf("it says %.300v", err)
		}
		if first != !strings.Contains(w.saved(), "10.96.0.1/32") || strings.Contains(w.saved(), "10.200.") {
			t.Error("something of it was written")
		}
		w.write(web(2, 1))
		if saved := w.saved(); !strings.Contains(saved, "10.96.0.1/32") || !strings.Contains(saved, "10.96.0.2/32") {
			t.Errorf("left are\n%s", saved)
		}
	}
}

// TestRest: the backend asks for a rest that depends on how long a write took. A rest that passed unused before the
// write counts.
func TestRest(t *testing.T) {
	w := newWorld(t, Legacy)
	if r := w.write(web(1, 1)); r.Commit == 0 || r.Rest != 0 {
		t.Errorf("%v after the first write of %v", r.Rest, r.Commit)
	}
	if r := w.write(web(2, 1)); r.Rest <= 0 || r.Rest > restAfter(r.Commit) {
		t.Errorf("%v after a second write of %v", r.Rest, r.Commit)
	}
	if r := w.write(web(2, 1)); r.Rest != 0 {
		t.Errorf("%v after nothing was written", r.Rest)
	}
	b, now := Backend{}, time.Now()
	const took = 200 * time.Millisecond
	for i, step := range []struct{ quiet, want time.Duration }{
		{time.Hour, 0}, {0, maxPace}, {maxPace, maxPace}, {maxPace * 5 / 4, maxPace * 3 / 4}, {time.Hour, 0},
	} {
		now = now.Add(step.quiet + took)
		if got := b.rest(now, took); got != step.want && i > 0 {
			t.Errorf("write %d: a rest of %v; want %v", i, got, step.want)
		}
	}
	for took, want := range map[time.Duration]time.Duration{
		10 * time.Millisecond: 80 * time.Millisecond, 200 * time.Millisecond: maxPace, 2 * time.Second: maxPace,
		5 * time.Second: 2500 * time.Millisecond, time.Minute: longestPace,
	} {
		if got := restAfter(took); got != want {
			t.Errorf("%v after %v; want %v", got, took, want)
		}
	}
}

// TestRefusedByNobody: what is no Service's fault is an error that blames none, and what was there stays.
func TestRefusedByNobody(t *testing.T) {
	w := newWorld(t, Legacy)
	before := w.saved()
	w.refusing(":KUBE", true)
	_, err := w.apply(merged(web(1, 1), web(2, 1), web(3, 1)))
	var refused *dataplane.Refused
	if err == nil || errors.As(err, &refused) || w.saved() != before {
		t.Errorf("it says %v", err)
	}
}

// TestWithoutIPv6: on a host without IPv6 programs the Services of IPv4 are served.
func TestWithoutIPv6(t *testing.T) {
	w := newWorld(t, NFT)
	w.backend.programs.missing[ipfamily.IPv6] = errNoIPv6
	w.write(web(1, 2))
	w.calm()
	saved := w.saved()
	if !strings.Contains(saved, "10.96.0.1/32") || strings.Contains(saved, "fd00:") {
		t.Errorf("it has\n%s", saved)
	}
}
