package benchmark

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	v1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/kubernetes/scheme"

	"github.com/verdict-proxy/verdict/conformance/benchmark/results"
)

// Every Service and every endpoint has an address of its own, in the ranges that the world has for them, also in the
// largest cluster.
func TestAddresses(t *testing.T) {
	if !podRange.Contains(endpointRange.Addr()) || !podRange.Contains(clientAddr) || endpointRange.Contains(serverAddr) {
		t.Error("ranges do not fit each other")
	}
	for _, size := range []results.Size{
		{Services: 1, Endpoints: 1}, {Services: 300, Endpoints: 10}, {Services: results.MaxServices, Endpoints: 10},
	} {
		c := newCluster(size)
		if len(c.endpoints) != size.Services+probes+1 || c.sink() != len(c.endpoints)-1 {
			t.Fatalf("%s: %d Services", size, len(c.endpoints))
		}
		seen := map[netip.Addr]bool{}
		for i, endpoints := range c.endpoints {
			want := size.Endpoints
			if i >= size.Services {
				want = 1
			}
			if len(endpoints) != want || !serviceRange.Contains(c.clusterIP(i)) {
				t.Fatalf("%s: Service %d is %s with %d endpoints", size, i, c.clusterIP(i), len(endpoints))
			}
			for _, a := range endpoints {
				if seen[a] || !endpointRange.Contains(a) || number(a) >= firstNewcomer {
					t.Fatalf("%s: endpoint %s of Service %d", size, a, i)
				}
				seen[a] = true
			}
		}
	}
	if last := firstEndpoint + results.MaxTotal + probes; last >= firstNewcomer {
		t.Errorf("the largest cluster's endpoints reach to %s", address(last))
	}
}

// What replace gives is what the cluster has then, and a newcomer is nobody else.
func TestReplace(t *testing.T) {
	c := newCluster(results.Size{Services: 5, Endpoints: 3})
	old := slices.Clone(c.endpoints[2])
	slice, newcomer := c.replace(2, 1)
	var got []string
	for _, e := range slice.Endpoints {
		got = append(got, e.Addresses...)
	}
	if want := []string{old[0].String(), newcomer.String(), old[2].String()}; !slices.Equal(got, want) {
		t.Errorf("the slice has %q, want %q", got, want)
	}
	if _, other := c.replace(3, 0); other == newcomer || !endpointRange.Contains(other) {
		t.Errorf("newcomers are %s and %s", newcomer, other)
	}
}

// No two varied Services share a node port or an address, and each kind is there.
func TestVaried(t *testing.T) {
	c := newCluster(results.Size{Services: 45000, Endpoints: 1})
	c.varied = true
	ports, addrs, kinds := map[int32]bool{}, map[string]bool{}, map[string]int{}
	for i := range c.endpoints {
		s := c.service(i)
		for _, p := range []int32{s.Spec.Ports[0].NodePort, s.Spec.HealthCheckNodePort} {
			if p != 0 && (ports[p] || p < 30000 || p > 32767) {
				t.Fatalf("Service %d has the port %d", i, p)
			}
			ports[p] = true
		}
		taken := append([]string{s.Spec.ClusterIP}, s.Spec.ExternalIPs...)
		for _, ingress := range s.Status.LoadBalancer.Ingress {
			taken = append(taken, ingress.IP)
		}
		for _, a := range taken {
			if addrs[a] {
				t.Fatalf("Service %d has the address %s of another one", i, a)
			}
			addrs[a] = true
		}
		kinds[fmt.Sprintf("%s %s %s %t %t", s.Spec.Type, s.Spec.ExternalTrafficPolicy, s.Spec.SessionAffinity,
			s.Spec.ExternalIPs != nil, s.Spec.LoadBalancerSourceRanges != nil)]++
	}
	if len(kinds) != 14 {
		t.Errorf("there are %d kinds: %v", len(kinds), kinds)
	}
	sink := c.service(c.sink()).Spec
	if sink.Type != v1.ServiceTypeClusterIP || sink.SessionAffinity != v1.ServiceAffinityNone {
		t.Errorf("the Services that are measured vary, too: %+v", sink)
	}
}

func TestSpread(t *testing.T) {
	for _, c := range []struct {
		services, n int
		want        []int
	}{{10, 3, []int{0, 4, 9}}, {3, 8, []int{0, 1, 2}}, {1, 4, []int{0}}, {100, 2, []int{0, 99}}} {
		if got := newCluster(results.Size{Services: c.services, Endpoints: 1}).spread(c.n); !slices.Equal(got, c.want) {
			t.Errorf("%d of %d: %v, want %v", c.n, c.services, got, c.want)
		}
	}
}

