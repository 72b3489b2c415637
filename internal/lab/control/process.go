package control

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"syscall"

	"github.com/verdict-proxy/verdict/internal/lab"
)

// Process is a program on a host that may be started again after it has ended. It dies with its host and with this
// process.
type Process struct {
	host *lab.Host
	log  string
	args []string

	mu   sync.Mutex
	name string
	pid  int           // 0 if it was never started
	done chan struct{} // closed when it has ended
}

// NewProcess prepares a program. What it writes is appended to the file log.
func NewProcess(host *lab.Host, log, name string, args ...string) *Process {
	return &Process{host: host, log: log, name: name, args: args}
}

// Log returns what the program has written so far.
func (p *Process) Log() []byte {
	text, _ := os.ReadFile(p.log) // none before the first start
	return text
}

// SetProgram makes the next Start run another program.
func (p *Process) SetProgram(name string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.name = name
}

// program returns the program that Start runs.
func (p *Process) program() string {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.name
}

// Start starts the program, which must not run.
func (p *Process) Start() error {
	name := p.program()
	if !p.Ended() {
		return fmt.Errorf("%s runs already", filepath.Base(name))
	}
	log, err := os.OpenFile(p.log, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		return err
	}
	defer log.Close()
	cmd := p.host.Command(name, p.args...)
	cmd.Stdout, cmd.Stderr = log, log
	if err := cmd.StartTied(); err != nil {
		return fmt.Errorf("start %s: %w", filepath.Base(name), err)
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	done := make(chan struct{})
	p.pid, p.done = cmd.Process.Pid, done
	go func() {
		_ = cmd.Wait() // how it ended is in its log
		close(done)
	}()
	return nil
}

// PID gives the process id of the program, as it was started last; 0 if it never was.
func (p *Process) PID() int {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.pid
}

// Ended reports that the program does not run.
func (p *Process) Ended() bool {
	p.mu.Lock()
	done := p.done
	p.mu.Unlock()
	if done == nil {
		return true
	}
	select {
	case <-done:
		return true
	default:
		return false
	}
}

// Stop asks the program to end and waits for it; when ctx is done, it is killed.
func (p *Process) Stop(ctx context.Context) error {
	p.mu.Lock()
	pid, done := p.pid, p.done
	p.mu.Unlock()
	if done == nil {
		return nil
	}
	if err := syscall.Kill(pid, syscall.SIGTERM); err != nil && !errors.Is(err, syscall.ESRCH) {
		return err
	}
	select {
	case <-done:
		return nil
	case <-ctx.Done():
		return errors.Join(fmt.Errorf("%s does not end: %w", filepath.Base(p.program()), ctx.Err()), p.Kill())
	}
}

// Kill kills the program with all of its process group, and waits.
func (p *Process) Kill() error {
	p.mu.Lock()
	pid, done := p.pid, p.done
	p.mu.Unlock()
	if done == nil || p.Ended() {
		return nil
	}
	if err := syscall.Kill(-pid, syscall.SIGKILL); err != nil && !errors.Is(err, syscall.ESRCH) {
		return err
	}
	<-done
	return nil
}

// Tail gives the last lines that the program wrote.
func (p *Process) Tail() string {
	text, err := os.ReadFile(p.log)
	if err != nil {
		return err.Error()
	}
	lines := strings.Split(strings.TrimSpace(string(text)), "\n")
	return strings.Join(lines[max(0, len(lines)-12):], "\n")
}
