package ipvsplugin

import (
	"errors"
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/verdict-proxy/verdict/internal/lab"
	"github.com/verdict-proxy/verdict/internal/lab/labtest"
	"github.com/verdict-proxy/verdict/internal/system/ipfamily"
	"github.com/verdict-proxy/verdict/internal/system/testkit"
	"github.com/verdict-proxy/verdict/nft/kernel"
	"github.com/verdict-proxy/verdict/sync/dataplane"
	"github.com/verdict-proxy/verdict/sync/snapshot"
)

// The tests named TestIPVS need a kernel with IPVS: internal/lab/guest/matrix -k 6.1 ./ipvsplugin -test.run=IPVS
//
// Where there is none they fail, unless VERDICT_IPVS=none says that this machine is known to have none; guests never
// hear of that.

func TestMain(m *testing.M) { labtest.Main(m) }

// needIPVS ends a test where there is no IPVS.
func needIPVS(t testing.TB) {
	t.Helper()
	_ = exec.Command("modprobe", "ip_vs").Run() // Linux 5.10 does not load it by itself
	missing := (*Missing)(nil)
	switch err := Probe("rr"); {
	case err == nil:
	case errors.As(err, &missing) && os.Getenv("VERDICT_IPVS") == "none":
		t.Skip(err)
	case errors.As(err, &missing):
		t.Fatalf("%v; VERDICT_IPVS=none if that is so on purpose", err)
	default:
		t.Fatal(err)
	}
}

const targetPort = 8080

// patience is how long an answer may take. A machine that is emulated loses packets when it has to wait for processors;
// the kernel sends a SYN again after one second, and the INIT of SCTP after three.
const patience = 10 * time.Second

var protocols = []snapshot.Protocol{snapshot.TCP, snapshot.UDP, snapshot.SCTP}

// world is a cluster whose node has nftables and IPVS, driven by objects.
type world struct {
	*lab.Cluster
	t       testing.TB
	snap    *snapshot.Snapshot
	planner *dataplane.Planner
	backend *Backend
	nft     *kernel.Backend
	// tcp are the pods' servers.
	tcp map[string]*lab.Server
}

func newWorld(t testing.TB, local, remote int, mode dataplane.IPVSMode) *world {
	t.Helper()
	return newWorldOf(t, lab.Config{LocalPods: local, RemotePods: remote}, mode)
}

func newWorldOf(t testing.TB, conf lab.Config, mode dataplane.IPVSMode) *world {
	t.Helper()
	needIPVS(t)
	w := &world{Cluster: labtest.NewCluster(t, conf), t: t, snap: snapshot.New(), tcp: map[string]*lab.Server{}}
	for _, pod := range slices.Concat(w.Pods, w.RemotePods) {
		for _, p := range protocols {
			s, err := pod.Serve(p, targetPort)
			labtest.Check(t, err)
			if p == snapshot.TCP {
				w.tcp[pod.Name] = s
			}
		}
	}
	w.planner = dataplane.NewPlanner(dataplane.Config{
		NodeName: "node", DetectLocal: dataplane.DetectLocal{ClusterCIDRs: lab.PodRange},
		IPVS: dataplane.IPVS{Mode: mode, Default: dataplane.Scheduling{Scheduler: "rr"}, Addresses: lab.ExternalRange},
	})
	addrs := append(w.nodeAddrs(), netip.MustParseAddr("127.0.0.1"))
	slices.SortFunc(addrs, netip.Addr.Compare)
	cidrs := slices.Clone(lab.ServiceRange)
	w.snap.Apply(snapshot.Delta{HostAddrs: &addrs, ServiceCIDRs: &cidrs, Node: &snapshot.Node{Name: "node",
		Addresses: []netip.Addr{w.Node.IP4, w.Node.IP6}, PodCIDRs: lab.NodePodRange}})
	w.open()
	t.Cleanup(w.close)
	return w
}

// nodeAddrs are the addresses a masqueraded packet can have.
func (w *world) nodeAddrs() []netip.Addr {
	out := []netip.Addr{w.Node.IP4, w.Node.IP6}
	for _, r := range lab.NodePodRange {
		out = append(out, lab.Nth(r, 1))
	}
	return out
}

// open starts a proxy, which knows nothing.
func (w *world) open() {
	w.t.Helper()
	w.inside(func() (err error) {
		if w.nft, err = kernel.Open(kernel.Options{}); err != nil {
			return err
		}
		w.backend, err = New(w.nft, Options{NodeAddrs: func() []netip.Addr { return []netip.Addr{w.Node.IP4, w.Node.IP6} }})
		return err
	})
}

// close ends it, and leaves everything in the kernel.
func (w *world) close() {
	if w.backend != nil {
		labtest.Check(w.t, errors.Join(w.backend.Close(), w.nft.Close()))
		w.backend = nil
	}
}

func (w *world) inside(f func() error) {
	w.t.Helper()
	labtest.Check(w.t, w.Node.Do(f))
}

// try applies a delta.
func (w *world) try(d snapshot.Delta) (r dataplane.Receipt, err error) {
	w.t.Helper()
	change, conflicts := w.planner.Apply(w.snap, w.snap.Apply(d))
	if conflicts != nil {
		w.t.Fatal(conflicts)
	}
	w.inside(func() error { r, err = w.backend.Apply(w.planner.State(), change); return nil })
	return r, err
}

