package config

import (
	"bytes"
	"net/netip"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/spf13/pflag"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/serializer"
	"k8s.io/kube-proxy/config/v1alpha1"
	"sigs.k8s.io/yaml"

	"github.com/verdict-proxy/verdict/internal/system/sysctl"
	"github.com/verdict-proxy/verdict/internal/system/yamltree"
	"github.com/verdict-proxy/verdict/sync/dataplane"
	"github.com/verdict-proxy/verdict/sync/snapshot"
)

// parse gives the flags of a command line.
func parse(t *testing.T, args ...string) *Flags {
	t.Helper()
	f := &Flags{}
	fs := pflag.NewFlagSet("run", pflag.ContinueOnError)
	f.Add(fs)
	if err := fs.Parse(args); err != nil {
		t.Fatal(err)
	}
	return f
}

func prefixes(texts ...string) (out []netip.Prefix) {
	for _, s := range texts {
		out = append(out, netip.MustParsePrefix(s))
	}
	return out
}

// TestKubeadmWrites: testdata/kubeadm.conf is what kubeadm makes of a new cluster: three fields that it sets, and all
// others as zeros.
func TestKubeadmWrites(t *testing.T) {
	c := v1alpha1.KubeProxyConfiguration{
		BindAddress:  "0.0.0.0",
		ClusterCIDR:  "10.244.0.0/16",
		FeatureGates: map[string]bool{},
	}
	c.APIVersion, c.Kind = kubeProxyVersion, kubeProxyKind
	c.ClientConnection.Kubeconfig = "/var/lib/kube-proxy/kubeconfig.conf"
	want, err := yaml.Marshal(c)
	if err != nil {
		t.Fatal(err)
	}
	if got, err := os.ReadFile("testdata/kubeadm.conf"); err != nil || string(got) != string(want) {
		t.Errorf("%v: it should be\n%s", err, want)
	}
}

// TestKubeadm: the file that kubeadm 1.37 writes works as it is, and what differs from kube-proxy is said.
func TestKubeadm(t *testing.T) {
	s, problems, err := Load("testdata/kubeadm.conf", parse(t, "--hostname-override=Node-1"), nil)
	if err != nil {
		t.Fatal(err)
	}
	want := dataplane.Config{
		NodeName: "node-1", LocalhostNodePorts: true, NodePortAddresses: prefixes("0.0.0.0/0", "::/0"),
		DetectLocal: dataplane.DetectLocal{ClusterCIDRs: prefixes("10.244.0.0/16")},
		IPVS:        dataplane.IPVS{Mode: dataplane.IPVSAuto, Default: dataplane.Scheduling{Scheduler: "rr"}},

		PingServices: true, RejectUnusedPorts: true, ClientAddress: dataplane.KeepNone,
	}
	want.SecondChance, _ = snapshot.ParseSecondChance(DefaultSecondChance)
	if !reflect.DeepEqual(s.Policy, want) {
		t.Errorf("it decides %+v; want %+v", s.Policy, want)
	}
	if s.Client.Kubeconfig != "/var/lib/kube-proxy/kubeconfig.conf" || s.MinSyncPeriod != 0 ||
		s.SyncPeriod != 30*time.Second ||
		s.Healthz.String() != "0.0.0.0:10256" ||
		s.Metrics.String() != "127.0.0.1:10249" ||
		s.OOMScoreAdj != -999 {
		t.Errorf("it gives %+v", s)
	}
	wantText := "testdata/kubeadm.conf:58: nodePortAddresses: it is not set, which in mode iptables (the mode is not " +
		"set) means that " +
		"node ports answer at all addresses of this host; [primary] would be those of its Node"
	wantMode := "testdata/kubeadm.conf:52: mode: it is not set, which means iptables; " +
		"from kube-proxy 1.40 on it means nftables"
	if got := texts(problems); !slices.Equal(got, []string{wantMode, wantText}) {
		t.Errorf("it says %s", strings.Join(got, "\n"))
	}
}

