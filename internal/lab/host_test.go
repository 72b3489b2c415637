package lab_test

import (
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/verdict-proxy/verdict/internal/lab"
	"github.com/verdict-proxy/verdict/internal/lab/labtest"
	"github.com/verdict-proxy/verdict/internal/system/ipfamily"
	"github.com/verdict-proxy/verdict/internal/system/testkit"
	"github.com/verdict-proxy/verdict/sync/snapshot"
)

// threadNetns names the namespace of the calling thread.
func threadNetns(t testing.TB) string {
	t.Helper()
	ns, err := os.Readlink("/proc/thread-self/ns/net")
	labtest.Check(t, err)
	return ns
}

// await fails unless a condition comes true soon.
func await(t testing.TB, what string, f func() (now string, ok bool)) {
	t.Helper()
	var now string
	testkit.Eventually(t, 5*time.Second, "no more: "+what, func() (ok bool) {
		now, ok = f()
		return ok
	}, func() string { return now })
}

func TestDo(t *testing.T) {
	n := labtest.NewNet(t)
	h := labtest.NewHost(t, n, "a")
	outer := threadNetns(t)
	var inner, nested string
	labtest.Check(t, h.Do(func() error {
		inner = threadNetns(t)
		return h.Do(func() error { nested = threadNetns(t); return nil })
	}))
	if inner == outer || nested != inner || threadNetns(t) != outer {
		t.Errorf("outer %s, inner %s, nested %s", outer, inner, nested)
	}
	oops := errors.New("oops")
	if err := h.Do(func() error { return oops }); err != oops {
		t.Errorf("Do gave %v", err)
	}
}

// t.FailNow in Do ends the test, not just a thread.
func TestDoGoexit(t *testing.T) {
	n := labtest.NewNet(t)
	h := labtest.NewHost(t, n, "a")
	done := make(chan bool)
	go func() {
		after := false
		defer func() { done <- after }()
		_ = h.Do(func() error { runtime.Goexit(); return nil })
		after = true
	}()
	if <-done {
		t.Error("went on after Goexit in Do")
	}
}

// A sysctl belongs to the namespace of the thread that writes it.
func TestSysctl(t *testing.T) {
	n := labtest.NewNet(t)
	a, b := labtest.NewHost(t, n, "a"), labtest.NewHost(t, n, "b")
	const key = "net/ipv4/ip_default_ttl"
	read := func(h *lab.Host) (value string) {
		labtest.Check(t, h.Do(func() error {
			b, err := os.ReadFile("/proc/sys/" + key)
			value = strings.TrimSpace(string(b))
			return err
		}))
		return value
	}
	before, err := os.ReadFile("/proc/sys/" + key)
	labtest.Check(t, err)
	labtest.Check(t, a.Sysctl(key, "33"))
	labtest.Check(t, b.Sysctl(key, "44"))
	after, err := os.ReadFile("/proc/sys/" + key)
	labtest.Check(t, err)
	if read(a) != "33" || read(b) != "44" || string(before) != string(after) {
		t.Errorf("a %s, b %s, here %s before and %s after", read(a), read(b), before, after)
	}
	if err := a.Sysctl("net/ipv4/none", "1"); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("a sysctl that is not there: %v", err)
	}
}

func TestCommand(t *testing.T) {
	n := labtest.NewNet(t)
	h := labtest.NewHost(t, n, "a")
	var inner string
	labtest.Check(t, h.Do(func() error { inner = threadNetns(t); return nil }))
	out, err := h.Command("readlink", "/proc/self/ns/net").Output()
	if strings.TrimSpace(string(out)) != inner || err != nil {
		t.Errorf("the command ran in %s, not %s: %v", out, inner, err)
	}
	if out := labtest.Run(t, h, "text", "cat"); out != "text" {
		t.Errorf("cat gave %q", out)
	}
	if _, err := h.Run("sh", "-c", "echo reason >&2; exit 3"); err == nil || !strings.Contains(err.Error(), "reason") {
		t.Errorf("a command that fails: %v", err)
	}
	c := h.Command("sleep", "60")
	labtest.Check(t, c.Start())
	labtest.Check(t, c.Process.Kill())
	if err := c.Wait(); err == nil {
		t.Error("a killed command succeeded")
	}
	if err := h.Command("/no/such/command").Run(); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("a command that is not there: %v", err)
	}
}

