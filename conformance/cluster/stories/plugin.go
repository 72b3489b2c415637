package stories

import (
	"context"
	"errors"
	"fmt"
	"os/exec"
	"strconv"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/verdict-proxy/verdict/conformance/cluster"
)

// ask asks all nodes by all commands of the plugin, as an operator does.
func ask(ctx context.Context, b *Bed) error {
	client, err := b.podOf(ctx, "app=client", b.Nodes[0])
	if err != nil {
		return err
	}
	server, err := b.podOf(ctx, "app=echo", nil)
	if err != nil {
		return err
	}
	for _, q := range []struct {
		says string
		args []string
	}{
		{b.Nodes[2].Name, []string{"status"}},
		{server.Status.PodIP, []string{"explain", "default/" + client.Name, "svc/default/echo:80"}},
		{server.Status.PodIP, []string{"explain", "--live", "default/" + client.Name, "svc/default/echo:80"}},
		{"default/echo", []string{"explain", "--to", "pod/default/" + server.Name}},
		{"3 of 3 nodes", []string{"verify"}},
		{"3 of 3 nodes", []string{"diff"}},
		{"default/echo", []string{"top", "--interval", "1s"}},
		{"3 nodes have programmed it", []string{"wait", "default/echo", "--timeout", "1m"}},
		{"go1.", []string{"version"}},
	} {
		begin := time.Now()
		out, err := b.Verdict(ctx, q.args...)
		if err == nil && !strings.Contains(out, q.says) {
			err = fmt.Errorf("it does not say %q", q.says)
		}
		if err != nil {
			return fmt.Errorf("kubectl verdict %s: %w; it prints:\n%s", strings.Join(q.args, " "), err, out)
		}
		b.Log("kubectl verdict %s: %v", strings.Join(q.args, " "), time.Since(begin).Round(10*time.Millisecond))
	}
	return nil
}

// podOf returns a running pod with a label, on a node or anywhere.
func (b *Bed) podOf(ctx context.Context, selector string, n *cluster.Node) (*corev1.Pod, error) {
	pods, err := b.client.CoreV1().Pods("default").List(ctx, metav1.ListOptions{LabelSelector: selector})
	if err != nil {
		return nil, err
	}
	for i := range pods.Items {
		p := &pods.Items[i]
		if p.Status.Phase == corev1.PodRunning && p.DeletionTimestamp == nil && (n == nil || p.Spec.NodeName == n.Name) {
			return p, nil
		}
	}
	return nil, fmt.Errorf("no pod with %s", selector)
}

// exitStatus returns the exit status of a command of the plugin.
func exitStatus(err error) int {
	var ended *exec.ExitError
	if errors.As(err, &ended) {
		return ended.ExitCode()
	}
	return 0
}

// stopProxy stops one node's proxy by SIGSTOP while a Service changes: wait names this node, and no other, until the
// proxy goes on.
func stopProxy(ctx context.Context, b *Bed) (err error) {
	n := b.Nodes[1]
	_, proxy, err := processes(ctx, n)
	if err != nil {
		return err
	}
	signal := func(name string) error {
		_, err := n.Exec(context.WithoutCancel(ctx), "kill", "-"+name, strconv.Itoa(proxy))
		return err
	}
	if err := signal("STOP"); err != nil {
		return err
	}
	stopped := true
	defer func() {
		if stopped {
			err = errors.Join(err, signal("CONT"))
		}
	}()
	if err := b.annotate(ctx); err != nil {
		return err
	}
	out, waited := b.Verdict(ctx, "wait", "default/echo", "--timeout", "20s", "--node-timeout", "5s")
	if exitStatus(waited) != 1 || !strings.Contains(out, "1 of 3 nodes have not programmed it") ||
		!strings.Contains(out, n.Name) {
		return fmt.Errorf("with a proxy that is stopped, wait says %q: %w", out, waited)
	}
	b.Log("%s", strings.TrimSpace(out))
	stopped = false
	begin := time.Now()
	if err := signal("CONT"); err != nil {
		return err
	}
	if out, err = b.Verdict(ctx, "wait", "default/echo", "--timeout", "30s"); err != nil {
		return fmt.Errorf("when the proxy goes on, wait says %q: %w", out, err)
	}
	b.Log("after SIGCONT: %s, in %v", strings.TrimSpace(out), time.Since(begin).Round(10*time.Millisecond))
	return b.ready(ctx, n)
}

