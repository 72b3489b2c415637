// Package keeper lets a netlink socket outlive the proxy that writes through it.
//
// A table with the flags owner and persist can be changed only through the socket that owns it, as long as any process
// holds that socket. So the socket must survive a crash of the proxy, its restart, and its replacement by another one.
// There are three parts:
//
//   - Keep is a parent process that holds the socket and restarts the proxy after a crash.
//   - Inherited and Inheritance are the proxy's side: the socket it got from that parent, or from systemd.
//   - Lease lets one proxy at a time work in a network namespace, and lets another proxy take over from it.
package keeper

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"os/signal"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// The environment by which the keeper passes descriptors to its child.
const (
	// envSocket is the number of the socket's descriptor.
	envSocket = "VERDICT_KEPT_SOCKET"
	// envKeeper is the descriptor of the connection to the keeper.
	envKeeper = "VERDICT_KEEPER"
	// envLease is the descriptor of the lease, if there is one.
	envLease = "VERDICT_KEPT_PLACE"
	// envRestarts is how many children there were before this one.
	envRestarts = "VERDICT_KEEPER_RESTARTS"
)

// The child's descriptors, after its standard files.
const (
	socketFD = 3
	keeperFD = 4
	leaseFD  = 5
)

// The messages of the child to its keeper.
const (
	// messageKeep carries the socket that the keeper is to hold from now on.
	messageKeep = "keep"
	// messageLease carries the lease that it is to hold; messageNoLease says that another proxy has it.
	messageLease   = "place"
	messageNoLease = "no place"
	// messageStandby says how many proxies stand by.
	messageStandby = "standby "
	// messageBeat is the child's heartbeat.
	messageBeat = "beat"
)

// Options configures Keep. Only Socket is required.
type Options struct {
	// Socket is the socket to keep. It belongs to Keep from then on.
	Socket *os.File
	// Lease, if not nil, is the lease that outlived a former process. It belongs to Keep, too.
	Lease *os.File
	// Path, Args and Env are the child's program, its arguments without the name, and its environment. The default is
	// those of this process.
	Path string
	Args []string
	Env  []string
	// Grace is how long the child may take to stop, by default 30 seconds.
	Grace time.Duration
	// Silence is how long a child that has sent a heartbeat (Inheritance.Beat) may then send none, by default a minute.
	// After that the keeper aborts it with SIGABRT, kills it with SIGKILL if that does not help, and starts it again.
	Silence time.Duration
	// Log gets crashes and restarts.
	Log *slog.Logger
}

