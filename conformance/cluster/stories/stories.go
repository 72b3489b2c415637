package stories

import (
	"context"
	"errors"
	"fmt"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/verdict-proxy/verdict/conformance/cluster"
	"github.com/verdict-proxy/verdict/conformance/cluster/neighbors"
)

// Choose returns the stories whose names match, in their order. Those under kube-proxy bring the two that lead there
// and back.
func Choose(name *regexp.Regexp) (chosen []Story) {
	matches := func(s Story) bool { return name.MatchString(s.Name) }
	under := slices.ContainsFunc(All, func(s Story) bool { return s.UnderKubeProxy && matches(s) })
	for _, s := range All {
		if matches(s) || under && s.Moves {
			chosen = append(chosen, s)
		}
	}
	return chosen
}

// All are the stories, in an order in which each finds what it needs. Each begins and ends with Verdict on all nodes;
// the first five belong together.
var All = []Story{
	{Name: "back to kube-proxy, node by node", Moves: true, Do: backToKubeProxy},
	{Name: "node drained, under kube-proxy", UnderKubeProxy: true, Do: drain},
	{Name: "rolling updates, under kube-proxy", UnderKubeProxy: true, Do: rollingUnderKubeProxy},
	{Name: "kubelets stopped, under kube-proxy", UnderKubeProxy: true, Refused: true, Do: stopKubelets},
	{Name: "from kube-proxy, node by node", Moves: true, Do: fromKubeProxy},
	{Name: "pod deleted", Do: deletePod("--grace-period=30")},
	{Name: "pod deleted by force", Do: deletePod("--grace-period=0", "--force")},
	{Name: "proxy killed", Do: kill("proxy")},
	{Name: "keeper killed", Do: kill("keeper")},
	{Name: "container out of memory", Do: outOfMemory},
	{Name: "from kustomize to Helm, and back", Do: helm},
	{Name: "newcomer that cannot start", Do: badNewcomer},
	{Name: "to the older version", NeedsOld: true, Do: func(ctx context.Context, b *Bed) error {
		return b.verdict(ctx, b.OldImage, "")
	}},
	{Name: "upgrade from the older version", Do: func(ctx context.Context, b *Bed) error {
		return b.verdict(ctx, cluster.VerdictImage, "")
	}},
	{Name: "asked by kubectl verdict", Do: ask},
	{Name: "proxy stopped for half a minute, and waited for", Do: stopProxy},
	{Name: "tables changed by another program", Do: corrupt},
	{Name: "condition and taint of the Node", Do: nodeObject},
	{Name: "rolling updates, with the barrier", Do: rolling},
	{Name: "neighbors restarted", Do: restartNeighbors},
	{Name: "API server gone", Do: serverGone},
	{Name: "kubelets stopped", Refused: true, Do: stopKubelets},
	{Name: "kubelets stopped, with the last resort", Refused: true, Do: stopKubeletsWith("--last-resort=on")},
	{Name: "node drained", Do: drain},
	{Name: "node rebooted, seen by the others", Do: reboot},
}

// ours selects Verdict's pods.
const ours = "app.kubernetes.io/name=verdict"

// restartNeighbors replaces the pods of the programs that the cluster has beside Verdict. Without any, it does nothing.
func restartNeighbors(ctx context.Context, b *Bed) error {
	names, err := b.Neighbors()
	if err != nil {
		return err
	}
	all, err := neighbors.Find(names)
	for _, n := range all {
		err = errors.Join(err, n.Restart(ctx, b.Cluster))
	}
	return err
}

// backToKubeProxy follows docs/INSTALL.md.
func backToKubeProxy(ctx context.Context, b *Bed) error {
	if err := b.verdict(ctx, cluster.VerdictImage, "--takeover=never"); err != nil {
		return err
	}
	if err := b.InstallKubeProxy(ctx); err != nil {
		return err
	}
	if err := b.InstallCleanup(ctx, cluster.VerdictImage,
		cluster.Addition{Path: "nodeSelector/verdict-cleanup", Value: "wanted"}); err != nil {
		return err
	}
	for _, n := range b.Nodes {
		if err := b.backOn(ctx, n); err != nil {
			return fmt.Errorf("%s: %w", n.Name, err)
		}
	}
	_, err := b.Kubectl(ctx, "-n", system, "delete", "daemonset", "verdict-cleanup", "--wait=true")
	return err
}

