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

	"github.com/verdict-proxy/verdict/conformance/cluster"
)

// flow is a kind of connection through a Service.
type flow struct {
	from, to string
	target   string
	// refused says that it must not be answered.
	refused bool
	// kept says that the server must see the client's own address.
	kept bool
}

func (f *flow) String() string { return fmt.Sprintf("%s to %s (%s)", f.from, f.to, f.target) }

// Result is what came of all flows with one proxy.
type Result struct {
	Proxy, Neighbors string
	Flows            int
	Connections      int
	// Failed is how many connections were not answered and should be, or the other way round; WrongSource how many were
	// answered by a server that did not see the client's address and should.
	Failed, WrongSource int
	// Wrong are the flows whose connections these were, each with what was wrong.
	Wrong []string
	// Notes say what became of what only this neighbor does.
	Notes []string
	// Decisions are what became of connections under policies, if a neighbor enforces them.
	Decisions []Decision
}

// connectionsOfFlow is how many connections of each flow are opened.
const connectionsOfFlow = 20

// Run sends all flows through the proxy that the cluster has.
func (b *Bed) Run(ctx context.Context, proxy string) (*Result, error) {
	flows, err := b.flows(ctx)
	if err != nil {
		return nil, err
	}
	r := &Result{Proxy: proxy, Flows: len(flows)}
	// Service proxies, speakers and engines of policies need some time. What fails still then is counted below.
	if err := cluster.Wait(ctx, time.Minute, "all flows are as they should be", func() error {
		try := &Result{}
		err := b.send(ctx, flows, 1, try)
		if err == nil && len(try.Wrong) > 0 {
			err = errors.New(strings.Join(try.Wrong, "\n"))
		}
		return err
	}); err != nil {
		b.Log("%v", err)
	}
	if err := b.send(ctx, flows, connectionsOfFlow, r); err != nil {
		return nil, err
	}
	if b.has(func(n *Neighbor) bool { return n.Balancer }) {
		if err := b.balancerStories(ctx, r); err != nil {
			return nil, err
		}
	}
	for _, n := range b.Neighbors {
		if n.ingress != "" {
			if err := b.requests(ctx, n.ingress, r); err != nil {
				return nil, err
			}
		}
	}
	if b.has(func(n *Neighbor) bool { return n.Policies }) {
		r.Decisions, err = b.decisions(ctx)
	}
	return r, err
}

// send opens connections of each flow, all of a client's at once, and adds what came of them to the result.
func (b *Bed) send(ctx context.Context, flows []flow, connections int, r *Result) error {
	of := map[string][]flow{}
	for _, f := range flows {
		of[f.from] = append(of[f.from], f)
	}
	for _, name := range slices.Sorted(maps.Keys(of)) {
		var targets []string
		for _, f := range of[name] {
			targets = append(targets, f.target)
		}
		probes, err := b.probe(ctx, name, "", connections, targets)
		if err != nil {
			return err
		}
		for i := range probes {
			r.add(&of[name][i], &probes[i], b.clients[name].ips)
		}
	}
	return nil
}

// add judges the connections of a flow, whose client has these addresses.
func (r *Result) add(f *flow, p *cluster.Probe, ips []string) {
	r.Connections += p.Asked
	failed, wrong := p.Failed, 0
	if f.refused {
		failed = p.Asked - p.Failed
	}
	for answer, n := range p.Answers {
		_, source, _ := strings.Cut(answer, " ")
		if f.kept && !slices.Contains(ips, source) {
			wrong += n
		}
	}
	r.Failed, r.WrongSource = r.Failed+failed, r.WrongSource+wrong
	if failed > 0 || wrong > 0 {
		r.Wrong = append(r.Wrong, fmt.Sprintf("%s: %d of %d failed, %d came from an address that is not the client's: %v %s",
			f, failed, p.Asked, wrong, p.Answers, p.Err))
	}
}

// flows are all flows, for both families and protocols.
func (b *Bed) flows(ctx context.Context) (all []flow, err error) {
	ips, balancers := map[string][]string{}, map[string][]string{}
	for _, name := range []string{"both", "local", "near", "far", "inside", "host"} {
		if ips[name], balancers[name], err = b.service(ctx, space, name); err != nil {
			return nil, err
		}
	}
	for family := range 2 {
		for _, protocol := range []string{"tcp", "udp"} {
			all = append(all, b.flowsOf(protocol, family, ips, balancers)...)
		}
	}
	if b.has(func(n *Neighbor) bool { return n.DNS }) {
		for _, protocol := range []string{"tcp", "udp"} {
			name := "both." + space + ".svc.cluster.local:80"
			all = append(all, flow{from: "pod", to: "a name", target: protocol + "://" + name})
		}
	}
	return all, nil
}

// flowsOf are those of a protocol and a family, to Services with these addresses by name and family.
func (b *Bed) flowsOf(protocol string, family int, ips, balancers map[string][]string) (all []flow) {
	to := func(ip string, port int) string {
		return protocol + "://" + net.JoinHostPort(ip, fmt.Sprint(port))
	}
	add := func(from, name, target string) *flow {
		all = append(all, flow{from: from, to: name, target: target})
		return &all[len(all)-1]
	}
	for _, name := range []string{"both", "near", "far", "inside"} {
		add("pod", "cluster IP, "+name, to(ips[name][family], 80)).kept = true
		add("node", "cluster IP, "+name, to(ips[name][family], 80))
	}
	add("pod", "cluster IP, host network", to(ips["host"][family], 80))
	add("node", "cluster IP, host network", to(ips["host"][family], 80))
	add("server", "itself", to(ips["near"][family], 80))
	nodes := b.addresses(family)
	for _, from := range []string{"pod", "node", "outside"} {
		add(from, "node port", to(nodes[0], portBoth))
		add(from, "node port of a node without server", to(nodes[2], portBoth))
		if family < len(balancers["both"]) {
			add(from, "load balancer", to(balancers["both"][family], 80))
		}
	}
	add("outside", "node port, policy Local", to(nodes[0], portLocal)).kept = true
	add("outside", "node port, policy Local, no server", to(nodes[1], portLocal)).refused = true
	if family < len(balancers["local"]) {
		add("outside", "load balancer, policy Local", to(balancers["local"][family], 80)).kept = true
		add("pod", "load balancer, policy Local", to(balancers["local"][family], 80))
	}
	return all
}

// addresses are those of the nodes, of one family.
func (b *Bed) addresses(family int) (ips []string) {
	for _, n := range b.Nodes {
		ips = append(ips, []string{n.IP4, n.IP6}[family])
	}
	return ips
}
