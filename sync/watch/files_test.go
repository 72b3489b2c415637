package watch

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net/netip"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/verdict-proxy/verdict/internal/system/testkit"
	"github.com/verdict-proxy/verdict/sync/snapshot"
)

// view is a Sink that applies what it gets, and what a source reports, for a test to wait for.
type view struct {
	t    testing.TB
	wake chan struct{}
	stop context.CancelFunc
	done chan error

	mu       sync.Mutex
	snap     *snapshot.Snapshot
	deltas   []snapshot.Delta
	synced   int
	problems []string
}

// source is what all three sources are.
type source interface {
	Run(context.Context, Sink) error
}

// start runs a source that was made with the view's report function.
func start(t testing.TB, build func(report func(error)) source) *view {
	v := &view{t: t, wake: make(chan struct{}, 1), done: make(chan error, 1), snap: snapshot.New()}
	ctx, cancel := context.WithCancel(context.Background())
	v.stop = cancel
	s := build(v.report)
	go func() { v.done <- s.Run(ctx, v) }()
	t.Cleanup(func() {
		cancel()
		select {
		case err := <-v.done:
			if err != nil {
				t.Errorf("Run: %v", err)
			}
		case <-time.After(time.Minute):
			t.Error("Run does not end")
		}
	})
	return v
}

func (v *view) signal() {
	select {
	case v.wake <- struct{}{}:
	default:
	}
}

func (v *view) Put(d snapshot.Delta) {
	v.mu.Lock()
	defer v.mu.Unlock()
	v.snap.Apply(d)
	v.deltas = append(v.deltas, d)
	v.signal()
}

func (v *view) Synced() {
	v.mu.Lock()
	defer v.mu.Unlock()
	v.synced++
	v.signal()
}

func (v *view) report(err error) {
	v.mu.Lock()
	defer v.mu.Unlock()
	v.problems = append(v.problems, err.Error())
	v.signal()
}

// await waits until a condition holds; it is looked at whenever something has come.
func (v *view) await(what string, holds func() bool) {
	v.t.Helper()
	deadline := time.After(time.Minute)
	for {
		v.mu.Lock()
		ok := holds()
		v.mu.Unlock()
		if ok {
			return
		}
		select {
		case <-v.wake:
		case <-deadline:
			v.mu.Lock()
			defer v.mu.Unlock()
			v.t.Fatalf("no %s: services %v, slices %v, problems %q", what, v.services(), v.snap.Slices, v.problems)
		}
	}
}

// services gives "namespace/name address" of each Service, sorted.
func (v *view) services() []string {
	var out []string
	for n, s := range v.snap.Services {
		out = append(out, n.String()+" "+s.ClusterIPs[0].String())
	}
	slices.Sort(out)
	return out
}

func (v *view) awaitServices(want ...string) {
	v.t.Helper()
	v.await(fmt.Sprintf("services %q", want), func() bool { return slices.Equal(v.services(), want) })
}

// take gives what has been reported and forgets it, waiting for the given number of reports.
func (v *view) take(n int) []string {
	v.t.Helper()
	v.await(fmt.Sprintf("%d reports", n), func() bool { return len(v.problems) >= n })
	v.mu.Lock()
	defer v.mu.Unlock()
	got := v.problems
	v.problems = nil
	return got
}

func (v *view) wantProblems(want ...string) {
	v.t.Helper()
	if got := v.take(len(want)); !slices.Equal(got, want) {
		v.t.Errorf("reported %q, want %q", got, want)
	}
}

func watchFiles(t testing.TB, path string) *view {
	v := start(t, func(report func(error)) source { return &Files{Path: path, NodeName: "n1", Report: report} })
	v.await("first list", func() bool { return v.synced == 1 })
	return v
}

func service(name, ip string) string {
	return "apiVersion: v1\nkind: Service\nmetadata: {name: " + name + "}\nspec:\n  clusterIP: " + ip +
		"\n  ports: [{port: 80}]\n"
}

