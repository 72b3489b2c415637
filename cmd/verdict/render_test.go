package main

import (
	"bytes"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/verdict-proxy/verdict/internal/answers/inspect"
	"github.com/verdict-proxy/verdict/internal/lab/labtest"
	"github.com/verdict-proxy/verdict/internal/proxy/backends"
	"github.com/verdict-proxy/verdict/nft/kernel"
	"github.com/verdict-proxy/verdict/sync/dataplane"
)

var update = flag.Bool("update", false, "write the goldens anew")

// goldens are manifests with the flags they are rendered with, and the nft text that must come out.
func goldens(t *testing.T) map[string][]string {
	t.Helper()
	out := map[string][]string{
		"../../examples/cluster.yaml": {"--hostname-override", "node-1", "--cluster-cidr", "10.244.0.0/16,fd00:10:244::/48"},
	}
	files, err := filepath.Glob("testdata/render/*.yaml")
	labtest.Check(t, err)
	for _, f := range files {
		text, err := os.ReadFile(f)
		labtest.Check(t, err)
		line, _, _ := strings.Cut(string(text), "\n")
		flags, ok := strings.CutPrefix(line, "# flags: ")
		if !ok {
			t.Fatalf("%s does not begin with its flags", f)
		}
		out[f] = strings.Fields(flags)
	}
	return out
}

// command runs the program in this process and gives what it wrote to standard output.
func command(args ...string) (string, error) { return commandOf(newRoot(), args...) }

func commandOf(root *cobra.Command, args ...string) (string, error) {
	var out bytes.Buffer
	root.SetArgs(args)
	root.SetOut(&out)
	err := root.Execute()
	return out.String(), err
}

func goldenPath(file string) string {
	return filepath.Join("testdata/render", strings.TrimSuffix(filepath.Base(file), ".yaml")+".nft")
}

// TestRender compares what is printed with the goldens.
func TestRender(t *testing.T) {
	for file, flags := range goldens(t) {
		t.Run(filepath.Base(file), func(t *testing.T) {
			got, err := command(append([]string{"render", "--from", file}, flags...)...)
			labtest.Check(t, err)
			if *update {
				labtest.Check(t, os.WriteFile(goldenPath(file), []byte(got), 0o644))
			}
			want, err := os.ReadFile(goldenPath(file))
			labtest.Check(t, err)
			if got != string(want) {
				t.Errorf("render prints something else than %s (go test -update writes it anew):\n%s", goldenPath(file),
					labtest.FirstDifference(got, string(want)))
			}
		})
	}
}

// TestGoldensLoad gives every golden to every nft at hand, and compares what it lists then with what it lists of our
// own commit of the same state. An nft that would abort on a line is not given it: the text says so itself.
func TestGoldensLoad(t *testing.T) {
	for file, flags := range goldens(t) {
		for _, n := range labtest.Nfts(t) {
			t.Run(filepath.Base(file)+" "+filepath.Base(n.Path), func(t *testing.T) {
				text, err := os.ReadFile(goldenPath(file))
				labtest.Check(t, err)
				h := labtest.NewHost(t, labtest.NewNet(t), "node")
				if strings.Contains(string(text), "# nft 1.0.6 aborts") && !n.LoadsWideUpdates() {
					if out, err := h.RunInput(string(text), n.Path, "-f", "-"); err == nil {
						t.Fatalf("the text says that this nft cannot load it, and it can: %s", out)
					}
					return
				}
				if !n.LoadsRanges(t, h) {
					return
				}
				labtest.Run(t, h, string(text), n.Path, "-f", "-")
				loaded := withoutNumber(n.List(t, h))
				labtest.Check(t, h.Do(func() error {
					const ipvs = "which has no virtual service there" // nft cannot load that part
					out, err := command("verify")
					if scheduled := strings.Contains(out, ipvs); (err != nil) != scheduled ||
						scheduled != strings.Contains(string(text), "# What IPVS gets") {
						t.Errorf("verify of what nft has loaded: %v\n%s", err, out)
					}
					return nil
				}))
				labtest.Check(t, h.Do(func() error { return write(t, file, flags) }))
				if written := withoutNumber(n.List(t, h)); written != loaded {
					t.Errorf("loaded and written tables are listed differently:\n%s", labtest.FirstDifference(written, loaded))
				}
			})
		}
	}
}

