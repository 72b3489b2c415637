package main

import (
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"syscall"
	"testing"

	"github.com/verdict-proxy/verdict/internal/lab"
	"github.com/verdict-proxy/verdict/internal/lab/labtest"
	"github.com/verdict-proxy/verdict/internal/system/testkit"
)

// tuned is a "verdict run" with a configuration file.
type tuned struct {
	t    *testing.T
	host *lab.Host
	file string
	log  string
	cmd  *lab.Cmd
}

func (r *tuned) start() {
	r.t.Helper()
	r.log = filepath.Join(r.t.TempDir(), "log")
	log, err := os.Create(r.log)
	labtest.Check(r.t, err)
	defer log.Close()
	r.cmd = r.host.Command("/proc/self/exe", "run", "--config", r.file, "--from", "../../examples/cluster.yaml",
		"--hostname-override=node-1", "--keeper=none", "-v=2")
	r.cmd.Env = append(os.Environ(), beVerdict+"=1")
	r.cmd.Stdout, r.cmd.Stderr = log, log
	labtest.Check(r.t, r.cmd.Start())
	r.wait("all Services are programmed", 1)
}

func (r *tuned) stop() {
	r.t.Helper()
	labtest.Check(r.t, r.cmd.Process.Signal(syscall.SIGTERM))
	labtest.Check(r.t, r.cmd.Wait())
}

// wait waits until the log has a text so many times.
func (r *tuned) wait(text string, times int) {
	r.t.Helper()
	said := func() string {
		text, err := os.ReadFile(r.log)
		labtest.Check(r.t, err)
		return string(text)
	}
	what := fmt.Sprintf("the log has %q %d times", text, times)
	testkit.Eventually(r.t, patience, what, func() bool { return strings.Count(said(), text) >= times }, said)
}

// configure replaces the file as the kubelet replaces a mounted ConfigMap.
func (r *tuned) configure(text string) {
	r.t.Helper()
	dir := filepath.Dir(r.file)
	name, err := os.MkdirTemp(dir, "..data-")
	labtest.Check(r.t, err)
	text = "apiVersion: kubeproxy.config.k8s.io/v1alpha1\nkind: KubeProxyConfiguration\n" + text
	labtest.Check(r.t, os.WriteFile(filepath.Join(name, "config.conf"), []byte(text), 0o644))
	labtest.Check(r.t, os.Symlink(filepath.Base(name), filepath.Join(dir, "..data_tmp")))
	labtest.Check(r.t, os.Rename(filepath.Join(dir, "..data_tmp"), filepath.Join(dir, "..data")))
}

// revision is the number of transactions, which stands beside the digest of what the table should hold.
var revision = regexp.MustCompile(`0x[0-9a-f]{8} comment`)

// noIPVS leaves all Services to nftables, whatever the mode: not every kernel has IPVS.
const noIPVS = "---\napiVersion: verdict/v1alpha1\nkind: VerdictConfiguration\nipvs: never\n"

const asKubeProxy = "---\napiVersion: verdict/v1alpha1\nkind: VerdictConfiguration\nbehavior: kube-proxy\n"

// TestReloadInKernel: after changes of the file at work, the kernel holds what a proxy writes that begins with the
// last of them.
func TestReloadInKernel(t *testing.T) {
	r := &tuned{t: t, host: labtest.NewHost(t, labtest.NewNet(t), "node"), file: filepath.Join(t.TempDir(), "config.conf")}
	labtest.Check(t, os.Symlink("..data/config.conf", r.file))
	list := func() string { // chains that came later are listed later
		lines := strings.Split(revision.ReplaceAllString(labtest.Nfts(t)[0].List(t, r.host), ""), "\n")
		slices.Sort(lines)
		return strings.Join(lines, "\n")
	}
	for _, steps := range [][]string{
		{"mode: nftables\n", "mode: nftables\nclusterCIDR: 10.244.0.0/16\n",
			"mode: nftables\nclusterCIDR: 10.0.0.0/8,fd00::/8\n"},
		{"mode: nftables\nclusterCIDR: 10.244.0.0/16\n", "mode: nftables\ndetectLocalMode: BridgeInterface\ndetectLocal: " +
			"{bridgeInterface: cni0}\n"},
		{"mode: nftables\ndetectLocalMode: InterfaceNamePrefix\ndetectLocal: {interfaceNamePrefix: veth}\n",
			"mode: nftables\nnftables: {masqueradeAll: true}\n"},
		{"mode: nftables\n", "mode: nftables\niptables: {localhostNodePorts: false}\nfeatureGates: " +
			"{AllowServiceExternalIPs: false}\n"},
		{"mode: nftables\niptables: {localhostNodePorts: false}\n", "mode: ipvs\nnodePortAddresses: [0.0.0.0/0]\n" + noIPVS},
		{"mode: nftables\ndetectLocalMode: NodeCIDR\n", "mode: nftables\ndetectLocalMode: Magic\nnodePortAddresses: " +
			"[127.0.0.0/8, 10.0.0.0/33]\nbindAddress: 127.0.0.1\n",
			"mode: nftables\nbindAddress: 127.0.0.1\nnodePortAddresses: [127.0.0.0/8]\n"},
		{"mode: nftables\nclusterCIDR: 10.244.0.0/16\n", "mode: nftables\nclusterCIDR: 10.244.0.0/16\n" + asKubeProxy},
		{"mode: nftables\nclusterCIDR: 10.244.0.0/16\n" + asKubeProxy, "mode: nftables\nclusterCIDR: 10.244.0.0/16\n"},
		{"mode: nftables\nnodePortAddresses: [primary]\n", "mode: nftables\nnodePortAddresses: [localhost, primary]\n"},
	} {
		r.configure(steps[0])
		r.start()
		for i, text := range steps[1:] {
			before := list()
			r.configure(text)
			r.wait("msg=transaction", i+2)
			if list() == before {
				t.Errorf("%q changes nothing", text)
			}
		}
		got := list()
		r.stop()
		labtest.Check(t, r.host.Do(removeRules))
		r.start()
		if want := list(); got != want {
			t.Errorf("%q: after a change and after a start it is not the same:\n%s", steps, labtest.FirstDifference(got, want))
		}
		r.stop()
		labtest.Check(t, r.host.Do(removeRules))
	}
}
