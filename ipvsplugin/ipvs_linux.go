package ipvsplugin

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/verdict-proxy/verdict/internal/netlink"
	"github.com/verdict-proxy/verdict/sync/dataplane"
	"github.com/verdict-proxy/verdict/sync/snapshot"
)

// Commands and attributes of IPVS: include/uapi/linux/ip_vs.h.
const (
	cmdNewService = 1
	cmdSetService = 2
	cmdDelService = 3
	cmdGetService = 4
	cmdNewDest    = 5
	cmdSetDest    = 6
	cmdDelDest    = 7
	cmdGetDest    = 8
	cmdSetConfig  = 12
	cmdGetConfig  = 13

	attrService       = 1
	attrDest          = 2
	attrTimeoutTCP    = 4
	attrTimeoutTCPFin = 5
	attrTimeoutUDP    = 6

	svcFamily   = 1
	svcProtocol = 2
	svcAddr     = 3
	svcPort     = 4
	svcFwmark   = 5
	svcSched    = 6
	svcFlags    = 7
	svcTimeout  = 8
	svcNetmask  = 9
	svcStats64  = 12

	destAddr     = 1
	destPort     = 2
	destForward  = 3
	destWeight   = 4
	destUpper    = 5
	destLower    = 6
	destActive   = 7
	destInactive = 8
	destFamily   = 11
	destStats64  = 12
)

var protocolNumbers = [...]uint16{
	snapshot.TCP:  unix.IPPROTO_TCP,
	snapshot.UDP:  unix.IPPROTO_UDP,
	snapshot.SCTP: unix.IPPROTO_SCTP,
}

// ipvs speaks with IPVS. It is for one goroutine at a time.
type ipvs struct {
	*socket
	family uint16
}

// Missing is the error of a kernel in which IPVS, or one of its schedulers, is neither loaded nor could be.
type Missing struct {
	// Modules are what would have to be loaded.
	Modules []string
}

func (e *Missing) Error() string {
	names := strings.Join(e.Modules, " ")
	return fmt.Sprintf(
		"IPVS cannot schedule: the kernel lacks %s and failed to load it (try modprobe -a %s)",
		names,
		names,
	)
}

// find looks the family of generic netlink up, for which Linux 6.1 loads the module ip_vs; 5.10 does not. Nothing
// succeeds without it.
func (v *ipvs) find() error {
	if v.family != 0 {
		return nil
	}
	id, err := v.Family("IPVS")
	if errors.Is(err, unix.ENOENT) {
		return &Missing{Modules: []string{"ip_vs"}}
	}
	if err != nil {
		return fmt.Errorf("ipvs: %w", err)
	}
	v.family = id
	return nil
}

// message writes a message with a command. attrs may be nil.
func (v *ipvs) message(cmd byte, flags uint16, attrs func()) {
	m := v.out.Generic(v.family, flags, cmd)
	if attrs != nil {
		attrs()
	}
	v.out.End(m)
}

// request is message as the only one in the buffer, and returns its bytes.
func (v *ipvs) request(cmd byte, flags uint16, attrs func()) []byte {
	v.out.Reset()
	v.message(cmd, flags, attrs)
	return v.out.Bytes()
}

// key writes the attribute that names a virtual service.
func (v *ipvs) key(k dataplane.Key) {
	n := v.out.Nest(attrService)
	v.name(k)
	v.out.Close(n)
}

// name writes what names a virtual service.
func (v *ipvs) name(k dataplane.Key) {
	v.out.Native16(svcFamily, number(k.Addr))
	v.out.Native16(svcProtocol, protocolNumbers[k.Protocol])
	v.out.Attr(svcAddr, k.Addr.AsSlice()...)
	v.out.Big16(svcPort, k.Port)
}

// config writes the rest of it. A client is told apart by its whole address.
func (v *ipvs) config(k dataplane.Key, c Config) {
	v.out.Text(svcSched, c.Scheduler)
	flags := make([]byte, 0, 8)
	for _, n := range []uint32{c.Flags | ownFlag, flagMask} {
		flags = binary.NativeEndian.AppendUint32(flags, n)
	}
	v.out.Attr(svcFlags, flags...)
	v.out.Native32(svcTimeout, c.Timeout)
	if k.Addr.Is4() {
		v.out.Native32(svcNetmask, ^uint32(0))
	} else {
		v.out.Native32(svcNetmask, 128)
	}
}

// write writes the message of an op.
func (v *ipvs) write(o op) {
	cmd := [...]byte{cmdNewService, cmdSetService, cmdDelService, cmdNewDest, cmdSetDest, cmdDelDest}[o.verb]
	v.message(cmd, 0, func() {
		n := v.out.Nest(attrService)
		v.name(o.key)
		if o.verb == newService || o.verb == setService {
			v.config(o.key, o.config)
		}
		v.out.Close(n)
		if o.verb >= newDest {
			n = v.out.Nest(attrDest)
			v.dest(o.dest)
			v.out.Close(n)
		}
	})
}

