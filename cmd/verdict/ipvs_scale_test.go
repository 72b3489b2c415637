package main

import (
	"encoding/json"
	"flag"
	"fmt"
	"net"
	"net/http"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	v1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/verdict-proxy/verdict/internal/lab"
	"github.com/verdict-proxy/verdict/internal/lab/labtest"
	"github.com/verdict-proxy/verdict/internal/testkit"
)

var scaleServices = flag.Int("scale.services", 200, "Services of TestIPVSScale, with 10 endpoints each")

const (
	scaleEndpoints = 10
	scaleChanges   = 5
	scaleLimit     = 10 * time.Minute
)

// apiServer is what a proxy needs of an API server: it lists and watches three kinds of objects, which are in memory.
type apiServer struct {
	mu       sync.Mutex
	lists    map[string][]byte // by path
	slices   []discovery.EndpointSlice
	watchers []chan []byte // of EndpointSlices
}

func scaleAddr(of byte, i int) string {
	return netip.AddrFrom4([4]byte{10, of + byte(i>>16), byte(i >> 8), byte(i)}).String()
}

func scaleVIP(i int) string { return scaleAddr(96, i+1) }

func scaleService(i int) v1.Service {
	ip := scaleVIP(i)
	return v1.Service{
		ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: fmt.Sprint("web-", i), ResourceVersion: "1"},
		Spec: v1.ServiceSpec{
			Type:            v1.ServiceTypeClusterIP,
			ClusterIP:       ip,
			ClusterIPs:      []string{ip},
			IPFamilies:      []v1.IPFamily{v1.IPv4Protocol},
			SessionAffinity: v1.ServiceAffinityNone,
			Ports:           []v1.ServicePort{{Name: "http", Protocol: v1.ProtocolTCP, Port: 80}},
		},
	}
}

// scaleSlice gives the endpoints of a Service. One of them, newcomer, takes the place of the first; empty means none
// does.
func scaleSlice(i int, newcomer string) discovery.EndpointSlice {
	s := discovery.EndpointSlice{
		ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: fmt.Sprint("web-", i, "-x7f2q"), ResourceVersion: "1",
			Labels: map[string]string{discovery.LabelServiceName: fmt.Sprint("web-", i)}},
		AddressType: discovery.AddressTypeIPv4,
		Ports:       []discovery.EndpointPort{{Name: new("http"), Protocol: new(v1.ProtocolTCP), Port: new(int32(8080))}},
	}
	for e := range scaleEndpoints {
		addr := scaleAddr(128, i*scaleEndpoints+e)
		if e == 0 && newcomer != "" {
			addr, s.ResourceVersion = newcomer, "2"
		}
		s.Endpoints = append(s.Endpoints, discovery.Endpoint{Addresses: []string{addr}, NodeName: new("elsewhere"),
			Conditions: discovery.EndpointConditions{Ready: new(true), Serving: new(true), Terminating: new(false)}})
	}
	return s
}

// put has a path answer with a list.
func (a *apiServer) put(t *testing.T, path, apiVersion, kind string, items any) {
	t.Helper()
	b, err := json.Marshal(
		map[string]any{
			"apiVersion": apiVersion,
			"kind":       kind,
			"metadata":   map[string]any{"resourceVersion": "2"},
			"items":      items,
		},
	)
	labtest.Check(t, err)
	a.lists[path] = b
}

func (a *apiServer) putSlices(t *testing.T) {
	t.Helper()
	a.put(t, "/apis/discovery.k8s.io/v1/endpointslices", "discovery.k8s.io/v1", "EndpointSliceList", a.slices)
}

func newAPIServer(t *testing.T, services int, node netip.Addr) *apiServer {
	t.Helper()
	a := &apiServer{lists: map[string][]byte{}}
	var all []v1.Service
	for i := range services {
		all = append(all, scaleService(i))
		a.slices = append(a.slices, scaleSlice(i, ""))
	}
	a.putSlices(t)
	a.put(t, "/api/v1/services", "v1", "ServiceList", all)
	a.put(t, "/apis/networking.k8s.io/v1/servicecidrs", "networking.k8s.io/v1", "ServiceCIDRList", []any{})
	a.put(t, "/api/v1/endpoints", "v1", "EndpointsList", []any{})
	self := v1.Node{
		TypeMeta:   metav1.TypeMeta{APIVersion: "v1", Kind: "Node"},
		ObjectMeta: metav1.ObjectMeta{Name: "node", ResourceVersion: "1"},
		Spec:       v1.NodeSpec{PodCIDR: "10.244.1.0/24", PodCIDRs: []string{"10.244.1.0/24"}},
		Status:     v1.NodeStatus{Addresses: []v1.NodeAddress{{Type: v1.NodeInternalIP, Address: node.String()}}},
	}
	a.put(t, "/api/v1/nodes", "v1", "NodeList", []v1.Node{self})
	b, err := json.Marshal(self)
	labtest.Check(t, err)
	a.lists["/api/v1/nodes/node"] = b
	return a
}

