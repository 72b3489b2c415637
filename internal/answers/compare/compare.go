// Package compare says whether Service proxies do the same with every packet. The keys of their rules are exact, so
// packets fall into few classes: a destination, a kind of sender, and whether the sender is remembered. Each class is
// walked through what the kernel lists of each proxy, and through the objects.
package compare

import (
	"bytes"
	"cmp"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"

	"github.com/verdict-proxy/verdict/internal/system/ipfamily"
	"github.com/verdict-proxy/verdict/internal/system/packets"
	"github.com/verdict-proxy/verdict/sync/dataplane"
	"github.com/verdict-proxy/verdict/sync/snapshot"
)

// Names of sides.
const (
	Verdict    = "verdict"
	ObjectSide = "objects"
	NFTables   = "kube-proxy-nftables"
	IPTables   = "kube-proxy-iptables"
)

// Side is one of those that are compared.
type Side struct {
	Name   string
	Walker packets.Walker
	// Mentioned are the destinations that its rules name; nil if it has no rules.
	Mentioned *packets.Mentioned
	Digest    [sha256.Size]byte
	Size      packets.Size
}

// Rules is a Walker that can be a Side.
type Rules interface {
	packets.Walker
	Mentioned() *packets.Mentioned
	Digest() [sha256.Size]byte
	Size() packets.Size
}

// NewSide makes a side of rules.
func NewSide(name string, r Rules) Side {
	return Side{Name: name, Walker: r, Mentioned: r.Mentioned(), Digest: r.Digest(), Size: r.Size()}
}

// Input is what is compared.
type Input struct {
	// Host are the node's addresses.
	Host []netip.Addr
	// Pods say how pods are recognized. They choose the senders, and decide nothing.
	Pods ipfamily.Per[dataplane.Pods]
	// State, if not nil, is what the objects ask for: a side of its own.
	State *dataplane.State
	// Sides are the other sides. Each is compared with the first one, or with the objects if there are any.
	Sides []Side
}

// Difference is a class in which two sides differ.
type Difference struct {
	// Sides are two names.
	Sides [2]string `json:"sides"`
	// Reason is the Name of one of the Reasons; empty if none explains the difference.
	Reason      string    `json:"reason,omitempty"`
	Service     string    `json:"service,omitempty"`
	Kind        Kind      `json:"kind"`
	Sender      Sender    `json:"sender"`
	Source      string    `json:"source"`
	Destination string    `json:"destination"`
	Remembered  string    `json:"remembered,omitempty"`
	Outcomes    [2]string `json:"outcomes"`

	key      packets.Key
	frontend *frontend
	// host says that the destination is an address of this host, and balancer that it is a load balancer's.
	host, balancer bool
	// shared says that something other than Services has addresses around the destination.
	shared bool
	// bridge says that the sender is this node, by an address among the pods'.
	bridge   bool
	outcomes [2][]packets.Outcome
}

// Group counts differences that have a reason in common.
type Group struct {
	Sides  [2]string `json:"sides"`
	Reason string    `json:"reason,omitempty"`
	Kind   Kind      `json:"kind"`
	Sender Sender    `json:"sender"`
	Count  int       `json:"count"`
	// Examples are the first of them.
	Examples []Difference `json:"examples"`
}

// Result is what a comparison found.
type Result struct {
	// Classes is how many classes of packets there are. Same is how many of them are the same on all sides.
	Classes int `json:"classes"`
	Same    int `json:"same"`
	// Explained differ for reasons that are known, and Unexplained for none.
	Explained   int `json:"explained"`
	Unexplained int `json:"unexplained"`
	// Unknown are classes that some side's rules could not be followed for, and Errors the first reasons.
	Unknown int      `json:"unknown"`
	Errors  []string `json:"errors,omitempty"`
	// Scheduled are classes whose endpoint IPVS chooses, which are not compared.
	Scheduled int     `json:"scheduled,omitempty"`
	Groups    []Group `json:"groups,omitempty"`
	// Digest identifies all classes and all outcomes.
	Digest string `json:"digest"`
	// Destinations is how many addresses, protocols and ports were asked about.
	Destinations int `json:"destinations"`
}

