package status

import (
	"crypto/sha256"
	"encoding/binary"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strconv"

	"github.com/verdict-proxy/verdict/sync/snapshot"
)

// Digest stands for what objects ask for. Digests of different things differ, but for one in 2^64. The zero Digest is
// that of nothing. Digests add up: the one of several things does not depend on their order.
type Digest uint64

// MarshalText writes 16 hexadecimal digits.
func (d Digest) MarshalText() ([]byte, error) { return fmt.Appendf(nil, "%016x", uint64(d)), nil }

// UnmarshalText reads them.
func (d *Digest) UnmarshalText(text []byte) error {
	n, err := strconv.ParseUint(string(text), 16, 64)
	*d = Digest(n)
	return err
}

// Of returns the digest of a Service and its slices; 0 if there is no Service. It depends on nothing of a node: every
// node that decides from these objects has the same one. The loop programs what it decides from exactly these objects,
// so a digest that was computed when the kernel was in sync stands for what is programmed.
func Of(svc *snapshot.Service, of map[string]*snapshot.Slice) Digest {
	return new(writer).of(svc, slices.Collect(maps.Values(of)))
}

// quarantinedMark is added to the digest of a Service that the kernel rejects: what is programmed is something else.
const quarantinedMark Digest = 0x9e3779b97f4a7c15

// ofAll returns the part of one Service in the digest of all.
func ofAll(n snapshot.Name, d Digest) Digest {
	w := writer{}
	w.text(n.Namespace, n.Name)
	w.number(uint64(d))
	return w.digest()
}

// writer gathers fields, each with its length, so that no two lists of fields look the same.
type writer struct{ b []byte }

// of is Of.
func (w *writer) of(svc *snapshot.Service, of []*snapshot.Slice) Digest {
	if svc == nil {
		return 0
	}
	w.service(svc)
	sum := w.digest()
	for _, sl := range of {
		w.slice(sl)
		sum += w.digest()
	}
	return sum
}

// digest returns the digest of what was written, and forgets it.
func (w *writer) digest() Digest {
	sum := sha256.Sum256(w.b)
	w.b = w.b[:0]
	return Digest(binary.BigEndian.Uint64(sum[:]))
}

func (w *writer) number(numbers ...uint64) {
	for _, n := range numbers {
		w.b = binary.AppendUvarint(w.b, n)
	}
}

func (w *writer) flags(flags ...bool) {
	for _, f := range flags {
		n := uint64(0)
		if f {
			n = 1
		}
		w.number(n)
	}
}

func (w *writer) text(texts ...string) {
	for _, t := range texts {
		w.number(uint64(len(t)))
		w.b = append(w.b, t...)
	}
}

func (w *writer) addrs(addrs []netip.Addr) {
	w.number(uint64(len(addrs)))
	for _, a := range addrs {
		w.addr(a)
	}
}

func (w *writer) addr(a netip.Addr) {
	w.number(uint64(a.BitLen()))
	raw := a.As16()
	w.b = append(w.b, raw[:]...)
}

func (w *writer) service(s *snapshot.Service) {
	w.text("service", s.Name.Namespace, s.Name.Name, s.Age.UID)
	w.number(uint64(s.Age.Created))
	w.addrs(s.ClusterIPs)
	w.addrs(s.ExternalIPs)
	w.addrs(s.LoadBalancerIPs)
	w.number(uint64(len(s.SourceRanges)))
	for _, r := range s.SourceRanges {
		w.addr(r.Addr())
		w.number(uint64(r.Bits()))
	}
	w.flags(s.InternalLocal, s.ExternalLocal, s.NoRecords, s.Scheduling != nil)
	w.number(uint64(s.Affinity), uint64(s.HealthCheckNodePort), uint64(s.Counters), uint64(s.SecondChance),
		uint64(s.Drain), uint64(s.Rebalance), uint64(s.ExternalFailover), uint64(s.SlowStart))
	if sc := s.Scheduling; sc != nil {
		w.text(sc.Scheduler)
		w.flags(sc.Port, sc.Fallback, sc.PreferNear)
		w.number(uint64(len(sc.ZoneDemand)))
		for _, zone := range slices.Sorted(maps.Keys(sc.ZoneDemand)) {
			w.text(zone)
			w.number(uint64(sc.ZoneDemand[zone]))
		}
		w.number(uint64(len(sc.Weights)))
		for _, node := range slices.Sorted(maps.Keys(sc.Weights)) {
			w.text(node)
			w.number(uint64(sc.Weights[node]))
		}
	}
	w.number(uint64(len(s.Ports)))
	for _, p := range s.Ports {
		w.text(p.Name)
		w.number(uint64(p.Protocol), uint64(p.Port), uint64(p.NodePort))
	}
	if s.Backends != nil { // last, so that all others have the digests that they had before there were backends
		w.backends(s.Backends)
	}
	if s.Local != "" || s.LastResort != snapshot.LastResortDefault || s.Probe.Asked { // in the same way
		w.text("local", s.Local, s.LastResort.String(), s.Probe.Path)
		w.flags(s.Probe.Asked)
	}
	if s.Limits != (snapshot.Limits{}) { // as backends
		w.text("limits", s.Limits.String())
	}
	if s.ClientAddress != snapshot.ClientAddressDefault { // as backends
		w.text("client-address", s.ClientAddress.String())
	}
}

func (w *writer) backends(b *snapshot.Backends) {
	w.text("backends", b.For)
	w.number(uint64(len(b.Ports)))
	for i := range b.Ports {
		p := &b.Ports[i]
		w.text(p.Port, p.Listener, p.Route)
		w.number(uint64(len(p.To)))
		for _, to := range p.To {
			w.text(to.Service.Namespace, to.Service.Name, to.Refused)
			w.number(uint64(to.Port), uint64(to.Weight))
		}
	}
}

// slice writes a slice, but for when its last change began.
func (w *writer) slice(s *snapshot.Slice) {
	w.text("slice", s.Name.Namespace, s.Name.Name, s.Service)
	w.number(uint64(len(s.Ports)))
	for _, p := range s.Ports {
		w.text(p.Name)
		w.number(uint64(p.Protocol), uint64(p.Port))
	}
	w.number(uint64(len(s.Endpoints)))
	for i := range s.Endpoints {
		e := &s.Endpoints[i]
		w.addr(e.Addr)
		w.text(e.Node, e.Zone)
		for _, names := range [][]string{e.ForZones, e.ForNodes} {
			w.number(uint64(len(names)))
			w.text(names...)
		}
		w.flags(e.Ready, e.Serving, e.Terminating, e.Weight.Given)
		w.number(uint64(e.Weight.Parts))
	}
}