// Keep holds a socket while a child works with it. It returns when the child has exited by itself or on request, with
// the exit status for this process. A child that crashes is restarted and gets the same socket.
//
//   - A child that exits by itself ends Keep, which returns the child's exit status. What is wrong with flags or rights
//     would be wrong again.
//   - A child that is killed by a signal that did not come through the keeper (SIGKILL, out of memory, SIGSEGV, a
//     panic) is restarted: at once the first time, then after pauses that begin at 100 ms and double up to 30 s. The
//     pauses begin anew after a child that has lived for a minute. A Go panic exits with status 2, like any program
//     that exits with 2, unless GOTRACEBACK is crash: then it is SIGABRT. So the child gets that, unless GOTRACEBACK is
//     set already.
//   - SIGTERM, SIGINT, SIGQUIT, SIGHUP, SIGUSR1 and SIGUSR2 are forwarded. After SIGTERM, SIGINT or SIGQUIT, or the end
//     of ctx, which sends SIGTERM to the child, the child has Grace to stop, and is killed then. Keep returns its
//     status, or 128 plus the number of the signal that ended it, as shells do. SIGQUIT makes the child dump its
//     stacks.
//   - If the keeper itself is killed, the child learns it from the end of their connection (Inheritance.Orphaned).
//   - A child that runs no more, such as one that was stopped, is aborted after Silence.
//   - Between two children the keeper itself holds the lease, if its child held it: nobody else can take the name
//     meanwhile, and a proxy that wants to take over gets the lease at once. If a proxy stood by when the child
//     crashed, the keeper gives it a moment to acquire the lease.
//   - The child may send another socket to be kept instead of the first one (Inheritance.Keep), because it took over
//     from a former proxy. A restarted child gets that one.
//
// The child is in a process group of its own: a ^C on the terminal reaches it once, through the keeper.
//
// The error says that the first child could not be started, and nothing else. Keep reaps all children of this process,
// since it may be the first process of a container, which inherits orphans. So nothing else in this process may start
// any. It reaps children and sends signals in the same goroutine, so that a pid cannot get another meaning in between.
func Keep(ctx context.Context, o Options) (status int, err error) {
	k, err := newKeep(o)
	if err != nil {
		return 0, err
	}
	defer k.close()
	var pauses backoff
	for restarts := 0; ctx.Err() == nil; restarts++ {
		started := time.Now()
		c, err := k.start(restarts)
		switch {
		case err == nil:
			if status, crashed := k.supervise(ctx, c); !crashed {
				return status, nil
			}
		case restarts == 0:
			return 0, fmt.Errorf("keeper: start %s: %w", k.Path, err)
		default:
			// Perhaps the program is being replaced. If Keep gave up, the socket would be lost.
			k.Log.Error("failed to restart verdict; retrying", "err", err)
		}
		pause := pauses.next(time.Since(started))
		k.Log.Info("restarting verdict; its socket is kept", "in", pause)
		if k.hasStandby() {
			pause = max(pause, standbyPause)
		}
		stop := k.offerLease(pause)
		terminated := k.waitForRestart(ctx, pause)
		if evicted := stop(); terminated || evicted {
			break
		}
	}
	return 0, nil
}

// standbyPause is how long a standby has to acquire the lease of a proxy that crashed.
const standbyPause = time.Second

type keep struct {
	Options
	signals  chan os.Signal // to be forwarded
	children chan os.Signal // SIGCHLD: one is enough, since all children are reaped

	mu     sync.Mutex
	socket *os.File
	lease  *os.File // nil if the child does not hold it
	// standbys is how many stood by when the child told last.
	standbys int
}

// forwardedSignals are the signals that the child gets. Those that stop and continue a job are not among them: they
// should stop the keeper, which a shell watches.
var forwardedSignals = []os.Signal{unix.SIGTERM, unix.SIGINT, unix.SIGQUIT, unix.SIGHUP, unix.SIGUSR1, unix.SIGUSR2}

func newKeep(o Options) (*keep, error) {
	if o.Socket == nil {
		return nil, errors.New("keeper: no socket to keep")
	}
	if o.Path == "" {
		path, err := os.Executable()
		if err != nil {
			return nil, fmt.Errorf("keeper: %w", err)
		}
		o.Path = path
	}
	if o.Args == nil {
		o.Args = os.Args[1:]
	}
	if o.Env == nil {
		o.Env = os.Environ()
	}
	if o.Grace == 0 {
		o.Grace = 30 * time.Second
	}
	if o.Silence == 0 {
		o.Silence = time.Minute
	}
	if o.Log == nil {
		o.Log = slog.New(slog.DiscardHandler)
	}
	k := &keep{Options: o, socket: o.Socket, lease: o.Lease}
	k.signals, k.children = make(chan os.Signal, 16), make(chan os.Signal, 1)
	signal.Notify(k.signals, forwardedSignals...)
	signal.Notify(k.children, unix.SIGCHLD)
	return k, nil
}

func (k *keep) close() {
	signal.Stop(k.signals)
	signal.Stop(k.children)
	k.socket.Close()
	closeFile(k.lease)
}

// hasStandby says whether a proxy stands by that can acquire the lease.
func (k *keep) hasStandby() bool {
	k.mu.Lock()
	defer k.mu.Unlock()
	return k.lease != nil && k.standbys > 0
}