const (
	// maxExamples bounds the examples of a group, maxGroups the groups, and maxErrors the errors.
	maxExamples = 3
	maxGroups   = 200
	maxErrors   = 10
)

// comparison is one at work.
type comparison struct {
	node    *node
	objects *objects
	sides   []Side
}

// Compare walks every class through all sides.
func Compare(in Input) (*Result, error) {
	c := comparison{sides: in.Sides}
	var ranges []netip.Prefix
	if in.State != nil {
		c.objects = newObjects(in.State, in.Host)
		c.sides = append([]Side{{Name: ObjectSide, Walker: c.objects, Digest: c.objects.digest()}}, c.sides...)
		ranges = in.State.ServiceCIDRs
	}
	if len(c.sides) < 2 {
		return nil, errors.New("there is only one side: nothing to compare with")
	}
	device, mac := link(in.State, in.Sides)
	if c.objects != nil {
		c.objects.device = device
	}
	c.node = newNode(in.Host, in.Pods, ranges, device, mac)
	for _, s := range c.sides {
		if s.Mentioned != nil {
			for _, a := range s.Mentioned.Own {
				c.node.own[a] = true
			}
		}
	}
	if c.objects != nil {
		for a := range c.objects.own {
			c.node.own[a] = true
		}
	}
	list := destinations(c.node, c.objects, c.sides)
	return c.all(list), nil
}

// all walks all destinations, on all processors.
func (c *comparison) all(list []destination) *Result {
	const chunk = 64
	parts := make([]*part, (len(list)+chunk-1)/chunk)
	var next atomic.Int64
	var workers sync.WaitGroup
	for range runtime.GOMAXPROCS(0) {
		workers.Go(func() {
			for {
				i := int(next.Add(1)) - 1
				if i >= len(parts) {
					return
				}
				p := &part{comparison: c, groups: map[groupKey]*Group{}, digest: sha256.New()}
				for _, d := range list[i*chunk : min((i+1)*chunk, len(list))] {
					p.destination(&d)
				}
				parts[i] = p
			}
		})
	}
	workers.Wait()
	return merge(parts, len(list))
}

// outcomesOf walks a packet through all sides.
func (p *part) outcomesOf(packet packets.Packet, memories []packets.Memory, asked *packets.Asked) (
	all [][]packets.Outcome, err error) {
	all = p.buffer[:0]
	for i, s := range p.sides {
		var m packets.Memory
		if memories != nil {
			m = memories[i]
		}
		out, err := s.Walker.Walk(packet, m, asked)
		if err != nil {
			return nil, fmt.Errorf("%s: %w", s.Name, err)
		}
		all = append(all, out)
	}
	p.buffer = all
	return all, nil
}

// destination walks all classes of one destination.
func (p *part) destination(d *destination) {
	asked := &packets.Asked{}
	endpoints := map[netip.Addr]bool{}
	type from struct {
		addr netip.Addr
		mac  snapshot.MAC
	}
	done := map[from]bool{}
	walk := func(s sender, asked *packets.Asked) {
		packet, ok := p.node.packet(s, d.key)
		by := from{packet.Source.Addr(), packet.MAC}
		if !ok || done[by] && s.kind != FromNode {
			return
		}
		done[by] = done[by] || s.kind != FromNode
		p.class(d, s, packet, asked, endpoints)
	}
	for _, s := range p.node.senders[ipfamily.Of(d.key.Addr)] {
		walk(s, asked)
	}
	for _, s := range p.node.edges(asked, endpoints) {
		walk(s, nil)
	}
	var own []netip.Addr
	for a := range endpoints {
		if p.node.own[a] {
			own = append(own, a)
		}
	}
	slices.SortFunc(own, netip.Addr.Compare)
	for _, a := range own {
		walk(sender{kind: FromEndpoint, addr: a, iface: p.node.podInterface}, nil)
	}
}

