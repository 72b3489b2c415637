package keeper

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"runtime"
	"strings"
	"syscall"
	"testing"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/verdict-proxy/verdict/internal/lab/labtest"
	"github.com/verdict-proxy/verdict/internal/system/testkit"
)

// A stranger is a process without the right to change nf_tables: user 0 with no capability, as a hostNetwork pod has
// it, or another user, or one with all capabilities in a user namespace of its own. It begins anew without
// capabilities before anything else runs; user 0 would get them back from exec.
func init() {
	role := os.Getenv(envRole)
	if role != "stranger" && role != "weak" || os.Getenv("KEEPER_TEST_DROPPED") != "" {
		return
	}
	runtime.LockOSThread()
	if os.Getuid() == 0 {
		const noRoot = 1 // SECBIT_NOROOT
		if err := unix.Prctl(unix.PR_SET_SECUREBITS, noRoot, 0, 0, 0); err != nil {
			panic(err)
		}
	}
	header := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
	var none [2]unix.CapUserData
	if err := unix.Capset(&header, &none[0]); err != nil {
		panic(err)
	}
	panic(unix.Exec("/proc/self/exe", os.Args, append(os.Environ(), "KEEPER_TEST_DROPPED=1")))
}

// strangerMain does to the lease KEEPER_TEST_NAME what it is told.
func strangerMain() int {
	name := &unix.SockaddrUnix{Name: "@" + os.Getenv("KEEPER_TEST_NAME")}
	tell("stranger uid=%d", os.Getuid())
	for c := range commands() {
		verb, arg, _ := strings.Cut(c, " ")
		switch verb {
		case "say":
			tell("heard %s", strangerSays(name, arg))
		case "bind":
			tell("bound %v", strangerBinds(name))
		case "flood":
			var n int
			fmt.Sscan(arg, &n)
			tell("flooding %d", strangerFloods(name, n))
		}
	}
	return 0
}

func strangerConnects(name unix.Sockaddr) (int, error) {
	fd, err := unix.Socket(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return -1, err
	}
	wait := unix.NsecToTimeval(int64(2 * time.Second))
	_ = unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_SNDTIMEO, &wait)
	_ = unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &wait)
	if err := unix.Connect(fd, name); err != nil {
		unix.Close(fd)
		return -1, err
	}
	return fd, nil
}

// strangerSays gives all that it is answered, and how many descriptors it got.
func strangerSays(name unix.Sockaddr, text string) string {
	fd, err := strangerConnects(name)
	if err != nil {
		return err.Error()
	}
	_ = unix.Send(fd, []byte(text), unix.MSG_NOSIGNAL)
	descriptors, said := 0, ""
	for {
		b, oob := make([]byte, 1000), make([]byte, 1000)
		n, oobn, _, _, err := unix.Recvmsg(fd, b, oob, 0)
		messages, _ := unix.ParseSocketControlMessage(oob[:max(oobn, 0)])
		for i := range messages {
			fds, _ := unix.ParseUnixRights(&messages[i])
			descriptors += len(fds)
		}
		if err != nil || n == 0 {
			return fmt.Sprintf("%d descriptors, %q", descriptors, said)
		}
		said += string(b[:n])
	}
}

// strangerBinds tries for a while, and never lets go.
func strangerBinds(name unix.Sockaddr) error {
	fd, err := unix.Socket(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return err
	}
	tell("binding")
	for end := time.Now().Add(2 * time.Second); time.Now().Before(end); {
		if err = unix.Bind(fd, name); err == nil {
			return unix.Listen(fd, 100)
		}
	}
	unix.Close(fd)
	return err
}