// offerLease gives the lease to the first proxy that asks, until stop is called. stop says whether the lease was
// evicted.
func (k *keep) offerLease(pause time.Duration) (stop func() (evicted bool)) {
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.lease == nil || pause == 0 {
		return func() bool { return false }
	}
	s := Lease{Log: k.Log, Socket: duplicate(k.socket)}
	lease := duplicate(k.lease)
	if s.Socket == nil || lease == nil {
		closeFile(lease)
		s.close()
		return func() bool { return false }
	}
	l, err := listenerOf(lease)
	if err != nil {
		k.Log.Error("failed to offer the lease: no proxy can take over until verdict is restarted", "err", err)
		s.close()
		return func() bool { return false }
	}
	s.Name = strings.TrimPrefix(l.Addr().String(), "@")
	s.defaults()
	ctx, cancel := context.WithCancel(context.Background())
	result := make(chan error)
	go func() {
		defer s.close()
		h := s.hold(l)
		h.vacant = true
		result <- h.run(ctx, func(ctx context.Context, _ *os.File) error {
			<-ctx.Done()
			return nil
		})
	}()
	return func() bool {
		cancel()
		err := <-result
		if err != nil { // another proxy has it
			k.setLease(nil)
		}
		return errors.Is(err, ErrEvicted)
	}
}

// duplicate returns a new descriptor for a socket, nil if none is available.
func duplicate(f *os.File) (d *os.File) {
	_ = withDescriptors(filesOf(f), nil, func(fds []int) error {
		fd, err := unix.FcntlInt(uintptr(fds[0]), unix.F_DUPFD_CLOEXEC, 0)
		if err == nil {
			d = os.NewFile(uintptr(fd), f.Name())
		}
		return err
	})
	return d
}

// child is a running child process.
type child struct {
	pid     int
	started time.Time
	link    *net.UnixConn
	// drained is closed when all that the child said has been read.
	drained chan struct{}
	// beats counts its heartbeats.
	beats atomic.Int64
	// stopping says that it was asked to stop, aborted that it was aborted because its heartbeat stopped; signals are
	// those that it was sent.
	stopping, aborted bool
	signals           []syscall.Signal
}

// start starts a child. The connection to it is a pair of sockets, not a pipe, so that the child can send another
// socket. Like a pipe, it ends with its holder.
func (k *keep) start(restarts int) (*child, error) {
	pair, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, err
	}
	defer unix.Close(pair[1])
	link, err := connOf(os.NewFile(uintptr(pair[0]), "child"))
	if err != nil {
		return nil, err
	}
	c := &child{started: time.Now(), link: link, drained: make(chan struct{})}
	k.mu.Lock()
	k.standbys = 0
	kept := filesOf(k.socket)
	if k.lease != nil {
		kept = append(kept, k.lease)
	}
	err = withDescriptors(kept, nil, func(fds []int) error {
		files := []uintptr{0, 1, 2, socketFD: uintptr(fds[0]), keeperFD: uintptr(pair[1])}
		if k.lease != nil {
			files = append(files, uintptr(fds[1])) // placeFD
		}
		env := childEnv(k.Env, restarts, k.lease != nil)
		c.pid, err = syscall.ForkExec(k.Path, append([]string{os.Args[0]}, k.Args...),
			&syscall.ProcAttr{Env: env, Files: files, Sys: &syscall.SysProcAttr{Setpgid: true}})
		return err
	})
	k.mu.Unlock()
	if err != nil {
		link.Close()
		return nil, err
	}
	go k.readMessages(c)
	return c, nil
}