// class walks one packet, and then again for a client that is remembered with each endpoint or node.
func (p *part) class(d *destination, s sender, packet packets.Packet, asked *packets.Asked,
	endpoints map[netip.Addr]bool) {
	all, err := p.outcomesOf(packet, nil, asked)
	if !p.note(d, s, packet, "", all, err) {
		return
	}
	for _, outcomes := range all {
		for _, o := range outcomes {
			if o.Verdict == packets.Sent {
				endpoints[o.To.Addr()] = true
			}
		}
	}
	first := slices.Clone(all)
	for _, o := range first[0] {
		memories, remembers := make([]packets.Memory, len(first)), false
		for i, outcomes := range first {
			k := slices.IndexFunc(outcomes, func(x packets.Outcome) bool { return x.To == o.To })
			if k >= 0 && (o.Verdict == packets.Sent || o.Verdict == packets.Forwarded) {
				memories[i] = outcomes[k].Memory
				remembers = remembers || memories[i] != nil
			}
		}
		if remembers {
			all, err := p.outcomesOf(packet, memories, nil)
			p.note(d, s, packet, o.To.String(), all, err)
		}
	}
}

// note compares the outcomes of one class, and reports whether they are known.
func (p *part) note(d *destination, s sender, packet packets.Packet, remembered string, all [][]packets.Outcome,
	err error) bool {
	p.Classes++
	fmt.Fprintf(p.digest, "%s %s %s %s\n", d.key, packet.Source, packet.Interface, remembered)
	switch {
	case errors.Is(err, errScheduled):
		p.Scheduled++
		return false
	case err != nil:
		p.Unknown++
		if text := fmt.Sprintf("%s to %s: %v", packet.Source.Addr(), d.key, err); len(p.Errors) < maxErrors {
			p.Errors = append(p.Errors, text)
		}
		return false
	}
	same, explained := true, true
	for i := range all {
		p.digestOutcomes(all[i])
		if i == 0 || equal(all[0], all[i], p.sides[0].isKubeProxy() || p.sides[i].isKubeProxy()) {
			continue
		}
		same = false
		diff := &Difference{Sides: [2]string{p.sides[0].Name, p.sides[i].Name}, Service: d.service, Kind: d.kind,
			Sender: s.kind, Source: packet.Source.Addr().String(), Destination: d.key.String(), Remembered: remembered,
			key: d.key, host: slices.Contains(p.node.addrs, d.key.Addr),
			bridge:   packet.Interface == "" && p.node.amongPods(packet.Source.Addr()),
			outcomes: [2][]packets.Outcome{all[0], all[i]}}
		if p.objects != nil {
			if fe, ok := p.objects.frontends[d.key]; ok {
				diff.frontend = &fe
			}
			diff.balancer = p.objects.balancers[d.key.Addr]
			diff.shared = !p.objects.state.Refuses(d.key.Addr, nil)
		}
		diff.Reason = reasonOf(diff)
		explained = explained && diff.Reason != ""
		p.group(diff)
	}
	switch {
	case same:
		p.Same++
	case explained:
		p.Explained++
	default:
		p.Unexplained++
	}
	return true
}

// equal reports whether two sides do the same, but for the packets that Verdict leaves to the first endpoint since they
// find none in all draws. kube-proxy refuses TCP by an ICMP error, and Verdict by a reset: who opens a connection is
// told "refused" by both.
func equal(a, b []packets.Outcome, kubeProxy bool) bool {
	return slices.EqualFunc(a, b, func(a, b packets.Outcome) bool {
		for _, e := range []*packets.Outcome{&a, &b} {
			if kubeProxy && e.Reject == tcpReset {
				e.Reject = "icmp port-unreachable"
			}
		}
		return a.Ending == b.Ending && a.Chance.Near(b.Chance)
	})
}

