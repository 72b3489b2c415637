package takeover

import (
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/verdict-proxy/verdict/internal/lab"
	"github.com/verdict-proxy/verdict/internal/lab/labtest"
	"github.com/verdict-proxy/verdict/internal/system/ipfamily"
	"github.com/verdict-proxy/verdict/internal/system/testkit"
)

// eachVariant runs a test for both iptables and both families, each on a host of its own.
func eachVariant(t *testing.T, test func(t *testing.T, h *lab.Host, v variant, f ipfamily.Family)) {
	for _, v := range []variant{nft, legacy} {
		for _, f := range ipfamily.All {
			t.Run(fmt.Sprintf("%s %s", v, f), func(t *testing.T) {
				h := labtest.NewHost(t, labtest.NewNet(t), "node")
				accounts(t, h)
				test(t, h, v, f)
			})
		}
	}
}

// TestWhatOthersUseStays adds rules of others to what a kube-proxy wrote that need some of it, or turn away what some
// of it accepts.
func TestWhatOthersUseStays(t *testing.T) {
	for _, c := range []struct {
		name, rules string
		// left are the lines of iptables-save with KUBE in them that are to be left, and kept what is to be said of them.
		left []string
		kept []string
	}{
		{
			name: "a CNI plugin marks host ports to masquerade them",
			rules: `*nat
:CNI-DN-1234 - [0:0]
-A PREROUTING -j CNI-DN-1234
-A CNI-DN-1234 -p tcp --dport 8080 -j KUBE-MARK-MASQ
COMMIT
`,
			left: []string{
				":KUBE-MARK-MASQ -", ":KUBE-POSTROUTING -",
				`-A POSTROUTING -m comment --comment "kubernetes postrouting rules" -j KUBE-POSTROUTING`,
				"-A CNI-DN-1234 -p tcp -m tcp --dport 8080 -j KUBE-MARK-MASQ",
				"-A KUBE-MARK-MASQ -j MARK --set-xmark 0x4000/0x4000",
				"-A KUBE-POSTROUTING -m mark ! --mark 0x4000/0x4000 -j RETURN",
				"-A KUBE-POSTROUTING -j MARK --set-xmark 0x4000/0x0",
				`-A KUBE-POSTROUTING -m comment --comment "kubernetes service traffic requiring SNAT" -j MASQUERADE --random-fully`,
			},
			kept: []string{
				"chain KUBE-MARK-MASQ of table nat (VARIANT): a rule in chain CNI-DN-1234, which is not kube-proxy's, jumps to it",
				"chain KUBE-POSTROUTING of table nat (VARIANT): it masquerades what KUBE-MARK-MASQ marks",
			},
		},
		{
			name: "a rule of somebody's leads to an endpoint", // and it masquerades hairpins
			rules: `*nat
-A OUTPUT -m comment --comment mine -g KUBE-SEP-IMYJU5OJNSODHMLN
COMMIT
`,
			left: []string{
				":KUBE-MARK-MASQ -", ":KUBE-POSTROUTING -", ":KUBE-SEP-IMYJU5OJNSODHMLN -",
				`-A OUTPUT -m comment --comment mine -g KUBE-SEP-IMYJU5OJNSODHMLN`,
				`-A POSTROUTING -m comment --comment "kubernetes postrouting rules" -j KUBE-POSTROUTING`,
				"-A KUBE-MARK-MASQ -j MARK --set-xmark 0x4000/0x4000",
				"-A KUBE-POSTROUTING -m mark ! --mark 0x4000/0x4000 -j RETURN",
				"-A KUBE-POSTROUTING -j MARK --set-xmark 0x4000/0x0",
				`-A KUBE-POSTROUTING -m comment --comment "kubernetes service traffic requiring SNAT" -j MASQUERADE --random-fully`,
				`-A KUBE-SEP-IMYJU5OJNSODHMLN -s ADDRESS -m comment --comment "default/plain:http" -j KUBE-MARK-MASQ`,
				`-A KUBE-SEP-IMYJU5OJNSODHMLN -p tcp -m comment --comment "default/plain:http" -m tcp -j DNAT --to-destination ` +
					`ADDRESS`,
			},
			kept: []string{
				"chain KUBE-MARK-MASQ of table nat (VARIANT): chain KUBE-SEP-IMYJU5OJNSODHMLN, which stays, jumps to it",
				"chain KUBE-POSTROUTING of table nat (VARIANT): it masquerades what KUBE-MARK-MASQ marks",
				"chain KUBE-SEP-IMYJU5OJNSODHMLN of table nat (VARIANT): a rule in chain OUTPUT, which is not kube-proxy's, " +
					"jumps to it",
			},
		},
		{
			name:  "a firewall that forwards nothing by default",
			rules: "*filter\n:FORWARD DROP [0:0]\nCOMMIT\n",
			left:  forwardLeft,
			kept:  forwardKept,
		},
		{
			name:  "a firewall whose last rule rejects the rest",
			rules: "*filter\n-A FORWARD -j REJECT\n-A INPUT -s fe80::1 -j DROP\nCOMMIT\n",
			left:  forwardLeft,
			kept:  forwardKept,
		},
		{
			name: "a firewall that lets nothing in by default",
			rules: `*filter
:INPUT DROP [0:0]
-A KUBE-NODEPORTS -p tcp --dport 31000 -j ACCEPT
COMMIT
`,
			left: []string{":KUBE-NODEPORTS -",
				`-A INPUT -m comment --comment "kubernetes health check service ports" -j KUBE-NODEPORTS`,
				"-A KUBE-NODEPORTS -p tcp -m tcp --dport 31000 -j ACCEPT"},
			kept: []string{"chain KUBE-NODEPORTS of table filter (VARIANT): chain INPUT drops what no rule accepts, and " +
				"KUBE-NODEPORTS accepts health checks"},
		},
	} {
		t.Run(c.name, func(t *testing.T) {
			eachVariant(t, func(t *testing.T, h *lab.Host, v variant, f ipfamily.Family) {
				rules := c.rules
				if f == ipfamily.IPv4 {
					rules = strings.ReplaceAll(rules, "fe80::1", "192.0.2.1")
				}
				capture := regexp.MustCompile(`(?m)^.*KUBE-FIREWALL.*\n`).ReplaceAllString(testdata(t, "iptables.txt"), "")
				restore(t, h, v, f, rulesOf(f, capture))
				restore(t, h, v, f, rules)
				found := remove(t, h)
				var kept []string
				for _, k := range c.kept {
					kept = append(kept, strings.ReplaceAll(k, "VARIANT", fmt.Sprintf("%s, %s", v, f)))
				}
				if got := found.Kept(); !slices.Equal(got, kept) {
					t.Errorf("kept %q, want %q", got, kept)
				}
				var left []string
				for line := range strings.Lines(save(t, h, v, f)) {
					if strings.Contains(line, "KUBE") {
						line = regexp.MustCompile(`^\[.*?\] | \[.*?\]\n$|\n$`).ReplaceAllString(line, "")
						left = append(left, regexp.MustCompile(`\[?(\d+\.|fd00:)[0-9.:/\]]+`).ReplaceAllString(line, "ADDRESS"))
					}
				}
				slices.Sort(left)
				if want := slices.Sorted(slices.Values(c.left)); !slices.Equal(left, want) {
					t.Errorf("left are\n%s\nwant\n%s", strings.Join(left, "\n"), strings.Join(want, "\n"))
				}
				if again := find(t, h); !again.Empty() || again.HasServices() {
					t.Errorf("afterwards there are %q, kept %q", again.Summary(), again.Kept())
				}
			})
		})
	}
}

