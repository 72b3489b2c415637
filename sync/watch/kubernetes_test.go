package watch

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/netip"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"runtime/debug"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"google.golang.org/protobuf/encoding/protowire"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	apiwatch "k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/rest"

	"github.com/verdict-proxy/verdict/internal/system/testkit"
	"github.com/verdict-proxy/verdict/sync/snapshot"
)

func watchAPI(t testing.TB, s *apiServer) *view {
	return start(t, func(report func(error)) source {
		return &Kubernetes{Config: s.config(), NodeName: "n1", Report: report}
	})
}

// both runs a test against a server that streams lists, and against one that doesn't.
func both(t *testing.T, test func(*testing.T, *apiServer)) {
	for _, streams := range []bool{true, false} {
		t.Run(fmt.Sprintf("streams=%v", streams), func(t *testing.T) { test(t, newAPIServer(t, streams)) })
	}
}

func TestKubernetes(t *testing.T) {
	both(t, func(t *testing.T, s *apiServer) {
		headless := named("headless", "None")
		s.set(named("web", "10.96.0.1"), headless, apiSlice(), apiNode("a"), apiCIDR("kubernetes", "10.96.0.0/12"))
		v := watchAPI(t, s)
		v.await("first lists", func() bool { return v.synced == 1 })
		v.mu.Lock()
		if got := v.services(); !slices.Equal(got, []string{"default/web 10.96.0.1"}) {
			t.Errorf("services %q", got)
		}
		web := snapshot.Name{Namespace: "default", Name: "web"}
		if len(v.snap.Slices[web]) != 1 || v.snap.Node.Zone != "a" ||
			!slices.Equal(v.snap.ServiceCIDRs, nets("10.96.0.0/12")) {
			t.Errorf("slices %v, node %+v, ranges %v", v.snap.Slices, v.snap.Node, v.snap.ServiceCIDRs)
		}
		v.mu.Unlock()
		for resource, want := range map[string]string{
			"services":       "!service.kubernetes.io/service-proxy-name|spec.clusterIP!=None",
			"endpointslices": "!service.kubernetes.io/headless|",
			"nodes":          "|metadata.name=n1",
			"servicecidrs":   "|",
		} {
			if s.queries[resource] != want {
				t.Errorf("%s are asked for with %q, want %q", resource, s.queries[resource], want)
			}
		}

		s.set(named("api", "10.96.0.2"))
		v.awaitServices("default/api 10.96.0.2", "default/web 10.96.0.1")
		s.set(named("web", "10.96.0.3"), apiNode("b"), apiCIDR("more", "fd00::/108", "10.96.0.0/12"))
		v.awaitServices("default/api 10.96.0.2", "default/web 10.96.0.3")
		v.await("zone and ranges", func() bool {
			return v.snap.Node.Zone == "b" && slices.Equal(v.snap.ServiceCIDRs, nets("10.96.0.0/12", "fd00::/108"))
		})
		other := named("web", "10.96.0.3")
		other.Labels = map[string]string{labelProxyName: "other"} // selectors make a real server send a deletion instead
		s.set(other)
		v.awaitServices("default/api 10.96.0.2")
		s.remove(apiSlice())
		v.await("slice gone", func() bool { return len(v.snap.Slices) == 0 })
		s.remove(apiCIDR("kubernetes"))
		s.remove(apiCIDR("more"))
		v.await("ranges unknown", func() bool { return v.snap.ServiceCIDRs == nil })
		s.remove(apiNode("b"))
		s.remove(named("api", "10.96.0.2"))
		v.awaitServices()
		v.await("the node is gone", func() bool { return v.snap.Node.Leaving == "the Node is deleted" })
		s.set(apiNode("b"))
		v.await("the node is back", func() bool { return v.snap.Node.Leaving == "" })
		if v.snap.Node.Zone != "b" || v.synced != 1 || len(v.problems) > 0 {
			t.Errorf("node %+v, synced %d times, problems %q", v.snap.Node, v.synced, v.problems)
		}
	})
}

