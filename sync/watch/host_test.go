package watch

import (
	"errors"
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"runtime"
	"slices"
	"strings"
	"syscall"
	"testing"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"
)

// newNamespace makes a network namespace. It is made by a thread that ends at once; one that came back from another
// namespace could carry any goroutine there.
func newNamespace(t *testing.T) (netns.NsHandle, error) {
	type result struct {
		ns  netns.NsHandle
		err error
	}
	made := make(chan result)
	go func() {
		runtime.LockOSThread() // and never unlocked: the thread ends with the goroutine
		if err := unix.Unshare(unix.CLONE_NEWNET); err != nil {
			made <- result{err: err}
			return
		}
		ns, err := netns.Get()
		made <- result{ns, err}
	}()
	r := <-made
	if r.err == nil {
		t.Cleanup(func() { r.ns.Close() })
	}
	return r.ns, r.err
}

// inNamespace gives a test a network namespace of its own and a handle on it. Whoever may not make one runs the test
// again in a user namespace, which is then the test's result, and only who may not make that either skips it.
func inNamespace(t *testing.T) (ns netns.NsHandle, h *netlink.Handle, here bool) {
	t.Helper()
	ns, err := newNamespace(t)
	if errors.Is(err, unix.EPERM) && os.Getenv("WATCH_USER_NAMESPACE") == "" {
		cmd := exec.Command(os.Args[0], "-test.run=^"+t.Name()+"$", "-test.v")
		cmd.Env = append(os.Environ(), "WATCH_USER_NAMESPACE=1")
		cmd.SysProcAttr = &syscall.SysProcAttr{
			Cloneflags:  unix.CLONE_NEWUSER | unix.CLONE_NEWNET,
			UidMappings: []syscall.SysProcIDMap{{ContainerID: 0, HostID: os.Getuid(), Size: 1}},
			GidMappings: []syscall.SysProcIDMap{{ContainerID: 0, HostID: os.Getgid(), Size: 1}},
		}
		out, err := cmd.CombinedOutput()
		switch exit := (*exec.ExitError)(nil); {
		case errors.As(err, &exit):
			t.Fatalf("in a user namespace: %v\n%s", err, out)
		case err != nil && !errors.Is(err, unix.EPERM) && !errors.Is(err, unix.ENOSPC): // what forbids them says one of these
			t.Fatal(err)
		case err != nil:
			t.Skipf("neither a network namespace nor a user namespace can be made: %v", err)
		}
		return ns, nil, false
	}
	must(t, err)
	h, err = netlink.NewHandleAt(ns, unix.NETLINK_ROUTE)
	must(t, err)
	t.Cleanup(h.Close)
	return ns, h, true
}

func addr(t testing.TB, text string) *netlink.Addr {
	a, err := netlink.ParseAddr(text)
	must(t, err)
	return a
}

func (v *view) awaitAddrs(want ...string) {
	v.t.Helper()
	v.await(fmt.Sprintf("addresses %q", want), func() bool { return slices.Equal(v.snap.HostAddrs, ips(want...)) })
}

func TestHost(t *testing.T) {
	ns, h, here := inNamespace(t)
	if !here {
		return
	}
	v := start(t, func(report func(error)) source { return &Host{Namespace: &ns, Report: report} })
	v.await("first list", func() bool { return v.synced == 1 && len(v.snap.HostAddrs) == 0 })
	lo, err := h.LinkByName("lo")
	must(t, err)
	must(t, h.LinkSetUp(lo))
	v.awaitAddrs("127.0.0.1", "::1")
	must(t, h.AddrAdd(lo, addr(t, "10.0.0.7/32")))
	must(t, h.AddrAdd(lo, addr(t, "fd00::7/128")))
	v.awaitAddrs("10.0.0.7", "127.0.0.1", "::1", "fd00::7")

	// An address counts while it is tentative, once if it is on two interfaces, and with a peer it is our end that counts.
	must(t, h.LinkAdd(&netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: "v0"}, PeerName: "v1"}))
	v0, err := h.LinkByName("v0")
	must(t, err)
	must(t, h.AddrAdd(v0, addr(t, "10.0.0.7/24")))
	withPeer := addr(t, "192.0.2.1/32")
	withPeer.Peer = addr(t, "192.0.2.2/32").IPNet
	must(t, h.AddrAdd(v0, withPeer))
	must(t, h.LinkSetUp(v0)) // its peer is down: there is no carrier, and duplicate address detection does not start
	must(t, h.AddrAdd(v0, addr(t, "fe80::5/64")))
	v.awaitAddrs("10.0.0.7", "127.0.0.1", "192.0.2.1", "::1", "fd00::7", "fe80::5")
	must(t, h.LinkDel(v0))
	must(t, h.AddrDel(lo, addr(t, "fd00::7/128")))
	v.awaitAddrs("10.0.0.7", "127.0.0.1", "::1")
	if v.synced != 1 || len(v.problems) > 0 {
		t.Errorf("synced %d times, problems %q", v.synced, v.problems)
	}
}

// Many changes at once are few deltas.
func TestHostBurst(t *testing.T) {
	ns, h, here := inNamespace(t)
	if !here {
		return
	}
	lo, err := h.LinkByName("lo")
	must(t, err)
	v := start(t, func(report func(error)) source { return &Host{Namespace: &ns, Report: report} })
	v.await("first list", func() bool { return v.synced == 1 })
	want := flood(t, h, lo, 500)
	v.await("all addresses", func() bool { return slices.Equal(v.snap.HostAddrs, want) })
	if n := len(v.deltas); n > 50 {
		t.Errorf("%d deltas for 500 changes", n)
	}
}

// flood adds n addresses and gives all of them, sorted.
func flood(t *testing.T, h *netlink.Handle, lo netlink.Link, n int) []netip.Addr {
	t.Helper()
	var all []netip.Addr
	for i := range n {
		text := fmt.Sprintf("10.%d.%d.1", i/250, i%250)
		must(t, h.AddrAdd(lo, addr(t, text+"/32")))
		all = append(all, netip.MustParseAddr(text))
	}
	return all
}

// When the kernel drops messages, the list is read anew, and that is no problem to report.
func TestHostOverflow(t *testing.T) {
	ns, h, here := inNamespace(t)
	if !here {
		return
	}
	lo, err := h.LinkByName("lo")
	must(t, err)
	v := start(t, func(report func(error)) source { return &Host{Namespace: &ns, Report: report, receiveBuffer: 1} })
	v.await("first list", func() bool { return v.synced == 1 })
	want := flood(t, h, lo, 5000)
	v.await("all addresses", func() bool { return slices.Equal(v.snap.HostAddrs, want) })
	v.mu.Lock()
	defer v.mu.Unlock()
	if len(v.problems) > 0 {
		t.Errorf("reported %q", v.problems)
	}
}

func TestHostFailsAtStart(t *testing.T) {
	bad := netns.NsHandle(0)
	if f, err := os.Open("/dev/null"); err == nil {
		defer f.Close()
		bad = netns.NsHandle(f.Fd())
	}
	err := (&Host{Namespace: &bad}).Run(t.Context(), &view{})
	if err == nil || !strings.HasPrefix(err.Error(), "host addresses: ") {
		t.Errorf("got %v", err)
	}
}

func TestHostHere(t *testing.T) {
	v := start(t, func(report func(error)) source { return &Host{Report: report} })
	v.await("first list", func() bool { return v.synced == 1 })
}