// strangerFloods makes connections and talks on them until it is killed, with up to n open at a time.
func strangerFloods(name unix.Sockaddr, n int) int {
	limit := unix.Rlimit{Cur: 10000, Max: 10000}
	_ = unix.Setrlimit(unix.RLIMIT_NOFILE, &limit)
	var open []int
	for made := 0; ; made++ {
		if made == n {
			tell("flooding")
		}
		fd, err := strangerConnects(name)
		if err != nil {
			continue
		}
		if made%2 == 0 {
			_ = unix.Send(fd, []byte("verdict/1 wait"), unix.MSG_NOSIGNAL)
		}
		if open = append(open, fd); len(open) > n {
			unix.Close(open[0])
			open = open[1:]
		}
	}
}

func newStranger(t *testing.T, name string, uid uint32) *process {
	t.Helper()
	cmd := prepare("stranger", "KEEPER_TEST_NAME="+name)
	disguise(cmd, uid)
	p := begin(t, cmd, cmd.Start)
	p.expect("stranger ")
	return p
}

// ownNamespace stands for user 0 of a user namespace of its own.
const ownNamespace = 1 << 31

// strangers are the users that a stranger can be here.
func strangers() []uint32 {
	if hasUser(65534) {
		return []uint32{0, ownNamespace, 65534}
	}
	return []uint32{0, ownNamespace}
}

// disguise has a stranger be a user.
func disguise(cmd *exec.Cmd, uid uint32) {
	switch uid {
	case 0:
	case ownNamespace:
		self := []syscall.SysProcIDMap{{Size: 1}}
		cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: unix.CLONE_NEWUSER, UidMappings: self, GidMappings: self}
		cmd.Env = append(cmd.Env, "KEEPER_TEST_DROPPED=1")
	default:
		cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: uid, Gid: uid}}
	}
}

// Nothing that a stranger says gives it a descriptor, ends the proxy, or keeps it waiting.
func TestStrangerSays(t *testing.T) {
	for _, uid := range strangers() {
		for _, text := range []string{
			"verdict/1 evict", "verdict/1 hand over", "verdict/1 wait",
			"verdict/2 evict", "verdict/2 hand over", "evict", "",
		} {
			name, a, socket := holding(t)
			s := newStranger(t, name, uid)
			s.order("say " + text)
			if got := s.expect("heard "); !strings.HasPrefix(got, "0 descriptors") {
				t.Errorf("user %d says %q: %s", uid, text, got)
			}
			checkHolder(t, name, a)
			b, _ := proxy(t, name, newcomer)
			b.works(socket)
			a.expect("standing by")
			if n := len(a.told("told ")); n != 1 {
				t.Errorf("user %d says %q: the proxy was told to end %d times", uid, text, n)
			}
		}
	}
}

// told gives what a process has said so far that holds a text.
func (p *process) told(text string) (lines []string) {
	for len(p.lines) > 0 {
		p.said = append(p.said, <-p.lines)
	}
	for _, line := range p.said {
		if strings.Contains(line, text) {
			lines = append(lines, line)
		}
	}
	return lines
}

// Thousands of connections of strangers, open and new ones, keep no newcomer out, and are no news each.
func TestFloodOfStrangers(t *testing.T) {
	for _, uid := range strangers() {
		name, a, socket := holding(t)
		for range 2 {
			s := newStranger(t, name, uid)
			s.order("flood 3000")
			s.expect("flooding")
		}
		b, _ := proxy(t, name, newcomer)
		b.works(socket)
		if n := len(a.told("level=WARN")); n > 5 {
			t.Errorf("user %d: %d lines", uid, n)
		}
		lease := Lease{Name: name}
		labtest.Check(t, lease.Evict(t.Context(), func(_ context.Context, _ *os.File) error { return nil }))
		b.expect("run ended: " + ErrEvicted.Error())
	}
}

// kept starts a keeper whose child wants the lease.
func kept(t *testing.T, name string, env ...string) *process {
	t.Helper()
	return launch(t, "keeper", append(env, "KEEPER_TEST_CHILD=lease", "KEEPER_TEST_NAME="+name, newcomer)...)
}

