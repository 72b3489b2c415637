package benchmark

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"

	"github.com/verdict-proxy/verdict/conformance/testbed"
)

// Kind is a proxy in one of its modes.
type Kind struct {
	// Name is that of --proxy.
	Name string
	// Binary is the program, once Obtain has found it.
	Binary string

	program string // the name of it in Programs
	mode    string // kube-proxy's word
	args    []string
	needs   string // a flag of verdict run that a program may be too old for
	tables  string // which variant of iptables it finds in its path: legacy or nft; empty means none
	// ipvs says that the kernel has to have IPVS.
	ipvs bool
	// sockets says that Cilium balances pods' connections, too, when their sockets connect.
	sockets bool
	// reasons say why it is not measured for a table, by the table's title.
	reasons map[string]string
}

const verdict = "verdict"

var (
	runVerdict   = []string{"run", "--config={config}"}
	runKubeProxy = []string{"--config={config}"}
)

// kinds are all there are.
var kinds = []Kind{
	{Name: "verdict-nftables", program: verdict, mode: "nftables", args: runVerdict},
	{Name: "kube-proxy-nftables", program: "kube-proxy", mode: "nftables", args: runKubeProxy},
	{
		Name:    "verdict-iptables",
		program: verdict,
		mode:    "iptables",
		args:    append(slices.Clone(runVerdict), "--backend=iptables"),
		needs:   "--backend",
		tables:  "legacy",
	},
	{Name: "kube-proxy-iptables", program: "kube-proxy", mode: "iptables", args: runKubeProxy, tables: "legacy"},
	{
		Name:    "verdict-iptables-nft",
		program: verdict,
		mode:    "iptables",
		args:    append(slices.Clone(runVerdict), "--backend=iptables"),
		needs:   "--backend",
		tables:  "nft",
	},
	{Name: "kube-proxy-iptables-nft", program: "kube-proxy", mode: "iptables", args: runKubeProxy, tables: "nft"},
	{
		Name:    "verdict-ipvs",
		program: verdict,
		mode:    "ipvs",
		args:    append(slices.Clone(runVerdict), "--ipvs=always"),
		ipvs:    true,
	},
	{Name: "kube-proxy-ipvs", program: "kube-proxy", mode: "ipvs", args: runKubeProxy, tables: "legacy", ipvs: true},
	{Name: "cilium", program: ciliumAgent, reasons: ciliumReasons},
	{Name: "cilium-socket", program: ciliumAgent, sockets: true, reasons: ciliumReasons},
	{Name: "kube-proxy-1.36-nftables", program: "kube-proxy-1.36", mode: "nftables", args: runKubeProxy},
	{Name: "kube-proxy-1.36-iptables", program: "kube-proxy-1.36", mode: "iptables", args: runKubeProxy, tables: "legacy"},
}

// Reasons say why this proxy is not measured for a table, by the table's title.
func (k *Kind) Reasons() map[string]string { return k.reasons }

// DefaultKinds are those that every machine can run.
func DefaultKinds() []string {
	return []string{"verdict-nftables", "kube-proxy-nftables", "verdict-iptables", "kube-proxy-iptables"}
}

// GuestKinds are those that a guest runs, since it has IPVS.
func GuestKinds() []string {
	return []string{"verdict-ipvs", "kube-proxy-ipvs", "verdict-nftables", "kube-proxy-nftables"}
}

// KindNames gives all names.
func KindNames() (names []string) {
	for _, k := range kinds {
		names = append(names, k.Name)
	}
	return names
}

// FindKind gives a proxy by its name.
func FindKind(name string) (*Kind, error) {
	i := slices.IndexFunc(kinds, func(k Kind) bool { return k.Name == name })
	if i < 0 {
		return nil, fmt.Errorf("--proxy %s: it is none of %s", name, strings.Join(KindNames(), ", "))
	}
	k := kinds[i]
	return &k, nil
}

// ErrMissing says that a proxy cannot be measured here, and wraps the reason.
var ErrMissing = errors.New("left out")

// Programs are the files of all programs, by their names: verdict, kube-proxy, kube-proxy-1.36, etcd, kube-apiserver.
type Programs map[string]string