// TestBroken: each broken file gets the messages beside it, and what is left of it, in testdata/broken.
func TestBroken(t *testing.T) {
	files, err := filepath.Glob("testdata/broken/*.yaml")
	if err != nil || len(files) < 10 {
		t.Fatalf("%d files, %v", len(files), err)
	}
	for _, file := range files {
		text, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		var got strings.Builder
		_, problems, err := load(filepath.Base(file), text, nil, nil)
		if err != nil {
			got.WriteString("it ends: " + err.Error() + "\n")
		}
		for _, p := range problems {
			got.WriteString([...]string{"note: ", "warning: ", "bad: "}[p.Severity] + p.Error() + "\n")
		}
		golden := strings.TrimSuffix(file, "yaml") + "txt"
		if *update {
			if err := os.WriteFile(golden, []byte(got.String()), 0o644); err != nil {
				t.Fatal(err)
			}
		}
		want, err := os.ReadFile(golden)
		if err != nil || got.String() != string(want) {
			t.Errorf("%s: it says\n%swant\n%s", file, got.String(), want)
		}
	}
}

// TestOneBadRange: one malformed range loses nothing else, at the start and while running.
func TestOneBadRange(t *testing.T) {
	const file = head + "mode: nftables\nclusterCIDR: 10.244.0.0/16\nnodePortAddresses:\n- 10.0.0.0/8\n- " +
		"192.168.0.0/33\n- fd00::/8\n"
	s, said := loadText(t, file)
	if want := prefixes("10.0.0.0/8", "fd00::/8"); !slices.Equal(s.Policy.NodePortAddresses, want) ||
		len(s.Policy.DetectLocal.ClusterCIDRs) != 1 {
		t.Errorf("it decides %+v", s.Policy)
	}
	want := `f:7: nodePortAddresses[1]: "192.168.0.0/33" is not an address range such as 10.244.0.0/16; it is ignored`
	if !slices.Equal(said, []string{want}) {
		t.Errorf("it says %s", strings.Join(said, "\n"))
	}

	before, _ := loadText(t, strings.Replace(strings.Replace(file, "/33", "/16", 1), "10.244", "10.245", 1))
	s, problems, err := load("f", []byte(file), nil, before)
	if err != nil || !slices.Equal(s.Policy.NodePortAddresses, before.Policy.NodePortAddresses) ||
		s.Policy.DetectLocal.ClusterCIDRs[0] != prefixes("10.244.0.0/16")[0] {
		t.Errorf("while running it decides %+v, %v", s.Policy, err)
	}
	want = strings.Replace(want, "it is ignored", `it stays ["10.0.0.0/8","192.168.0.0/16","fd00::/8"]`, 1)
	if got := texts(problems); !slices.Equal(got, []string{want}) {
		t.Errorf("while running it says %s", strings.Join(got, "\n"))
	}
}

// TestNothingOpens: a list of which nothing is left closes what it was about. Only one that nobody wrote has the
// default.
func TestNothingOpens(t *testing.T) {
	for text, want := range map[string][]netip.Prefix{
		"":                                                    nil,
		"nodePortAddresses: []\n":                             nil,
		"nodePortAddresses: [primary]\n":                      nil,
		"nodePortAddresses: [10.0.0.0]\n":                     {{}},
		"nodePortAddresses: [x, 10.0.0.0/8]\n":                prefixes("10.0.0.0/8"),
		"nodePortAddresses: [primary, 10.0.0.0/8]\n":          prefixes("10.0.0.0/8"),
		"nodePortAddresses: [\"::ffff:10.0.0.0/104\"]\n":      prefixes("10.0.0.0/8"),
		"nodePortAddresses: [\"::ffff:10.0.0.0/129\"]\n":      {{}},
		"nodePortAddresses: [010.000.000.001/8, \"::1/128\"]": prefixes("10.0.0.0/8", "::1/128"),
	} {
		s, _ := loadText(t, head+"mode: nftables\n"+text)
		if !slices.Equal(s.Policy.NodePortAddresses, want) {
			t.Errorf("%q: %v; want %v", text, s.Policy.NodePortAddresses, want)
		}
	}
}

