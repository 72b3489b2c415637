package snapshot

import (
	"iter"
	"maps"
	"slices"
)

// Backends say that the endpoints of other Services serve a Service's ports, in place of its own slices. The annotation
// backends says so; docs/decisions/0036-gateway.md has its form. They are immutable.
type Backends struct {
	// For names what asked for them, as in "Gateway edge/db"; empty if nobody said.
	For string
	// Ports are in the order of the annotation, each Port once. A port of the Service that is not among them has no
	// endpoints.
	Ports []PortBackends
}

// For names what asked for a Service's backends; empty if it has none, for a nil Service, and if nobody said.
func (s *Service) For() string {
	if s == nil || s.Backends == nil {
		return ""
	}
	return s.Backends.For
}

// PortBackends are those of one port of a Service.
type PortBackends struct {
	// Port is the port's name; empty for the only port of a Service.
	Port string
	// Listener and Route name what led to them, as in "db" and "TCPRoute shop/db". Both may be empty, and both are only
	// for answers: they change nothing for a packet.
	Listener, Route string
	// To has at most MaxBackends.
	To []Backend
}

// Backend is a share of a port's new connections, and the Service that gets it.
type Backend struct {
	Service Name
	// Port is the number of one of that Service's ports, of the protocol of the port that refers to it.
	Port uint16
	// Weight is its share, relative to the others; at most MaxBackendWeight. With 0 it gets none.
	Weight uint32
	// Refused, if not empty, says why its share of connections is refused, and Service and Port may be zero then.
	Refused string
}

// Bounds of Backends: those of Gateway API.
const (
	MaxBackends      = 16
	MaxBackendPorts  = 64
	MaxBackendWeight = 1_000_000
)

// Of returns the backends of a port by its name; nil if it has none.
func (b *Backends) Of(port string) *PortBackends {
	if i := slices.IndexFunc(b.Ports, func(p PortBackends) bool { return p.Port == port }); i >= 0 {
		return &b.Ports[i]
	}
	return nil
}

// Each ranges over the backends of all ports. The Backends may be nil.
func (b *Backends) Each() iter.Seq[*Backend] {
	return func(yield func(*Backend) bool) {
		if b == nil {
			return
		}
		for i := range b.Ports {
			for j := range b.Ports[i].To {
				if !yield(&b.Ports[i].To[j]) {
					return
				}
			}
		}
	}
}

// Sum returns the sum of all weights.
func (p *PortBackends) Sum() (sum int) {
	for i := range p.To {
		sum += int(p.To[i].Weight)
	}
	return sum
}

// PortOf returns the name that the port of a backend has in the slices of its Service, for a port of a protocol that
// refers to it. If there is none, refused says why.
func (s *Snapshot) PortOf(b *Backend, p Protocol) (name, refused string) {
	svc := s.Services[b.Service]
	switch {
	case b.Refused != "":
		return "", b.Refused
	case svc == nil:
		return "", "there is no such Service with a cluster IP"
	case svc.Backends != nil:
		return "", "the Service has no endpoints of its own, but backends"
	}
	for i := range svc.Ports {
		if svc.Ports[i].Port == b.Port && svc.Ports[i].Protocol == p {
			return svc.Ports[i].Name, ""
		}
	}
	return "", "the Service has no such port of this protocol"
}

// SlicesOf returns the slices of which endpoints may serve a Service, each once, in no order: its own, or those of its
// backends.
func (s *Snapshot) SlicesOf(n Name) []*Slice {
	svc := s.Services[n]
	if svc == nil || svc.Backends == nil {
		return slices.Collect(maps.Values(s.Slices[n]))
	}
	var list []*Slice
	seen := map[Name]bool{}
	for to := range svc.Backends.Each() {
		if to.Refused == "" && !seen[to.Service] {
			seen[to.Service] = true
			list = slices.AppendSeq(list, maps.Values(s.Slices[to.Service]))
		}
	}
	return list
}

// Referrers ranges over the names of the Services whose Backends name a Service, in no order.
func (s *Snapshot) Referrers(n Name) iter.Seq[Name] { return maps.Keys(s.referrers[n]) }

// refer keeps referrers in sync with a Service of which either version may be nil.
func (s *Snapshot) refer(n Name, was, is *Service) {
	if was != nil {
		for b := range was.Backends.Each() {
			if delete(s.referrers[b.Service], n); len(s.referrers[b.Service]) == 0 {
				delete(s.referrers, b.Service)
			}
		}
	}
	if is != nil {
		for b := range is.Backends.Each() {
			if s.referrers[b.Service] == nil {
				s.referrers[b.Service] = map[Name]struct{}{}
			}
			s.referrers[b.Service][n] = struct{}{}
		}
	}
}

// touchReferrers adds the Services that refer to those in touched. Theirs in turn do not matter, as PortOf follows no
// reference to a reference.
func (s *Snapshot) touchReferrers(touched map[Name]struct{}) {
	if len(s.referrers) == 0 {
		return
	}
	for _, n := range slices.Collect(maps.Keys(touched)) {
		maps.Copy(touched, s.referrers[n])
	}
}
