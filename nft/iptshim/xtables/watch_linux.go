package xtables

import (
	"errors"
	"fmt"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/verdict-proxy/verdict/internal/system/ipfamily"
	"github.com/verdict-proxy/verdict/internal/system/netlink"
)

// watch tells cheaply, without reading a table, whether somebody may have changed the rules since it was asked before.
// For the nft variant that is the number of nf_tables' last transaction; for the legacy one what the kernel says of
// each table's size: there, a rule replaced by one as long goes unnoticed.
type watch struct {
	// nft is a connection to nf_tables; nil if this is the legacy variant, which has a socket of each family instead.
	nft *netlink.Conn
	fds ipfamily.Per[int]
}

// fingerprint is what a watch saw; it compares.
type fingerprint struct {
	generation uint32
	tables     ipfamily.Per[[len(watched)][infoLen]byte]
}

// watched are the tables in which we have chains.
var watched = [...]string{"filter", "nat", "mangle"}

// openWatch opens a watch in the network namespace of the calling thread.
func openWatch(v Variant) (w *watch, err error) {
	w = &watch{fds: [...]int{-1, -1}}
	if v == NFT {
		w.nft, err = netlink.Dial(unix.NETLINK_NETFILTER, 0)
	} else {
		for i, domain := range [...]int{unix.AF_INET, unix.AF_INET6} {
			w.fds[i], err = unix.Socket(domain, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
			if errors.Is(err, unix.EAFNOSUPPORT) && i > 0 {
				err = nil // without IPv6 there is nothing to be seen
			}
		}
	}
	if err != nil {
		return nil, errors.Join(fmt.Errorf("watch the rules of iptables: %w", err), w.close())
	}
	return w, nil
}

func (w *watch) close() error {
	if w.nft != nil {
		return w.nft.Close()
	}
	var errs []error
	for _, fd := range w.fds {
		if fd >= 0 {
			errs = append(errs, unix.Close(fd))
		}
	}
	return errors.Join(errs...)
}

// fingerprint gives what there is now of the families that are served.
func (w *watch) fingerprint(served ipfamily.Per[bool]) (f fingerprint, err error) {
	if w.nft != nil {
		f.generation, err = w.nft.Generation()
		return f, err
	}
	for i, level := range [...]int{unix.SOL_IP, unix.SOL_IPV6} {
		for t, name := range watched {
			if !served[i] || w.fds[i] < 0 {
				continue
			}
			info := &f.tables[i][t]
			copy(info[:], name)
			if err := getsockopt(w.fds[i], level, getInfo, info[:]); err != nil {
				return f, fmt.Errorf("%s iptables: check table %s: %w", ipfamily.All[i], name, err)
			}
		}
	}
	return f, nil
}

const (
	// getInfo is IPT_SO_GET_INFO and IP6T_SO_GET_INFO; infoLen is the length of struct ipt_getinfo: a table's name, its
	// hooks, their offsets, and the number of its entries and their bytes.
	getInfo = 64
	infoLen = 84
)

func getsockopt(fd, level, option int, b []byte) error {
	n := uint32(len(b))
	_, _, errno := unix.Syscall6(unix.SYS_GETSOCKOPT, uintptr(fd), uintptr(level), uintptr(option),
		uintptr(unsafe.Pointer(&b[0])), uintptr(unsafe.Pointer(&n)), 0)
	if errno != 0 {
		return errno
	}
	return nil
}
