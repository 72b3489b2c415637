package main

import (
	"flag"
	"fmt"
	"math/rand/v2"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/verdict-proxy/verdict/internal/lab"
	"github.com/verdict-proxy/verdict/internal/lab/blackbox"
	"github.com/verdict-proxy/verdict/internal/lab/labtest"
	"github.com/verdict-proxy/verdict/internal/system/ipfamily"
	"github.com/verdict-proxy/verdict/internal/system/testkit"
	"github.com/verdict-proxy/verdict/sync/snapshot"
)

var kills = flag.Int("kills", 60, "how often TestKilled kills the proxy")

// killServices is how many Services there are; of each kind of target a client has one.
const killServices = 24

// patience is how long a busy machine may take for anything.
const patience = time.Minute

// victim is a proxy that is killed again and again, while files change and clients come.
type victim struct {
	t       *testing.T
	cluster *lab.Cluster
	dir     string
	random  *rand.Rand
	flags   []string
	env     []string
	group   *labtest.Memory // if not nil, it runs in it
	keeper  *lab.Cmd
	// descriptors, if not 0, is how many the proxy may have.
	descriptors int
	log         *os.File

	// bystanders is how many of the node's pods, the last ones, are no endpoints.
	bystanders int

	// edits counts the files that were written while clients came.
	edits   atomic.Int64
	traffic labtest.Traffic
}

// write replaces a file as an editor or a ConfigMap does.
func (v *victim) write(name, text string) {
	path := filepath.Join(v.dir, name)
	labtest.Check(v.t, os.WriteFile(path+".tmp", []byte(text), 0o644))
	labtest.Check(v.t, os.Rename(path+".tmp", path))
}

func (v *victim) service(i int) string {
	affinity := "None"
	if i%3 == 0 {
		affinity = "ClientIP"
	}
	return fmt.Sprintf(`
apiVersion: v1
kind: Service
metadata: {name: web-%d, namespace: default}
spec:
  type: LoadBalancer
  clusterIP: %s
  clusterIPs: [%s, "%s"]
  ipFamilies: [IPv4, IPv6]
  sessionAffinity: %s
  ports:
  - {name: http, port: 80, protocol: TCP, nodePort: %d}
  - {name: dns, port: 53, protocol: UDP, nodePort: %d}
status: {loadBalancer: {ingress: [{ip: %s}]}}
---`, i, lab.Nth(lab.ServiceRange[0], i+1), lab.Nth(lab.ServiceRange[0], i+1),
		lab.Nth(lab.ServiceRange[1], i+1), affinity,
		30000+i, 31000+i, lab.Nth(lab.ExternalRange[0], i+1))
}

// endpoints are the pods that serve.
func (v *victim) endpoints() []*lab.Host {
	return slices.Concat(v.cluster.Pods[:len(v.cluster.Pods)-v.bystanders], v.cluster.RemotePods)
}

// serve has all endpoints answer.
func (v *victim) serve() {
	v.t.Helper()
	for _, p := range v.endpoints() {
		for _, protocol := range []snapshot.Protocol{snapshot.TCP, snapshot.UDP} {
			_, err := p.Serve(protocol, 8080)
			labtest.Check(v.t, err)
		}
	}
}

// slice gives a Service's endpoints: some of the pods, never none. All pods go on to serve, so whoever is sent to one
// is answered.
func (v *victim) slice(i int) string {
	var out strings.Builder
	pods := v.endpoints()
	v.random.Shuffle(len(pods), func(a, b int) { pods[a], pods[b] = pods[b], pods[a] })
	pods = pods[:1+v.random.IntN(len(pods))]
	for f, family := range []string{"IPv4", "IPv6"} {
		fmt.Fprintf(&out, `
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata: {name: web-%d-%d, namespace: default, labels: {kubernetes.io/service-name: web-%d}}
addressType: %s
ports: [{name: http, port: 8080, protocol: TCP}, {name: dns, port: 8080, protocol: UDP}]
endpoints:
`, i, f, i, family)
		for _, p := range pods {
			node := "node"
			if slices.Contains(v.cluster.RemotePods, p) {
				node = "node2"
			}
			fmt.Fprintf(&out, "- {addresses: [\"%s\"], nodeName: %s, conditions: {ready: true}}\n",
				p.IP([]ipfamily.Family{ipfamily.IPv4, ipfamily.IPv6}[f]), node)
		}
		out.WriteString("---\n")
	}
	return out.String()
}