func write(t testing.TB, path, text string) {
	t.Helper()
	if err := os.WriteFile(path, []byte(text), 0o644); err != nil {
		t.Fatal(err)
	}
}

func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func TestFilesFollowsADirectory(t *testing.T) {
	dir := t.TempDir()
	in := func(name string) string { return filepath.Join(dir, name) }
	write(t, in("a.yaml"), service("web", "10.96.0.1"))
	write(t, in("b.json"),
		`{"apiVersion":"v1","kind":"Service","metadata":{"name":"api"},"spec":{"clusterIP":"10.96.0.2"}}`)
	for _, ignored := range []string{".a.yaml.swp", ".hidden.yaml", "#a.yaml", "#a.yaml#", "a.yaml~", "notes.txt",
		"4913"} {
		write(t, in(ignored), service("ignored", "10.96.0.99"))
	}
	must(t, os.Mkdir(in("sub.yaml"), 0o755))
	v := watchFiles(t, dir)
	v.awaitServices("default/api 10.96.0.2", "default/web 10.96.0.1")

	write(t, in("a.yaml"), service("web", "10.96.0.3")) // truncated and written in place
	v.awaitServices("default/api 10.96.0.2", "default/web 10.96.0.3")
	if last := v.deltas[len(v.deltas)-1]; len(last.Services) != 1 || len(last.Slices) != 0 {
		t.Errorf("the delta has more than what changed: %+v", last)
	}
	write(t, in("c.yml"), service("new", "10.96.0.4"))
	v.awaitServices("default/api 10.96.0.2", "default/new 10.96.0.4", "default/web 10.96.0.3")
	must(t, os.Remove(in("b.json")))
	v.awaitServices("default/new 10.96.0.4", "default/web 10.96.0.3")
	must(t, os.Rename(in("c.yml"), in("c.txt")))
	v.awaitServices("default/web 10.96.0.3")
	must(t, os.Rename(in("c.txt"), in("c.yml")))
	v.awaitServices("default/new 10.96.0.4", "default/web 10.96.0.3")
	write(t, in("c.yml"), "# nothing any more\n")
	v.awaitServices("default/web 10.96.0.3")

	write(t, in("next"), service("web", "10.96.0.5")) // written beside and renamed over
	must(t, os.Rename(in("next"), in("a.yaml")))
	v.awaitServices("default/web 10.96.0.5")
	must(t, os.Link(in("notes.txt"), in("linked.yaml")))
	v.awaitServices("default/ignored 10.96.0.99", "default/web 10.96.0.5")
	must(t, os.Symlink("a.yaml", in("z.yaml")))
	v.wantProblems(in("z.yaml") +
		":1: Service default/web: duplicate: the one in " + in("a.yaml") + ":1 counts")
}

// TestFilesOtherNodes: the addresses of other Nodes are passed on before the objects, and when they differ.
func TestFilesOtherNodes(t *testing.T) {
	dir, got := t.TempDir(), make(chan map[string][]netip.Addr, 9)
	node := func(name, address string) string {
		return fmt.Sprintf(`{"apiVersion":"v1","kind":"Node","metadata":{"name":%q},`+
			`"status":{"addresses":[{"type":"InternalIP","address":%q}]}}`, name, address)
	}
	write(t, filepath.Join(dir, "a.json"), node("n1", "192.0.2.1"))
	write(t, filepath.Join(dir, "b.json"), node("n2", "192.0.2.2"))
	v := start(t, func(report func(error)) source {
		return &Files{Path: dir, NodeName: "n1", Report: report, Nodes: func(m map[string][]netip.Addr) { got <- m }}
	})
	v.await("the first reading", func() bool { return v.synced == 1 })
	if m := <-got; len(m) != 1 || !slices.Equal(m["n2"], ips("192.0.2.2")) || v.snap.Node.Name != "n1" {
		t.Errorf("%v, this node is %+v", m, v.snap.Node)
	}
	write(t, filepath.Join(dir, "a.json"), node("n1", "192.0.2.9"))
	v.await("this node's address", func() bool { return slices.Equal(v.snap.Node.Addresses, ips("192.0.2.9")) })
	if len(got) > 0 {
		t.Errorf("no other Node differs: %v", <-got)
	}
	must(t, os.Remove(filepath.Join(dir, "b.json")))
	if m := <-got; len(m) != 0 {
		t.Errorf("%v", m)
	}
}