func (a *apiServer) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	w.Header().Set("Content-Type", "application/json")
	a.mu.Lock()
	list := a.lists[r.URL.Path]
	a.mu.Unlock()
	switch q := r.URL.Query(); {
	case list == nil || r.Method != http.MethodGet:
		w.WriteHeader(http.StatusNotFound)
		fmt.Fprint(w, `{"apiVersion":"v1","kind":"Status","status":"Failure","reason":"NotFound","code":404}`)
	case q.Get("sendInitialEvents") != "": // clients list instead, then
		w.WriteHeader(http.StatusUnprocessableEntity)
		fmt.Fprint(w, `{"apiVersion":"v1","kind":"Status","status":"Failure","reason":"Invalid","code":422}`)
	case q.Get("watch") != "":
		a.watch(w, r)
	default:
		_, _ = w.Write(list) // the client may be killed
	}
}

func (a *apiServer) watch(w http.ResponseWriter, r *http.Request) {
	events := make(chan []byte, scaleChanges)
	if strings.HasSuffix(r.URL.Path, "endpointslices") {
		a.mu.Lock()
		a.watchers = append(a.watchers, events)
		a.mu.Unlock()
	}
	for {
		_ = http.NewResponseController(w).Flush()
		select {
		case <-r.Context().Done():
			return
		case e := <-events:
			_, _ = w.Write(e)
		}
	}
}

// modify changes the EndpointSlice of a Service, and tells whoever watches.
func (a *apiServer) modify(t *testing.T, i int, s discovery.EndpointSlice) {
	t.Helper()
	s.APIVersion, s.Kind = "discovery.k8s.io/v1", "EndpointSlice"
	b, err := json.Marshal(map[string]any{"type": "MODIFIED", "object": s})
	labtest.Check(t, err)
	a.mu.Lock()
	defer a.mu.Unlock()
	for _, w := range a.watchers {
		select {
		case w <- b:
		default: // of a proxy that has ended
		}
	}
	a.slices[i] = s
}

// scaled is a proxy that is measured, on a node of its own.
type scaled struct {
	t     *testing.T
	api   *apiServer
	node  *lab.Host
	dir   string
	begin func(s *scaled) *lab.Cmd
	// ready says whether the proxy that was started last is done, from its log.
	ready func(s *scaled) bool
	log   string // of the process that was started last
	cmd   *lab.Cmd
}

const scaleURL = "127.0.0.1:8001"

func newScaled(t *testing.T, services int, begin func(*scaled) *lab.Cmd, ready func(*scaled) bool) *scaled {
	t.Helper()
	cluster := labtest.NewCluster(t, lab.Config{LocalPods: 1})
	s := &scaled{t: t, node: cluster.Node, dir: t.TempDir(), begin: begin, ready: ready}
	s.api = newAPIServer(t, services, s.node.IP4)
	var listener net.Listener
	labtest.Check(t, s.node.Do(func() (err error) { listener, err = net.Listen("tcp", scaleURL); return err }))
	server := &http.Server{Handler: s.api}
	go func() { _ = server.Serve(listener) }()
	t.Cleanup(func() { labtest.Check(t, server.Close()) })
	labtest.Check(
		t,
		os.WriteFile(
			s.file("kubeconfig"),
			[]byte(`{apiVersion: v1, kind: Config, current-context: c, contexts: [{name: c, context: {cluster: c, user: u}}],
clusters: [{name: c, cluster: {server: "http://`+scaleURL+`"}}], users: [{name: u, user: {}}]}`),
			0o600,
		),
	)
	return s
}

func (s *scaled) file(name string) string { return filepath.Join(s.dir, name) }

