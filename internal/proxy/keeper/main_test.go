package keeper

import (
	"bufio"
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"os/exec"
	"os/signal"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/verdict-proxy/verdict/internal/lab/labtest"
)

// envRole makes a run of this test program one of the processes below. They take commands from standard input, a line
// each, and tell what happens on standard output, a line each.
const envRole = "KEEPER_TEST_ROLE"

func TestMain(m *testing.M) {
	if role := os.Getenv(envRole); role != "" {
		os.Exit(roles[role]())
	}
	labtest.Main(m)
}

var roles = map[string]func() int{
	"keeper":   keeperMain,
	"child":    childMain,
	"lease":    leaseMain,
	"quick":    func() int { return 0 },
	"stranger": strangerMain,
	"weak":     leaseMain,
	"setuid":   setuidMain,
}

// tell writes a line at once, so that those of two processes do not mix.
func tell(format string, args ...any) {
	os.Stdout.WriteString(fmt.Sprintf(format, args...) + "\n")
}

func tellingLog() *slog.Logger { return slog.New(slog.NewTextHandler(os.Stdout, nil)) }

// openNetlink gives a netlink socket with a port id.
func openNetlink() (*os.File, error) {
	fd, err := unix.Socket(unix.AF_NETLINK, unix.SOCK_RAW|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, unix.NETLINK_NETFILTER)
	if err != nil {
		return nil, err
	}
	if err := unix.Bind(fd, &unix.SockaddrNetlink{Family: unix.AF_NETLINK}); err != nil {
		return nil, err
	}
	return os.NewFile(uintptr(fd), "netlink"), nil
}

// identity tells sockets apart: the inode is that of the open socket, the port id is what owns tables.
func identity(f *os.File) string {
	if f == nil {
		return "none"
	}
	var id string
	err := withDescriptors([]syscall.Conn{f}, nil, func(fds []int) error {
		var st unix.Stat_t
		if err := unix.Fstat(fds[0], &st); err != nil {
			return err
		}
		name, err := unix.Getsockname(fds[0])
		if err != nil {
			return err
		}
		port := uint32(0)
		if n, ok := name.(*unix.SockaddrNetlink); ok {
			port = n.Pid
		}
		id = fmt.Sprintf("%d/%d", st.Ino, port)
		return nil
	})
	if err != nil {
		return err.Error()
	}
	return id
}

// keeperMain is Keep, as verdict run has it: with a context that signals end, too.
func keeperMain() int {
	ctx, stop := signal.NotifyContext(context.Background(), unix.SIGINT, unix.SIGTERM)
	defer stop()
	socket, err := openNetlink()
	if err != nil {
		tell("error %v", err)
		return 99
	}
	tell("keeper pid=%d socket=%s", os.Getpid(), identity(socket))
	grace, _ := time.ParseDuration(os.Getenv("KEEPER_TEST_GRACE"))
	silent, _ := time.ParseDuration(os.Getenv("KEEPER_TEST_SILENCE"))
	os.Setenv(envRole, cmp.Or(os.Getenv("KEEPER_TEST_CHILD"), "child"))
	status, err := Keep(ctx, Options{
		Socket: socket, Path: os.Getenv("KEEPER_TEST_PATH"), Grace: grace, Silence: silent, Log: tellingLog(),
	})
	if err != nil {
		tell("error %v", err)
		return 99
	}
	return status
}

// childMain is what a keeper starts, or systemd.
func childMain() int {
	signals := make(chan os.Signal, 16)
	signal.Notify(signals)
	h, err := Inherited()
	if err != nil {
		tell("error %v", err)
		return 98
	}
	tell("child pid=%d socket=%s restarts=%d", os.Getpid(), identity(h.Socket), h.Restarts)
	commands := commands()
	for {
		select {
		case s := <-signals:
			if s == unix.SIGURG || s == unix.SIGCHLD { // the runtime's own, and of the commands below
				continue
			}
			tell("got %v", s)
			if s == unix.SIGTERM && os.Getenv("KEEPER_TEST_STUBBORN") == "" {
				time.AfterFunc(200*time.Millisecond, func() { signals <- unix.SIGPWR }) // a second one would be told
			}
			if s == unix.SIGPWR {
				return 7
			}
		case <-h.Orphaned():
			tell("orphaned")
			return 0
		case c := <-commands:
			if status, ends := obey(h, c); ends {
				return status
			}
		}
	}
}

