// Package keeper lets a netlink socket outlive the proxy that writes through it.
//
// A table with the flags owner and persist can be changed only through the socket that owns it, as long as any process
// holds that socket. So the socket must survive a crash of the proxy, its restart, and its replacement by another one.
// There are three concerns:
//
//   - Keep is a parent process that holds the socket and starts the proxy again after a crash.
//   - Inherited and Held are the proxy's side: the socket it was given by that parent, or by systemd.
//   - Seat is the place of the one proxy of a network namespace, and how another proxy takes it over.
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

// What the keeper tells its child.
const (
	// envSocket is the number of the descriptor that is the socket.
	envSocket = "VERDICT_KEPT_SOCKET"
	// envKeeper is that of a connection to the keeper.
	envKeeper = "VERDICT_KEEPER"
	// envPlace is that of the place, if there is one.
	envPlace = "VERDICT_KEPT_PLACE"
	// envRestarts is how many children there were before this one.
	envRestarts = "VERDICT_KEEPER_RESTARTS"
)

// The child's descriptors, behind its standard files.
const (
	socketFD = 3
	keeperFD = 4
	placeFD  = 5
)

// What the child tells its keeper.
const (
	// messageKeep comes with the socket that the keeper shall hold from now on.
	messageKeep = "keep"
	// messagePlace comes with the place that it shall hold; messageNoPlace says that the place is another's.
	messagePlace   = "place"
	messageNoPlace = "no place"
	// messageStandby says how many stand by.
	messageStandby = "standby "
	// messageBeat says that the child runs.
	messageBeat = "beat"
)

// Options are what Keep needs. Only Socket is required.
type Options struct {
	// Socket is what is kept. It belongs to Keep from then on.
	Socket *os.File
	// Place, if not nil, is the place of the one proxy that outlived a former process. It belongs to Keep, too.
	Place *os.File
	// Path, Args and Env are the child's program, its arguments without the name, and its environment; by default those of
	// this process.
	Path string
	Args []string
	Env  []string
	// Grace is how long the child may take to end, by default 30 seconds.
	Grace time.Duration
	// Silence is how long a child that has told of itself once (Held.Beat) may be silent, by default a minute. Then
	// it is ended by SIGABRT, and by SIGKILL if that does not help, and started again.
	Silence time.Duration
	// Log is told of crashes.
	Log *slog.Logger
}

// Keep holds a socket while a child works with it. It returns when the child has ended by itself or on demand, with the
// exit status for this process; a child that crashes is started again and gets the same socket.
//
//   - A child that ends by itself with an exit status ends Keep, which returns that status. What is wrong with flags or
//     rights would be wrong again.
//   - A child that is killed by a signal nobody sent through the keeper (SIGKILL, out of memory, SIGSEGV, a panic) is started
//     again: at once the first time, then after pauses that begin at 100 ms and double up to 30 s. A child that has lived for
//     a minute has the pauses begin anew. A panic of Go ends with status 2, like any program that exits with 2, unless
//     GOTRACEBACK is crash: then it is SIGABRT. So the child gets that, if GOTRACEBACK is not set already.
//   - SIGTERM, SIGINT, SIGQUIT, SIGHUP, SIGUSR1 and SIGUSR2 are passed on. After SIGTERM, SIGINT or SIGQUIT, or the end of
//     ctx, which is SIGTERM to the child, the child has Grace to end, and is killed then. Keep returns its status, 128 plus
//     the number of the signal if one ended it, as shells do. SIGQUIT is for a dump of the child's stacks.
//   - If the keeper itself is killed, the child is told by the end of their connection (Held.Orphaned).
//   - A child that runs no more, such as one that was stopped, is ended like that after Silence.
//   - Between two children the keeper itself has the place of the one proxy, if its child had it: nobody else can
//     take the name meanwhile, and whoever wants the place gets it at once. If somebody stood by when the child
//     crashed, the keeper waits a moment for him.
//   - The child may send another socket to be kept in place of the first one (Held.Keep): it has taken over from a former
//     proxy. A restart gets that one.
//
// The child is in a process group of its own: a ^C on the terminal comes to it once, by the keeper.
//
// The error is that the first child could not be started, and nothing else. Keep reaps all children of this process,
// since it may be the first process of a container, which orphans are given to. So nothing else in this process may
// start any. It looks for ended children and sends signals in the same goroutine: a pid cannot get another meaning in
// between.
func Keep(ctx context.Context, o Options) (status int, err error) {
	k, err := newKeep(o)
	if err != nil {
		return 0, err
	}
	defer k.close()
	var pauses backoff
	for restarts := 0; ctx.Err() == nil; restarts++ {
		born := time.Now()
		c, err := k.start(restarts)
		switch {
		case err == nil:
			if status, crashed := k.attend(ctx, c); !crashed {
				return status, nil
			}
		case restarts == 0:
			return 0, fmt.Errorf("keeper: start %s: %w", k.Path, err)
		default:
			// Perhaps the program is being replaced. To give up would be to give up the socket.
			k.Log.Error("verdict could not be started again", "err", err)
		}
		pause := pauses.next(time.Since(born))
		k.Log.Info("verdict will be started again; its socket is kept", "in", pause)
		if k.standsBy() {
			pause = max(pause, standbyPause)
		}
		stop := k.offer(pause)
		told := k.told(ctx, pause)
		if evicted := stop(); told || evicted {
			break
		}
	}
	return 0, nil
}