func (w *world) apply(deltas ...snapshot.Delta) dataplane.Receipt {
	w.t.Helper()
	var d snapshot.Delta
	for _, more := range deltas {
		d.Merge(more)
	}
	r, err := w.try(d)
	labtest.Check(w.t, err)
	return r
}

func (w *world) check() (found []string) {
	w.t.Helper()
	w.inside(func() (err error) { found, _, err = w.backend.Check(); return err })
	return found
}

// until polls, with Check between, until f is true.
func (w *world) until(what string, f func() bool) {
	w.t.Helper()
	testkit.Eventually(w.t, 2*time.Minute, what, func() bool {
		if found := w.check(); found != nil {
			w.t.Fatalf("waiting for: %s: found %q", what, found)
		}
		return f()
	}, w.list)
}

// list is what ipvsadm -Sn lists.
func (w *world) list() string {
	w.t.Helper()
	return labtest.Run(w.t, w.Node, "", "ipvsadm", "-Sn")
}

// wants checks that ipvsadm lists what Print prints.
func (w *world) wants() {
	w.t.Helper()
	var b strings.Builder
	labtest.Check(w.t, Print(&b, w.planner.State()))
	w.inside(func() error {
		lines, err := Differences(w.planner.State())
		if lines != nil {
			w.t.Errorf("IPVS differs: %q", lines)
		}
		return err
	})
	if got, want := sortedLines(w.list()), sortedLines(b.String()); got != want {
		w.t.Errorf("ipvsadm lists\n%swant\n%s", got, want)
	}
}

// sortedLines sorts services with their destinations, which the kernel lists in no order.
func sortedLines(s string) string {
	lines := strings.SplitAfter(s, "\n")
	slices.SortFunc(lines, func(a, b string) int {
		return strings.Compare(strings.ToLower(sortKey(a)), strings.ToLower(sortKey(b)))
	})
	return strings.Join(lines, "")
}

func sortKey(line string) string {
	f := strings.Fields(line)
	if len(f) < 3 {
		return line
	}
	return f[1] + f[2] + map[string]string{"-A": "0", "-a": "1"}[f[0]] + line
}

// app is a Service with endpoints.
type app struct {
	number                       int
	scheduling                   *snapshot.Scheduling
	affinity                     time.Duration
	internalLocal, externalLocal bool
	// here are pods of this node, there of the other.
	here, there []endpoint
	// external gives it addresses of every kind.
	external bool
}

type endpoint struct {
	pod                         int
	ready, serving, terminating bool
	weight                      uint16
}

func ready(pods ...int) (list []endpoint) {
	for _, n := range pods {
		list = append(list, endpoint{pod: n, ready: true, serving: true})
	}
	return list
}

func scheduler(name string) *snapshot.Scheduling { return &snapshot.Scheduling{Scheduler: name} }

func (a app) name() snapshot.Name {
	return snapshot.Name{Namespace: "test", Name: fmt.Sprintf("s%d", a.number)}
}

func (w *world) delta(a app) snapshot.Delta {
	svc := &snapshot.Service{Name: a.name(), Scheduling: a.scheduling, Affinity: a.affinity,
		InternalLocal: a.internalLocal, ExternalLocal: a.externalLocal}
	d := snapshot.Delta{
		Services: map[snapshot.Name]*snapshot.Service{svc.Name: svc},
		Slices:   map[snapshot.Name]*snapshot.Slice{},
	}
	for i, f := range []ipfamily.Family{ipfamily.IPv4, ipfamily.IPv6} {
		svc.ClusterIPs = append(svc.ClusterIPs, lab.Nth(lab.ServiceRange[i], a.number))
		if a.external {
			svc.LoadBalancerIPs = append(svc.LoadBalancerIPs, lab.Nth(lab.ExternalRange[i], a.number))
			svc.ExternalIPs = append(svc.ExternalIPs, lab.Nth(lab.ExternalRange[i], 100+a.number))
		}
		sl := &snapshot.Slice{
			Name:    snapshot.Name{Namespace: svc.Name.Namespace, Name: fmt.Sprint(svc.Name.Name, f)},
			Service: svc.Name.Name,
		}
		for _, p := range protocols {
			sl.Ports = append(sl.Ports, snapshot.SlicePort{Name: p.String(), Protocol: p, Port: targetPort})
		}
		for n, list := range [][]endpoint{a.here, a.there} {
			for _, e := range list {
				sl.Endpoints = append(sl.Endpoints, snapshot.Endpoint{Addr: [][]*lab.Host{w.Pods, w.RemotePods}[n][e.pod].IP(f),
					Node: []string{"node", "node2"}[n], Ready: e.ready,
					Serving: e.serving, Terminating: e.terminating,
					Weight: snapshot.Weight{Given: e.weight > 0, Parts: snapshot.PartsOf(e.weight)}})
			}
		}
		d.Slices[sl.Name] = sl
	}
	for _, p := range protocols {
		port := snapshot.Port{Name: p.String(), Protocol: p, Port: 80}
		if a.external {
			port.NodePort = uint16(30000 + a.number)
		}
		svc.Ports = append(svc.Ports, port)
	}
	return d
}

// vip is the cluster IP of a Service, with its port.
func vip(number int, f ipfamily.Family) netip.AddrPort {
	return netip.AddrPortFrom(
		lab.Nth(lab.ServiceRange[map[ipfamily.Family]int{ipfamily.IPv4: 0, ipfamily.IPv6: 1}[f]], number),
		80,
	)
}
