package main

import (
	"encoding/json"
	"fmt"
	"math"
	"net/http"
	"net/netip"
	"os"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/verdict-proxy/verdict/internal/answers/inspect"
	"github.com/verdict-proxy/verdict/internal/lab"
	"github.com/verdict-proxy/verdict/internal/lab/labtest"
	"github.com/verdict-proxy/verdict/internal/proxy/status"
	"github.com/verdict-proxy/verdict/internal/system/terminal"
	"github.com/verdict-proxy/verdict/sync/dataplane"
	"github.com/verdict-proxy/verdict/sync/snapshot"
)

// pty is a pseudo terminal: what is written to one end is typed at the other.
func pty(t *testing.T, width, height uint16) (ours, theirs *os.File) {
	t.Helper()
	ours, err := os.OpenFile("/dev/ptmx", os.O_RDWR, 0)
	labtest.Check(t, err)
	t.Cleanup(func() { ours.Close() })
	labtest.Check(t, unix.IoctlSetPointerInt(int(ours.Fd()), unix.TIOCSPTLCK, 0))
	n, err := unix.IoctlGetInt(int(ours.Fd()), unix.TIOCGPTN)
	labtest.Check(t, err)
	theirs, err = os.OpenFile(fmt.Sprintf("/dev/pts/%d", n), os.O_RDWR|unix.O_NOCTTY, 0)
	labtest.Check(t, err)
	t.Cleanup(func() { theirs.Close() })
	labtest.Check(t, unix.IoctlSetWinsize(int(ours.Fd()), unix.TIOCSWINSZ, &unix.Winsize{Col: width, Row: height}))
	return ours, theirs
}

// screenOf reads from a pseudo terminal until a text came, and gives what came.
func screenOf(t *testing.T, ours *os.File, until string) string {
	t.Helper()
	var seen strings.Builder
	labtest.Check(t, ours.SetReadDeadline(time.Now().Add(patience)))
	buffer := make([]byte, 4096)
	for !strings.Contains(terminal.Plain(seen.String()), until) {
		n, err := ours.Read(buffer)
		seen.Write(buffer[:n])
		if err != nil {
			t.Fatalf("%v; %q did not come:\n%q", err, until, seen.String())
		}
	}
	return seen.String()
}

// serveStatus answers on a host as a proxy's health server does.
func serveStatus(t *testing.T, host *lab.Host, s status.Status) {
	t.Helper()
	listener, err := host.Listen("tcp4", "127.0.0.1:10256")
	labtest.Check(t, err)
	server := &http.Server{Handler: http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		json.NewEncoder(w).Encode(s)
	})}
	go server.Serve(listener)
	t.Cleanup(func() { server.Close() })
}

// TestTopDumb: a terminal that knows no escape sequences gets one sample, without any.
func TestTopDumb(t *testing.T) {
	c := newCompared(t)
	ours, theirs := pty(t, 70, 10)
	cmd := c.host.Command("/proc/self/exe", "top", "--interval", "200ms", "--sort", "name")
	cmd.Env = append(os.Environ(), beVerdict+"=1", "TERM=dumb")
	cmd.Stdin, cmd.Stdout, cmd.Stderr = theirs, theirs, theirs
	labtest.Check(t, cmd.Start())
	ended := make(chan error, 1)
	go func() { ended <- cmd.Wait() }()
	select {
	case err := <-ended:
		labtest.Check(t, err)
	case <-time.After(patience):
		cmd.Process.Kill()
		t.Fatal("top waits for keys on a dumb terminal")
	}
	if seen := screenOf(t, ours, "default/kubernetes:https"); strings.Contains(seen, "\x1b") {
		t.Errorf("escape sequences on a dumb terminal: %q", seen)
	}
}

