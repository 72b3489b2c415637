// Package trial makes real connections between pods of its own on all nodes, through Services of every kind, and says
// which fail and why. It removes what it makes.
package trial

import (
	"cmp"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"

	"github.com/verdict-proxy/verdict/internal/answers/cluster"
	"github.com/verdict-proxy/verdict/internal/system/clock"
	"github.com/verdict-proxy/verdict/sync/snapshot"
)

// Options say what is tried.
type Options struct {
	// Namespace is created and removed; empty means one with a name of its own.
	Namespace string
	// Image is that of the pods; empty means that of Verdict's. Nodes is on how many nodes they are at most.
	Image string
	Nodes int
	// Timeout bounds how long the pods may take until they answer, and Dial how long a connection may.
	Timeout, Dial time.Duration
	// LoadBalancer creates a Service of that type, too, which may cost something in a cloud.
	LoadBalancer bool
	// Keep leaves everything there.
	Keep bool
	// Say, if not nil, is told what is done next.
	Say func(text string)
}

const (
	// pollEvery is how often is asked whether something has happened, and cleanupTime how long removing may take.
	pollEvery   = time.Second
	cleanupTime = time.Minute
	// programTime is how long nodes may take to program the Services, and balanceTime a cloud to make a load balancer.
	programTime, balanceTime = 30 * time.Second, time.Minute
	// accountTime is how long a namespace may take until it has a ServiceAccount.
	accountTime = 20 * time.Second
	// runLabel is on the namespace: only one that has it is removed.
	runLabel = "verdict-test-run"
	kept     = "--keep"
)

// place is a node that takes part, with its pods.
type place struct {
	name      string
	addresses []netip.Addr
	pods      map[string]*corev1.Pod
}

// trial is one at work.
type trial struct {
	*cluster.Cluster
	o        Options
	report   *Report
	places   []*place
	services map[string]*corev1.Service
	// last is the Service that was created last.
	last string
}

// Run does everything. The report is there even if an error ends it early. If the context ends, that is the error.
func Run(ctx context.Context, c *cluster.Cluster, o Options) (*Report, error) {
	run := strings.ToLower(rand.Text()[:8])
	if o.Namespace == "" {
		o.Namespace = "verdict-test-" + run
	}
	if o.Say == nil {
		o.Say = func(string) {}
	}
	t := &trial{Cluster: c, o: o, report: &Report{Namespace: o.Namespace}, services: map[string]*corev1.Service{}}
	image, err := t.choose(ctx)
	if err != nil {
		return t.report, err
	}
	o.Say("creating namespace " + o.Namespace)
	object := namespaceObject(o.Namespace)
	object.Labels[runLabel] = run
	defer t.remove(ctx, run) // whatever came of creating it
	if err := t.API.Create(ctx, "/api/v1/namespaces", object); err != nil {
		return t.report, err
	}
	if err := t.create(ctx, image); err != nil {
		return t.report, err
	}
	if err := t.await(ctx); err != nil {
		return t.report, err
	}
	o.Say(fmt.Sprintf("connecting from %d pods", 2*len(t.places)))
	t.tryAll(ctx)
	t.explain(ctx)
	return t.report, ctx.Err()
}

// fails notes a node that cannot take part.
func (t *trial) fails(format string, args ...any) {
	t.report.Errors = append(t.report.Errors, fmt.Sprintf(format, args...))
}

// choose finds the nodes, and the image.
func (t *trial) choose(ctx context.Context) (image string, err error) {
	targets, _, err := t.Targets(ctx)
	if err != nil {
		return "", err
	}
	nodes, err := t.API.Nodes(ctx)
	if err != nil {
		return "", err
	}
	image = t.o.Image
	for _, target := range targets {
		at := slices.IndexFunc(nodes, func(n corev1.Node) bool { return n.Name == target.Node })
		switch {
		case target.Missing != "":
			t.fails("node %s: %s", target.Node, target.Missing)
			continue
		case at < 0:
			continue
		case len(t.places) == t.o.Nodes:
			t.report.Skipped = append(t.report.Skipped, fmt.Sprintf("node %s and those after it: --nodes is %d", target.Node,
				t.o.Nodes))
			return image, nil
		}
		t.places = append(t.places, &place{target.Node, addressesOf(&nodes[at]), map[string]*corev1.Pod{}})
		if image == "" {
			pod, err := t.API.Pod(ctx, t.Namespace, target.Pod)
			if err != nil {
				return "", err
			}
			image = cluster.ImageOf(pod)
		}
	}
	if len(t.places) == 0 {
		return "", errors.New("no node has a pod of Verdict that runs")
	}
	return image, nil
}

func addressesOf(n *corev1.Node) (list []netip.Addr) {
	for _, a := range n.Status.Addresses {
		if addr, err := netip.ParseAddr(a.Address); err == nil && a.Type == corev1.NodeInternalIP {
			list = append(list, addr)
		}
	}
	return list
}

