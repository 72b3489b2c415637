package neighbors

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/verdict-proxy/verdict/conformance/cluster"
)

// Proxies are the Service proxies that Use knows.
var Proxies = []string{"verdict", "kube-proxy"}

const system = "kube-system"

// Use gives the cluster a Service proxy: Verdict, or kube-proxy in nftables mode. Afterwards the other one is gone,
// with all that it wrote.
func (b *Bed) Use(ctx context.Context, proxy string) error {
	b.Log("the proxy is to be %s", proxy)
	switch proxy {
	case "verdict":
		return b.useVerdict(ctx)
	case "kube-proxy":
		return b.useKubeProxy(ctx)
	}
	return fmt.Errorf("there is no proxy %q; there are %s", proxy, strings.Join(Proxies, ", "))
}

func (b *Bed) useVerdict(ctx context.Context) error {
	if err := b.UseVerdict(ctx, cluster.VerdictImage, cluster.Addition{Path: "containers/0/args/-",
		Value: "--client-address=annotated"}); err != nil {
		return err
	}
	return b.tablesGone(ctx, "kube-proxy")
}

func (b *Bed) useKubeProxy(ctx context.Context) error {
	// Verdict would take over from a kube-proxy. Its tables stay until the cleanup removes them.
	if _, err := b.Kubectl(ctx, "-n", system, "delete", "daemonset", "verdict", "--ignore-not-found", "--wait=true",
		"--cascade=foreground"); err != nil {
		return err
	}
	if err := b.InstallCleanup(ctx, cluster.VerdictImage); err != nil {
		return err
	}
	if err := errors.Join(b.tablesGone(ctx, "verdict"), b.DeleteOverlay(ctx)); err != nil {
		return err
	}
	for _, n := range b.Nodes {
		if _, err := b.Kubectl(ctx, "label", "--overwrite", "node", n.Name, "kube-proxy=wanted"); err != nil {
			return err
		}
	}
	if err := b.InstallKubeProxy(ctx); err != nil {
		return err
	}
	if _, err := b.Kubectl(ctx, "-n", system, "rollout", "status", "daemonset/kube-proxy", "--timeout=3m"); err != nil {
		return err
	}
	return b.kubeProxyReady(ctx)
}

// kubeProxyReady waits until kube-proxy has programmed a Service on all nodes.
func (b *Bed) kubeProxyReady(ctx context.Context) error {
	ips, _, err := b.service(ctx, space, "both")
	if err != nil {
		return err
	}
	for _, n := range b.Nodes {
		if err := cluster.Wait(ctx, time.Minute, "kube-proxy has programmed "+n.Name, func() error {
			rules, err := n.Exec(ctx, "nft", "list", "table", "ip", "kube-proxy")
			if err == nil && !strings.Contains(rules, ips[0]) {
				err = errors.New("its table lacks a Service")
			}
			return err
		}); err != nil {
			return err
		}
	}
	return nil
}

// tablesGone waits until no node has a table whose name begins so.
func (b *Bed) tablesGone(ctx context.Context, name string) error {
	for _, n := range b.Nodes {
		if err := cluster.Wait(ctx, time.Minute, "the tables of "+name+" are gone from "+n.Name, func() error {
			tables, err := n.Exec(ctx, "nft", "list", "tables")
			if strings.Contains(tables, " "+name) {
				err = errors.New(tables)
			}
			return err
		}); err != nil {
			return err
		}
	}
	return nil
}
