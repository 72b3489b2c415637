package testbed

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"strings"
	"time"

	"sigs.k8s.io/yaml"

	"github.com/verdict-proxy/verdict/internal/lab/control"
)

// Proxy is the proxy under test on one node.
type Proxy struct {
	*control.Process
	Node string
	Kind *Kind

	testbed *Testbed
	config  string
}

// NewProxy prepares a proxy on a node, of the kind under test or of another one.
func (tb *Testbed) NewProxy(node string, kind *Kind, binary string) (*Proxy, error) {
	name := filepath.Join(tb.dir, node+"."+filepath.Base(kind.Name))
	p := &Proxy{Node: node, Kind: kind, testbed: tb, config: name + ".conf"}
	var args []string
	for _, a := range kind.Args {
		args = append(args, p.expand(a))
	}
	p.Process = control.NewProcess(tb.Host(node), name+".log", binary, args...)
	return p, p.Configure(nil, nil)
}

func (p *Proxy) expand(s string) string {
	return strings.NewReplacer("{node}", p.Node, "{kubeconfig}", p.testbed.Plane.Kubeconfig(), "{config}", p.config,
		"{pods}", joined(PodRange)).Replace(s)
}

func joined[T fmt.Stringer](all []T) string {
	var words []string
	for _, s := range all {
		words = append(words, s.String())
	}
	return strings.Join(words, ",")
}

// Configure writes the configuration file for the next start, with these fields changed: nested as in the file. None
// means as it was in the beginning. Own are fields of Verdict's document behind kube-proxy's, which kube-proxy does not
// read.
func (p *Proxy) Configure(fields, own map[string]any) error {
	text := p.expand(p.Kind.Config)
	if p.Kind.mode != "" {
		document := kubeProxyConfig(p.Kind.mode, p.Node, p.testbed.Plane.Kubeconfig())
		if !p.Kind.status {
			merge(document, map[string]any{"ipvs": map[string]any{"minSyncPeriod": ipvsPause(p.testbed.Slow).String()}})
		}
		merge(document, fields)
		b, err := yaml.Marshal(document)
		if err != nil {
			return err
		}
		text = string(b)
		if own != nil {
			document := map[string]any{"apiVersion": "verdict/v1alpha1", "kind": "VerdictConfiguration"}
			merge(document, own)
			if b, err = yaml.Marshal(document); err != nil {
				return err
			}
			text += "---\n" + string(b)
		}
	}
	return os.WriteFile(p.config, []byte(text), 0o600)
}

// ipvsPause is kube-proxy's minSyncPeriod in mode ipvs, where each sync runs a dozen programs and writes everything. On
// an emulated machine, one after the other would leave the API server no time to answer.
func ipvsPause(s Slow) time.Duration {
	return max(20*time.Millisecond, (s - 1).Times(time.Second))
}

// kubeProxyConfig is kube-proxy's file for a node. What concerns the whole machine and not the node's namespace is
// left alone.
func kubeProxyConfig(mode, node, kubeconfig string) map[string]any {
	period := map[string]any{"syncPeriod": "30s", "minSyncPeriod": "20ms"}
	return map[string]any{
		"apiVersion":         "kubeproxy.config.k8s.io/v1alpha1",
		"kind":               "KubeProxyConfiguration",
		"mode":               mode,
		"clusterCIDR":        joined(PodRange),
		"hostnameOverride":   node,
		"clientConnection":   map[string]any{"kubeconfig": kubeconfig, "qps": 1000, "burst": 1000},
		"conntrack":          map[string]any{"maxPerCore": 0, "min": 0},
		"iptables":           period,
		"ipvs":               maps.Clone(period),
		"nftables":           maps.Clone(period),
		"metricsBindAddress": "127.0.0.1:10249",
		"healthzBindAddress": "0.0.0.0:10256",
		"oomScoreAdj":        0,
	}
}

func merge(into, from map[string]any) {
	for k, v := range from {
		m, isMap := v.(map[string]any)
		old, wasMap := into[k].(map[string]any)
		if isMap && wasMap {
			merge(old, m)
			continue
		}
		into[k] = v
	}
}

// SetMinSyncPeriod restarts the proxies with another minSyncPeriod than the suite's, which is short. At 0 a proxy
// chooses.
func (tb *Testbed) SetMinSyncPeriod(ctx context.Context, d time.Duration) error {
	period := map[string]any{"minSyncPeriod": d.String()}
	for _, proxy := range tb.Proxies {
		fields := map[string]any{"nftables": period, "iptables": period, "ipvs": period}
		if !tb.Kind.Adjustable() {
			fields = nil
		}
		if err := errors.Join(proxy.Configure(fields, nil), proxy.Restart(ctx, false)); err != nil {
			return err
		}
	}
	return tb.Sync(ctx)
}

// Restart ends the proxy and starts it again; kill says how it ends.
func (p *Proxy) Restart(ctx context.Context, kill bool) error {
	if err := p.End(ctx, kill); err != nil {
		return err
	}
	return p.Start()
}

// End ends the proxy, by SIGKILL to all its processes or as the kubelet does.
func (p *Proxy) End(ctx context.Context, kill bool) error {
	if kill {
		return p.Kill()
	}
	ctx, cancel := context.WithTimeout(ctx, 30*time.Second)
	defer cancel()
	return p.Stop(ctx)
}

// Listing gives what the proxy programmed on its node.
func (p *Proxy) Listing() string {
	var all strings.Builder
	for _, command := range p.Kind.Listings {
		out, err := p.testbed.Host(p.Node).Run(command[0], command[1:]...)
		if err != nil {
			out = err.Error()
		}
		fmt.Fprintf(&all, "# %s: %s\n%s\n", p.Node, strings.Join(command, " "), out)
	}
	return all.String()
}