// churn edits files until it is stopped.
func (v *victim) churn(stop <-chan struct{}) {
	for {
		select {
		case <-stop:
			return
		case <-time.After(3 * time.Millisecond):
		}
		i := v.edits.Add(1) % killServices
		v.write(fmt.Sprintf("slice-%d.yaml", i), v.slice(int(i)))
	}
}

// target chooses one of all kinds of targets.
func (v *victim) target(random *rand.Rand) (snapshot.Protocol, netip.AddrPort) {
	i := random.IntN(killServices)
	targets := []netip.AddrPort{
		netip.AddrPortFrom(lab.Nth(lab.ServiceRange[0], i+1), 80),
		netip.AddrPortFrom(lab.Nth(lab.ServiceRange[1], i+1), 80),
		netip.AddrPortFrom(lab.Nth(lab.ExternalRange[0], i+1), 80),
		netip.AddrPortFrom(v.cluster.Node.IP(ipfamily.IPv4), uint16(30000+i)),
		netip.AddrPortFrom(lab.Nth(lab.ServiceRange[0], i+1), 53),
		netip.AddrPortFrom(v.cluster.Node.IP(ipfamily.IPv6), uint16(31000+i)),
	}
	n := random.IntN(len(targets))
	if n >= 4 {
		return snapshot.UDP, targets[n]
	}
	return snapshot.TCP, targets[n]
}

// start starts verdict run.
func (v *victim) start() { v.startWith("--from", v.dir) }

// startWith starts verdict run with objects from elsewhere.
func (v *victim) startWith(flags ...string) {
	flags = slices.Concat([]string{"run", "--hostname-override", "node"}, flags, v.flags)
	line := append([]string{"/proc/self/exe"}, flags...)
	if v.group != nil {
		self, err := os.Executable()
		labtest.Check(v.t, err)
		line = v.group.Command(self, flags...)
	}
	if v.descriptors > 0 {
		self, err := os.Executable()
		labtest.Check(v.t, err)
		line = append([]string{"sh", "-c", fmt.Sprintf(`ulimit -n %d; exec "$0" "$@"`, v.descriptors), self}, flags...)
	}
	v.keeper = v.cluster.Node.Command(line[0], line[1:]...)
	v.keeper.Env = append(append(os.Environ(), beVerdict+"=1"), v.env...)
	v.keeper.Stdout, v.keeper.Stderr = v.log, v.log
	labtest.Check(v.t, v.keeper.Start())
}

// child gives the pid of the keeper's child; 0 if it has none just now.
func (v *victim) child() int {
	threads, _ := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/children", v.keeper.Process.Pid))
	for _, path := range threads {
		list, _ := os.ReadFile(path)
		if child, err := strconv.Atoi(strings.TrimSpace(string(list))); err == nil {
			return child
		}
	}
	return 0
}

// wait waits for what the log says of the proxy's progress.
func (v *victim) wait(what string, times int) {
	v.t.Helper()
	waited := fmt.Sprintf("the log has %q %d times", what, times)
	testkit.Eventually(v.t, patience, waited, func() bool { return strings.Count(v.said(), what) >= times }, v.said)
}

// childrenPerKeeper bounds how often a keeper's child is killed before the keeper is: each time it waits longer
// before it starts another.
const childrenPerKeeper = 3

