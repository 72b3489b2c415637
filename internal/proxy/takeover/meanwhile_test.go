package takeover

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/verdict-proxy/verdict/internal/lab"
	"github.com/verdict-proxy/verdict/internal/lab/labtest"
	"github.com/verdict-proxy/verdict/internal/system/ipfamily"
)

// TestOthersWriteMeanwhile removes kube-proxy's rules again and again while somebody else adds rules of his, of which
// none may be missing in the end.
func TestOthersWriteMeanwhile(t *testing.T) {
	const rules = 40
	eachVariant(t, func(t *testing.T, h *lab.Host, v variant, f ipfamily.Family) {
		capture := rulesOf(f, testdata(t, "iptables.txt"))
		var theirs sync.WaitGroup
		var failed error
		theirs.Go(func() {
			for i := range rules {
				args := []string{"-w", "-t", []string{"nat", "filter"}[i%2], "-A", "OUTPUT", "-p", "udp", "--dport",
					fmt.Sprint(1000 + i),
					"-m", "comment", "--comment", "theirs", "-j", "RETURN"}
				if _, err := h.Run(program(t, v, f, ""), args...); err != nil {
					failed = err
				}
			}
		})
		done := make(chan struct{})
		go func() { theirs.Wait(); close(done) }()
		removals := 0
		for working := true; working; removals++ {
			select {
			case <-done:
				working = false
			default:
			}
			labtest.Run(t, h, capture, program(t, v, f, "-restore"), "--noflush", "-w")
			remove(t, h)
		}
		labtest.Check(t, failed)
		if left := find(t, h); !left.Empty() {
			t.Errorf("left are %q", left.Summary())
		}
		if n := strings.Count(save(t, h, v, f), "theirs"); n != rules {
			t.Errorf("after %d removals there are %d rules of somebody else's, want %d", removals, n, rules)
		}
	})
}

// TestAddressesChangeMeanwhile lists this host's addresses again and again while others come and go. The kernel says of
// such a list that it may lack some.
func TestAddressesChangeMeanwhile(t *testing.T) {
	const own, looks = 500, 100
	h := labtest.NewHost(t, labtest.NewNet(t), "node")
	for i := range own {
		a := netip.AddrFrom4([4]byte{10, 96, byte(i >> 8), byte(i)})
		labtest.Check(t, h.AddAddr("lo", netip.PrefixFrom(a, 32)))
	}
	done := make(chan struct{})
	var others sync.WaitGroup
	var failed error
	others.Go(func() {
		theirs := netip.MustParsePrefix("192.0.2.10/32")
		for failed == nil {
			select {
			case <-done:
				return
			default:
				failed = errors.Join(h.AddAddr("lo", theirs), h.DelAddr("lo", theirs))
			}
		}
	})
	inside(t, h, func() error {
		defer func() { close(done); others.Wait() }()
		for range looks {
			local, err := localAddrs()
			if err != nil {
				return err
			}
			if len(local) < own {
				return fmt.Errorf("found %d addresses of %d at least", len(local), own)
			}
		}
		return nil
	})
	labtest.Check(t, failed)
}

// TestVerify has a chain removed to which a rule that stays leads: nothing is to be written then.
func TestVerify(t *testing.T) {
	for _, f := range ipfamily.All {
		h := labtest.NewHost(t, labtest.NewNet(t), "node")
		restore(
			t,
			h,
			legacy,
			f,
			"*nat\n:A - [0:0]\n:B - [0:0]\n:C - [0:0]\n-A OUTPUT -j A\n-A A -p tcp -j B\n-A A -g C\n-A C -m comment "+
				"--comment x\nCOMMIT\n",
		)
		inside(t, h, func() error {
			b, err := readBlob(f, "nat")
			if err != nil {
				return err
			}
			for name, wrong := range map[string]bool{"A": true, "B": true, "C": true, "D": false} {
				if _, _, err := b.without(&plan{chains: []string{name}}); (err != nil) != wrong {
					t.Errorf("%s without chain %s: %v", f, name, err)
				}
			}
			if _, _, err := b.without(&plan{chains: []string{"A", "B", "C"}}); err == nil {
				t.Errorf("%s without chain A, and a rule that leads there", f)
			}
			for cut := range len(b.Entries) {
				part := *b.Table
				part.Entries = b.Entries[:cut]
				if _, err := (&blob{&part}).table("nat"); err == nil {
					t.Fatalf("%s: %d of %d bytes are a table", f, cut, len(b.Entries))
				}
			}
			return nil
		})
	}
}

// TestLock waits while another iptables holds the lock of legacy iptables, and gives up in the end.
func TestLock(t *testing.T) {
	f, err := os.OpenFile(os.Getenv("XTABLES_LOCKFILE"), os.O_CREATE|os.O_RDONLY, 0o600)
	labtest.Check(t, err)
	defer f.Close()
	labtest.Check(t, unix.Flock(int(f.Fd()), unix.LOCK_EX))
	ctx, cancel := context.WithTimeout(t.Context(), 200*time.Millisecond)
	defer cancel()
	if unlock, err := lockLegacy(ctx); err == nil {
		unlock()
		t.Error("got the lock that another one has")
	}
	var released atomic.Bool
	time.AfterFunc(100*time.Millisecond, func() {
		released.Store(true)
		f.Close()
	})
	unlock, err := lockLegacy(t.Context())
	labtest.Check(t, err)
	unlock()
	if !released.Load() {
		t.Error("got the lock before it was released")
	}
}
