package neighbors

import (
	"cmp"
	"context"
	"fmt"
	"net"
	"slices"
	"strings"
	"time"

	"github.com/verdict-proxy/verdict/conformance/cluster"
)

// balancerStories are what a load balancer and a Service proxy do together, seen from outside.
func (b *Bed) balancerStories(ctx context.Context, r *Result) error {
	stories := []func(context.Context, *Result) error{b.shareAddress, b.moveServer, b.keepAddress}
	if b.has(func(n *Neighbor) bool { return n.routed }) {
		stories = append(stories, b.routesFollow, b.nodeLeaves, b.hopsChange)
	}
	for _, tell := range stories {
		if err := tell(ctx, r); err != nil {
			return err
		}
	}
	return nil
}

const shared = `apiVersion: v1
kind: Service
metadata:
  namespace: neighbors
  name: shared-%[1]d
  annotations: {metallb.io/allow-shared-ip: shared, metallb.io/loadBalancerIPs: %[2]s}
spec:
  type: LoadBalancer
  ipFamilies: [IPv4]
  selector: {app: server, place: node-%[1]d}
  ports: [{port: 808%[1]d, targetPort: 8080}]
---
`

// shareAddress has two Services share an address: each port leads to its own server.
func (b *Bed) shareAddress(ctx context.Context, r *Result) error {
	address := ""
	for _, n := range b.Neighbors {
		address = cmp.Or(address, n.shared)
	}
	if err := b.Apply(ctx, fmt.Sprintf(shared, 1, address)+fmt.Sprintf(shared, 2, address)); err != nil {
		return err
	}
	for i := 1; i <= 2; i++ {
		target, server := fmt.Sprintf("tcp://%s:808%d", address, i), fmt.Sprintf("server-%d ", i)
		p, took, err := b.until(ctx, target, func(p *cluster.Probe) bool { return answeredBy(p, server) })
		if err != nil {
			return err
		}
		r.note(fmt.Sprintf("two Services share %s, port 808%d", address, i), p, took, answeredBy(p, server))
	}
	return nil
}

// moveServer moves the only server of a Service with policy Local to another node, which announces the address then.
func (b *Bed) moveServer(ctx context.Context, r *Result) error {
	_, balancers, err := b.service(ctx, space, "local")
	if err != nil {
		return err
	}
	target := "tcp://" + net.JoinHostPort(balancers[0], "80")
	for _, node := range []string{"2", "1"} {
		if _, err := b.Kubectl(ctx, "-n", space, "patch", "service", "local", "-p",
			`{"spec":{"selector":{"place":"node-`+node+`"}}}`); err != nil {
			return err
		}
		want := "server-" + node + " " + b.clients["outside"].ips[0]
		p, took, err := b.until(ctx, target, func(p *cluster.Probe) bool { return answeredBy(p, want) })
		if err != nil {
			return err
		}
		r.note("the only server, with policy Local, is on node-"+node+" now", p, took, answeredBy(p, want))
	}
	return nil
}

const keepAnnotation = "verdict-proxy.github.io/client-address"

// keepAddress has a Service with policy Cluster keep its clients' addresses. kube-proxy knows no such thing.
func (b *Bed) keepAddress(ctx context.Context, r *Result) error {
	if r.Proxy != "verdict" {
		return nil
	}
	_, balancers, err := b.service(ctx, space, "both")
	if err != nil {
		return err
	}
	if err := b.annotate(ctx, keepAnnotation+"=keep"); err != nil {
		return err
	}
	client := b.clients["outside"].ips[0]
	kept := func(p *cluster.Probe) bool {
		return answeredBy(p, "server-1 "+client, "server-2 "+client)
	}
	for _, protocol := range []string{"tcp", "udp"} {
		p, took, err := b.until(ctx, protocol+"://"+net.JoinHostPort(balancers[0], "80"), kept)
		if err != nil {
			return err
		}
		r.note("policy Cluster keeps the client's address, "+protocol, p, took, kept(p))
	}
	return b.annotate(ctx, keepAnnotation+"-")
}

// annotate changes an annotation of the Service with policy Cluster.
func (b *Bed) annotate(ctx context.Context, change string) error {
	_, err := b.Kubectl(ctx, "-n", space, "annotate", "--overwrite", "service", "both", change)
	return err
}

// until opens connections from outside until all of a round are as they should be, for a minute at most. It returns the
// last round, and how long it took.
func (b *Bed) until(ctx context.Context, target string, good func(*cluster.Probe) bool) (*cluster.Probe, time.Duration,
	error) {
	for began := time.Now(); ; {
		p, err := b.probe(ctx, "outside", "", connectionsOfFlow, []string{target})
		if err != nil {
			return nil, 0, err
		}
		if took := time.Since(began); good(&p[0]) || took > time.Minute {
			return &p[0], took, nil
		}
	}
}

// answeredBy says whether all connections were answered, each with one of these beginnings.
func answeredBy(p *cluster.Probe, beginnings ...string) bool {
	for answer := range p.Answers {
		if !slices.ContainsFunc(beginnings, func(s string) bool { return strings.HasPrefix(answer, s) }) {
			return false
		}
	}
	return p.Failed == 0
}

// note writes down what came of the last connections.
func (r *Result) note(what string, p *cluster.Probe, took time.Duration, good bool) {
	line := fmt.Sprintf("%s: %d of %d failed after %v, %v %s", what, p.Failed, p.Asked, took.Round(time.Second/10),
		p.Answers, p.Err)
	if good {
		r.Notes = append(r.Notes, line)
		return
	}
	r.Failed += max(p.Failed, 1)
	r.Wrong = append(r.Wrong, line)
}
