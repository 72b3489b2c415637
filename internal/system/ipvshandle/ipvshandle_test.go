package ipvshandle

import (
	"errors"
	"net/netip"
	"os"
	"os/exec"
	"strings"
	"testing"
	"time"

	"github.com/moby/ipvs"
	"github.com/vishvananda/netlink/nl"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"
)

// TestOpen opens a Handle that IPVS answers; where there is no IPVS it says so, and what moby/ipvs makes of that shows
// why: everything seems to succeed.
func TestOpen(t *testing.T) {
	_ = exec.Command("modprobe", "ip_vs").Run() // Linux 5.10 does not load it by itself
	h, err := Open()
	if err == nil {
		defer h.Close()
		if !Loaded() || h.Family() == 0 {
			t.Errorf("loaded: %v, family %d", Loaded(), h.Family())
		}
		if _, err := h.Services(); err != nil {
			t.Error(err)
		}
		return
	}
	if !errors.Is(err, ErrMissing) || Loaded() {
		t.Fatalf("%v; loaded: %v", err, Loaded())
	}
	if os.Getenv("VERDICT_IPVS") != "none" {
		t.Fatalf("%v; VERDICT_IPVS=none if that is so on purpose", err)
	}
	blind, err := ipvs.New("")
	if err != nil {
		t.Fatal(err)
	}
	s := NewService(netip.MustParseAddrPort("10.96.0.1:80"), unix.IPPROTO_TCP)
	if err := blind.NewService(s); err != nil {
		t.Errorf("moby/ipvs notices that there is no IPVS: %v; Open need not ask any more", err)
	}
	// The answer without a body, at which GetConfig panics.
	h = &Handle{moby: blind, patience: patience}
	err = h.Do(func(h *ipvs.Handle) error { _, err := h.GetConfig(); return err })
	if err == nil || !strings.Contains(err.Error(), "malformed") || !h.Closed() {
		t.Errorf("%v, closed: %v", err, h.Closed())
	}
	if _, err := h.Services(); err == nil {
		t.Error("a closed Handle lists services")
	}
}

// TestReloaded refuses a family that moby/ipvs does not know.
func TestReloaded(t *testing.T) {
	h, err := Open()
	if errors.Is(err, ErrMissing) && os.Getenv("VERDICT_IPVS") == "none" {
		t.Skip(err)
	}
	if err != nil {
		t.Fatal(err)
	}
	h.Close()
	h.Close()
	known.family++
	defer func() { known.family-- }()
	if h, err := Open(); !errors.Is(err, errReloaded) {
		t.Errorf("%v, %v", h, err)
	}
}

// TestPatience ends what moby/ipvs waits for without an end: it receives as the Handle does.
func TestPatience(t *testing.T) {
	sock, err := nl.GetNetlinkSocketAt(netns.None(), netns.None(), unix.NETLINK_GENERIC)
	if err != nil {
		t.Fatal(err)
	}
	soon := unix.NsecToTimeval(int64(10 * time.Millisecond))
	if err := sock.SetReceiveTimeout(&soon); err != nil {
		t.Fatal(err)
	}
	defer time.AfterFunc(100*time.Millisecond, sock.Close).Stop()
	tries := 0
	for err = unix.EAGAIN; errors.Is(err, unix.EAGAIN); tries++ {
		_, _, err = sock.Receive()
	}
	if tries < 2 || err == nil {
		t.Errorf("after %d tries: %v", tries, err)
	}

	blind, err := ipvs.New("")
	if err != nil {
		t.Fatal(err)
	}
	h := &Handle{moby: blind, patience: time.Millisecond}
	err = h.Do(func(*ipvs.Handle) error { time.Sleep(100 * time.Millisecond); return nil })
	if !errors.Is(err, os.ErrDeadlineExceeded) || !h.Closed() {
		t.Errorf("%v, closed: %v", err, h.Closed())
	}
}

// TestWords converts addresses there and back.
func TestWords(t *testing.T) {
	for name, mask := range map[string]uint32{"10.96.0.1:80 tcp": ^uint32(0), "[fd00:10:96::1]:53 tcp": 128} {
		at := netip.MustParseAddrPort(strings.TrimSuffix(name, " tcp"))
		s := NewService(at, unix.IPPROTO_TCP)
		if Name(s) != name || AddrPort(s.Address, s.Port) != at || s.Netmask != mask {
			t.Errorf("%s: %+v", name, s)
		}
	}
	marked := &ipvs.Service{FWMark: 7}
	if Name(marked) != "firewall mark 7" || AddrPort(marked.Address, marked.Port).IsValid() {
		t.Errorf("%s at %v", Name(marked), AddrPort(marked.Address, marked.Port))
	}
}