// kill kills the proxy at a random moment, mostly without its keeper. It says how often each was hit, and the ruleset
// flushed.
func (v *victim) kill(t *testing.T, random *rand.Rand) (children, keepers, flushes int) {
	orphan := 0 // the last child that a keeper left
	for n := 0; children+keepers < *kills; n++ {
		time.Sleep(time.Duration(random.IntN(120)) * time.Millisecond) // so that every moment has its turn
		child := v.child()
		if n%(childrenPerKeeper+1) == childrenPerKeeper {
			labtest.Check(t, v.keeper.Process.Kill())
			orphan = child
			if child != 0 && random.IntN(2) == 0 { // else it ends by itself
				_ = syscall.Kill(child, syscall.SIGKILL)
			}
			_ = v.keeper.Wait()
			v.start()
			keepers++
			continue
		}
		flush := n%(4*(childrenPerKeeper+1)) == childrenPerKeeper-1
		for deadline := time.Now().Add(2 * time.Second); flush && time.Now().Before(deadline) &&
			!(gone(orphan) && v.owned()); {
			time.Sleep(10 * time.Millisecond) // until there is somebody to whom the tables belong
		}
		testkit.Eventually(t, time.Minute, "a child", func() bool { child = v.child(); return child != 0 }, v.said)
		if syscall.Kill(child, syscall.SIGKILL) == nil {
			children++
		}
		// Whoever is still about to end has the socket, too. If the tables belong to somebody after that, it is the keeper.
		if flush && gone(child) && gone(orphan) && v.owned() {
			flushes++
			labtest.Run(t, v.cluster.Node, "", "nft", "flush", "ruleset")
		}
	}
	return children, keepers, flushes
}

// gone waits until a process has ended; one without a number has.
func gone(pid int) bool {
	for deadline := time.Now().Add(5 * time.Second); pid != 0; time.Sleep(time.Millisecond) {
		stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
		if _, state, _ := strings.Cut(string(stat), ") "); err != nil || strings.HasPrefix(state, "Z") {
			return true
		}
		if time.Now().After(deadline) {
			return false
		}
	}
	return true
}

// owned says whether both tables belong to somebody.
func (v *victim) owned() bool {
	return strings.Count(labtest.Nfts(v.t)[0].List(v.t, v.cluster.Node), "flags owner") == 2
}

// newVictim gives a proxy that is not started yet, with files, and servers in all pods.
func newVictim(t *testing.T) *victim {
	t.Helper()
	v := &victim{t: t, cluster: labtest.NewCluster(t, lab.Config{LocalPods: 2, RemotePods: 2}), dir: t.TempDir(),
		random: rand.New(rand.NewPCG(1, 1)),
		flags:  []string{"--cluster-cidr", fmt.Sprintf("%s,%s", lab.PodRange[0], lab.PodRange[1])}}
	v.traffic.Target, v.traffic.Stalls, v.traffic.Deletes = v.target, labtest.WatchStalls(t), true
	v.serve()
	dir, err := os.MkdirTemp("", "verdict-failures-") // stays, if there is something in it
	labtest.Check(t, err)
	box := blackbox.New(blackbox.Config{Dir: dir})
	t.Cleanup(func() {
		labtest.Check(t, box.Close())
		_ = os.Remove(dir)
	})
	labtest.Check(t, box.Watch(v.cluster.Hosts()...))
	v.traffic.Cause = box.Cause
	var services strings.Builder
	fmt.Fprintf(
		&services,
		"apiVersion: v1\nkind: Node\nmetadata: {name: node}\nstatus: {addresses: [{type: InternalIP, address: %s}, "+
			"{type: InternalIP, address: \"%s\"}]}\n---",
		v.cluster.Node.IP(ipfamily.IPv4),
		v.cluster.Node.IP(ipfamily.IPv6),
	)
	for i := range killServices {
		services.WriteString(v.service(i))
		v.write(fmt.Sprintf("slice-%d.yaml", i), v.slice(i))
	}
	v.write("services.yaml", services.String())
	v.log, err = os.Create(filepath.Join(t.TempDir(), "log"))
	labtest.Check(t, err)
	return v
}

