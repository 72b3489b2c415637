package keeper

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"strconv"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/verdict-proxy/verdict/internal/system/clock"
)

// Mode says which process keeps the socket. It is the value of a flag.
type Mode string

// The modes.
const (
	// Auto leaves the choice to Inheritance.Choose.
	Auto Mode = "auto"
	// Process is a parent process: Keep.
	Process Mode = "process"
	// Systemd is the file descriptor store of systemd: Store.
	Systemd Mode = "systemd"
	// None means that nothing keeps the socket: it ends with its process.
	None Mode = "none"
)

// Inheritance is what this process got at its start.
type Inheritance struct {
	// Socket is the socket that outlived a former process, or nil.
	Socket *os.File
	// Lease is the listening socket of the lease that outlived a former process, or nil. See type Lease.
	Lease *os.File
	// Restarts is how many children of the same keeper crashed before this one.
	Restarts int

	link      *net.UnixConn // to the keeper, if this process is its child
	orphaned  chan struct{}
	fromStore bool // Socket is from systemd's store
	useStore  bool // the socket goes to systemd's store
}

// Inherited returns what this process got from a keeper, or from systemd under the name "verdict" (sd_listen_fds(3)).
// It is never nil; a nil Socket means that there was nothing. Inherited unsets the environment variables and sets
// close-on-exec on the descriptors, so that children see nothing of it. Call it once, before any child is started.
//
// The error says which variable is wrong. Descriptors that systemd passed under other names are left alone.
func Inherited() (*Inheritance, error) {
	h, err := fromKeeper()
	stored, storeErr := fromSystemd()
	switch {
	case err == nil && h == nil:
		socket := stored[storedSocketName]
		h, err = &Inheritance{Socket: socket, Lease: stored[storedLeaseName], fromStore: socket != nil}, storeErr
	default: // for a unit that runs a keeper; its sockets are older
		closeFile(stored[storedSocketName])
		closeFile(stored[storedLeaseName])
	}
	if err != nil {
		return nil, fmt.Errorf("keeper: %w", err)
	}
	return h, nil
}

// fromKeeper returns nil if this process is not a keeper's child.
func fromKeeper() (*Inheritance, error) {
	names := [...]string{envSocket, envKeeper, envRestarts, envLease}
	var values [len(names)]string
	any := false
	for i, name := range names {
		values[i] = os.Getenv(name)
		any = any || values[i] != ""
		os.Unsetenv(name)
	}
	if !any {
		return nil, nil
	}
	var numbers [len(names)]int
	for i, name := range names {
		if name == envLease && values[i] == "" {
			continue
		}
		n, err := strconv.Atoi(values[i])
		if err != nil || n < 0 {
			all := strings.Join(names[:3], ", ")
			return nil, fmt.Errorf("%s=%q is not a number; a keeper sets all of %s", name, values[i], all)
		}
		if name != envRestarts {
			if err := checkSocket(n); err != nil {
				return nil, fmt.Errorf("%s=%d: %w", name, n, err)
			}
		}
		numbers[i] = n
	}
	link, err := connOf(os.NewFile(uintptr(numbers[1]), "keeper"))
	if err != nil {
		return nil, fmt.Errorf("%s=%d: %w", envKeeper, numbers[1], err)
	}
	h := &Inheritance{Restarts: numbers[2], link: link, orphaned: make(chan struct{})}
	h.Socket = os.NewFile(uintptr(numbers[0]), "kept socket")
	if values[3] != "" {
		h.Lease = os.NewFile(uintptr(numbers[3]), "kept lease")
	}
	go func() {
		defer close(h.orphaned)
		for err := error(nil); err == nil; { // the keeper never says anything
			var files []*os.File
			_, files, err = receive(link)
			closeFiles(files)
		}
	}()
	return h, nil
}

// The names of the socket and of the lease in systemd's file descriptor store.
const (
	storedSocketName = "verdict"
	storedLeaseName  = "verdict-place"
)

// firstFD is the first descriptor that systemd passes.
const firstFD = 3

