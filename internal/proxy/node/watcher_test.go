package node

import (
	"bytes"
	"context"
	"fmt"
	"net/netip"
	"os"
	"os/signal"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/verdict-proxy/verdict/internal/lab/labtest"
	"github.com/verdict-proxy/verdict/internal/proxy/config"
	"github.com/verdict-proxy/verdict/internal/system/sysctl"
	"github.com/verdict-proxy/verdict/internal/system/testkit"
	"github.com/verdict-proxy/verdict/sync/dataplane"
	"github.com/verdict-proxy/verdict/sync/reconcile"
	"github.com/verdict-proxy/verdict/sync/snapshot"
)

// hostFiles is a root with the parameters of connection tracking, as a kernel has them at first.
func hostFiles(t *testing.T, missing ...string) sysctl.Host {
	t.Helper()
	root := t.TempDir()
	const dir = "proc/sys/net/netfilter/nf_conntrack_"
	for path, text := range map[string]string{
		dir + "max": "65536\n", dir + "tcp_timeout_established": "432000\n", dir + "tcp_timeout_close_wait": "60\n",
		dir + "tcp_be_liberal": "0\n", dir + "udp_timeout": "30\n", dir + "udp_timeout_stream": "120\n",
		"sys/module/nf_conntrack/parameters/hashsize": "16384\n", "sys/devices/system/cpu/online": "0-7\n",
		"proc/sys/net/ipv4/conf/all/route_localnet": "0\n", "proc/self/oom_score_adj": "0\n",
	} {
		if slices.Contains(missing, filepath.Base(path)) {
			continue
		}
		labtest.Check(t, os.MkdirAll(filepath.Join(root, filepath.Dir(path)), 0o755))
		labtest.Check(t, os.WriteFile(filepath.Join(root, path), []byte(text), 0o644))
	}
	return sysctl.Host{Root: root}
}

func loadConfig(t *testing.T, path string) (*config.Settings, []*config.Problem) {
	t.Helper()
	s, problems, err := config.Load(path, nil, nil)
	labtest.Check(t, err)
	return s, problems
}

// TestHangup: SIGHUP makes the watcher read the configuration again, with or without a file, and ends nothing.
func TestHangup(t *testing.T) {
	// The process must survive a signal that comes before the watcher listens. So must it after the test: the kernel may
	// deliver the last one to another thread, when the watcher has ended. Who stops to listen would be killed by it.
	signal.Notify(make(chan os.Signal, 1), syscall.SIGHUP)
	var b logBuffer
	s, problems := loadConfig(t, "")
	w := newConfigWatcher(&config.Flags{}, s, problems, newLogger(&b, s.Log))
	ctx, cancel := context.WithCancel(t.Context())
	var running sync.WaitGroup
	running.Go(func() { w.run(ctx, configListener{}) })
	testkit.Eventually(t, time.Minute, "SIGHUP in the log", func() bool {
		labtest.Check(t, syscall.Kill(os.Getpid(), syscall.SIGHUP))
		return strings.Contains(b.String(), "SIGHUP: reading the configuration again")
	}, b.String)
	cancel()
	running.Wait()
}

// TestSetSysctls: what kube-proxy would set is set and told, and so is what is not there.
func TestSetSysctls(t *testing.T) {
	s, _ := loadConfig(t, "")
	var b logBuffer
	log := newLogger(&b, s.Log)
	host := hostFiles(t, "nf_conntrack_tcp_timeout_close_wait")
	setSysctls(host, s, log)
	for _, want := range []string{"name=net.netfilter.nf_conntrack_max value=262144 was=65536",
		"hashsize value=65536 was=16384",
		"tcp_timeout_established value=86400 was=432000"} {
		if !strings.Contains(b.String(), want) {
			t.Errorf("it does not say %q:\n%s", want, b.String())
		}
	}
	missing := "close_wait cannot be read: no such file or directory"
	if strings.Count(b.String(), "WARN") != 1 || !strings.Contains(b.String(), missing) {
		t.Errorf("it does not say that one is missing:\n%s", b.String())
	}
}