var (
	forwardLeft = []string{
		":KUBE-FORWARD -",
		`-A FORWARD -m comment --comment "kubernetes forwarding rules" -j KUBE-FORWARD`,
		"-A KUBE-FORWARD -m conntrack --ctstate INVALID -m nfacct --nfacct-name  ct_state_invalid_dropped_pkts -j DROP",
		`-A KUBE-FORWARD -m comment --comment "kubernetes forwarding rules" -m mark --mark 0x4000/0x4000 -j ACCEPT`,
		`-A KUBE-FORWARD -m comment --comment "kubernetes forwarding conntrack rule" -m conntrack --ctstate ` +
			`RELATED,ESTABLISHED -j ACCEPT`,
	}
	forwardKept = []string{"chain KUBE-FORWARD of table filter (VARIANT): chain FORWARD drops what no rule accepts, and " +
		"KUBE-FORWARD accepts established connections"}
)

// TestOldKubelet leaves the two chains that a kubelet before Kubernetes 1.28 makes itself, if there are no others.
func TestOldKubelet(t *testing.T) {
	const rules = `*nat
:KUBE-MARK-MASQ - [0:0]
:KUBE-POSTROUTING - [0:0]
:KUBE-MARK-DROP - [0:0]
-A POSTROUTING -m comment --comment "kubernetes postrouting rules" -j KUBE-POSTROUTING
-A KUBE-MARK-MASQ -j MARK --set-xmark 0x4000/0x4000
COMMIT
`
	eachVariant(t, func(t *testing.T, h *lab.Host, v variant, f ipfamily.Family) {
		restore(t, h, v, f, rules)
		before := save(t, h, v, f)
		if found := remove(t, h); !found.Empty() || found.Kept() != nil {
			t.Errorf("found %q, kept %q", found.Summary(), found.Kept())
		}
		if after := save(t, h, v, f); after != before {
			t.Errorf("before:\n%s\nafter:\n%s", before, after)
		}
	})
}