// A file counts when its writer closes it: not while it is empty, and not while half of it is there.
func TestFilesWaitsForWriters(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, "a.yaml")
	write(t, path, service("web", "10.96.0.1")+"---\n"+service("api", "10.96.0.2"))
	v := watchFiles(t, dir)
	f, err := os.Create(path)
	must(t, err)
	slow, err := os.Create(filepath.Join(dir, "slow.yaml"))
	must(t, err)
	sync := func(i int) { // makes the source read, and waits until it has
		name := fmt.Sprintf("sync-%d", i)
		write(t, filepath.Join(dir, "sync.yaml"), service(name, "10.96.1.1"))
		v.await("mark", func() bool { return v.snap.Services[snapshot.Name{Namespace: "default", Name: name}] != nil })
	}
	sync(1)
	v.awaitServices("default/api 10.96.0.2", "default/sync-1 10.96.1.1", "default/web 10.96.0.1")
	_, err = f.WriteString(service("web", "10.96.0.3"))
	must(t, err)
	_, err = slow.WriteString(service("slow", "10.96.0.9"))
	must(t, err)
	sync(2)
	v.awaitServices("default/api 10.96.0.2", "default/sync-2 10.96.1.1", "default/web 10.96.0.1")
	_, err = f.WriteString("---\n" + service("api", "10.96.0.4"))
	must(t, err)
	must(t, f.Close())
	must(t, slow.Close())
	v.awaitServices("default/api 10.96.0.4", "default/slow 10.96.0.9", "default/sync-2 10.96.1.1", "default/web 10.96.0.3")

	// An editor that moves the old file away and writes a new one takes his time between the two.
	must(t, os.Rename(path, path+"~"))
	f, err = os.Create(path)
	must(t, err)
	sync(3)
	v.awaitServices("default/api 10.96.0.4", "default/slow 10.96.0.9", "default/sync-3 10.96.1.1", "default/web 10.96.0.3")
	must(t, f.Close())
	v.awaitServices("default/slow 10.96.0.9", "default/sync-3 10.96.1.1")
}

func TestFilesKeepsTheLastGood(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, "a.yaml")
	bad := service("api", "10.96.0.2") + "---\n" + strings.Replace(service("web", "10.96.0.1"), "  ports", " ports", 1)
	problem := path + ":13: Service default/web: not valid YAML: did not find expected key"
	stays := path + ": the last good version of this file stays in force"

	write(t, path, bad)
	v := watchFiles(t, dir)
	v.awaitServices("default/api 10.96.0.2") // at first, what is good
	v.wantProblems(problem)
	write(t, path, service("web", "10.96.0.1"))
	v.awaitServices("default/web 10.96.0.1")
	write(t, path, bad)
	v.wantProblems(problem, stays)
	write(t, path, strings.Replace(service("web", "10.96.0.7"), "port: 80", "port: x", 1))
	v.wantProblems(path+`:6: Service default/web: spec.ports[0].port: "x" is not a number`, stays)
	must(t, os.Chmod(path, 0o200))
	if _, err := os.ReadFile(path); err != nil { // root may read it all the same
		v.wantProblems(path + ": cannot read it: permission denied")
	}
	must(t, os.Chmod(path, 0o644))
	write(t, filepath.Join(dir, "b.yaml"), service("other", "10.96.0.8"))
	v.awaitServices("default/other 10.96.0.8", "default/web 10.96.0.1")
	must(t, os.Remove(path))
	must(t, unix.Mkfifo(path, 0o644))
	v.wantProblems(path + ": cannot read it: not a regular file")
	must(t, os.Remove(path))
	v.awaitServices("default/other 10.96.0.8")
}