// TestKubernetesMissing: while a resource is refused, it is what is missing, and the requests say so.
// TestOtherNodes: the addresses of other Nodes are read once somebody wants them, and followed then.
func TestOtherNodes(t *testing.T) {
	both(t, func(t *testing.T, s *apiServer) {
		other := apiNode("a")
		other.Name = "n2"
		other.Status.Addresses = []corev1.NodeAddress{{Type: corev1.NodeInternalIP, Address: "192.0.2.2"}}
		s.set(apiNode("a"), other)
		wanted, got := make(chan struct{}), make(chan map[string][]netip.Addr, 9)
		v := start(t, func(report func(error)) source {
			return &Kubernetes{Config: s.config(), NodeName: "n1", Report: report, NodesWanted: wanted,
				Nodes: func(m map[string][]netip.Addr) { got <- m }}
		})
		v.await("first lists", func() bool { return v.synced == 1 })
		if len(got) > 0 {
			t.Errorf("nobody wants %v", <-got)
		}
		close(wanted)
		if m := <-got; len(m) != 1 || !slices.Equal(m["n2"], ips("192.0.2.2")) {
			t.Errorf("%v", m)
		}
		other = other.DeepCopy()
		other.Status.Addresses[0].Address = "192.0.2.3"
		s.set(other)
		if m := <-got; len(m) != 1 || !slices.Equal(m["n2"], ips("192.0.2.3")) {
			t.Errorf("another address: %v", m)
		}
	})
}

func TestKubernetesMissing(t *testing.T) {
	s := newAPIServer(t, true)
	s.set(named("web", "10.96.0.1"), apiSlice(), apiNode("a"))
	s.refuses["endpointslices"] = http.StatusForbidden
	var mu sync.Mutex
	codes := map[int]bool{}
	k := &Kubernetes{Config: s.config(), NodeName: "n1", Requested: func(r Request) {
		mu.Lock()
		defer mu.Unlock()
		codes[r.Code] = true
		if r.Method != "GET" || r.Host != s.addr {
			t.Errorf("%+v", r)
		}
	}}
	if got := k.Missing(); len(got) != 4 {
		t.Errorf("before it runs, missing are %q", got)
	}
	v := start(t, func(func(error)) source { return k })
	testkit.Eventually(t, time.Minute, "only endpointslices are missing, and were refused", func() bool {
		mu.Lock()
		defer mu.Unlock()
		return codes[http.StatusForbidden] && slices.Equal(k.Missing(), []string{"endpointslices"})
	}, func() string { return fmt.Sprint(k.Missing()) })
	mu.Lock()
	defer mu.Unlock()
	if !codes[http.StatusOK] || !codes[http.StatusForbidden] || v.synced != 0 {
		t.Errorf("requests ended with %v, synced %d times", codes, v.synced)
	}
}

// Whatever a server answers in, the objects are the same.
func TestKubernetesInJSON(t *testing.T) {
	both(t, func(t *testing.T, s *apiServer) {
		s.media = "application/json"
		s.set(named("web", "10.96.0.1"), apiSlice(), apiNode("a"), apiCIDR("kubernetes", "10.96.0.0/12"))
		v := watchAPI(t, s)
		v.await("first lists", func() bool { return v.synced == 1 })
		s.set(named("api", "10.96.0.2"))
		v.awaitServices("default/api 10.96.0.2", "default/web 10.96.0.1")
		if len(v.snap.Slices) != 1 || v.snap.Node.Zone != "a" || len(v.snap.ServiceCIDRs) != 1 || len(v.problems) > 0 {
			t.Errorf("%+v %q", v.snap, v.problems)
		}
	})
}

// A message that is cut off anywhere is an error or is left to others, and is never read beyond its end.
func TestListMessageCutOff(t *testing.T) {
	s := &apiServer{t: t, media: "application/vnd.kubernetes.protobuf"}
	list := &corev1.ServiceList{Items: []corev1.Service{*apiService(), *named("api", "10.96.0.2")}}
	list.ResourceVersion, list.Kind, list.APIVersion = "7", "ServiceList", "v1"
	body := s.encode(list, corev1.SchemeGroupVersion)
	count := func(body []byte) (n int, err error) {
		raw, ok := listMessage(body)
		if !ok {
			return 0, errors.New("no list")
		}
		err = eachField(raw, func(number protowire.Number, value []byte) error {
			n++
			return nil
		})
		return n, err
	}
	if n, err := count(body); n != 3 || err != nil {
		t.Fatalf("%d fields, %v", n, err)
	}
	for i := range body {
		if n, err := count(body[:i]); n == 3 && err == nil && i < len(body)-4 { // the last fields of the envelope are empty
			t.Errorf("complete after %d of %d bytes", i, len(body))
		}
	}
	for _, b := range []string{"\x80", "\x0a\xff\xff\xff\xff\xff\xff\xff\xff\x7f", "\x0b", "\x09\x00", "\x0d", "\x08",
		"\x0a"} {
		if err := eachField([]byte(b), func(protowire.Number, []byte) error { return nil }); err == nil {
			t.Errorf("%q is good", b)
		}
	}
}

