package xtables

import (
	"context"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/verdict-proxy/verdict/internal/lab"
	"github.com/verdict-proxy/verdict/internal/lab/labtest"
	"github.com/verdict-proxy/verdict/internal/system/ipfamily"
)

// TestMain gives the tests a lock of their own: the rules of their hosts are nobody else's.
func TestMain(m *testing.M) {
	os.Setenv("XTABLES_LOCKFILE", filepath.Join(os.TempDir(), "verdict-test-xtables.lock"))
	labtest.Main(m)
}

// newHost gives a host of its own without any rules.
func newHost(t *testing.T) *lab.Host {
	t.Helper()
	return labtest.NewHost(t, labtest.NewNet(t), "node")
}

// soon gives a context that ends a test which hangs.
func soon(t *testing.T) context.Context {
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	t.Cleanup(cancel)
	return ctx
}

// findOn finds the programs of a host.
func findOn(t *testing.T, h *lab.Host) *Programs {
	t.Helper()
	var p *Programs
	labtest.Check(t, h.Do(func() (err error) {
		p, err = Find(soon(t))
		return err
	}))
	t.Cleanup(func() { p.Close() })
	return p
}

// programsOf finds those of one variant: a host on which a kubelet uses it.
func programsOf(t *testing.T, h *lab.Host, v Variant) *Programs {
	t.Helper()
	for _, f := range ipfamily.All {
		labtest.Run(t, h, "*mangle\n:KUBE-IPTABLES-HINT - [0:0]\nCOMMIT\n", program(f)+"-"+v.String()+"-restore",
			"--noflush", "-w", "5")
	}
	p := findOn(t, h)
	if p.Variant != v {
		t.Fatalf("it is %s (%s); want the %s variant", p, p.Why, v)
	}
	return p
}