// TestFilesKeepsTheLastGoodObject: a wrong port in an edit does not take the others away, and other objects of the file
// change. What went well is noticed.
func TestFilesKeepsTheLastGoodObject(t *testing.T) {
	path := filepath.Join(t.TempDir(), "a.yaml")
	write(t, path, service("web", "10.96.0.1")+"---\n"+service("api", "10.96.0.2"))
	notices := make(chan string, 16)
	v := start(t, func(report func(error)) source {
		return &Files{Path: path, Report: report, Notice: func(text string) { notices <- text }}
	})
	wantNotice := func(want string) {
		t.Helper()
		select {
		case got := <-notices:
			if got != want {
				t.Errorf("noticed %q, want %q", got, want)
			}
		case <-time.After(time.Minute):
			t.Fatalf("%q is not noticed", want)
		}
	}
	port := func() uint16 {
		v.mu.Lock()
		defer v.mu.Unlock()
		web := v.snap.Services[snapshot.Name{Namespace: "default", Name: "web"}]
		if web == nil || len(web.Ports) == 0 {
			return 0
		}
		return web.Ports[0].Port
	}
	v.awaitServices("default/api 10.96.0.2", "default/web 10.96.0.1")
	wrong := strings.Replace(service("web", "10.96.0.9"), "port: 80", "port: 80800", 1)
	write(t, path, wrong+"---\n"+service("api", "10.96.0.3"))
	v.awaitServices("default/api 10.96.0.3", "default/web 10.96.0.1")
	got := v.take(2)
	if !strings.Contains(got[0], "80800") ||
		got[1] != path+": Service default/web: the last good version of this object stays in force" || port() != 80 {
		t.Errorf("%q, port %d", got, port())
	}
	wantNotice("applying changed manifests: Service default/api")
	write(t, path, wrong+"---\n"+service("api", "10.96.0.4")) // the good one is not forgotten
	v.awaitServices("default/api 10.96.0.4", "default/web 10.96.0.1")
	wantNotice("applying changed manifests: Service default/api")
	v.take(2)
	write(t, path, service("web", "10.96.0.1")+"---\n"+service("api", "10.96.0.4")) // as it was: nothing is applied
	wantNotice(path + ": Service default/web is valid again")
	write(t, path, wrong+"---\n"+service("api", "10.96.0.4"))
	v.take(2)
	write(t, path, "kind: [\n")
	v.take(2)
	write(t, path, service("web", "10.96.0.9"))
	v.awaitServices("default/web 10.96.0.9")
	wantNotice(path + " is valid again")
	wantNotice("applying changed manifests: Service default/api removed, Service default/web")
}

// kubelet mounts a ConfigMap as links to files in a directory that is a link itself, and swaps that one.
func TestFilesFollowsAConfigMap(t *testing.T) {
	for _, whole := range []bool{true, false} {
		dir := t.TempDir()
		in := func(name string) string { return filepath.Join(dir, name) }
		must(t, os.Mkdir(in("..2026_01"), 0o755))
		write(t, in("..2026_01/a.yaml"), service("web", "10.96.0.1"))
		must(t, os.Symlink("..2026_01", in("..data")))
		must(t, os.Symlink("..data/a.yaml", in("a.yaml")))
		path := dir
		if !whole {
			path = in("a.yaml")
		}
		v := watchFiles(t, path)
		v.awaitServices("default/web 10.96.0.1")
		for i := range 3 {
			next := fmt.Sprintf("..2026_02_%d", i)
			must(t, os.Mkdir(in(next), 0o755))
			write(t, in(next+"/a.yaml"), service("web", fmt.Sprintf("10.96.1.%d", i)))
			must(t, os.Symlink(next, in("..data_tmp")))
			before, err := filepath.EvalSymlinks(in("..data"))
			must(t, err)
			must(t, os.Rename(in("..data_tmp"), in("..data")))
			must(t, os.RemoveAll(before))
			v.awaitServices(fmt.Sprintf("default/web 10.96.1.%d", i))
		}
		write(t, in("..data/a.yaml"), service("web", "10.96.2.1")) // an edit at the far end of the links
		v.awaitServices("default/web 10.96.2.1")
		if len(v.problems) > 0 {
			t.Errorf("reported %q", v.problems)
		}
	}
}

