// Package ipvshandle opens the Handle of github.com/moby/ipvs, and catches what that does wrong: each exported function
// says what.
package ipvshandle

import (
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"sync"
	"time"

	"github.com/moby/ipvs"
	"github.com/sirupsen/logrus"
	"golang.org/x/sys/unix"

	"github.com/verdict-proxy/verdict/internal/system/ipfamily"
	"github.com/verdict-proxy/verdict/internal/system/netlink"
)

// ErrMissing says that the kernel has no IPVS, and could not load it.
var ErrMissing = errors.New("ipvs: this kernel has no IPVS")

var errReloaded = errors.New("ipvs: the kernel has loaded IPVS again since Verdict began to use it: restart Verdict")

// patience is how long one call may take.
const patience = 30 * time.Second

// Handle speaks with IPVS in the network namespace of the thread that opened it. It is for one goroutine at a time.
type Handle struct {
	moby     *ipvs.Handle
	family   uint16
	closed   bool
	patience time.Duration
}

// known is the family of generic netlink that moby/ipvs uses as long as this process lives.
var known struct {
	sync.Mutex
	family uint16
}

// Loaded says whether the kernel has loaded IPVS. To open a Handle would load it.
func Loaded() bool {
	_, err := os.Stat("/proc/thread-self/net/ip_vs")
	return err == nil
}

// Open opens a Handle in the network namespace of the calling thread. Linux 6.1 loads IPVS for that; 5.10 does not.
//
// moby/ipvs looks its family up once in a process, and drops the error. Without the family the kernel acknowledges
// every request and does nothing. So Open looks it up first, gives ErrMissing if there is none, and asks for something
// that only IPVS answers. If IPVS was unloaded and loaded again, it has another family, which moby/ipvs does not
// notice: Open fails then, until the process starts anew. moby/ipvs also runs modprobe, and logs in a format of its own
// if there is none: that log is discarded, since what fails here is returned.
func Open() (*Handle, error) {
	family, err := lookUp()
	if err != nil {
		return nil, err
	}
	known.Lock()
	defer known.Unlock()
	if known.family != 0 && known.family != family {
		return nil, errReloaded
	}
	logrus.SetOutput(io.Discard)
	moby, err := ipvs.New("") // a path would take CAP_SYS_ADMIN
	if err != nil {
		return nil, fmt.Errorf("ipvs: open: %w", err)
	}
	h := &Handle{moby: moby, family: family, patience: patience}
	if err := h.Do(func(m *ipvs.Handle) error { _, err := m.GetConfig(); return err }); err != nil {
		h.Close()
		return nil, fmt.Errorf("ipvs: open: %w", err)
	}
	known.family = family
	return h, nil
}

// lookUp returns the family of generic netlink.
func lookUp() (uint16, error) {
	c, err := netlink.Dial(unix.NETLINK_GENERIC, 0)
	if err != nil {
		return 0, fmt.Errorf("ipvs: %w", err)
	}
	defer c.Close()
	family, err := c.Family("IPVS")
	if errors.Is(err, unix.ENOENT) {
		return 0, ErrMissing
	}
	if err != nil {
		return 0, fmt.Errorf("ipvs: %w", err)
	}
	return family, nil
}

// Family returns the family of generic netlink.
func (h *Handle) Family() uint16 { return h.family }

// Closed says that the Handle is of no use any more: nil, closed, or given up by Do.
func (h *Handle) Closed() bool { return h == nil || h.closed }

// Close closes it. It may be nil or closed already.
func (h *Handle) Close() {
	if !h.Closed() {
		h.closed = true
		h.moby.Close()
	}
}

// Do calls f, which may do one thing after the other. moby/ipvs waits forever for an answer that does not come, and
// panics on one that is too short: both are errors here, and close the Handle.
func (h *Handle) Do(f func(*ipvs.Handle) error) (err error) {
	if h.Closed() {
		return errors.New("the connection to IPVS is closed")
	}
	late := time.AfterFunc(h.patience, h.moby.Close)
	defer func() {
		if !late.Stop() {
			h.closed = true
			err = fmt.Errorf("IPVS does not answer within %v: %w", h.patience, os.ErrDeadlineExceeded)
		}
		if r := recover(); r != nil {
			h.Close()
			err = fmt.Errorf("malformed answer of IPVS: %v", r)
		}
	}()
	return f(h.moby)
}

// Services lists all virtual services, also those of firewall marks, which have no address.
func (h *Handle) Services() (list []*ipvs.Service, err error) {
	if err = h.Do(func(m *ipvs.Handle) (err error) { list, err = m.GetServices(); return err }); err != nil {
		return nil, fmt.Errorf("ipvs: list services: %w", err)
	}
	return list, nil
}

// Service asks for the virtual service at the address, port and protocol of another; nil if there is none.
func (h *Handle) Service(at *ipvs.Service) (s *ipvs.Service, err error) {
	err = h.Do(func(m *ipvs.Handle) (err error) { s, err = m.GetService(at); return err })
	if errors.Is(err, unix.ESRCH) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("ipvs: get service %s: %w", Name(at), err)
	}
	return s, nil
}

// Destinations lists those of a virtual service; none if it is gone. Of a weight moby/ipvs reads 16 bits only.
func (h *Handle) Destinations(of *ipvs.Service) (list []*ipvs.Destination, err error) {
	err = h.Do(func(m *ipvs.Handle) (err error) { list, err = m.GetDestinations(of); return err })
	if err != nil && !errors.Is(err, unix.ESRCH) {
		return nil, fmt.Errorf("ipvs: list destinations of %s: %w", Name(of), err)
	}
	return list, nil
}

// NewService returns what names a virtual service; the protocol is an IPPROTO. moby/ipvs sends an IPv4 address in IPv6
// notation as an IPv4 one; objects with such an address do not get as far as here.
func NewService(at netip.AddrPort, protocol uint16) *ipvs.Service {
	s := &ipvs.Service{Address: at.Addr().AsSlice(), Port: at.Port(), Protocol: protocol,
		AddressFamily: uint16(ipfamily.Of(at.Addr()).NFProto()), Netmask: ^uint32(0)}
	if at.Addr().Is6() { // a client is told apart by its whole address
		s.Netmask = 128
	}
	return s
}

// AddrPort returns an address and a port as moby/ipvs gives them; invalid for a virtual service of a firewall mark.
func AddrPort(ip net.IP, port uint16) netip.AddrPort {
	addr, _ := netip.AddrFromSlice(ip)
	return netip.AddrPortFrom(addr, port)
}

// Name names a virtual service as errors do.
func Name(s *ipvs.Service) string {
	if s.FWMark != 0 {
		return fmt.Sprintf("firewall mark %d", s.FWMark)
	}
	protocol := map[uint16]string{unix.IPPROTO_TCP: "tcp", unix.IPPROTO_UDP: "udp", unix.IPPROTO_SCTP: "sctp"}[s.Protocol]
	return fmt.Sprintf("%s %s", AddrPort(s.Address, s.Port), protocol)
}
