package ipvsplugin

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"

	"github.com/moby/ipvs"
	"golang.org/x/sys/unix"

	"github.com/verdict-proxy/verdict/internal/system/netlink"
	"github.com/verdict-proxy/verdict/sync/dataplane"
)

// Statistics are those of a virtual service or of a destination.
type Statistics = dataplane.SchedulerStatistics

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
	err = b.read(func(v *client) error {
		all, err = v.serviceStatistics()
		return err
	})
	return all, err
}

// DestinationStatistics reads those of the destinations of a virtual service; none if it is gone. It may be called
// while the backend works.
func (b *Backend) DestinationStatistics(of dataplane.Key) (all []DestinationStatistics, err error) {
	err = b.read(func(v *client) error {
		all, err = v.destinationStatistics(of)
		return err
	})
	return all, err
}

// read calls f with a connection to IPVS that does not wait for transactions, if IPVS is in use.
func (b *Backend) read(f func(*client) error) error {
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
	err = withIPVS(func(v *client) error {
		all, err = v.statistics()
		return err
	})
	return all, err
}

// withIPVS calls f with a connection to IPVS, if IPVS is loaded.
func withIPVS(f func(*client) error) error {
	if !Loaded() {
		return nil
	}
	s, err := openSocket(unix.NETLINK_GENERIC)
	if err != nil {
		return err
	}
	v := &client{socket: s}
	defer v.close()
	if err := v.open(); err != nil {
		return err
	}
	return f(v)
}

// ReadService reads one virtual service of ours. It is not ok if there is none; otherwise it is like ReadStatistics.
func ReadService(k dataplane.Key) (s ServiceStatistics, ok bool, err error) {
	err = withIPVS(func(v *client) error {
		body, err := v.Get(v.request(cmdGetService, 0, named(k)))
		if errors.Is(err, unix.ESRCH) {
			return nil
		}
		if err != nil {
			return fmt.Errorf("ipvs: get service %s: %w", k, err)
		}
		l, counted, there := parseService(body)
		if !there || !l.ours {
			return nil
		}
		s = ServiceStatistics{Key: l.key, Config: l.Config, Statistics: counted}
		s.Destinations, err = v.destinationStatistics(k)
		ok = err == nil
		return err
	})
	return s, ok, err
}

// What follows reads lists beside moby/ipvs: in a third to a half of the time, and with 64 bits for connections,
// packets and rates, where moby/ipvs has 32, which wrap.

// statistics reads those of all virtual services of ours and their destinations, sorted.
func (v *client) statistics() ([]ServiceStatistics, error) {
	all, err := v.serviceStatistics()
	for i := range all {
		if all[i].Destinations, err = v.destinationStatistics(all[i].Key); err != nil {
			return nil, err
		}
	}
	slices.SortFunc(all, func(a, b ServiceStatistics) int { return a.Key.Compare(b.Key) })
	return all, err
}

// serviceStatistics reads those of all virtual services of ours.
func (v *client) serviceStatistics() (all []ServiceStatistics, err error) {
	err = v.dumpServices(func() { all = nil }, func(l listed, s Statistics) {
		if l.ours {
			all = append(all, ServiceStatistics{Key: l.key, Config: l.Config, Statistics: s})
		}
	})
	return all, err
}

// destinationStatistics reads those of a virtual service's destinations, sorted. That it is gone gives none.
func (v *client) destinationStatistics(k dataplane.Key) (all []DestinationStatistics, err error) {
	err = v.dumpDestinations(k, func() { all = nil }, func(d *ipvs.Destination, s Statistics) {
		all = append(all, DestinationStatistics{destinationOf(d).AddrPort, uint32(d.Weight), uint32(d.ActiveConnections),
			uint32(d.InactiveConnections), s})
	})
	slices.SortFunc(all, func(a, b DestinationStatistics) int { return a.Compare(b.AddrPort) })
	return all, err
}

// bulk is a reader of everything.
type bulk struct{ *client }

