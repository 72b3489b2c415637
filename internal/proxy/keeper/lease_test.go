package keeper

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sync/errgroup"
	"golang.org/x/sys/unix"

	"github.com/verdict-proxy/verdict/internal/lab/labtest"
	"github.com/verdict-proxy/verdict/internal/system/testkit"
)

// proxy starts a process that wants the lease, and gives its own socket.
func proxy(t *testing.T, name string, env ...string) (p *process, socket string) {
	t.Helper()
	p = launch(t, "lease", append(env, "KEEPER_TEST_NAME="+name)...)
	return p, strings.Fields(p.expect("lease "))[1]
}

const newcomer = "KEEPER_TEST_NEWCOMER=1"

func (p *process) works(socket string) {
	p.t.Helper()
	if got := p.expect("working "); got != socket {
		p.t.Errorf("works with %s, should be %s", got, socket)
	}
}

// holding starts a proxy that works by a lease of its own name.
func holding(t *testing.T, env ...string) (name string, p *process, socket string) {
	t.Helper()
	name = randomName()
	p, socket = proxy(t, name, append(env, newcomer)...)
	p.works(socket)
	return name, p, socket
}

func checkHolder(t *testing.T, name string, p *process) {
	t.Helper()
	h, err := Holder(name)
	if err != nil || h.PID != p.cmd.Process.Pid || h.UID != os.Getuid() {
		t.Errorf("the holder is %v of user %d, %v; should be pid %d", h, h.UID, err, p.cmd.Process.Pid)
	}
}

// socketHere opens a netlink socket in this process.
func socketHere(t *testing.T) *os.File {
	t.Helper()
	s, err := openNetlink()
	labtest.Check(t, err)
	t.Cleanup(func() { s.Close() })
	return s
}

func TestTakingOver(t *testing.T) {
	name := randomName()
	if _, err := Holder(name); !errors.Is(err, ErrNoHolder) {
		t.Error(err)
	}
	a, socket := proxy(t, name, newcomer)
	a.works(socket)
	checkHolder(t, name, a)
	b, own := proxy(t, name, newcomer)
	if own == socket {
		t.Fatal("two processes with one socket")
	}
	b.expect("taking over from the running proxy")
	a.expect("told " + ErrHandedOver.Error())
	a.expect("resting")
	b.works(socket)
	a.expect("standing by")
	checkHolder(t, name, b)

	// The newcomer dies, however it does, and the one that stands by works on.
	b.signal(unix.SIGKILL)
	a.works(socket)
	checkHolder(t, name, a)

	// A proxy that comes without asking stands by.
	c, _ := proxy(t, name)
	c.expect("standing by")
	checkHolder(t, name, a)
	a.signal(unix.SIGTERM)
	a.expect("run ended: <nil>")
	c.expect("working ")

	// A proxy that ends with an error gives the lease up.
	d, _ := proxy(t, name)
	d.expect("standing by")
	c.order("end")
	c.expect("run ended: as told")
	d.expect("working ")
	checkHolder(t, name, d)
}

// Three take over from each other, and nobody takes it back.
func TestChainOfProxies(t *testing.T) {
	name, a, socket := holding(t)
	b, _ := proxy(t, name, newcomer)
	b.works(socket)
	a.expect("standing by")
	c, _ := proxy(t, name, newcomer)
	c.works(socket)
	b.expect("standing by")
	a.expect("standing by") // behind c now
	checkHolder(t, name, c)
	b.signal(unix.SIGTERM)
	if b.status() != 0 {
		t.Error("the standby does not end on demand")
	}
	c.signal(unix.SIGTERM)
	a.works(socket)
}

// Many newcomers at once: one of them at a time works, always with the socket that came first, and none is lost.
func TestManyNewcomersAtOnce(t *testing.T) {
	name := randomName()
	ctx, stop := context.WithCancel(t.Context())
	defer stop()
	first := socketHere(t)
	id := identity(first)
	var atWork, calls atomic.Int32
	work := func(ctx context.Context, socket *os.File) error {
		if n := atWork.Add(1); n != 1 {
			t.Errorf("%d at work", n)
		}
		if got := identity(socket); got != id {
			t.Errorf("works with %s, should be %s", got, id)
		}
		calls.Add(1)
		<-ctx.Done()
		atWork.Add(-1)
		return nil
	}
	var group errgroup.Group
	run := func(socket *os.File) {
		group.Go(func() error {
			return (&Lease{Name: name, Socket: socket, TakeOver: true}).Run(ctx, work)
		})
	}
	run(first)
	testkit.Eventually(t, deadline, "the first one works", func() bool { return calls.Load() == 1 })
	for range 12 {
		s, err := openNetlink()
		labtest.Check(t, err)
		run(s)
	}
	testkit.Eventually(t, deadline, "each of them has worked", func() bool { return calls.Load() == 13 })
	stop()
	labtest.Check(t, group.Wait())
	if calls.Load() < 13 {
		t.Error(calls.Load())
	}
	if _, err := Holder(name); !errors.Is(err, ErrNoHolder) {
		t.Error(err)
	}
}

