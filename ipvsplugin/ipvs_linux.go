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

	genlLen = 4 // the header of a message of generic netlink
)

var protocolNumbers = [...]uint16{snapshot.TCP: unix.IPPROTO_TCP, snapshot.UDP: unix.IPPROTO_UDP, snapshot.SCTP: unix.IPPROTO_SCTP}

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
	return fmt.Sprintf("IPVS cannot schedule: the kernel lacks %s, and does not load it by itself (modprobe -a %s may)", names, names)
}

// find looks the family of generic netlink up, for which Linux 6.1 loads the module ip_vs; 5.10 does not. Nothing succeeds
// without it.
func (v *ipvs) find() error {
	if v.family != 0 {
		return nil
	}
	body, err := v.get(unix.GENL_ID_CTRL, []byte{unix.CTRL_CMD_GETFAMILY, 1, 0, 0}, func() {
		v.out.text(unix.CTRL_ATTR_FAMILY_NAME, "IPVS")
	})
	switch {
	case errors.Is(err, unix.ENOENT):
		return &Missing{Modules: []string{"ip_vs"}}
	case err != nil:
		return fmt.Errorf("ipvs: look for its family of generic netlink: %w", err)
	case len(body) < genlLen:
		return errors.New("ipvs: the kernel does not say what its family of generic netlink is")
	}
	for typ, val := range attributes(body[genlLen:]) {
		if typ == unix.CTRL_ATTR_FAMILY_ID {
			v.family = val.native16()
		}
	}
	if v.family == 0 {
		return &Missing{Modules: []string{"ip_vs"}}
	}
	return nil
}

func command(c byte) []byte { return []byte{c, 1, 0, 0} }

// key writes what names a virtual service.
func (v *ipvs) key(k dataplane.Key) {
	v.out.native16(svcFamily, familyOf(k.Addr))
	v.out.native16(svcProtocol, protocolNumbers[k.Protocol])
	v.out.attr(svcAddr, k.Addr.AsSlice()...)
	v.out.big16(svcPort, k.Port)
}

// config writes the rest of it. A client is told apart by its whole address.
func (v *ipvs) config(k dataplane.Key, c Config) {
	v.out.text(svcSched, c.Scheduler)
	flags := make([]byte, 0, 8)
	for _, n := range []uint32{c.Flags | ownFlag, flagMask} {
		flags = binary.NativeEndian.AppendUint32(flags, n)
	}
	v.out.attr(svcFlags, flags...)
	v.out.native32(svcTimeout, c.Timeout)
	if k.Addr.Is4() {
		v.out.native32(svcNetmask, ^uint32(0))
	} else {
		v.out.native32(svcNetmask, 128)
	}
}

// write writes the message of an op.
func (v *ipvs) write(o op) {
	cmd := [...]byte{cmdNewService, cmdSetService, cmdDelService, cmdNewDest, cmdSetDest, cmdDelDest}[o.verb]
	v.out.message(v.family, 0, command(cmd), func() {
		v.out.nest(attrService, func() {
			v.key(o.key)
			if o.verb == newService || o.verb == setService {
				v.config(o.key, o.config)
			}
		})
		if o.verb >= newDest {
			v.out.nest(attrDest, func() { v.dest(o.dest) })
		}
	})
}

// dest writes a destination. All forward by translating addresses, which is 0.
func (v *ipvs) dest(d Destination) {
	v.out.attr(destAddr, d.Addr().AsSlice()...)
	v.out.big16(destPort, d.Port())
	v.out.native32(destForward, 0)
	v.out.native32(destWeight, d.Weight)
	v.out.native32(destUpper, d.Until)
	v.out.native32(destLower, 0)
	v.out.native16(destFamily, familyOf(d.Addr()))
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
		v.out.begin()
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
				c.took(o)
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
	var addr, flags value
	ok = true
	for typ, val := range attributes(nested(body, attrService)) {
		switch typ {
		case svcFamily:
			family = val.native16()
		case svcProtocol:
			protocol = val.native16()
		case svcAddr:
			addr = val
		case svcPort:
			l.key.Port = val.big16()
		case svcFwmark:
			ok = false
		case svcSched:
			l.Scheduler = val.text()
		case svcFlags:
			flags = val
		case svcTimeout:
			l.Timeout = val.native32()
		case svcStats64:
			l.stats = parseStatistics(val)
		}
	}
	l.key.Addr = addr.addr(family)
	p := slices.Index(protocolNumbers[:], protocol)
	l.key.Protocol = snapshot.Protocol(max(p, 0))
	l.ours = flags.native32()&ownMask == ownFlag
	l.Flags = flags.native32() & (flagMask &^ ownMask)
	return l, ok && p >= 0 && l.key.Addr.IsValid()
}

