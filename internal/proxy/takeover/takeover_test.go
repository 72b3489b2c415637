package takeover

import (
	"flag"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/verdict-proxy/verdict/internal/lab"
	"github.com/verdict-proxy/verdict/internal/lab/labtest"
	"github.com/verdict-proxy/verdict/internal/system/ipfamily"
	"github.com/verdict-proxy/verdict/internal/system/netlink"
)

var rounds = flag.Int("rounds", 10, "how often TestNoConnectionIsLost goes to Verdict and back")

func TestMain(m *testing.M) {
	// Test hosts are not this machine: their iptables need not wait for each other, nor for those of the machine.
	os.Setenv("XTABLES_LOCKFILE", filepath.Join(filepath.Dir(os.Args[0]), "xtables.lock"))
	labtest.Main(m)
}

// programs of iptables that a test needs, by variant and family.
func program(t testing.TB, v variant, f ipfamily.Family, what string) string {
	t.Helper()
	name := map[ipfamily.Family]string{ipfamily.IPv4: "iptables", ipfamily.IPv6: "ip6tables"}[f] +
		map[variant]string{nft: "-nft", legacy: "-legacy"}[v] + what
	if _, err := exec.LookPath(name); err != nil {
		t.Fatalf("the tests of takeover need %s: install the package iptables, or run make test, which does", name)
	}
	return name
}

// restore adds rules to those that are there.
func restore(t testing.TB, h *lab.Host, v variant, f ipfamily.Family, rules string) {
	t.Helper()
	labtest.Run(t, h, rules, program(t, v, f, "-restore"), "--noflush", "--counters", "-w")
}

// save gives all rules with their counters. Only tables that are there are looked at: iptables makes the others.
func save(t testing.TB, h *lab.Host, v variant, f ipfamily.Family) string {
	t.Helper()
	var kept []string
	for line := range strings.Lines(labtest.Run(t, h, "", program(t, v, f, "-save"), "--counters")) {
		if !strings.HasPrefix(line, "#") {
			kept = append(kept, line)
		}
	}
	return strings.Join(kept, "")
}

// inside runs f in a host.
func inside(t testing.TB, h *lab.Host, f func() error) {
	t.Helper()
	labtest.Check(t, h.Do(f))
}

// find is Find in a host.
func find(t testing.TB, h *lab.Host) (f *Found) {
	t.Helper()
	inside(t, h, func() (err error) { f, err = Find(t.Context(), Own{}); return err })
	return f
}

// remove removes all that is found in a host, and gives what was found.
func remove(t testing.TB, h *lab.Host) *Found {
	t.Helper()
	f := find(t, h)
	inside(t, h, func() error { return f.Remove(t.Context()) })
	return f
}

// accounts makes the counters that rules of kube-proxy's iptables mode refer to.
func accounts(t testing.TB, h *lab.Host) {
	t.Helper()
	inside(t, h, func() error {
		s, err := dial(unix.NETLINK_NETFILTER)
		if err != nil {
			return err
		}
		defer s.Close()
		for _, name := range []string{"ct_state_invalid_dropped_pkts", "localhost_nps_accepted_pkts"} {
			const newAccount, nameAttr = unix.NFNL_SUBSYS_ACCT << 8, 1
			if err := s.do(netfilter(newAccount, 0), func(w *netlink.Buffer) { w.Text(nameAttr, name) }); err != nil {
				return fmt.Errorf("nfacct %s: %w", name, err)
			}
		}
		return nil
	})
}

func testdata(t testing.TB, name string) string {
	t.Helper()
	b, err := os.ReadFile(filepath.Join("testdata", name))
	labtest.Check(t, err)
	return string(b)
}

// foreign are rules of others: a firewall, what a kubelet makes, a CNI plugin's host ports, and kube-router, whose
// chains have similar names.
const foreign = `
*mangle
:PREROUTING ACCEPT [0:0]
:KUBE-IPTABLES-HINT - [0:0]
:KUBE-KUBELET-CANARY - [0:0]
COMMIT
*filter
:INPUT ACCEPT [7:700]
:FORWARD ACCEPT [0:0]
:OUTPUT ACCEPT [0:0]
:KUBE-FIREWALL - [0:0]
:KUBE-KUBELET-CANARY - [0:0]
:KUBE-POD-FW-ABCDEFGHIJKLMNOP - [0:0]
:MY-WALL - [0:0]
[1:11] -A INPUT -i eth7 -p tcp -m tcp --dport 22 -m comment --comment "kubernetes service portals" -j ACCEPT
[2:22] -A INPUT -j MY-WALL
[0:0] -A INPUT -j KUBE-FIREWALL
[0:0] -A FORWARD -g MY-WALL
[0:0] -A FORWARD -j KUBE-POD-FW-ABCDEFGHIJKLMNOP
[0:0] -A OUTPUT -j KUBE-FIREWALL
[0:0] -A KUBE-POD-FW-ABCDEFGHIJKLMNOP -m comment --comment "goes on"
[0:0] -A KUBE-POD-FW-ABCDEFGHIJKLMNOP -j RETURN
[3:33] -A MY-WALL -m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT
[0:0] -A MY-WALL -i eth9 -m limit --limit 3/sec -j DROP
COMMIT
*nat
:PREROUTING ACCEPT [0:0]
:OUTPUT ACCEPT [0:0]
:POSTROUTING ACCEPT [0:0]
:CNI-HOSTPORT-DNAT - [0:0]
:KUBE-KUBELET-CANARY - [0:0]
:KUBE-MARK-DROP - [0:0]
:MINE - [0:0]
[4:44] -A PREROUTING -m addrtype --dst-type LOCAL -j CNI-HOSTPORT-DNAT
[0:0] -A OUTPUT -j MINE
[0:0] -A KUBE-MARK-DROP -j MARK --set-xmark 0x8000/0x8000
[0:0] -A MINE -p udp -m udp --dport 99 -j RETURN
COMMIT
`