// start starts the proxy and gives the time until it is done.
func (s *scaled) start() time.Duration {
	s.t.Helper()
	s.log = s.file(fmt.Sprint("log-", time.Now().UnixNano()))
	s.api.mu.Lock()
	s.api.putSlices(s.t)
	s.api.mu.Unlock()
	out, err := os.Create(s.log)
	labtest.Check(s.t, err)
	defer out.Close()
	s.cmd = s.begin(s)
	s.cmd.Stdout, s.cmd.Stderr = out, out
	start := time.Now()
	labtest.Check(s.t, s.cmd.Start())
	s.until("it is done", func() bool { return s.ready(s) })
	return time.Since(start)
}

func (s *scaled) stop() {
	s.t.Helper()
	labtest.Check(s.t, s.cmd.Process.Signal(syscall.SIGTERM))
	labtest.Check(s.t, s.cmd.Wait())
}

func (s *scaled) said() string {
	b, err := os.ReadFile(s.log)
	labtest.Check(s.t, err)
	return string(b)
}

func (s *scaled) until(what string, f func() bool) {
	s.t.Helper()
	testkit.Eventually(s.t, scaleLimit, what, f, func() string {
		said := s.said()
		return said[max(0, len(said)-4000):]
	})
}

// change replaces an endpoint, and gives the time until IPVS has the new one.
func (s *scaled) change(n int) time.Duration {
	s.t.Helper()
	i, newcomer := n*(*scaleServices/scaleChanges), fmt.Sprintf("10.200.0.%d", n+1)
	start := time.Now()
	s.api.modify(s.t, i, scaleSlice(i, newcomer))
	s.until("the new endpoint is there", func() bool {
		return strings.Contains(labtest.Run(s.t, s.node, "", "ipvsadm", "-Ln", "-t", scaleVIP(i)+":80"), newcomer+":8080 ")
	})
	return time.Since(start)
}

// destinations counts what IPVS has.
func (s *scaled) destinations() int {
	return strings.Count(labtest.Run(s.t, s.node, "", "ipvsadm", "-Sn"), " -r ")
}

// measure logs a proxy's times. After the restart it must still hold what it held.
func (s *scaled) measure(name string) {
	s.t.Helper()
	cold := s.start()
	if got := s.destinations(); got != *scaleServices*scaleEndpoints {
		s.t.Errorf("%s says that it is done, and IPVS has %d destinations of %d", name, got, *scaleServices*scaleEndpoints)
	}
	var changes []time.Duration
	for n := range scaleChanges {
		changes = append(changes, s.change(n))
	}
	slices.Sort(changes)
	s.stop()
	again := s.start()
	s.t.Logf(
		"%s, %d Services with %d endpoints: start to everything written %v; an endpoint replaced, from the watch event "+
			"until ipvsadm lists it %v to %v, median %v; "+
			"start after a restart %v",
		name,
		*scaleServices,
		scaleEndpoints,
		cold.Round(10*time.Millisecond),
		changes[0].Round(time.Millisecond),
		changes[scaleChanges-1].Round(
			time.Millisecond,
		),
		changes[scaleChanges/2].Round(time.Millisecond),
		again.Round(10*time.Millisecond),
	)
}

// TestIPVSScale measures start, change and restart through IPVS. A start includes that of the
// process, and reading the objects from a server in memory. A restart writes nothing.
func TestIPVSScale(t *testing.T) {
	needIPVS(t)
	begin := func(s *scaled) *lab.Cmd {
		cmd := s.node.Command(
			"/proc/self/exe",
			"run",
			"--kubeconfig",
			s.file("kubeconfig"),
			"--hostname-override",
			"node",
			"--ipvs=always",
			"--cluster-cidr",
			"10.244.0.0/16",
		)
		cmd.Env = append(os.Environ(), beVerdict+"=1")
		return cmd
	}
	ready := func(s *scaled) bool { return strings.Contains(s.said(), carried) }
	first := newScaled(t, 1, begin, ready) // which has the kernel load its modules
	t.Logf("the first proxy of all takes %v", first.start().Round(10*time.Millisecond))
	first.stop()
	s := newScaled(t, *scaleServices, begin, ready)
	s.measure("verdict")
	t.Log(lineWith(s.said(), carried))
	if !strings.Contains(s.said(), "nothing was written") {
		t.Errorf("after a restart:\n%s", s.said())
	}
	s.stop()
}

func lineWith(text, word string) string {
	for line := range strings.Lines(text) {
		if strings.Contains(line, word) {
			return strings.TrimSpace(line)
		}
	}
	return ""
}