func TestLink(t *testing.T) {
	n := labtest.NewNet(t)
	a, b := labtest.NewHost(t, n, "a"), labtest.NewHost(t, n, "b")
	labtest.Check(t, lab.Link(lab.End{Host: a, Link: "to-b"}, lab.End{Host: b, Link: "to-a"}, lab.LinkOptions{MTU: 1400}))
	for _, h := range []struct {
		host *lab.Host
		link string
		addr []string
	}{{a, "to-b", []string{"10.0.0.1/24", "fd00::1/64"}}, {b, "to-a", []string{"10.0.0.2/24", "fd00::2/64"}}} {
		l, err := h.host.Netlink().LinkByName(h.link)
		labtest.Check(t, err)
		if l.Attrs().MTU != 1400 || l.Attrs().HardwareAddr[0]&3 != 2 {
			t.Errorf("%s: MTU %d, MAC %s", h.link, l.Attrs().MTU, l.Attrs().HardwareAddr)
		}
		for _, p := range h.addr {
			labtest.Check(t, h.host.AddAddr(h.link, netip.MustParsePrefix(p)))
		}
	}
	serve(t, []*lab.Host{b}, 80)
	eachFlow(t, func(t *testing.T, p snapshot.Protocol, f ipfamily.Family) {
		if r := a.Dial(p, netip.AddrPortFrom(b.IP(f), 80), lab.Options{}); r.Endpoint != "b" {
			t.Error(r)
		}
	})
	labtest.Check(t, b.DelAddr("to-a", netip.MustParsePrefix("10.0.0.2/24")))
	r := a.Dial(snapshot.UDP, netip.MustParseAddrPort("10.0.0.2:80"), lab.Options{Timeout: 20 * time.Millisecond})
	if r.Outcome == lab.Answered {
		t.Errorf("after DelAddr: %s", r)
	}
	for _, err := range []error{
		lab.Link(lab.End{Host: a, Link: "to-b"}, lab.End{Host: b, Link: "x"}, lab.LinkOptions{}),
		a.AddAddr("none", netip.MustParsePrefix("10.0.0.1/24")),
		a.AddAddr("to-b", netip.MustParsePrefix("10.0.0.1/24")),
		a.DelAddr("to-b", netip.MustParsePrefix("10.9.0.1/24")),
		a.AddRoute(lab.Route{To: netip.MustParsePrefix("10.9.0.0/24"), Link: "none"}),
		a.AddPort("none", "to-b"),
	} {
		if err == nil || !strings.HasPrefix(err.Error(), "lab: ") {
			t.Errorf("error %v", err)
		}
	}
}

// A closed host answers with ErrClosed and never with somebody else's descriptor.
func TestClosed(t *testing.T) {
	n := lab.New()
	h := labtest.NewHost(t, n, "a")
	s, err := h.Serve(snapshot.TCP, 80)
	labtest.Check(t, err)
	labtest.Check(t, n.Close())
	labtest.Check(t, n.Close())
	labtest.Check(t, s.Close())
	_, errServe := h.Serve(snapshot.TCP, 80)
	_, errHost := n.NewHost("b")
	_, errListen := h.Listen("tcp", ":80")
	errDial := h.Dial(snapshot.TCP, netip.MustParseAddrPort("127.0.0.1:80"), lab.Options{}).Err
	errSCTP := h.Dial(snapshot.SCTP, netip.MustParseAddrPort("127.0.0.1:80"), lab.Options{}).Err
	for i, err := range []error{
		h.Do(func() error { return nil }), h.Sysctl("net/ipv4/ip_forward", "1"), h.Command("true").Run(),
		errServe, errHost, errListen, errDial, errSCTP,
	} {
		if !errors.Is(err, lab.ErrClosed) {
			t.Errorf("%d: %v", i, err)
		}
	}
}

// foreignThreads names the threads of this process that are in another network namespace than it.
func foreignThreads(t testing.TB) (foreign []string) {
	own, err := os.Readlink("/proc/self/ns/net")
	labtest.Check(t, err)
	tasks, err := filepath.Glob("/proc/self/task/*/ns/net")
	labtest.Check(t, err)
	for _, task := range tasks {
		if ns, err := os.Readlink(task); err == nil && ns != own { // a thread may end between the two
			foreign = append(foreign, task+" is in "+ns)
		}
	}
	return foreign
}

func descriptors(t testing.TB) []string {
	fds, err := os.ReadDir("/proc/self/fd")
	labtest.Check(t, err)
	var open []string
	for _, fd := range fds {
		if to, err := os.Readlink("/proc/self/fd/" + fd.Name()); err == nil {
			open = append(open, fd.Name()+" "+to)
		}
	}
	return open
}