// nested gives what the first attribute of a type holds, after the header of generic netlink.
func nested(body []byte, typ uint16) []byte {
	if len(body) < genlLen {
		return nil
	}
	for t, v := range attributes(body[genlLen:]) {
		if t == typ {
			return v
		}
	}
	return nil
}

// services lists all virtual services that could be a Service's.
func (v *ipvs) services() (list []listed, err error) {
	err = v.dump(v.family, command(cmdGetService), nil, func() { list = nil }, func(body []byte) {
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
	body, err := v.get(v.family, command(cmdGetService), func() {
		v.out.nest(attrService, func() { v.key(k) })
	})
	if errors.Is(err, unix.ESRCH) {
		return l, false, nil
	}
	if err != nil {
		return l, false, fmt.Errorf("ipvs: look for service %s: %w", k, err)
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
	var addr value
	var port uint16
	for typ, val := range attributes(nested(body, attrDest)) {
		switch typ {
		case destAddr:
			addr = val
		case destPort:
			port = val.big16()
		case destForward:
			u.odd = val.native32()&0x7 != 0
		case destWeight:
			u.Weight = val.native32()
		case destUpper:
			u.Until = val.native32()
		case destActive:
			u.active = val.native32()
		case destInactive:
			u.inactive = val.native32()
		case destFamily:
			family = val.native16()
		case destStats64:
			u.stats = parseStatistics(val)
		}
	}
	u.AddrPort = netip.AddrPortFrom(addr.addr(family), port)
	return u, u.IsValid()
}

// dests lists the destinations of a virtual service. That it is gone gives none.
func (v *ipvs) dests(k dataplane.Key) (list []used, err error) {
	family := familyOf(k.Addr)
	err = v.dump(v.family, command(cmdGetDest), func() {
		v.out.nest(attrService, func() { v.key(k) })
	}, func() { list = nil }, func(body []byte) {
		if u, ok := parseDest(body, family); ok {
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
// Whoever edits a virtual service of ours by other means takes our mark from it. It is still ours if it has just the destinations
// that it had; its Config is empty then, so that it gets the mark again.
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

// try asks whether the kernel has a scheduler, which it loads for that. It is asked for a virtual service with a netmask that is
// not possible: so nothing is made, and whether the scheduler is there is looked at first.
func (v *ipvs) try(scheduler string) (bool, error) {
	v.out.begin()
	v.out.message(v.family, 0, command(cmdNewService), func() {
		v.out.nest(attrService, func() {
			k := dataplane.Key{Addr: netip.IPv6Loopback(), Protocol: snapshot.TCP, Port: 1}
			v.key(k)
			v.out.text(svcSched, scheduler)
			v.out.attr(svcFlags, make([]byte, 8)...)
			v.out.native32(svcTimeout, 0)
			v.out.native32(svcNetmask, 0)
		})
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
	return false, fmt.Errorf("ipvs: asked for the scheduler %s, the kernel says: %w", scheduler, r[0])
}

// timeouts reads and sets how long connections without packets are remembered.
func (v *ipvs) timeouts() (t Timeouts, err error) {
	body, err := v.get(v.family, command(cmdGetConfig), nil)
	if err != nil {
		return t, fmt.Errorf("ipvs: ask for timeouts: %w", err)
	}
	for typ, val := range attributes(body[min(genlLen, len(body)):]) {
		d := time.Duration(val.native32()) * time.Second
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
	v.out.begin()
	v.out.message(v.family, 0, command(cmdSetConfig), func() {
		v.out.native32(attrTimeoutTCP, uint32(t.TCP/time.Second))
		v.out.native32(attrTimeoutTCPFin, uint32(t.TCPFin/time.Second))
		v.out.native32(attrTimeoutUDP, uint32(t.UDP/time.Second))
	})
	r, err := v.commit()
	if err == nil && r[0] != 0 {
		err = fmt.Errorf("ipvs: set timeouts: %w", r[0])
	}
	return err
}
