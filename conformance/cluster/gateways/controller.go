package gateways

import (
	"context"
	"encoding/json"
	"fmt"
	"regexp"
	"strconv"
	"strings"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/verdict-proxy/verdict/conformance/cluster"
)

// leader returns the node on which the controller leads. No node has two.
func (b *Bed) leader(ctx context.Context) (*cluster.Node, error) {
	const system = "kube-system"
	pod, err := b.Kubectl(ctx, "-n", system, "get", "lease", "verdict-collector", "-o", "jsonpath={.spec.holderIdentity}")
	if err != nil {
		return nil, err
	}
	on, err := b.Kubectl(ctx, "-n", system, "get", "pod", pod, "-o", "jsonpath={.spec.nodeName}")
	for _, n := range b.Nodes {
		if n.Name == on {
			return n, err
		}
	}
	return nil, fmt.Errorf("the leader %q is on no node: %w", pod, err)
}

func (b *Bed) process(ctx context.Context, n *cluster.Node) (string, error) {
	pid, err := n.Exec(ctx, "pgrep", "-f", "^/usr/local/bin/verdict gateway")
	return strings.TrimSpace(pid), err
}

func (b *Bed) signal(ctx context.Context, n *cluster.Node, name string) error {
	pid, err := b.process(ctx, n)
	if err == nil {
		_, err = n.Exec(ctx, "kill", "-"+name, pid)
	}
	return err
}

var resident = regexp.MustCompile(`(?m)^(VmHWM|RssAnon):\s+(\d+) kB$`)

// memory returns what the controller that leads has in memory: at most with the program itself, and now without it.
func (b *Bed) memory(ctx context.Context) (string, error) {
	n, err := b.leader(ctx)
	if err != nil {
		return "", err
	}
	pid, err := b.process(ctx, n)
	if err != nil {
		return "", err
	}
	text, err := n.Exec(ctx, "cat", "/proc/"+pid+"/status")
	if err != nil {
		return "", err
	}
	var all []string
	for _, m := range resident.FindAllStringSubmatch(text, -1) {
		all = append(all, m[1]+" "+m[2]+" KiB")
	}
	return strings.Join(all, ", "), nil
}

// writes are how often statuses were written since the API server started.
type writes struct{ Gateways, Routes, Services int }

func (w writes) minus(o writes) writes {
	return writes{w.Gateways - o.Gateways, w.Routes - o.Routes, w.Services - o.Services}
}

var statusWrites = regexp.MustCompile(`(?m)^apiserver_request_total\{code="200"[^}]*` +
	`resource="(gateways|tcproutes|services)"[^}]*subresource="status",verb="(?:PUT|PATCH|APPLY)"[^}]*\} (\S+)$`)

func (b *Bed) writes(ctx context.Context) (writes, error) {
	text, err := b.Kubectl(ctx, "get", "--raw", "/metrics")
	var w writes
	for _, m := range statusWrites.FindAllStringSubmatch(text, -1) {
		n, e := strconv.ParseFloat(m[2], 64)
		if e != nil {
			return w, e
		}
		*map[string]*int{"gateways": &w.Gateways, "tcproutes": &w.Routes, "services": &w.Services}[m[1]] += int(n)
	}
	return w, err
}

// statuses are those of the Gateway and its route.
func (b *Bed) statuses(ctx context.Context) (string, error) {
	var all []any
	for _, name := range []string{"gateways", "tcproutes"} {
		o, err := b.objects.Resource(resource(name)).Namespace("edge").Get(ctx, "db", metav1.GetOptions{})
		if err != nil {
			return "", err
		}
		all = append(all, o.Object["status"])
	}
	text, err := json.Marshal(all)
	return string(text), err
}
