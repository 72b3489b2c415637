//go:build peers

package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/yaml"

	"github.com/verdict-proxy/verdict/internal/lab"
	"github.com/verdict-proxy/verdict/internal/lab/control"
	"github.com/verdict-proxy/verdict/internal/lab/labtest"
	"github.com/verdict-proxy/verdict/internal/lab/tableowner"
)

// These tests need kube-proxy and a control plane, and IPVS mode a kernel with IPVS: internal/lab/guest/takeover 6.12

var (
	takeovers = flag.Int("takeovers", 3, "how often TestLiveTakeover goes from kube-proxy to Verdict and back")
	hairpins  = flag.Bool("hairpins", false, "in TestLiveTakeover, the pod that is a client is an endpoint, too")
)

// In a guest on a busy machine, a kube-proxy and a Verdict that start leave clients little time of the processors.
const (
	livePatience = 30 * time.Second
	liveLimit    = 10 * time.Minute
)

// peersVariable names a directory with etcd, kube-apiserver and kube-proxy; if it is not set, they are built.
const peersVariable = "VERDICT_PEERS"

// sharedConfig is the file that kube-proxy and Verdict both read, as kubeadm's ConfigMap.
const sharedConfig = `apiVersion: kubeproxy.config.k8s.io/v1alpha1
kind: KubeProxyConfiguration
mode: %s
hostnameOverride: node
clusterCIDR: %s,%s
clientConnection: {kubeconfig: %q}
conntrack: {maxPerCore: 0, min: 0}
metricsBindAddress: 127.0.0.1:10249
healthzBindAddress: 0.0.0.0:10256
oomScoreAdj: 0
`

// live is a node on which a kube-proxy and Verdict follow each other.
type live struct {
	mover
	// mode is that of the configuration.
	mode   string
	plane  *control.Plane
	proxy  *control.Process
	config string
}

// newLive has a control plane on the other node, a Node object, Services and their endpoints, and no proxy yet.
func newLive(t *testing.T, mode string) *live {
	t.Helper()
	if mode == "ipvs" {
		needIPVS(t)
	}
	_ = exec.Command("modprobe", "nf_conntrack").Run() // kube-proxy sets its parameters before anything has loaded it
	bystanders := 1
	if *hairpins {
		bystanders = 0
	}
	v := &victim{t: t, dir: t.TempDir(), bystanders: bystanders, random: rand.New(rand.NewPCG(1, 1)),
		cluster: labtest.NewCluster(t, lab.Config{LocalPods: 3, RemotePods: 2})}
	l := &live{mode: mode, mover: mover{victim: v, events: new([]string), patience: livePatience, limit: liveLimit}}
	l.serve()
	programs := peers(t)
	var err error
	l.plane, err = control.Start(t.Context(), control.Config{
		Host: l.cluster.Node2, Etcd: programs[0], APIServer: programs[1], Dir: t.TempDir(), RequestTimeout: time.Minute,
		// A wide range, whose first address, which the API server takes, is none of ours.
		ServiceRanges: []netip.Prefix{netip.MustParsePrefix("10.64.0.0/10"), lab.ServiceRange[1]},
	})
	labtest.Check(t, err)
	t.Cleanup(func() { labtest.Check(t, l.plane.Close()) })
	l.create()
	l.config = filepath.Join(l.dir, "config.conf")
	l.write("config.conf", fmt.Sprintf(sharedConfig, mode, lab.PodRange[0], lab.PodRange[1], l.plane.Kubeconfig()))
	l.log, err = os.Create(filepath.Join(l.dir, "verdict.log"))
	labtest.Check(t, err)
	l.proxy = control.NewProcess(l.cluster.Node, filepath.Join(l.dir, "kube-proxy.log"), programs[2], "--config="+l.config,
		"--v=2")
	t.Cleanup(func() {
		labtest.Check(t, l.proxy.Kill())
		if l.keeper != nil {
			_ = l.keeper.Process.Kill() // it may have ended
		}
	})
	return l
}

// peers gives the paths of etcd, kube-apiserver and kube-proxy.
func peers(t *testing.T) []string {
	t.Helper()
	names := []string{"etcd", "kube-apiserver", "kube-proxy"}
	if dir := os.Getenv(peersVariable); dir != "" {
		for i := range names {
			names[i] = filepath.Join(dir, names[i])
		}
		return names
	}
	out, err := exec.Command("../../conformance/peers/build", names...).Output()
	labtest.Check(t, err)
	return strings.Fields(string(out))
}