// childEnv returns the environment of a child.
func childEnv(env []string, restarts int, lease bool) []string {
	env = slices.DeleteFunc(slices.Clone(env), func(v string) bool {
		name, _, _ := strings.Cut(v, "=")
		return name == envSocket || name == envKeeper || name == envLease || name == envRestarts
	})
	if !slices.ContainsFunc(env, func(v string) bool { return strings.HasPrefix(v, "GOTRACEBACK=") }) {
		env = append(env, "GOTRACEBACK=crash")
	}
	if lease {
		env = append(env, fmt.Sprintf("%s=%d", envLease, leaseFD))
	}
	return append(env, fmt.Sprintf("%s=%d", envSocket, socketFD), fmt.Sprintf("%s=%d", envKeeper, keeperFD),
		fmt.Sprintf("%s=%d", envRestarts, restarts))
}

// readMessages reads the child's messages until it ends.
func (k *keep) readMessages(c *child) {
	defer close(c.drained)
	for {
		text, files, err := receive(c.link)
		if err != nil {
			return
		}
		k.handleMessage(c, text, files)
	}
}

// handleMessage handles one message of the child.
func (k *keep) handleMessage(c *child, text string, files []*os.File) {
	waiters, standby := strings.CutPrefix(text, messageStandby)
	switch {
	case text == messageKeep && len(files) == 1:
		k.setSocket(files[0])
		return
	case text == messageLease && len(files) == 1:
		k.setLease(files[0])
		return
	case text == messageNoLease:
		k.setLease(nil)
	case standby:
		k.mu.Lock()
		k.standbys, _ = strconv.Atoi(waiters)
		k.mu.Unlock()
	case text == messageBeat:
		c.beats.Add(1)
	}
	closeFiles(files)
}

// setLease replaces the lease that is kept; nil keeps none.
func (k *keep) setLease(lease *os.File) {
	k.mu.Lock()
	defer k.mu.Unlock()
	closeFile(k.lease)
	k.lease = lease
}

// setSocket replaces the socket that is kept.
func (k *keep) setSocket(socket *os.File) {
	k.mu.Lock()
	defer k.mu.Unlock()
	if sameSocket(k.socket, socket) {
		socket.Close()
		return
	}
	k.socket.Close()
	k.socket = socket
}

// supervise waits for the child's end. It says whether that was a crash, and otherwise with which status to exit.
func (k *keep) supervise(ctx context.Context, c *child) (status int, crashed bool) {
	cancelled := ctx.Done()
	var overdue <-chan time.Time
	stop := func(s syscall.Signal) {
		if !c.stopping { // a second signal would look like an impatient user
			c.stopping, overdue = true, time.After(k.Grace)
			c.signal(s)
		}
	}
	tick := time.NewTicker(max(k.Silence/silenceTicks, time.Millisecond))
	defer tick.Stop()
	var silence heartbeatWatch
	for {
		select {
		case <-tick.C:
			if !c.stopping && !c.aborted && silence.expired(c.beats.Load()) {
				k.Log.Error("verdict stopped sending heartbeats: aborting it", "pid", c.pid, "for", k.Silence)
				c.aborted, overdue = true, time.After(abortGrace)
				_ = unix.Kill(c.pid, unix.SIGABRT)
			}
		case <-k.children:
			if ws, ended := reap(c.pid); ended {
				k.drain(c)
				return k.classifyExit(c, ws)
			}
		case s := <-k.signals:
			if s == unix.SIGTERM || s == unix.SIGINT {
				stop(s.(syscall.Signal))
			} else {
				c.signal(s.(syscall.Signal))
			}
		case <-cancelled:
			cancelled = nil
			stop(unix.SIGTERM)
		case <-overdue:
			k.Log.Error("verdict did not stop in time: killing it", "pid", c.pid)
			if c.stopping {
				c.signal(unix.SIGKILL)
			} else {
				_ = unix.Kill(c.pid, unix.SIGKILL) // which counts as a crash
			}
		}
	}
}

// silenceTicks is how often a child is checked in the time it may be silent.
const silenceTicks = 30

// abortGrace is how long a child may take to end by SIGABRT, and to dump its goroutines.
const abortGrace = 5 * time.Second

