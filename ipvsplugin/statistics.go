package ipvsplugin

import (
	"net/netip"
	"slices"

	"golang.org/x/sys/unix"

	"github.com/verdict-proxy/verdict/internal/netlink"
	"github.com/verdict-proxy/verdict/sync/dataplane"
)

// Statistics are what IPVS counted, since the virtual service or destination was made. The kernel's rates follow some
// seconds behind.
type Statistics struct {
	Connections                 uint64
	PacketsIn, PacketsOut       uint64
	BytesIn, BytesOut           uint64
	ConnectionRate              uint64 // per second, as all rates
	PacketRateIn, PacketRateOut uint64
	ByteRateIn, ByteRateOut     uint64
}

// parseStatistics reads what IPVS counts in 64 bits.
func parseStatistics(b []byte) (s Statistics) {
	fields := [...]*uint64{1: &s.Connections, &s.PacketsIn, &s.PacketsOut, &s.BytesIn, &s.BytesOut, &s.ConnectionRate,
		&s.PacketRateIn, &s.PacketRateOut, &s.ByteRateIn, &s.ByteRateOut}
	for typ, val := range netlink.Each(b) {
		if typ > 0 && int(typ) < len(fields) {
			*fields[typ] = val.Native64()
		}
	}
	return s
}

// ServiceStatistics are those of a virtual service of ours.
type ServiceStatistics struct {
	Key dataplane.Key
	Config
	Statistics
	Destinations []DestinationStatistics
}

// DestinationStatistics are those of a destination. One that drains has the weight 0.
type DestinationStatistics struct {
	netip.AddrPort
	Weight uint32
	// Active and Inactive are the connections that it has now; closed ones are inactive, for some minutes.
	Active, Inactive uint32
	Statistics
}

// Statistics reads those of all virtual services of ours, without their destinations; none if IPVS is not in use. It
// may be called while the backend works.
func (b *Backend) Statistics() (all []ServiceStatistics, err error) {
	err = b.read(func(v *ipvs) error {
		list, err := v.services()
		for _, l := range list {
			if l.ours {
				all = append(all, ServiceStatistics{Key: l.key, Config: l.Config, Statistics: l.stats})
			}
		}
		return err
	})
	return all, err
}

// DestinationStatistics reads those of the destinations of a virtual service; none if it is gone. It may be called
// while the backend works.
func (b *Backend) DestinationStatistics(of dataplane.Key) (all []DestinationStatistics, err error) {
	err = b.read(func(v *ipvs) error {
		all, err = v.destinationStatistics(of)
		return err
	})
	return all, err
}

// read calls f with a connection to IPVS that does not wait for transactions, if IPVS is in use.
func (b *Backend) read(f func(*ipvs) error) error {
	b.mu.Lock()
	active, family := b.active, b.ipvs.family
	b.mu.Unlock()
	if !active {
		return nil
	}
	b.statisticsConn.Lock()
	defer b.statisticsConn.Unlock()
	b.statisticsConn.ipvs.family = family
	return f(&b.statisticsConn.ipvs)
}

// ReadStatistics reads those of all virtual services of ours, and their destinations, for a process that has no
// Backend. It reads in the network namespace of the calling thread, and does not load IPVS.
func ReadStatistics() (all []ServiceStatistics, err error) {
	err = withIPVS(func(v *ipvs) error {
		all, err = v.statistics()
		return err
	})
	return all, err
}

// withIPVS calls f with a connection to IPVS, if IPVS is loaded.
func withIPVS(f func(*ipvs) error) error {
	if !Loaded() {
		return nil
	}
	s, err := openSocket(unix.NETLINK_GENERIC)
	if err != nil {
		return err
	}
	defer s.close()
	v := &ipvs{socket: s}
	if err := v.find(); err != nil {
		return err
	}
	return f(v)
}

func (v *ipvs) statistics() ([]ServiceStatistics, error) {
	list, err := v.services()
	if err != nil {
		return nil, err
	}
	var all []ServiceStatistics
	for _, l := range list {
		if !l.ours {
			continue
		}
		s, err := v.statisticsOf(l)
		if err != nil {
			return nil, err
		}
		all = append(all, s)
	}
	slices.SortFunc(all, func(a, b ServiceStatistics) int { return a.Key.Compare(b.Key) })
	return all, nil
}

func (v *ipvs) statisticsOf(l listed) (s ServiceStatistics, err error) {
	s = ServiceStatistics{Key: l.key, Config: l.Config, Statistics: l.stats}
	s.Destinations, err = v.destinationStatistics(l.key)
	return s, err
}

func (v *ipvs) destinationStatistics(k dataplane.Key) (all []DestinationStatistics, err error) {
	dests, err := v.dests(k)
	for _, d := range dests {
		all = append(all, DestinationStatistics{d.AddrPort, d.Weight, d.active, d.inactive, d.stats})
	}
	slices.SortFunc(all, func(a, b DestinationStatistics) int { return a.Compare(b.AddrPort) })
	return all, err
}

// ReadService reads one virtual service of ours. It is not ok if there is none; otherwise it is like ReadStatistics.
func ReadService(k dataplane.Key) (s ServiceStatistics, ok bool, err error) {
	err = withIPVS(func(v *ipvs) error {
		l, there, err := v.service(k)
		if err != nil || !there || !l.ours {
			return err
		}
		s, err = v.statisticsOf(l)
		ok = err == nil
		return err
	})
	return s, ok, err
}
