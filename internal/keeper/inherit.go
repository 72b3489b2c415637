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
)

// Mode is who keeps the socket. It is the value of a flag.
type Mode string

// The modes.
const (
	// Auto leaves the choice to Held.Choose.
	Auto Mode = "auto"
	// Process is a parent process: Keep.
	Process Mode = "process"
	// Systemd is the file descriptor store of systemd: Store.
	Systemd Mode = "systemd"
	// None is nobody: the socket ends with its process.
	None Mode = "none"
)

// Held is what this process was given at its start.
type Held struct {
	// Socket is the socket that outlived a former process, or nil.
	Socket *os.File
	// Place is the place of the one proxy, a listening socket that outlived a former process, or nil. See Seat.
	Place *os.File
	// Restarts says how many children of the same keeper crashed before this one.
	Restarts int

	link     *net.UnixConn // to the keeper, if this is its child
	orphaned chan struct{}
	stored   bool // Socket is from systemd's store
	store    bool // systemd's store is used
}

// Inherited gives what this process was given by a keeper, or by systemd under the name "verdict" (sd_listen_fds(3)).
// It is never nil; nothing was given if its Socket is nil. The environment variables that tell of it are unset, and the
// descriptors closed on exec, so that children see nothing of it. Call it once, before any child is started.
//
// The error says which variable is wrong. Descriptors that systemd passed under other names are left alone.
func Inherited() (*Held, error) {
	h, err := fromKeeper()
	stored, storeErr := fromSystemd()
	switch {
	case err == nil && h == nil:
		h, err = &Held{Socket: stored[storeName], Place: stored[placeName], stored: stored[storeName] != nil}, storeErr
	default: // for a unit that runs a keeper; its sockets are older
		closeFile(stored[storeName])
		closeFile(stored[placeName])
	}
	if err != nil {
		return nil, fmt.Errorf("keeper: %w", err)
	}
	return h, nil
}

