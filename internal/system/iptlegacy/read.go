package iptlegacy

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"strings"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/verdict-proxy/verdict/internal/system/ipfamily"
)

// The options of legacy iptables at an IPv4 or IPv6 socket: IPT_SO_GET_INFO and IPT_SO_GET_ENTRIES.
const (
	getInfo    = 64
	getEntries = 65
)

const (
	// TableNameLen is the length of a table's name in the kernel's structs.
	TableNameLen = 32
	// InfoLen is the length of struct ipt_getinfo: a name, the valid hooks, the hooks' offsets, the underflows, the number
	// of entries and their bytes.
	InfoLen = TableNameLen + 4 + 2*4*Hooks + 2*4
	// entriesHeader is what stands before the entries in struct ipt_get_entries.
	entriesHeader = 40
)

// Names returns the names of a family's tables in the network namespace of the calling thread, without creating any.
func Names(f ipfamily.Family) ([]string, error) {
	path := "/proc/thread-self/net/ip_tables_names"
	if f == ipfamily.IPv6 {
		path = "/proc/thread-self/net/ip6_tables_names"
	}
	names, err := os.ReadFile(path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil // this kernel has no legacy iptables, or it is not loaded
	}
	if err != nil {
		return nil, fmt.Errorf("%s iptables (legacy variant): %w", f, err)
	}
	return strings.Fields(string(names)), nil
}

// Socket opens a socket for the options of legacy iptables, which need not be a raw one.
func Socket(f ipfamily.Family) (fd, level int, err error) {
	domain, level := unix.AF_INET, unix.SOL_IP
	if f == ipfamily.IPv6 {
		domain, level = unix.AF_INET6, unix.SOL_IPV6
	}
	fd, err = unix.Socket(domain, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	return fd, level, err
}

// maxReads bounds how often a table is read again because others changed it meanwhile.
const maxReads = 10

// ErrLarge says that a table has more bytes than the reader takes.
var ErrLarge = errors.New("the table is too large")

// Read reads a table, of most bytes; 0 means of any number. One that is ErrLarge comes without its Entries.
func Read(f ipfamily.Family, name string, most uint32) (*Table, error) {
	if unsafe.Sizeof(uintptr(0)) != 8 {
		return nil, errors.New("reading legacy iptables requires a 64-bit kernel")
	}
	fd, level, err := Socket(f)
	if err != nil {
		return nil, err
	}
	defer unix.Close(fd)
	for range maxReads {
		info, err := Info(fd, level, name)
		if err != nil {
			return nil, fmt.Errorf("%s iptables (legacy variant): read table %s: %w", f, name, err)
		}
		t := &Table{Family: f, Valid: binary.NativeEndian.Uint32(info[TableNameLen:])}
		at := info[TableNameLen+4:]
		for h := range Hooks {
			t.Hook[h] = binary.NativeEndian.Uint32(at[4*h:])
			t.Underflow[h] = binary.NativeEndian.Uint32(at[4*(Hooks+h):])
		}
		t.NumEntries = binary.NativeEndian.Uint32(at[8*Hooks:])
		size := binary.NativeEndian.Uint32(at[8*Hooks+4:])
		if most > 0 && size > most {
			return t, fmt.Errorf("%s iptables (legacy variant): read table %s: %w: %d bytes", f, name, ErrLarge, size)
		}
		entries := make([]byte, entriesHeader+int(size))
		copy(entries, name)
		binary.NativeEndian.PutUint32(entries[TableNameLen:], size)
		err = getsockopt(fd, level, getEntries, entries)
		if errors.Is(err, unix.EAGAIN) { // changed between the two
			continue
		}
		if err != nil {
			return nil, fmt.Errorf("%s iptables (legacy variant): read table %s: %w", f, name, err)
		}
		t.Entries = entries[entriesHeader:]
		return t, nil
	}
	return nil, fmt.Errorf("%s iptables (legacy variant): table %s keeps changing", f, name)
}

// Info reads what the kernel says of a table at a Socket: its size, its hooks and where in it they begin.
func Info(fd, level int, name string) (info [InfoLen]byte, err error) {
	copy(info[:], name)
	return info, getsockopt(fd, level, getInfo, info[:])
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
