package keeper

import (
	"context"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/verdict-proxy/verdict/internal/lab/labtest"
)

// clearEnv has a test begin without what this process may have been started with.
func clearEnv(t *testing.T) {
	for _, name := range []string{
		envSocket, envKeeper, envRestarts, envLease, "WATCHDOG_USEC",
		"LISTEN_PID", "LISTEN_FDS", "LISTEN_FDNAMES", "NOTIFY_SOCKET", "FDSTORE",
	} {
		t.Setenv(name, "")
	}
}

func TestNothingInherited(t *testing.T) {
	clearEnv(t)
	h, err := Inherited()
	labtest.Check(t, err)
	if h.Socket != nil || h.Orphaned() != nil {
		t.Error(h)
	}
	labtest.Check(t, h.Keep(nil))
	s, err := openNetlink()
	labtest.Check(t, err)
	defer s.Close()
	labtest.Check(t, h.Keep(s))
}

func TestMalformedInheritance(t *testing.T) {
	self := strconv.Itoa(os.Getpid())
	file, err := os.Open("/dev/null")
	labtest.Check(t, err)
	defer file.Close()
	socket, err := openNetlink()
	labtest.Check(t, err)
	defer socket.Close()
	isFile, isSocket := strconv.Itoa(int(file.Fd())), descriptor(t, socket)
	for _, c := range []struct {
		env  map[string]string
		want string
	}{
		{map[string]string{envSocket: "x", envKeeper: isSocket, envRestarts: "0"}, `VERDICT_KEPT_SOCKET="x" is not a number`},
		{map[string]string{envSocket: "-1", envKeeper: isSocket, envRestarts: "0"},
			`VERDICT_KEPT_SOCKET="-1" is not a number`},
		{map[string]string{envSocket: isSocket, envRestarts: "0"}, `VERDICT_KEEPER="" is not a number; a keeper sets all of`},
		{map[string]string{envSocket: isSocket, envKeeper: isSocket, envRestarts: "often"},
			`VERDICT_KEEPER_RESTARTS="often"`},
		{map[string]string{envSocket: "9999", envKeeper: isSocket, envRestarts: "0"},
			"VERDICT_KEPT_SOCKET=9999: descriptor 9999: bad file descriptor"},
		{map[string]string{envSocket: isFile, envKeeper: isSocket, envRestarts: "0"},
			"descriptor " + isFile + " is not a socket"},
		{map[string]string{"LISTEN_PID": "me", "LISTEN_FDS": "1"}, `LISTEN_PID="me" is not a number`},
		{map[string]string{"LISTEN_PID": self, "LISTEN_FDS": "-1"}, `LISTEN_FDS="-1" is not a number`},
		{map[string]string{"LISTEN_PID": self, "LISTEN_FDS": "3", "LISTEN_FDNAMES": "verdict"},
			"does not name 3 descriptors"},
	} {
		clearEnv(t)
		for name, value := range c.env {
			t.Setenv(name, value)
		}
		_, err := Inherited()
		if err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%v: %v", c.env, err)
		}
		for name := range c.env {
			if _, left := os.LookupEnv(name); left {
				t.Errorf("%s is still set", name)
			}
		}
	}
}

func descriptor(t *testing.T, f *os.File) (n string) {
	t.Helper()
	labtest.Check(t, withDescriptors([]syscall.Conn{f}, nil, func(fds []int) error {
		n = strconv.Itoa(fds[0])
		return nil
	}))
	return n
}

// asSystemd starts a child as systemd would, by a shell that knows the pid: descriptors 3 and up, with names.
func asSystemd(t *testing.T, names string, files ...*os.File) *process {
	t.Helper()
	cmd := prepare("child", "LISTEN_FDS="+strconv.Itoa(len(files)), "LISTEN_FDNAMES="+names)
	cmd.Path, cmd.Args = "/bin/sh", []string{"sh", "-c", `LISTEN_PID=$$ exec "$0"`, executable(t)}
	cmd.ExtraFiles = files
	return begin(t, cmd, cmd.Start)
}

func executable(t *testing.T) string {
	t.Helper()
	path, err := os.Executable()
	labtest.Check(t, err)
	return path
}