// TestNodePortKeywords: keywords stand in a list with ranges and with each other, as in kube-proxy 1.37.
func TestNodePortKeywords(t *testing.T) {
	v4, v6 := prefixes("0.0.0.0/0", "127.0.0.0/8"), prefixes("::/0", "::1/128")
	for _, row := range []struct {
		list    string
		ranges  []netip.Prefix
		primary bool
		said    string
	}{
		{"primary", nil, true, ""},
		{"all", []netip.Prefix{v4[0], v6[0]}, false, ""},
		{"localhost", []netip.Prefix{v4[1], v6[1]}, false, ""},
		{"localhost, 10.0.0.0/8, primary", append([]netip.Prefix{v4[1], v6[1]}, prefixes("10.0.0.0/8")...), true, ""},
		{"primary, all", []netip.Prefix{v4[0], v6[0]}, true, ""},
		{"primary, primary", nil, true, `nodePortAddresses[1]: "primary" is listed twice; it is ignored`},
		{"primary, localhosts", nil, true,
			`nodePortAddresses[1]: "localhosts" is not an address range such as 10.244.0.0/16, ` +
				`nor one of primary, localhost, all; it is ignored`},
		{"Primary", []netip.Prefix{{}}, false, "nodePortAddresses: no valid entry is left: node ports answer nowhere"},
	} {
		for _, mode := range []string{modeIPTables, modeIPVS, modeNFTables} {
			s, said := loadText(t, head+"mode: "+mode+"\nnodePortAddresses: ["+row.list+"]\n")
			if p := s.Policy; !slices.Equal(p.NodePortAddresses, row.ranges) || p.NodePortPrimary != row.primary {
				t.Errorf("%s, mode %s: %v, primary %v", row.list, mode, p.NodePortAddresses, p.NodePortPrimary)
			}
			text := strings.Join(said, "\n")
			if !strings.Contains(text, row.said) || row.said == "" && strings.Contains(text, "nodePort") {
				t.Errorf("%s, mode %s: it says %s", row.list, mode, text)
			}
		}
	}
	const off = "mode: nftables\nnodePortAddresses: [primary, localhost]\niptables: {localhostNodePorts: false}\n"
	_, said := loadText(t, head+off)
	want := `f:4: nodePortAddresses: "localhost" has no effect: iptables.localhostNodePorts is false`
	if !slices.Contains(said, want) {
		t.Errorf("it says %s", strings.Join(said, "\n"))
	}
}

// TestIPVSGate: the feature gate KubeProxyIPVS rejects mode ipvs, with all that follows from the mode.
func TestIPVSGate(t *testing.T) {
	const (
		on  = "mode: ipvs\nfeatureGates: {KubeProxyIPVS: true}\n"
		off = "mode: ipvs\nfeatureGates: {KubeProxyIPVS: false}\n"
	)
	before, said := loadText(t, head+on+"nodePortAddresses: [primary]\n")
	if before.Policy.IPVS.Mode != dataplane.IPVSAlways || strings.Contains(strings.Join(said, "\n"), "featureGates") {
		t.Errorf("with the gate: %v; it says %v", before.Policy.IPVS.Mode, said)
	}
	s, said := loadText(t, head+off)
	want := `f:3: mode: "ipvs" is disabled by the feature gate KubeProxyIPVS; the defaults are used`
	if s.Policy.IPVS.Mode != dataplane.IPVSAuto || s.KubeProxy().Mode != "" || !slices.Contains(said, want) {
		t.Errorf("without: %v, mode %q; it says %s", s.Policy.IPVS.Mode, s.KubeProxy().Mode, strings.Join(said, "\n"))
	}
	s, _, err := load("f", []byte(head+off), nil, before)
	if err != nil || s.Policy.IPVS.Mode != dataplane.IPVSAlways || s.KubeProxy().Mode != modeIPVS {
		t.Errorf("while running: %v, mode %q, %v", s.Policy.IPVS.Mode, s.KubeProxy().Mode, err)
	}
}

// TestModes: the section of the mode counts, as in kube-proxy.
func TestModes(t *testing.T) {
	const all = `
iptables: {masqueradeAll: %v, syncPeriod: 10s, minSyncPeriod: 1s, localhostNodePorts: false}
ipvs: {syncPeriod: 20s, minSyncPeriod: 2s}
nftables: {masqueradeAll: %v, syncPeriod: 40s, minSyncPeriod: 4s}
`
	for _, row := range []struct {
		mode    string
		iptAll  string
		nftAll  string
		masqAll bool
		sync    int
		open    bool
	}{
		{`""`, "true", "false", true, 10, true},
		{"iptables", "false", "true", false, 10, true},
		{"ipvs", "true", "false", true, 20, true},
		{"nftables", "true", "false", false, 40, false},
		{"nftables", "false", "true", true, 40, false},
	} {
		text := strings.Replace(strings.Replace(all, "%v", row.iptAll, 1), "%v", row.nftAll, 1)
		s, _ := loadText(t, head+"mode: "+row.mode+text)
		if s.Policy.MasqueradeAll != row.masqAll || s.SyncPeriod != time.Duration(row.sync)*time.Second ||
			s.MinSyncPeriod != s.SyncPeriod/10 || s.Policy.LocalhostNodePorts || s.Backend != Auto ||
			(s.Policy.NodePortAddresses != nil) != row.open {
			t.Errorf("mode %s: %+v", row.mode, s)
		}
	}
}

