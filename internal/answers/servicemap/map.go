// Package servicemap adds up who sends how much to which Service, in bounded size, from the sums of records.
package servicemap

import (
	"cmp"
	"context"
	"errors"
	"maps"
	"net/netip"
	"slices"
	"strings"
	"time"

	"github.com/verdict-proxy/verdict/internal/answers/records"
	"github.com/verdict-proxy/verdict/internal/proxy/flows"
)

// Arrow is what a client and a Service sent each other.
type Arrow struct {
	// Client is as in flows.Sum. An arrow that stands for several has as its Client their namespace and a slash: "shop/";
	// "/" stands for clients of no or of any namespace. Service is "namespace/name", or "/" for any.
	Client  string `json:"client"`
	Zone    string `json:"zone,omitempty"`
	Service string `json:"service"`
	// Sent are the bytes of clients, and Received those that they got.
	Sent     uint64 `json:"sent"`
	Received uint64 `json:"received"`
	// Connections counts those that ended, and Failures those of them that failed.
	Connections uint64 `json:"connections"`
	Failures    uint64 `json:"failures"`
	// Folded is how many arrows this one stands for, at most; 0 for one of its own.
	Folded int `json:"folded,omitempty"`
}

type key struct{ client, zone, service string }

// Map adds up arrows. Make one with New.
type Map struct {
	most   int
	arrows map[key]*Arrow
}

// New returns a Map without arrows, which keeps as many arrows of their own as most, and folds the others.
func New(most int) *Map { return &Map{most: most, arrows: map[key]*Arrow{}} }

// Most is how many arrows of its own a node tells of. So what it sends is bounded, by some 300 KiB.
const Most = 1000

// slack is how many times as many arrows as it keeps a Map holds before it folds. So the order in which arrows come
// makes little difference.
const slack = 8

// Add adds an arrow.
func (m *Map) Add(a *Arrow) {
	m.add(a)
	if len(m.arrows) > slack*m.most {
		folded := New(m.most)
		for _, a := range m.Arrows() {
			folded.add(&a)
		}
		m.arrows = folded.arrows
	}
}

// AddSum adds a sum of records.
func (m *Map) AddSum(s *flows.Sum) {
	m.Add(&Arrow{Client: s.Client, Zone: s.ClientZone, Service: s.Service, Sent: s.Sent.Bytes,
		Received: s.Received.Bytes, Connections: s.Connections, Failures: s.Failures})
}

func (m *Map) add(a *Arrow) {
	k := key{a.Client, a.Zone, a.Service}
	to := m.arrows[k]
	if to == nil {
		to = &Arrow{Client: a.Client, Zone: a.Zone, Service: a.Service}
		m.arrows[k] = to
	}
	to.Sent += a.Sent
	to.Received += a.Received
	to.Connections += a.Connections
	to.Failures += a.Failures
	to.Folded += a.Folded
}

// Arrows returns the arrows with most failures, up to half of those that are kept, and then the largest. The others are
// folded by the namespace of their clients, as many again, and the rest into one; these come last.
func (m *Map) Arrows() []Arrow {
	all := slices.SortedFunc(maps.Values(m.arrows), func(a, b *Arrow) int {
		return cmp.Or(cmp.Compare(min(a.Folded, 1), min(b.Folded, 1)), cmp.Compare(b.Failures, a.Failures), a.compare(b))
	})
	own, fails := 0, 0
	for own < len(all) && all[own].Folded == 0 {
		own++
	}
	for fails < min(own, m.most/2) && all[fails].Failures > 0 {
		fails++
	}
	slices.SortFunc(all[fails:own], (*Arrow).compare)
	kept := min(own, m.most)
	others := fold(all[kept:], func(a *Arrow) { a.Client = Namespace(a.Client) + "/" })
	named := min(len(others), m.most)
	rest := fold(others[named:], func(a *Arrow) { a.Client, a.Zone, a.Service = "/", "", "/" })
	out := make([]Arrow, 0, kept+named+len(rest))
	for _, a := range slices.Concat(all[:kept], others[:named], rest) {
		out = append(out, *a)
	}
	return out
}

// compare orders arrows: the largest first, then by name.
func (a *Arrow) compare(b *Arrow) int {
	return cmp.Or(cmp.Compare(b.Sent+b.Received, a.Sent+a.Received), strings.Compare(a.Client, b.Client),
		strings.Compare(a.Service, b.Service), strings.Compare(a.Zone, b.Zone))
}

// fold adds up arrows that are the same once they are renamed.
func fold(list []*Arrow, rename func(*Arrow)) []*Arrow {
	m := New(0)
	for _, a := range list {
		renamed := *a
		rename(&renamed)
		renamed.Folded = max(a.Folded, 1)
		m.add(&renamed)
	}
	return slices.SortedFunc(maps.Values(m.arrows), (*Arrow).compare)
}

// Namespace returns the namespace of "namespace/name", and of "namespace/"; empty for addresses, prefixes and others.
func Namespace(name string) string {
	if _, err := netip.ParsePrefix(name); err == nil {
		return ""
	}
	namespace, _, ok := strings.Cut(name, "/")
	if !ok {
		return ""
	}
	return namespace
}

// Answer is what one node has for the map.
type Answer struct {
	flows.Answer
	// Off says that the node keeps no records.
	Off    bool    `json:"off,omitempty"`
	Arrows []Arrow `json:"arrows"`
}

// patience is how long a node may take to answer.
const patience = 10 * time.Second

// Read asks the proxy on this host, whose metrics server is at an address, for what this node has for the map.
func Read(ctx context.Context, addr netip.AddrPort, since time.Duration) (*Answer, error) {
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	m := New(Most)
	head, err := records.Read(ctx, addr, &records.Question{Sums: true, Since: since}, m.AddSum)
	off := errors.Is(err, records.ErrOff)
	if err != nil && !off {
		return nil, err
	}
	return &Answer{Answer: head, Off: off, Arrows: m.Arrows()}, nil
}

// Covers reports whether an arrow's client stands for a client.
func Covers(arrow, client string) bool {
	return arrow == client || arrow == "/" || arrow == Namespace(client)+"/"
}