func (b *Bed) backOn(ctx context.Context, n *cluster.Node) error {
	if err := b.label(ctx, n, "kube-proxy", true); err != nil {
		return err
	}
	err := cluster.Wait(ctx, 2*time.Minute, "kube-proxy has programmed the node", func() error {
		rules, err := n.Exec(ctx, "nft", "list", "table", "ip", "kube-proxy")
		if err == nil && !strings.Contains(rules, "10.96.0.80") {
			err = errors.New("its table lacks the Service")
		}
		return err
	})
	if err != nil {
		return err
	}
	if err := b.label(ctx, n, "verdict", false); err != nil {
		return err
	}
	if err := b.podGone(ctx, n, ours); err != nil {
		return err
	}
	if err := b.label(ctx, n, "verdict-cleanup", true); err != nil {
		return err
	}
	if err := cluster.Wait(ctx, time.Minute, "Verdict's tables are removed", func() error {
		tables, err := n.Exec(ctx, "nft", "list", "tables")
		if strings.Contains(tables, " verdict") {
			err = errors.New(tables)
		}
		return err
	}); err != nil {
		return err
	}
	return b.label(ctx, n, "verdict-cleanup", false)
}

// fromKubeProxy finds kube-proxy on all nodes and Verdict on none.
func fromKubeProxy(ctx context.Context, b *Bed) error {
	if err := b.verdict(ctx, cluster.VerdictImage, ""); err != nil {
		return err
	}
	for _, n := range b.Nodes {
		if err := b.fromOn(ctx, n); err != nil {
			return fmt.Errorf("%s: %w", n.Name, err)
		}
	}
	_, err := b.Kubectl(ctx, "-n", system, "delete", "daemonset", "kube-proxy", "--wait=true")
	return err
}

func (b *Bed) fromOn(ctx context.Context, n *cluster.Node) error {
	if err := b.label(ctx, n, "verdict", true); err != nil {
		return err
	}
	if err := cluster.Wait(ctx, 2*time.Minute, "Verdict has programmed the node", func() error {
		pod, err := b.podOn(ctx, n, ours)
		if err != nil {
			return err
		}
		_, err = b.Kubectl(ctx, "-n", system, "exec", pod.Name, "--", "/usr/local/bin/verdict", "verify")
		return err
	}); err != nil {
		return err
	}
	if err := b.label(ctx, n, "kube-proxy", false); err != nil {
		return err
	}
	if err := b.podGone(ctx, n, "k8s-app=kube-proxy"); err != nil {
		return err
	}
	return b.ready(ctx, n)
}

// podOn returns the newest pod of a node with a label.
func (b *Bed) podOn(ctx context.Context, n *cluster.Node, selector string) (*corev1.Pod, error) {
	pods, err := b.client.CoreV1().Pods(system).List(ctx, metav1.ListOptions{LabelSelector: selector,
		FieldSelector: "spec.nodeName=" + n.Name})
	if err != nil {
		return nil, err
	}
	var newest *corev1.Pod
	for i := range pods.Items {
		p := &pods.Items[i]
		if newest == nil || newest.CreationTimestamp.Before(&p.CreationTimestamp) {
			newest = p
		}
	}
	if newest == nil {
		return nil, fmt.Errorf("no pod with %s on %s", selector, n.Name)
	}
	return newest, nil
}

func (b *Bed) podGone(ctx context.Context, n *cluster.Node, selector string) error {
	return cluster.Wait(ctx, 2*time.Minute, "the pod with "+selector+" is gone", func() error {
		pod, err := b.podOn(ctx, n, selector)
		if err != nil {
			return nil
		}
		return fmt.Errorf("%s is there", pod.Name)
	})
}

// ready waits until a pod of Verdict's on the node is Ready and no other is there.
func (b *Bed) ready(ctx context.Context, n *cluster.Node) error {
	return cluster.Wait(ctx, 3*time.Minute, "Verdict is ready on "+n.Name, func() error {
		pod, err := b.podOn(ctx, n, ours)
		if err != nil {
			return err
		}
		if pod.DeletionTimestamp != nil {
			return fmt.Errorf("%s ends", pod.Name)
		}
		for _, c := range pod.Status.Conditions {
			if c.Type == corev1.PodReady && c.Status == corev1.ConditionTrue {
				return nil
			}
		}
		return fmt.Errorf("%s is not", pod.Name)
	})
}

