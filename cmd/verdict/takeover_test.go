package main

import (
	"bytes"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/verdict-proxy/verdict/internal/lab"
	"github.com/verdict-proxy/verdict/internal/lab/labtest"
	"github.com/verdict-proxy/verdict/internal/proxy/takeover"
)

// callTakeover runs "verdict takeover" inside a host and gives what it says.
func callTakeover(t *testing.T, h *lab.Host, args ...string) (out string, err error) {
	t.Helper()
	var b bytes.Buffer
	err = h.Do(func() error {
		cmd := newTakeover()
		cmd.SetArgs(append([]string{}, args...)) // nil would be those of the test program
		cmd.SetOut(&b)
		cmd.SilenceUsage, cmd.SilenceErrors = true, true
		return cmd.ExecuteContext(t.Context())
	})
	return b.String(), err
}

func TestTakeoverCommand(t *testing.T) {
	h := labtest.NewHost(t, labtest.NewNet(t), "node")
	const nothing = "kube-proxy left nothing to remove\n"
	if out, err := callTakeover(t, h); err != nil || out != nothing {
		t.Errorf("on an empty host: %q, %v", out, err)
	}
	labtest.Run(t, h, "table ip kube-proxy { }\ntable ip6 kube-proxy { }\n", "nft", "-f", "-")
	const summary = "VERB: nftables table kube-proxy (IPv4)\nVERB: nftables table kube-proxy (IPv6)\n"
	const notAsked = "overlap: not looked for: --in-cluster, --kubeconfig FILE or --from PATH say which ranges Services " +
		"have\n"
	out, err := callTakeover(t, h, "--dry-run")
	if err != nil || out != strings.ReplaceAll(summary, "VERB", "found")+notAsked {
		t.Errorf("dry run: %q, %v", out, err)
	}
	if _, err := callTakeover(t, h); err == nil || !strings.Contains(err.Error(), "start verdict run first") {
		t.Errorf("without Verdict's tables: %v", err)
	}
	writeTables(t, h)
	if out, err := callTakeover(t, h); err != nil || out != strings.ReplaceAll(summary, "VERB", "removed") {
		t.Errorf("with them: %q, %v", out, err)
	}
	if out, err := callTakeover(t, h); err != nil || out != nothing {
		t.Errorf("afterwards: %q, %v", out, err)
	}
	var remark bytes.Buffer
	labtest.Check(t, h.Do(func() error { warnNoRules(t.Context(), &remark); return nil }))
	if !strings.Contains(remark.String(), "Services are not programmed") {
		t.Errorf("cleanup says %q", remark.String())
	}
}

// TestRunTakesOver starts a proxy beside what a kube-proxy left: once its own rules are in, the others are gone,
// unless they are to stay.
func TestRunTakesOver(t *testing.T) {
	for mode, want := range map[takeover.Mode]string{takeover.Auto: "removed kube-proxy's rules",
		takeover.Never: "rules are kept, as configured"} {
		t.Run(string(mode), func(t *testing.T) {
			r := &tuned{
				t:    t,
				host: labtest.NewHost(t, labtest.NewNet(t), "node"),
				file: filepath.Join(t.TempDir(), "config.conf"),
			}
			labtest.Check(t, os.Symlink("..data/config.conf", r.file))
			labtest.Run(t, r.host, "table ip kube-proxy { }\n", "nft", "-f", "-")
			labtest.Run(
				t,
				r.host,
				"*nat\n:KUBE-SERVICES - [0:0]\n-A PREROUTING -m comment --comment \"kubernetes service portals\" -j "+
					"KUBE-SERVICES\nCOMMIT\n",
				"iptables-nft-restore",
				"--noflush",
			)
			r.configure(
				"mode: nftables\n---\napiVersion: verdict/v1alpha1\nkind: VerdictConfiguration\ntakeover: " + string(mode) + "\n",
			)
			r.start()
			defer r.stop()
			r.wait(want, 1)
			listing := labtest.Nfts(t)[0].List(t, r.host)
			for _, text := range []string{"table ip kube-proxy", "KUBE-SERVICES"} {
				if left := strings.Contains(listing, text); left != (mode == takeover.Never) {
					t.Errorf("%s is there: %v\n%s", text, left, listing)
				}
			}
			if !strings.Contains(listing, "table ip verdict") {
				t.Errorf("ours is not there:\n%s", listing)
			}
		})
	}
}