// TestInitOnly: the sysctls are set and told, and nothing else happens.
func TestInitOnly(t *testing.T) {
	s, problems := loadConfig(t, labtest.ConfigFile(t, "mode: nftables\nconntrack: {tcpBeLiberal: true}\n"))
	var out bytes.Buffer
	host := hostFiles(t)
	labtest.Check(t, InitOnly(host, s, problems, &out))
	want := `net.netfilter.nf_conntrack_max = 262144 (was 65536)
/sys/module/nf_conntrack/parameters/hashsize = 65536 (was 16384)
net.netfilter.nf_conntrack_tcp_timeout_established = 86400 (was 432000)
net.netfilter.nf_conntrack_tcp_timeout_close_wait = 3600 (was 60)
net.netfilter.nf_conntrack_tcp_be_liberal = 1 (was 0)
net.ipv4.conf.all.route_localnet = 1 (was 0)
`
	if out.String() != want {
		t.Errorf("it says\n%swant\n%s", out.String(), want)
	}
	out.Reset()
	if labtest.Check(t, InitOnly(host, s, problems, &out)); out.Len() > 0 {
		t.Errorf("once more it says %s", out.String())
	}
	if err := InitOnly(hostFiles(t, "nf_conntrack_max", "route_localnet"), s, nil, &out); err == nil ||
		strings.Count(err.Error(), "\n") != 1 {
		t.Errorf("two are missing: %v", err)
	}
}

// TestMisfits: what does not fit to the Node is said.
func TestMisfits(t *testing.T) {
	addrs := func(texts ...string) (out []netip.Addr) {
		for _, s := range texts {
			out = append(out, netip.MustParseAddr(s))
		}
		return out
	}
	ranges := func(texts ...string) (out []netip.Prefix) {
		for _, s := range texts {
			out = append(out, netip.MustParsePrefix(s))
		}
		return out
	}
	pods := dataplane.DetectLocal{ClusterCIDRs: ranges("10.244.0.0/16")}
	for _, row := range []struct {
		what   string
		config dataplane.Config
		node   snapshot.Node
		noIPv6 bool
		want   []string
	}{
		{"all is well", dataplane.Config{DetectLocal: pods}, snapshot.Node{Addresses: addrs("192.0.2.1", "fd00::1")}, true,
			nil},
		{"no address", dataplane.Config{DetectLocal: pods}, snapshot.Node{}, false,
			[]string{"the Node has no address: node ports answer at none of its own; --bind-address can say what it is"}},
		{"the operator says the address", dataplane.Config{DetectLocal: pods, NodeIP: addrs("192.0.2.1")[0]},
			snapshot.Node{}, false, nil},
		{"no ranges", dataplane.Config{}, snapshot.Node{Addresses: addrs("192.0.2.1")}, false,
			[]string{"clusterCIDR is not set: pods cannot be told from others, so nothing that is sent to a cluster IP is " +
				"masqueraded"}},
		{"IPv6 first", dataplane.Config{DetectLocal: pods, NodePortAddresses: ranges("10.0.0.0/8")},
			snapshot.Node{Addresses: addrs("fd00::1")}, true, []string{
				"the Node's first address is an IPv6 one, and this host has IPv6 disabled",
				"the Node is IPv6 first, and clusterCIDR (10.244.0.0/16) has no IPv6 range",
				"the Node is IPv6 first, and nodePortAddresses (10.0.0.0/8) has no IPv6 range: node ports do not answer in IPv6"}},
		{"a range of the other family, and primary",
			dataplane.Config{DetectLocal: pods, NodePortAddresses: ranges("fd00::/8"), NodePortPrimary: true},
			snapshot.Node{Addresses: addrs("192.0.2.1")}, false, nil},
		{"the operator says which family is first", dataplane.Config{DetectLocal: pods, NodeIP: addrs("192.0.2.1")[0]},
			snapshot.Node{Addresses: addrs("fd00::1")}, false, nil},
		{"the node's ranges", dataplane.Config{DetectLocal: dataplane.DetectLocal{Mode: dataplane.DetectNodeCIDR}},
			snapshot.Node{Addresses: addrs("192.0.2.1"), PodCIDRs: ranges("fd00::/64")}, false,
			[]string{"the Node is IPv4 first, and its podCIDRs (fd00::/64) have no IPv4 range"}},
		{"the node's ranges are to come",
			dataplane.Config{DetectLocal: dataplane.DetectLocal{Mode: dataplane.DetectNodeCIDR}},
			snapshot.Node{Addresses: addrs("192.0.2.1")}, false,
			[]string{"detectLocalMode is NodeCIDR, and the Node has no podCIDRs yet: until then pods cannot be told from " +
				"others"}},
		{"closed node ports", dataplane.Config{DetectLocal: pods, NodePortAddresses: []netip.Prefix{{}}},
			snapshot.Node{Addresses: addrs("192.0.2.1")}, false, nil},
	} {
		if got := mismatches(row.config, &row.node, row.noIPv6); !slices.Equal(got, row.want) {
			t.Errorf("%s: %s", row.what, strings.Join(got, "\n"))
		}
	}
}