// annotate changes the Service in a way that all nodes have to program: what happens to endpoints that do not answer.
func (b *Bed) annotate(ctx context.Context) error {
	svc, err := b.client.CoreV1().Services("default").Get(ctx, "echo", metav1.GetOptions{})
	if err != nil {
		return err
	}
	value := "verdict/second-chance=observe"
	if svc.Annotations["verdict/second-chance"] == "observe" {
		value = "verdict/second-chance-"
	}
	_, err = b.Kubectl(ctx, "annotate", "--overwrite", "service/echo", value)
	return err
}

// corruptLimit is how soon a change of the tables by another program must be named.
const corruptLimit = 10 * time.Second

// corrupt deletes an element of one node's tables, which another program can do if they have no owner: status names the
// node.
func corrupt(ctx context.Context, b *Bed) error {
	n := b.Nodes[2]
	b.away = n // its tables go, twice
	err := b.startAfresh(ctx, n, "--own-tables=false")
	if err == nil {
		err = b.corruptOn(ctx, n)
	}
	return errors.Join(err, b.startAfresh(ctx, n, ""))
}

// startAfresh deletes a node's tables, whose owner they keep otherwise, and has Verdict make them anew, with a further
// argument if there is one.
func (b *Bed) startAfresh(ctx context.Context, n *cluster.Node, argument string) error {
	if err := b.label(ctx, n, "verdict", false); err != nil {
		return err
	}
	if err := b.podGone(ctx, n, ours); err != nil {
		return err
	}
	if _, err := n.Exec(ctx, "nft", "delete table ip verdict; delete table ip6 verdict"); err != nil {
		return err
	}
	if err := b.InstallVerdict(ctx, cluster.VerdictImage, additions(argument)...); err != nil {
		return err
	}
	if err := b.label(ctx, n, "verdict", true); err != nil {
		return err
	}
	return errors.Join(b.rolledOut(ctx, system, "daemonset/verdict"), b.ready(ctx, n))
}

func (b *Bed) corruptOn(ctx context.Context, n *cluster.Node) error {
	// The node that has just been programmed checks its tables first.
	if err := b.statusSays(ctx, 2*time.Minute, 0, n.Name); err != nil {
		return err
	}
	if _, err := n.Exec(ctx, "nft", "delete", "element", "ip", "verdict", "services", "{ "+frontend+" }"); err != nil {
		return err
	}
	begin := time.Now()
	if err := b.statusSays(ctx, corruptLimit, -1, n.Name+": another program changed the tables"); err != nil {
		return err
	}
	b.Log("named after %v", time.Since(begin).Round(10*time.Millisecond))
	_, err := b.Verdict(ctx, "verify")
	return err
}

// frontend is that of the Service "kubernetes", which no client here uses.
const frontend = "10.96.0.1 . tcp . 443"

// statusSays waits until status has an exit status, or any if that is -1, and says something.
func (b *Bed) statusSays(ctx context.Context, limit time.Duration, code int, text string) error {
	return cluster.Wait(ctx, limit, fmt.Sprintf("status says %q", text), func() error {
		out, err := b.Verdict(ctx, "status")
		if code >= 0 && exitStatus(err) != code || !strings.Contains(out, text) {
			return fmt.Errorf("it says %q: %w", out, err)
		}
		return nil
	})
}

