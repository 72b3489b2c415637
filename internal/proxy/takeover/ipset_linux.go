package takeover

import (
	"errors"
	"fmt"
	"net/netip"
	"os"
	"time"

	"golang.org/x/sys/unix"

	"github.com/verdict-proxy/verdict/internal/system/ipfamily"
	"github.com/verdict-proxy/verdict/internal/system/netlink"
)

// Commands and attributes of ipset: include/uapi/linux/netfilter/ipset/ip_set.h.
const (
	ipsetDestroy = 3
	ipsetList    = 7

	ipsetAttrProtocol = 1
	ipsetAttrSetName  = 2
	ipsetAttrTypeName = 3
	ipsetAttrFamily   = 5
	ipsetAttrFlags    = 6
	ipsetAttrData     = 7
	ipsetAttrADT      = 8

	// Within ipsetAttrData.
	ipsetAttrIP    = 1
	ipsetAttrPort  = 4
	ipsetAttrProto = 7

	// Within ipsetAttrData of a list.
	ipsetAttrReferences = 25

	// Within ipsetAttrIP.
	ipsetAttrIPv4 = 1
	ipsetAttrIPv6 = 2

	// ipsetHeaderOnly leaves the members out of a list.
	ipsetHeaderOnly = 4
	// ipsetProtocol is the version of all of this; every kernel that we run on speaks it.
	ipsetProtocol = 6
	// ipsetBusy is the error of a set that a rule looks into.
	ipsetBusy = unix.Errno(4100)
)

// ipsetMessage opens a message with a command.
func ipsetMessage(command uint16) opening {
	return netfilter(unix.NFNL_SUBSYS_IPSET<<8|command, unix.NFPROTO_IPV4)
}

// set is one of kube-proxy's ipsets.
type set struct {
	name string
	// base is its name for IPv4.
	base   string
	family ipfamily.Family
	// rules is how many rules use it.
	rules int
}

// ipsets is a connection to ipset.
type ipsets struct{ conn }

// openIPSets gives false if this kernel has no ipset: to ask for it would load it.
func openIPSets() (s ipsets, ok bool, err error) {
	if _, err := os.Stat("/sys/module"); err == nil {
		if _, err := os.Stat("/sys/module/ip_set"); err != nil {
			return s, false, nil
		}
	}
	s.conn, err = dial(unix.NETLINK_NETFILTER)
	return s, err == nil, err
}

// proxySets returns kube-proxy's sets.
func (s ipsets) proxySets() ([]set, error) {
	objects, err := s.list(ipsetMessage(ipsetList), func(w *netlink.Buffer) {
		w.Attr(ipsetAttrProtocol, ipsetProtocol)
		w.Big32(ipsetAttrFlags|unix.NLA_F_NET_BYTEORDER, ipsetHeaderOnly)
	})
	if errors.Is(err, unix.EINVAL) || errors.Is(err, unix.EOPNOTSUPP) { // there is no ipset after all
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("ipset: list: %w", err)
	}
	var found []set
	for _, o := range objects {
		a := netlink.Decode(o[netlink.NetfilterLen:])
		name := a[ipsetAttrSetName].Text()
		base, ok := proxySet(name, a[ipsetAttrTypeName].Text())
		if !ok {
			continue
		}
		f := ipfamily.IPv4
		if name != base {
			f = ipfamily.IPv6
		}
		rules := a.Nested(ipsetAttrData)[ipsetAttrReferences].Big32()
		found = append(found, set{name, base, f, int(rules)})
	}
	return found, nil
}

// member is an element of a set, as far as it identifies virtual services.
type member struct {
	addr     netip.Addr // not valid in a set of ports
	port     uint16
	protocol uint16 // 0 in a set of ports
}

// members returns the elements of a set.
func (s ipsets) members(name string) ([]member, error) {
	objects, err := s.list(ipsetMessage(ipsetList), func(w *netlink.Buffer) {
		w.Attr(ipsetAttrProtocol, ipsetProtocol)
		w.Text(ipsetAttrSetName, name)
	})
	if err != nil {
		return nil, fmt.Errorf("ipset: list %s: %w", name, err)
	}
	var list []member
	for _, o := range objects {
		a := netlink.Decode(o[netlink.NetfilterLen:])
		for _, data := range netlink.Each(a[ipsetAttrADT]) {
			d := netlink.Decode(data)
			m := member{port: d[ipsetAttrPort].Big16(), protocol: uint16(d[ipsetAttrProto].Uint8())}
			ip := d.Nested(ipsetAttrIP)
			if v, ok := netip.AddrFromSlice(ip[ipsetAttrIPv4]); ok {
				m.addr = v
			} else if v, ok := netip.AddrFromSlice(ip[ipsetAttrIPv6]); ok {
				m.addr = v
			}
			list = append(list, m)
		}
	}
	return list, nil
}

// busyTimeout is how long to retry a set that is in use: nf_tables releases it some time after the rule is gone.
const busyTimeout = 2 * time.Second

// destroy removes sets. Sets that others use are no error.
func (s ipsets) destroy(sets []set) error {
	var errs []error
	deadline := time.Now().Add(busyTimeout)
	for _, set := range sets {
		for {
			err := s.do(ipsetMessage(ipsetDestroy), func(w *netlink.Buffer) {
				w.Attr(ipsetAttrProtocol, ipsetProtocol)
				w.Text(ipsetAttrSetName, set.name)
			})
			busy := errors.Is(err, ipsetBusy) || errors.Is(err, unix.EBUSY)
			if busy && time.Now().Before(deadline) {
				time.Sleep(20 * time.Millisecond)
				continue
			}
			if err != nil && !busy && !errors.Is(err, unix.ENOENT) {
				errs = append(errs, fmt.Errorf("ipset: destroy %s: %w", set.name, err))
			}
			break
		}
	}
	return errors.Join(errs...)
}
