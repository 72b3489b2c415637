package cluster

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"time"
)

// record says which process a name stands for. The kernel gives a number again; together with the start it is unique.
type record struct {
	PID int
	// Start is when the process started, in ticks of the kernel since the machine did.
	Start string
}

func (c *Cluster) recordFile(name string) string { return c.file("processes", name+".json") }

// start starts a program that stays when this one ends, and records it. Its output goes to a file.
func (c *Cluster) start(name string, cmd *exec.Cmd) error {
	if c.running(name) {
		return fmt.Errorf("%s runs already", name)
	}
	if err := errors.Join(os.MkdirAll(c.file("logs"), 0o755), os.MkdirAll(c.file("processes"), 0o755)); err != nil {
		return err
	}
	log, err := os.OpenFile(c.logFile(name), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o644)
	if err != nil {
		return err
	}
	defer log.Close()
	cmd.Stdout, cmd.Stderr = log, log
	if cmd.SysProcAttr == nil {
		cmd.SysProcAttr = &syscall.SysProcAttr{}
	}
	cmd.SysProcAttr.Setsid = true
	if err := cmd.Start(); err != nil {
		return fmt.Errorf("start %s: %w", name, err)
	}
	go func() { _ = cmd.Wait() }() // for as long as we live; later the machine's init does it
	r := record{PID: cmd.Process.Pid}
	if r.Start, err = startOf(r.PID); err != nil {
		return fmt.Errorf("%s ended at once: see %s", name, c.logFile(name))
	}
	text, err := json.Marshal(r)
	return errors.Join(err, os.WriteFile(c.recordFile(name), text, 0o644))
}

func (c *Cluster) logFile(name string) string { return c.file("logs", name+".log") }

// pid returns the process of that name; 0 if it does not run.
func (c *Cluster) pid(name string) int {
	text, err := os.ReadFile(c.recordFile(name))
	if err != nil {
		return 0
	}
	var r record
	if err := json.Unmarshal(text, &r); err != nil {
		return 0
	}
	if start, err := startOf(r.PID); err != nil || start != r.Start {
		return 0
	}
	return r.PID
}

func (c *Cluster) running(name string) bool { return c.pid(name) != 0 }

// startOf returns when a process started. A process that has ended and was not waited for is an error, too.
func startOf(pid int) (string, error) {
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return "", err
	}
	// The name, in parentheses, may hold anything.
	fields := strings.Fields(string(text[strings.LastIndexByte(string(text), ')')+1:]))
	if len(fields) < 20 || fields[0] == "Z" {
		return "", os.ErrProcessDone
	}
	return fields[19], nil
}

// stop ends a process in the ordinary way, and by SIGKILL after ten seconds.
func (c *Cluster) stop(name string) error {
	return c.end(name, syscall.SIGTERM)
}

func (c *Cluster) end(name string, signal syscall.Signal) error {
	for deadline := time.Now().Add(10 * time.Second); ; time.Sleep(20 * time.Millisecond) {
		pid := c.pid(name)
		if pid == 0 {
			err := os.Remove(c.recordFile(name))
			if errors.Is(err, fs.ErrNotExist) {
				err = nil
			}
			return err
		}
		if time.Now().After(deadline) {
			signal, deadline = syscall.SIGKILL, time.Now().Add(10*time.Second)
		}
		if err := syscall.Kill(pid, signal); err != nil && !errors.Is(err, syscall.ESRCH) {
			return fmt.Errorf("end %s: %w", name, err)
		}
	}
}

// run runs a program and returns what it writes to stdout. The error holds what it writes to stderr.
func run(ctx context.Context, name string, args ...string) (string, error) {
	cmd := exec.CommandContext(ctx, name, args...)
	var stderr strings.Builder
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	if err != nil {
		err = fmt.Errorf("%s: %w: %s", strings.Join(append([]string{filepath.Base(name)}, args...), " "), err,
			strings.TrimSpace(stderr.String()))
	}
	return string(out), err
}

// StartOutside starts a program of conformance/cmd/workload in the namespace of Outside, and StopOutside ends it.
func (c *Cluster) StartOutside(name string, args ...string) error {
	return c.startOutside(c.file("workload", "workload"), name, args...)
}

// StopOutside ends what StartOutside has started. It succeeds if it does not run.
func (c *Cluster) StopOutside(name string) error { return c.stop(name) }