func TestSocketOfSystemd(t *testing.T) {
	clearEnv(t)
	var files []*os.File
	for range 2 {
		s, err := openNetlink()
		labtest.Check(t, err)
		t.Cleanup(func() { s.Close() })
		files = append(files, s)
	}
	for _, c := range []struct{ names, want string }{
		{"other:verdict", identity(files[1])},
		{"verdict:other", identity(files[0])},
		{"verdict:verdict", identity(files[1])},
		{"some:other", "none"},
		{"", "none"},
	} {
		p := asSystemd(t, c.names, files...)
		if got := p.child(); got.socket != c.want {
			t.Errorf("%q: %s, should be %s", c.names, got.socket, c.want)
		}
		p.order("look")
		if got, want := p.expect("grandchild "), look(); c.names == "other:verdict" && got != want {
			t.Errorf("descriptors and number of variables: %s, without systemd %s", got, want)
		}
	}
	t.Run("with the lease", func(t *testing.T) {
		name := randomName()
		l, err := net.ListenUnix("unixpacket", leaseAddress(name))
		labtest.Check(t, err)
		lease, err := l.File()
		labtest.Check(t, err)
		labtest.Check(t, l.Close())
		names := "LISTEN_FDNAMES=verdict-place:verdict"
		cmd := prepare("lease", "LISTEN_FDS=2", names, "KEEPER_TEST_NAME="+name, newcomer)
		cmd.Path, cmd.Args = "/bin/sh", []string{"sh", "-c", `LISTEN_PID=$$ exec "$0"`, executable(t)}
		cmd.ExtraFiles = []*os.File{lease, files[0]}
		p := begin(t, cmd, cmd.Start)
		p.works("socket=" + identity(files[0]))
		checkHolder(t, name, p)
		labtest.Check(t, lease.Close())
		next, _ := proxy(t, name, newcomer)
		next.works("socket=" + identity(files[0]))
	})
	t.Run("meant for another process", func(t *testing.T) {
		cmd := prepare("child", "LISTEN_PID=1", "LISTEN_FDS=1", "LISTEN_FDNAMES=verdict")
		if got := begin(t, cmd, cmd.Start).child(); got.socket != "none" {
			t.Error(got)
		}
	})
}

// fakeSystemd is the receiving end of $NOTIFY_SOCKET.
func fakeSystemd(t *testing.T, name string) *net.UnixConn {
	t.Helper()
	conn, err := net.ListenUnixgram("unixgram", &net.UnixAddr{Name: name, Net: "unixgram"})
	labtest.Check(t, err)
	t.Cleanup(func() { conn.Close() })
	labtest.Check(t, conn.SetReadDeadline(time.Now().Add(deadline)))
	return conn
}

func hears(t *testing.T, conn *net.UnixConn, want, wantSocket string) {
	t.Helper()
	text, files, err := receive(conn)
	labtest.Check(t, err)
	got := "nothing"
	if len(files) > 0 {
		got = identity(files[0])
	}
	closeFiles(files)
	if text != want || got != wantSocket {
		t.Errorf("%q with %s, should be %q with %s", text, got, want, wantSocket)
	}
}