// TestTopTerminal runs top in a pseudo terminal, which is left as it was.
func TestTopTerminal(t *testing.T) {
	c := newCompared(t)
	serveStatus(t, c.host, status.Status{Schema: status.Schema, Node: "worker-7"})
	ours, theirs := pty(t, 70, 10)
	before, err := unix.IoctlGetTermios(int(theirs.Fd()), unix.TCGETS)
	labtest.Check(t, err)
	cmd := c.host.Command("/proc/self/exe", "top", "--interval", "200ms", "--sort", "name")
	cmd.Env = append(os.Environ(), beVerdict+"=1", "NO_COLOR=", "TERM=xterm")
	cmd.Stdin, cmd.Stdout, cmd.Stderr = theirs, theirs, theirs
	labtest.Check(t, cmd.Start())
	first := screenOf(t, ours, "default/kubernetes:https")
	if !strings.HasPrefix(first, "\x1b[?1049h") || strings.Contains(terminal.Plain(first), "shop/frontend") {
		t.Errorf("a screen of its own, of 10 lines: %q", first)
	}
	if !strings.Contains(first, "verdict top  worker-7  by name") {
		t.Errorf("the heading names another node: %q", first)
	}
	type_ := func(keys string) {
		_, err := ours.WriteString(keys)
		labtest.Check(t, err)
	}
	type_("\r")
	screenOf(t, ours, "192.0.2.5:6443")
	type_("G")
	screenOf(t, ours, "> voip/signalling:diameter")
	labtest.Check(t, unix.IoctlSetWinsize(int(ours.Fd()), unix.TIOCSWINSZ, &unix.Winsize{Col: 70, Row: 30}))
	labtest.Check(t, cmd.Process.Signal(unix.SIGWINCH)) // it is no terminal of its own session, so nobody tells it
	screenOf(t, ours, "shop/catalog:http")
	type_("s\x03") // ^C
	rest := screenOf(t, ours, "\x1b[?1049l")
	if err := cmd.Wait(); err != nil {
		t.Errorf("%v\n%q", err, rest)
	}
	after, err := unix.IoctlGetTermios(int(theirs.Fd()), unix.TCGETS)
	labtest.Check(t, err)
	if *after != *before {
		t.Error("the terminal is not as it was")
	}
}

// TestTopOnce prints one sample, as text and as JSON, of connections that were really made.
func TestTopOnce(t *testing.T) {
	c := newCompared(t)
	stop := make(chan struct{})
	defer close(stop)
	go func() { // the only route there is leads to the loopback
		c.host.Do(func() error {
			for {
				select {
				case <-stop:
					return nil
				case <-time.After(20 * time.Millisecond):
				}
				c.host.Dial(snapshot.UDP, netip.MustParseAddrPort("127.0.0.1:30800"), lab.Options{Timeout: 5 * time.Millisecond})
				c.host.Dial(snapshot.TCP, netip.MustParseAddrPort("127.0.0.1:30800"), lab.Options{Timeout: 5 * time.Millisecond})
			}
		})
	}()
	out, status := c.run("top", "--once", "--interval", "500ms")
	if status != 0 || !strings.Contains(out, "connections/s to 14 service ports") ||
		!strings.Contains(strings.Split(out, "\n")[1], "shop/checkout:http") {
		t.Errorf("%d\n%s", status, out)
	}
	out, _ = c.run("top", "--json", "--interval", "500ms", "--service", "shop/checkout")
	var got inspect.Sample
	d := json.NewDecoder(strings.NewReader(out))
	d.DisallowUnknownFields()
	labtest.Check(t, d.Decode(&got))
	if len(got.Ports) != 1 || got.Ports[0].Rate == 0 || got.Ports[0].Service != "shop/checkout" ||
		len(got.Ports[0].Endpoints) != 2 ||
		got.Counted != dataplane.CountedEndpoints {
		t.Fatalf("%s", out)
	}
	sum := 0.0
	for _, e := range got.Ports[0].Endpoints {
		sum += e.Rate
	}
	if math.Abs(sum-got.Ports[0].Rate) > got.Ports[0].Rate/2 {
		t.Errorf("the endpoints have %v of %v", sum, got.Ports[0].Rate)
	}
	out, _ = c.run("top", "--json", "--interval", "500ms", "--limit", "2")
	got = inspect.Sample{}
	labtest.Check(t, json.Unmarshal([]byte(out), &got))
	if len(got.Ports) != 2 || got.PortCount != 14 || got.Ports[0].Service != "shop/checkout" || got.Rate == 0 {
		t.Errorf("--limit 2: %s", out)
	}
	for args, want := range map[string]string{
		"top --limit -1": "--limit: -1 is negative",
		"top --sort x":   "--sort", "top --interval 1ms": "--interval", "top --service x": "--service",
		"top x": "takes no arguments",
		"top --once --interval 100ms --service no/body": "--service: the kernel has no frontend of no/body",
	} {
		var err error
		labtest.Check(t, c.host.Do(func() error { _, err = command(strings.Fields(args)...); return nil }))
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v", args, err)
		}
	}
}