// What is written into the store is what a client of the API would read.
func TestEncode(t *testing.T) {
	c := newCluster(results.Size{Services: 2, Endpoints: 2})
	b, err := encode(c.service(1), v1.SchemeGroupVersion)
	if err != nil || !strings.HasPrefix(string(b), "k8s\x00") {
		t.Fatalf("%v: %q", err, b)
	}
	for _, o := range []struct {
		encoded func() ([]byte, error)
		kind    string
	}{
		{func() ([]byte, error) { return encode(c.service(1), v1.SchemeGroupVersion) }, "Service"},
		{func() ([]byte, error) { return encodeSlice(c.slice(1)) }, "EndpointSlice"},
	} {
		b, err := o.encoded()
		if err != nil {
			t.Fatal(err)
		}
		back, kind, err := scheme.Codecs.UniversalDeserializer().Decode(b, nil, nil)
		if err != nil || kind.Kind != o.kind {
			t.Fatalf("%v, %v", kind, err)
		}
		checkBack(t, c, back)
	}
}

func checkBack(t *testing.T, c *cluster, back runtime.Object) {
	switch o := back.(type) {
	case *v1.Service:
		if o.Name != c.name(1) || o.Spec.ClusterIP != c.clusterIP(1).String() || o.UID == "" {
			t.Errorf("%+v", o)
		}
	case *discovery.EndpointSlice:
		if len(o.Endpoints) != 2 || o.Labels[discovery.LabelServiceName] != c.name(1) || *o.Ports[0].Port != serverPort {
			t.Errorf("%+v", o)
		}
	}
}

// Looks come less often the longer one waits, and are never far apart.
func TestPause(t *testing.T) {
	for _, c := range []struct{ waited, want time.Duration }{
		{0, 300 * time.Microsecond}, {100 * time.Millisecond, 2 * time.Millisecond}, {time.Hour, 50 * time.Millisecond},
	} {
		if got := pause(c.waited); got != c.want {
			t.Errorf("after %v: %v, want %v", c.waited, got, c.want)
		}
	}
}

func TestAwait(t *testing.T) {
	fine := func() error { return nil }
	looks := 0
	took, err := await(t.Context(), time.Now(), time.Minute, fine, func() bool { looks++; return looks == 3 })
	if err != nil || looks != 3 || took <= 0 {
		t.Errorf("%v after %d looks: %v", took, looks, err)
	}
	if took, err := await(t.Context(), time.Now(), 5*time.Millisecond, fine, func() bool { return false }); !errors.Is(
		err,
		errLimit,
	) ||
		took < 5*time.Millisecond {
		t.Errorf("never: %v, %v", took, err)
	}
	gone := errors.New("it has ended")
	began := time.Now().Add(-2 * time.Second)
	never := func() bool { return false }
	if _, err := await(t.Context(), began, time.Minute, func() error { return gone }, never); !errors.Is(err, gone) {
		t.Errorf("ended: %v", err)
	}
	ctx, cancel := context.WithCancelCause(t.Context())
	cancel(errBudget)
	if _, err := await(ctx, time.Now(), time.Minute, fine, func() bool { return false }); err == nil {
		t.Error("it went on after the end")
	}
}

func TestSamples(t *testing.T) {
	s := &samples{done: []float64{1, 2}, open: []float64{60}, writes: []float64{3, 1, 2}}
	if got := s.spans(); !slices.Equal(got.Milliseconds, []float64{1, 2, 60}) || got.Open != 1 || got.Write != 2 {
		t.Errorf("%+v", got)
	}
}

// The rate is kept: no token comes before its time, and none after the end.
func TestPace(t *testing.T) {
	due := make(chan struct{}, 1000)
	began := time.Now()
	if err := pace(t.Context(), 200, began.Add(100*time.Millisecond), due); err != nil {
		t.Fatal(err)
	}
	if n := len(due); n < 5 || n > 21 {
		t.Errorf("%d tokens in 100 ms at 200 a second", n)
	}
	full := make(chan struct{})
	ctx, cancel := context.WithCancelCause(t.Context())
	cancel(errBudget)
	if err := pace(ctx, 1000, time.Now().Add(time.Hour), full); !errors.Is(err, errBudget) {
		t.Errorf("nobody takes tokens, and the run is over: %v", err)
	}
}