const tcpReset = "tcp reset"

// isKubeProxy says whether a side is one of kube-proxy's modes.
func (s *Side) isKubeProxy() bool { return s.Name == NFTables || s.Name == IPTables }

// digestOutcomes adds outcomes to the digest.
func (p *part) digestOutcomes(list []packets.Outcome) {
	var b bytes.Buffer
	for _, o := range list {
		to, _ := o.To.MarshalBinary()
		masqueraded := byte(0)
		if o.Masqueraded {
			masqueraded = 1
		}
		b.Write([]byte{byte(len(to)), byte(o.Verdict), masqueraded})
		b.Write(to)
		b.WriteString(o.Reject)
		if o.Remembered > 0 || o.Recalled {
			fmt.Fprint(&b, o.Remembered, o.Recalled)
		}
		b.Write(binary.BigEndian.AppendUint64(nil, o.Chance.Num))
		b.Write(binary.BigEndian.AppendUint64(nil, o.Chance.Den))
	}
	b.WriteByte('\n')
	p.digest.Write(b.Bytes())
}

// groupKey is what the differences of a group have in common.
type groupKey struct {
	sides  [2]string
	reason string
	kind   Kind
	sender Sender
}

// group counts a difference.
func (p *part) group(d *Difference) {
	k := groupKey{d.Sides, d.Reason, d.Kind, d.Sender}
	g := p.groups[k]
	if g == nil {
		g = &Group{Sides: k.sides, Reason: k.reason, Kind: k.kind, Sender: k.sender}
		p.groups[k] = g
	}
	g.Count++
	if len(g.Examples) < maxExamples {
		d.Outcomes = [2]string{describe(d.outcomes[0]), describe(d.outcomes[1])}
		g.Examples = append(g.Examples, *d)
	}
}

// maxDescribed bounds how many outcomes a description has.
const maxDescribed = 5

// describe says outcomes in a line.
func describe(list []packets.Outcome) string {
	var b bytes.Buffer
	for i, o := range list {
		if i == maxDescribed {
			fmt.Fprintf(&b, "; and %d more", len(list)-i)
			break
		}
		if i > 0 {
			b.WriteString("; ")
		}
		if o.Chance != packets.Certain {
			b.WriteString(o.Chance.String() + " ")
		}
		b.WriteString(o.Ending.String())
	}
	return b.String()
}

// merge adds up the parts.
func merge(parts []*part, destinations int) *Result {
	r := &Result{Destinations: destinations}
	groups := map[groupKey]*Group{}
	digest := sha256.New()
	for _, p := range parts {
		r.Classes += p.Classes
		r.Same += p.Same
		r.Explained += p.Explained
		r.Unexplained += p.Unexplained
		r.Unknown += p.Unknown
		r.Scheduled += p.Scheduled
		r.Errors = append(r.Errors, p.Errors[:min(len(p.Errors), maxErrors-len(r.Errors))]...)
		digest.Write(p.digest.Sum(nil))
		for k, g := range p.groups {
			if have := groups[k]; have != nil {
				have.Count += g.Count
				have.Examples = append(have.Examples, g.Examples[:min(len(g.Examples), maxExamples-len(have.Examples))]...)
			} else {
				groups[k] = g
			}
		}
	}
	for _, g := range groups {
		r.Groups = append(r.Groups, *g)
	}
	slices.SortFunc(r.Groups, func(a, b Group) int {
		return cmp.Or(cmp.Compare(min(len(a.Reason), 1), min(len(b.Reason), 1)), cmp.Compare(b.Count, a.Count),
			cmp.Compare(a.Sides[1], b.Sides[1]), cmp.Compare(a.Reason, b.Reason), cmp.Compare(a.Kind, b.Kind),
			cmp.Compare(a.Sender, b.Sender))
	})
	r.Groups = r.Groups[:min(len(r.Groups), maxGroups)]
	r.Digest = fmt.Sprintf("%x", digest.Sum(nil))
	return r
}
