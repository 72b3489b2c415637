package main

import (
	"encoding/json"
	"flag"
	"fmt"
	"math/rand/v2"
	"net"
	"net/http"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
	v1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/verdict-proxy/verdict/internal/lab"
	"github.com/verdict-proxy/verdict/internal/lab/labtest"
	"github.com/verdict-proxy/verdict/internal/system/testkit"
)

var (
	scaleServices  = flag.String("scale.services", "200", "numbers of Services that TestIPVSScale measures, with commas")
	scaleEndpoints = flag.Int("scale.endpoints", 2, "endpoints of each of these Services")
	scaleRounds    = flag.Int("scale.rounds", 3, "how many changes, and how many rounds of flows, TestIPVSScale measures")
)

const (
	scaleLimit   = time.Hour
	scaleFlows   = 4000 // new UDP flows of a round
	scaleSockets = 64
	scaleForget  = 12 * time.Second // after which IPVS forgets the flows of a round
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
			Ports:           []v1.ServicePort{{Name: "dns", Protocol: v1.ProtocolUDP, Port: 53}},
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
		Ports:       []discovery.EndpointPort{{Name: new("dns"), Protocol: new(v1.ProtocolUDP), Port: new(int32(8053))}},
	}
	for e := range *scaleEndpoints {
		addr := scaleAddr(128, i**scaleEndpoints+e)
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
	events := make(chan []byte, 8)
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

// serve serves inside a host until the test ends, and writes a kubeconfig for clients there.
func (a *apiServer) serve(t *testing.T, on *lab.Host, kubeconfig string) {
	t.Helper()
	var listener net.Listener
	labtest.Check(t, on.Do(func() (err error) { listener, err = net.Listen("tcp", scaleURL); return err }))
	server := &http.Server{Handler: a}
	go func() { _ = server.Serve(listener) }()
	t.Cleanup(func() { labtest.Check(t, server.Close()) })
	text := `{apiVersion: v1, kind: Config, current-context: c, contexts: [{name: c, context: {cluster: c, user: u}}],
clusters: [{name: c, cluster: {server: "http://` + scaleURL + `"}}], users: [{name: u, user: {}}]}`
	labtest.Check(t, os.WriteFile(kubeconfig, []byte(text), 0o600))
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
	t        *testing.T
	name     string // who chooses the endpoints
	ipvs     string // the value of --ipvs
	services int
	api      *apiServer
	node     *lab.Host
	dir      string
	log      string // of the process that was started last
	cmd      *lab.Cmd
	sends    []unix.SockaddrInet4

	changes []written
	flows   []time.Duration // processor time of one new flow, of each round
}

const scaleURL = "127.0.0.1:8001"

func newScaled(t *testing.T, name, ipvs string, services int) *scaled {
	t.Helper()
	cluster := labtest.NewCluster(t, lab.Config{LocalPods: 1})
	s := &scaled{t: t, name: name, ipvs: ipvs, services: services, node: cluster.Node, dir: t.TempDir()}
	s.api = newAPIServer(t, services, s.node.IP4)
	s.planFlows()
	s.api.serve(t, s.node, s.file("kubeconfig"))
	// What goes to endpoints ends at a device that throws everything away.
	for _, args := range []string{"link add sink type dummy", "link set sink up",
		fmt.Sprint("route add 10.128.0.0/9 dev sink src ", s.node.IP4)} {
		labtest.Run(t, s.node, "", "ip", strings.Fields(args)...)
	}
	return s
}

func (s *scaled) file(name string) string { return filepath.Join(s.dir, name) }

// start starts the proxy, and returns the time until it has programmed everything.
func (s *scaled) start() time.Duration {
	s.t.Helper()
	s.log = s.file(fmt.Sprint("log-", time.Now().UnixNano()))
	s.api.mu.Lock()
	s.api.putSlices(s.t)
	s.api.mu.Unlock()
	out, err := os.Create(s.log)
	labtest.Check(s.t, err)
	defer out.Close()
	// The node's own flows are not masqueraded.
	s.cmd = s.node.Command("/proc/self/exe", "run", "--kubeconfig", s.file("kubeconfig"), "--hostname-override", "node",
		"--ipvs="+s.ipvs, "--ipvs-services=0", fmt.Sprint("--ipvs-udp-timeout=", scaleForget),
		"--cluster-cidr", s.node.IP4.String()+"/32", "--keeper=none", "--v=2")
	s.cmd.Env = append(os.Environ(), beVerdict+"=1")
	s.cmd.Stdout, s.cmd.Stderr = out, out
	start := time.Now()
	labtest.Check(s.t, s.cmd.Start())
	s.until("it is done", func() bool { return strings.Contains(s.said(), carried) })
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
	testkit.Eventually(s.t, scaleLimit, s.name+": "+what, f, func() string {
		said := s.said()
		return said[max(0, len(said)-4000):]
	})
}

// written is what the log says of a transaction.
type written struct {
	elements, messages int
	// kernel is the time until the kernel had it, all includes deciding and comparing.
	kernel, all time.Duration
}

// lastWritten parses the log's last transaction, and counts them.
func (s *scaled) lastWritten() (last written, count int) {
	s.t.Helper()
	for line := range strings.Lines(s.said()) {
		if !strings.Contains(line, "msg=transaction ") {
			continue
		}
		last, count = written{}, count+1
		for _, field := range strings.Fields(line) {
			key, value, _ := strings.Cut(field, "=")
			switch key {
			case "added", "replaced", "removed", "messages":
				n, err := strconv.Atoi(value)
				labtest.Check(s.t, err)
				if key == "messages" {
					last.messages = n
				} else {
					last.elements += n
				}
			case "policy", "plan", "encode", "commit":
				took, err := time.ParseDuration(value)
				labtest.Check(s.t, err)
				last.all += took
				if key == "commit" {
					last.kernel = took
				}
			}
		}
	}
	return last, count
}

// change replaces an endpoint, and waits until the kernel has the new one.
func (s *scaled) change(n int) {
	s.t.Helper()
	_, before := s.lastWritten()
	i, newcomer := n*(s.services / *scaleRounds), fmt.Sprintf("10.200.0.%d", n+1)
	s.api.modify(s.t, i, scaleSlice(i, newcomer))
	var last written
	s.until("the new endpoint is there", func() bool {
		var count int
		last, count = s.lastWritten()
		return count > before
	})
	s.changes = append(s.changes, last)
	if s.ipvs == "always" {
		got := labtest.Run(s.t, s.node, "", "ipvsadm", "-Ln", "-u", scaleVIP(i)+":53")
		if !strings.Contains(got, newcomer+":") {
			s.t.Errorf("IPVS does not have %s:\n%s", newcomer, got)
		}
	}
}

// planFlows decides on a round of new flows: in each pass one to every Service in random order.
func (s *scaled) planFlows() {
	random := rand.New(rand.NewPCG(1, 1))
	for len(s.sends) < scaleFlows {
		for _, i := range random.Perm(s.services)[:min(s.services, scaleFlows-len(s.sends))] {
			addr := netip.MustParseAddr(scaleVIP(i))
			s.sends = append(s.sends, unix.SockaddrInet4{Addr: addr.As4(), Port: 53})
		}
	}
}

// flowRound sends a packet of each flow, and notes the processor time that one takes. All must have been translated.
func (s *scaled) flowRound(n int) {
	s.t.Helper()
	connections, err := func() (h *netlink.Handle, err error) {
		err = s.node.Do(func() (err error) { h, err = netlink.NewHandle(unix.NETLINK_NETFILTER); return err })
		return h, err
	}()
	labtest.Check(s.t, err)
	defer connections.Close()
	labtest.Check(s.t, connections.ConntrackTableFlush(netlink.ConntrackTable))
	labtest.Check(s.t, s.node.Do(func() error { return s.send(20000 + n*scaleSockets) }))
	held, err := connections.ConntrackTableList(netlink.ConntrackTable, unix.AF_INET)
	labtest.Check(s.t, err)
	translated := 0
	for _, f := range held {
		if f.Forward.DstPort == 53 && f.Reverse.SrcPort == 8053 {
			translated++
		}
	}
	if translated != scaleFlows {
		s.t.Errorf("%s: of %d flows %d were translated", s.name, scaleFlows, translated)
	}
}

// send sends all packets of a round, from sockets with ports from firstPort on: a pass takes the next socket, so that
// each packet is a flow of its own.
func (s *scaled) send(firstPort int) error {
	passes := (scaleFlows + s.services - 1) / s.services
	if passes > scaleSockets {
		return fmt.Errorf("%d Services are too few for %d flows", s.services, scaleFlows)
	}
	var sockets []int
	for n := range passes {
		fd, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
		if err != nil {
			return err
		}
		defer unix.Close(fd)
		if err := unix.Bind(fd, &unix.SockaddrInet4{Port: firstPort + n}); err != nil {
			return err
		}
		sockets = append(sockets, fd)
	}
	start, err := lab.ThreadTime()
	if err != nil {
		return err
	}
	packet := []byte{0}
	for i := range s.sends {
		if err := unix.Sendto(sockets[i/s.services], packet, 0, &s.sends[i]); err != nil {
			return fmt.Errorf("send: %w", err)
		}
	}
	end, err := lab.ThreadTime()
	s.flows = append(s.flows, (end-start)/scaleFlows)
	return err
}

// memory returns what the kernel has allocated for itself, and the most that the proxy had, in MiB.
func (s *scaled) memory() (kernel, process float64) {
	s.t.Helper()
	sum := func(file string, fields ...string) (mib float64) {
		b, err := os.ReadFile(file)
		labtest.Check(s.t, err)
		for line := range strings.Lines(string(b)) {
			name, rest, _ := strings.Cut(line, ":")
			if slices.Contains(fields, name) {
				kib, err := strconv.Atoi(strings.Fields(rest)[0])
				labtest.Check(s.t, err)
				mib += float64(kib) / 1024
			}
		}
		return mib
	}
	if s.cmd != nil {
		process = sum(fmt.Sprintf("/proc/%d/status", s.cmd.Process.Pid), "VmHWM")
	}
	return sum("/proc/meminfo", "SUnreclaim", "Percpu", "VmallocUsed"), process
}

// processorTime is what the proxy has used so far, inside the kernel and outside.
func (s *scaled) processorTime() time.Duration {
	s.t.Helper()
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", s.cmd.Process.Pid))
	labtest.Check(s.t, err)
	_, rest, _ := strings.Cut(string(b), ") ")
	fields := strings.Fields(rest)
	var ticks int
	for _, text := range fields[11:13] { // utime, stime
		n, err := strconv.Atoi(text)
		labtest.Check(s.t, err)
		ticks += n
	}
	return time.Duration(ticks) * 10 * time.Millisecond
}

// fill starts the proxy for the first time, and logs what that takes.
func (s *scaled) fill() {
	s.t.Helper()
	before, _ := s.memory()
	wall := s.start()
	took := s.processorTime()
	kernel, process := s.memory()
	w, _ := s.lastWritten()
	if s.ipvs == "always" {
		got := strings.Count(labtest.Run(s.t, s.node, "", "ipvsadm", "-Sn"), " -r ")
		if want := s.services * *scaleEndpoints; got != want {
			s.t.Errorf("it says that it is done, and IPVS has %d destinations of %d", got, want)
		}
	}
	s.t.Logf("%d Services with %d endpoints, %s: start %v, of which the processor %v, the transaction %v, the kernel %v, "+
		"%d elements in %d messages; memory of the kernel %.0f MiB, at most of the process %.0f MiB",
		s.services, *scaleEndpoints, s.name, wall.Round(10*time.Millisecond), took, w.all.Round(time.Millisecond),
		w.kernel.Round(time.Millisecond), w.elements, w.messages, kernel-before, process)
}

// report logs the medians of changes and flows, and starts the proxy again, which writes nothing.
func (s *scaled) report() {
	s.t.Helper()
	median := s.changes[0]
	kernel, all := make([]time.Duration, 0, len(s.changes)), make([]time.Duration, 0, len(s.changes))
	for _, c := range s.changes {
		kernel, all = append(kernel, c.kernel), append(all, c.all)
	}
	slices.Sort(kernel)
	slices.Sort(all)
	slices.Sort(s.flows)
	middle := *scaleRounds / 2
	s.stop()
	again := s.start()
	if !strings.Contains(s.said(), "nothing was written") {
		s.t.Errorf("after a restart:\n%s", s.said())
	}
	s.stop()
	s.t.Logf("%d Services with %d endpoints, %s: an endpoint replaced %v (%v to %v), of which the kernel %v, "+
		"%d elements in %d messages; a new flow %v (%v to %v); a restart %v",
		s.services, *scaleEndpoints, s.name, all[middle].Round(10*time.Microsecond), all[0].Round(10*time.Microsecond),
		all[len(all)-1].Round(10*time.Microsecond), kernel[middle].Round(10*time.Microsecond), median.elements,
		median.messages, s.flows[middle], s.flows[0], s.flows[len(s.flows)-1], again.Round(10*time.Millisecond))
}

// TestIPVSScale measures nftables and IPVS by turns, on two nodes of one machine: start, one endpoint replaced, a new
// flow, restart. A start includes that of the process, and reading the objects from a server in memory. Flows are the
// node's own, and their time is the processor's.
func TestIPVSScale(t *testing.T) {
	needIPVS(t)
	first := newScaled(t, "first", "always", 1) // which has the kernel load its modules
	first.start()
	first.stop()
	for _, text := range strings.Split(*scaleServices, ",") {
		services, err := strconv.Atoi(text)
		labtest.Check(t, err)
		t.Run(text, func(t *testing.T) {
			both := []*scaled{newScaled(t, "nftables", "never", services), newScaled(t, "IPVS", "always", services)}
			for _, s := range both {
				s.fill()
			}
			for n := range *scaleRounds {
				for _, s := range both {
					s.flowRound(n)
				}
				for _, s := range both {
					s.change(n)
				}
				time.Sleep(scaleForget)
				slices.Reverse(both)
			}
			for _, s := range both {
				s.report()
			}
		})
	}
}