// TestKilled kills the proxy, again and again, while endpoints change and clients open new connections and hold old
// ones. Not one fails. In the end the kernel holds exactly what the files ask for.
func TestKilled(t *testing.T) {
	v := newVictim(t)
	v.start()
	v.wait("all Services are programmed", 1)

	stop := v.clients()
	start := time.Now()
	children, keepers, flushes := v.kill(t, rand.New(rand.NewPCG(3, 3)))
	stop()
	if flushes == 0 {
		t.Error("the ruleset was never flushed")
	}
	t.Logf("%d children and %d keepers killed in %v, %d flushes; %d edits; %v", children, keepers,
		time.Since(start).Round(time.Millisecond), flushes, v.edits.Load(), &v.traffic)
	v.traffic.Check(t)
	v.settle()
}

// TestReady: a unit that systemd starts after the proxy finds the Services of the manifests programmed.
func TestReady(t *testing.T) {
	v := newVictim(t)
	name := filepath.Join(t.TempDir(), "notify")
	systemd, err := net.ListenUnixgram("unixgram", &net.UnixAddr{Name: name, Net: "unixgram"})
	labtest.Check(t, err)
	defer systemd.Close()
	v.env = []string{"NOTIFY_SOCKET=" + name}
	v.start()
	labtest.Check(t, systemd.SetReadDeadline(time.Now().Add(patience)))
	for ready, buf := false, make([]byte, 4096); !ready; {
		n, err := systemd.Read(buf)
		labtest.Check(t, err)
		ready = slices.Contains(strings.Fields(string(buf[:n])), "READY=1")
	}
	for i := range killServices {
		to := netip.AddrPortFrom(lab.Nth(lab.ExternalRange[0], i+1), 80)
		if r := v.cluster.Outside.Dial(snapshot.TCP, to, lab.Options{}); r.Outcome != lab.Answered {
			t.Errorf("%s: %v", to, r)
		}
	}
	labtest.Check(t, v.keeper.Process.Signal(syscall.SIGTERM))
	labtest.Check(t, v.keeper.Wait())
	labtest.Check(t, v.cluster.Node.Do(removeRules))
}

// clients has clients come from everywhere, and files change, until stop is called.
func (v *victim) clients() (stop func()) {
	for n, from := range []*lab.Host{v.cluster.Outside, v.cluster.Pods[0], v.cluster.Node, v.cluster.Node2} {
		v.traffic.Open(from, uint64(n))
		for i := 4 * n; i < 4*n+4; i++ {
			to := netip.AddrPortFrom(lab.Nth(lab.ServiceRange[i%2], i+1), 80)
			v.traffic.Hold(from, to, time.Hour, 20*time.Millisecond)
		}
	}
	v.traffic.Beside(v.churn)
	return v.traffic.Stop
}

// settle lets the proxy come to rest and end. Another one must find exactly what the files ask for, and look at all
// of it.
func (v *victim) settle() {
	v.t.Helper()
	for again := range 2 {
		if again == 1 {
			v.start()
			v.wait("all Services are programmed", strings.Count(v.said(), "all Services are programmed")+1)
		}
		time.Sleep(1500 * time.Millisecond) // the look at all of it comes a second after the first transaction
		labtest.Check(v.t, v.keeper.Process.Signal(syscall.SIGTERM))
		if err := v.keeper.Wait(); err != nil {
			v.t.Errorf("the proxy ended with %v", err)
		}
	}
	said := v.said()
	last := said[strings.LastIndex(said, "starting verdict"):]
	if !strings.Contains(last, "nothing was written") || strings.Contains(said, "another program changed") {
		v.t.Errorf("the kernel did not hold what the files ask for:\n%s", said)
	}
	labtest.Check(v.t, v.cluster.Node.Do(removeRules))
}

// said gives the log of all proxies, if it is a file.
func (v *victim) said() string {
	text, err := os.ReadFile(v.log.Name())
	if err != nil {
		return err.Error()
	}
	return string(text)
}