func (t *trial) path(resource string) string {
	return "/api/v1/namespaces/" + t.o.Namespace + "/" + resource
}

// create creates pods and Services.
func (t *trial) create(ctx context.Context, image string) error {
	t.o.Say(fmt.Sprintf("creating pods on %d nodes, with image %s", len(t.places), image))
	for i, p := range t.places {
		for _, role := range roles {
			if err := t.createPod(ctx, podObject(role, i, p.name, image)); err != nil {
				return fmt.Errorf("node %s: %w", p.name, err)
			}
		}
	}
	kinds := []string{clusterIP, empty, affinity, internal, nodePort, localNode, externalIP}
	if t.o.LoadBalancer {
		kinds = append(kinds, loadBalancer)
	}
	var families []corev1.IPFamily
	for _, kind := range kinds {
		err := t.API.Create(ctx, t.path("services"), serviceObject(kind, families))
		if apierrors.IsForbidden(err) && kind == externalIP { // as the plugin DenyServiceExternalIPs has it
			t.report.Skipped = append(t.report.Skipped, externalIP+": "+err.Error())
			continue
		}
		if err != nil {
			return fmt.Errorf("create Service %s: %w", kind, err)
		}
		svc, err := t.API.Service(ctx, t.o.Namespace, kind)
		if err != nil {
			return err
		}
		t.services[kind], t.last, families = svc, kind, svc.Spec.IPFamilies
	}
	return nil
}

// createPod creates a pod. A new namespace has no ServiceAccount for a moment.
func (t *trial) createPod(ctx context.Context, p *corev1.Pod) error {
	limited, cancel := context.WithTimeout(ctx, accountTime)
	defer cancel()
	var err error
	over := poll(limited, func() (bool, error) {
		err = t.API.Create(ctx, t.path("pods"), p)
		return !apierrors.IsForbidden(err) || !strings.Contains(err.Error(), "serviceaccount"), nil
	})
	if over != nil && ctx.Err() != nil {
		return ctx.Err()
	}
	return err
}

// await waits until pods are ready, are in the slices of the Services, and the Services are programmed.
func (t *trial) await(ctx context.Context) error {
	t.o.Say("waiting for the pods")
	limited, cancel := context.WithTimeout(ctx, t.o.Timeout)
	defer cancel()
	why := ""
	err := poll(limited, func() (done bool, err error) {
		why, err = t.unready(ctx)
		return why == "", err
	})
	if err != nil && (ctx.Err() != nil || limited.Err() == nil) {
		return err
	}
	if t.drop(); len(t.places) == 0 {
		return fmt.Errorf("no pod answers within %v: %s", t.o.Timeout, why)
	}
	t.o.Say("waiting for the Services")
	err = poll(limited, func() (bool, error) { return t.listed(ctx) })
	if err != nil {
		return fmt.Errorf("the EndpointSlices do not have all pods: %w", err)
	}
	if err := t.balanced(ctx); err != nil {
		return err
	}
	short, cancelShort := context.WithTimeout(ctx, programTime)
	defer cancelShort()
	_, left, err := t.Wait(short, snapshot.Name{Namespace: t.o.Namespace, Name: t.last}, pollEvery)
	for _, l := range left {
		t.fails("node %s has not programmed the Services: %s", l.Node, l.Why)
	}
	if errors.Is(err, cluster.ErrBehind) {
		err = ctx.Err()
	}
	return err
}

// poll asks until it is done, or fails, or the context ends.
func poll(ctx context.Context, ask func() (done bool, err error)) error {
	for {
		done, err := ask()
		if done || err != nil {
			return err
		}
		if clock.Pause(ctx, pollEvery); ctx.Err() != nil {
			return ctx.Err()
		}
	}
}

// unready reads the pods, and says why one is not ready.
func (t *trial) unready(ctx context.Context) (why string, err error) {
	pods, err := t.API.Pods(ctx, t.o.Namespace, "")
	if err != nil {
		return "", err
	}
	for i, p := range t.places {
		for _, role := range roles {
			at := slices.IndexFunc(pods, func(pod corev1.Pod) bool { return pod.Name == podName(role, i) })
			if at < 0 {
				why = fmt.Sprintf("pod %s is not there", podName(role, i))
				continue
			}
			if p.pods[role] = &pods[at]; !isReady(&pods[at]) {
				why = fmt.Sprintf("node %s: pod %s: %s", p.name, pods[at].Name, waitsFor(&pods[at]))
			}
		}
	}
	return why, nil
}