// heartbeatWatch counts checks without a heartbeat. It counts checks, not time: if the keeper was stopped together with
// its child, as containers and machines are, it did not check.
type heartbeatWatch struct {
	beats int64
	ticks int
}

// expired says that a child that has sent heartbeats has stopped sending them.
func (s *heartbeatWatch) expired(beats int64) bool {
	if s.ticks++; beats != s.beats {
		s.beats, s.ticks = beats, 0
	}
	return beats > 0 && s.ticks >= silenceTicks
}

// signal sends a signal to the child, which is not reaped yet.
func (c *child) signal(s syscall.Signal) {
	c.signals = append(c.signals, s)
	_ = unix.Kill(c.pid, s) // harmless if it is a zombie
}

// drain reads what a child sent before it ended: it may be the socket that the next one needs.
func (k *keep) drain(c *child) {
	_ = c.link.SetReadDeadline(time.Now().Add(time.Second)) // a child of its own may still hold its end
	<-c.drained
	c.link.Close()
}

// classifyExit says whether a child's end was a crash, and otherwise which status to exit with.
func (k *keep) classifyExit(c *child, ws syscall.WaitStatus) (status int, crashed bool) {
	if !ws.Signaled() {
		return ws.ExitStatus(), false
	}
	if c.stopping || slices.Contains(c.signals, ws.Signal()) || slices.Contains(c.signals, unix.SIGQUIT) {
		return 128 + int(ws.Signal()), false
	}
	k.Log.Error("verdict crashed", "pid", c.pid, "signal", ws.Signal().String(), "core", ws.CoreDump(),
		"lived", time.Since(c.started).Round(time.Millisecond))
	return 0, true
}

// reap reaps all children that have ended, and says whether one of them has this pid. Others are orphans that the first
// process of a container inherits.
func reap(pid int) (status syscall.WaitStatus, ended bool) {
	for {
		var ws syscall.WaitStatus
		p, err := syscall.Wait4(-1, &ws, syscall.WNOHANG, nil)
		switch {
		case errors.Is(err, syscall.EINTR):
		case err != nil || p <= 0:
			return status, ended
		case p == pid:
			status, ended = ws, true
		}
	}
}

// waitForRestart waits before the next child is started, and says whether this process was told to stop meanwhile.
func (k *keep) waitForRestart(ctx context.Context, pause time.Duration) bool {
	timer := time.NewTimer(pause)
	defer timer.Stop()
	for {
		select { // first, and also if there is no pause at all
		case s := <-k.signals:
			if isTermination(s) {
				return true
			}
			continue
		default:
		}
		select {
		case <-ctx.Done():
			return true
		case s := <-k.signals:
			if isTermination(s) {
				return true
			}
		case <-k.children:
			reap(0)
		case <-timer.C:
			return false
		}
	}
}

// isTermination says whether a signal asks the keeper to stop.
func isTermination(s os.Signal) bool {
	return s == unix.SIGTERM || s == unix.SIGINT || s == unix.SIGQUIT
}

// backoff computes the pauses before restarts.
type backoff struct{ pause time.Duration }

const (
	firstPause = 100 * time.Millisecond
	maxPause   = 30 * time.Second
	// stableAfter is how long a child lives if its end has nothing to do with the crash before.
	stableAfter = time.Minute
)

// next returns the pause after a child that lived for so long.
func (b *backoff) next(lived time.Duration) time.Duration {
	if lived >= stableAfter {
		b.pause = 0
	}
	p := b.pause
	b.pause = min(max(2*p, firstPause), maxPause)
	return p
}

// connOf turns a file into a connection and closes the file.
func connOf(f *os.File) (*net.UnixConn, error) {
	defer f.Close()
	c, err := net.FileConn(f)
	if err != nil {
		return nil, err
	}
	u, ok := c.(*net.UnixConn)
	if !ok {
		c.Close()
		return nil, errors.New("not a unix socket")
	}
	return u, nil
}