func TestParseStat(t *testing.T) {
	const line = "42 (a (b) c) S 7 42 42 0 -1 4194560 100 200 0 0 11 22 33 44 20 0 9 0 12345"
	p, ok := parseStat(line)
	if !ok || p != (process{42, 7, 1100 * time.Millisecond}) {
		t.Errorf("%+v, %v", p, ok)
	}
	for _, bad := range []string{"", "42", "42 (a) S 7", strings.Replace(line, " 7 ", " x ", 1)} {
		if p, ok := parseStat(bad); ok {
			t.Errorf("%q is %+v", bad, p)
		}
	}
}

// Rest begins where the processor time stops to grow, and has to last.
func TestResting(t *testing.T) {
	const ms = time.Millisecond
	r := resting{}
	for at := time.Duration(0); at < 5*time.Second; at += 20 * ms {
		// It works for 600 ms, waits for 500, works for 400, and then does next to nothing.
		busy := min(at, 600*ms) + max(0, min(at-1100*ms, 400*ms)) + max(0, at-1500*ms)/100
		quiet, used, ok := r.look(at, busy)
		if !ok {
			continue
		}
		if quiet < 1390*ms || quiet > 1500*ms || used < 890*ms || used > 1000*ms || at < quiet+restTime {
			t.Errorf("at %v: rest since %v after %v", at, quiet, used)
		}
		return
	}
	t.Error("no rest was found")
}

// A process that is followed counts with what it has started.
func TestUsage(t *testing.T) {
	u := &usage{}
	u.follow(os.Getpid())
	if n := u.processes(); len(n) < 1 || n[0].pid != os.Getpid() {
		t.Errorf("processes are %+v", n)
	}
	if u.resident() < 1<<20 || u.highest() < 1<<20 {
		t.Errorf("resident %d, highest %d", u.resident(), u.highest())
	}
	if u.kernel() != 0 {
		t.Error("without a control group something is charged")
	}
	if err := u.close(); err != nil {
		t.Error(err)
	}
}

// TestUsageChildren: what a proxy starts at once is in its control group, too.
func TestUsageChildren(t *testing.T) {
	u, err := newUsage()
	if err != nil {
		t.Fatal(err)
	}
	line := u.command("/usr/bin/env", "WORD=said", "/bin/sh", "-c", "/bin/cat /proc/self/cgroup; echo $WORD")
	out, err := exec.Command(line[0], line[1:]...).CombinedOutput()
	if err != nil || !strings.Contains(string(out), "said") ||
		u.group != "" && !strings.Contains(string(out), "/"+filepath.Base(u.group)+"\n") {
		t.Errorf("%v: the child is not in %q:\n%s", err, u.group, out)
	}
	if err := u.close(); err != nil {
		t.Error(err)
	}
}

func TestKernelMemory(t *testing.T) {
	dir := t.TempDir()
	for _, c := range []struct {
		file, key, content string
		want               uint64
	}{
		{"usage", "", "4096\n", 4096},
		{"stat", "kernel", "anon 1\nkernel_stack 2\nkernel 8192\nslab 3\n", 8192},
		{"stat", "kernel", "kernel 5\n", 5},
		{"stat", "kernel", "anon 1\n", 0},
	} {
		if err := os.WriteFile(filepath.Join(dir, c.file), []byte(c.content), 0o600); err != nil {
			t.Fatal(err)
		}
		if got := (&usage{group: dir, file: c.file, key: c.key}).kernel(); got != c.want {
			t.Errorf("%q: %d, want %d", c.content, got, c.want)
		}
	}
}

func TestField(t *testing.T) {
	const text = "processor\t: 0\nmodel name\t: Some CPU: fast\nmodel name\t: other\nMemTotal:  100 kB\n"
	if field(text, "model name") != "Some CPU: fast" || field(text, "MemTotal") != "100 kB" || field(text, "model") != "" {
		t.Error("fields are read wrongly")
	}
}

func TestFindKind(t *testing.T) {
	for _, name := range append(DefaultKinds(), GuestKinds()...) {
		k, err := FindKind(name)
		if err != nil || k.Name != name || k.mode == "" {
			t.Errorf("%s: %+v, %v", name, k, err)
		}
	}
	for _, name := range []string{"cilium", "cilium-socket"} {
		k, err := FindKind(name)
		if err != nil || k.sockets != (name == "cilium-socket") || k.Reasons() == nil {
			t.Errorf("%s: %+v, %v", name, k, err)
		}
	}
	if _, err := FindKind("other"); err == nil || !strings.Contains(err.Error(), "verdict-nftables") {
		t.Errorf("an unknown proxy: %v", err)
	}
}

