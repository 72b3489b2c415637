package neighbors

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"os/exec"
	"slices"
	"strings"
	"time"

	"github.com/verdict-proxy/verdict/conformance/cluster"
)

// nodes are the names of nodes by their numbers.
func nodes(numbers ...int) (names []string) {
	for _, n := range numbers {
		names = append(names, fmt.Sprintf("node-%d", n))
	}
	return names
}

// routesTo waits until the router sends what goes to an address to these nodes, and to no other.
func (b *Bed) routesTo(ctx context.Context, ip string, want []string) error {
	return cluster.Wait(ctx, time.Minute, fmt.Sprintf("the router sends to %v what goes to %s", want, ip), func() error {
		hops, err := b.NextHops(ctx, ip)
		if err == nil && !slices.Equal(hops, want) {
			err = fmt.Errorf("it sends it to %v", hops)
		}
		return err
	})
}

// routesFollow has the router send to all nodes what goes to a Service with policy Cluster, and with policy Local to
// those with a ready endpoint. Servers of the former see by which node a connection came.
func (b *Bed) routesFollow(ctx context.Context, r *Result) error {
	for name, want := range map[string][]string{"both": nodes(1, 2, 3), "local": nodes(1)} {
		_, balancers, err := b.service(ctx, space, name)
		if err != nil {
			return err
		}
		if err := b.routesTo(ctx, balancers[0], want); err != nil {
			return err
		}
		came := map[string]bool{}
		target := "tcp://" + net.JoinHostPort(balancers[0], "80")
		p, took, err := b.until(ctx, target, func(p *cluster.Probe) bool {
			for answer := range p.Answers {
				came[strings.SplitN(answer, " ", 2)[1]] = true
			}
			return p.Failed == 0
		})
		if err != nil {
			return err
		}
		r.note(fmt.Sprintf("the router sends to %v what goes to the Service %q", want, name), p, took,
			p.Failed == 0 && (len(came) > 1) == (name == "both"))
	}
	return nil
}

// ending is a Service with policy Local and a server on each of two nodes.
const ending = `apiVersion: v1
kind: Service
metadata: {namespace: neighbors, name: ending}
spec:
  type: LoadBalancer
  externalTrafficPolicy: Local
  ipFamilyPolicy: PreferDualStack
  selector: {app: ending}
  ports: [{port: 80, targetPort: 8080}]
---
`

// endingServer is a server of it on a node, which stays for some seconds when it is to end. Ready says whether it is
// ready all the while; if not, the pod has another container for that, which ends at once.
func endingServer(node int, ready bool) string {
	text := pod(space, fmt.Sprintf("ending-%d", node), node, "app: ending", "serve", ":8080")
	text = strings.Replace(text, "terminationGracePeriodSeconds: 1", "terminationGracePeriodSeconds: 30", 1)
	const hook = "\n    lifecycle: {preStop: {sleep: {seconds: 8}}}"
	text = strings.Replace(text, "  - name: workload", "  - name: workload"+hook, 1)
	if !ready {
		text = strings.Replace(text, "---\n", fmt.Sprintf(`  - name: readiness
    image: %s
    args: [serve, ":8090"]
    readinessProbe: {tcpSocket: {port: 8090}, periodSeconds: 1}
---
`, cluster.WorkloadImage), 1)
	}
	return text
}

// timesItLeaves is how often the last server of a node ends.
const timesItLeaves = 3

// nodeLeaves ends, again and again, the last server of one of two nodes of a Service with policy Local, under clients.
// While it is ready, MetalLB announces its node, so connections to it fail from its end until the route is gone,
// whatever the proxy. A server that is not ready before it ends must not cost a connection.
func (b *Bed) nodeLeaves(ctx context.Context, r *Result) error {
	for _, ready := range []bool{true, false} {
		for i := 1; i <= 2; i++ {
			if _, err := b.Kubectl(ctx, "-n", space, "delete", "pod", fmt.Sprintf("ending-%d", i),
				"--ignore-not-found"); err != nil {
				return err
			}
		}
		if err := b.Apply(ctx, ending+endingServer(1, ready)+endingServer(2, ready)); err != nil {
			return err
		}
		_, balancers, err := b.service(ctx, space, "ending")
		if err != nil {
			return err
		}
		if err := b.routesTo(ctx, balancers[0], nodes(1, 2)); err != nil {
			return err
		}
		var left []time.Duration
		report, err := b.under(ctx, balancers[0], 5, func() error {
			for range timesItLeaves {
				took, err := b.leave(ctx, balancers[0], ready)
				if err != nil {
					return err
				}
				left = append(left, took.Round(time.Second/10))
			}
			return nil
		})
		if err != nil {
			return err
		}
		what := map[bool]string{true: "ready to its end", false: "not ready 8 s before its end"}[ready]
		r.under(fmt.Sprintf("the last server of node-2, %s, ended %d times, policy Local; the route was gone after %v",
			what, timesItLeaves, left), report, !ready, false)
	}
	return nil
}

// leave ends the last server of a node and starts another. It returns how long it took until the route was gone.
func (b *Bed) leave(ctx context.Context, ip string, ready bool) (took time.Duration, err error) {
	began := time.Now()
	if _, err := b.Kubectl(ctx, "-n", space, "delete", "pod", "ending-2", "--wait=false"); err != nil {
		return 0, err
	}
	if err := b.routesTo(ctx, ip, nodes(1)); err != nil {
		return 0, err
	}
	took = time.Since(began)
	if _, err := b.Kubectl(ctx, "-n", space, "wait", "pod", "ending-2", "--for=delete", "--timeout=1m"); err != nil {
		return 0, err
	}
	return took, errors.Join(b.Apply(ctx, endingServer(2, ready)), b.routesTo(ctx, ip, nodes(1, 2)))
}

