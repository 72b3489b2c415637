package xtables

import (
	"errors"
	"fmt"

	"golang.org/x/sys/unix"

	"github.com/verdict-proxy/verdict/internal/system/ipfamily"
	"github.com/verdict-proxy/verdict/internal/system/iptlegacy"
	"github.com/verdict-proxy/verdict/internal/system/netlink"
)

// watch tells cheaply, without reading a table, whether somebody may have changed the rules since it was asked before.
// For the nft variant that is the number of nf_tables' last transaction; for the legacy one what the kernel says of
// each table's size: there, a rule replaced by one as long goes unnoticed.
type watch struct {
	// nft is a connection to nf_tables; nil if this is the legacy variant, which has a socket of each family instead.
	nft         *netlink.Conn
	fds, levels ipfamily.Per[int]
}

// fingerprint is what a watch saw; it compares.
type fingerprint struct {
	generation uint32
	tables     ipfamily.Per[[len(watched)][iptlegacy.InfoLen]byte]
}

// watched are the tables in which we have chains.
var watched = [...]string{"filter", "nat", "mangle"}

// openWatch opens a watch in the network namespace of the calling thread.
func openWatch(v Variant) (w *watch, err error) {
	w = &watch{fds: [...]int{-1, -1}}
	if v == NFT {
		w.nft, err = netlink.Dial(unix.NETLINK_NETFILTER, 0)
	} else {
		for i, f := range ipfamily.All {
			w.fds[i], w.levels[i], err = iptlegacy.Socket(f)
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
	for i, family := range ipfamily.All {
		for t, name := range watched {
			if !served[i] || w.fds[i] < 0 {
				continue
			}
			if f.tables[i][t], err = iptlegacy.Info(w.fds[i], w.levels[i], name); err != nil {
				return f, fmt.Errorf("%s iptables: check table %s: %w", family, name, err)
			}
		}
	}
	return f, nil
}