func deletePod(how ...string) func(context.Context, *Bed) error {
	return func(ctx context.Context, b *Bed) error {
		n := b.Nodes[1]
		pod, err := b.podOn(ctx, n, ours)
		if err != nil {
			return err
		}
		_, err = b.Kubectl(ctx, append([]string{"-n", system, "delete", "pod", pod.Name, "--wait=false"}, how...)...)
		if err != nil {
			return err
		}
		err = cluster.Wait(ctx, time.Minute, "another pod is there", func() error {
			if now, err := b.podOn(ctx, n, ours); err != nil || now.Name == pod.Name {
				return errors.Join(err, errors.New("not yet"))
			}
			return nil
		})
		if err != nil {
			return err
		}
		if err := b.ready(ctx, n); err != nil {
			return err
		}
		return cluster.Wait(ctx, time.Minute, pod.Name+" is gone", func() error {
			_, err := b.client.CoreV1().Pods(system).Get(ctx, pod.Name, metav1.GetOptions{})
			if apierrors.IsNotFound(err) {
				return nil
			}
			return errors.Join(err, errors.New("it is there"))
		})
	}
}

// kill kills the proxy, or its parent process, which keeps the socket.
func kill(which string) func(context.Context, *Bed) error {
	return func(ctx context.Context, b *Bed) error {
		n := b.Nodes[1]
		keeper, proxy, err := processes(ctx, n)
		if err != nil {
			return err
		}
		pid := map[string]int{"keeper": keeper, "proxy": proxy}[which]
		if _, err := n.Exec(ctx, "kill", "-KILL", strconv.Itoa(pid)); err != nil {
			return err
		}
		if err := cluster.Wait(ctx, time.Minute, "there is another "+which, func() error {
			k, p, err := processes(ctx, n)
			if err == nil && (k == pid || p == pid) {
				err = errors.New("it is there still")
			}
			return err
		}); err != nil {
			return err
		}
		return b.ready(ctx, n)
	}
}

// processes returns the keeper's and the proxy's process ids, as the node sees them.
func processes(ctx context.Context, n *cluster.Node) (keeper, proxy int, err error) {
	text, err := n.Exec(ctx, "pgrep", "-f", "^/usr/local/bin/verdict run --config")
	if err != nil {
		return 0, 0, err
	}
	pids := strings.Fields(text)
	if len(pids) != 2 {
		return 0, 0, fmt.Errorf("%d processes of Verdict", len(pids))
	}
	// The child is younger, and has the greater number.
	keeper, errKeeper := strconv.Atoi(pids[0])
	proxy, errProxy := strconv.Atoi(pids[1])
	return keeper, proxy, errors.Join(errKeeper, errProxy)
}

// badNewcomer changes the DaemonSet to one whose pods cannot start, and back.
func badNewcomer(ctx context.Context, b *Bed) error {
	if err := b.InstallVerdict(ctx, cluster.VerdictImage, additions("--no-such-flag")...); err != nil {
		return err
	}
	err := cluster.Wait(ctx, 2*time.Minute, "a new pod has failed twice", func() error {
		pods, err := b.client.CoreV1().Pods(system).List(ctx, metav1.ListOptions{LabelSelector: ours})
		if err != nil {
			return err
		}
		for _, p := range pods.Items {
			for _, s := range p.Status.ContainerStatuses {
				if s.RestartCount >= 2 {
					return nil
				}
			}
		}
		return errors.New("not yet")
	})
	return errors.Join(err, b.verdict(ctx, cluster.VerdictImage, ""))
}

// serverGone stops the API server for a time.
func serverGone(ctx context.Context, b *Bed) error {
	if err := b.StopServer(); err != nil {
		return err
	}
	select {
	case <-ctx.Done():
	case <-time.After(b.Outage):
	}
	if err := b.StartServer(ctx); err != nil {
		return err
	}
	b.served = time.Now()
	return b.rolledOut(ctx, system, "daemonset/verdict")
}

// reboot takes the power from a node that has been drained. Its own clients, and those outside that use it, do not
// count: a load balancer would have left it.
func reboot(ctx context.Context, b *Bed) error {
	n := b.Nodes[2]
	b.away = n
	if _, err := b.Kubectl(ctx, "drain", n.Name, "--ignore-daemonsets", "--timeout=2m"); err != nil {
		return err
	}
	if err := n.Stop(); err != nil {
		return err
	}
	if err := n.Start(ctx); err != nil {
		return err
	}
	if _, err := b.Kubectl(ctx, "uncordon", n.Name); err != nil {
		return err
	}
	if err := cluster.Wait(ctx, 3*time.Minute, "Verdict has programmed the node again", func() error {
		_, err := n.Exec(ctx, "nft", "list", "table", "ip", "verdict")
		return err
	}); err != nil {
		return err
	}
	return errors.Join(b.ready(ctx, n), b.startOutside(n))
}
