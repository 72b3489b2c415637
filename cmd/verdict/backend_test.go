package main

import (
	"errors"
	"fmt"
	"strings"
	"syscall"
	"testing"

	"github.com/verdict-proxy/verdict/internal/lab/labtest"
	"github.com/verdict-proxy/verdict/internal/proxy/backends"
	"github.com/verdict-proxy/verdict/internal/system/testkit"
)

// restart ends the proxy and starts it with other flags; it waits until the log has a text once more.
func (v *victim) restart(wait string, flags ...string) {
	v.t.Helper()
	if v.keeper != nil {
		labtest.Check(v.t, v.keeper.Process.Signal(syscall.SIGTERM))
		labtest.Check(v.t, v.keeper.Wait())
	}
	before, times := v.flags, strings.Count(v.said(), wait)
	v.flags = append(before[:len(before):len(before)], flags...)
	v.start()
	v.flags = before
	v.wait(wait, times+1)
}

// TestCompat: beside nftables the two chains are kept from the start on, and nothing else; without the flag they go.
func TestCompat(t *testing.T) {
	v := newVictim(t)
	v.flags = append(v.flags, "--keeper=none")
	chains := func() (n int) {
		for _, program := range []string{"iptables-save", "ip6tables-save"} {
			n += strings.Count(labtest.Run(t, v.cluster.Node, "", program, "-t", "nat"), "\n:KUBE-")
		}
		return n
	}
	wait := func(want int) {
		t.Helper()
		what := fmt.Sprintf("there are %d chains", want)
		testkit.Eventually(t, patience, what, func() bool { return chains() == want }, v.said)
	}
	v.restart("all Services are programmed", "--iptables-compat")
	wait(4)
	labtest.Run(t, v.cluster.Node, "", "iptables", "-t", "nat", "-F")
	labtest.Run(t, v.cluster.Node, "", "iptables", "-t", "nat", "-X")
	wait(4)
	v.restart("all Services are programmed")
	wait(0)
	labtest.Check(t, v.keeper.Process.Signal(syscall.SIGTERM))
	labtest.Check(t, v.keeper.Wait())
}

// TestSwitchBackends goes from nftables to iptables and back, under clients that connect all the time and hold
// connections. Not one fails, and of each backend nothing is left once the other one has taken over.
func TestSwitchBackends(t *testing.T) {
	for _, program := range []string{"iptables-nft", "iptables-legacy"} {
		t.Run(program, func(t *testing.T) {
			v := newVictim(t)
			v.flags = append(v.flags, "--keeper=none")
			labtest.Run(t, v.cluster.Node, "", program, "-w", "5", "-t", "mangle", "-N", "KUBE-IPTABLES-HINT")
			v.restart("all Services are programmed")
			stop := v.clients()
			for range 2 {
				v.restart("what=\"the tables of nftables\"", "--backend=iptables")
				if tables := labtest.Run(t, v.cluster.Node, "", "nft", "list", "tables"); strings.Contains(tables, "verdict") {
					t.Errorf("with iptables there are\n%s", tables)
				}
				labtest.Check(t, v.cluster.Node.Do(func() error { // its rules have no digest
					out, err := command("verify")
					if !strings.Contains(out, "right, as far as it was checked:") {
						t.Errorf("verify: %v\n%s", err, out)
					}
					i, err := backends.Inspect(t.Context(), backends.InspectOptions{})
					if err != nil {
						return err
					}
					var printed strings.Builder
					err = errors.Join(i.Print(t.Context(), &printed), i.Close())
					if strings.Count(printed.String(), "\n:KUBE-SERVICES ") < 2 { // one for each family
						t.Errorf("an Inspector prints\n%s", printed.String())
					}
					return err
				}))
				v.restart("what=\"iptables rules")
				for _, family := range []string{program, "ip6" + strings.TrimPrefix(program, "ip")} {
					if left := labtest.Run(t, v.cluster.Node, "", family+"-save", "-t", "nat"); strings.Contains(left, "KUBE-") {
						t.Errorf("with nftables there is\n%s", left)
					}
				}
			}
			stop()
			t.Logf("%d edits; %v", v.edits.Load(), &v.traffic)
			v.traffic.Check(t)
			v.settle()
		})
	}
}