// hopsChange takes nodes away from those to which the router sends what goes to a Service with policy Cluster, and
// gives them back, under clients that hold connections. The router divides anew what it has, so that most of the
// connections come to another node. That one knows nothing of them: only if clients keep their addresses, it has them
// go where they went before.
func (b *Bed) hopsChange(ctx context.Context, r *Result) error {
	_, balancers, err := b.service(ctx, space, "both")
	if err != nil {
		return err
	}
	change := func() error {
		for _, hops := range [][]string{nodes(1, 2), nodes(2, 3), nodes(1, 3), nodes(1, 2, 3)} {
			if err := b.advertiseFrom(ctx, hops); err != nil {
				return err
			}
			if err := b.routesTo(ctx, balancers[0], hops); err != nil {
				return err
			}
			time.Sleep(2 * time.Second) // each connection that is held is used several times
		}
		return nil
	}
	for _, keep := range []bool{false, true} {
		what := "the nodes to which the router sends changed 4 times, policy Cluster"
		if keep {
			if r.Proxy != "verdict" {
				break
			}
			what += ", " + keepAnnotation + ": keep"
			if err := b.annotate(ctx, keepAnnotation+"=keep"); err != nil {
				return err
			}
			if err := b.keeps(ctx, balancers[0]); err != nil {
				return err
			}
		}
		report, err := b.under(ctx, balancers[0], 10, change)
		if err != nil {
			return err
		}
		r.under(what, report, keep, keep)
	}
	return b.annotate(ctx, keepAnnotation+"-")
}

// keeps waits until servers see the client's address by all nodes.
func (b *Bed) keeps(ctx context.Context, ip string) error {
	client := b.clients["outside"].ips[0]
	p, _, err := b.until(ctx, "tcp://"+net.JoinHostPort(ip, "80"), func(p *cluster.Probe) bool {
		return answeredBy(p, "server-1 "+client, "server-2 "+client)
	})
	if err == nil && p.Failed > 0 {
		err = fmt.Errorf("%s: %d of %d connections failed: %s", ip, p.Failed, p.Asked, p.Err)
	}
	return err
}

// advertiseFrom has MetalLB announce addresses from these nodes alone.
func (b *Bed) advertiseFrom(ctx context.Context, names []string) error {
	patch, err := json.Marshal(map[string]any{"spec": map[string]any{"nodeSelectors": []any{map[string]any{
		"matchExpressions": []any{map[string]any{"key": "kubernetes.io/hostname", "operator": "In", "values": names}}}}}})
	if err != nil {
		return err
	}
	_, err = b.Kubectl(ctx, "-n", "metallb-system", "patch", "bgpadvertisement", "routed", "--type=merge", "-p",
		string(patch))
	return err
}

// routedClient is the client outside that connects all the time.
const (
	routedClient     = "client-routed"
	routedClientPort = "9300"
)

// under has clients outside connect to an address all the time, 20 connections a second for each and 3 that it holds,
// and returns what they tell when something has been done.
func (b *Bed) under(ctx context.Context, ip string, clients int, do func() error) (report cluster.Report, err error) {
	target := net.JoinHostPort(ip, "80")
	at := net.JoinHostPort("127.0.0.1", routedClientPort)
	if err := errors.Join(b.StopOutside(routedClient), b.StartOutside(routedClient, append([]string{"connect", at},
		slices.Repeat([]string{target}, clients)...)...)); err != nil {
		return report, err
	}
	defer func() { err = errors.Join(err, b.StopOutside(routedClient)) }()
	ask := func() error {
		out, err := exec.CommandContext(ctx, "nsenter", "--net="+cluster.NetnsPath(b.Outside()), b.Workload(), "get",
			"http://"+at+"/report").Output()
		report = cluster.Report{}
		if err == nil {
			err = json.Unmarshal(out, &report)
		}
		if err == nil && report.Connections == 0 {
			err = errors.New("no connection yet")
		}
		return err
	}
	if err := cluster.Wait(ctx, time.Minute, "clients connect", ask); err != nil {
		return report, err
	}
	if err := do(); err != nil {
		return report, err
	}
	time.Sleep(6 * time.Second) // who is not answered says so after 5 s
	return report, ask()
}

// under writes down what clients told. None of their connections must have failed if answered says so, and none of
// those that they held must have broken if held does.
func (r *Result) under(what string, report cluster.Report, answered, held bool) {
	line := fmt.Sprintf("%s: %d connections, %d failed; %d of those that were held broke", what, report.Connections,
		report.Failed, report.Broken)
	lost := 0
	if answered {
		lost += report.Failed
	}
	if held {
		lost += report.Broken
	}
	if lost == 0 {
		r.Notes = append(r.Notes, line)
		return
	}
	for i, f := range report.Failures[:min(10, len(report.Failures))] {
		line += fmt.Sprintf("\n  %d. %s, held %t, from %v: %s", i+1, f.Failed.Format("15:04:05.000"), f.Held, f.Client, f.Err)
	}
	r.Failed += lost
	r.Wrong = append(r.Wrong, line)
}