func TestEviction(t *testing.T) {
	name, a, socket := holding(t)
	b, _ := proxy(t, name, newcomer)
	b.works(socket)
	a.expect("standing by")
	var c *process
	lease := Lease{Name: name}
	labtest.Check(t, lease.Evict(t.Context(), func(ctx context.Context, got *os.File) error {
		if identity(got) != strings.TrimPrefix(socket, "socket=") {
			t.Errorf("got %s, should be %s", identity(got), socket)
		}
		for _, p := range []*process{a, b} {
			p.expect("run ended: " + ErrEvicted.Error())
			if status := p.status(); status != 0 {
				t.Errorf("status %d", status)
			}
		}
		c, socket = proxy(t, name, newcomer)
		c.expect("taking over from the running proxy") // this one
		d, _ := proxy(t, name)
		d.expect("run ended: " + ErrEvicted.Error())
		return nil
	}))
	c.works(socket) // when it is over
	checkHolder(t, name, c)
}

func TestEvictionWithoutHolder(t *testing.T) {
	lease := Lease{Name: randomName()}
	called := false
	labtest.Check(t, lease.Evict(t.Context(), func(_ context.Context, socket *os.File) error {
		called = socket == nil
		return nil
	}))
	if !called {
		t.Error("not called, or with a socket from nowhere")
	}
	err := lease.Evict(t.Context(), func(context.Context, *os.File) error { return unix.EPERM })
	if !errors.Is(err, unix.EPERM) {
		t.Error(err)
	}
}

func TestHolderThatDoesNotEnd(t *testing.T) {
	name, a, socket := holding(t, "KEEPER_TEST_STUBBORN=1")
	b, _ := proxy(t, name, newcomer, "KEEPER_TEST_PATIENCE=200ms")
	want := fmt.Sprintf("keeper: pid %d holds the lease and did not hand over within 200ms", a.cmd.Process.Pid)
	if got := b.expect("run ended: "); got != want {
		t.Error(got)
	}
	b.status()
	// It notices that nobody is there any more, and works on; the next one may try again.
	a.order("yield")
	a.expect("has gone")
	a.works(socket)
	checkHolder(t, name, a)
	c, _ := proxy(t, name, newcomer)
	a.expect("told ")
	a.order("yield")
	c.works(socket)
}

func TestHolderThatDoesNotAnswer(t *testing.T) {
	name, a, _ := holding(t)
	a.signal(unix.SIGSTOP)
	b, _ := proxy(t, name, newcomer, "KEEPER_TEST_PATIENCE=200ms")
	if got := b.expect("run ended: "); !strings.Contains(got, fmt.Sprintf("pid %d holds the lease", a.cmd.Process.Pid)) {
		t.Error(got)
	}
	a.signal(unix.SIGCONT)

	// A name that is bound, and nobody listens.
	fd, err := unix.Socket(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC, 0)
	labtest.Check(t, err)
	defer unix.Close(fd)
	name = randomName()
	labtest.Check(t, unix.Bind(fd, &unix.SockaddrUnix{Name: "@" + name}))
	told := make(chan string, 1)
	lease := Lease{Name: name, TakeOver: true, HandOverTimeout: 100 * time.Millisecond, Log: slog.New(said{told})}
	labtest.Check(t, lease.Run(t.Context(), func(context.Context, *os.File) error { return nil }))
	if got := <-told; !strings.Contains(got, "without the lease") {
		t.Error(got)
	}
}