// When the path itself goes away nothing is withdrawn, and when it is back, by whatever way, it counts again.
func TestFilesPathGoesAway(t *testing.T) {
	for _, kind := range []string{"directory", "file"} {
		root := filepath.Join(t.TempDir(), "etc")
		top := filepath.Join(root, "conf")
		must(t, os.MkdirAll(top, 0o755))
		path := top
		if kind == "file" {
			path = filepath.Join(top, "a.yaml")
		}
		lost := "manifests: " + path + ": no such file or directory; the last good version stays in force"
		write(t, filepath.Join(top, "a.yaml"), service("web", "10.96.0.1"))
		v := watchFiles(t, path)
		v.awaitServices("default/web 10.96.0.1")

		must(t, os.Rename(top, top+"-old"))
		v.wantProblems(lost)
		must(t, os.Mkdir(top, 0o755))
		write(t, filepath.Join(top, "a.yaml"), service("web", "10.96.0.2"))
		v.awaitServices("default/web 10.96.0.2")

		must(t, os.Rename(root, root+"-old")) // something above it
		v.wantProblems(lost)
		must(t, os.MkdirAll(top, 0o755))
		write(t, filepath.Join(top, "a.yaml"), service("web", "10.96.0.3"))
		v.awaitServices("default/web 10.96.0.3")

		must(t, os.Mkdir(top+"-new", 0o755)) // a link to somewhere else
		write(t, filepath.Join(top+"-new", "a.yaml"), service("web", "10.96.0.4"))
		must(t, os.Rename(top, top+"-gone"))
		must(t, os.Symlink(top+"-new", top))
		v.awaitServices("default/web 10.96.0.4")
		write(t, filepath.Join(top+"-new", "a.yaml"), service("web", "10.96.0.5"))
		v.awaitServices("default/web 10.96.0.5")
		for _, d := range v.deltas {
			if s, ok := d.Services[snapshot.Name{Namespace: "default", Name: "web"}]; ok && s == nil {
				t.Error("the service was withdrawn")
			}
		}
	}
}

func TestFilesSameObjectTwice(t *testing.T) {
	dir := t.TempDir()
	a, b := filepath.Join(dir, "a.yaml"), filepath.Join(dir, "b.yaml")
	write(t, a, service("web", "10.96.0.1"))
	write(t, b, "# two\n"+service("api", "10.96.0.3")+"---\n"+service("web", "10.96.0.2"))
	v := watchFiles(t, dir)
	v.awaitServices("default/api 10.96.0.3", "default/web 10.96.0.1")
	v.wantProblems(b + ":9: Service default/web: duplicate: the one in " + a + ":1 counts")
	write(t, filepath.Join(dir, "c.yaml"), service("c", "10.96.0.4")) // not reported again
	v.awaitServices("default/api 10.96.0.3", "default/c 10.96.0.4", "default/web 10.96.0.1")
	must(t, os.Remove(a))
	v.awaitServices("default/api 10.96.0.3", "default/c 10.96.0.4", "default/web 10.96.0.2")
	if len(v.problems) > 0 {
		t.Errorf("reported %q", v.problems)
	}
	write(t, a, service("web", "10.96.0.1"))
	v.awaitServices("default/api 10.96.0.3", "default/c 10.96.0.4", "default/web 10.96.0.1")
	v.wantProblems(b + ":9: Service default/web: duplicate: the one in " + a + ":1 counts")
}