// TestRandomRules removes kube-proxy's chains from random rules of many kinds, and compares what is left with what
// iptables-save says less the lines that are to go, worked out here from its text.
func TestRandomRules(t *testing.T) {
	n := 15
	if testing.Short() {
		n = 4
	}
	eachVariant(t, func(t *testing.T, h *lab.Host, v variant, f ipfamily.Family) {
		random := rand.New(rand.NewPCG(uint64(v), uint64(f.NFProto())))
		for range n {
			rules := randomRules(random)
			labtest.Run(t, h, rules, program(t, v, f, "-restore"), "--counters", "-w") // flushes what was there
			before := save(t, h, v, f)
			found := remove(t, h)
			want := withoutProxy(before)
			if got := save(t, h, v, f); got != want {
				t.Fatalf("%s\nfound %q, kept:\n%s\nrules:\n%s\ngot:\n%s", labtest.FirstDifference(got, want), found.Summary(),
					strings.Join(found.Kept(), "\n"), before, got)
			}
			if again := find(t, h); !again.Empty() {
				t.Fatalf("left are %q", again.Summary())
			}
		}
	})
}

// randomRules makes up chains that lead to each other without cycles: a chain leads only to those after it.
func randomRules(random *rand.Rand) string {
	hash := func() string {
		b := make([]byte, 16)
		for i := range b {
			b[i] = "ABCDEFGHIJKLMNOPQRSTUVWXYZ234567"[random.IntN(32)]
		}
		return string(b)
	}
	var out strings.Builder
	for _, table := range []struct {
		name    string
		builtin []string
	}{
		{"nat", []string{"PREROUTING", "INPUT", "OUTPUT", "POSTROUTING"}},
		{"filter", []string{"INPUT", "FORWARD", "OUTPUT"}},
		{"mangle", []string{"PREROUTING", "INPUT", "FORWARD", "OUTPUT", "POSTROUTING"}},
	} {
		var chains []string
		for _, name := range proxyChains[table.name] {
			if random.IntN(3) > 0 {
				chains = append(chains, name)
			}
		}
		if table.name == "nat" {
			for range random.IntN(12) {
				chains = append(chains, "KUBE-"+[]string{"SVC", "SVL", "SEP", "EXT", "FW", "XLB", "POD"}[random.IntN(7)]+"-"+hash())
			}
		}
		for i := range random.IntN(6) {
			chains = append(chains, fmt.Sprintf("OTHER-%d", i))
		}
		random.Shuffle(len(chains), func(a, b int) { chains[a], chains[b] = chains[b], chains[a] })
		fmt.Fprintf(&out, "*%s\n", table.name)
		for _, c := range table.builtin {
			fmt.Fprintf(&out, ":%s ACCEPT [%d:%d]\n", c, random.IntN(9), random.IntN(900))
		}
		for _, c := range chains {
			fmt.Fprintf(&out, ":%s - [0:0]\n", c)
		}
		for i, c := range slices.Concat(table.builtin, chains) {
			for range random.IntN(6) {
				fmt.Fprintf(&out, "[%d:%d] -A %s%s\n", random.IntN(9), random.IntN(900), c,
					randomRule(random, chains[min(max(0, i-len(table.builtin)+1), len(chains)):],
						i < len(table.builtin), table.name == "nat"))
			}
		}
		out.WriteString("COMMIT\n")
	}
	return out.String()
}

func randomRule(random *rand.Rand, targets []string, builtin, nat bool) string {
	var r string
	for _, match := range []string{" -i eth7", " -p tcp -m tcp --dport 80", " -m mark --mark 0x4000/0x4000",
		" -m statistic --mode random --probability 0.5", ` -m comment --comment "some words"`} {
		if random.IntN(3) == 0 && !(builtin && strings.Contains(match, "-i ")) {
			r += match
		}
	}
	switch n := random.IntN(8); {
	case n < 3 && len(targets) > 0:
		to := targets[random.IntN(len(targets))]
		switch {
		case builtin && random.IntN(4) > 0 && strings.HasPrefix(to, "KUBE-"):
			return r + ` -m comment --comment "kubernetes service portals" -j ` + to
		case random.IntN(8) > 0 && strings.HasPrefix(to, "KUBE-") && builtin: // most others leave kube-proxy's chains alone
			return r
		}
		return r + []string{" -j ", " -g "}[random.IntN(2)] + to
	case n < 5:
		return r + " -j RETURN"
	case n < 6 && !nat:
		return r + " -j DROP"
	case n < 7:
		return r + " -j MARK --set-xmark 0x1/0x1"
	}
	return r
}

// line of iptables-save: a chain, or a rule with its chain and where it leads to.
var line = regexp.MustCompile(`^(?::(\S+) .*|\[\d+:\d+\] -A (\S+)(?:.* -[jg] (\S+).*|.*))\n$`)

