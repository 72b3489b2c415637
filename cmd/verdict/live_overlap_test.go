//go:build peers

package main

import (
	"context"
	"slices"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/verdict-proxy/verdict/internal/lab"
	"github.com/verdict-proxy/verdict/internal/lab/labtest"
	"github.com/verdict-proxy/verdict/internal/system/ipfamily"
	"github.com/verdict-proxy/verdict/sync/snapshot"
)

// TestLiveOverlap takes over from a real kube-proxy on a node whose network is in the range of Services. With
// kube-proxy, beside it and after it, with both of Verdict's backends, the node is reached by all who reached it
// before.
func TestLiveOverlap(t *testing.T) {
	for _, mode := range []string{"nftables", "iptables"} {
		for _, backend := range []string{"nftables", "iptables"} {
			t.Run(mode+"/"+backend, func(t *testing.T) { overlapLive(newLive(t, mode), backend) })
		}
	}
}

func overlapLive(l *live, backend string) {
	t, c := l.t, l.cluster
	o := &overlapping{Cluster: c, t: t, backend: backend}
	for i, f := range ipfamily.All {
		o.api[i] = c.Outside.IP(f).String()
	}
	o.inNetwork([2]string{"10.100.0.10", "fd00:10:96::aa10"}, [2]string{"10.100.0.20", "fd00:10:96::aa20"},
		[2]int{16, 120})
	for _, h := range []*lab.Host{c.Node, c.Node2} {
		_, err := h.Serve(snapshot.TCP, sshPort, kubeletPort)
		labtest.Check(t, err)
	}
	nodes := l.plane.Client.CoreV1().Nodes()
	node, err := nodes.Get(t.Context(), "node", metav1.GetOptions{})
	labtest.Check(t, err)
	node.Status.Addresses = nil
	for _, a := range o.node {
		node.Status.Addresses = append(node.Status.Addresses, corev1.NodeAddress{Type: corev1.NodeInternalIP, Address: a})
	}
	_, err = nodes.UpdateStatus(t.Context(), node, metav1.UpdateOptions{})
	labtest.Check(t, err)
	// kube-proxy's nftables mode drops what the node sends into the range, and what it forwards.
	reached := func(when string, kubeProxyDrops bool) {
		t.Helper()
		for i := range ipfamily.All {
			for _, p := range o.paths(i) {
				toNode := p.to == o.node[i]
				if !toNode && p.to != o.node2[i] || kubeProxyDrops && (!toNode || p.from == c.Node) {
					continue
				}
				o.reaches(when, p)
			}
		}
	}
	reached("without a proxy", false)
	l.startProxy()
	l.programmed()
	reached("with kube-proxy", l.mode == "nftables")
	l.run("--backend=" + backend)
	reached("beside kube-proxy", l.mode == "nftables")
	ctx, cancel := context.WithTimeout(t.Context(), liveLimit)
	defer cancel()
	labtest.Check(t, l.proxy.Stop(ctx))
	l.until("kube-proxy's table is gone", func() bool {
		tables, err := c.Node.Run("nft", "list", "tables")
		return err == nil && !slices.Contains(strings.Fields(tables), "kube-proxy")
	})
	reached("after kube-proxy", false)
	if said := strings.Count(l.said(), overlapWarning); said != 1 {
		t.Errorf("it is said %d times:\n%s", said, l.said())
	}
	l.end()
}