// askHere sends requests to a lease, as another version of this program might.
func askHere(t *testing.T, name, request string, files ...syscall.Conn) *net.UnixConn {
	t.Helper()
	m, _, err := authenticate(t.Context(), name, time.Now().Add(deadline))
	labtest.Check(t, err)
	t.Cleanup(func() { m.Close() })
	labtest.Check(t, m.SetReadDeadline(time.Now().Add(deadline)))
	labtest.Check(t, send(m.UnixConn, m.secret+" "+request, files...))
	return m.UnixConn
}

func TestUnknownRequests(t *testing.T) {
	name, a, socket := holding(t)
	for _, request := range []string{"dance", "x", "", strings.Repeat("x", 5000), requestHandOver + " "} {
		text, files, err := receive(askHere(t, name, request))
		if len(files) > 0 || !strings.HasPrefix(text, answerRefuse) && (err == nil || len(request) < maxText) {
			t.Errorf("%.20q: %q, %v", request, text, err)
		}
	}
	text, _, err := receive(askHere(t, name, requestHandOver, socketHere(t))) // a socket that nobody asked for
	if !strings.HasPrefix(text, answerRefuse) {
		t.Error(text, err)
	}
	conn := askHere(t, name, requestHandOver)
	conn.Close() // it has changed its mind, perhaps after the lease was sent
	a.expect("resting")
	a.works(socket)
	checkHolder(t, name, a)
}

// A holder crashed, and somebody with a socket of his own was first to take the lease. The standby knows better.
func TestStandbyBringsTheSocket(t *testing.T) {
	for _, owner := range []string{"nobody knows", "neither", "holder", "standby"} {
		t.Run(owner, func(t *testing.T) {
			name := randomName()
			ctx, stop := context.WithCancel(t.Context())
			defer stop()
			mine, theirs := socketHere(t), socketHere(t)
			mineID, theirsID := identity(mine), identity(theirs)
			works := make(chan string, 10)
			holder := Lease{Name: name, Socket: mine, TakeOver: true}
			switch owner {
			case "standby":
				holder.OwnsTables = func(f *os.File) bool { return identity(f) == theirsID }
			case "neither":
				holder.OwnsTables = func(*os.File) bool { return false }
			case "holder":
				holder.OwnsTables = func(f *os.File) bool { return identity(f) == mineID }
			}
			var group errgroup.Group
			group.Go(func() error {
				return holder.Run(ctx, func(ctx context.Context, socket *os.File) error {
					works <- identity(socket)
					<-ctx.Done()
					return ctx.Err()
				})
			})
			if got := <-works; got != mineID {
				t.Errorf("works with %s at first", got)
			}
			standing := make(chan string, 1)
			standby := Lease{Name: name, Socket: theirs, Log: slog.New(said{standing})}
			group.Go(func() error {
				return standby.Run(ctx, func(context.Context, *os.File) error { return nil })
			})
			<-standing
			want := mineID
			if owner == "standby" {
				want = theirsID
				if got := <-works; got != want {
					t.Errorf("works with %s, should be %s", got, want)
				}
			}
			// Who asks is given what it works with.
			text, files, err := receive(askHere(t, name, requestHandOver))
			defer closeFiles(files)
			if text != answerTake || len(files) != 2 || identity(files[1]) != want {
				t.Errorf("%q with %d files, %v", text, len(files), err)
			}
			stop()
			labtest.Check(t, group.Wait())
		})
	}
}

// said gives the messages of a log.
type said struct{ to chan<- string }

func (s said) Enabled(context.Context, slog.Level) bool { return true }
func (s said) WithAttrs([]slog.Attr) slog.Handler       { return s }
func (s said) WithGroup(string) slog.Handler            { return s }
func (s said) Handle(_ context.Context, r slog.Record) error {
	select {
	case s.to <- r.Message:
	default:
	}
	return nil
}

// A newcomer may have the right socket itself, out of systemd's store, and the holder a useless one.
func TestNewcomerKnowsBetter(t *testing.T) {
	name, a, socket := holding(t)
	mine := socketHere(t)
	id := identity(mine)
	owns := func(f *os.File) bool { return identity(f) == id }
	lease := Lease{Name: name, Socket: mine, TakeOver: true, OwnsTables: owns}
	labtest.Check(t, lease.Run(t.Context(), func(_ context.Context, socket *os.File) error {
		if got := identity(socket); got != id {
			t.Errorf("works with %s, should be %s", got, id)
		}
		return nil
	}))
	a.works(socket)
}