// drops matches a rule that drops everything.
var drops = regexp.MustCompile(`-A (FORWARD|INPUT)( -m comment --comment "[^"]*")? -j DROP\n`)

// withoutProxy takes the lines out of iptables-save's text that are to go.
func withoutProxy(text string) string {
	var out strings.Builder
	for _, table := range strings.SplitAfter(text, "COMMIT\n") {
		name, _, _ := strings.Cut(strings.TrimPrefix(table, "*"), "\n")
		proxys := func(c string) bool {
			return strings.HasPrefix(c, "KUBE-") && (slices.Contains(proxyChains[name], c) || name == "nat" &&
				regexp.MustCompile(`^KUBE-(SVC|SVL|SEP|EXT|FW|XLB)-`).MatchString(c))
		}
		stays := map[string]bool{}
		any := false
		for l := range strings.Lines(table) {
			m := line.FindStringSubmatch(l)
			any = any || m != nil && proxys(m[1]) && !(name == "nat" && (m[1] == "KUBE-MARK-MASQ" || m[1] == "KUBE-POSTROUTING"))
		}
		jump := regexp.MustCompile(`-A [A-Z]+ .*--comment "kubernetes service portals"`).MatchString
		for again := any; again; {
			before := len(stays)
			for l := range strings.Lines(table) {
				if m := line.FindStringSubmatch(l); m != nil && proxys(m[3]) && (stays[m[2]] || !proxys(m[2]) && !jump(l)) {
					stays[m[3]] = true
				}
				if m := drops.FindStringSubmatch(l); m != nil && name == "filter" {
					for _, c := range map[string][]string{"FORWARD": {"KUBE-FORWARD"},
						"INPUT": {"KUBE-NODEPORTS", "KUBE-NODE-PORT"}}[m[1]] {
						if strings.Contains(table, ":"+c+" ") {
							stays[c] = true
						}
					}
				}
			}
			if stays["KUBE-MARK-MASQ"] && strings.Contains(table, ":KUBE-POSTROUTING ") {
				stays["KUBE-POSTROUTING"] = true
			}
			again = len(stays) > before
		}
		for l := range strings.Lines(table) {
			m := line.FindStringSubmatch(l)
			goes := func(c string) bool { return any && proxys(c) && !stays[c] }
			if m == nil || !goes(m[1]) && !goes(m[2]) && !goes(m[3]) {
				out.WriteString(l)
			}
		}
	}
	return out.String()
}

// TestLookingMakesNothing looks at a host without anything, and at one where there is only somebody else's legacy
// iptables: no table comes into being by it, and the kernel loads nothing.
func TestLookingMakesNothing(t *testing.T) {
	h := labtest.NewHost(t, labtest.NewNet(t), "node")
	seen := func() string {
		modules, _ := os.ReadFile("/proc/modules")
		var names []string
		for line := range strings.Lines(string(modules)) {
			names = append(names, strings.Fields(line)[0])
		}
		return labtest.Run(t, h, "", "sh", "-c", "cat /proc/self/net/ip*_tables_names; nft list ruleset; ip link") +
			strings.Join(names, " ")
	}
	for _, rules := range []string{"", "*filter\nCOMMIT\n"} {
		if rules != "" {
			restore(t, h, legacy, ipfamily.IPv4, rules)
		}
		before := seen()
		if found := remove(t, h); !found.Empty() || len(found.Summary()) != 0 || found.HasServices() {
			t.Errorf("found %q", found.Summary())
		}
		if after := seen(); after != before {
			t.Errorf("before:\n%s\nafter:\n%s", before, after)
		}
	}
}

// TestProcesses finds a program called kube-proxy, in the same network namespace only.
func TestProcesses(t *testing.T) {
	n := labtest.NewNet(t)
	h, other := labtest.NewHost(t, n, "node"), labtest.NewHost(t, n, "other")
	sleep, err := exec.LookPath("sleep")
	labtest.Check(t, err)
	path := filepath.Join(t.TempDir(), "kube-proxy")
	text, err := os.ReadFile(sleep)
	labtest.Check(t, err)
	labtest.Check(t, os.WriteFile(path, text, 0o755))
	c := h.Command(path, "100")
	labtest.Check(t, c.Start())
	defer func() { _ = c.Process.Kill(); _ = c.Wait() }()
	testkit.Eventually(t, time.Minute, "its name", func() bool { return len(find(t, h).Running()) > 0 })
	if got := find(t, h).Running(); !slices.Equal(got, []int{c.Process.Pid}) {
		t.Errorf("found %v, want %d", got, c.Process.Pid)
	}
	if got := find(t, other).Running(); got != nil {
		t.Errorf("elsewhere found %v", got)
	}
}