// TestIPVSAddresses: what is no range, or every address, is left out and said; the rest is taken.
func TestIPVSAddresses(t *testing.T) {
	const file = head + "mode: nftables\n---\napiVersion: verdict/v1alpha1\nkind: " +
		"VerdictConfiguration\nipvsAddresses: [203.0.113.0/24, 0.0.0.0/0, web, \"2001:db8::/64\"]\n"
	s, said := loadText(t, file)
	if want := prefixes("203.0.113.0/24", "2001:db8::/64"); !slices.Equal(s.Policy.IPVS.Addresses, want) {
		t.Errorf("%v", s.Policy.IPVS.Addresses)
	}
	for _, want := range []string{`ipvsAddresses[1]: "0.0.0.0/0" contains every address, including those of nodes and ` +
		`gateways; it is ignored`,
		`ipvsAddresses[2]: "web" is not an address range such as 10.244.0.0/16; it is ignored`} {
		if !slices.ContainsFunc(said, func(text string) bool { return strings.HasSuffix(text, want) }) {
			t.Errorf("%q lacks %q", said, want)
		}
	}
	if s, _ := loadText(t, head+"mode: nftables\n"); s.Policy.IPVS.Addresses != nil {
		t.Errorf("by default %v", s.Policy.IPVS.Addresses)
	}
}

// TestDoubtfulChangesLess: at the start, an invalid value leaves more as it is with kube-proxy than the default does.
// Later, what is in force stays, also of fields whose default depends on an invalid one.
func TestDoubtfulChangesLess(t *testing.T) {
	own := func(text string) string {
		return head + "mode: nftables\n---\napiVersion: verdict/v1alpha1\nkind: VerdictConfiguration\n" + text
	}
	const onn = "secondChance: onn\npingServices: no way\nrejectUnusedPorts: 1\ntakeover: later\nipvs: often\n"
	s, said := loadText(t, own(onn))
	if p := s.Policy; p.SecondChance != snapshot.SecondChanceOff || p.PingServices || p.RejectUnusedPorts ||
		p.AsKubeProxy || p.IPVS.Mode != dataplane.IPVSNever || s.Takeover != "never" || len(said) != 5 {
		t.Errorf("%+v, takeover %s, %q", p, s.Takeover, said)
	}
	kubeProxy, _ := loadText(t, own("behavior: kube-proxy\n"))
	for _, behavior := range []string{"kube-poxy", "[kube-proxy]"} {
		s, said = loadText(t, own("behavior: "+behavior+"\n"))
		if !reflect.DeepEqual(s.Policy, kubeProxy.Policy) || len(said) != 1 {
			t.Errorf("behavior %s: %+v\nwant %+v; %q", behavior, s.Policy, kubeProxy.Policy, said)
		}
	}
	verdict, _ := loadText(t, own(""))
	for _, last := range []*Settings{verdict, kubeProxy} {
		s, problems, err := load("f", []byte(own("behavior: kube-poxy\n")), nil, last)
		if err != nil || !reflect.DeepEqual(s.Policy, last.Policy) || len(problems) != 1 {
			t.Errorf("after %+v: %+v; %v, %v", last.Policy, s.Policy, problems, err)
		}
	}
}