// create writes the objects into the API server.
func (l *live) create() {
	l.t.Helper()
	ctx, c := l.t.Context(), l.plane.Client
	addrs := []corev1.NodeAddress{{Type: corev1.NodeInternalIP, Address: l.cluster.Node.IP4.String()},
		{Type: corev1.NodeInternalIP, Address: l.cluster.Node.IP6.String()}}
	node, err := c.CoreV1().Nodes().Create(ctx, &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "node"}},
		metav1.CreateOptions{})
	labtest.Check(l.t, err)
	node.Status.Addresses = addrs
	_, err = c.CoreV1().Nodes().UpdateStatus(ctx, node, metav1.UpdateOptions{})
	labtest.Check(l.t, err)
	for i := range loadServices {
		s := &corev1.Service{}
		labtest.Check(l.t, yaml.Unmarshal([]byte(strings.TrimSuffix(l.service(i), "---")), s))
		dual := corev1.IPFamilyPolicyRequireDualStack
		s.Spec.IPFamilyPolicy = &dual
		status := s.Status
		s, err := c.CoreV1().Services("default").Create(ctx, s, metav1.CreateOptions{})
		labtest.Check(l.t, err)
		s.Status = status
		_, err = c.CoreV1().Services("default").UpdateStatus(ctx, s, metav1.UpdateOptions{})
		labtest.Check(l.t, err)
		for document := range strings.SplitSeq(strings.TrimSuffix(l.slice(i), "---\n"), "---\n") {
			slice := &discoveryv1.EndpointSlice{}
			labtest.Check(l.t, yaml.Unmarshal([]byte(document), slice))
			_, err := c.DiscoveryV1().EndpointSlices("default").Create(ctx, slice, metav1.CreateOptions{})
			labtest.Check(l.t, err)
		}
	}
}

// programmed waits until kube-proxy has programmed the node. Verdict must have left the ports: until then nobody else
// can listen there. Its /healthz answers 200 as soon as it has started, long before; only its metrics tell when it has
// written the rules of a family for the first time.
func (l *live) programmed() {
	l.t.Helper()
	client := &http.Client{Timeout: livePatience, Transport: &http.Transport{DisableKeepAlives: true,
		DialContext: l.cluster.Node.DialContext}}
	get := func(url string) string {
		r, err := client.Get(url)
		if err != nil {
			return ""
		}
		defer r.Body.Close()
		text, err := io.ReadAll(r.Body)
		if err != nil || r.StatusCode != http.StatusOK {
			return ""
		}
		return string(text)
	}
	l.until("kube-proxy is healthy", func() bool { return get("http://127.0.0.1:10256/healthz") != "" }, l.proxy.Tail)
	l.event("kube-proxy is healthy")
	l.until("kube-proxy has programmed the node", func() bool {
		return len(firstSync.FindAllString(get("http://127.0.0.1:10249/metrics"), -1)) == 2
	}, l.proxy.Tail)
	l.event("kube-proxy has programmed the node")
}

// firstSync matches the time of a family's last sync, if there was one.
var firstSync = regexp.MustCompile(
	`(?m)^kubeproxy_sync_proxy_rules_last_timestamp_seconds\{ip_family="IPv[46]"\} [1-9]`)

// startProxy starts kube-proxy.
func (l *live) startProxy() {
	l.t.Helper()
	labtest.Check(l.t, l.proxy.Start())
	l.event("kube-proxy is started")
}

// run starts Verdict beside whatever there is, and waits until it has programmed all Services.
func (l *live) run(flags ...string) {
	l.t.Helper()
	before := strings.Count(l.said(), carried)
	l.startWith(append([]string{"--config", l.config}, flags...)...)
	l.event("Verdict is started: %v", flags)
	l.until("Verdict has programmed all Services", func() bool { return strings.Count(l.said(), carried) > before })
	l.event("Verdict has programmed all Services")
}

// end ends Verdict as the kubelet does.
func (l *live) end() {
	l.t.Helper()
	labtest.Check(l.t, l.keeper.Process.Signal(syscall.SIGTERM))
	labtest.Check(l.t, l.keeper.Wait())
	l.event("Verdict has ended")
}

