package lab_test

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/verdict-proxy/verdict/internal/lab"
	"github.com/verdict-proxy/verdict/internal/lab/labtest"
)

// modeVariable makes the test program another one: it enters as a user without rights, and then does one thing.
const modeVariable = "LAB_TEST_MODE"

// enterModes reports whether the program was another one, and has done its thing.
func enterModes() bool {
	mode := os.Getenv(modeVariable)
	if mode == "" {
		return false
	}
	runtime.LockOSThread() // capabilities belong to a thread
	if mode == "forbidden" {
		must(os.WriteFile("/proc/sys/user/max_user_namespaces", []byte("0"), 0))
	}
	switch {
	case os.Getenv("VERDICT_LAB_ENTERED") != "": // the run that Enter started
	case mode == "readonly":
		makeSysctlsReadOnly()
	default:
		dropCapabilities()
	}
	enter := lab.Enter
	if mode == "alone" {
		enter = lab.EnterAlone
	}
	status, done, err := enter()
	if err != nil {
		fmt.Println(err)
		os.Exit(99)
	}
	if done {
		os.Exit(status)
	}
	enteredModes[mode]()
	return true
}

func must(err error) {
	if err != nil {
		panic(err)
	}
}

// dropCapabilities leaves what a user has who is root of nothing. Mapping user 0 takes a capability that others do not
// need.
func dropCapabilities() {
	header := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
	data := [2]unix.CapUserData{}
	if os.Getuid() == 0 {
		data[0].Effective, data[0].Permitted = 1<<unix.CAP_SETFCAP, 1<<unix.CAP_SETFCAP
	}
	must(unix.Capset(&header, &data[0]))
}

func makeSysctlsReadOnly() {
	must(unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""))
	must(unix.Mount("/proc/sys", "/proc/sys", "", unix.MS_BIND|unix.MS_REC, ""))
	must(unix.Mount("", "/proc/sys", "", unix.MS_REMOUNT|unix.MS_BIND|unix.MS_RDONLY, ""))
}

var enteredModes = map[string]func(){
	"run": func() {
		in, err := io.ReadAll(os.Stdin)
		must(err)
		fmt.Printf("uid %d args %v in %s env %q", os.Getuid(), os.Args[1:], in, os.Getenv("VERDICT_LAB_ENTERED"))
		fmt.Fprint(os.Stderr, "to stderr")
		os.Exit(7)
	},
	"kill": func() { must(unix.Kill(unix.Getpid(), unix.SIGKILL)) },
	"wait": func() {
		signals := make(chan os.Signal, 4)
		signal.Notify(signals, syscall.SIGTERM, syscall.SIGUSR1, syscall.SIGINT)
		fmt.Println(os.Getpid())
		for s := range signals {
			fmt.Println(s)
			if s == syscall.SIGTERM {
				os.Exit(3)
			}
		}
	},
	"alone": func() { // starts a program and leaves it
		must(unix.Mount("tmpfs", "/mnt", "tmpfs", 0, ""))
		must(exec.Command("sleep", os.Args[1]).Start())
		fmt.Println(os.Getpid())
		time.Sleep(time.Hour)
	},
	"build": func() {
		c, err := lab.NewCluster(lab.Config{LocalPods: 1})
		must(err)
		must(c.Node.Sysctl("net/ipv4/ip_forward", "1"))
		must(c.Close())
		fmt.Print("built")
	},
}

func init() { enteredModes["readonly"] = enteredModes["build"] }

// program prepares the other program.
func program(mode string, args ...string) *exec.Cmd {
	c := exec.Command("/proc/self/exe", args...)
	c.Env = append(os.Environ(), modeVariable+"="+mode)
	return c
}

func exitStatus(err error) int {
	var exit *exec.ExitError
	if errors.As(err, &exit) {
		return exit.ExitCode()
	}
	return 0
}

func TestEnter(t *testing.T) {
	c := program("run", "a", "-b")
	c.Stdin = strings.NewReader("words")
	var out, stderr bytes.Buffer
	c.Stdout, c.Stderr = &out, &stderr
	err := c.Run()
	const want = `uid 0 args [a -b] in words env ""`
	if exitStatus(err) != 7 || out.String() != want || stderr.String() != "to stderr" {
		t.Errorf("status %d, want 7; wrote %q, want %q, and %q", exitStatus(err), &out, want, &stderr)
	}
	if out, err := program("build").CombinedOutput(); string(out) != "built" || err != nil {
		t.Errorf("without rights: %v, %s", err, out)
	}
	if err := program("kill").Run(); exitStatus(err) != 128+9 {
		t.Errorf("after SIGKILL: %v", err)
	}
}