func isReady(p *corev1.Pod) bool {
	return p != nil && len(p.Status.PodIPs) > 0 &&
		slices.ContainsFunc(p.Status.Conditions, func(c corev1.PodCondition) bool {
			return c.Type == corev1.PodReady && c.Status == corev1.ConditionTrue
		})
}

// waitsFor says what a pod waits for, as far as the kubelet says.
func waitsFor(p *corev1.Pod) string {
	for _, c := range p.Status.ContainerStatuses {
		if w := c.State.Waiting; w != nil {
			return strings.TrimSuffix(w.Reason+": "+w.Message, ": ")
		}
		if e := c.State.Terminated; e != nil {
			return fmt.Sprintf("ended with %d: %s", e.ExitCode, e.Reason)
		}
	}
	return strings.TrimSuffix(fmt.Sprintf("not ready: %s: %s", p.Status.Phase, p.Status.Message), ": ")
}

// drop leaves nodes out whose pods are not ready.
func (t *trial) drop() {
	t.places = slices.DeleteFunc(t.places, func(p *place) bool {
		for _, role := range roles {
			if pod := p.pods[role]; pod == nil {
				t.fails("node %s: it has no pod", p.name)
				return true
			} else if !isReady(pod) {
				t.fails("node %s: pod %s: %s", p.name, pod.Name, waitsFor(pod))
				return true
			}
		}
		t.report.Nodes = append(t.report.Nodes, p.name)
		return false
	})
}

// listed reports whether the slices of the Services have all servers.
func (t *trial) listed(ctx context.Context) (bool, error) {
	list, err := t.API.Slices(ctx, t.o.Namespace, "")
	if err != nil {
		return false, err
	}
	have := map[[2]string]bool{}
	for i := range list.Items {
		service := list.Items[i].Labels[discoveryv1.LabelServiceName]
		for _, e := range list.Items[i].Endpoints {
			for _, a := range e.Addresses {
				have[[2]string{service, a}] = e.Conditions.Ready != nil && *e.Conditions.Ready
			}
		}
	}
	for kind, svc := range t.services {
		for _, p := range t.places {
			for _, ip := range p.pods[server].Status.PodIPs {
				if kind != empty && hasFamily(svc, ip.IP) && !have[[2]string{kind, ip.IP}] {
					return false, nil
				}
			}
		}
	}
	return true, nil
}

func hasFamily(svc *corev1.Service, ip string) bool {
	f, ok := familyOf(ip)
	return ok && slices.Contains(svc.Spec.IPFamilies, corev1.IPFamily(f.String()))
}

// balanced waits for the address of a load balancer, if there is to be one.
func (t *trial) balanced(ctx context.Context) error {
	if t.services[loadBalancer] == nil {
		return nil
	}
	t.o.Say("waiting for the load balancer")
	short, cancel := context.WithTimeout(ctx, balanceTime)
	defer cancel()
	err := poll(short, func() (bool, error) {
		svc, err := t.API.Service(ctx, t.o.Namespace, loadBalancer)
		if err != nil {
			return false, err
		}
		t.services[loadBalancer] = svc
		return len(svc.Status.LoadBalancer.Ingress) > 0, nil
	})
	if err != nil && short.Err() == nil {
		return err
	}
	if len(t.addresses(loadBalancer)) == 0 {
		t.report.Skipped = append(t.report.Skipped, fmt.Sprintf("%s: it got no address within %v", loadBalancer, balanceTime))
	}
	return ctx.Err()
}

// remove removes the namespace of a run, and waits until it is gone unless the context has ended.
func (t *trial) remove(ctx context.Context, run string) {
	clean, cancel := context.WithTimeout(context.WithoutCancel(ctx), cleanupTime)
	defer cancel()
	path := "/api/v1/namespaces/" + t.o.Namespace
	there := false
	read := func() (err error) {
		var n corev1.Namespace
		err = t.API.Read(clean, path, &n)
		there = err == nil && n.Labels[runLabel] == run
		return err
	}
	err := persist(clean, read)
	switch {
	case err == nil && !there: // not made, or not by us
		return
	case t.o.Keep:
		t.report.Left = kept
		return
	case err == nil:
		t.o.Say("removing namespace " + t.o.Namespace)
		err = persist(clean, func() error { return t.API.Remove(clean, path) })
	}
	if err == nil && ctx.Err() == nil {
		err = poll(clean, func() (bool, error) {
			err := persist(clean, read)
			return !there, err
		})
	}
	if err != nil {
		t.report.Left = err.Error()
	}
}

// persist tries until it succeeds, nothing is there, or trying again does not help.
func persist(ctx context.Context, do func() error) (err error) {
	over := poll(ctx, func() (bool, error) {
		if err = do(); apierrors.IsNotFound(err) {
			err = nil
		}
		return err == nil || apierrors.IsForbidden(err) || apierrors.IsUnauthorized(err), nil
	})
	return cmp.Or(err, over)
}
