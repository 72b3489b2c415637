package benchmark

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"slices"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/verdict-proxy/verdict/conformance/benchmark/results"
	"github.com/verdict-proxy/verdict/internal/lab"
)

// bareKinds are nodes without a proxy.
var bareKinds = []*Kind{{Name: results.Baseline}, {Name: results.Tracking}}

// trackOnly makes the kernel track connections and translate none.
const trackOnly = `table ip tracking {
	chain prerouting { type nat hook prerouting priority -100; ip daddr 255.255.255.255 udp dport 1 dnat to 10.0.0.1; }
	chain output { type nat hook output priority -100; ip daddr 255.255.255.255 udp dport 1 dnat to 10.0.0.1; }
}`

// paths measures what packets cost, on a node for each proxy and two without one. The nodes stand beside each other,
// and each path is measured on all of them, one right after the other, before the next: what else goes on concerns all.
func (p *Plan) paths(ctx context.Context, w *world, size results.Size, repeat int) (out *results.Paths, err error) {
	out = &results.Paths{
		Size: size, Repeat: repeat, Began: time.Now().UTC().Truncate(time.Second), Load: Load(),
		Turns: map[string]map[results.Path][]float64{}, Missing: map[string]string{},
	}
	began := time.Now()
	t := &turns{
		settings: p.Results.Settings, out: out, random: rand.New(rand.NewPCG(uint64(size.Services), uint64(repeat))),
		step: func(text string) { p.Progress(fmt.Sprintf("%s, repeat %d, by turns: %s", size, repeat, text)) },
	}
	defer func() {
		err = errors.Join(err, t.close())
		out.Took = time.Since(began).Round(time.Millisecond).Seconds()
	}()
	kinds := slices.Clone(bareKinds)
	for _, k := range p.Kinds {
		if p.hopeless(size, k.Name) {
			out.Missing[k.Name] = "it did not start in time"
			continue
		}
		kinds = append(kinds, k)
	}
	if err := t.open(ctx, w, kinds); err != nil {
		return out, err
	}
	return out, t.run(ctx)
}

// turns are the nodes that take them.
type turns struct {
	settings results.Settings
	out      *results.Paths
	random   *rand.Rand
	step     func(string)
	nodes    []*turn
	// in is the agent in whose control group this process is; nil if it is in none.
	in *agent
}

// turn is a node, where packets to Services go to there, and connection tracking inside it.
type turn struct {
	*node
	kind        *Kind
	connections *netlink.Handle
}

// bare says that there is no proxy, so that everything goes straight to endpoints.
func (t *turn) bare() bool { return t.kind.program == "" }

// open makes the nodes, starts all proxies at the same time, and waits until each has programmed everything and is at
// rest. One that fails is left out.
func (t *turns) open(ctx context.Context, w *world, kinds []*Kind) error {
	for _, k := range kinds {
		t.step("making a node for " + k.Name)
		if k.program == ciliumAgent {
			if err := w.prepareAgents(ctx, k); err != nil {
				return err
			}
		}
		n, err := w.newNode(k)
		if err != nil {
			return fmt.Errorf("%s: %w", k.Name, err)
		}
		t.nodes = append(t.nodes, &turn{node: n, kind: k})
		if n.agent != nil { // it has just joined
			if err := n.agent.leave(); err != nil {
				return err
			}
		}
	}
	return t.start(ctx)
}

// start starts all proxies at the same time, and waits for one after the other.
func (t *turns) start(ctx context.Context) error {
	began := time.Now()
	for _, n := range t.nodes {
		if n.bare() {
			continue
		}
		if err := n.start(); err != nil {
			return fmt.Errorf("%s: %w", n.kind.Name, err)
		}
	}
	for _, n := range slices.Clone(t.nodes) {
		t.step("waiting for " + n.kind.Name)
		err := t.enter(n)
		if err == nil {
			err = n.begin(ctx, began, seconds(t.settings.StartLimit))
		}
		switch {
		case ctx.Err() != nil:
			return ctx.Err()
		case err != nil && n.bare():
			return err
		case err != nil:
			if err := t.leaveOut(n, err); err != nil {
				return err
			}
		}
	}
	return nil
}

// leaveOut goes on without a node.
func (t *turns) leaveOut(n *turn, why error) error {
	t.out.Missing[n.kind.Name] = why.Error()
	delete(t.out.Turns, n.kind.Name)
	t.nodes = slices.DeleteFunc(t.nodes, func(o *turn) bool { return o == n })
	if t.in == n.agent {
		t.in = nil // where close leaves this process
	}
	return n.close()
}

// begin waits for a proxy that was started, and makes what is needed to send.
func (t *turn) begin(ctx context.Context, began time.Time, limit time.Duration) error {
	if t.bare() {
		return t.ready()
	}
	if err := t.attach(ctx, began, limit); err != nil {
		return err
	}
	w, err := t.untilAll(ctx, began, limit)
	if err == nil && !w.Limit {
		w, err = t.calm(ctx, time.Now(), limit)
	}
	if err == nil && w.Limit {
		err = fmt.Errorf("not programmed and at rest within %v", limit)
	}
	if err != nil {
		return err
	}
	return t.ready()
}