// TestIPVSNamed: who names always for IPVS gets it or an error. The mode ipvs, as kube-proxy's configuration has it,
// only asks for it.
func TestIPVSNamed(t *testing.T) {
	const own = "---\napiVersion: verdict/v1alpha1\nkind: VerdictConfiguration\nipvs: "
	for _, c := range []struct {
		text, flag string
		mode       dataplane.IPVSMode
		named      bool
	}{
		{"mode: ipvs\n", "", dataplane.IPVSAlways, false},
		{"mode: ipvs\n" + own + "always\n", "", dataplane.IPVSAlways, true},
		{"mode: nftables\n" + own + "always\n", "", dataplane.IPVSAlways, true},
		{"mode: nftables\n" + own + "always\n", "--ipvs=auto", dataplane.IPVSAuto, false},
		{"mode: nftables\n", "--ipvs=always", dataplane.IPVSAlways, true},
		{"mode: ipvs\n" + own + "auto\n", "", dataplane.IPVSAuto, false},
	} {
		var args []string
		if c.flag != "" {
			args = append(args, c.flag)
		}
		s, said := loadText(t, head+c.text, args...)
		if s.Policy.IPVS.Mode != c.mode || s.IPVSNamed != c.named {
			t.Errorf("%q, %s: mode %d, named %v: %v", c.text, c.flag, s.Policy.IPVS.Mode, s.IPVSNamed, said)
		}
	}
}

// TestSecondChance: YAML reads on and off as truth values, which must not lead to the default.
func TestSecondChance(t *testing.T) {
	for text, want := range map[string]snapshot.SecondChance{
		"off": snapshot.SecondChanceOff, `"off"`: snapshot.SecondChanceOff, "on": snapshot.SecondChanceOn,
		`"on"`: snapshot.SecondChanceOn, "observe": snapshot.SecondChanceObserve,
	} {
		own := "apiVersion: verdict/v1alpha1\nkind: VerdictConfiguration\nsecondChance: " + text + "\n"
		s, said := loadText(t, head+"mode: nftables\n---\n"+own)
		if s.Policy.SecondChance != want || len(said) > 0 {
			t.Errorf("secondChance: %s is %v: %v", text, s.Policy.SecondChance, said)
		}
	}
}

// TestModeIPVS: in mode ipvs all Services are scheduled, unless the operator says otherwise.
func TestModeIPVS(t *testing.T) {
	const ours = "---\napiVersion: verdict/v1alpha1\nkind: VerdictConfiguration\nipvs: "
	for text, want := range map[string]dataplane.IPVSMode{
		"mode: ipvs\n": dataplane.IPVSAlways, "mode: ipvs\n" + ours + "auto\n": dataplane.IPVSAuto,
		"mode: ipvs\n" + ours + "never\n": dataplane.IPVSNever, "mode: nftables\n" + ours + "always\n": dataplane.IPVSAlways,
		"mode: nftables\n": dataplane.IPVSAuto, `mode: ""` + "\n": dataplane.IPVSAuto,
	} {
		if s, _ := loadText(t, head+text); s.Policy.IPVS.Mode != want {
			t.Errorf("%q: %d, want %d", text, s.Policy.IPVS.Mode, want)
		}
	}
}

// TestBackends: the backend is what our own section or a flag says, whatever the mode is; where they differ, that is
// told. The bit of the mark is that of the mode.
func TestBackends(t *testing.T) {
	const bits = "iptables: {masqueradeBit: 3}\nnftables: {masqueradeBit: 4}\n"
	for _, row := range []struct {
		mode, backend string
		want          Backend
		bit           int
		said          []string
	}{
		{"nftables", "", Auto, 4, []string{"f:5: nftables.masqueradeBit: it has no effect with nftables, which " +
			"masquerades without a mark"}},
		{"nftables", "nftables", NFTables, 4, []string{"f:5: nftables.masqueradeBit: it has no effect with nftables, " +
			"which masquerades without a mark"}},
		{"nftables", "iptables", IPTables, 4, []string{"f:3: mode: nftables is accepted, but iptables is used"}},
		{"iptables", "iptables", IPTables, 3, nil},
		{"iptables", "nftables", NFTables, 3, []string{"f:3: mode: iptables is accepted, but nftables is used",
			"f:4: iptables.masqueradeBit: it has no effect with nftables, which masquerades without a mark"}},
		{"iptables", "", Auto, 3, []string{"f:3: mode: iptables is accepted, but nftables is used if the kernel supports " +
			"it: VerdictConfiguration.backend decides",
			"f:4: iptables.masqueradeBit: it has no effect with nftables, which masquerades without a mark"}},
		{"ipvs", "iptables", IPTables, 3, []string{"f:3: mode: ipvs is accepted, but iptables is used"}},
	} {
		text := head + "mode: " + row.mode + "\n" + bits + "nodePortAddresses: [primary]\n"
		var args []string
		if row.backend != "" {
			args = []string{"--backend=" + row.backend}
		}
		s, said := loadText(t, text, args...)
		if s.Backend != row.want || s.MasqueradeBit != row.bit || !slices.Equal(said, row.said) {
			t.Errorf("mode %s, backend %q: %s, bit %d, it says %q", row.mode, row.backend, s.Backend, s.MasqueradeBit, said)
		}
	}
	if s, said := loadText(t, head+"mode: nftables\nnftables: {masqueradeBit: 4}\n",
		"--iptables-compat"); !s.IPTablesCompat ||
		len(said) > 0 {
		t.Errorf("compat: %v, it says %q", s.IPTablesCompat, said)
	}
}

