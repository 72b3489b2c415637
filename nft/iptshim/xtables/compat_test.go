package xtables

import (
	"log/slog"
	"strings"
	"testing"

	"github.com/verdict-proxy/verdict/internal/lab/labtest"
	"github.com/verdict-proxy/verdict/internal/system/ipfamily"
)

func testLog(t *testing.T) *slog.Logger { return slog.New(slog.NewTextHandler(t.Output(), nil)) }

// TestCompat: the chains are written, repaired whatever others do, and removed, but not while others jump to them.
func TestCompat(t *testing.T) {
	for _, v := range variants {
		t.Run(v.String(), func(t *testing.T) {
			h := newHost(t)
			c := compatOn(t, h, v)
			for _, f := range ipfamily.All {
				program := program(f) + "-" + v.String()
				keep := func(want bool) {
					t.Helper()
					changed, err := c.Keep(soon(t), f)
					if labtest.Check(t, err); changed != want {
						t.Errorf("%s: changed: %v\n%s", f, changed, labtest.Run(t, h, "", program+"-save", "-t", "nat"))
					}
				}
				before := withoutComments(labtest.Run(t, h, "", program+"-save", "-t", "nat"))
				keep(true)
				keep(false)
				for _, harm := range []string{
					"-F KUBE-MARK-MASQ", "-D KUBE-POSTROUTING 1", "-F POSTROUTING", "-I KUBE-POSTROUTING -j ACCEPT",
				} {
					labtest.Run(t, h, "", program, append([]string{"-w", "5", "-t", "nat"}, strings.Fields(harm)...)...)
					keep(true)
					keep(false)
				}
				// A kubelet that does the same is not fought, and what it made is not removed.
				labtest.Run(t, h, "", program, "-w", "5", "-t", "nat", "-A", "KUBE-MARK-MASQ", "-j", "MARK", "--or-mark", "0x4000")
				keep(false)
				labtest.Run(t, h, "", program, "-w", "5", "-t", "nat", "-D", "KUBE-MARK-MASQ", "1")
				keep(false)
				labtest.Check(t, c.remove(soon(t), f))
				keep(false)
				labtest.Run(t, h, "", program, "-w", "5", "-t", "nat", "-F", "KUBE-MARK-MASQ")
				keep(true)
				labtest.Run(t, h, "", program, "-w", "5", "-t", "nat", "-A", "PREROUTING", "-j", "KUBE-MARK-MASQ")
				labtest.Check(t, c.remove(soon(t), f))
				keep(false)
				labtest.Run(t, h, "", program, "-w", "5", "-t", "nat", "-F", "PREROUTING")
				labtest.Check(t, c.remove(soon(t), f))
				if after := withoutComments(labtest.Run(t, h, "", program+"-save", "-t", "nat")); after != before && before != "" {
					t.Errorf("%s: left:\n%s\nbefore:\n%s", f, after, before)
				}
			}
			labtest.Check(t, c.Remove(soon(t)))
		})
	}
}

func withoutComments(saved string) string {
	var b strings.Builder
	for line := range strings.Lines(saved) {
		if !strings.HasPrefix(line, "#") {
			line, _, _ = strings.Cut(line, " [")
			b.WriteString(strings.TrimSpace(line) + "\n")
		}
	}
	return b.String()
}