func (v bulk) services() (all []listed, err error) {
	err = v.dumpServices(func() { all = nil }, func(l listed, _ Statistics) { all = append(all, l) })
	return all, err
}

func (v bulk) destinations(k dataplane.Key) (all []Destination, err error) {
	err = v.dumpDestinations(k, func() { all = nil }, func(d *ipvs.Destination, _ Statistics) {
		all = append(all, destinationOf(d))
	})
	return all, err
}

// dumpServices calls each with every virtual service that could be a Service's; again with the first, after restart,
// if the list changed meanwhile.
func (v *client) dumpServices(restart func(), each func(listed, Statistics)) error {
	err := v.Dump(v.request(cmdGetService, unix.NLM_F_DUMP, nil), restart, func(body []byte) {
		v.hear()
		if l, s, ok := parseService(body); ok {
			each(l, s)
		}
	})
	if err != nil {
		return fmt.Errorf("ipvs: list services: %w", err)
	}
	return nil
}

// dumpDestinations is dumpServices for the destinations of a virtual service. That it is gone gives none.
func (v *client) dumpDestinations(k dataplane.Key, restart func(), each func(*ipvs.Destination, Statistics)) error {
	request := v.request(cmdGetDest, unix.NLM_F_DUMP, named(k))
	err := v.Dump(request, restart, func(body []byte) {
		v.hear()
		if d, s := parseDestination(body, number(k.Addr)); d.Address != nil {
			each(d, s)
		}
	})
	if err != nil && !errors.Is(err, unix.ESRCH) {
		return fmt.Errorf("ipvs: list destinations of %s: %w", k, err)
	}
	return nil
}

// request writes a message as the only one in the buffer, and returns its bytes. of may be nil.
func (v *client) request(cmd byte, flags uint16, of *ipvs.Service) []byte {
	v.out.Reset()
	v.message(cmd, flags, func() {
		if of != nil {
			n := v.out.Nest(attrService)
			v.name(of)
			v.out.Close(n)
		}
	})
	return v.out.Bytes()
}

// parseService is not ok for what could not be a Service's.
func parseService(body []byte) (l listed, stats Statistics, ok bool) {
	var s ipvs.Service
	var addr netlink.Value
	for typ, val := range netlink.Each(nested(body, attrService)) {
		switch typ {
		case svcFamily:
			s.AddressFamily = val.Native16()
		case svcProtocol:
			s.Protocol = val.Native16()
		case svcAddr:
			addr = val
		case svcPort:
			s.Port = val.Big16()
		case svcFwmark:
			s.FWMark = val.Native32()
		case svcSched:
			s.SchedName = val.Text()
		case svcFlags:
			s.Flags = val.Native32()
		case svcTimeout:
			s.Timeout = val.Native32()
		case svcStats64:
			stats = parseStatistics(val)
		}
	}
	s.Address = addrOf(s.AddressFamily, addr).AsSlice()
	l, ok = listedOf(&s)
	return l, stats, ok
}

// parseDestination gives one without an address if it is malformed. family is of one that does not say its own.
func parseDestination(body []byte, family uint16) (*ipvs.Destination, Statistics) {
	d := ipvs.Destination{AddressFamily: family}
	var stats Statistics
	var addr netlink.Value
	for typ, val := range netlink.Each(nested(body, attrDest)) {
		switch typ {
		case destAddr:
			addr = val
		case destPort:
			d.Port = val.Big16()
		case destWeight:
			d.Weight = int(val.Native32())
		case destUpper:
			d.UpperThreshold = val.Native32()
		case destActive:
			d.ActiveConnections = int(val.Native32())
		case destInactive:
			d.InactiveConnections = int(val.Native32())
		case destFamily:
			d.AddressFamily = val.Native16()
		case destStats64:
			stats = parseStatistics(val)
		}
	}
	d.Address = addrOf(d.AddressFamily, addr).AsSlice()
	return &d, stats
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

// nested gives what the first attribute of a type holds, after the header of generic netlink.
func nested(body []byte, typ uint16) []byte {
	return netlink.Find(body[min(netlink.GenericLen, len(body)):], typ)
}