// standbyPause is how long who stands by has to take the place of a proxy that crashed.
const standbyPause = time.Second

type keep struct {
	Options
	signals  chan os.Signal // to be passed on
	children chan os.Signal // SIGCHLD: one is enough, since all are looked at

	mu     sync.Mutex
	socket *os.File
	place  *os.File // nil if the child does not have it
	// waiters is how many stood by when the child told last.
	waiters int
}

// passed are the signals that the child gets. Those that stop and continue a job are not among them: they should do
// that to the keeper, which a shell looks at.
var passed = []os.Signal{unix.SIGTERM, unix.SIGINT, unix.SIGQUIT, unix.SIGHUP, unix.SIGUSR1, unix.SIGUSR2}

func newKeep(o Options) (*keep, error) {
	if o.Socket == nil {
		return nil, errors.New("keeper: there is no socket to keep")
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
	k := &keep{Options: o, socket: o.Socket, place: o.Place}
	k.signals, k.children = make(chan os.Signal, 16), make(chan os.Signal, 1)
	signal.Notify(k.signals, passed...)
	signal.Notify(k.children, unix.SIGCHLD)
	return k, nil
}

func (k *keep) close() {
	signal.Stop(k.signals)
	signal.Stop(k.children)
	k.socket.Close()
	closeFile(k.place)
}

// standsBy says whether somebody is there to take the place.
func (k *keep) standsBy() bool {
	k.mu.Lock()
	defer k.mu.Unlock()
	return k.place != nil && k.waiters > 0
}

// offer has whoever wants the place get it, until stop is called. That says whether the place was taken from all.
func (k *keep) offer(pause time.Duration) (stop func() (evicted bool)) {
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.place == nil || pause == 0 {
		return func() bool { return false }
	}
	s := Seat{Log: k.Log, Socket: duplicate(k.socket)}
	place := duplicate(k.place)
	if s.Socket == nil || place == nil {
		closeFile(place)
		s.close()
		return func() bool { return false }
	}
	l, err := listenerOf(place)
	if err != nil {
		k.Log.Error("nobody can take over until verdict is started again", "err", err)
		s.close()
		return func() bool { return false }
	}
	s.Name = strings.TrimPrefix(l.Addr().String(), "@")
	s.defaults()
	ctx, cancel := context.WithCancel(context.Background())
	result := make(chan error)
	go func() {
		defer s.close()
		p := s.take(l)
		p.offered = true
		result <- p.occupy(ctx, func(ctx context.Context, _ *os.File) error {
			<-ctx.Done()
			return nil
		})
	}()
	return func() bool {
		cancel()
		err := <-result
		if err != nil { // it is another's
			k.holdPlace(nil)
		}
		return errors.Is(err, ErrEvicted)
	}
}

// duplicate gives a descriptor of its own for a socket, nil if there is none left.
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

// child is a running one.
type child struct {
	pid  int
	born time.Time
	link *net.UnixConn
	// heard is closed when all that the child said has been read.
	heard chan struct{}
	// beats counts what it told of itself.
	beats atomic.Int64
	// stopping says that it was asked to end, stuck that it was ended because it was silent, sent what it was sent.
	stopping, stuck bool
	sent            []syscall.Signal
}

// start starts a child. The connection to it is a pair of sockets, not a pipe, so that it can send another socket; that
// it ends with its holder, they have in common.
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
	c := &child{born: time.Now(), link: link, heard: make(chan struct{})}
	k.mu.Lock()
	k.waiters = 0
	kept := filesOf(k.socket)
	if k.place != nil {
		kept = append(kept, k.place)
	}
	err = withDescriptors(kept, nil, func(fds []int) error {
		files := []uintptr{0, 1, 2, socketFD: uintptr(fds[0]), keeperFD: uintptr(pair[1])}
		if k.place != nil {
			files = append(files, uintptr(fds[1])) // placeFD
		}
		env := childEnv(k.Env, restarts, k.place != nil)
		c.pid, err = syscall.ForkExec(k.Path, append([]string{os.Args[0]}, k.Args...),
			&syscall.ProcAttr{Env: env, Files: files, Sys: &syscall.SysProcAttr{Setpgid: true}})
		return err
	})
	k.mu.Unlock()
	if err != nil {
		link.Close()
		return nil, err
	}
	go k.listen(c)
	return c, nil
}