// TestSettings: what words and numbers mean.
func TestSettings(t *testing.T) {
	for text, check := range map[string]func(s *Settings) bool{
		"hostnameOverride: ' NODE-1 '": func(s *Settings) bool {
			return s.NodeName == "node-1" &&
				s.Policy.NodeName == "node-1"
		},
		"bindAddress: 192.0.2.1": func(s *Settings) bool { return s.Policy.NodeIP == netip.MustParseAddr("192.0.2.1") },
		"bindAddress: '::'": func(s *Settings) bool {
			return !s.Policy.NodeIP.IsValid() && s.Healthz.String() == "[::]:10256" && s.Metrics.String() == "[::1]:10249"
		},
		"bindAddress: fd00::1": func(s *Settings) bool {
			return s.Policy.NodeIP == netip.MustParseAddr("fd00::1")
		},
		"healthzBindAddress: 127.0.0.1": func(s *Settings) bool {
			return s.Healthz.String() == "127.0.0.1:10256"
		},
		"metricsBindAddress: '[::]:99'":                  func(s *Settings) bool { return s.Metrics.String() == "[::]:99" },
		"featureGates: {AllowServiceExternalIPs: false}": func(s *Settings) bool { return s.Policy.NoExternalIPs },
		"featureGates: {AllowServiceExternalIPs: true}":  func(s *Settings) bool { return !s.Policy.NoExternalIPs },
		"detectLocalMode: NodeCIDR\nclusterCIDR: nonsense": func(s *Settings) bool {
			return s.Policy.DetectLocal.Mode == dataplane.DetectNodeCIDR
		},
		"detectLocalMode: BridgeInterface\ndetectLocal: {bridgeInterface: cni0}": func(s *Settings) bool {
			return s.Policy.DetectLocal.Mode == dataplane.DetectBridgeInterface && s.Policy.DetectLocal.Interface == "cni0"
		},
	} {
		s, said := loadText(t, head+"mode: nftables\n"+text)
		if !check(s) || len(said) > 0 {
			t.Errorf("%q: %+v; it says %v", text, s, said)
		}
	}
}

// TestSysctls is kube-proxy's arithmetic, in numbers.
func TestSysctls(t *testing.T) {
	const dir = "proc/sys/net/netfilter/nf_conntrack_"
	top := func(n int) []sysctl.Setting {
		return []sysctl.Setting{
			{Path: dir + "max", Value: n, AtLeast: true},
			{Path: "sys/module/nf_conntrack/parameters/hashsize", Value: n / 4, AtLeast: true},
		}
	}
	times := []sysctl.Setting{
		{Path: dir + "tcp_timeout_established", Value: 86400},
		{Path: dir + "tcp_timeout_close_wait", Value: 3600},
	}
	for _, row := range []struct {
		text string
		cpus int
		want []sysctl.Setting
	}{
		{"", 2, slices.Concat(top(131072), times)},
		{"", 8, slices.Concat(top(262144), times)},
		{"", 64, slices.Concat(top(1048576), times)},
		{"conntrack: {min: 0}", 1, slices.Concat(top(32768), times)},
		{"conntrack: {min: 2000000}", 1, slices.Concat(top(2000000), times)},
		{"conntrack: {maxPerCore: 0, tcpEstablishedTimeout: 0s, tcpCloseWaitTimeout: 0s}", 8, nil},
		{"conntrack: {maxPerCore: 0, tcpEstablishedTimeout: 90s, tcpCloseWaitTimeout: 0s, tcpBeLiberal: true, " +
			"udpTimeout: 1m, udpStreamTimeout: 2m}", 8,
			[]sysctl.Setting{{Path: dir + "tcp_timeout_established", Value: 90}, {Path: dir + "udp_timeout", Value: 60},
				{Path: dir + "udp_timeout_stream", Value: 120}, {Path: dir + "tcp_be_liberal", Value: 1}}},
	} {
		s, _ := loadText(t, head+row.text)
		if got := s.Sysctls(row.cpus); !slices.Equal(got, row.want) {
			t.Errorf("%q on %d CPUs: %v; want %v", row.text, row.cpus, got, row.want)
		}
	}
}