// In each repeat another proxy is the first; what is there, and what did not even start in time, is not measured again.
func TestMissing(t *testing.T) {
	size := results.Size{Services: 10, Endpoints: 1}
	p := &Plan{Kinds: []*Kind{{Name: "a"}, {Name: "b"}, {Name: "c"}}, Results: &results.Results{}}
	names := func(repeat int) string {
		var all []string
		for _, k := range p.missing(size, repeat) {
			all = append(all, k.Name)
		}
		return strings.Join(all, " ")
	}
	for repeat, want := range []string{"a b c", "b c a", "c a b", "a b c"} {
		if got := names(repeat + 1); got != want {
			t.Errorf("repeat %d: %s, want %s", repeat+1, got, want)
		}
	}
	p.Results.Cells = []*results.Cell{
		{Size: size, Proxy: "b", Repeat: 2},
		{Size: size, Proxy: "c", Repeat: 1, Start: &results.Wait{Limit: true}},
	}
	if got := names(2); got != "a" {
		t.Errorf("what is left of the second repeat: %s", got)
	}
	for _, c := range []struct {
		size results.Size
		want string
	}{
		{results.Size{Services: 20, Endpoints: 1}, "a b"},
		{results.Size{Services: 10, Endpoints: 2}, "a b"},
		{results.Size{Services: 9, Endpoints: 2}, "a b c"},
	} {
		if size = c.size; names(1) != c.want {
			t.Errorf("%s: to be measured are %s, want %s", size, names(1), c.want)
		}
	}
}

// The giant is as large as is said, its slice has all of its ports, and its addresses are nobody else's.
func TestGiant(t *testing.T) {
	c := newCluster(results.Size{Services: giantMost, Endpoints: results.MaxEndpoints})
	service, slice := c.giantService(), c.giantSlice()
	addresses, ports, endpoints := len(service.Spec.ExternalIPs), len(service.Spec.Ports), len(slice.Endpoints)
	if addresses != giantAddresses || ports != giantPorts || endpoints != giantEndpoints {
		t.Errorf("%d addresses, %d ports, %d endpoints", addresses, ports, endpoints)
	}
	for i, p := range service.Spec.Ports {
		if p.Name != *slice.Ports[i].Name {
			t.Errorf("port %d is %s, in the slice %s", i, p.Name, *slice.Ports[i].Name)
		}
	}
	owner := slice.Labels[discovery.LabelServiceName]
	if owner != service.Name || slice.Namespace != service.Namespace {
		t.Errorf("the slice of %s/%s belongs to %s/%s", service.Namespace, service.Name, slice.Namespace, owner)
	}
	ip := netip.MustParseAddr(service.Spec.ClusterIP)
	if !serviceRange.Contains(ip) || number(ip) <= number(c.clusterIP(c.sink())) {
		t.Errorf("the cluster IP is %s", ip)
	}
	first := netip.MustParseAddr(slice.Endpoints[0].Addresses[0])
	last := netip.MustParseAddr(slice.Endpoints[endpoints-1].Addresses[0])
	if number(first) < firstNewcomer+results.MaxTotal/2 || !endpointRange.Contains(last) {
		t.Errorf("endpoints are %s to %s", first, last)
	}
	sample := giantFrontends()
	if len(sample) != giantSample || sample[0].String() != "198.18.2.43:1049" || sample[1].String() != "198.18.1.0:1000" {
		t.Errorf("the sample is %v", sample)
	}
}

// TestPeakOf: a process that sleeps has a few MiB, and not what this one has.
func TestPeakOf(t *testing.T) {
	cmd := exec.Command("sleep", "60")
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	ended := make(chan struct{})
	close(ended)
	peak := peakOf(cmd.Process.Pid, ended)
	for deadline := time.Now().Add(time.Minute); peak < 100<<10 && time.Now().Before(deadline); {
		peak = peakOf(cmd.Process.Pid, ended)
	}
	if peak < 100<<10 || peak > 16<<20 {
		t.Errorf("%d bytes", peak)
	}
	_ = cmd.Process.Kill()
	_ = cmd.Wait()
}
