package benchmark

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"strconv"
	"unsafe"

	"golang.org/x/sys/unix"
)

// join has this process be in the agent's control group, and what it connects with from now on; leave takes it out.
func (a *agent) join() error {
	return os.WriteFile(filepath.Join(a.group, "cgroup.procs"), []byte("0"), 0)
}

func (a *agent) leave() error {
	return os.WriteFile(filepath.Join(a.all, a.before, "cgroup.procs"), []byte("0"), 0)
}

// enter has this process be in the control group of a node's processes: Cilium's programs that balance when a socket
// connects concern all of such a group, in whatever network namespace they are.
func (t *turns) enter(n *turn) error {
	if t.in == n.agent {
		return nil
	}
	if t.in != nil {
		if err := t.in.leave(); err != nil {
			return err
		}
	}
	t.in = n.agent
	if t.in == nil {
		return nil
	}
	return t.in.join()
}

// forgetConnections empties the agent's tables of connections and translations, as forget does with the kernel's.
func (a *agent) forgetConnections() error {
	var tables []string
	for _, name := range []string{"cilium_ct4_global", "cilium_ct_any4_global", "cilium_snat_v4_external"} {
		found, err := filepath.Glob(filepath.Join(a.maps, "*", "globals", name))
		if err != nil {
			return err
		}
		tables = append(tables, found...)
	}
	if len(tables) == 0 {
		return fmt.Errorf("no table of connections is below %s", a.maps)
	}
	var errs []error
	for _, path := range tables {
		errs = append(errs, emptyMap(path))
	}
	return errors.Join(errs...)
}

// emptyMap deletes all entries of a BPF map that has a file.
func emptyMap(path string) error {
	m, err := openMap(path)
	if err != nil {
		return fmt.Errorf("%s: %w", path, err)
	}
	defer m.Close()
	size, err := keySize(m)
	if err != nil {
		return fmt.Errorf("%s: %w", path, err)
	}
	key := make([]byte, size)
	for {
		err := m.do(unix.BPF_MAP_GET_NEXT_KEY, nil, key)
		if err == unix.ENOENT {
			return nil
		}
		if err == nil {
			err = m.do(unix.BPF_MAP_DELETE_ELEM, key, nil)
		}
		if err != nil && err != unix.ENOENT { // somebody else may have deleted it
			return fmt.Errorf("%s: %w", path, err)
		}
	}
}

// bpfMap is an open map.
type bpfMap struct{ *os.File }

func openMap(path string) (bpfMap, error) {
	name, err := unix.ByteSliceFromString(path)
	if err != nil {
		return bpfMap{}, err
	}
	attr := struct {
		path      uint64
		fd, flags uint32
	}{path: uint64(uintptr(unsafe.Pointer(&name[0])))}
	fd, _, errno := unix.Syscall(unix.SYS_BPF, unix.BPF_OBJ_GET, uintptr(unsafe.Pointer(&attr)), unsafe.Sizeof(attr))
	runtime.KeepAlive(name)
	if errno != 0 {
		return bpfMap{}, errno
	}
	return bpfMap{os.NewFile(fd, path)}, nil
}

// do calls bpf() with a key and, of BPF_MAP_GET_NEXT_KEY, where the next one goes to. Without a key that is the first.
func (m bpfMap) do(command uintptr, key, next []byte) error {
	attr := struct {
		fd         uint32
		_          uint32
		key, value uint64
		flags      uint64
	}{fd: uint32(m.Fd()), key: pointer(key), value: pointer(next)}
	_, _, errno := unix.Syscall(unix.SYS_BPF, command, uintptr(unsafe.Pointer(&attr)), unsafe.Sizeof(attr))
	runtime.KeepAlive(key)
	runtime.KeepAlive(next)
	if errno != 0 {
		return errno
	}
	return nil
}

func pointer(b []byte) uint64 {
	if len(b) == 0 {
		return 0
	}
	return uint64(uintptr(unsafe.Pointer(&b[0])))
}

// keySize is how long a map's keys are, as the kernel says of an open one.
func keySize(m bpfMap) (int, error) {
	text, err := os.ReadFile(fmt.Sprintf("/proc/self/fdinfo/%d", m.Fd()))
	if err != nil {
		return 0, err
	}
	return strconv.Atoi(field(string(text), "key_size"))
}