// logBuffer is a log that is read while it is written.
type logBuffer struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (l *logBuffer) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.Write(p)
}

func (l *logBuffer) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.String()
}

func (l *logBuffer) Reset() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.b.Reset()
}

// reloading is a proxy's configuration that follows a file.
type reloading struct {
	*proxy
	t    *testing.T
	path string
	said *logBuffer
}

// followFile begins with a file of that text, and follows it until the test ends.
func followFile(t *testing.T, text string) *reloading {
	t.Helper()
	r := &reloading{t: t, path: labtest.ConfigFile(t, text), said: &logBuffer{}}
	s, problems := loadConfig(t, r.path)
	w := newConfigWatcher(&config.Flags{Config: r.path}, s, problems, newLogger(r.said, s.Log))
	w.host = hostFiles(t)
	w.start()
	r.proxy = &proxy{config: w, ready: func() {}, object: &nodeObject{name: "node", config: w, seen: func() {}},
		updates: make(chan configUpdate), ipvs: &ipvsChoice{log: w.log.Logger, probe: func(...string) error { return nil }}}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	go func() { defer close(done); w.run(ctx, r.listener(ctx)) }()
	t.Cleanup(func() { cancel(); <-done })
	return r
}

// edit replaces the file as an editor does.
func (r *reloading) edit(text string) {
	r.t.Helper()
	labtest.Check(r.t, os.Rename(labtest.ConfigFile(r.t, text), r.path))
}

// expect waits for a tuning, if one is wanted, and for what is to be said; then the log is empty.
func (r *reloading) expect(tuned bool, said ...string) (got configUpdate) {
	r.t.Helper()
	if tuned {
		select {
		case got = <-r.updates:
		case <-time.After(time.Minute):
			r.t.Fatalf("nothing takes effect; it says\n%s", r.said.String())
		}
	}
	for _, text := range said {
		testkit.Eventually(r.t, time.Minute, text, func() bool { return strings.Contains(r.said.String(), text) },
			r.said.String)
	}
	r.said.Reset()
	return got
}

// TestReload: each change takes effect or is said to need a restart; what is wrong loses nothing, and is said once.
func TestReload(t *testing.T) {
	const begin = "mode: nftables\nclusterCIDR: 10.244.0.0/16\n"
	r := followFile(t, begin)
	r.written(t.Context(), reconcile.Transaction{})
	r.expect(false)

	r.edit(begin + "nodePortAddresses: [10.0.0.0/8]\nnftables: {masqueradeAll: true, " +
		"minSyncPeriod: 2s}\nhostnameOverride: other\nlogging: {verbosity: 2}\n")
	got := r.expect(true, `the configuration has changed: nodePortAddresses" is="[\"10.0.0.0/8\"]" was=null`,
		"nftables.masqueradeAll", "nftables.minSyncPeriod",
		`level=WARN msg="the configuration has changed: hostnameOverride takes effect at the next start" `+
			`is=other was="\"\""`)
	if p := got.policy; p.NodeName != "node" || !p.MasqueradeAll || len(p.NodePortAddresses) != 1 ||
		got.minInterval != 2*time.Second {
		t.Errorf("%+v", got)
	}
	if r.config.log.level.Level() >= 0 {
		t.Error("the level of the log stays")
	}

	good := begin + "conntrack: {min: 524288}\noomScoreAdj: 1000\nnodePortAddresses: [10.0.0.0/8, 192.168.0.0/99]\n"
	r.edit(good)
	got = r.expect(true, `level=ERROR`,
		`nodePortAddresses[1]: \"192.168.0.0/99\" is not an address range such as 10.244.0.0/16; it stays [\"10.0.0.0/8\"]`,
		"name=net.netfilter.nf_conntrack_max value=524288 was=262144")
	if len(got.policy.NodePortAddresses) != 1 || got.policy.MasqueradeAll {
		t.Errorf("%+v", got)
	}
	if score, err := os.ReadFile(filepath.Join(r.config.host.Root, "proc/self/oom_score_adj")); err != nil ||
		string(score) != "1000" {
		t.Errorf("oom_score_adj is %s, %v", score, err)
	}

	r.edit(good + "conntrack: [\n")
	r.expect(false, `level=ERROR msg="failed to read the configuration file; its last good version stays in force" err="`+
		r.path+":", "not valid YAML")
	r.edit(good)
	time.Sleep(200 * time.Millisecond) // what must not be said has no moment at which to look
	if said := r.said.String(); strings.Contains(said, "ERROR") {
		t.Errorf("it is said twice:\n%s", said)
	}
	labtest.Check(t, os.Remove(r.path))
	r.expect(false, "no such file or directory")
	r.edit(begin + "clusterCIDR: 10.245.0.0/16\n")
	got = r.expect(true, "it is set twice", "clusterCIDR")
	if got.policy.DetectLocal.ClusterCIDRs[0].String() != "10.245.0.0/16" {
		t.Errorf("%+v", got)
	}
}