// withoutNumber gives a listing without the number of the transaction that wrote it, which the kernel gives.
func withoutNumber(listing string) string {
	return revisionNumber.ReplaceAllString(listing, "0x00000001$1")
}

var revisionNumber = regexp.MustCompile(`0x[0-9a-f]{8}( comment "[0-9a-f]{32} counts)`)

// write writes what render shows for the same flags into the namespace of the calling thread.
func write(t *testing.T, file string, flags []string) error {
	var p inspect.Policy
	f := pflag.NewFlagSet("render", pflag.ContinueOnError)
	p.AddFlags(f)
	labtest.Check(t, f.Parse(flags))
	config, err := p.Config()
	labtest.Check(t, err)
	st, _, err := computeState(t.Context(), config, file, "")
	labtest.Check(t, err)
	backend, err := backends.OpenKernel(kernel.Options{})
	if err != nil {
		return err
	}
	defer backend.Close()
	if err := backend.Remove(); err != nil { // what nft loaded, which would be corrected otherwise
		return err
	}
	_, err = backend.Apply(st, dataplane.Change{})
	return err
}

// withoutSettings gives tables without the settings in force, and without the digests that cover them.
func withoutSettings(text string) string {
	text = regexp.MustCompile(`0x[0-9a-f]{8} comment "[0-9a-z-]+=[^"]*"(,\s+)?`).ReplaceAllString(text, "")
	return regexp.MustCompile(`comment "[0-9a-f]{32} counts`).ReplaceAllString(text, `comment "counts`)
}

// TestNodeRanges: in mode NodeCIDR, what only reads takes the pods' ranges from the Node in the manifests, as run does.
// Without the mode nobody is taken for a pod.
func TestNodeRanges(t *testing.T) {
	const file, from, to = "../../examples/cluster.yaml", "10.244.1.7", "10.96.20.3:8080"
	objects := []string{"--from", file, "--hostname-override", "node-1"}
	answer := func(name string, args ...string) string {
		out, err := command(append(append([]string{name}, objects...), args...)...)
		labtest.Check(t, err)
		return out
	}
	byNode := answer("render", "--detect-local-mode", "NodeCIDR")
	byFlag := answer("render", "--cluster-cidr", "10.244.1.0/24,fd00:10:244:1::/64")
	byNode, byFlag = withoutSettings(byNode), withoutSettings(byFlag)
	if byNode != byFlag {
		t.Errorf("render differs:\n%s", labtest.FirstDifference(byNode, byFlag))
	}
	if none := answer("render"); none == byNode || strings.Contains(none, "10.244.1.0/24") {
		t.Error("without the mode, render takes ranges from the Node")
	}
	for args, want := range map[string]string{
		"--detect-local-mode NodeCIDR": "(the Node's podCIDRs): a pod", "": ": outside",
	} {
		if out := answer("explain", append(strings.Fields(args), from, to)...); !strings.Contains(out, want) {
			t.Errorf("explain %s says\n%s\nwant %q", args, out, want)
		}
	}
	h := labtest.NewHost(t, labtest.NewNet(t), "node")
	labtest.Check(t, h.Do(func() error {
		return write(t, file, append(objects[2:], "--detect-local-mode", "NodeCIDR"))
	}))
	labtest.Run(t, h, "", "ip", "addr", "add", "192.0.2.10/32", "dev", "lo")
	labtest.Run(t, h, "", "ip", "addr", "add", "2001:db8:2::10/128", "dev", "lo")
	labtest.Check(t, h.Do(func() error {
		if out := answer("diff", "--detect-local-mode", "NodeCIDR"); !strings.Contains(out, "same:") {
			t.Errorf("diff finds\n%s", out)
		}
		return nil
	}))
}