func TestEnterSignals(t *testing.T) {
	c := program("wait")
	c.SysProcAttr = &syscall.SysProcAttr{Setsid: true} // no terminal that sends to both
	stdout, err := c.StdoutPipe()
	labtest.Check(t, err)
	labtest.Check(t, c.Start())
	lines := bufio.NewScanner(stdout)
	lines.Scan() // the process id, in a namespace where it is the same
	var got []string
	for _, s := range []syscall.Signal{syscall.SIGUSR1, syscall.SIGINT, syscall.SIGTERM} {
		labtest.Check(t, c.Process.Signal(s))
		lines.Scan()
		got = append(got, lines.Text())
	}
	if err := c.Wait(); exitStatus(err) != 3 || strings.Join(got, ",") != "user defined signal 1,interrupt,terminated" {
		t.Errorf("%v, and %v", err, got)
	}
}

// The program does not outlive the one that was started first.
func TestEnterOrphan(t *testing.T) {
	c := program("wait")
	stdout, err := c.StdoutPipe()
	labtest.Check(t, err)
	labtest.Check(t, c.Start())
	line, err := bufio.NewReader(stdout).ReadString('\n')
	labtest.Check(t, err)
	pid, err := strconv.Atoi(strings.TrimSpace(line))
	labtest.Check(t, err)
	labtest.Check(t, c.Process.Kill())
	if err := c.Wait(); err == nil {
		t.Error("a killed program succeeded")
	}
	await(t, "the program still runs", func() (string, bool) {
		stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
		return string(stat), err != nil || strings.Contains(string(stat), ") Z ")
	})
}

// What a program that entered alone has started ends with the one that was started first.
func TestEnterAlone(t *testing.T) {
	sign := fmt.Sprintf("3600.%d", os.Getpid()) // of the program that is left
	c := program("alone", sign)
	stdout, err := c.StdoutPipe()
	labtest.Check(t, err)
	labtest.Check(t, c.Start())
	line, err := bufio.NewReader(stdout).ReadString('\n')
	if err != nil || line != "1\n" {
		t.Errorf("it is process %q of its namespace, %v", line, err)
	}
	if len(processes(t, sign)) < 2 { // itself and what it started
		t.Error("the program it started does not run")
	}
	labtest.Check(t, c.Process.Kill())
	if err := c.Wait(); err == nil {
		t.Error("a killed program succeeded")
	}
	await(t, "programs still run", func() (string, bool) {
		left := processes(t, sign)
		return strings.Join(left, ", "), len(left) == 0
	})
}

// processes gives the command lines in which a word is an argument.
func processes(t *testing.T, word string) (all []string) {
	files, err := filepath.Glob("/proc/[0-9]*/cmdline")
	labtest.Check(t, err)
	for _, f := range files {
		b, _ := os.ReadFile(f) // it may have ended
		if args := strings.Split(string(b), "\x00"); slices.Contains(args, word) {
			all = append(all, strings.Join(args, " "))
		}
	}
	return all
}

func TestEnterForbidden(t *testing.T) {
	c := program("forbidden")
	c.SysProcAttr = &syscall.SysProcAttr{
		Cloneflags:  syscall.CLONE_NEWUSER, // has a limit of its own
		UidMappings: []syscall.SysProcIDMap{{ContainerID: 0, HostID: os.Getuid(), Size: 1}},
		GidMappings: []syscall.SysProcIDMap{{ContainerID: 0, HostID: os.Getgid(), Size: 1}},
	}
	out, err := c.CombinedOutput()
	if exitStatus(err) != 99 || !strings.Contains(string(out), "sysctl user.max_user_namespaces is 0") {
		t.Errorf("%v: %s", err, out)
	}
}

// A container's read-only /proc/sys becomes writable for nobody but us.
func TestEnterReadOnly(t *testing.T) {
	c := program("readonly")
	c.SysProcAttr = &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWNS}
	if out, err := c.CombinedOutput(); string(out) != "built" || err != nil {
		t.Errorf("%v: %s", err, out)
	}
	var fs unix.Statfs_t
	labtest.Check(t, unix.Statfs("/proc/sys/net", &fs))
	if fs.Flags&unix.ST_RDONLY != 0 {
		t.Error("/proc/sys is read-only here, too")
	}
}

// The tests of this package pass for a user who is nobody.
func TestNobody(t *testing.T) {
	const nobody = 65534
	if !mapped(t, nobody) {
		t.Skip("this is a user namespace that knows just one user: the other tests run unprivileged already")
	}
	c := exec.Command("/proc/self/exe",
		"-test.run=^Test(Cluster|Dial|Open|Serve|Do|Sysctl|Command|Link|Close|NoStray|Enter)")
	c.Dir = "/"
	c.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: nobody, Gid: nobody}}
	start := time.Now()
	if out, err := c.CombinedOutput(); err != nil {
		t.Errorf("%v\n%s", err, out)
	}
	t.Logf("took %v", time.Since(start))
}

// mapped reports whether a user exists in this user namespace.
func mapped(t *testing.T, uid int) bool {
	b, err := os.ReadFile("/proc/self/uid_map")
	labtest.Check(t, err)
	for line := range strings.Lines(string(b)) {
		var inside, outside, length int
		_, err := fmt.Sscan(line, &inside, &outside, &length)
		labtest.Check(t, err)
		if uid >= inside && uid < inside+length {
			return true
		}
	}
	return false
}