// An outage withdraws nothing and is told once; afterwards the state is the server's, also if its log is gone.
func TestKubernetesOutage(t *testing.T) {
	both(t, func(t *testing.T, s *apiServer) {
		s.set(named("web", "10.96.0.1"), named("gone", "10.96.0.2"), named("same", "10.96.0.5"), apiSlice(), apiNode("a"))
		v := watchAPI(t, s)
		v.await("first lists", func() bool { return v.synced == 1 })
		s.down()
		v.await("report of each resource", func() bool { return len(v.problems) == 4 })
		s.remove(named("gone", "10.96.0.2"))
		s.set(named("web", "10.96.0.3"), named("new", "10.96.0.4"))
		s.remove(apiSlice())
		s.forget()
		v.mu.Lock()
		if got := v.services(); len(got) != 3 || len(v.snap.Slices) != 1 {
			t.Errorf("during the outage: services %q, slices %v", got, v.snap.Slices)
		}
		slices.Sort(v.problems)
		if want := "watch endpointslices: dial tcp " + s.addr + ": connect: connection refused"; v.problems[0] != want {
			t.Errorf("reported %q, want %q first", v.problems, want)
		}
		before := len(v.deltas)
		v.mu.Unlock()
		s.up()
		v.awaitServices("default/new 10.96.0.4", "default/same 10.96.0.5", "default/web 10.96.0.3")
		v.await("slice gone", func() bool { return len(v.snap.Slices) == 0 })
		v.mu.Lock()
		defer v.mu.Unlock()
		for _, d := range v.deltas[before:] {
			if _, ok := d.Services[snapshot.Name{Namespace: "default", Name: "same"}]; ok || d.Node != nil {
				t.Errorf("a delta names what has not changed: %+v", d)
			}
		}
	})
}

// An error that lasts is told once in a while, whatever ports and parameters its text has.
func TestReportsAreFew(t *testing.T) {
	var got []string
	l := &lister{resource: resource{name: "services"}, report: func(err error) { got = append(got, err.Error()) }}
	refused := func(port int) error {
		local := &net.TCPAddr{IP: net.IPv4(10, 0, 0, 1), Port: port}
		op := &net.OpError{Op: "read", Net: "tcp", Source: local, Err: os.NewSyscallError("read", syscall.ECONNRESET)}
		return &url.Error{Op: "Get", URL: fmt.Sprintf("https://api?timeout=%d", port), Err: op}
	}
	ctx := t.Context()
	l.result(ctx, "watch", refused(1))
	l.result(ctx, "list", refused(2))
	l.reportedAt = l.reportedAt.Add(-repeatInterval)
	l.result(ctx, "watch", refused(3))
	l.result(ctx, "watch", errors.New("other"))
	l.result(ctx, "watch", nil)
	l.result(ctx, "watch", errors.New("other"))
	l.result(ctx, "watch", apierrors.NewResourceExpired("too old")) // an answer like any other
	want := []string{
		"watch services: read tcp 10.0.0.1:1: read: connection reset by peer",
		"watch services: read tcp 10.0.0.1:3: read: connection reset by peer",
		"watch services: other", "watch services: other",
	}
	if !slices.Equal(got, want) {
		t.Errorf("reported %q, want %q", got, want)
	}
}

func TestKubernetesWithoutServiceCIDRs(t *testing.T) {
	for _, code := range []int{http.StatusNotFound, http.StatusForbidden} {
		both(t, func(t *testing.T, s *apiServer) {
			s.refuses["servicecidrs"] = code
			s.set(named("web", "10.96.0.1"), apiNode("a"))
			v := watchAPI(t, s)
			v.await("first lists", func() bool { return v.synced == 1 })
			v.awaitServices("default/web 10.96.0.1")
			got := v.take(1)
			if len(got) != 1 || !strings.HasPrefix(got[0], "watch servicecidrs: ") && !strings.HasPrefix(got[0],
				"list servicecidrs: ") {
				t.Errorf("reported %q", got)
			}
			if n := s.requests("servicecidrs"); n > 2 {
				t.Errorf("asked %d times", n)
			}
		})
	}
}

