package run

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"runtime"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/verdict-proxy/verdict/conformance/cases"
	"github.com/verdict-proxy/verdict/conformance/report"
	"github.com/verdict-proxy/verdict/conformance/testbed"
	"github.com/verdict-proxy/verdict/internal/lab"
	"github.com/verdict-proxy/verdict/internal/system/ipfamily"
	"github.com/verdict-proxy/verdict/internal/system/packets"
)

// exclusion is a reason why listings do not say what becomes of a packet. There are no others: all else is asked.
type exclusion string

const (
	pastNodes    exclusion = "no node sees the packet: the load balancer answers on the way"
	fromLoopback exclusion = "the packet is for ::1 and led away from there: the kernel has no way for that, whatever " +
		"the rules say"
	notKnown exclusion = "the packet meets something in the rules that the witness does not know"
)

func (e exclusion) Error() string { return string(e) }

// listings are the rules of all nodes, as the kernel or iptables-save lists them.
type listings struct {
	topology *testbed.Topology
	rules    map[string]packets.Walker
}

// testimony is what the listings say of a look.
type testimony struct {
	// node is the one whose rules see the packet first.
	node string
	// says is what may be seen, each of its ways once, of a client that no affinity remembers.
	says *seen
	// err says why nothing is said; it is an exclusion, perhaps with more words.
	err error
}

// testimonies are those of all looks of a matrix, and what came of them. Nil has none.
type testimonies struct {
	all  map[*cases.Look]testimony
	took time.Duration

	mu              sync.Mutex
	agree, disagree int
	notAsked        map[exclusion]report.NotAsked
}

// hear lists the rules and asks them about all looks. It comes before the packets, so that no affinity is remembered
// yet, and packets don't wait for it.
func (w *testimonies) hear(ctx context.Context, r *proxyRun, all []*cases.Case, objects map[string]*written) error {
	if w == nil {
		return nil
	}
	began := time.Now()
	l, err := list(ctx, r.testbed.Topology, r.testbed.Kind)
	if err != nil {
		return err
	}
	w.all, w.notAsked = make(map[*cases.Look]testimony), make(map[exclusion]report.NotAsked)
	work := make(chan func())
	var wait sync.WaitGroup
	for range runtime.GOMAXPROCS(0) {
		wait.Go(func() {
			for f := range work {
				f()
			}
		})
	}
	for _, c := range all {
		service := objects[c.Theme+"/"+c.Service].service
		for i := range c.Looks {
			one := &c.Looks[i]
			a, _, err := r.ask(one, service)
			if err != nil {
				continue // the look itself fails
			}
			work <- func() {
				t := l.testify(a)
				w.mu.Lock()
				defer w.mu.Unlock()
				w.all[one] = t
			}
		}
	}
	close(work)
	wait.Wait()
	w.took = time.Since(began)
	r.progress.say("the listings were asked about %d looks, in %v", len(w.all), w.took.Round(time.Millisecond))
	return context.Cause(ctx)
}