func TestLoad(t *testing.T) {
	dir := t.TempDir()
	write(t, filepath.Join(dir, "dump.yaml"), service("web", "10.96.0.1")+`---
apiVersion: v1
kind: List
items:
- {apiVersion: v1, kind: Endpoints, metadata: {name: web},
   subsets: [{addresses: [{ip: 10.1.0.9}], ports: [{port: 8080}]}]}
- {apiVersion: v1, kind: Endpoints, metadata: {name: api},
   subsets: [{addresses: [{ip: 10.1.0.2}], ports: [{port: 8080}]}]}
- {apiVersion: v1, kind: Node, metadata: {name: n1, labels: {topology.kubernetes.io/zone: a}}}
- {apiVersion: v1, kind: Node, metadata: {name: n2}, spec: {podCIDRs: [10.244.0.0/24]}}
- {apiVersion: networking.k8s.io/v1, kind: ServiceCIDR, metadata: {name: b}, spec: {cidrs: [10.96.0.0/12]}}
- {apiVersion: networking.k8s.io/v1, kind: ServiceCIDR, metadata: {name: a}, spec: {cidrs: [10.0.0.0/16, 10.96.0.0/12]}}
- {apiVersion: v1, kind: Service, metadata: {name: bad}, spec: {clusterIP: 10.96.0.300}}
`)
	write(t, filepath.Join(dir, "slices.yaml"), `apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata: {name: web-1, labels: {kubernetes.io/service-name: web}}
addressType: IPv4
ports: [{port: 8080}]
endpoints: [{addresses: [10.1.0.1]}]
`)
	s, problems, err := Load(t.Context(), dir, "n1")
	must(t, err)
	endpoints := map[string]string{}
	for _, list := range s.Slices {
		for _, sl := range list {
			endpoints[sl.Name.Name] = sl.Endpoints[0].Addr.String()
		}
	}
	if want := map[string]string{"web-1": "10.1.0.1", "api:0": "10.1.0.2"}; !reflect.DeepEqual(endpoints, want) {
		t.Errorf("endpoints %v, want %v", endpoints, want)
	}
	if !reflect.DeepEqual(s.Node, snapshot.Node{Name: "n1", Zone: "a"}) ||
		!slices.Equal(s.ServiceCIDRs, nets("10.0.0.0/16",
			"10.96.0.0/12")) {
		t.Errorf("node %+v, ranges %v", s.Node, s.ServiceCIDRs)
	}
	want := filepath.Join(dir, "dump.yaml") +
		`:19: Service default/bad: spec.clusterIP: "10.96.0.300" is not an IP address`
	unread := filepath.Join(dir, "dump.yaml") +
		":11: Endpoints default/web: ignored: the Service has EndpointSlices, which count"
	if !slices.Equal(lines(problems), []string{want, unread}) {
		t.Errorf("problems %q, want %q and %q", lines(problems), want, unread)
	}
	var p *Problem
	if !errors.As(problems[0], &p) || p.Line != 19 || errors.Unwrap(p) != p.Err {
		t.Errorf("problem is %#v", problems[0])
	}
	file, _, err := Load(t.Context(), filepath.Join(dir, "slices.yaml"), "")
	if err != nil || len(file.Slices) != 1 {
		t.Errorf("one file: %v %v", file, err)
	}
	missing := filepath.Join(dir, "missing")
	if _, _, err := Load(t.Context(), missing, "n1"); err == nil ||
		err.Error() != "manifests: "+missing+": no such file or directory" || !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("missing path: %v", err)
	}
	err = (&Files{Path: missing}).Run(t.Context(), &view{})
	if err == nil || err.Error() != "manifests: "+missing+": no such file or directory" {
		t.Errorf("Run on a missing path: %v", err)
	}
}

