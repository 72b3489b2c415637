package records

import (
	"cmp"
	"fmt"
	"slices"
	"strings"

	"github.com/verdict-proxy/verdict/internal/proxy/flows"
	"github.com/verdict-proxy/verdict/internal/system/terminal"
	"github.com/verdict-proxy/verdict/internal/system/units"
)

// Zones are what crossed the borders of zones, by Service and pair of zones.
type Zones struct {
	// Nodes are those that answered, with what their sums miss.
	Nodes []flows.Answer `json:"nodes"`
	// Pairs are sorted by bytes, the most first.
	Pairs []ZonePair `json:"pairs"`
	// Bytes is what crossed, Within what stayed within a zone, and Unknown what has a side whose zone is not known.
	Bytes   uint64 `json:"bytes"`
	Within  uint64 `json:"within"`
	Unknown uint64 `json:"unknown"`
	// Cost is Bytes times the price of 10^9 bytes; 0 without a price.
	Cost float64 `json:"cost,omitempty"`
}

// ZonePair is what clients of one zone and endpoints of another one sent each other.
type ZonePair struct {
	Service      string  `json:"service"`
	ClientZone   string  `json:"clientZone"`
	EndpointZone string  `json:"endpointZone"`
	Connections  uint64  `json:"connections"`
	Sent         uint64  `json:"sent"`
	Received     uint64  `json:"received"`
	Cost         float64 `json:"cost,omitempty"`
}

func (p *ZonePair) bytes() uint64 { return p.Sent + p.Received }

// ZoneSum adds up Zones.
type ZoneSum struct {
	zones Zones
	pairs map[[3]string]*ZonePair
}

// NewZoneSum returns a sum of nothing.
func NewZoneSum() *ZoneSum { return &ZoneSum{pairs: map[[3]string]*ZonePair{}} }

// AddSum adds a sum of a node.
func (z *ZoneSum) AddSum(s *flows.Sum) {
	switch bytes := s.Sent.Bytes + s.Received.Bytes; {
	case s.ClientZone == "" || s.EndpointZone == "" || s.ClientZone == flows.Others:
		z.zones.Unknown += bytes
	case s.ClientZone == s.EndpointZone:
		z.zones.Within += bytes
	default:
		z.addPair(&ZonePair{Service: s.Service, ClientZone: s.ClientZone, EndpointZone: s.EndpointZone,
			Connections: s.Connections, Sent: s.Sent.Bytes, Received: s.Received.Bytes})
	}
}

func (z *ZoneSum) addPair(p *ZonePair) {
	k := [3]string{p.Service, p.ClientZone, p.EndpointZone}
	to := z.pairs[k]
	if to == nil {
		to = &ZonePair{Service: p.Service, ClientZone: p.ClientZone, EndpointZone: p.EndpointZone}
		z.pairs[k] = to
	}
	to.Connections += p.Connections
	to.Sent += p.Sent
	to.Received += p.Received
	z.zones.Bytes += p.bytes()
}

// AddNode adds a node's answer, without its sums.
func (z *ZoneSum) AddNode(a *flows.Answer) { z.zones.Nodes = append(z.zones.Nodes, *a) }

// Add adds the Zones of other nodes.
func (z *ZoneSum) Add(o *Zones) {
	z.zones.Nodes = append(z.zones.Nodes, o.Nodes...)
	z.zones.Within += o.Within
	z.zones.Unknown += o.Unknown
	for i := range o.Pairs {
		z.addPair(&o.Pairs[i])
	}
}

// Zones returns what was added up, at a price for 10^9 bytes; 0 means that there is none.
func (z *ZoneSum) Zones(price float64) *Zones {
	out := z.zones
	out.Pairs = make([]ZonePair, 0, len(z.pairs))
	for _, p := range z.pairs {
		p.Cost = price * float64(p.bytes()) / 1e9
		out.Pairs = append(out.Pairs, *p)
	}
	slices.SortFunc(out.Pairs, func(a, b ZonePair) int {
		return cmp.Or(cmp.Compare(b.bytes(), a.bytes()), strings.Compare(a.Service, b.Service),
			strings.Compare(a.ClientZone, b.ClientZone), strings.Compare(a.EndpointZone, b.EndpointZone))
	})
	out.Cost = price * float64(out.Bytes) / 1e9
	return &out
}

// maxPairs is how many pairs are printed.
const maxPairs = 40

// Print prints the pairs with most bytes, and the sum.
func (z *Zones) Print(p *terminal.Printer, price float64) {
	rows := terminal.Columns{34, 18, 18, 13, 11, 11}
	cost := func(c float64) string {
		if price == 0 {
			return ""
		}
		return fmt.Sprintf("%.4f", c)
	}
	heading := ""
	if price > 0 {
		heading = "COST"
	}
	p.Line("%s", rows.Row("SERVICE", "CLIENTS IN", "ENDPOINTS IN", "CONNECTIONS", "SENT", "RECEIVED", heading))
	for i := range z.Pairs[:min(len(z.Pairs), maxPairs)] {
		pair := &z.Pairs[i]
		p.Line("%s", rows.Row(pair.Service, pair.ClientZone, pair.EndpointZone, units.Thousands(int(pair.Connections)),
			units.Bytes(int64(pair.Sent)), units.Bytes(int64(pair.Received)), cost(pair.Cost)))
	}
	if more := len(z.Pairs) - maxPairs; more > 0 {
		p.Line("and %s (-o json)", terminal.Plural(more, "more row"))
	}
	text := fmt.Sprintf("%s crossed zones, %s stayed within one, of %s a zone is not known",
		units.Bytes(int64(z.Bytes)), units.Bytes(int64(z.Within)), units.Bytes(int64(z.Unknown)))
	if price > 0 {
		text += fmt.Sprintf("; cost: %.4f, at %g for a GB (10^9 bytes)", z.Cost, price)
	}
	p.Line("%s", text)
	for i := range z.Nodes {
		PrintLosses(p, &z.Nodes[i])
	}
}