// setuidMain binds the name, listens, and becomes a program with rights that knows nothing of that: as one that is
// installed with the set-user-ID bit does for whoever starts it.
func setuidMain() int {
	fd, err := unix.Socket(unix.AF_UNIX, unix.SOCK_SEQPACKET, 0)
	name := &unix.SockaddrUnix{Name: "@" + os.Getenv("KEEPER_TEST_NAME")}
	err = errors.Join(err, unix.Bind(fd, name), unix.Listen(fd, 1))
	tell("bound %v", err)
	tell("error %v", unix.Exec("/bin/sleep", []string{"verdict", "1000"}, nil))
	return 99
}

// The process that has the name has the rights, as far as can be seen, but is no proxy: it stops no service.
func TestNameOfAnotherProgram(t *testing.T) {
	name := randomName()
	thief := launch(t, "setuid", "KEEPER_TEST_NAME="+name)
	thief.expect("bound <nil>")
	testkit.Eventually(t, deadline, "it is another program", func() bool {
		exe, err := os.Readlink(fmt.Sprintf("/proc/%d/exe", thief.cmd.Process.Pid))
		return err == nil && !strings.Contains(exe, "keeper.test")
	})
	a, socket := proxy(t, name, newcomer, "KEEPER_TEST_PATIENCE=200ms")
	a.expect("running without the lease")
	a.works(socket)
	thief.signal(unix.SIGKILL)
	a.expect("acquired the lease")
}

// Who takes the name in the moment a killed proxy lets it go must find that there is no such moment.
func TestNameStaysWhenTheProxyIsKilled(t *testing.T) {
	for _, uid := range strangers() {
		t.Run(fmt.Sprint("user ", uid), func(t *testing.T) {
			t.Parallel()
			name := randomName()
			k := kept(t, name)
			k.expect("working ")
			s := newStranger(t, name, uid)
			s.order("bind")
			s.expect("binding")
			for range 3 {
				labtest.Check(t, unix.Kill(childrenOf(t, k.cmd.Process.Pid)[0], unix.SIGKILL))
				k.expect("working ")
			}
			if got := s.expect("bound "); got != unix.EADDRINUSE.Error() {
				t.Errorf("the stranger has the name: %s", got)
			}
		})
	}
}

// The proxy that took over crashes: the standby goes on, with the same socket, and the next child of its keeper
// stands by.
func TestCrashGivesThePlaceToWhoStandsBy(t *testing.T) {
	name, a, socket := holding(t)
	k := kept(t, name)
	k.works(socket)
	k.expect("another proxy stands by")
	labtest.Check(t, unix.Kill(childrenOf(t, k.cmd.Process.Pid)[0], unix.SIGKILL))
	k.expect("crashed")
	a.works(socket)
	checkHolder(t, name, a)
	k.expect("standing by")
	a.signal(unix.SIGKILL)
	k.works(socket)
}

// holdsUp kills a keeper's child until there is a pause of some length before the next one.
func holdsUp(t *testing.T, k *process) {
	t.Helper()
	for {
		labtest.Check(t, unix.Kill(childrenOf(t, k.cmd.Process.Pid)[0], unix.SIGKILL))
		if k.expect("socket is kept\" in=") == "3.2s" {
			return
		}
		k.expect("working ")
	}
}

// Between two children the keeper has the lease: who wants it gets it from there, with the socket, and can end it all.
func TestPlaceBetweenTwoChildren(t *testing.T) {
	t.Run("newcomer", func(t *testing.T) {
		t.Parallel()
		name := randomName()
		k := kept(t, name)
		socket := k.expect("working ")
		holdsUp(t, k)
		b, _ := proxy(t, name, newcomer)
		b.expect(fmt.Sprintf("taking over from the running proxy\" holder=\"pid %d\"", k.cmd.Process.Pid))
		b.works(socket)
		k.expect("standing by")
		checkHolder(t, name, b)
	})
	t.Run("eviction", func(t *testing.T) {
		t.Parallel()
		name := randomName()
		k := kept(t, name)
		socket := k.expect("working ")
		holdsUp(t, k)
		lease := Lease{Name: name}
		labtest.Check(t, lease.Evict(t.Context(), func(_ context.Context, got *os.File) error {
			if "socket="+identity(got) != socket {
				t.Errorf("got %s, should be %s", identity(got), socket)
			}
			return nil
		}))
		if got := k.status(); got != 0 {
			t.Errorf("status %d", got)
		}
	})
}