// childEnv is the environment of a child.
func childEnv(env []string, restarts int, place bool) []string {
	env = slices.DeleteFunc(slices.Clone(env), func(v string) bool {
		name, _, _ := strings.Cut(v, "=")
		return name == envSocket || name == envKeeper || name == envPlace || name == envRestarts
	})
	if !slices.ContainsFunc(env, func(v string) bool { return strings.HasPrefix(v, "GOTRACEBACK=") }) {
		env = append(env, "GOTRACEBACK=crash")
	}
	if place {
		env = append(env, fmt.Sprintf("%s=%d", envPlace, placeFD))
	}
	return append(env, fmt.Sprintf("%s=%d", envSocket, socketFD), fmt.Sprintf("%s=%d", envKeeper, keeperFD),
		fmt.Sprintf("%s=%d", envRestarts, restarts))
}

// listen reads what the child says until it ends.
func (k *keep) listen(c *child) {
	defer close(c.heard)
	for {
		text, files, err := receive(c.link)
		if err != nil {
			return
		}
		k.learn(c, text, files)
	}
}

// learn takes note of what the child says.
func (k *keep) learn(c *child, text string, files []*os.File) {
	waiters, standby := strings.CutPrefix(text, messageStandby)
	switch {
	case text == messageKeep && len(files) == 1:
		k.hold(files[0])
		return
	case text == messagePlace && len(files) == 1:
		k.holdPlace(files[0])
		return
	case text == messageNoPlace:
		k.holdPlace(nil)
	case standby:
		k.mu.Lock()
		k.waiters, _ = strconv.Atoi(waiters)
		k.mu.Unlock()
	case text == messageBeat:
		c.beats.Add(1)
	}
	closeFiles(files)
}

// holdPlace keeps another place in place of the one so far, or none.
func (k *keep) holdPlace(place *os.File) {
	k.mu.Lock()
	defer k.mu.Unlock()
	closeFile(k.place)
	k.place = place
}

// hold keeps another socket in place of the one so far.
func (k *keep) hold(socket *os.File) {
	k.mu.Lock()
	defer k.mu.Unlock()
	if same(k.socket, socket) {
		socket.Close()
		return
	}
	k.socket.Close()
	k.socket = socket
}

// attend waits for the child's end and says whether it was a crash, else with which status to exit.
func (k *keep) attend(ctx context.Context, c *child) (status int, crashed bool) {
	told := ctx.Done()
	var late <-chan time.Time
	stop := func(s syscall.Signal) {
		if !c.stopping { // twice, it would look like a user in a hurry
			c.stopping, late = true, time.After(k.Grace)
			c.signal(s)
		}
	}
	tick := time.NewTicker(max(k.Silence/silenceTicks, time.Millisecond))
	defer tick.Stop()
	var heard silence
	for {
		select {
		case <-tick.C:
			if !c.stopping && !c.stuck && heard.lasts(c.beats.Load()) {
				k.Log.Error("verdict is silent and is ended", "pid", c.pid, "for", k.Silence)
				c.stuck, late = true, time.After(abortGrace)
				_ = unix.Kill(c.pid, unix.SIGABRT)
			}
		case <-k.children:
			if ws, ended := reap(c.pid); ended {
				k.bury(c)
				return k.judge(c, ws)
			}
		case s := <-k.signals:
			if s == unix.SIGTERM || s == unix.SIGINT {
				stop(s.(syscall.Signal))
			} else {
				c.signal(s.(syscall.Signal))
			}
		case <-told:
			told = nil
			stop(unix.SIGTERM)
		case <-late:
			k.Log.Error("verdict did not end and is killed", "pid", c.pid)
			if c.stopping {
				c.signal(unix.SIGKILL)
			} else {
				_ = unix.Kill(c.pid, unix.SIGKILL) // which counts as a crash
			}
		}
	}
}