// TestRenderStatus: what is left out makes the exit status 1; what is read all the same, with a warning, does not.
func TestRenderStatus(t *testing.T) {
	const service = "{apiVersion: v1, kind: Service, metadata: {name: web, annotations: {%s}}, " +
		"spec: {clusterIP: %s, ports: [{port: %d}]}}"
	for text, fails := range map[string]bool{
		fmt.Sprintf(service, "", "10.96.0.10", 80):                    false,
		fmt.Sprintf(service, "", "10.96.0.010", 80):                   false,
		fmt.Sprintf(service, "verdict/drian: 10s", "10.96.0.10", 80):  false,
		fmt.Sprintf(service, "verdict/drain: soon", "10.96.0.10", 80): false,
		fmt.Sprintf(service, "", "10.96.0.10", 80000):                 true,
	} {
		file := filepath.Join(t.TempDir(), "web.yaml")
		labtest.Check(t, os.WriteFile(file, []byte(text), 0o600))
		if _, err := command("render", "--from", file); (err != nil) != fails {
			t.Errorf("%s: %v", text, err)
		}
	}
}

// TestRenderPipe gives render its manifests through a pipe, as the example in its help does.
func TestRenderPipe(t *testing.T) {
	text, err := os.ReadFile("../../examples/cluster.yaml")
	labtest.Check(t, err)
	r, w, err := os.Pipe()
	labtest.Check(t, err)
	defer r.Close()
	go func() {
		w.Write(text)
		w.Close()
	}()
	got, err := command("render", "--from", fmt.Sprintf("/proc/self/fd/%d", r.Fd()),
		"--hostname-override", "node-1", "--cluster-cidr", "10.244.0.0/16,fd00:10:244::/48")
	labtest.Check(t, err)
	want, err := os.ReadFile(goldenPath("cluster.yaml"))
	labtest.Check(t, err)
	if got != string(want) {
		t.Errorf("through a pipe render prints something else:\n%s", labtest.FirstDifference(got, string(want)))
	}
}

// TestRenderIngress: with the name of the node's device, render prints the tables at its ingress, which nft loads where
// there is one.
func TestRenderIngress(t *testing.T) {
	file := filepath.Join(t.TempDir(), "kept.yaml")
	labtest.Check(t, os.WriteFile(file, []byte(`
apiVersion: v1
kind: Service
metadata: {name: web, namespace: shop, annotations: {verdict-proxy.github.io/client-address: keep}}
spec: {clusterIP: 10.96.0.80, type: LoadBalancer, ports: [{port: 80}]}
status: {loadBalancer: {ingress: [{ip: 203.0.113.10}]}}
---
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata: {name: web-1, namespace: shop, labels: {kubernetes.io/service-name: web}}
addressType: IPv4
ports: [{port: 8080}]
endpoints: [{addresses: [10.244.2.5], nodeName: node-2}]
---
apiVersion: v1
kind: Node
metadata: {name: node-1}
status: {addresses: [{type: InternalIP, address: 192.0.2.1}]}
---
apiVersion: v1
kind: Node
metadata: {name: node-2}
status: {addresses: [{type: InternalIP, address: 192.0.2.2}]}
`), 0o644))
	render := []string{"render", "--from", file, "--hostname-override", "node-1", "--client-address", "annotated"}
	without, err := command(render...)
	labtest.Check(t, err)
	if strings.Contains(without, "netdev") {
		t.Errorf("without a device, there are tables at an ingress:\n%s", without)
	}
	text, err := command(append(render, "--device", "eth7")...)
	labtest.Check(t, err)
	for _, want := range []string{"table netdev verdict {", `hook ingress device "eth7"`, `comment "shop/web" : 192.0.2.2`,
		"203.0.113.10 . tcp . 80"} {
		if !strings.Contains(text, want) {
			t.Errorf("%q is not in\n%s", want, text)
		}
	}
	h := labtest.NewHost(t, labtest.NewNet(t), "node-1")
	labtest.Run(t, h, "", "ip", "link", "add", "eth7", "type", "veth")
	nfts := labtest.Nfts(t)
	labtest.Run(t, h, text, nfts[len(nfts)-1].Path, "-f", "-")
}