// left is scheduled; without tables, nothing is left to IPVS.
func (l *live) left() int {
	n, err := l.scheduled()
	if err != nil {
		return 0
	}
	return n
}

// toVerdict goes from kube-proxy to Verdict as docs/INSTALL.md has it. It returns how long after kube-proxy's end
// Verdict does all that the mode asks for: in mode ipvs, until IPVS schedules for it.
func (l *live) toVerdict() time.Duration {
	l.t.Helper()
	l.run()
	l.load()
	if n := l.left(); n != 0 {
		l.t.Errorf("beside kube-proxy, nftables leaves %d ports to IPVS", n)
	}
	ctx, cancel := context.WithTimeout(l.t.Context(), liveLimit)
	defer cancel()
	labtest.Check(l.t, l.proxy.Stop(ctx))
	l.event("kube-proxy has ended")
	ended := time.Now()
	if l.mode == "ipvs" { // the ports of TCP and of UDP
		l.until("IPVS schedules for Verdict", func() bool { return l.left() >= 2*loadServices })
		l.event("IPVS schedules for Verdict")
	}
	adopted := time.Since(ended)
	l.load()
	return adopted
}

// toProxy goes from Verdict back to kube-proxy as docs/INSTALL.md has it. If seen is set, Verdict has time to notice
// that kube-proxy took the virtual services.
func (l *live) toProxy(seen bool) {
	l.t.Helper()
	l.end() // a DaemonSet with another argument has new pods
	l.run("--takeover=never")
	l.load()
	l.startProxy()
	if seen && l.mode == "ipvs" {
		l.until("Verdict yields to kube-proxy", func() bool { return l.left() == 0 }, l.proxy.Tail)
		l.event("Verdict yields to kube-proxy")
	}
	l.load()
	l.end()
	l.programmed()
	l.load()
	cleanup := l.cluster.Node.Command("/proc/self/exe", "cleanup")
	cleanup.Env = append(os.Environ(), beVerdict+"=1")
	out, err := cleanup.CombinedOutput()
	if err != nil || strings.Contains(string(out), "nobody programs Services") {
		l.t.Fatalf("verdict cleanup: %v: %s", err, out)
	}
	l.event("verdict cleanup is done")
	l.load()
	tables, err := l.cluster.Node.Run("nft", "list", "tables")
	if err != nil || strings.Contains(tables, "verdict") {
		l.t.Errorf("after the clean-up there is %v:\n%s", err, tables)
	}
}

// TestLiveTakeover goes from a real kube-proxy to Verdict and back, again and again, while clients open connections all
// the time, and hold others from beginning to end. Not one fails.
func TestLiveTakeover(t *testing.T) {
	for _, mode := range []string{"ipvs", "nftables", "iptables"} {
		t.Run(mode, func(t *testing.T) { takeOverLive(newLive(t, mode)) })
	}
}

func takeOverLive(l *live) {
	t := l.t
	l.startProxy()
	l.programmed()
	stop := l.clients()
	watched, longest := make(chan struct{}), time.Duration(0)
	var watch sync.WaitGroup
	watch.Go(func() {
		var netns *os.File
		err := l.cluster.Node.Do(func() (err error) {
			netns, err = os.Open("/proc/thread-self/ns/net")
			return err
		})
		if err == nil {
			longest, err = tableowner.Watch(netns, watched)
			err = errors.Join(err, netns.Close())
		}
		if err != nil {
			t.Error(err)
		}
	})
	start := time.Now()
	l.load()
	var adopted []time.Duration
	for n := range *takeovers {
		adopted = append(adopted, l.toVerdict().Round(100*time.Millisecond))
		l.toProxy(n%2 == 0)
	}
	stop()
	close(watched)
	watch.Wait()
	t.Logf("%d times to Verdict and back in %v; %v; tables were without an owner for %v at most; "+
		"the last step to Verdict took %v",
		*takeovers, time.Since(start).Round(time.Second), &l.traffic, longest.Round(10*time.Millisecond), adopted)
	t.Logf("what was done:\n%s", strings.Join(*l.events, "\n"))
	l.traffic.Check(t, *l.events...)
	if t.Failed() {
		t.Logf("Verdict said:\n%s\nkube-proxy said:\n%s", l.said(), l.proxy.Tail())
	}
}