// fromSystemd returns what is in systemd's store, by name.
func fromSystemd() (map[string]*os.File, error) {
	pid, count, names := os.Getenv("LISTEN_PID"), os.Getenv("LISTEN_FDS"), os.Getenv("LISTEN_FDNAMES")
	for _, name := range []string{"LISTEN_PID", "LISTEN_FDS", "LISTEN_FDNAMES", "LISTEN_PIDFDID"} {
		os.Unsetenv(name)
	}
	if pid == "" || count == "" {
		return nil, nil
	}
	p, err := strconv.Atoi(pid)
	if err != nil {
		return nil, fmt.Errorf("LISTEN_PID=%q is not a number", pid)
	}
	if p != os.Getpid() { // they were for another process, whose environment we inherited
		return nil, nil
	}
	n, err := strconv.Atoi(count)
	if err != nil || n < 0 {
		return nil, fmt.Errorf("LISTEN_FDS=%q is not a number", count)
	}
	named := strings.Split(names, ":")
	if names != "" && len(named) != n {
		return nil, fmt.Errorf("LISTEN_FDNAMES=%q does not name %d descriptors", names, n)
	}
	stored := map[string]*os.File{}
	for i := range n {
		fd := firstFD + i
		if names == "" || named[i] != storedSocketName && named[i] != storedLeaseName {
			unix.CloseOnExec(fd)
			continue
		}
		if err := checkSocket(fd); err != nil {
			return nil, fmt.Errorf("LISTEN_FDNAMES=%q: %w", names, err)
		}
		closeFile(stored[named[i]]) // the last one is the newest
		stored[named[i]] = os.NewFile(uintptr(fd), "socket of systemd's store")
	}
	return stored, nil
}

// Orphaned is closed when this process's keeper is gone, perhaps killed. Then no other process holds the socket. For a
// process without a keeper it never is.
func (h *Inheritance) Orphaned() <-chan struct{} { return h.orphaned }

// Choose returns what this process has to do for its socket to be kept:
//
//   - Process: become the keeper, by Keep.
//   - Systemd: give the socket to systemd's store, which Inheritance.Keep does.
//   - None: nothing. It is a keeper's child already, or the socket is not to be kept.
//
// A keeper's child gets None in each mode, since it has the same flags as its keeper. Otherwise Auto means systemd if
// the socket came from its store or it offers one (FileDescriptorStoreMax= in the unit; systemd says so since version
// 254), and else a parent process. Call it before Keep.
func (h *Inheritance) Choose(m Mode) (Mode, error) {
	switch {
	case h.link != nil:
		m = None
	case m == Auto && (h.fromStore && notifySocket() != "" || StoreOffered()):
		m = Systemd
	case m == Auto && h.Socket != nil:
		m = None
	case m == Auto:
		m = Process
	}
	h.useStore = m == Systemd
	if h.useStore && notifySocket() == "" {
		return "", errors.New("keeper: systemd offers no file descriptor store: $NOTIFY_SOCKET is not set; " +
			"the unit needs Type=notify, or NotifyAccess=main, and FileDescriptorStoreMax=2")
	}
	return m, nil
}

// Keep makes the keeper of this process hold a socket from now on, instead of the one it held. The keeper is the parent
// process or systemd's store; without one, Keep does nothing. Call it with each socket that the proxy uses: this
// process's keeper does not know a socket that comes from a former proxy. It is safe to call it with the same socket
// again.
func (h *Inheritance) Keep(socket *os.File) error {
	switch {
	case socket == nil:
		return nil
	case h.link != nil:
		return h.sendToKeeper(messageKeep, socket)
	case h.useStore && !(h.fromStore && sameSocket(h.Socket, socket)):
		return Store(socket)
	}
	return nil
}

// sendToKeeper sends a message to the keeper. It does not wait for a keeper that does not read.
func (h *Inheritance) sendToKeeper(message string, files ...syscall.Conn) error {
	_ = h.link.SetWriteDeadline(time.Now().Add(time.Second))
	if err := send(h.link, message, files...); err != nil {
		return fmt.Errorf("keeper: send %q to the keeper: %w", message, err)
	}
	return nil
}