// dest writes a destination. All forward by translating addresses, which is 0.
func (v *ipvs) dest(d Destination) {
	v.out.Attr(destAddr, d.Addr().AsSlice()...)
	v.out.Big16(destPort, d.Port())
	v.out.Native32(destForward, 0)
	v.out.Native32(destWeight, d.Weight)
	v.out.Native32(destUpper, d.Until)
	v.out.Native32(destLower, 0)
	v.out.Native16(destFamily, number(d.Addr()))
}

// failure is a write that the kernel refuses.
type failure struct {
	op
	errno unix.Errno
}

// commitOps writes ops in order, and gives those that the kernel refuses. What it took is taken note of in c.
//
// New virtual services go first: where there is one of somebody else's already, its destinations must not become ours.
func (v *ipvs) commitOps(ops []op, c *contents) ([]failure, error) {
	var first, rest []op
	for _, o := range ops {
		if o.verb == newService {
			first = append(first, o)
		}
	}
	failed, err := v.commitInOrder(first, c)
	others := map[dataplane.Key]bool{}
	for _, f := range failed {
		others[f.key] = true
	}
	for _, o := range ops {
		if o.verb != newService && !others[o.key] {
			rest = append(rest, o)
		}
	}
	if err != nil {
		return failed, err
	}
	more, err := v.commitInOrder(rest, c)
	return append(failed, more...), err
}

func (v *ipvs) commitInOrder(ops []op, c *contents) (failed []failure, err error) {
	for part := range slices.Chunk(ops, maxBatch) {
		v.out.Reset()
		for _, o := range part {
			v.write(o)
		}
		r, err := v.commit()
		if err != nil {
			return failed, err
		}
		for i, o := range part {
			if errno, bad := r[i]; bad {
				failed = append(failed, failure{o, errno})
			} else {
				c.apply(o)
			}
		}
	}
	return failed, nil
}

// listed is a virtual service in a list.
type listed struct {
	key dataplane.Key
	Config
	ours  bool
	stats Statistics
}

// parseService reads one. ok is false for what is named by a mark, or is of a protocol that is no Service's.
func parseService(body []byte) (l listed, ok bool) {
	var family, protocol uint16
	var addr, flags netlink.Value
	ok = true
	for typ, val := range netlink.Each(nested(body, attrService)) {
		switch typ {
		case svcFamily:
			family = val.Native16()
		case svcProtocol:
			protocol = val.Native16()
		case svcAddr:
			addr = val
		case svcPort:
			l.key.Port = val.Big16()
		case svcFwmark:
			ok = false
		case svcSched:
			l.Scheduler = val.Text()
		case svcFlags:
			flags = val
		case svcTimeout:
			l.Timeout = val.Native32()
		case svcStats64:
			l.stats = parseStatistics(val)
		}
	}
	l.key.Addr = addrOf(family, addr)
	p := slices.Index(protocolNumbers[:], protocol)
	l.key.Protocol = snapshot.Protocol(max(p, 0))
	l.ours = flags.Native32()&ownMask == ownFlag
	l.Flags = flags.Native32() & (flagMask &^ ownMask)
	return l, ok && p >= 0 && l.key.Addr.IsValid()
}

// nested gives what the first attribute of a type holds, after the header of generic netlink.
func nested(body []byte, typ uint16) []byte {
	return netlink.Find(body[min(netlink.GenericLen, len(body)):], typ)
}

// services lists all virtual services that could be a Service's.
func (v *ipvs) services() (list []listed, err error) {
	err = v.Dump(v.request(cmdGetService, unix.NLM_F_DUMP, nil), func() { list = nil }, func(body []byte) {
		if l, ok := parseService(body); ok {
			list = append(list, l)
		}
	})
	if err != nil {
		return nil, fmt.Errorf("ipvs: list services: %w", err)
	}
	return list, nil
}

// service asks for one virtual service.
func (v *ipvs) service(k dataplane.Key) (l listed, there bool, err error) {
	body, err := v.Get(v.request(cmdGetService, 0, func() { v.key(k) }))
	if errors.Is(err, unix.ESRCH) {
		return l, false, nil
	}
	if err != nil {
		return l, false, fmt.Errorf("ipvs: get service %s: %w", k, err)
	}
	l, there = parseService(body)
	return l, there, nil
}

// used is a destination in a list.
type used struct {
	Destination
	// active and inactive are the connections it has; those that were closed are inactive for some minutes.
	active, inactive uint32
	odd              bool // it forwards by another way than ours do
	stats            Statistics
}

