package cluster

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"
	corev1 "k8s.io/api/core/v1"

	"github.com/verdict-proxy/verdict/internal/system/terminal"
)

// Cluster reaches the proxies of all nodes.
type Cluster struct {
	API  API
	Exec Executor
	// Namespace and Selector find the pods of the DaemonSet.
	Namespace, Selector string
	// Timeout bounds what one node may take, and Parallel how many are asked at once.
	Timeout  time.Duration
	Parallel int
	// Progress, if not nil, is called after each node with how many have answered, of how many.
	Progress func(done, of int)
	// Now is the clock; nil means time.Now.
	Now func() time.Time
}

// The defaults.
const (
	DefaultNamespace = "kube-system"
	DefaultSelector  = "app.kubernetes.io/name=verdict"
	DefaultParallel  = 16
	DefaultTimeout   = 15 * time.Second

	// container is the DaemonSet's container.
	container = "verdict"
	// maxOutput bounds what one node may answer.
	maxOutput = 32 << 20
)

func (c *Cluster) now() time.Time {
	if c.Now != nil {
		return c.Now()
	}
	return time.Now()
}

// Target is a node, and the pod in which to ask.
type Target struct {
	Node, Pod string
	// Flags say where the pod's configuration is.
	Flags []string
	// Missing says why there is no pod to ask; empty if there is one.
	Missing string
}

// Targets lists all nodes by name, with their pods. Without the right to list nodes, they are those that have pods, and
// note says so.
func (c *Cluster) Targets(ctx context.Context) (targets []Target, note string, err error) {
	pods, err := c.API.Pods(ctx, c.Namespace, c.Selector)
	if err != nil {
		return nil, "", err
	}
	best := map[string]*corev1.Pod{}
	for i := range pods {
		p := &pods[i]
		isProxy := slices.ContainsFunc(p.Spec.Containers, func(c corev1.Container) bool { return c.Name == container })
		if old := best[p.Spec.NodeName]; isProxy && p.Spec.NodeName != "" && (old == nil || better(p, old)) {
			best[p.Spec.NodeName] = p
		}
	}
	if len(best) == 0 {
		return nil, "", fmt.Errorf("no pod in namespace %s has the label %s and a container %s: see -n and --selector",
			c.Namespace, c.Selector, container)
	}
	names := map[string]bool{}
	for n := range best {
		names[n] = true
	}
	nodes, err := c.API.Nodes(ctx)
	if err != nil {
		note = "nodes without a pod are not known: " + err.Error()
	}
	for i := range nodes {
		if os := nodes[i].Labels[corev1.LabelOSStable]; os == "" || os == "linux" {
			names[nodes[i].Name] = true
		}
	}
	for n := range names {
		targets = append(targets, targetOf(n, best[n]))
	}
	slices.SortFunc(targets, func(a, b Target) int { return strings.Compare(a.Node, b.Node) })
	return targets, note, nil
}

// better reports whether a pod is a better one to ask than another one of its node, as during an upgrade: it runs, and
// is newer. Both would ask the same proxy.
func better(p, old *corev1.Pod) bool {
	if runs, ran := running(p), running(old); runs != ran {
		return runs
	}
	return old.CreationTimestamp.Before(&p.CreationTimestamp)
}

func running(p *corev1.Pod) bool {
	return p.Status.Phase == corev1.PodRunning && slices.ContainsFunc(p.Status.ContainerStatuses,
		func(s corev1.ContainerStatus) bool { return s.Name == container && s.State.Running != nil })
}

// ImageOf returns the image of a pod of the DaemonSet.
func ImageOf(p *corev1.Pod) (image string) {
	for _, c := range p.Spec.Containers {
		if c.Name == container {
			image = c.Image
		}
	}
	return image
}

func targetOf(node string, p *corev1.Pod) Target {
	t := Target{Node: node}
	switch {
	case p == nil:
		t.Missing = "no pod of Verdict is on this node"
		return t
	case !running(p):
		t.Missing = fmt.Sprintf("pod %s does not run (%s)", p.Name, p.Status.Phase)
	}
	t.Pod = p.Name
	for _, c := range p.Spec.Containers {
		for _, a := range c.Args {
			if c.Name == container && strings.HasPrefix(a, "--config=") {
				t.Flags = append(t.Flags, a)
			}
		}
	}
	return t
}