// Without Services there is nothing to be ready for.
func TestKubernetesForbidden(t *testing.T) {
	s := newAPIServer(t, true)
	s.refuses["services"] = http.StatusForbidden
	s.set(apiNode("a"))
	v := watchAPI(t, s)
	got := v.take(1)
	if !strings.Contains(got[0], "services: ") || !strings.Contains(got[0], "so it is") {
		t.Errorf("reported %q", got)
	}
	v.await("node", func() bool { return v.snap.Node.Zone == "a" })
	if v.synced != 0 {
		t.Error("synced without Services")
	}
}

// Events that come twice, too late or for objects nobody knows lead to the right state, and to no deltas of objects
// without a change. All of them count for the versions.
func TestKubernetesOddEvents(t *testing.T) {
	s := newAPIServer(t, true)
	s.set(named("web", "10.96.0.1"))
	v := watchAPI(t, s)
	v.await("first lists", func() bool { return v.synced == 1 })
	before := len(v.deltas)
	s.send(apiwatch.Added, named("web", "10.96.0.1"))
	s.send(apiwatch.Deleted, named("nobody", "10.96.0.9"))
	touched := named("web", "10.96.0.1")
	touched.Annotations = map[string]string{"touched": "yes"}
	s.send(apiwatch.Modified, touched)
	s.send(apiwatch.Modified, named("api", "10.96.0.2")) // its addition was never seen
	v.awaitServices("default/api 10.96.0.2", "default/web 10.96.0.1")
	s.send(apiwatch.Deleted, named("web", "10.96.0.1"))
	s.send(apiwatch.Deleted, named("web", "10.96.0.1"))
	s.send(apiwatch.Added, named("web", "10.96.0.4"))
	v.awaitServices("default/api 10.96.0.2", "default/web 10.96.0.4")
	changes, newest := 0, snapshot.Versions{}
	for _, d := range v.deltas[before:] {
		if newest = newest.Then(d.Versions); !d.Empty() {
			changes++
		}
	}
	if changes != 3 {
		t.Errorf("%d deltas of objects, want 3: %+v", changes, v.deltas[before:])
	}
	if want := snapshot.Version(strconv.Itoa(s.version)); newest.Services != want || newest.Slices != "" {
		t.Errorf("the versions are %+v; want %s of Services", newest, want)
	}
}

// TestVersions: the store tells the version of lists, of events that change nothing, and of bookmarks, and an event
// that comes too late does not take it back.
func TestVersions(t *testing.T) {
	var got []snapshot.Version
	c := &converter{}
	st := newStore(c.service, sameService, func(error) {}, func() {})
	st.versioned = true
	st.put = func(map[snapshot.Name]*snapshot.Service) { got = append(got, st.version) }
	web := named("web", "10.96.0.1")
	event := func(version string) *corev1.Service {
		o := web.DeepCopy()
		o.ResourceVersion = version
		return o
	}
	for _, do := range []func() error{
		func() error { return st.Replace([]any{event("7")}, "99") },
		func() error { return st.Update(event("100")) },
		func() error { return st.Bookmark("1000") },
		func() error { return st.Update(event("101")) },
		func() error { return st.Delete(event("1001")) },
		func() error { return st.Replace(nil, "50") }, // restored from a backup
	} {
		if err := do(); err != nil {
			t.Fatal(err)
		}
	}
	if want := []snapshot.Version{"99", "100", "1000", "1000", "1001", "50"}; !slices.Equal(got, want) {
		t.Errorf("versions %q; want %q", got, want)
	}
}

// What is wrong with an object is reported once, again when it is something else, and the rest of the object counts.
func TestKubernetesProblems(t *testing.T) {
	both(t, func(t *testing.T, s *apiServer) {
		bad := named("web", "10.96.0.1")
		bad.Spec.ExternalIPs = []string{"192.0.2.300", "192.0.2.1"}
		s.set(bad)
		v := watchAPI(t, s)
		v.await("first lists", func() bool { return v.synced == 1 })
		v.wantProblems(`Service default/web: spec.externalIPs[0]: "192.0.2.300" is not an IP address`)
		again := bad.DeepCopy()
		again.Spec.ClusterIPs[0], again.Spec.ClusterIP = "10.96.0.2", "10.96.0.2"
		s.set(again)
		v.awaitServices("default/web 10.96.0.2")
		other := again.DeepCopy()
		other.Spec.ExternalIPs[0] = "192.0.2.400"
		s.set(other)
		v.wantProblems(`Service default/web: spec.externalIPs[0]: "192.0.2.400" is not an IP address`)
		if got := v.snap.Services[snapshot.Name{Namespace: "default", Name: "web"}].ExternalIPs; !slices.Equal(got,
			ips("192.0.2.1")) {
			t.Errorf("external IPs %v", got)
		}
	})
}