func parseDest(body []byte, family uint16) (u used, ok bool) {
	var addr netlink.Value
	var port uint16
	for typ, val := range netlink.Each(nested(body, attrDest)) {
		switch typ {
		case destAddr:
			addr = val
		case destPort:
			port = val.Big16()
		case destForward:
			u.odd = val.Native32()&0x7 != 0
		case destWeight:
			u.Weight = val.Native32()
		case destUpper:
			u.Until = val.Native32()
		case destActive:
			u.active = val.Native32()
		case destInactive:
			u.inactive = val.Native32()
		case destFamily:
			family = val.Native16()
		case destStats64:
			u.stats = parseStatistics(val)
		}
	}
	u.AddrPort = netip.AddrPortFrom(addrOf(family, addr), port)
	return u, u.IsValid()
}

// dests lists the destinations of a virtual service. That it is gone gives none.
func (v *ipvs) dests(k dataplane.Key) (list []used, err error) {
	request := v.request(cmdGetDest, unix.NLM_F_DUMP, func() { v.key(k) })
	err = v.Dump(request, func() { list = nil }, func(body []byte) {
		if u, ok := parseDest(body, number(k.Addr)); ok {
			list = append(list, u)
		}
	})
	if err != nil && !errors.Is(err, unix.ESRCH) {
		return nil, fmt.Errorf("ipvs: list destinations of %s: %w", k, err)
	}
	return list, nil
}

// contents reads everything of ours. before is what was ours when this process looked last.
//
// Whoever edits a virtual service of ours by other means takes our mark from it. It is still ours if it has just the
// destinations that it had; its Config is empty then, so that it gets the mark again.
func (v *ipvs) contents(before contents) (contents, error) {
	c := newContents()
	list, err := v.services()
	if err != nil {
		return c, err
	}
	for _, l := range list {
		was := before.services[l.key]
		if !l.ours && was == nil {
			continue
		}
		f, err := v.fill(l)
		if err != nil {
			return c, err
		}
		switch {
		case l.ours:
			c.put(l.key, f)
		case sameEndpoints(f, was):
			f.Config = Config{}
			c.put(l.key, f)
		}
	}
	return c, nil
}

// sameEndpoints says whether two virtual services have the same destinations, whatever their weights.
func sameEndpoints(a, b *found) bool {
	for d := range a.dests {
		if _, there := b.dests[d]; !there {
			return false
		}
	}
	return len(a.dests) == len(b.dests)
}

// fill reads the destinations of a virtual service.
func (v *ipvs) fill(l listed) (*found, error) {
	f := &found{Config: l.Config, dests: map[netip.AddrPort]Destination{}}
	dests, err := v.dests(l.key)
	for _, d := range dests {
		f.dests[d.AddrPort] = d.Destination
	}
	return f, err
}

// try asks whether the kernel has a scheduler, which it loads for that. It is asked for a virtual service with a
// netmask that is not possible: so nothing is made, and whether the scheduler is there is looked at first.
func (v *ipvs) try(scheduler string) (bool, error) {
	v.request(cmdNewService, 0, func() {
		n := v.out.Nest(attrService)
		v.name(dataplane.Key{Addr: netip.IPv6Loopback(), Protocol: snapshot.TCP, Port: 1})
		v.out.Text(svcSched, scheduler)
		v.out.Attr(svcFlags, make([]byte, 8)...)
		v.out.Native32(svcTimeout, 0)
		v.out.Native32(svcNetmask, 0)
		v.out.Close(n)
	})
	r, err := v.commit()
	if err != nil {
		return false, err
	}
	switch r[0] {
	case unix.ENOENT:
		return false, nil
	case unix.EINVAL, unix.EAFNOSUPPORT: // a kernel without IPv6 does not get as far as to the scheduler
		return true, nil
	}
	return false, fmt.Errorf("ipvs: probe the scheduler %s: %w", scheduler, r[0])
}

// timeouts reads and sets how long connections without packets are remembered.
func (v *ipvs) timeouts() (t Timeouts, err error) {
	body, err := v.Get(v.request(cmdGetConfig, 0, nil))
	if err != nil {
		return t, fmt.Errorf("ipvs: get timeouts: %w", err)
	}
	for typ, val := range netlink.Each(body[min(netlink.GenericLen, len(body)):]) {
		d := time.Duration(val.Native32()) * time.Second
		switch typ {
		case attrTimeoutTCP:
			t.TCP = d
		case attrTimeoutTCPFin:
			t.TCPFin = d
		case attrTimeoutUDP:
			t.UDP = d
		}
	}
	return t, nil
}

func (v *ipvs) setTimeouts(t Timeouts) error {
	v.request(cmdSetConfig, 0, func() {
		v.out.Native32(attrTimeoutTCP, uint32(t.TCP/time.Second))
		v.out.Native32(attrTimeoutTCPFin, uint32(t.TCPFin/time.Second))
		v.out.Native32(attrTimeoutUDP, uint32(t.UDP/time.Second))
	})
	r, err := v.commit()
	if err == nil && r[0] != 0 {
		err = fmt.Errorf("ipvs: set timeouts: %w", r[0])
	}
	return err
}
