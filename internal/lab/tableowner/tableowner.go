// Package tableowner watches who owns the tables, for tests of takeovers.
// On Linux 6.9 and later, nobody else may change tables that a socket owns.
package tableowner

import (
	"errors"
	"fmt"
	"os"
	"time"

	"golang.org/x/sys/unix"

	"github.com/verdict-proxy/verdict/internal/system/netlink"
)

const (
	tableName      = "verdict"
	nftaTableOwner = 7
)

// Watch looks every few milliseconds whether Verdict's tables in a network namespace have an owner, until stop is
// closed. It returns the longest time without; a table that is not there does not count.
func Watch(netns *os.File, stop <-chan struct{}) (longest time.Duration, err error) {
	conn, err := netlink.Dial(unix.NETLINK_NETFILTER, int(netns.Fd()))
	if err != nil {
		return 0, err
	}
	defer conn.Close()
	var since time.Time // without an owner; zero if there is one
	for {
		owned, err := tablesOwned(conn)
		if err != nil {
			return longest, err
		}
		switch {
		case owned:
			since = time.Time{}
		case since.IsZero():
			since = time.Now()
		default:
			longest = max(longest, time.Since(since))
		}
		select {
		case <-stop:
			return longest, nil
		case <-time.After(5 * time.Millisecond):
		}
	}
}

// tablesOwned reports whether each of the tables has an owner or is not there.
func tablesOwned(conn *netlink.Conn) (bool, error) {
	for _, family := range []uint8{unix.NFPROTO_IPV4, unix.NFPROTO_IPV6} {
		var w netlink.Buffer
		m := w.Netfilter(netlink.NFTables(unix.NFT_MSG_GETTABLE), 0, family)
		w.Text(unix.NFTA_TABLE_NAME, tableName)
		w.End(m)
		owner := uint32(0)
		err := conn.Query(w.Bytes(), func(body []byte) {
			owner = netlink.Decode(body[min(netlink.NetfilterLen, len(body)):])[nftaTableOwner].Big32()
		})
		switch {
		case errors.Is(err, unix.ENOENT):
		case err != nil:
			return false, fmt.Errorf("look for the owner: %w", err)
		case owner == 0:
			return false, nil
		}
	}
	return true, nil
}