// Build builds the control plane and the programs of these proxies, by their kinds' names, unless they are in the
// cache. root is the directory of the sources, dir is where Verdict's program goes. The first time takes minutes.
func Build(ctx context.Context, root, dir string, proxies []string) (Programs, error) {
	names := []string{"etcd", "kube-apiserver"}
	for _, name := range proxies {
		k, err := FindKind(name)
		if err != nil {
			return nil, err
		}
		if k.program != verdict && !slices.Contains(names, k.program) {
			names = append(names, k.program)
		}
	}
	paths, err := testbed.Programs{Root: root}.Peers(ctx, names...)
	if err != nil {
		return nil, err
	}
	p := Programs{verdict: filepath.Join(dir, "verdict")}
	for i, name := range names {
		p[name] = paths[i]
	}
	// Without the revision in it, the same sources give the same program, whatever was committed besides.
	cmd := exec.CommandContext(ctx, "go", "build", "-trimpath", "-buildvcs=false", "-o", p[verdict], "./cmd/verdict")
	cmd.Dir, cmd.Env = root, append(os.Environ(), "CGO_ENABLED=0")
	if out, err := cmd.CombinedOutput(); err != nil {
		return nil, fmt.Errorf("build verdict: %w: %s", err, out)
	}
	return p, nil
}

// Obtain finds the program and gives its version and the beginning of its digest. The error is ErrMissing if the
// program or the machine lacks what the mode needs.
func (k *Kind) Obtain(ctx context.Context, p Programs) (version string, err error) {
	args := []string{"--version"}
	if k.program == verdict {
		args = []string{"run", "--version"}
	}
	k.Binary = p[k.program]
	out, err := exec.CommandContext(ctx, k.Binary, args...).CombinedOutput()
	if err != nil {
		return "", fmt.Errorf("%s %s: %w: %s", k.Binary, strings.Join(args, " "), err, out)
	}
	version, _, _ = strings.Cut(strings.TrimSpace(string(out)), "\n")
	program, err := os.ReadFile(k.Binary)
	if err != nil {
		return "", err
	}
	version = fmt.Sprintf("%s, sha256 %.6x", version, sha256.Sum256(program))
	if k.needs != "" {
		help, err := exec.CommandContext(ctx, k.Binary, "run", "--help").CombinedOutput()
		if err != nil {
			return "", fmt.Errorf("%s run --help: %w: %s", k.Binary, err, help)
		}
		if !strings.Contains(string(help), k.needs+" ") {
			return "", fmt.Errorf("%w: %s has no %s", ErrMissing, version, k.needs)
		}
	}
	if k.program == ciliumAgent {
		if _, err := os.Stat(k.files()); err != nil {
			return "", fmt.Errorf("%w: what Cilium's agent needs besides: %w", ErrMissing, err)
		}
	}
	if k.ipvs {
		if _, err := os.Stat("/proc/net/ip_vs"); err != nil {
			return "", fmt.Errorf("%w: this kernel has no IPVS; --guest runs it in one that has", ErrMissing)
		}
	}
	if k.tables != "" {
		if _, err := exec.LookPath(k.multi()); err != nil {
			return "", fmt.Errorf("%w: %w", ErrMissing, err)
		}
	}
	return version, nil
}

// files is the directory of what Cilium's agent needs besides.
func (k *Kind) files() string { return filepath.Join(filepath.Dir(k.Binary), "cilium") }

// multi is the program that all of iptables' commands are, in one variant.
func (k *Kind) multi() string { return "xtables-" + k.tables + "-multi" }

// path makes a directory with this variant of iptables under its ordinary names, and gives a PATH with it in front, or
// with the compiler of Cilium's agent.
func (k *Kind) path(dir string) (string, error) {
	path := os.Getenv("PATH")
	if k.program == ciliumAgent {
		return filepath.Join(k.files(), "bin") + string(os.PathListSeparator) + path, nil
	}
	if k.tables == "" {
		return path, nil
	}
	multi, err := exec.LookPath(k.multi())
	if err != nil {
		return "", err
	}
	dir = filepath.Join(dir, "iptables-"+k.tables)
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return "", err
	}
	for _, family := range []string{"iptables", "ip6tables"} {
		for _, command := range []string{"", "-save", "-restore"} {
			if err := os.Symlink(multi, filepath.Join(dir, family+command)); err != nil && !errors.Is(err, os.ErrExist) {
				return "", err
			}
		}
	}
	return dir + string(os.PathListSeparator) + path, nil
}

// config is kube-proxy's file. Its periods are left as they are by default; what concerns the whole machine is left
// alone.
func (k *Kind) config(kubeconfig string) string {
	return fmt.Sprintf(`apiVersion: kubeproxy.config.k8s.io/v1alpha1
kind: KubeProxyConfiguration
mode: %s
clusterCIDR: %s
hostnameOverride: %s
clientConnection: {kubeconfig: %q}
conntrack: {maxPerCore: 0, min: 0, tcpEstablishedTimeout: 0s, tcpCloseWaitTimeout: 0s}
metricsBindAddress: 127.0.0.1:10249
healthzBindAddress: 0.0.0.0:10256
oomScoreAdj: 0
`, k.mode, podRange, nodeName, kubeconfig)
}

// warm reads a program once, so that no start waits for the disk.
func (k *Kind) warm() error {
	_, err := os.ReadFile(k.Binary)
	return err
}