func TestStoreOfSystemd(t *testing.T) {
	socket, err := openNetlink()
	labtest.Check(t, err)
	defer socket.Close()
	names := map[string]string{"path": filepath.Join(t.TempDir(), "notify"), "abstract": "@" + randomName()}
	for kind, name := range names {
		t.Run(kind, func(t *testing.T) {
			clearEnv(t)
			systemd := fakeSystemd(t, name)
			t.Setenv("NOTIFY_SOCKET", name)
			labtest.Check(t, Store(socket))
			hears(t, systemd, "FDSTOREREMOVE=1\nFDNAME=verdict", "nothing")
			hears(t, systemd, "FDSTORE=1\nFDNAME=verdict\nFDPOLL=0", identity(socket))
			labtest.Check(t, Notify("READY=1"))
			hears(t, systemd, "READY=1", "nothing")

			// Kept when it is another one, and not when it is from there.
			other, err := openNetlink()
			labtest.Check(t, err)
			defer other.Close()
			h := &Inheritance{Socket: socket, fromStore: true}
			if m, err := h.Choose(Auto); m != Systemd || err != nil {
				t.Fatal(m, err)
			}
			labtest.Check(t, h.Keep(socket))
			labtest.Check(t, h.Keep(other))
			hears(t, systemd, "FDSTOREREMOVE=1\nFDNAME=verdict", "nothing")
			hears(t, systemd, "FDSTORE=1\nFDNAME=verdict\nFDPOLL=0", identity(other))

			// So is the lease, until it is another's, if there is room for it.
			l, err := net.ListenUnix("unixpacket", leaseAddress(randomName()))
			labtest.Check(t, err)
			defer l.Close()
			file, err := l.File()
			labtest.Check(t, err)
			defer file.Close()
			t.Setenv("FDSTORE", "2")
			labtest.Check(t, h.keepLease(l))
			labtest.Check(t, h.keepLease(nil))
			hears(t, systemd, "FDSTOREREMOVE=1\nFDNAME=verdict-place", "nothing")
			hears(t, systemd, "FDSTORE=1\nFDNAME=verdict-place\nFDPOLL=0", identity(file))
			hears(t, systemd, "FDSTOREREMOVE=1\nFDNAME=verdict-place", "nothing")
			t.Setenv("FDSTORE", "1")
			if err := h.keepLease(l); err == nil {
				t.Error("there is no room for it")
			}

			// A watchdog hears that it runs.
			t.Setenv("WATCHDOG_USEC", "30000")
			ctx, stop := context.WithCancel(t.Context())
			defer stop()
			go h.Beat(ctx)
			for range 3 {
				hears(t, systemd, "WATCHDOG=1", "nothing")
			}
		})
	}
	clearEnv(t)
	labtest.Check(t, Store(socket))
	labtest.Check(t, Notify("READY=1"))
	for name, want := range map[string]string{
		"vsock:2:1234":    "neither a path nor an abstract socket",
		"/nowhere/notify": "no such file",
	} {
		t.Setenv("NOTIFY_SOCKET", name)
		if err := Notify("READY=1"); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v", name, err)
		}
	}
}

func TestChoice(t *testing.T) {
	socket, err := openNetlink()
	labtest.Check(t, err)
	defer socket.Close()
	childOf := Inheritance{Socket: socket, link: new(net.UnixConn)}
	fromStore := Inheritance{Socket: socket, fromStore: true}
	for _, c := range []struct {
		what            string
		held            Inheritance
		mode            Mode
		fdstore, notify string
		want            Mode
	}{
		{"plain", Inheritance{}, Auto, "", "", Process},
		{"a unit without a store", Inheritance{}, Auto, "", "/run/notify", Process},
		{"a unit with one of size 0", Inheritance{}, Auto, "0", "/run/notify", Process},
		{"a unit with one", Inheritance{}, Auto, "2", "/run/notify", Systemd},
		{"a unit with one, and nowhere to send to", Inheritance{}, Auto, "2", "", Process},
		{"garbage", Inheritance{}, Auto, "many", "/run/notify", Process},
		{"out of the store", fromStore, Auto, "1", "/run/notify", Systemd},
		{"out of the store of an old systemd", fromStore, Auto, "", "/run/notify", Systemd},
		{"out of a store that does not listen", fromStore, Auto, "", "", None},
		{"a keeper's child", childOf, Auto, "", "", None},
		{"a keeper's child in a unit with a store", childOf, Auto, "1", "/run/notify", None},
		{"a keeper's child, as its keeper was told", childOf, Process, "", "", None},
		{"told process", Inheritance{}, Process, "1", "/run/notify", Process},
		{"told systemd", Inheritance{}, Systemd, "", "/run/notify", Systemd},
		{"told systemd without any", Inheritance{}, Systemd, "", "", ""},
		{"told none", Inheritance{}, None, "1", "/run/notify", None},
	} {
		clearEnv(t)
		t.Setenv("FDSTORE", c.fdstore)
		t.Setenv("NOTIFY_SOCKET", c.notify)
		got, err := c.held.Choose(c.mode)
		if got != c.want || (err != nil) != (c.want == "") {
			t.Errorf("%s: %q, %v", c.what, got, err)
		}
	}
}

// A keeper's variables and descriptors come through a program between it and the child, such as a shell script.
func TestInheritanceThroughExec(t *testing.T) {
	script := filepath.Join(t.TempDir(), "verdict")
	labtest.Check(t, os.WriteFile(script, []byte("#!/bin/sh\nexec "+executable(t)+"\n"), 0o755))
	p, first := keeperWithChild(t, "KEEPER_TEST_PATH="+script)
	labtest.Check(t, unix.Kill(first.pid, unix.SIGKILL))
	if next := p.child(); next.socket != first.socket {
		t.Errorf("%+v after %+v", next, first)
	}
}