func TestClientConfig(t *testing.T) {
	path := filepath.Join(t.TempDir(), "kubeconfig")
	write(t, path, `apiVersion: v1
kind: Config
clusters: [{name: c, cluster: {server: "https://192.0.2.1:6443"}}]
contexts: [{name: x, context: {cluster: c, user: u}}]
users: [{name: u, user: {token: t}}]
current-context: x
`)
	c, err := ClientConfig(path)
	if err != nil || c.Host != "https://192.0.2.1:6443" || c.BearerToken != "t" || c.QPS != 5 || c.Burst != 10 ||
		c.ContentType != "application/vnd.kubernetes.protobuf" {
		t.Errorf("%+v %v", c, err)
	}
	if _, err := ClientConfig(path + "x"); err == nil || !strings.Contains(err.Error(), "x: no such file") ||
		!strings.Contains(err.Error(), "--from PATH") {
		t.Errorf("missing file: %v", err)
	}
	t.Setenv("KUBERNETES_SERVICE_HOST", "")
	if _, err := ClientConfig(""); err == nil || !strings.HasPrefix(err.Error(), "client configuration: ") {
		t.Errorf("outside of a cluster: %v", err)
	}
	if err := (&Kubernetes{}).Run(t.Context(), &view{}); err == nil {
		t.Error("Run without a configuration")
	}
	if err := (&Kubernetes{Config: &rest.Config{Host: "://"}}).Run(t.Context(), &view{}); err == nil {
		t.Error("Run with a bad address")
	}
}

// memoryGoal is what a process with the sources of a large cluster may use at its peak, in MiB.
const memoryGoal = 150

// TestKubernetesMemory has a process of its own watch 10,000 Services with 10 endpoints each.
func TestKubernetesMemory(t *testing.T) {
	if url := os.Getenv("WATCH_MEMORY_URL"); url != "" {
		useMemory(url)
		return
	}
	if testing.Short() || raceEnabled {
		t.Skip("takes a minute; and the race detector's own memory would be measured")
	}
	both(t, func(t *testing.T, s *apiServer) {
		s.fill(10000)
		cmd := exec.Command(os.Args[0], "-test.run=^TestKubernetesMemory$")
		cmd.Env = append(os.Environ(), "WATCH_MEMORY_URL=http://"+s.addr)
		out, err := cmd.CombinedOutput()
		if err != nil {
			t.Fatalf("%v: %s", err, out)
		}
		fields := strings.Fields(string(out[bytes.LastIndex(out, []byte("peak=")):]))
		t.Log(strings.Join(fields[:2], " "))
		peak, err := strconv.Atoi(strings.TrimPrefix(fields[0], "peak="))
		if err != nil || peak > memoryGoal {
			t.Errorf("peak of %d MiB, goal is %d", peak, memoryGoal)
		}
	})
}

// useMemory watches a server until the first lists are in, and prints the process's peak and its heap in MiB.
func useMemory(url string) {
	q := snapshot.NewQueue(1)
	snap := snapshot.New()
	c := &rest.Config{Host: url}
	c.ContentType = "application/vnd.kubernetes.protobuf"
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	go func() {
		defer close(done)
		if err := (&Kubernetes{Config: c, NodeName: "n1"}).Run(ctx, q); err != nil {
			panic(err)
		}
	}()
	for range q.Wake() {
		if d, ready := q.Take(); ready {
			snap.Apply(d)
			break
		}
	}
	if len(snap.Services) != 10000 || len(snap.Slices) != 10000 {
		panic(fmt.Sprint(len(snap.Services), " services"))
	}
	status, _ := os.ReadFile("/proc/self/status")
	_, rest, _ := strings.Cut(string(status), "VmHWM:")
	peak, _ := strconv.Atoi(strings.Fields(rest)[0])
	debug.FreeOSMemory()
	heap := heapOf(func() { snap, q = nil, nil; cancel(); <-done })
	fmt.Printf("\npeak=%d heap=%.0f\n", peak>>10, heap)
}