// rulesOf gives the iptables capture for a family: it holds nothing that IPv6 does not have but addresses.
func rulesOf(f ipfamily.Family, rules string) string {
	if f == ipfamily.IPv4 {
		return rules
	}
	v4 := regexp.MustCompile(`\b(\d+)\.(\d+)\.(\d+)\.(\d+)\b(/\d+)?`)
	rules = v4.ReplaceAllStringFunc(rules, func(a string) string {
		m := v4.FindStringSubmatch(a)
		text := fmt.Sprintf("fd00:%s:%s:%s::%s", m[1], m[2], m[3], m[4])
		if m[5] != "" {
			text += "/128"
		}
		return text
	})
	rules = strings.ReplaceAll(rules, "icmp-port-unreachable", "icmp6-port-unreachable")
	rules = strings.ReplaceAll(rules, "--mask fd00:255:255:255::255", "--mask ffff:ffff:ffff:ffff:ffff:ffff:ffff:ffff")
	return regexp.MustCompile(`\[?(fd00:[\d:]+)\]?(:\d+)\n`).ReplaceAllString(rules, "[$1]$2\n")
}

// TestCaptures removes what a real kube-proxy 1.36 wrote, and nothing else: what iptables-save says afterwards is what
// it said before, with all counters.
func TestCaptures(t *testing.T) {
	for _, v := range []variant{nft, legacy} {
		for _, f := range ipfamily.All {
			t.Run(fmt.Sprintf("%s %s", v, f), func(t *testing.T) {
				h := labtest.NewHost(t, labtest.NewNet(t), "node")
				accounts(t, h)
				restore(t, h, v, f, foreign)
				before := save(t, h, v, f)
				if found := find(t, h); !found.Empty() || found.Kept() != nil || found.HasServices() {
					t.Fatalf("without a kube-proxy: found %q, kept %q", found.Summary(), found.Kept())
				}
				// kube-proxy puts its jumps before what is there, and a copy of KUBE-FIREWALL's rule is not taken for ours.
				capture := rulesOf(f, testdata(t, "iptables.txt"))
				capture = regexp.MustCompile(`(?m)^-A .* -j KUBE-FIREWALL\n|^-A KUBE-FIREWALL .*\n|^:KUBE-FIREWALL .*\n`).
					ReplaceAllString(capture, "")
				capture = regexp.MustCompile(`(?m)^-A ([A-Z]+ )`).ReplaceAllString(capture, "-I $1")
				capture = regexp.MustCompile(`(?m)^:[A-Z]+ ACCEPT .*\n`).ReplaceAllString(capture, "")
				restore(t, h, v, f, capture)
				restore(t, h, v, f, "*filter\n:INPUT ACCEPT [7:700]\nCOMMIT\n") // which iptables-restore itself forgets
				found := remove(t, h)
				want := fmt.Sprintf(
					"iptables rules (%s, %s): 25 chains and 12 rules that jump to them, in the tables nat, filter, mangle",
					v,
					f,
				)
				if s := found.Summary(); !found.HasServices() || len(s) != 1 || s[0] != want {
					t.Errorf("found %q, want %q", s, want)
				}
				if after := save(t, h, v, f); after != before {
					t.Errorf("%s\n\nbefore:\n%s\nafter:\n%s", labtest.FirstDifference(after, before), before, after)
				}
				if again := find(t, h); !again.Empty() || again.Kept() != nil {
					t.Errorf("afterwards there are %q, kept %q", again.Summary(), again.Kept())
				}
			})
		}
	}
	t.Run("nftables", func(t *testing.T) {
		h := labtest.NewHost(t, labtest.NewNet(t), "node")
		const others = "table ip kube-proxy-not { chain c { type nat hook prerouting priority -100; }; }\ntable inet " +
			"kube-proxy { }\n"
		labtest.Run(t, h, others, "nft", "-f", "-")
		before := labtest.Run(t, h, "", "nft", "list", "ruleset")
		labtest.Run(t, h, testdata(t, "nftables.nft"), "nft", "-f", "-")
		found := remove(t, h)
		if s := found.Summary(); !slices.Equal(s,
			[]string{"nftables table kube-proxy (IPv4)", "nftables table kube-proxy (IPv6)"}) {
			t.Errorf("found %q", s)
		}
		if after := labtest.Run(t, h, "", "nft", "list", "ruleset"); after != before {
			t.Errorf("before:\n%s\nafter:\n%s", before, after)
		}
	})
}
