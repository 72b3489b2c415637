package ipvsplugin

import (
	"encoding/binary"
	"slices"

	"github.com/moby/ipvs"
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

	attrService = 1
	attrDest    = 2

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

// message writes a message with a command.
func (v *client) message(cmd byte, flags uint16, attrs func()) {
	m := v.out.Generic(v.family, flags, cmd)
	if attrs != nil {
		attrs()
	}
	v.out.End(m)
}

// name writes what names a virtual service.
func (v *client) name(s *ipvs.Service) {
	v.out.Native16(svcFamily, s.AddressFamily)
	v.out.Native16(svcProtocol, s.Protocol)
	v.out.Attr(svcAddr, s.Address...)
	v.out.Big16(svcPort, s.Port)
}

// config writes the rest of it.
func (v *client) config(s *ipvs.Service) {
	v.out.Text(svcSched, s.SchedName)
	flags := make([]byte, 0, 8)
	for _, n := range []uint32{s.Flags, flagMask} {
		flags = binary.NativeEndian.AppendUint32(flags, n)
	}
	v.out.Attr(svcFlags, flags...)
	v.out.Native32(svcTimeout, s.Timeout)
	v.out.Native32(svcNetmask, s.Netmask)
}

// write writes the message that does what the method of ipvs.Handle does that is called as the verb.
func (v *client) write(verb verb, s *ipvs.Service, d *ipvs.Destination) {
	cmd := [...]byte{cmdNewService, cmdSetService, cmdDelService, cmdNewDest, cmdSetDest, cmdDelDest}[verb]
	v.message(cmd, 0, func() {
		n := v.out.Nest(attrService)
		v.name(s)
		if verb == newService || verb == setService {
			v.config(s)
		}
		v.out.Close(n)
		if d != nil {
			n = v.out.Nest(attrDest)
			v.dest(d)
			v.out.Close(n)
		}
	})
}

// dest writes a destination.
func (v *client) dest(d *ipvs.Destination) {
	v.out.Attr(destAddr, d.Address...)
	v.out.Big16(destPort, d.Port)
	v.out.Native32(destForward, d.ConnectionFlags&ipvs.ConnectionFlagFwdMask)
	v.out.Native32(destWeight, uint32(d.Weight))
	v.out.Native32(destUpper, d.UpperThreshold)
	v.out.Native32(destLower, d.LowerThreshold)
	v.out.Native16(destFamily, d.AddressFamily)
}

// words are what moby/ipvs calls the objects of an op. The Destination is nil if there is none.
func (o op) words() (*ipvs.Service, *ipvs.Destination) {
	s := serviceOf(o.key, o.config)
	if o.verb < newDest {
		return s, nil
	}
	return s, &ipvs.Destination{Address: o.dest.Addr().AsSlice(), Port: o.dest.Port(), Weight: int(o.dest.Weight),
		UpperThreshold: o.dest.Until, AddressFamily: number(o.dest.Addr()), ConnectionFlags: ipvs.ConnectionFlagMasq}
}

// serviceOf is a virtual service of ours.
func serviceOf(k dataplane.Key, c Config) *ipvs.Service {
	s := named(k)
	s.SchedName, s.Flags, s.Timeout = c.Scheduler, c.Flags|ownFlag, c.Timeout
	return s
}

// failure is a write that the kernel refuses.
type failure struct {
	op
	errno unix.Errno
}

// commitOps writes ops in order, and gives those that the kernel refuses. What it took is taken note of in c.
//
// New virtual services go first: where there is one of somebody else's already, its destinations must not become ours.
func (v *client) commitOps(ops []op, c *contents) ([]failure, error) {
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

func (v *client) commitInOrder(ops []op, c *contents) (failed []failure, err error) {
	for part := range slices.Chunk(ops, maxBatch) {
		v.out.Reset()
		for _, o := range part {
			s, d := o.words()
			v.write(o.verb, s, d)
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
