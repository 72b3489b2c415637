package xtables

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"regexp"
	"runtime"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/verdict-proxy/verdict/internal/system/ipfamily"
	"github.com/verdict-proxy/verdict/nft/iptshim"
)

const (
	// lockTimeout is how long restore waits for the lock of the xtables, which only the legacy variant takes. Longer than
	// that it is better to say so, and to try again later.
	lockTimeout = 5 * time.Second
	// runTimeout bounds what a program may take by far: the nft variant needs minutes for tens of thousands of chains.
	runTimeout = 10 * time.Minute
	// waitDelay is how long a program that has ended, or was told to, may leave its output open.
	waitDelay = 30 * time.Second
)

var lockSeconds = strconv.Itoa(int(lockTimeout / time.Second))

// Exit statuses of iptables-restore.
const exitLocked = 4

// LockedError says that another program kept the lock of the xtables for as long as we waited.
type LockedError struct {
	// Waited is how long that was.
	Waited time.Duration
	// Holder is the process that holds the lock; 0 if it cannot be told.
	Holder int
}

func (e *LockedError) Error() string {
	by := "another program"
	if e.Holder != 0 {
		by = fmt.Sprintf("process %d (%s)", e.Holder, nameOf(e.Holder))
	}
	return fmt.Sprintf("%s has held %s for %s", by, lockPath(), e.Waited)
}

// RestoreError says that iptables-restore did not take a text. Of the table in which that happened nothing is changed;
// tables before it in the text are in force.
type RestoreError struct {
	Family ipfamily.Family
	// Lines are the numbers of the lines that were refused, from 1 on, as far as it says so. For what only the kernel
	// refuses, the legacy variant names the line COMMIT.
	Lines []int
	// Text is what it said.
	Text string
}

func (e *RestoreError) Error() string {
	return fmt.Sprintf("%s iptables-restore: %s", e.Family, e.Text)
}

// runner runs programs in a network namespace.
type runner struct {
	netns *os.File
	inode uint64
}

const netnsPath = "/proc/thread-self/ns/net"

func newRunner() (runner, error) {
	f, err := os.Open(netnsPath)
	if err != nil {
		return runner{}, fmt.Errorf("network namespace: %w", err)
	}
	inode, err := inodeOf(netnsPath)
	return runner{f, inode}, err
}

func inodeOf(path string) (uint64, error) {
	var st unix.Stat_t
	if err := unix.Stat(path, &st); err != nil {
		return 0, fmt.Errorf("%s: %w", path, err)
	}
	return st.Ino, nil
}

func (r runner) close() error { return r.netns.Close() }

// programError is what a program said when it failed.
type programError struct {
	program string
	stderr  string
	status  int
	err     error
}

func (e *programError) Error() string {
	if e.stderr == "" {
		return e.program + ": " + e.err.Error()
	}
	return e.program + ": " + e.stderr
}

func (e *programError) Unwrap() error { return e.err }

// locked says that another program held the lock: the same status tells that the lock's file cannot be opened.
func (e *programError) locked() bool {
	return e.status == exitLocked && !strings.Contains(e.stderr, "open lock file")
}

// run runs a program with text on its standard input, and gives what it wrote to standard output.
func (r runner) run(ctx context.Context, input []byte, program string, args ...string) ([]byte, error) {
	ctx, cancel := context.WithTimeoutCause(ctx, runTimeout, fmt.Errorf("it took longer than %s", runTimeout))
	defer cancel()
	cmd := exec.CommandContext(ctx, program, args...)
	cmd.Env = append(os.Environ(), "LC_ALL=C")
	cmd.WaitDelay = waitDelay
	cmd.SysProcAttr = &unix.SysProcAttr{Setpgid: true} // what ends us all from a terminal must not end it midway
	var out, said bytes.Buffer
	cmd.Stdin, cmd.Stdout, cmd.Stderr = bytes.NewReader(input), &out, &said
	err := r.start(cmd)
	if err == nil {
		err = cmd.Wait()
	}
	switch {
	case err == nil:
		return out.Bytes(), nil
	case ctx.Err() != nil:
		err = context.Cause(ctx)
		said.Reset()
	}
	e := &programError{program: program, stderr: oneLine(said.String()), err: err}
	if exit, ok := errors.AsType[*exec.ExitError](err); ok {
		e.status = exit.ExitCode()
	}
	return nil, e
}

// start starts a program in the runner's namespace: a child inherits that of the thread which makes it. A thread that
// is moved there ends with the goroutine. Most of the time there is no need to: a process that is allowed to move must
// have more rights than we want.
func (r runner) start(cmd *exec.Cmd) error {
	runtime.LockOSThread()
	here, err := inodeOf(netnsPath)
	if err == nil && here == r.inode {
		defer runtime.UnlockOSThread()
		return cmd.Start()
	}
	runtime.UnlockOSThread()
	done := make(chan error)
	go func() {
		runtime.LockOSThread()
		if err := unix.Setns(int(r.netns.Fd()), unix.CLONE_NEWNET); err != nil {
			done <- fmt.Errorf("enter the network namespace: %w", err)
			return
		}
		done <- cmd.Start()
	}()
	return <-done
}

