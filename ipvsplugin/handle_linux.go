package ipvsplugin

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"github.com/moby/ipvs"
	"golang.org/x/sys/unix"

	"github.com/verdict-proxy/verdict/internal/system/ipvshandle"
	"github.com/verdict-proxy/verdict/sync/dataplane"
	"github.com/verdict-proxy/verdict/sync/snapshot"
)

// client speaks with IPVS: by the handle whatever is done one at a time, by the socket batches and statistics. It is
// for one goroutine at a time.
type client struct {
	*socket
	handle *ipvshandle.Handle
	family uint16
}

// Missing is the error of a kernel in which IPVS, or one of its schedulers, is neither loaded nor could be.
type Missing struct {
	// Modules are what would have to be loaded.
	Modules []string
}

func (e *Missing) Error() string {
	names := strings.Join(e.Modules, " ")
	return fmt.Sprintf("IPVS cannot schedule: the kernel lacks %s and failed to load it (try modprobe -a %s)", names,
		names)
}

// open opens the handle, anew if there is one: IPVS may have been loaded again since.
func (v *client) open() (err error) {
	v.handle.Close()
	v.family = 0
	if v.handle, err = ipvshandle.Open(); err != nil {
		if errors.Is(err, ipvshandle.ErrMissing) {
			return &Missing{Modules: []string{"ip_vs"}}
		}
		return err
	}
	v.family = v.handle.Family()
	return nil
}

func (v *client) close() error {
	v.handle.Close()
	return v.socket.close()
}

// named returns what names a virtual service.
func named(k dataplane.Key) *ipvs.Service {
	return ipvshandle.NewService(netip.AddrPortFrom(k.Addr, k.Port), protocolNumbers[k.Protocol])
}

// listed is a virtual service that the kernel has.
type listed struct {
	key dataplane.Key
	Config
	ours bool
}

// listedOf is not ok for what is named by a mark, or is of a protocol that is no Service's.
func listedOf(s *ipvs.Service) (l listed, ok bool) {
	p := slices.Index(protocolNumbers[:], s.Protocol)
	at := ipvshandle.AddrPort(s.Address, s.Port)
	l.key = dataplane.Key{Addr: at.Addr(), Protocol: snapshot.Protocol(max(p, 0)), Port: at.Port()}
	l.Config = Config{Scheduler: s.SchedName, Flags: s.Flags & (flagMask &^ ownMask), Timeout: s.Timeout}
	l.ours = s.Flags&ownMask == ownFlag
	return l, s.FWMark == 0 && p >= 0 && at.IsValid()
}

// destinationOf is one that the kernel has.
func destinationOf(d *ipvs.Destination) Destination {
	return Destination{AddrPort: ipvshandle.AddrPort(d.Address, d.Port), Weight: uint32(d.Weight), Until: d.UpperThreshold}
}

// reader lists what the kernel has: a client one virtual service at a time, and by other code than wrote it; bulk
// two to three times as fast.
type reader interface {
	// services lists all virtual services that could be a Service's.
	services() ([]listed, error)
	// destinations lists those of one; none if it is gone.
	destinations(dataplane.Key) ([]Destination, error)
}

func (v *client) services() ([]listed, error) {
	all, err := v.handle.Services()
	var list []listed
	for _, s := range all {
		if l, ok := listedOf(s); ok {
			list = append(list, l)
		}
	}
	return list, err
}

func (v *client) destinations(k dataplane.Key) ([]Destination, error) {
	all, err := v.handle.Destinations(named(k))
	v.hear()
	var list []Destination
	for _, d := range all {
		list = append(list, destinationOf(d))
	}
	return list, err
}

// service asks for one virtual service.
func (v *client) service(k dataplane.Key) (l listed, there bool, err error) {
	s, err := v.handle.Service(named(k))
	v.hear()
	if err != nil || s == nil {
		return l, false, err
	}
	l, there = listedOf(s)
	return l, there, nil
}

// readContents reads everything of ours. before is what was ours when this process looked last.
//
// Whoever edits a virtual service of ours by other means takes our mark from it. It is still ours if it has just the
// destinations that it had; its Config is empty then, so that it gets the mark again.
func readContents(r reader, before contents) (contents, error) {
	c := newContents()
	list, err := r.services()
	if err != nil {
		return c, err
	}
	for _, l := range list {
		was := before.services[l.key]
		if !l.ours && was == nil {
			continue
		}
		f, err := fill(r, l)
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
func fill(r reader, l listed) (*found, error) {
	f := &found{Config: l.Config, dests: map[netip.AddrPort]Destination{}}
	dests, err := r.destinations(l.key)
	for _, d := range dests {
		f.dests[d.AddrPort] = d
	}
	return f, err
}

// try asks whether the kernel has a scheduler, which it loads for that. It is asked for a virtual service with a
// netmask that is not possible: so nothing is made, and whether the scheduler is there is looked at first.
func (v *client) try(scheduler string) (bool, error) {
	s := named(dataplane.Key{Addr: netip.IPv6Loopback(), Protocol: snapshot.TCP, Port: 1})
	s.SchedName, s.Netmask = scheduler, 0
	err := v.handle.Do(func(h *ipvs.Handle) error { return h.NewService(s) })
	switch {
	case errors.Is(err, unix.ENOENT):
		return false, nil
	case errors.Is(err, unix.EINVAL) || errors.Is(err, unix.EAFNOSUPPORT):
		return true, nil // a kernel without IPv6 does not get as far as to the scheduler
	case err == nil:
		err = errors.New("the kernel accepts a netmask of 0")
	}
	return false, fmt.Errorf("ipvs: probe the scheduler %s: %w", scheduler, err)
}

// timeouts reads how long connections without packets are remembered.
func (v *client) timeouts() (t Timeouts, err error) {
	err = v.handle.Do(func(h *ipvs.Handle) error {
		c, err := h.GetConfig()
		if err == nil {
			t = *c
		}
		return err
	})
	if err != nil {
		return t, fmt.Errorf("ipvs: get timeouts: %w", err)
	}
	return t, nil
}

func (v *client) setTimeouts(t Timeouts) error {
	if err := v.handle.Do(func(h *ipvs.Handle) error { return h.SetConfig(&t) }); err != nil {
		return fmt.Errorf("ipvs: set timeouts: %w", err)
	}
	return nil
}
