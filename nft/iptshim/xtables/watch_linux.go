package xtables

import (
	"encoding/binary"
	"errors"
	"fmt"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/verdict-proxy/verdict/internal/ipfamily"
)

// watch tells cheaply, without reading a table, whether somebody may have changed the rules since it was asked before.
// For the nft variant that is the number of nf_tables' last transaction; for the legacy one what the kernel says of
// each table's size: there, a rule replaced by one as long goes unnoticed.
type watch struct {
	variant Variant
	// fds are a socket of nfnetlink, or one of each family.
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
	w = &watch{variant: v, fds: [...]int{-1, -1}}
	if v == NFT {
		w.fds[0], err = unix.Socket(unix.AF_NETLINK, unix.SOCK_RAW|unix.SOCK_CLOEXEC, unix.NETLINK_NETFILTER)
		if err == nil {
			err = unix.SetsockoptTimeval(w.fds[0], unix.SOL_SOCKET, unix.SO_RCVTIMEO, &unix.Timeval{Sec: 1})
		}
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
	var errs []error
	for _, fd := range w.fds {
		if fd >= 0 {
			errs = append(errs, unix.Close(fd))
		}
	}
	return errors.Join(errs...)
}

// look gives what there is now of the families that are served.
func (w *watch) look(served ipfamily.Per[bool]) (f fingerprint, err error) {
	if w.variant == NFT {
		f.generation, err = w.generation()
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
				return f, fmt.Errorf("%s iptables: look at table %s: %w", ipfamily.All[i], name, err)
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

// generation asks for the number of nf_tables' last transaction.
func (w *watch) generation() (uint32, error) {
	const header = unix.SizeofNlMsghdr + 4 // of netlink and of netfilter
	request := make([]byte, header)
	binary.NativeEndian.PutUint32(request, header)
	binary.NativeEndian.PutUint16(request[4:], unix.NFNL_SUBSYS_NFTABLES<<8|unix.NFT_MSG_GETGEN)
	binary.NativeEndian.PutUint16(request[6:], unix.NLM_F_REQUEST)
	if err := unix.Sendto(w.fds[0], request, 0, &unix.SockaddrNetlink{Family: unix.AF_NETLINK}); err != nil {
		return 0, fmt.Errorf("ask for nf_tables' generation: %w", err)
	}
	answer := make([]byte, 4096)
	n, _, err := unix.Recvfrom(w.fds[0], answer, 0)
	if err != nil {
		return 0, fmt.Errorf("ask for nf_tables' generation: %w", err)
	}
	for b := answer[min(header, n):n]; len(b) >= 8; {
		length := int(binary.NativeEndian.Uint16(b))
		if binary.NativeEndian.Uint16(b[2:]) == unix.NFTA_GEN_ID && length >= 8 {
			return binary.BigEndian.Uint32(b[4:]), nil
		}
		next := (length + 3) &^ 3
		if next <= 0 || next > len(b) {
			break
		}
		b = b[next:]
	}
	return 0, errors.New("nf_tables does not say its generation")
}