// hold counts a look, and gives words if its testimony is not what packets showed, or not what is wanted.
func (w *testimonies) hold(l *cases.Look, t *testbed.Topology, a asked, shown *seen) string {
	if w == nil {
		return ""
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	m := w.all[l]
	if m.err != nil {
		w.exclude(m.err)
		return ""
	}
	said := m.disagrees(t, a, shown)
	if said == "" {
		w.agree++
	} else {
		w.disagree++
	}
	return said
}

// exclude counts a look of which nothing was said.
func (w *testimonies) exclude(err error) {
	var why exclusion
	errors.As(err, &why)
	n := w.notAsked[why]
	n.Why = string(why)
	n.Count++
	if _, more, ok := strings.Cut(err.Error(), n.Why+": "); ok &&
		(n.Example == "" || more < n.Example) { // the least, whatever the order
		n.Example = more
	}
	w.notAsked[why] = n
}

// report gives the counts.
func (w *testimonies) report() *report.Witness {
	if w == nil {
		return nil
	}
	out := &report.Witness{Agree: w.agree, Disagree: w.disagree, Took: w.took}
	for _, why := range slices.Sorted(maps.Keys(w.notAsked)) {
		out.NotAsked = append(out.NotAsked, w.notAsked[why])
	}
	return out
}

// list reads the rules of all nodes.
func list(ctx context.Context, t *testbed.Topology, k *testbed.Kind) (*listings, error) {
	l := &listings{topology: t, rules: make(map[string]packets.Walker)}
	for _, node := range t.Nodes() {
		if err := context.Cause(ctx); err != nil {
			return nil, err
		}
		rules, err := readRules(t, node, t.Host(node), k)
		if err != nil {
			return nil, fmt.Errorf("%s: %w", node, err)
		}
		l.rules[node] = rules
	}
	return l, nil
}

// readRules reads the rules that a host has as a node.
func readRules(t *testbed.Topology, node string, h *lab.Host, k *testbed.Kind) (rules packets.Walker, err error) {
	known := &packets.Host{Addrs: t.AddrsOf(node),
		Bridged: func(iface string, to netip.Addr) bool {
			return iface == testbed.PodBridge && slices.ContainsFunc(t.Bridged(node, iface),
				func(p netip.Prefix) bool { return p.Contains(to) })
		}}
	if k.ListsChains() {
		var text ipfamily.Per[[]byte]
		for f, program := range [...]string{"iptables-save", "ip6tables-save"} {
			if text[f], err = h.Command(program).Output(); err != nil {
				return nil, fmt.Errorf("%s: %w", program, err)
			}
		}
		return packets.ParseChains(text, known)
	}
	err = h.Do(func() (err error) {
		rules, err = packets.ReadAll(known)
		return err
	})
	return rules, err
}

// hop is a packet that comes to a node.
type hop struct {
	node, link string
	src, dst   netip.AddrPort
	// left is how many nodes it may still come to.
	left int
}

const (
	// maxHops is how many nodes a packet may come to: with two nodes, more is a circle.
	maxHops = 4
	// clientPort is the port that questions come from. No rule of a Service proxy looks at it.
	clientPort = 40000
)

// testify follows the first packet of a connection, node by node.
func (l *listings) testify(a asked) testimony {
	node, link := l.topology.Entry(a.from, a.to.Addr())
	t := testimony{node: node, says: newSeen()}
	if node == "" {
		t.err = pastNodes
		return t
	}
	src := l.address(a.from, a.to.Addr())
	if link == "" && (a.to.Addr().IsLoopback() || l.topology.Owns(node, a.to.Addr())) {
		src = a.to.Addr() // the kernel's choice for what is sent to itself
	}
	t.err = l.follow(hop{node, link, netip.AddrPortFrom(src, clientPort), a.to, maxHops}, a, t.says)
	return t
}

// address gives the main address of a host, of the family of another.
func (l *listings) address(host string, like netip.Addr) netip.Addr {
	if like.Is4() {
		return l.topology.Host(host).IP4
	}
	return l.topology.Host(host).IP6
}

// follow asks the rules of a node, and goes on to where they lead.
func (l *listings) follow(h hop, a asked, says *seen) error {
	if h.left == 0 {
		says.note(lab.Result{Outcome: lab.TimedOut})
		return nil
	}
	protocol, _ := packets.ParseProtocol(a.protocol.String())
	outcomes, err := l.rules[h.node].Walk(packets.Packet{Source: h.src, Destination: h.dst, Protocol: protocol,
		Interface: h.link}, nil, nil)
	if err != nil {
		return fmt.Errorf("%w: %s: %w", notKnown, h.node, err)
	}
	for _, o := range outcomes {
		next := h
		next.left--
		switch o.Verdict {
		case packets.Rejected:
			says.note(lab.Result{Outcome: lab.Refused})
			continue
		case packets.Dropped:
			says.note(lab.Result{Outcome: lab.TimedOut})
			continue
		case packets.Sent:
			next.dst = o.To
		}
		if o.Masqueraded {
			next.src = netip.AddrPortFrom(l.address(h.node, next.dst.Addr()), clientPort)
		}
		if err := l.arrive(next, a, says); err != nil {
			return err
		}
	}
	return nil
}

// arrive takes a packet from a node to where it goes next: to a host that answers or refuses, to the other node, or
// to the router, where what nobody has ends without an answer.
func (l *listings) arrive(h hop, a asked, says *seen) error {
	owner := h.node
	if !h.dst.Addr().IsLoopback() {
		owner = l.topology.Owner(h.dst.Addr())
	}
	next := testbed.NodeOf(owner)
	switch {
	case a.to.Addr() == netip.IPv6Loopback() && !h.dst.Addr().IsLoopback():
		return fromLoopback
	case owner == "":
		says.note(lab.Result{Outcome: lab.TimedOut})
	case next != "" && next != h.node:
		h.node, h.link = next, "eth0"
		return l.follow(h, a, says)
	case owner == a.from && testbed.IsPod(owner) && l.topology.Owns(owner, h.src.Addr()):
		// A pod does not take its own address for another's: it drops the packet, or answers itself, past the node.
		says.note(lab.Result{Outcome: lab.Refused})
		says.note(lab.Result{Outcome: lab.TimedOut})
	case testbed.Serves(owner, h.dst.Port()):
		says.note(lab.Result{Outcome: lab.Answered, Endpoint: owner, Source: h.src, Destination: h.dst})
	default: // nobody listens there
		says.note(lab.Result{Outcome: lab.Refused})
	}
	return nil
}

// disagrees says, in a line, where a testimony is not what packets showed, or not what is wanted; empty if nowhere.
func (m testimony) disagrees(t *testbed.Topology, a asked, shown *seen) string {
	if m.says.contains(t, a, shown) && m.says.equals(t, a) {
		return ""
	}
	a.at = podPort // has words name the port
	return fmt.Sprintf("the listing of %s says: %s; packets: %s", m.node, m.says.words(t, a), shown.words(t, a))
}

// contains says that all that packets showed is among what is said, at the same port.
func (s *seen) contains(t *testbed.Topology, a asked, shown *seen) bool {
	if shown.refused > 0 && s.refused == 0 || shown.dropped > 0 && s.dropped == 0 {
		return false
	}
	for e, sources := range shown.sources {
		for source := range sources {
			if !slices.Contains(s.sourceWords(t, a, e), sourceWord(t, a.from, source)) {
				return false
			}
		}
	}
	for p := range s.ports {
		// All endpoints of a Service of a matrix are at the same port.
		if len(shown.ports) > 0 && shown.ports[p] == 0 {
			return false
		}
	}
	return true
}

// sourceWords gives the sources that an endpoint sees, none if it is not reached.
func (s *seen) sourceWords(t *testbed.Topology, a asked, endpoint string) (words []string) {
	for source := range s.sources[endpoint] {
		words = append(words, sourceWord(t, a.from, source))
	}
	return words
}

// equals says that what is said is what is wanted: nothing else, and every endpoint, even where a client shall see
// only one.
func (s *seen) equals(t *testbed.Topology, a asked) bool {
	sticky := a.want.Sticky
	a.want.Sticky = false
	return s.fits(t, a) && (a.want.Some && !sticky || s.enough(a.want))
}