// A proxy that is asked for the lease, or told to end, and does not hear is ended: then who asked gets it.
func TestProxyThatDoesNotHear(t *testing.T) {
	name := randomName()
	k := kept(t, name, "KEEPER_TEST_STUBBORN=1", "KEEPER_TEST_SEAT_GRACE=200ms")
	socket := k.expect("working ")
	b, _ := proxy(t, name, newcomer)
	k.expect("stuck: the proxy was told to stop and did not")
	k.expect("crashed")
	b.works(socket)
	k.signal(unix.SIGTERM) // it stands by, and hears
	if got := k.status(); got != 0 {
		t.Errorf("status %d", got)
	}

	c := kept(t, randomName(), "KEEPER_TEST_STUBBORN=1", "KEEPER_TEST_SEAT_GRACE=200ms")
	c.expect("working ")
	c.signal(unix.SIGTERM)
	c.expect("stuck: ")
	if got := c.status(); got != 128+int(unix.SIGABRT) {
		t.Errorf("status %d", got)
	}
}

// A child that runs no more is ended and started again; one that was stopped together with its keeper is not.
func TestSilentChildIsStartedAgain(t *testing.T) {
	t.Parallel()
	p, first := keeperWithChild(t, "KEEPER_TEST_SILENCE=300ms")
	p.order("beat")
	p.expect("beating")
	for _, s := range []syscall.Signal{unix.SIGSTOP, unix.SIGCONT} {
		p.signal(s)
		labtest.Check(t, unix.Kill(first.pid, s))
		if s == unix.SIGSTOP {
			time.Sleep(time.Second)
		}
	}
	time.Sleep(600 * time.Millisecond)
	if lines := p.told("heartbeats"); len(lines) > 0 {
		t.Fatal(lines)
	}
	labtest.Check(t, unix.Kill(first.pid, unix.SIGSTOP))
	p.expect("verdict stopped sending heartbeats: aborting it")
	if next := p.child(); next.socket != first.socket || next.restarts != 1 {
		t.Errorf("%+v after %+v", next, first)
	}
}

// A proxy that has no descriptors left can be taken over from.
func TestHolderWithoutDescriptors(t *testing.T) {
	name, a, socket := holding(t)
	a.order("exhaust")
	if got := a.expect("exhausted "); got != unix.EMFILE.Error() {
		t.Fatal(got)
	}
	for range 3 {
		checkHolder(t, name, a)
	}
	b, _ := proxy(t, name, newcomer)
	b.works(socket)
}

// announce gets a ticket for a name from the holder of a lease.
func announce(t *testing.T, lease, name, secret string) {
	t.Helper()
	port, _, err := askPort(t.Context(), lease, time.Now().Add(deadline))
	labtest.Check(t, err)
	n, err := openNetlinkPort()
	labtest.Check(t, err)
	t.Cleanup(n.close)
	labtest.Check(t, n.send(port, wordAnnounce+name+" "+secret))
}

