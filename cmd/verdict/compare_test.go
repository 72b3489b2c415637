package main

import (
	"context"
	"encoding/json"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/spf13/pflag"

	"github.com/verdict-proxy/verdict/internal/answers/inspect"
	"github.com/verdict-proxy/verdict/internal/lab"
	"github.com/verdict-proxy/verdict/internal/lab/labtest"
	"github.com/verdict-proxy/verdict/nft/kernel"
	"github.com/verdict-proxy/verdict/sync/dataplane"
	"github.com/verdict-proxy/verdict/sync/snapshot"
)

// compared is a host to which the objects of a manifest were written.
type compared struct {
	t       *testing.T
	host    *lab.Host
	flags   []string
	objects *inspect.Objects
	backend *kernel.Backend
}

// newCompared writes them to a host that has the addresses, routes to everywhere, and forwards.
func newCompared(t *testing.T, addresses ...string) *compared {
	t.Helper()
	c := &compared{t: t, host: labtest.NewHost(t, labtest.NewNet(t), "node"), flags: explainFrom["cluster"]}
	for _, address := range addresses {
		labtest.Run(t, c.host, "", "ip", "address", "add", address, "dev", "lo")
	}
	labtest.Run(t, c.host, "", "ip", "link", "add", "eth0", "up", "type", "veth", "peer", "name", "eth1")
	for _, to := range []string{"0.0.0.0/0", "::/0"} {
		labtest.Run(t, c.host, "", "ip", "route", "add", to, "dev", "eth0")
	}
	for _, key := range []string{"net/ipv4/ip_forward", "net/ipv6/conf/all/forwarding"} {
		labtest.Check(t, c.host.Sysctl(key, "1"))
	}
	labtest.Check(t, c.host.Do(func() (err error) {
		var o inspect.ObjectFlags
		f := pflag.NewFlagSet("", pflag.ContinueOnError)
		o.AddFlags(f)
		labtest.Check(t, f.Parse(c.flags))
		if c.objects, err = o.Load(context.Background(), nil, true); err != nil {
			return err
		}
		c.backend, err = kernel.Open(kernel.Options{})
		return err
	}))
	t.Cleanup(func() { c.backend.Close() })
	c.write()
	return c
}

func (c *compared) write() {
	c.t.Helper()
	st, _ := dataplane.Compute(c.objects.Config, c.objects.Snap)
	_, err := c.backend.Apply(st, dataplane.Change{Services: allNames(st), Globals: true})
	labtest.Check(c.t, err)
}

func allNames(st *dataplane.State) (names []snapshot.Name) {
	for n := range st.Services {
		names = append(names, n)
	}
	slices.SortFunc(names, snapshot.Name.Compare)
	return names
}

// run runs a command on the host and gives its exit status.
func (c *compared) run(args ...string) (out string, status int) {
	c.t.Helper()
	labtest.Check(c.t, c.host.Do(func() error {
		var err error
		out, err = command(args...)
		var s exitStatus
		if errors.As(err, &s) {
			status = int(s)
			return nil
		}
		return err
	}))
	return out, status
}

func (c *compared) nft(text string) {
	c.t.Helper()
	labtest.Run(c.t, c.host, text, labtest.Nfts(c.t)[0].Path, "-f", "-")
}