// obey does what a test wants of a child.
func obey(h *Inheritance, command string) (status int, ends bool) {
	name, arg, _ := strings.Cut(command, " ")
	switch name {
	case "exit":
		n, _ := strconv.Atoi(arg)
		return n, true
	case "panic":
		panic("as told")
	case "fatal":
		new(sync.Mutex).Unlock()
	case "keep":
		s, err := openNetlink()
		if err == nil {
			err = h.Keep(s)
		}
		tell("kept socket=%s err=%v", identity(s), err)
	case "keep-and-die":
		s, _ := openNetlink()
		tell("kept socket=%s err=%v", identity(s), h.Keep(s))
		unix.Kill(os.Getpid(), unix.SIGKILL)
	case "look":
		tell("grandchild %s", look())
	case "orphan":
		out, err := exec.Command("sh", "-c", "sleep 1000 >/dev/null 2>&1 & echo $!").Output() // the shell ends at once
		tell("orphan %s %v", strings.TrimSpace(string(out)), err)
	case "beat":
		go func() {
			for ; ; time.Sleep(5 * time.Millisecond) {
				_ = h.sendToKeeper(messageBeat)
			}
		}()
		tell("beating")
	case "table":
		tell("table %v", writeTable(h.Socket))
	}
	return 0, false
}

// look tells what a child of this process would see: descriptors, and how many variables of ours or systemd's.
func look() string {
	const script = "ls /proc/self/fd | tr '\\n' ' '; env | grep -c -E '^(VERDICT_KE|LISTEN_).*=.'"
	out, _ := exec.Command("sh", "-c", script).CombinedOutput() // grep fails if there is none
	return strings.TrimSpace(string(out))
}

// leaseMain is a proxy that wants the lease KEEPER_TEST_NAME.
func leaseMain() int {
	ctx, stop := signal.NotifyContext(context.Background(), unix.SIGINT, unix.SIGTERM)
	defer stop()
	held, err := Inherited()
	socket := held.Socket
	if err == nil && socket == nil {
		socket, err = openNetlink()
	}
	if err != nil {
		tell("error %v", err)
		return 99
	}
	tell("lease pid=%d socket=%s", os.Getpid(), identity(socket))
	commands := commands()
	lease := Lease{Name: os.Getenv("KEEPER_TEST_NAME"), Socket: socket, Inherited: held, Log: tellingLog()}
	lease.TakeOver = os.Getenv("KEEPER_TEST_NEWCOMER") != "" && held.Restarts == 0
	if grace, err := time.ParseDuration(os.Getenv("KEEPER_TEST_SEAT_GRACE")); err == nil {
		lease.Grace = grace
		lease.OnStuck = func(what string) {
			tell("stuck: %s", what)
			unix.Kill(os.Getpid(), unix.SIGABRT)
		}
	}
	lease.HandOverTimeout, _ = time.ParseDuration(os.Getenv("KEEPER_TEST_PATIENCE"))
	err = lease.Run(ctx, func(ctx context.Context, socket *os.File) error {
		if err := held.Keep(socket); err != nil {
			return err
		}
		tell("working socket=%s", identity(socket))
		defer tell("resting")
		for {
			select {
			case <-ctx.Done():
				tell("told %v", context.Cause(ctx))
				if os.Getenv("KEEPER_TEST_STUBBORN") != "" {
					for c := range commands {
						if c == "yield" {
							break
						}
					}
				}
				return ctx.Err()
			case c := <-commands:
				switch c {
				case "end":
					return errors.New("as told")
				case "exhaust":
					tell("exhausted %v", exhaust())
				}
			}
		}
	})
	tell("run ended: %v", err)
	return 0
}