// TestChanges: what differs is named, with when it takes effect.
func TestChanges(t *testing.T) {
	before, _ := loadText(t, head+"mode: nftables\nclusterCIDR: 10.0.0.0/8\n")
	now, _ := loadText(t, head+`
mode: nftables
clusterCIDR: 10.0.0.0/9
hostnameOverride: other
conntrack: {min: 5}
configSyncPeriod: 1m
iptables: {masqueradeAll: true}
---
`+ownHead+"keeper: none\n")
	var got []string
	for _, c := range now.Changes(before) {
		got = append(got, c.String()+" ("+[...]string{"live", "restart", "never"}[c.Effect]+")")
	}
	want := []string{`hostnameOverride: other, was "" (restart)`, "iptables.masqueradeAll: true, was false (never)",
		"clusterCIDR: 10.0.0.0/9, was 10.0.0.0/8 (live)", "conntrack.min: 5, was 131072 (live)",
		"configSyncPeriod: 1m0s, was 15m0s (never)", "VerdictConfiguration.keeper: none, was auto (restart)"}
	if !slices.Equal(got, want) {
		t.Errorf("got %s\nwant %s", strings.Join(got, "\n"), strings.Join(want, "\n"))
	}
	if c := now.Changes(now); c != nil {
		t.Errorf("it differs from itself: %v", c)
	}
}

// TestWritten: what is written means the same when it is read again, to us and, but for its second document, to
// kube-proxy.
func TestWritten(t *testing.T) {
	for _, args := range [][]string{
		nil, {"--config", "testdata/kubeadm.conf"},
		{"--proxy-mode=ipvs", "--cluster-cidr=10.0.0.0/8", "-v=2", "--keeper=none", "--oom-score-adj=0"},
	} {
		f := parse(t, args...)
		s, _, err := Load(f.Config, f, nil)
		if err != nil {
			t.Fatal(err)
		}
		var b bytes.Buffer
		if err := s.Write(&b); err != nil {
			t.Fatal(err)
		}
		again, problems, err := load("f", b.Bytes(), nil, nil)
		if err != nil || len(again.Changes(s)) > 0 || !reflect.DeepEqual(again.Policy, s.Policy) ||
			!reflect.DeepEqual(again.Client, s.Client) {
			t.Errorf("%v: %v, %v, changes %v", args, err, texts(problems), again.Changes(s))
		}
		first, _, _ := strings.Cut(b.String(), "\n---\n")
		if _, err := strict([]byte(first)); err != nil {
			t.Errorf("%v: kube-proxy's decoder says: %v", args, err)
		}
	}
}

var codecs = func() serializer.CodecFactory {
	scheme := runtime.NewScheme()
	if err := v1alpha1.AddToScheme(scheme); err != nil {
		panic(err)
	}
	return serializer.NewCodecFactory(scheme, serializer.EnableStrict)
}()

// strict decodes as kube-proxy does at first.
func strict(text []byte) (*v1alpha1.KubeProxyConfiguration, error) {
	o, _, err := codecs.UniversalDeserializer().Decode(text, nil, nil)
	if err != nil {
		return nil, err
	}
	return o.(*v1alpha1.KubeProxyConfiguration), nil
}