// TestCompare: verify and diff find what others did with nft, name it, and tell by their exit status.
func TestCompare(t *testing.T) {
	c := newCompared(t)
	diff := append([]string{"diff"}, c.flags...)
	if out, status := c.run("verify"); status != exitSame ||
		!strings.Contains(out, "right: the kernel holds what was written") {
		t.Errorf("verify: %d\n%s", status, out)
	}
	if out, status := c.run(append([]string{"verify"}, c.flags...)...); status != exitSame ||
		!strings.Contains(out, "11 Services") {
		t.Errorf("verify with objects: %d\n%s", status, out)
	}
	if out, status := c.run(diff...); status != exitSame || !strings.HasPrefix(out, "same: ") {
		t.Errorf("diff: %d\n%s", status, out)
	}
	// Flags that are not given are taken from the rules.
	if out, status := c.run(slices.Concat([]string{"diff"}, c.flags[:4])...); status != exitSame ||
		!strings.Contains(out, "# taken from the kernel: --cluster-cidr=10.244.0.0/16,fd00:10:244::/48") {
		t.Errorf("diff without --cluster-cidr: %d\n%s", status, out)
	}
	c.nft(`delete element ip verdict uncounted-endpoints { da:ac57 . tcp . 1 }
		add element ip verdict uncounted-endpoints { da:ac57 . tcp . 1 : 10.9.9.9 . 1 }
		delete element ip6 verdict addresses { fd00:10:96::2003 }
		add element ip verdict hairpin { 10.9.9.9 . 10.9.9.9 }
		insert rule ip verdict output counter accept`)
	out, status := c.run(diff...)
	want := `! ip verdict: the rules of chain output are others
! ip verdict: it does not hold what was last written: its digest should be DIGEST and is DIGEST
! ip6 verdict: it does not hold what was last written: its digest should be DIGEST and is DIGEST
- ip chain output { (counter, accept) }
- ip uncounted-endpoints { da:ac57 . tcp . 1 : 10.9.9.9 . 1 }
+ ip uncounted-endpoints { da:ac57 . tcp . 1 comment "shop/cart:grpc" : 10.244.2.40 . 50051 }
- ip hairpin { 10.9.9.9 . 10.9.9.9 }
+ ip6 addresses { fd00:10:96::2003 : 0:1 }

By Service (kernel: NUMBERS)
  (shared)        2 too many
  shop/cart       1 other
  shop/catalog    1 missing
`
	if got := unnumbered(out); status != exitDiffers || got != want {
		t.Errorf("diff: %d\n%s", status, labtest.FirstDifference(got, want))
	}
	out, status = c.run(append([]string{"verify"}, c.flags...)...)
	if status != exitDiffers || !strings.Contains(out, "5 lines other than ../../examples/cluster.yaml asks for") ||
		!strings.Contains(out, "}: its members are others than its slots") {
		t.Errorf("verify: %d\n%s", status, out)
	}
	checkComparisonJSON(t, c, diff)
	labtest.Check(t, c.backend.Remove())
	if out, status := c.run("verify"); status != exitDiffers ||
		!strings.Contains(out, "! ip verdict: the table is not there") {
		t.Errorf("verify without tables: %d\n%s", status, out)
	}
}

// TestCompareSecondChance: what the setting is, the kernel tells, unless a flag does.
func TestCompareSecondChance(t *testing.T) {
	c := newCompared(t)
	change := filepath.Join(t.TempDir(), "change.yaml")
	labtest.Check(t, os.WriteFile(change, []byte("apiVersion: v1\nkind: Service\n"+
		"metadata: {name: new, namespace: shop}\nspec: {clusterIP: 10.96.77.7, ports: [{port: 80}]}\n"), 0o644))
	for _, mode := range []string{"off", "observe", "on"} {
		c.objects.Config.SecondChance, _ = snapshot.ParseSecondChance(mode)
		c.write()
		for _, command := range []string{"diff", "verify"} {
			out, status := c.run(append([]string{command}, c.flags...)...)
			note := "taken from the kernel: --second-chance=" + mode
			if status != exitSame || strings.Contains(out, note) != (mode != "on") {
				t.Errorf("%s with %s: %d\n%s", command, mode, status, out)
			}
		}
		out, _ := c.run(append([]string{"plan", "-f", change}, c.flags...)...)
		if said := strings.Contains(out, "--second-chance="); !strings.Contains(out, "shop/new") || said != (mode != "on") ||
			said && !strings.Contains(out, "--second-chance="+mode) {
			t.Errorf("plan with %s:\n%s", mode, out)
		}
		for _, other := range []string{"off", "on"} {
			out, status := c.run(append([]string{"diff", "--second-chance", other}, c.flags...)...)
			if same := other == mode; (status == exitSame) != same {
				t.Errorf("diff --second-chance %s of %s: %d\n%s", other, mode, status, out)
			}
		}
	}
}

// unnumbered takes out what differs from run to run.
func unnumbered(text string) string {
	var out []string
	for line := range strings.Lines(text) {
		if head, _, ok := strings.Cut(line, "its digest should be "); ok {
			line = head + "its digest should be DIGEST and is DIGEST\n"
		}
		if head, _, ok := strings.Cut(line, "(kernel: "); ok {
			line = head + "(kernel: NUMBERS)\n"
		}
		out = append(out, line)
	}
	return strings.Join(out, "")
}

