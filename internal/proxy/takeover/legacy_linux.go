package takeover

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"runtime"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/verdict-proxy/verdict/internal/system/ipfamily"
	"github.com/verdict-proxy/verdict/internal/system/iptlegacy"
)

// The options of legacy iptables at an IPv4 or IPv6 socket: IPT_SO_SET_REPLACE and IPT_SO_SET_ADD_COUNTERS.
const (
	setReplace  = 64
	setCounters = 65
)

const (
	// replaceHeader is what stands before the entries in struct ipt_replace, the pointer to the counters last.
	replaceHeader = 96
	// counterLen is the length of struct xt_counters, countersHeader what stands before them in struct xt_counters_info.
	counterLen     = 16
	countersHeader = 40
)

// legacyTables returns the tables of legacy iptables in this network namespace. Asking the kernel for a table creates
// it, so only existing tables are read.
func legacyTables() (list []*table, err error) {
	for _, f := range ipfamily.All {
		names, err := iptlegacy.Names(f)
		if err != nil {
			return list, err
		}
		for _, name := range names {
			if len(proxyChains[name]) == 0 {
				continue
			}
			b, err := readBlob(f, name)
			if err != nil {
				return list, err
			}
			t, err := b.table(name)
			if err != nil {
				return list, err
			}
			for _, c := range t.chains {
				if isProxyChain(name, c.name) {
					list = append(list, t)
					break
				}
			}
		}
	}
	return list, nil
}

// maxReads bounds how often a table is read again because others changed it meanwhile.
const maxReads = 10

// readBlob reads a table.
func readBlob(f ipfamily.Family, name string) (*blob, error) {
	t, err := iptlegacy.Read(f, name, 0)
	return &blob{t}, err
}

// removeLegacy removes what a plan names, by replacing the whole table as iptables-restore does.
func removeLegacy(f ipfamily.Family, name string, plan func(*table) (*plan, error)) error {
	for range maxReads {
		was, err := readBlob(f, name)
		if err != nil {
			return err
		}
		t, err := was.table(name)
		if err != nil {
			return err
		}
		p, err := plan(t)
		if err != nil || p.empty() {
			return err
		}
		is, left, err := was.without(p)
		if err != nil {
			return fmt.Errorf("%s iptables (%s): table %s: %w", f, legacy, name, err)
		}
		err = is.replace(name, left, int(was.NumEntries))
		if errors.Is(err, unix.EAGAIN) { // another program changed the table
			continue
		}
		if err != nil {
			return fmt.Errorf("%s iptables (%s): replace table %s: %w", f, legacy, name, err)
		}
		return nil
	}
	return fmt.Errorf("%s iptables (%s): table %s keeps changing", f, legacy, name)
}

// replace replaces a table that had so many entries. left are the former numbers of its entries, whose counters are
// carried over. The kernel returns the old counters and starts new ones at 0.
func (b *blob) replace(name string, left []int, before int) error {
	fd, level, err := iptlegacy.Socket(b.Family)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	old := make([]byte, before*counterLen)
	var pin runtime.Pinner
	pin.Pin(&old[0])
	defer pin.Unpin()
	request := make([]byte, replaceHeader, replaceHeader+len(b.Entries))
	copy(request, name)
	w := request[iptlegacy.TableNameLen:]
	put := func(v uint32) { binary.NativeEndian.PutUint32(w, v); w = w[4:] }
	put(b.Valid)
	put(b.NumEntries)
	put(uint32(len(b.Entries)))
	for _, v := range b.Hook {
		put(v)
	}
	for _, v := range b.Underflow {
		put(v)
	}
	put(uint32(before))
	binary.NativeEndian.PutUint64(w, uint64(uintptr(unsafe.Pointer(&old[0]))))
	if err := unix.SetsockoptString(fd, level, setReplace, string(append(request, b.Entries...))); err != nil {
		return err
	}
	counters := make([]byte, countersHeader, countersHeader+len(left)*counterLen)
	copy(counters, name)
	binary.NativeEndian.PutUint32(counters[iptlegacy.TableNameLen:], uint32(len(left)))
	for _, i := range left {
		counters = append(counters, old[i*counterLen:(i+1)*counterLen]...)
	}
	return unix.SetsockoptString(fd, level, setCounters, string(counters))
}

// lockTimeout is how long to wait for another iptables.
const lockTimeout = 10 * time.Second

// lockLegacy waits for the lock that keeps two legacy iptables programs from replacing a table at the same time. A
// container that does not see the host's lock has none.
func lockLegacy(ctx context.Context) (unlock func(), err error) {
	path := os.Getenv("XTABLES_LOCKFILE")
	if path == "" {
		path = "/run/xtables.lock"
	}
	f, err := os.OpenFile(path, os.O_CREATE|os.O_RDONLY, 0o600)
	if err != nil {
		return func() {}, nil
	}
	ctx, cancel := context.WithTimeoutCause(ctx, lockTimeout, fmt.Errorf("%s is held by another iptables", path))
	defer cancel()
	for {
		err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB)
		switch {
		case err == nil:
			return func() { f.Close() }, nil
		case !errors.Is(err, unix.EWOULDBLOCK) && !errors.Is(err, unix.EINTR):
			f.Close()
			return nil, fmt.Errorf("lock %s: %w", path, err)
		}
		select {
		case <-ctx.Done():
			f.Close()
			return nil, context.Cause(ctx)
		case <-time.After(50 * time.Millisecond):
		}
	}
}