// FuzzLoad: nothing makes it panic, and what kube-proxy's decoder takes without a complaint is the same here.
func FuzzLoad(f *testing.F) {
	files, _ := filepath.Glob("testdata/broken/*.yaml")
	for _, file := range append(files, "testdata/kubeadm.conf") {
		text, err := os.ReadFile(file)
		if err != nil {
			f.Fatal(err)
		}
		f.Add(text)
	}
	for _, text := range []string{"", "---\n...\n", "{}", "[", "\xff", "a: &a [*a]", "&a a: *a", head +
		"nftables: &x {syncPeriod: 1s}\niptables: *x\n",
		head + "conntrack: {min: yes, tcpBeLiberal: on}\n", head + "<<: {mode: ipvs}\n", head + "clusterCIDR: ,,\n",
		`{"kind":"KubeProxyConfiguration","apiVersion":"kubeproxy.config.k8s.io/v1alpha1","mode":"nftables"}`} {
		f.Add([]byte(text))
	}
	f.Fuzz(func(t *testing.T, text []byte) {
		s, problems, err := load("f", text, nil, nil)
		if (s == nil) != (err != nil) {
			t.Fatalf("settings %v, error %v", s, err)
		}
		for _, p := range problems {
			if len(p.Error()) > 1000 || strings.ContainsAny(p.Error(), "\n\r\x00") {
				t.Fatalf("a problem that is no line: %q", p.Error())
			}
		}
		if err == nil {
			again, _, err := load("f", text, nil, s)
			if err != nil || len(again.Changes(s)) > 0 {
				t.Fatalf("once more, it is another: %v, %v", err, again.Changes(s))
			}
		}
		theirs, terr := strict(text)
		if terr != nil || len(yamltree.Documents(string(text))) > 1 {
			return
		}
		r, err := read("f", text)
		if err != nil {
			t.Fatalf("kube-proxy takes it, we do not: %v", err)
		}
		if !reflect.DeepEqual(&r.doc.KubeProxy, theirs) || len(r.fieldErrors) > 0 {
			t.Fatalf("kube-proxy has\n%+v\nwe have\n%+v\nand %v", theirs, &r.doc.KubeProxy, r.fieldErrors)
		}
	})
}

// TestBehavior: with kube-proxy, everything is off that differs by default, in each mode as there; what the file or a
// flag says wins.
func TestBehavior(t *testing.T) {
	const own = "---\napiVersion: verdict/v1alpha1\nkind: VerdictConfiguration\nbehavior: kube-proxy\n"
	for _, c := range []struct {
		text                         string
		chance                       snapshot.SecondChance
		ping, ports, localhost, like bool
	}{
		{"mode: nftables\n", snapshot.SecondChanceOn, true, true, true, false},
		{"mode: nftables\n" + own, snapshot.SecondChanceOff, false, false, false, true},
		{"mode: ipvs\n" + own, snapshot.SecondChanceOff, false, false, false, true},
		{"mode: iptables\n" + own, snapshot.SecondChanceOff, false, false, true, true},
		{"mode: nftables\niptables: {localhostNodePorts: true}\n" + own + "secondChance: observe\npingServices: true\n" +
			"rejectUnusedPorts: true\n", snapshot.SecondChanceObserve, true, true, true, true},
	} {
		s, _ := loadText(t, head+c.text)
		p := s.Policy
		if p.SecondChance != c.chance || p.PingServices != c.ping || p.RejectUnusedPorts != c.ports ||
			p.LocalhostNodePorts != c.localhost || p.AsKubeProxy != c.like {
			t.Errorf("%q: %+v", c.text, p)
		}
	}
	four, six := netip.MustParsePrefix("0.0.0.0/0"), netip.MustParsePrefix("::/0")
	for list, want := range map[string][]netip.Prefix{
		"[10.0.0.0/8]":          {netip.MustParsePrefix("10.0.0.0/8"), six},
		"[fd00::/8]":            {netip.MustParsePrefix("fd00::/8"), four},
		`[10.0.0.0/8, "::/0"]`:  {netip.MustParsePrefix("10.0.0.0/8"), six},
		"[primary, 10.0.0.0/8]": {netip.MustParsePrefix("10.0.0.0/8")},
	} {
		if s, _ := loadText(t, head+"mode: nftables\nnodePortAddresses: "+list+"\n"+own); !slices.Equal(
			s.Policy.NodePortAddresses, want) {
			t.Errorf("%s: %v", list, s.Policy.NodePortAddresses)
		}
	}
}