// silenceTicks is how often a child is looked at in the time it may be silent.
const silenceTicks = 30

// abortGrace is how long a child may take to end by SIGABRT, and to say what its goroutines were doing.
const abortGrace = 5 * time.Second

// silence counts how often nothing was heard. It counts looks, not time: who was stopped together with its child, as
// containers and machines are, has not looked.
type silence struct {
	beats int64
	ticks int
}

// lasts says that a child which has told of itself does so no more.
func (s *silence) lasts(beats int64) bool {
	if s.ticks++; beats != s.beats {
		s.beats, s.ticks = beats, 0
	}
	return beats > 0 && s.ticks >= silenceTicks
}

// signal sends a signal to the child, which is not reaped yet.
func (c *child) signal(s syscall.Signal) {
	c.sent = append(c.sent, s)
	_ = unix.Kill(c.pid, s) // a zombie does not mind
}

// bury takes leave of a child that has ended. What it sent before is read first: it may be the socket that the next one
// needs.
func (k *keep) bury(c *child) {
	_ = c.link.SetReadDeadline(time.Now().Add(time.Second)) // if a child of its own has got hold of its end
	<-c.heard
	c.link.Close()
}

// judge says what a child's end means.
func (k *keep) judge(c *child, ws syscall.WaitStatus) (status int, crashed bool) {
	if !ws.Signaled() {
		return ws.ExitStatus(), false
	}
	if c.stopping || slices.Contains(c.sent, ws.Signal()) || slices.Contains(c.sent, unix.SIGQUIT) {
		return 128 + int(ws.Signal()), false
	}
	k.Log.Error("verdict crashed", "pid", c.pid, "signal", ws.Signal().String(), "core", ws.CoreDump(),
		"lived", time.Since(c.born).Round(time.Millisecond))
	return 0, true
}

// reap takes note of all children that have ended, and says whether one of them is the one with this pid. Others are
// orphans that were given to the first process of a container.
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

// told waits between two children, and says whether this process was told to end meanwhile.
func (k *keep) told(ctx context.Context, pause time.Duration) bool {
	timer := time.NewTimer(pause)
	defer timer.Stop()
	for {
		select { // first, and also if there is no pause at all
		case s := <-k.signals:
			if ends(s) {
				return true
			}
			continue
		default:
		}
		select {
		case <-ctx.Done():
			return true
		case s := <-k.signals:
			if ends(s) {
				return true
			}
		case <-k.children:
			reap(0)
		case <-timer.C:
			return false
		}
	}
}

// ends says whether a signal asks for an end.
func ends(s os.Signal) bool { return s == unix.SIGTERM || s == unix.SIGINT || s == unix.SIGQUIT }

// backoff gives the pauses before restarts.
type backoff struct{ pause time.Duration }

const (
	firstPause = 100 * time.Millisecond
	mostPause  = 30 * time.Second
	// longLife is how long a child lives that has nothing to do with the crash before.
	longLife = time.Minute
)

// next gives the pause after a child that lived for so long.
func (b *backoff) next(lived time.Duration) time.Duration {
	if lived >= longLife {
		b.pause = 0
	}
	p := b.pause
	b.pause = min(max(2*p, firstPause), mostPause)
	return p
}

// connOf makes a connection of a file, which is closed.
func connOf(f *os.File) (*net.UnixConn, error) {
	defer f.Close()
	c, err := net.FileConn(f)
	if err != nil {
		return nil, err
	}
	u, ok := c.(*net.UnixConn)
	if !ok {
		c.Close()
		return nil, errors.New("no unix socket")
	}
	return u, nil
}