// TestUnreadEndpoints: Endpoints beside EndpointSlices are said once for each file, and again if that changed between.
func TestUnreadEndpoints(t *testing.T) {
	dir := t.TempDir()
	a, b := filepath.Join(dir, "a.yaml"), filepath.Join(dir, "b.yaml")
	text := ""
	for _, name := range []string{"web", "api", "other"} {
		text += "apiVersion: v1\nkind: Endpoints\nmetadata: {name: " + name + "}\n" +
			"subsets: [{addresses: [{ip: 10.1.0.9}], ports: [{port: 8080}]}]\n---\n"
	}
	write(t, a, text)
	slice := func(service string) string {
		return "apiVersion: discovery.k8s.io/v1\nkind: EndpointSlice\naddressType: IPv4\nports: [{port: 8080}]\n" +
			"metadata: {name: " + service + "-1, labels: {kubernetes.io/service-name: " + service + "}}\n" +
			"endpoints: [{addresses: [10.1.0.1]}]\n---\n"
	}
	both := slice("web") + slice("api")
	write(t, b, both)
	v := watchFiles(t, dir)
	said := a + ":1: Endpoints default/web: ignored: the Service has EndpointSlices, which count; " +
		"the same holds for 1 more Endpoints of this file"
	v.wantProblems(said)
	write(t, b, both+service("x", "10.96.0.9"))
	v.awaitServices("default/x 10.96.0.9")
	write(t, b, "")
	v.awaitServices()
	write(t, b, both)
	v.wantProblems(said)
}

// A directory written to without end is read all the same, and no delta comes later than it must.
func TestFilesUnderLoad(t *testing.T) {
	dir := t.TempDir()
	v := watchFiles(t, dir)
	end := make(chan struct{})
	var writer sync.WaitGroup
	writer.Go(func() {
		for i := 0; ; i++ {
			select {
			case <-end:
				return
			default:
				os.WriteFile(filepath.Join(dir, "busy.yaml"),
					[]byte(service("busy", fmt.Sprintf("10.97.%d.%d", i/250%250, i%250+1))),
					0o644)
			}
		}
	})
	defer writer.Wait()
	defer close(end)
	for i := range 5 {
		write(t, filepath.Join(dir, "a.yaml"), service("web", fmt.Sprintf("10.96.0.%d", i+1)))
		v.await("change while another file is being written", func() bool {
			s := v.snap.Services[snapshot.Name{Namespace: "default", Name: "web"}]
			return s != nil && s.ClusterIPs[0] == ips(fmt.Sprintf("10.96.0.%d", i+1))[0]
		})
	}
}

func BenchmarkLoad(b *testing.B) {
	for _, format := range []string{"yaml", "json"} {
		b.Run(format, func(b *testing.B) {
			services, path := testkit.Size(10000, 500), filepath.Join(b.TempDir(), "dump."+format)
			text := kubectlList(b, services, format)
			write(b, path, text)
			b.SetBytes(int64(len(text)))
			text = ""
			var (
				d *manifestDir
				s *snapshot.Snapshot
			)
			for b.Loop() {
				d, s = newManifestDir(path, "n1", func(err error) { b.Error(err) }), snapshot.New()
				if err := d.refresh(b.Context()); err != nil {
					b.Fatal(err)
				}
				if s.Apply(d.delta()); len(s.Services) != services || len(s.Slices) != services {
					b.Fatal(len(s.Services))
				}
			}
			b.ReportMetric(heapOf(func() { d = nil }), "source-MiB") // what the source remembers besides the snapshot
			b.ReportMetric(heapOf(func() { s = nil }), "snapshot-MiB")
		})
	}
}