// Result is what a command in a pod said.
type Result struct {
	Target
	Stdout, Stderr []byte
	// Code is the exit status, if Err is nil.
	Code int
	Err  error
}

// Each runs a command of verdict on every node, some at a time, and returns the results in the order of the targets.
func (c *Cluster) Each(ctx context.Context, targets []Target, argv func(Target) []string) []Result {
	return c.EachWith(ctx, targets, "", argv)
}

// EachWith is Each for commands that read a text from standard input.
func (c *Cluster) EachWith(ctx context.Context, targets []Target, input string, argv func(Target) []string) []Result {
	results := make([]Result, len(targets))
	var group errgroup.Group
	group.SetLimit(max(c.Parallel, 1))
	var mu sync.Mutex
	done := 0
	for i, t := range targets {
		group.Go(func() error {
			results[i] = c.run(ctx, t, input, argv(t))
			if c.Progress != nil {
				mu.Lock()
				defer mu.Unlock()
				done++
				c.Progress(done, len(targets))
			}
			return nil
		})
	}
	_ = group.Wait() // none returns an error
	return results
}

func (c *Cluster) run(ctx context.Context, t Target, input string, argv []string) Result {
	r := Result{Target: t}
	if t.Missing != "" {
		r.Err = errors.New(t.Missing)
		return r
	}
	limited, cancel := context.WithTimeout(ctx, c.Timeout)
	defer cancel()
	out, errs := &bounded{left: maxOutput}, &bounded{left: 64 << 10}
	var stdin io.Reader
	if input != "" {
		stdin = strings.NewReader(input)
	}
	r.Code, r.Err = c.Exec.Exec(limited, c.Namespace, t.Pod, container, append([]string{"verdict"}, argv...), stdin, out,
		errs)
	if r.Err != nil && ctx.Err() == nil && errors.Is(limited.Err(), context.DeadlineExceeded) {
		r.Err = fmt.Errorf("no answer within %v", c.Timeout)
	}
	r.Stdout, r.Stderr = out.b.Bytes(), bytes.TrimSpace(errs.b.Bytes())
	if r.Err == nil && out.left < 0 {
		r.Err = fmt.Errorf("the answer is larger than %d MiB", maxOutput>>20)
	}
	return r
}

// failure returns why a command gave no answer: it could not run, or ended with an error. Codes are the exit statuses
// that come with an answer.
func (r *Result) failure(codes ...int) error {
	switch {
	case r.Err != nil:
		return r.Err
	case slices.Contains(codes, r.Code):
		return nil
	}
	text := string(r.Stderr)
	if i := strings.LastIndexByte(text, '\n'); i >= 0 {
		text = text[i+1:]
	}
	return fmt.Errorf("exit status %d: %.300s", r.Code, text)
}

// read reads the answer of a command, which is JSON; codes are as for failure.
func (r *Result) read(into any, codes ...int) error {
	if err := r.failure(codes...); err != nil {
		return err
	}
	return json.Unmarshal(r.Stdout, into)
}

// Unanswered are the nodes without an answer.
type Unanswered struct {
	Failed []NodeAnswer `json:"failed,omitempty"`
}

func (u *Unanswered) add(node string, err error) {
	u.Failed = append(u.Failed, NodeAnswer{Node: node, Error: err.Error()})
}

// Code returns the exit status.
func (u *Unanswered) Code() int {
	if len(u.Failed) > 0 {
		return codeTrouble
	}
	return codeSame
}

func (u *Unanswered) print(p *terminal.Printer) {
	for _, n := range u.Failed {
		p.Line("%s: %s", n.Node, p.Paint(terminal.Red, n.Error))
	}
}

// bounded keeps the first bytes that are written to it.
type bounded struct {
	b    bytes.Buffer
	left int
}

func (b *bounded) Write(p []byte) (int, error) {
	b.b.Write(p[:max(0, min(len(p), b.left))])
	b.left -= len(p)
	return len(p), nil
}

// Log runs "verdict log" on a node.
func (c *Cluster) Log(ctx context.Context, node string, options []string) (Result, error) {
	t, err := c.TargetOn(ctx, node)
	if err != nil {
		return Result{}, err
	}
	return c.Each(ctx, []Target{t}, func(t Target) []string {
		return slices.Concat([]string{"log"}, t.Flags, options)
	})[0], nil
}