func checkComparisonJSON(t *testing.T, c *compared, diff []string) {
	t.Helper()
	out, status := c.run(append(diff, "--json")...)
	var got inspect.ComparisonJSON
	d := json.NewDecoder(strings.NewReader(out))
	d.DisallowUnknownFields()
	labtest.Check(t, d.Decode(&got))
	if status != exitDiffers || got.Same || len(got.Differences) != 5 || len(got.Services) != 3 || len(got.Tables) != 2 ||
		got.Tables[0].Digest == got.Tables[0].Found || got.Tables[0].Revision == 0 {
		t.Errorf("diff --json: %d\n%s", status, out)
	}
	if e := got.Differences[2]; e.Side != "wanted" || e.Set != "uncounted-endpoints" || e.Port != "shop/cart:grpc" ||
		e.Family != "ip" {
		t.Errorf("a difference is %+v", e)
	}
}

// TestCompareTrouble: whatever goes wrong is exit status 2, and touches nothing.
func TestCompareTrouble(t *testing.T) {
	c := newCompared(t)
	broken := filepath.Join(t.TempDir(), "gone")
	for _, args := range [][]string{
		{"diff"}, {"diff", "--bogus"}, {"diff", "x"}, {"verify", "x"}, {"verify", "--from", broken},
		{"diff", "--from", broken},
		{"diff", "--from", "a", "--in-cluster"}, {"verify", "--from", "../../examples/cluster.yaml", "--cluster-cidr", "x"},
	} {
		if out, status := c.run(args...); status != exitTrouble {
			t.Errorf("%v: %d\n%s", args, status, out)
		}
	}
	if out, status := c.run("verify"); status != exitSame {
		t.Errorf("afterwards: %d\n%s", status, out)
	}
}

// TestCompareBesideAProxy verifies again and again while a proxy writes all the time: what is on its way is no
// difference, and the proxy finds nothing that others did.
func TestCompareBesideAProxy(t *testing.T) {
	c := newCompared(t)
	stop := make(chan struct{})
	var wg sync.WaitGroup
	written := 0
	wg.Go(func() {
		for n := 0; ; n++ {
			select {
			case <-stop:
				written = n
				return
			case <-time.After(3 * time.Millisecond):
			}
			c.scale(n)
			if found, _, err := c.backend.Check(); err != nil || len(found) > 0 {
				t.Errorf("the proxy found %v, %v", found, err)
			}
		}
	})
	for range 12 {
		if out, status := c.run("verify"); status != exitSame {
			t.Errorf("verify: %d\n%s", status, out)
		}
		out, status := c.run("explain", "10.244.1.7", "10.96.20.3:8080", "--live")
		if status != 0 || !strings.Contains(out, "shop/catalog:http") || strings.Contains(out, "Unclear") {
			t.Errorf("explain: %d\n%s", status, out)
		}
	}
	close(stop)
	wg.Wait()
	if written < 50 {
		t.Errorf("the proxy wrote only %d times", written)
	}
}

// scale changes the endpoints of a Service, as the proxy would on a change of its slice.
func (c *compared) scale(n int) {
	name := snapshot.Name{Namespace: "shop", Name: "catalog"}
	for _, s := range c.objects.Snap.Slices[name] {
		changed := *s
		changed.Endpoints = slices.Clone(s.Endpoints)
		for i := range changed.Endpoints {
			on := i > n%len(changed.Endpoints)
			changed.Endpoints[i].Ready, changed.Endpoints[i].Serving = on, on
		}
		c.objects.Snap.Apply(snapshot.Delta{Slices: map[snapshot.Name]*snapshot.Slice{s.Name: &changed}})
	}
	st, _ := dataplane.Compute(c.objects.Config, c.objects.Snap)
	if _, err := c.backend.Apply(st, dataplane.Change{Services: []snapshot.Name{name}}); err != nil {
		c.t.Error(err)
	}
}

// TestCompareWithoutRights: who may not read is told so. Rights in a user namespace of its own are none over the
// host's.
func TestCompareWithoutRights(t *testing.T) {
	c := newCompared(t)
	for _, args := range [][]string{{"verify"}, {"explain", "pod", "10.96.0.10:53/udp", "--live"}, {"top", "--once"}} {
		cmd := c.host.Command("/proc/self/exe", args...)
		cmd.Env = append(os.Environ(), beVerdict+"=1")
		cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWUSER,
			UidMappings: []syscall.SysProcIDMap{{ContainerID: 0, HostID: os.Geteuid(), Size: 1}}}
		out, err := cmd.CombinedOutput()
		if err == nil || !strings.Contains(string(out), "run as root, or with CAP_NET_ADMIN") {
			t.Errorf("%v: %v\n%s", args, err, out)
		}
	}
}