// Restore changes a family's tables by a text for iptables-restore, which keeps what the text does not name. The error
// is a
// *RestoreError, a *LockedError, or another one.
func (p *Programs) Restore(ctx context.Context, f ipfamily.Family, text []byte) error {
	if err := p.missing[f]; err != nil {
		return err
	}
	_, err := p.runner.run(ctx, text, p.sets[f].restore, "--noflush", "-w", lockSeconds)
	var failed *programError
	switch {
	case err == nil:
		return nil
	case ctx.Err() != nil, !errors.As(err, &failed), failed.stderr == "":
		return err
	case failed.locked() && p.Variant == Legacy:
		return &LockedError{lockTimeout, holder(lockPath())}
	}
	return &RestoreError{Family: f, Lines: failedLines(failed.stderr), Text: failed.stderr}
}

// Save gives a family's table as iptables-save prints it, with counters if they are wished for. A table that is not
// there has no chains but those built in, or is empty.
func (p *Programs) Save(ctx context.Context, f ipfamily.Family, table string, counters bool) ([]byte, error) {
	if err := p.missing[f]; err != nil {
		return nil, err
	}
	if !p.tableExists(f, table) {
		return nil, nil
	}
	args := []string{"-t", table}
	if counters {
		args = append(args, "-c")
	}
	return p.save(ctx, f, []iptshim.Table{iptshim.Table(table)}, args...)
}

// save runs a family's iptables-save. The nft variant prints nothing of a table in which somebody put rules that
// iptables has not, and that is no failure to it: of the tables that are needed it is one.
func (p *Programs) save(
	ctx context.Context, f ipfamily.Family, needed []iptshim.Table, args ...string,
) ([]byte, error) {
	text, err := p.runner.run(ctx, nil, p.sets[f].save, args...)
	if err != nil {
		return nil, err
	}
	for _, t := range needed {
		if bytes.Contains(text, []byte("# Table `"+string(t)+"' is incompatible")) {
			return nil, fmt.Errorf("%s iptables cannot read table %s: a program that uses nft put rules there "+
				"that iptables cannot represent (nft list table %s %s)",
				f, t, [...]string{"ip", "ip6"}[f], t)
		}
	}
	return text, nil
}

// inNamespace says whether the calling thread is in the runner's namespace.
func (r runner) inNamespace() bool {
	inode, err := inodeOf(netnsPath)
	return err == nil && inode == r.inode
}

// tableExists says whether a table is there: to ask for one of the legacy variant makes it.
func (p *Programs) tableExists(f ipfamily.Family, table string) bool {
	return p.Variant != Legacy || !p.runner.inNamespace() || legacyHas(f, table)
}

// HasChain says whether a chain is in a table, without reading the table.
func (p *Programs) HasChain(ctx context.Context, f ipfamily.Family, table, chain string) (bool, error) {
	if err := p.missing[f]; err != nil || !p.tableExists(f, table) {
		return false, err
	}
	_, err := p.runner.run(ctx, nil, p.sets[f].main, "-w", "1", "-t", table, "-S", chain, "1")
	var failed *programError
	switch {
	case ctx.Err() != nil || !errors.As(err, &failed):
		return err == nil, err
	case failed.status == 1:
		return false, nil
	case failed.locked(): // to read the table takes longer, and no lock
		text, err := p.Save(ctx, f, table, false)
		return bytes.Contains(text, []byte("\n:"+chain+" ")), err
	}
	return false, err
}

var lineNumber = regexp.MustCompile(`(?m)(?:[Ee]rror occurred at line: |\bline )(\d+)\b`)

// failedLines gives the numbers of the lines that a program complains about.
func failedLines(said string) (lines []int) {
	for _, m := range lineNumber.FindAllStringSubmatch(said, -1) {
		if n, err := strconv.Atoi(m[1]); err == nil {
			lines = append(lines, n)
		}
	}
	return lines
}

// maxErrorText is how much of what a program says an error repeats.
const maxErrorText = 600

// oneLine gives what a program said in one line, without how to get help.
func oneLine(said string) string {
	var parts []string
	for line := range strings.Lines(said) {
		if line = strings.TrimSpace(line); line != "" && !strings.HasPrefix(line, "Try `") {
			parts = append(parts, line)
		}
	}
	text := strings.Join(parts, "; ")
	if len(text) > maxErrorText {
		text = strings.ToValidUTF8(text[:maxErrorText], "") + "..."
	}
	return text
}

func lockPath() string {
	if path := os.Getenv("XTABLES_LOCKFILE"); path != "" {
		return path
	}
	return "/run/xtables.lock"
}

// holder gives the process that holds the lock on a file, 0 if that cannot be told.
func holder(path string) int {
	var st unix.Stat_t
	if unix.Stat(path, &st) != nil {
		return 0
	}
	locks, err := os.ReadFile("/proc/locks")
	if err != nil {
		return 0
	}
	for line := range strings.Lines(string(locks)) {
		// "1: FLOCK  ADVISORY  WRITE 5534 fe:00:9773057 0 EOF"
		fields := strings.Fields(line)
		if len(fields) < 6 || fields[1] != "FLOCK" || !strings.HasSuffix(fields[5], ":"+strconv.FormatUint(st.Ino, 10)) {
			continue
		}
		if pid, err := strconv.Atoi(fields[4]); err == nil && pid > 0 {
			return pid
		}
	}
	return 0
}

func nameOf(pid int) string {
	name, err := os.ReadFile(fmt.Sprintf("/proc/%d/comm", pid))
	if err != nil {
		return "?"
	}
	return strings.TrimSpace(string(name))
}