// fromKeeper gives nil if this process is no keeper's child.
func fromKeeper() (*Held, error) {
	names := [...]string{envSocket, envKeeper, envRestarts, envPlace}
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
		if name == envPlace && values[i] == "" {
			continue
		}
		n, err := strconv.Atoi(values[i])
		if err != nil || n < 0 {
			all := strings.Join(names[:3], ", ")
			return nil, fmt.Errorf("%s=%q is no number; a keeper sets all of %s", name, values[i], all)
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
	h := &Held{Socket: os.NewFile(uintptr(numbers[0]), "kept socket"), Restarts: numbers[2], link: link, orphaned: make(chan struct{})}
	if values[3] != "" {
		h.Place = os.NewFile(uintptr(numbers[3]), "kept place")
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

// These are the names of the socket and of the place in systemd's store.
const (
	storeName = "verdict"
	placeName = "verdict-place"
)

// firstFD is the first descriptor that systemd passes.
const firstFD = 3

// fromSystemd gives what is in systemd's store, by its name.
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
		return nil, fmt.Errorf("LISTEN_PID=%q is no number", pid)
	}
	if p != os.Getpid() { // they were for another process, whose environment we inherited
		return nil, nil
	}
	n, err := strconv.Atoi(count)
	if err != nil || n < 0 {
		return nil, fmt.Errorf("LISTEN_FDS=%q is no number", count)
	}
	named := strings.Split(names, ":")
	if names != "" && len(named) != n {
		return nil, fmt.Errorf("LISTEN_FDNAMES=%q does not name %d descriptors", names, n)
	}
	stored := map[string]*os.File{}
	for i := range n {
		fd := firstFD + i
		if names == "" || named[i] != storeName && named[i] != placeName {
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

// Orphaned ends when the keeper is gone, killed perhaps, whose child this process is. Then nobody else holds the
// socket. For any other process it never does.
func (h *Held) Orphaned() <-chan struct{} { return h.orphaned }

// Choose says what this process has to do for its socket to be kept:
//
//   - Process: become the keeper, by Keep.
//   - Systemd: give the socket to systemd's store, which Held.Keep does.
//   - None: nothing. It is a keeper's child already, or nobody shall keep the socket.
//
// A keeper's child gets None in each mode, since it has the same flags as its keeper. Otherwise Auto means: systemd, if
// the socket is from its store or it offers one (FileDescriptorStoreMax= in the unit; it says so since version 254),
// and else a parent process. Call it before Keep.
func (h *Held) Choose(m Mode) (Mode, error) {
	switch {
	case h.link != nil:
		m = None
	case m == Auto && (h.stored && notifySocket() != "" || StoreOffered()):
		m = Systemd
	case m == Auto && h.Socket != nil:
		m = None
	case m == Auto:
		m = Process
	}
	h.store = m == Systemd
	if h.store && notifySocket() == "" {
		return "", errors.New("keeper: systemd offers no store: there is no $NOTIFY_SOCKET; " +
			"the unit needs Type=notify, or NotifyAccess=main, and FileDescriptorStoreMax=2")
	}
	return m, nil
}

// Keep has the keeper of this process hold a socket from now on, in place of what it held: the parent process, or
// systemd's store. It does nothing if there is no keeper. Call it with each socket that is worked with: one that comes
// from a former proxy is unknown to this one's keeper. It does no harm to call it with the same socket again.
func (h *Held) Keep(socket *os.File) error {
	switch {
	case socket == nil:
		return nil
	case h.link != nil:
		return h.tell(messageKeep, socket)
	case h.store && !(h.stored && same(h.Socket, socket)):
		return Store(socket)
	}
	return nil
}

// tell tells the keeper something. A keeper that does not listen is not waited for.
func (h *Held) tell(message string, files ...syscall.Conn) error {
	_ = h.link.SetWriteDeadline(time.Now().Add(time.Second))
	if err := send(h.link, message, files...); err != nil {
		return fmt.Errorf("keeper: tell the keeper %q: %w", message, err)
	}
	return nil
}

// keepPlace has the keeper of this process hold the place from now on; nil has it let go.
func (h *Held) keepPlace(l *net.UnixListener) error {
	switch {
	case h.link != nil && l == nil:
		return h.tell(messageNoPlace)
	case h.link != nil:
		return h.tell(messagePlace, l)
	case h.store && l == nil:
		return notify("FDSTOREREMOVE=1\nFDNAME=" + placeName)
	case h.store:
		if n, err := strconv.Atoi(os.Getenv("FDSTORE")); err == nil && n < 2 {
			return errors.New("keeper: the unit offers room for one descriptor: FileDescriptorStoreMax=2 is needed")
		}
		return store(placeName, l)
	}
	return nil
}

// standby tells the keeper how many stand by: if there are some, the place is theirs after a crash.
func (h *Held) standby(n int) {
	if h.link != nil {
		_ = h.tell(messageStandby + strconv.Itoa(n))
	}
}

// BeatEvery is how often Beat tells that this process runs.
const BeatEvery = 5 * time.Second

// Beat tells the keeper, and systemd's watchdog if the unit has one (WatchdogSec=), that this process runs, until ctx
// ends: who does not run any more is ended and started again. That its proxy does what it should is another question,
// see Seat.Stuck.
func (h *Held) Beat(ctx context.Context) {
	every := BeatEvery
	usec, err := strconv.Atoi(os.Getenv("WATCHDOG_USEC"))
	watched := err == nil && usec > 0
	if watched {
		every = min(every, time.Duration(usec)*time.Microsecond/3)
	}
	for ctx.Err() == nil && (watched || h.link != nil) {
		if h.link != nil {
			_ = h.tell(messageBeat)
		}
		if watched {
			_ = Notify("WATCHDOG=1")
		}
		pause(ctx, every)
	}
}

// StoreOffered says whether systemd offers a store for descriptors. Before version 254 it offers one without saying so.
func StoreOffered() bool {
	n, err := strconv.Atoi(os.Getenv("FDSTORE"))
	return err == nil && n > 0 && notifySocket() != ""
}

// Store puts a socket into systemd's store, which gives it back to the next start of this unit (Inherited), and takes
// out what was there before: with two sockets nobody could tell which is the right one. systemd is asked not to poll
// the socket, since it would drop one with an error, such as a netlink socket after an answer was lost. Without
// $NOTIFY_SOCKET it does nothing.
func Store(socket *os.File) error {
	return store(storeName, socket)
}

func store(name string, socket syscall.Conn) error {
	if err := notify("FDSTOREREMOVE=1\nFDNAME=" + name); err != nil {
		return err
	}
	return notify("FDSTORE=1\nFDNAME="+name+"\nFDPOLL=0", socket)
}

// Notify tells systemd of a state: "READY=1", "STOPPING=1", "STATUS=...", as sd_notify(3) has them. Without
// $NOTIFY_SOCKET it does nothing.
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