// keepLease makes the keeper of this process hold the lease from now on; nil makes the keeper release it.
func (h *Inheritance) keepLease(l *net.UnixListener) error {
	switch {
	case h.link != nil && l == nil:
		return h.sendToKeeper(messageNoLease)
	case h.link != nil:
		return h.sendToKeeper(messageLease, l)
	case h.useStore && l == nil:
		return notify("FDSTOREREMOVE=1\nFDNAME=" + storedLeaseName)
	case h.useStore:
		if n, err := strconv.Atoi(os.Getenv("FDSTORE")); err == nil && n < 2 {
			return errors.New("keeper: the unit stores only one descriptor: set FileDescriptorStoreMax=2")
		}
		return store(storedLeaseName, l)
	}
	return nil
}

// reportStandbys tells the keeper how many proxies stand by: if there are some, one of them gets the lease after a
// crash.
func (h *Inheritance) reportStandbys(n int) {
	if h.link != nil {
		_ = h.sendToKeeper(messageStandby + strconv.Itoa(n))
	}
}

// BeatEvery is the interval of Beat.
const BeatEvery = 5 * time.Second

// Beat sends heartbeats to the keeper, and to systemd's watchdog if the unit has one (WatchdogSec=), until ctx ends. A
// process whose heartbeat stops is ended and restarted. Beat does not say that the proxy does its work; see
// Lease.OnStuck.
func (h *Inheritance) Beat(ctx context.Context) {
	every := BeatEvery
	usec, err := strconv.Atoi(os.Getenv("WATCHDOG_USEC"))
	watched := err == nil && usec > 0
	if watched {
		every = min(every, time.Duration(usec)*time.Microsecond/3)
	}
	for ctx.Err() == nil && (watched || h.link != nil) {
		if h.link != nil {
			_ = h.sendToKeeper(messageBeat)
		}
		if watched {
			_ = Notify("WATCHDOG=1")
		}
		clock.Pause(ctx, every)
	}
}

// StoreOffered says whether systemd offers a file descriptor store. Before version 254 systemd offers one without
// saying so.
func StoreOffered() bool {
	n, err := strconv.Atoi(os.Getenv("FDSTORE"))
	return err == nil && n > 0 && notifySocket() != ""
}

// Store puts a socket into systemd's store, which passes it to the next start of this unit (Inherited), and removes
// what was there before: with two sockets nobody could tell which is the right one. It asks systemd not to poll the
// socket, since systemd would drop one with an error, such as a netlink socket after an answer was lost. Without
// $NOTIFY_SOCKET it does nothing.
func Store(socket *os.File) error {
	return store(storedSocketName, socket)
}

func store(name string, socket syscall.Conn) error {
	if err := notify("FDSTOREREMOVE=1\nFDNAME=" + name); err != nil {
		return err
	}
	return notify("FDSTORE=1\nFDNAME="+name+"\nFDPOLL=0", socket)
}

// Notify sends a state to systemd: "READY=1", "STOPPING=1", "STATUS=...", as in sd_notify(3). Without $NOTIFY_SOCKET it
// does nothing.
func Notify(state string) error { return notify(state) }

func notifySocket() string { return os.Getenv("NOTIFY_SOCKET") }

func notify(state string, files ...syscall.Conn) error {
	to := notifySocket()
	if to == "" {
		return nil
	}
	if to[0] != '/' && to[0] != '@' {
		return fmt.Errorf("keeper: NOTIFY_SOCKET=%q is neither a path nor an abstract socket", to)
	}
	fd, err := unix.Socket(unix.AF_UNIX, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return fmt.Errorf("keeper: notify systemd: %w", err)
	}
	defer unix.Close(fd)
	err = withDescriptors(files, nil, func(fds []int) error {
		for {
			err := unix.Sendmsg(fd, []byte(state), rights(fds), &unix.SockaddrUnix{Name: to}, 0)
			if err != unix.EINTR {
				return err
			}
		}
	})
	if err != nil {
		return fmt.Errorf("keeper: notify systemd at %s: %w", to, err)
	}
	return nil
}