// BenchmarkEdit changes one Service of a large dump.
func BenchmarkEdit(b *testing.B) {
	services := testkit.Size(10000, 500)
	text := kubectlList(b, services, "yaml")
	other := strings.Replace(text, fmt.Sprintf("10.96.%d.51", services/500), "10.96.250.51", 1)
	r := newReader("n1")
	m, _, _ := r.manifest("dump.yaml", text, nil, nil)
	b.SetBytes(int64(len(text)))
	for i := 0; b.Loop(); i++ {
		m, _, _ = r.manifest("dump.yaml", []string{other, text}[i%2], m, m.byKey())
	}
}

// TestCheckFiles: a path of which nothing can be read is an error, and ends a source at its start; an empty one is
// none.
func TestCheckFiles(t *testing.T) {
	dir := t.TempDir()
	path := func(name string) string { return filepath.Join(dir, name) }
	for _, sub := range []string{"empty", "some", "none"} {
		must(t, os.Mkdir(path(sub), 0o755))
	}
	must(t, os.WriteFile(path("some/b.yaml"), nil, 0o644))
	for _, link := range []string{"some/a.yaml", "none/a.yaml", "none/b.yaml"} {
		must(t, os.Symlink("nothing", path(link)))
	}
	must(t, unix.Mkfifo(path("pipe"), 0o644))
	for name, want := range map[string]string{
		"empty": "", "some": "", "some/b.yaml": "", "missing": "missing: no such file or directory",
		"none": "none: cannot read it: no such file or directory", "pipe": "pipe: cannot read it: not a regular file",
	} {
		err := CheckFiles(t.Context(), path(name))
		if (err == nil) != (want == "") || err != nil && !strings.HasSuffix(err.Error(), want) {
			t.Errorf("%s: %v; want %q", name, err, want)
		}
		if want == "" {
			continue
		}
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		v := view{snap: snapshot.New()}
		if err := (&Files{Path: path(name), Report: func(error) {}}).Run(ctx, &v); err == nil || v.synced > 0 {
			t.Errorf("%s: the source says %v, and was synced %d times", name, err, v.synced)
		}
		cancel()
	}
}

// TestDeltaText: an edit is told with the Services by name if they are few, and with the number of other objects; what
// is removed is told in other words.
func TestDeltaText(t *testing.T) {
	for _, test := range []struct {
		services, goneServices, slices, goneSlices int
		want                                       string
	}{
		{1, 0, 0, 0, "Service default/s0"},
		{0, 1, 0, 0, "Service default/s0 removed"},
		{0, 0, 0, 1, "1 EndpointSlice removed"},
		{1, 1, 2, 0, "Service default/s0 removed, Service default/s1, 2 EndpointSlices"},
		{4, 0, 1, 0, "4 Services, 1 EndpointSlice"},
		{4, 2, 1, 3, "4 Services, 2 Services removed, 1 EndpointSlice, 3 EndpointSlices removed"},
	} {
		d := snapshot.Delta{Services: map[snapshot.Name]*snapshot.Service{}, Slices: map[snapshot.Name]*snapshot.Slice{}}
		for i := range test.goneServices + test.services {
			d.Services[snapshot.Name{Namespace: "default", Name: fmt.Sprint("s", i)}] = nil
			if i >= test.goneServices {
				d.Services[snapshot.Name{Namespace: "default", Name: fmt.Sprint("s", i)}] = &snapshot.Service{}
			}
		}
		for i := range test.goneSlices + test.slices {
			d.Slices[snapshot.Name{Namespace: "default", Name: fmt.Sprint("e", i)}] = nil
			if i >= test.goneSlices {
				d.Slices[snapshot.Name{Namespace: "default", Name: fmt.Sprint("e", i)}] = &snapshot.Slice{}
			}
		}
		if got := deltaText(&d); got != test.want {
			t.Errorf("%q; want %q", got, test.want)
		}
	}
}
