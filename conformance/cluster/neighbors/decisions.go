package neighbors

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net"
	"slices"
	"strings"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/verdict-proxy/verdict/conformance/cluster"
)

// Decision is what an engine of policies made of the connections of a client on one way to a server.
type Decision struct {
	From, To string
	// Allowed says how many of all were answered, and Want whether they should be by who the client is.
	Answered, Asked int
	Want            bool
	// Sources are the addresses that the server saw.
	Sources []string
}

// way is a way to a guarded server.
type way struct{ name, target string }

// guardedClients are the clients of guarded servers, and whether the policy allows them.
var guardedClients = map[string]bool{
	"pod, allowed": true, "pod, not allowed": false, "pod, namespace allowed": true, "pod of another namespace": false,
	"outside": true, "outside, another address": false,
}

// connectionsOfWay is how many connections each client opens on each way.
const connectionsOfWay = 5

// decisions applies policies, waits until they are enforced, and has each client take each way, with IPv4.
func (b *Bed) decisions(ctx context.Context) ([]Decision, error) {
	first4, first6 := cluster.Gateway()
	if err := b.Apply(ctx, fmt.Sprintf(policies, first4, first6)); err != nil {
		return nil, err
	}
	ways, err := b.ways(ctx)
	if err != nil {
		return nil, err
	}
	chosen, err := b.chosen(ctx)
	if err = errors.Join(err, b.tellGuards(ctx, chosen)); err != nil {
		return nil, err
	}
	err = cluster.Wait(ctx, time.Minute, "the policies are enforced", func() error {
		probes, err := b.probe(ctx, "pod, not allowed", "", 1, []string{ways[0].target, ways[1].target})
		if err == nil && probes[0].Failed+probes[1].Failed < 2 {
			err = fmt.Errorf("a pod that is not allowed was answered: %v %v", probes[0].Answers, probes[1].Answers)
		}
		return err
	})
	if err != nil {
		b.Log("%v", err)
	}
	var all []Decision
	for _, name := range slices.Sorted(maps.Keys(guardedClients)) {
		d, err := b.decide(ctx, name, ways, guardedClients[name])
		if err != nil {
			return nil, err
		}
		all = append(all, d...)
	}
	limited, err := b.decideLimited(ctx)
	if err != nil {
		return nil, err
	}
	_, err = b.Kubectl(ctx, "-n", guarded, "delete", "networkpolicy", "--all")
	return append(all, limited...), errors.Join(err, b.tellGuards(ctx, nil))
}

// chosen are the addresses of the pods that the policies choose, by their nodes' names.
func (b *Bed) chosen(ctx context.Context) (map[string][]string, error) {
	pods, err := b.api.CoreV1().Pods(guarded).List(ctx, metav1.ListOptions{LabelSelector: "app in (server, limited)"})
	if err != nil {
		return nil, err
	}
	ips := map[string][]string{}
	for i := range pods.Items {
		p := &pods.Items[i]
		ips[p.Spec.NodeName] = append(ips[p.Spec.NodeName], podIPs(p)...)
	}
	return ips, nil
}

func (b *Bed) tellGuards(ctx context.Context, chosen map[string][]string) (err error) {
	for _, n := range b.Neighbors {
		if n.guard != nil {
			err = errors.Join(err, n.guard(ctx, b.Cluster, chosen))
		}
	}
	return err
}

// ways are those to the guarded servers; the first two are direct, to one on the clients' node and to one on another.
func (b *Bed) ways(ctx context.Context) ([]way, error) {
	var pods [2]string
	for i := range pods {
		pod, err := b.api.CoreV1().Pods(guarded).Get(ctx, fmt.Sprintf("server-%d", i+1), metav1.GetOptions{})
		if err != nil {
			return nil, err
		}
		pods[i] = pod.Status.PodIP
	}
	near, balancer, err := b.service(ctx, guarded, "near")
	if err != nil {
		return nil, err
	}
	far, _, err := b.service(ctx, guarded, "far")
	if err != nil {
		return nil, err
	}
	_, local, err := b.service(ctx, guarded, "local")
	to := func(ip string, port int) string { return "tcp://" + net.JoinHostPort(ip, fmt.Sprint(port)) }
	return []way{
		{"directly, same node", to(pods[0], 8080)}, {"directly, other node", to(pods[1], 8080)},
		{"cluster IP, same node", to(near[0], 80)}, {"cluster IP, other node", to(far[0], 80)},
		{"node port of the server's node", to(b.Nodes[0].IP4, portGuarded)},
		{"node port of another node", to(b.Nodes[2].IP4, portGuarded)},
		{"node port, policy Local", to(b.Nodes[0].IP4, portGuardedLocal)},
		{"load balancer", to(balancer[0], 80)}, {"load balancer, policy Local", to(local[0], 80)},
	}, err
}

func (b *Bed) decide(ctx context.Context, name string, ways []way, want bool) (all []Decision, err error) {
	outside := strings.HasPrefix(name, "outside")
	var taken []way
	var targets []string
	for _, w := range ways {
		if outside && strings.HasPrefix(w.name, "cluster IP") {
			continue // it has no route to cluster IPs
		}
		taken, targets = append(taken, w), append(targets, w.target)
	}
	from := ""
	if outside {
		from = b.clients[name].ips[0]
	}
	probes, err := b.probe(ctx, name, from, connectionsOfWay, targets)
	for i := range probes {
		all = append(all, decision(name, taken[i].name, want, &probes[i]))
	}
	return all, err
}

// decideLimited has the pod that may send to guarded servers only try these and others.
func (b *Bed) decideLimited(ctx context.Context) (all []Decision, err error) {
	const name = "pod, may send to servers only"
	allowed, _, err := b.service(ctx, guarded, "near")
	if err != nil {
		return nil, err
	}
	other, _, err := b.service(ctx, space, "both")
	if err != nil {
		return nil, err
	}
	probes, err := b.probe(ctx, name, "", connectionsOfWay, []string{"tcp://" + allowed[0] + ":80",
		"tcp://" + other[0] + ":80"})
	if err != nil {
		return nil, err
	}
	return []Decision{decision(name, "cluster IP of these servers", true, &probes[0]),
		decision(name, "cluster IP of others", false, &probes[1])}, nil
}

func decision(from, to string, want bool, p *cluster.Probe) Decision {
	d := Decision{From: from, To: to, Want: want, Asked: p.Asked, Answered: p.Asked - p.Failed}
	for answer := range p.Answers {
		_, source, _ := strings.Cut(answer, " ")
		d.Sources = append(d.Sources, source)
	}
	slices.Sort(d.Sources)
	return d
}