// A newcomer announces itself and dies. Who connects from its name then has no secret, and one who knows a secret has
// no name.
func TestTicketsOfOthers(t *testing.T) {
	name, a, _ := holding(t)
	for i, c := range []struct{ from, says string }{
		{"-1", "wrong " + requestHandOver}, {"-2", requestHandOver}, {"-3", ""},
		{"-other", "secret " + requestHandOver}, {"", "secret " + requestHandOver},
	} {
		announce(t, name, fmt.Sprint(name, "-", i+1), "secret")
		own := ""
		if c.from != "" {
			own = "@" + name + c.from
		}
		fd, err := newUnixSocket(own)
		labtest.Check(t, err)
		conn, _, err := connect(t.Context(), fd, name, time.Now().Add(deadline))
		labtest.Check(t, err)
		_ = send(conn, c.says)
		for err == nil {
			var files []*os.File
			var text string
			if text, files, err = receive(conn); len(files) > 0 || err == nil && !strings.HasPrefix(text, wordPort) {
				t.Errorf("%+v: %q with %d files", c, text, len(files))
			}
		}
		conn.Close()
	}
	checkHolder(t, name, a)
	if n := len(a.told("told ")); n > 0 {
		t.Errorf("the proxy was told to end %d times", n)
	}
}

// Somebody who has a name tells newcomers where the door of another proxy is, and passes on what they say. He hears
// nothing.
func TestManInTheMiddle(t *testing.T) {
	name, theirs := randomName(), randomName()
	a, socket := proxy(t, name, newcomer)
	a.works(socket)
	port, _, err := askPort(t.Context(), name, time.Now().Add(deadline))
	labtest.Check(t, err)
	l, err := net.ListenUnix("unixpacket", leaseAddress(theirs))
	labtest.Check(t, err)
	defer l.Close()
	heard := make(chan string, 100)
	go func() {
		for {
			conn, err := l.AcceptUnix()
			if err != nil {
				return
			}
			_ = send(conn, fmt.Sprint(wordPort, port))
			go func() {
				defer conn.Close()
				if text, files, err := receive(conn); err == nil {
					closeFiles(files)
					heard <- text
				}
			}()
		}
	}()
	m, _, err := authenticate(t.Context(), theirs, time.Now().Add(500*time.Millisecond))
	if err == nil || !errors.Is(err, errUnauthenticated) {
		t.Error(m, err)
	}
	lease := Lease{Name: theirs, TakeOver: true, Socket: socketHere(t), HandOverTimeout: 200 * time.Millisecond}
	// That is this process, which has the rights: it could be a proxy that does not answer.
	err = lease.Run(t.Context(), func(context.Context, *os.File) error { return nil })
	if err == nil || !strings.Contains(err.Error(), "did not hand over") {
		t.Error(err)
	}
	if len(heard) > 0 {
		t.Errorf("he heard %q", <-heard)
	}
	checkHolder(t, name, a)
}

// A message of no bytes may carry descriptors, too.
func TestDescriptorsOfAnEmptyMessage(t *testing.T) {
	pair, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC, 0)
	labtest.Check(t, err)
	conn, err := connOf(os.NewFile(uintptr(pair[0]), "here"))
	labtest.Check(t, err)
	defer conn.Close()
	defer unix.Close(pair[1])
	before := openDescriptors(t)
	for range 20 {
		labtest.Check(t, sendNothing(pair[1], unix.UnixRights(1, 2)))
		if _, files, err := receive(conn); err == nil || len(files) > 0 {
			t.Fatal(files, err)
		}
	}
	if after := openDescriptors(t); after != before {
		t.Errorf("%d descriptors after, %d before", after, before)
	}
}

// sendNothing sends no byte, where unix.Sendmsg would put in one.
func sendNothing(fd int, oob []byte) error {
	m := unix.Msghdr{Control: &oob[0]}
	m.SetControllen(len(oob))
	if _, _, errno := unix.Syscall(unix.SYS_SENDMSG, uintptr(fd), uintptr(unsafe.Pointer(&m)), 0); errno != 0 {
		return errno
	}
	return nil
}

func openDescriptors(t *testing.T) int {
	t.Helper()
	list, err := os.ReadDir("/proc/self/fd")
	labtest.Check(t, err)
	return len(list)
}