// There may be no socket at all, on kernels where tables have no owner.
func TestWithoutSockets(t *testing.T) {
	name := randomName()
	ctx, stop := context.WithCancel(t.Context())
	defer stop()
	var group errgroup.Group
	works := make(chan bool, 10)
	for i := range 2 {
		group.Go(func() error {
			return (&Lease{Name: name, TakeOver: i > 0}).Run(ctx, func(ctx context.Context, socket *os.File) error {
				works <- socket == nil
				<-ctx.Done()
				return nil
			})
		})
		if !<-works {
			t.Error("a socket from nowhere")
		}
	}
	stop()
	labtest.Check(t, group.Wait())
}

// A proxy without rights neither takes over nor stands by; and where one has the name, those with rights work without
// it.
func TestProxiesWithoutRights(t *testing.T) {
	for _, uid := range strangers() {
		t.Run(fmt.Sprint("asks as user ", uid), func(t *testing.T) {
			name, _, socket := holding(t)
			for _, env := range []string{newcomer, "x=y"} {
				if got := weak(t, name, uid, env).expect("run ended: "); got != errNotPermitted.Error() {
					t.Error(got)
				}
			}
			b, _ := proxy(t, name, newcomer)
			b.works(socket)
		})
		t.Run(fmt.Sprint("holds as user ", uid), func(t *testing.T) {
			t.Parallel()
			name := randomName()
			thief := weak(t, name, uid, "")
			thief.expect("working ")
			want := fmt.Sprintf("of user %d, which is not a Verdict proxy", uid&^ownNamespace)
			if _, err := Holder(name); err == nil || !strings.Contains(err.Error(), want) {
				t.Error(err)
			}
			lease := Lease{Name: name, HandOverTimeout: 100 * time.Millisecond}
			called := false
			labtest.Check(t, lease.Evict(t.Context(), func(context.Context, *os.File) error {
				called = true
				return nil
			}))
			if !called {
				t.Error("nobody can be evicted")
			}
			a, socket := proxy(t, name, newcomer, "KEEPER_TEST_PATIENCE=100ms")
			a.expect("running without the lease")
			a.works(socket)
			thief.signal(unix.SIGKILL)
			a.expect("acquired the lease")
			testkit.Eventually(t, deadline, "it has the lease", func() bool {
				h, err := Holder(name)
				return err == nil && h.PID == a.cmd.Process.Pid
			})
			b, _ := proxy(t, name, newcomer)
			b.works(socket) // with that of a
			if n := len(a.told("resting")); n > 1 {
				t.Errorf("the proxy rested %d times", n)
			}
		})
	}
}

// weak is a proxy without rights.
func weak(t *testing.T, name string, uid uint32, env string) *process {
	cmd := prepare("weak", env, "KEEPER_TEST_NAME="+name)
	disguise(cmd, uid)
	return begin(t, cmd, cmd.Start)
}

// hasUser says whether this user namespace knows a user.
func hasUser(uid int) bool {
	b, err := os.ReadFile("/proc/self/uid_map")
	var inside, outside, size int
	_, e := fmt.Sscan(string(b), &inside, &outside, &size)
	return err == nil && e == nil && inside+size > uid
}

// The same name in two network namespaces is two leases, as the tables are.
func TestNamesBelongToNetworkNamespaces(t *testing.T) {
	net, name := labtest.NewNet(t), randomName()
	for _, node := range []string{"node-1", "node-2"} {
		h := labtest.NewHost(t, net, node)
		cmd := h.Command("/proc/self/exe")
		cmd.Cmd.Env = prepare("lease", newcomer, "KEEPER_TEST_NAME="+name).Env
		p := begin(t, cmd.Cmd, cmd.Start)
		p.works(strings.Fields(p.expect("lease "))[1])
	}
	if _, err := Holder(name); !errors.Is(err, ErrNoHolder) {
		t.Error(err)
	}
}

// A process in another pid namespace has no id here, and can be talked to nevertheless.
func TestHolderInAnotherContainer(t *testing.T) {
	name, _, socket := holding(t)
	cmd := prepare("lease", newcomer, "KEEPER_TEST_NAME="+name)
	cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: unix.CLONE_NEWPID}
	b := begin(t, cmd, cmd.Start)
	if got := b.expect("taking over from the running proxy"); !strings.Contains(got, "a process in another container") {
		t.Error(got)
	}
	b.works(socket)
	checkHolder(t, name, b)
}