// exhaust takes all descriptors that this process may have, and gives the error of the next one.
func exhaust() error {
	limit := unix.Rlimit{Cur: 64, Max: 64}
	if err := unix.Setrlimit(unix.RLIMIT_NOFILE, &limit); err != nil {
		return err
	}
	for {
		if _, err := unix.Open("/dev/null", unix.O_RDONLY|unix.O_CLOEXEC, 0); err != nil {
			return err
		}
	}
}

func commands() <-chan string {
	c := make(chan string)
	go func() {
		for s := bufio.NewScanner(os.Stdin); s.Scan(); {
			c <- s.Text()
		}
	}()
	return c
}

// process is one of the above.
type process struct {
	t     *testing.T
	cmd   *exec.Cmd
	in    *os.File
	lines chan string
	ended chan struct{}
	said  []string
}

// deadline bounds what a test waits for. Nothing takes so long unless it is broken.
const deadline = 30 * time.Second

// prepare gives a command for a role. Its program is found whatever user it runs as.
func prepare(role string, env ...string) *exec.Cmd {
	cmd := exec.Command("/proc/self/exe")
	cmd.Env = append(append(os.Environ(), envRole+"="+role), env...)
	return cmd
}

// begin starts a command by start, which is cmd.Start in most cases. It is killed when the test ends.
func begin(t *testing.T, cmd *exec.Cmd, start func() error) *process {
	t.Helper()
	inR, inW := pipe(t)
	outR, outW := pipe(t)
	cmd.Stdin, cmd.Stdout, cmd.Stderr = inR, outW, outW
	labtest.Check(t, start())
	inR.Close()
	outW.Close()
	p := &process{t: t, cmd: cmd, in: inW, lines: make(chan string, 1000), ended: make(chan struct{})}
	go func() {
		defer close(p.lines)
		for s := bufio.NewScanner(outR); s.Scan(); {
			p.lines <- s.Text()
		}
	}()
	go func() {
		defer close(p.ended)
		_ = cmd.Wait()
	}()
	t.Cleanup(func() {
		cmd.Process.Kill()
		inW.Close()
		<-p.ended
		if t.Failed() {
			for len(p.lines) > 0 {
				p.said = append(p.said, <-p.lines)
			}
			t.Logf("pid %d said:\n\t%s", cmd.Process.Pid, strings.Join(p.said, "\n\t"))
		}
	})
	return p
}

func launch(t *testing.T, role string, env ...string) *process {
	t.Helper()
	cmd := prepare(role, env...)
	return begin(t, cmd, cmd.Start)
}

func pipe(t *testing.T) (r, w *os.File) {
	t.Helper()
	r, w, err := os.Pipe()
	labtest.Check(t, err)
	return r, w
}

// expect waits for a line that begins with, or holds, a text, and gives what follows.
func (p *process) expect(text string) string {
	p.t.Helper()
	timeout := time.After(deadline)
	for {
		select {
		case line, ok := <-p.lines:
			if !ok {
				p.t.Fatalf("ended without %q", text)
			}
			p.said = append(p.said, line)
			if _, rest, ok := strings.Cut(line, text); ok {
				return rest
			}
		case <-timeout:
			p.t.Fatalf("did not say %q", text)
		}
	}
}

// status waits for the end and gives the exit status, -1 after a signal.
func (p *process) status() int {
	p.t.Helper()
	select {
	case <-p.ended:
		return p.cmd.ProcessState.ExitCode()
	case <-time.After(deadline):
		p.t.Fatal("does not end")
		return 0
	}
}

func (p *process) order(command string) {
	p.t.Helper()
	_, err := p.in.WriteString(command + "\n")
	labtest.Check(p.t, err)
}

func (p *process) signal(s syscall.Signal) {
	p.t.Helper()
	labtest.Check(p.t, p.cmd.Process.Signal(s))
}

// life is what a child says at its start.
type life struct {
	pid      int
	socket   string
	restarts int
}

func (p *process) child() (l life) {
	p.t.Helper()
	_, err := fmt.Sscanf(p.expect("child "), "pid=%d socket=%s restarts=%d", &l.pid, &l.socket, &l.restarts)
	if err != nil {
		p.t.Fatal(err)
	}
	return l
}

func randomName() string {
	return fmt.Sprintf("verdict-test-%d-%d", os.Getpid(), time.Now().UnixNano())
}