// use does all one can do with a cluster, and leaves connections open.
func use(t testing.TB, c *lab.Cluster) {
	t.Helper()
	serve(t, everybody(c), 8080)
	for _, f := range lab.Families() {
		for _, p := range protocols {
			r := c.Outside.Dial(p, netip.AddrPortFrom(c.Pods[0].IP(f), 8080), lab.Options{})
			if r.Outcome != lab.Answered {
				t.Errorf("%s %s: %s", f, p, r)
			}
			c.Outside.Dial(p, netip.AddrPortFrom(c.Pods[0].IP(f), 9), lab.Options{})
			if p != snapshot.SCTP {
				c.Outside.Open(p, netip.AddrPortFrom(c.RemotePods[0].IP(f), 8080), lab.Options{})
			}
		}
	}
	_, err := c.Node.Run("true")
	labtest.Check(t, err)
}

// Close leaves no thread, goroutine or descriptor, and the kernel takes the namespaces away: a link that leads from
// another net into the closed one vanishes.
func TestClose(t *testing.T) {
	conf := lab.Config{LocalPods: 1, RemotePods: 1}
	warm := labtest.NewCluster(t, conf) // the runtime opens descriptors of its own on first use
	use(t, warm)
	labtest.Check(t, warm.Close())
	witness := labtest.NewHost(t, labtest.NewNet(t), "witness")
	await(t, "threads remain", func() (string, bool) {
		now := foreignThreads(t)
		return fmt.Sprint(now), len(now) == 1 // the witness's
	})
	goroutines, fds := runtime.NumGoroutine(), len(descriptors(t))
	for i := range 5 {
		c, err := lab.NewCluster(conf)
		labtest.Check(t, err)
		use(t, c)
		for j, h := range everybody(c) {
			link := fmt.Sprintf("w%d-%d", i, j)
			labtest.Check(t, lab.Link(lab.End{Host: witness, Link: link}, lab.End{Host: h, Link: "w"}, lab.LinkOptions{}))
		}
		labtest.Check(t, c.Close())
	}
	await(t, "goroutines remain", func() (string, bool) {
		now := runtime.NumGoroutine()
		buf := make([]byte, 1<<16)
		return fmt.Sprintf("%d, were %d\n%s", now, goroutines, buf[:runtime.Stack(buf, true)]), now <= goroutines
	})
	await(t, "descriptors remain", func() (string, bool) {
		now := descriptors(t)
		return fmt.Sprintf("were %d, now %v", fds, now), len(now) <= fds
	})
	await(t, "threads remain", func() (string, bool) {
		now := foreignThreads(t)
		return fmt.Sprint(now), len(now) == 1
	})
	await(t, "links remain, and so the namespaces they lead to", func() (string, bool) {
		links, err := witness.Netlink().LinkList()
		labtest.Check(t, err)
		return fmt.Sprint(len(links)), len(links) == 1
	})
}

// While hosts do their work, and after they are gone, no goroutine finds itself in one of their namespaces.
func TestNoStrayThreads(t *testing.T) {
	own := threadNetns(t)
	process := fmt.Sprint(unix.Getpid())
	n := labtest.NewNet(t)
	var hosts []*lab.Host
	for i := range 5 {
		hosts = append(hosts, labtest.NewHost(t, n, fmt.Sprint("h", i)))
	}
	var wg sync.WaitGroup
	check := func() {
		if ns, err := os.Readlink("/proc/thread-self/ns/net"); ns != own {
			t.Errorf("a goroutine runs in %s, not in %s: %v", ns, own, err)
		}
	}
	for i := range 2000 {
		wg.Go(func() {
			check()
			if i%4 == 0 {
				labtest.Check(t, hosts[i%5].Do(func() error {
					if ns, _ := os.Readlink("/proc/thread-self/ns/net"); ns == own {
						t.Error("Do runs outside")
					}
					if fmt.Sprint(unix.Gettid()) == process {
						t.Error("Do runs on the first thread")
					}
					go check()
					return nil
				}))
			}
			runtime.Gosched()
			check()
		})
	}
	wg.Wait()
	labtest.Check(t, n.Close())
	await(t, "threads remain", func() (string, bool) {
		now := foreignThreads(t)
		return fmt.Sprint(now), len(now) == 0
	})
	for range 2000 {
		wg.Go(func() { check(); time.Sleep(time.Millisecond); check() })
	}
	wg.Wait()
}
