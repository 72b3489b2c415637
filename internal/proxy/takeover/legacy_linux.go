package takeover

import (
	"bufio"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"runtime"
	"strings"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/verdict-proxy/verdict/internal/system/ipfamily"
)

// The options of legacy iptables at an IPv4 or IPv6 socket: IPT_SO_GET_INFO and so on.
const (
	getInfo     = 64
	getEntries  = 65
	setReplace  = 64
	setCounters = 65
)

const (
	tableNameLen = 32
	// infoLen is the length of struct ipt_getinfo: a name, the valid hooks, the hooks' offsets, the underflows, the number
	// of entries and their bytes.
	infoLen = tableNameLen + 4 + 2*4*hooks + 2*4
	// entriesHeader is what stands before the entries in struct ipt_get_entries.
	entriesHeader = 40
	// replaceHeader is what stands before them in struct ipt_replace, the pointer to the counters last.
	replaceHeader = 96
	// counterLen is the length of struct xt_counters, countersHeader what stands before them in struct xt_counters_info.
	counterLen     = 16
	countersHeader = 40
)

// legacyTables returns the tables of legacy iptables in this network namespace. Asking the kernel for a table creates
// it, so only existing tables are read.
func legacyTables() (list []*table, err error) {
	for _, f := range ipfamily.All {
		path := "/proc/thread-self/net/ip_tables_names"
		if f == ipfamily.IPv6 {
			path = "/proc/thread-self/net/ip6_tables_names"
		}
		names, err := os.ReadFile(path)
		if errors.Is(err, fs.ErrNotExist) {
			continue // this kernel has no legacy iptables, or it is not loaded
		}
		if err != nil {
			return list, fmt.Errorf("%s iptables (%s): %w", f, legacy, err)
		}
		for _, name := range strings.Fields(string(names)) {
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

// inetSocket opens a socket for the options of legacy iptables; it need not be a raw one.
func inetSocket(f ipfamily.Family) (fd, level int, err error) {
	domain, level := unix.AF_INET, unix.SOL_IP
	if f == ipfamily.IPv6 {
		domain, level = unix.AF_INET6, unix.SOL_IPV6
	}
	fd, err = unix.Socket(domain, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	return fd, level, err
}

// maxReads bounds how often a table is read again because others changed it meanwhile.
const maxReads = 10

// readBlob reads a table.
func readBlob(f ipfamily.Family, name string) (*blob, error) {
	if unsafe.Sizeof(uintptr(0)) != 8 {
		return nil, errors.New("reading legacy iptables requires a 64-bit kernel")
	}
	fd, level, err := inetSocket(f)
	if err != nil {
		return nil, err
	}
	defer unix.Close(fd)
	for range maxReads {
		info := make([]byte, infoLen)
		copy(info, name)
		if err := getsockopt(fd, level, getInfo, info); err != nil {
			return nil, fmt.Errorf("%s iptables (%s): read table %s: %w", f, legacy, name, err)
		}
		b := &blob{family: f, valid: binary.NativeEndian.Uint32(info[tableNameLen:])}
		at := info[tableNameLen+4:]
		for h := range hooks {
			b.hook[h] = binary.NativeEndian.Uint32(at[4*h:])
			b.underflow[h] = binary.NativeEndian.Uint32(at[4*(hooks+h):])
		}
		b.numEntries = binary.NativeEndian.Uint32(at[8*hooks:])
		size := binary.NativeEndian.Uint32(at[8*hooks+4:])
		entries := make([]byte, entriesHeader+int(size))
		copy(entries, name)
		binary.NativeEndian.PutUint32(entries[tableNameLen:], size)
		err := getsockopt(fd, level, getEntries, entries)
		if errors.Is(err, unix.EAGAIN) { // changed between the two
			continue
		}
		if err != nil {
			return nil, fmt.Errorf("%s iptables (%s): read table %s: %w", f, legacy, name, err)
		}
		b.entries = entries[entriesHeader:]
		return b, nil
	}
	return nil, fmt.Errorf("%s iptables (%s): table %s keeps changing", f, legacy, name)
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
		err = is.replace(name, left, int(was.numEntries))
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
	fd, level, err := inetSocket(b.family)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	old := make([]byte, before*counterLen)
	var pin runtime.Pinner
	pin.Pin(&old[0])
	defer pin.Unpin()
	request := make([]byte, replaceHeader, replaceHeader+len(b.entries))
	copy(request, name)
	w := request[tableNameLen:]
	put := func(v uint32) { binary.NativeEndian.PutUint32(w, v); w = w[4:] }
	put(b.valid)
	put(b.numEntries)
	put(uint32(len(b.entries)))
	for _, v := range b.hook {
		put(v)
	}
	for _, v := range b.underflow {
		put(v)
	}
	put(uint32(before))
	binary.NativeEndian.PutUint64(w, uint64(uintptr(unsafe.Pointer(&old[0]))))
	if err := unix.SetsockoptString(fd, level, setReplace, string(append(request, b.entries...))); err != nil {
		return err
	}
	counters := make([]byte, countersHeader, countersHeader+len(left)*counterLen)
	copy(counters, name)
	binary.NativeEndian.PutUint32(counters[tableNameLen:], uint32(len(left)))
	for _, i := range left {
		counters = append(counters, old[i*counterLen:(i+1)*counterLen]...)
	}
	return unix.SetsockoptString(fd, level, setCounters, string(counters))
}

// getsockopt reads an option into b, whose content is the request.
func getsockopt(fd, level, option int, b []byte) error {
	n := uint32(len(b))
	_, _, errno := unix.Syscall6(unix.SYS_GETSOCKOPT, uintptr(fd), uintptr(level), uintptr(option),
		uintptr(unsafe.Pointer(&b[0])), uintptr(unsafe.Pointer(&n)), 0)
	if errno != 0 {
		return errno
	}
	return nil
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

// lines returns the lines of a file in /proc, none if it does not exist.
func lines(path string) ([]string, error) {
	f, err := os.Open(path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	defer f.Close()
	var list []string
	s := bufio.NewScanner(f)
	for s.Scan() {
		list = append(list, s.Text())
	}
	return list, s.Err()
}
