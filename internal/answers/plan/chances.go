package plan

import (
	"cmp"
	"net/netip"
	"slices"

	"github.com/verdict-proxy/verdict/sync/dataplane"
)

// Chances are those of endpoints to get a new connection, from some senders to some addresses of a port.
type Chances struct {
	Port   string `json:"port"`
	Family string `json:"family"`
	// To says for whom they hold: "cluster IP", "external addresses", each perhaps with "from pods, node".
	To []string `json:"to"`
	// Before and After count the endpoints.
	Before int `json:"before"`
	After  int `json:"after"`
	// Endpoints are those whose chance changes, the first maxListed; MoreEndpoints counts the others.
	Endpoints     []EndpointChance `json:"endpoints"`
	MoreEndpoints int              `json:"moreEndpoints,omitempty"`
}

// EndpointChance is an endpoint's chance from 0 to 1 before and after the change. An endpoint that the addresses did
// not, or will not, lead to has 0.
type EndpointChance struct {
	Endpoint string  `json:"endpoint"`
	Before   float64 `json:"before"`
	After    float64 `json:"after"`
}

// poolPair is what some senders meet before and after the change.
type poolPair struct{ before, after *dataplane.Pool }

// audience is a sender, and a kind of address.
type audience struct {
	external bool
	from     string
}

// chances compares the pools that the same senders meet at the same addresses.
func (m *maker) chances(s *Service, before, after *dataplane.Service) {
	for _, pair := range portPairs(before, after) {
		b, a := pair[0], pair[1]
		if a == nil {
			continue
		}
		var order []poolPair
		meets := map[poolPair][]audience{}
		for i := range a.Frontends {
			f := &a.Frontends[i]
			was, held := m.held[f.Key]
			for _, o := range origins {
				p := poolPair{after: choosing(a, f, o.from)}
				switch {
				case held && was.name == after.Name:
					p.before = choosing(was.port, was.frontend, o.from)
				case b != nil: // a new address of an old port
					continue
				}
				if p.after == nil || p.before == p.after {
					continue
				}
				if meets[p] == nil {
					order = append(order, p)
				}
				if who := (audience{f.Kind != dataplane.ClusterIP, o.word}); !slices.Contains(meets[p], who) {
					meets[p] = append(meets[p], who)
				}
			}
		}
		for _, p := range order {
			c := Chances{Port: portLabel(a), Family: a.Family().String(), To: audienceTexts(meets[p])}
			if c.compare(p); len(c.Endpoints) > 0 {
				m.out.Effects.Chances += len(c.Endpoints) + c.MoreEndpoints
				s.Chances = append(s.Chances, c)
			}
		}
	}
}

// choosing returns the pool from which Verdict chooses for a sender; nil if IPVS does.
func choosing(sp *dataplane.ServicePort, f *dataplane.Frontend, from dataplane.From) *dataplane.Pool {
	if p := f.Route(from).Pool; p != sp.Scheduled(f) {
		return p
	}
	return nil
}

// audienceTexts describe senders.
func audienceTexts(list []audience) (texts []string) {
	for _, external := range []bool{false, true} {
		text, n := "cluster IP", 0
		if external {
			text = "external addresses"
		}
		from := " from "
		for _, a := range list {
			if a.external == external {
				if n++; n > 1 {
					from += ", "
				}
				from += a.from
			}
		}
		if n == 0 {
			continue
		}
		if n < len(origins) {
			text += from
		}
		texts = append(texts, text)
	}
	return texts
}

// compare fills in the endpoints whose chances differ.
func (c *Chances) compare(p poolPair) {
	type chance struct{ before, after float64 }
	all := map[netip.AddrPort]*chance{}
	of := func(a netip.AddrPort) *chance {
		if all[a] == nil {
			all[a] = &chance{}
		}
		return all[a]
	}
	if p.before != nil {
		c.Before = len(p.before.Endpoints)
		eachChance(p.before, func(a netip.AddrPort, share float64) { of(a).before = share })
	}
	c.After = len(p.after.Endpoints)
	eachChance(p.after, func(a netip.AddrPort, share float64) { of(a).after = share })
	var differ []netip.AddrPort
	for a, x := range all {
		if x.before != x.after {
			differ = append(differ, a)
		}
	}
	slices.SortFunc(differ, func(a, b netip.AddrPort) int { // those that come and go first
		rank := func(a netip.AddrPort) int {
			if all[a].before == 0 || all[a].after == 0 {
				return 0
			}
			return 1
		}
		return cmp.Or(cmp.Compare(rank(a), rank(b)), a.Compare(b))
	})
	for i, a := range differ {
		if i == maxListed {
			c.MoreEndpoints = len(differ) - i
			return
		}
		c.Endpoints = append(c.Endpoints, EndpointChance{a.String(), all[a].before, all[a].after})
	}
}

// eachChance calls do for each endpoint of a pool, with its chance of all connections, refused ones included. Equal
// chances are equal numbers, whatever the weights.
func eachChance(p *dataplane.Pool, do func(netip.AddrPort, float64)) {
	total := 0
	for i := range p.Endpoints {
		total += int(max(p.Endpoints[i].Weight, 1))
	}
	for i := range p.Endpoints {
		share := int(max(p.Endpoints[i].Weight, 1)) * (dataplane.RefusedOf - int(p.Refused))
		do(p.Endpoints[i].AddrPort, float64(share)/float64(total*dataplane.RefusedOf))
	}
}