// ready makes what is needed to send: a way for packets to Services, and a look into connection tracking.
func (t *turn) ready() error {
	if t.kind.Name == results.Tracking {
		if _, err := t.host.RunInput(trackOnly, "nft", "-f", "-"); err != nil {
			return err
		}
	}
	err := t.host.Do(func() (err error) {
		t.connections, err = netlink.NewHandle(unix.NETLINK_NETFILTER)
		return err
	})
	if err != nil {
		return err
	}
	return t.flowRoutes()
}

// flowRoutes has the node send what it has for Services, as a default route would, and the server throw SYNs away.
func (t *turn) flowRoutes() error {
	if _, err := t.server.Run("ip", "rule", "add", "priority", "1", "tos", fmt.Sprintf("%#02x", flowTOS),
		"blackhole"); err != nil {
		return err
	}
	return t.host.AddRoute(lab.Route{To: serviceRange, Via: serverAddr, Link: t.server.Name})
}

func (t *turn) close() error {
	if t.connections != nil {
		t.connections.Close()
	}
	return t.node.close()
}

// close closes the nodes, the last first.
func (t *turns) close() error {
	var errs []error
	for _, n := range slices.Backward(t.nodes) {
		errs = append(errs, n.close())
	}
	return errors.Join(errs...)
}

// run has all nodes take their turns. In each round another node is the first. A round that is not counted comes
// before; caches and routes are warm then.
func (t *turns) run(ctx context.Context) error {
	for round := range t.settings.Rounds + 1 {
		t.step(fmt.Sprintf("round %d of %d", round, t.settings.Rounds))
		for _, path := range results.AllPaths {
			services := t.services()
			first := round % len(t.nodes)
			for _, n := range slices.Concat(t.nodes[first:], t.nodes[:first]) {
				if err := t.enter(n); err != nil {
					return err
				}
				figure, measured, err := n.measure(ctx, path, services, seconds(t.settings.TurnTime))
				switch {
				case ctx.Err() != nil:
					return ctx.Err()
				case err != nil && n.bare():
					return fmt.Errorf("%s, %s, round %d: %w", n.kind.Name, path, round, err)
				case err != nil:
					err = t.leaveOut(n, fmt.Errorf("%s, round %d: %w", path, round, err))
				case measured && round > 0:
					t.add(n.kind.Name, path, figure)
				}
				if err != nil {
					return err
				}
			}
		}
	}
	return nil
}

// services chooses the Services of a round's flows.
func (t *turns) services() []int {
	services := make([]int, flows)
	for i := range services {
		services[i] = t.random.IntN(t.out.Size.Services)
	}
	return services
}

func (t *turns) add(proxy string, path results.Path, figure float64) {
	if t.out.Turns[proxy] == nil {
		t.out.Turns[proxy] = map[results.Path][]float64{}
	}
	t.out.Turns[proxy][path] = append(t.out.Turns[proxy][path], figure)
}

// measure takes a turn on a path. What a node without a proxy does not have is not measured.
func (t *turn) measure(ctx context.Context, path results.Path, services []int, length time.Duration) (
	figure float64, measured bool, err error,
) {
	direct := t.bare()
	switch path {
	case results.ForwardedService, results.NodeService:
		if direct {
			return 0, false, nil
		}
	case results.ForwardedEndpoint, results.NodeEndpoint:
		direct = true
	}
	if err := t.forget(); err != nil {
		return 0, false, err
	}
	from := t.client
	switch path {
	case results.NodeService, results.NodeEndpoint, results.NodePacket, results.NodeConnections, results.NodeGigabits:
		from = t.host
	}
	switch path {
	case results.ForwardedPacket, results.NodePacket:
		figure, err = t.established(from, t.target(t.sink(), direct))
	case results.ForwardedConnections, results.NodeConnections:
		figure, err = t.opened(ctx, from, t.targets(t.spread(dialed), direct), length)
	case results.ForwardedGigabits, results.NodeGigabits:
		figure, err = t.throughput(ctx, from, t.target(t.sink(), direct), length)
	default:
		figure, err = t.newFlows(from, t.targets(services, direct))
	}
	return figure, true, err
}

// forget removes what the node remembers of connections. Otherwise tables grow while others take their turns, and the
// last one finds the largest.
func (t *turn) forget() error {
	if t.agent != nil {
		if err := t.agent.forgetConnections(); err != nil {
			return err
		}
	}
	return t.connections.ConntrackTableFlush(netlink.ConntrackTable)
}

// targets are where some Services are reached, or if that is asked for their first endpoints.
func (n *node) targets(services []int, direct bool) (to []netip.AddrPort) {
	for _, i := range services {
		to = append(to, n.target(i, direct))
	}
	return to
}