// startTaint is the key that the component's argument names.
const startTaint = "verdict-proxy.github.io/not-programmed"

// nodeObject has the proxies write the condition of their Nodes, and remove a taint from one.
func nodeObject(ctx context.Context, b *Bed) error {
	n := b.Nodes[2]
	if _, err := b.Kubectl(ctx, "taint", "node", n.Name, startTaint+":NoSchedule", "other:PreferNoSchedule"); err != nil {
		return err
	}
	err := b.InstallNodeVerdict(ctx, cluster.VerdictImage, additions("")...)
	if err == nil {
		err = b.rolledOut(ctx, system, "daemonset/verdict")
	}
	if err == nil {
		_, err = b.Kubectl(ctx, "wait", "node", "--all", "--for=condition=ServicesProgrammed", "--timeout=1m")
	}
	if err == nil {
		err = b.taintGone(ctx, n)
	}
	if err == nil {
		err = b.conditionStays(ctx)
	}
	if err == nil {
		err = b.conditionFollows(ctx, n)
	}
	_, errTaint := b.Kubectl(ctx, "taint", "node", n.Name, "other-")
	return errors.Join(err, errTaint, b.verdict(ctx, cluster.VerdictImage, ""), b.removeConditions(ctx))
}

// conditionFollows takes the proxy from a node, and gives it another one.
func (b *Bed) conditionFollows(ctx context.Context, n *cluster.Node) error {
	for _, has := range []bool{false, true} {
		if err := b.label(ctx, n, "verdict", has); err != nil {
			return err
		}
		status := map[bool]string{false: "Unknown", true: "True"}[has]
		_, err := b.Kubectl(ctx, "wait", "node", n.Name, "--for=condition=ServicesProgrammed="+status, "--timeout=1m")
		if err != nil {
			return err
		}
	}
	return b.ready(ctx, n)
}

// removeConditions removes what nobody writes any more, as docs/CLUSTER.md says.
func (b *Bed) removeConditions(ctx context.Context) error {
	var errs []error
	for _, n := range b.Nodes {
		_, err := b.Kubectl(ctx, "patch", "node", n.Name, "--subresource=status", "-p",
			`{"status":{"conditions":[{"$patch":"delete","type":"ServicesProgrammed"}]}}`)
		errs = append(errs, err)
	}
	_, err := b.Kubectl(ctx, "delete", "validatingadmissionpolicy,validatingadmissionpolicybinding", "verdict-node")
	return errors.Join(append(errs, err)...)
}

func (b *Bed) taintGone(ctx context.Context, n *cluster.Node) error {
	return cluster.Wait(ctx, time.Minute, "the taint is gone", func() error {
		node, err := b.client.CoreV1().Nodes().Get(ctx, n.Name, metav1.GetOptions{})
		if err != nil {
			return err
		}
		if len(node.Spec.Taints) != 1 || node.Spec.Taints[0].Key != "other" {
			return fmt.Errorf("taints %v", node.Spec.Taints)
		}
		return nil
	})
}

// conditionStays says whether the condition is the same after changes of Services and the death of a proxy.
func (b *Bed) conditionStays(ctx context.Context) error {
	conditions := func() (string, error) {
		return b.Kubectl(ctx, "get", "nodes", "-o",
			`jsonpath={range .items[*]}{.status.conditions[?(@.type=="ServicesProgrammed")]}{"\n"}{end}`)
	}
	before, err := conditions()
	if err != nil {
		return err
	}
	for range 4 {
		if err := b.annotate(ctx); err != nil {
			return err
		}
	}
	if err := kill("proxy")(ctx, b); err != nil {
		return err
	}
	if _, err := b.Verdict(ctx, "wait", "default/echo", "--timeout", "1m"); err != nil {
		return err
	}
	after, err := conditions()
	if err == nil && after != before {
		err = fmt.Errorf("conditions were %s, and are now %s", before, after)
	}
	return err
}