// TestLateSysctls: parameters are set after the first transaction, once, by what the file says then.
func TestLateSysctls(t *testing.T) {
	const begin = "mode: nftables\nclusterCIDR: 10.244.0.0/16\n"
	r := followFile(t, begin)
	path := filepath.Join(r.config.host.Root, "proc/sys/net/netfilter/nf_conntrack_max")
	is := func(want string) {
		t.Helper()
		if text, err := os.ReadFile(path); err != nil || string(text) != want {
			t.Errorf("it is %q, %v; want %q", text, err, want)
		}
	}
	r.edit(begin + "conntrack: {min: 524288}\n")
	r.expect(true, "conntrack.min")
	is("65536\n")
	r.written(t.Context(), reconcile.Transaction{})
	is("524288")
	labtest.Check(t, os.WriteFile(path, []byte("65536\n"), 0o644))
	r.written(t.Context(), reconcile.Transaction{})
	is("65536\n")
}

// TestNodeIsTold: what the Node says is logged once, and again when it differs.
func TestNodeIsTold(t *testing.T) {
	r := followFile(t, "mode: nftables\nclusterCIDR: 10.244.0.0/16\n")
	r.expect(false)
	queue := snapshot.NewQueue(1)
	sink := &nodeSink{queue, &nodeSource{node: r.object, ipvs: r.ipvs}}
	sink.Synced()
	r.expect(false, `level=ERROR msg="the Node object does not exist yet`, "is --hostname-override right?")
	ofManifests := *r.config.settings.Load()
	ofManifests.Manifests = "services"
	r.config.settings.Store(&ofManifests)
	sink.Synced()
	r.expect(false, "no manifest has a Node of this name")
	n := snapshot.Node{Name: "node", Addresses: []netip.Addr{netip.MustParseAddr("192.0.2.1")}, Zone: "a"}
	sink.Put(snapshot.Delta{Node: &n})
	r.expect(false, `msg="the Node is known" addresses=192.0.2.1 primary=IPv4 pods="" zone=a`)
	again := n
	sink.Put(snapshot.Delta{Node: &again})
	other := n
	other.Zone = "b"
	sink.Put(snapshot.Delta{Node: &other})
	if said := r.said.String(); strings.Count(said, "\n") != 1 || !strings.Contains(said, `msg="the Node has changed"`) {
		t.Errorf("it says\n%s", said)
	}
	if d, ready := queue.Take(); !ready || !reflect.DeepEqual(*d.Node, other) {
		t.Errorf("passed on: %+v, %v", d, ready)
	}
}

// TestTheLogIsBounded: in both formats, and what is left out is counted.
func TestTheLogIsBounded(t *testing.T) {
	for _, json := range []bool{false, true} {
		var b logBuffer
		log := newLogger(&b, config.Log{JSON: json})
		report := reporter(log.Logger)
		for i := range 10_000 {
			report(fmt.Errorf("Service evil/web: metadata.annotations[x]: %d", i))
		}
		if lines := strings.Count(b.String(), "\n"); lines > 200 || uint64(lines)+log.limit.LeftOut() != 10_000 {
			t.Errorf("JSON %v: %d lines, %d left out", json, lines, log.limit.LeftOut())
		}
	}
}
