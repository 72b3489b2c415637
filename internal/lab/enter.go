package lab

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"runtime"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"
)

// enteredEnv is set for the run of the program that Enter starts.
const enteredEnv = "VERDICT_LAB_ENTERED"

// Enter makes sure that this process may build a Net. Where it lacks the rights, Enter runs the program once more, with
// the same arguments, environment and standard files, as root of a user namespace of its own, passes signals on, and
// waits. Then done is true and the caller exits with the status, having done nothing else:
//
//	if status, done, err := lab.Enter(); err != nil {
//		return err
//	} else if done {
//		os.Exit(status)
//	}
//
// In the run in the user namespace, or if no such thing is needed, done is false. The error says which right or sysctl
// is missing. Call it before anything else.
func Enter() (status int, done bool, err error) {
	again := os.Getenv(enteredEnv) != ""
	os.Unsetenv(enteredEnv) // children of ours may need to enter themselves
	missing, err := missingRights()
	if err != nil {
		return 0, false, err
	}
	readOnly := sysctlsReadOnly()
	switch {
	case again && len(missing) > 0:
		return 0, false, explainForbidden(fmt.Errorf("no %s in a user namespace", strings.Join(missing, ", ")))
	case again && readOnly:
		return 0, false, remountSysctls()
	case len(missing) == 0 && !readOnly:
		return 0, false, nil
	}
	var flags uintptr
	if readOnly {
		flags = unix.CLONE_NEWNS
	}
	status, err = reexec(len(missing) > 0, flags)
	return status, true, err
}

// EnterAlone is Enter for a program that starts others. It always runs the program once more: in a process namespace of
// its own, so that whatever it starts ends with it, however it ends, and in a mount namespace of its own, where mounts
// are nobody else's and vanish with it.
func EnterAlone() (status int, done bool, err error) {
	if os.Getenv(enteredEnv) == "" {
		missing, err := missingRights()
		if err != nil {
			return 0, false, err
		}
		status, err = reexec(len(missing) > 0, unix.CLONE_NEWNS|unix.CLONE_NEWPID)
		return status, true, err
	}
	os.Unsetenv(enteredEnv)
	missing, err := missingRights()
	switch {
	case err != nil:
		return 0, false, err
	case len(missing) > 0:
		return 0, false, explainForbidden(fmt.Errorf("no %s in a user namespace", strings.Join(missing, ", ")))
	}
	if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""); err != nil {
		return 0, false, fmt.Errorf("lab: make mounts private: %w", err)
	}
	// The machine's shows the processes of its own namespace, and this one is not among them.
	if err := unix.Mount("proc", "/proc", "proc", unix.MS_NOSUID|unix.MS_NODEV|unix.MS_NOEXEC, ""); err != nil {
		return 0, false, fmt.Errorf("lab: mount /proc (a container without --privileged?): %w", err)
	}
	return 0, false, nil
}

// missingRights returns the capabilities that building a Net needs and this thread lacks.
func missingRights() ([]string, error) {
	header := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
	var data [2]unix.CapUserData
	if err := unix.Capget(&header, &data[0]); err != nil {
		return nil, fmt.Errorf("lab: capget: %w", err)
	}
	var missing []string
	for _, c := range []struct {
		bit  int
		name string
	}{{unix.CAP_SYS_ADMIN, "CAP_SYS_ADMIN"}, {unix.CAP_NET_ADMIN, "CAP_NET_ADMIN"}, {unix.CAP_NET_RAW, "CAP_NET_RAW"}} {
		if data[0].Effective&(1<<c.bit) == 0 {
			missing = append(missing, c.name)
		}
	}
	return missing, nil
}

// sysctlsReadOnly reports whether /proc/sys is read-only, as in containers.
func sysctlsReadOnly() bool {
	var fs unix.Statfs_t
	return unix.Statfs("/proc/sys/net", &fs) == nil && fs.Flags&unix.ST_RDONLY != 0
}

// remountSysctls makes /proc/sys writable in the mount namespace that reexec made, which nobody else sees.
func remountSysctls() error {
	if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""); err != nil {
		return fmt.Errorf("lab: make mounts private: %w", err)
	}
	err := unix.Mount("", "/proc/sys", "", unix.MS_REMOUNT|unix.MS_BIND|unix.MS_NOSUID|unix.MS_NODEV|unix.MS_NOEXEC, "")
	if err != nil {
		return fmt.Errorf("lab: /proc/sys is read-only and can't be remounted (a container without --privileged?): %w", err)
	}
	return nil
}

// reexec runs the program again in new namespaces, those of flags and optionally a user namespace. It returns the exit
// status: 128 plus the signal if it was killed.
func reexec(user bool, flags uintptr) (int, error) {
	cmd := exec.Command("/proc/self/exe", os.Args[1:]...)
	cmd.Args[0] = os.Args[0]
	cmd.Env = append(os.Environ(), enteredEnv+"=1")
	cmd.Stdin, cmd.Stdout, cmd.Stderr = os.Stdin, os.Stdout, os.Stderr
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL, Cloneflags: flags}
	if user {
		cmd.SysProcAttr.Cloneflags |= syscall.CLONE_NEWUSER
		cmd.SysProcAttr.UidMappings = []syscall.SysProcIDMap{{ContainerID: 0, HostID: os.Geteuid(), Size: 1}}
		cmd.SysProcAttr.GidMappings = []syscall.SysProcIDMap{{ContainerID: 0, HostID: os.Getegid(), Size: 1}}
	}
	// The death signal comes when the thread ends that started the child, not the process.
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	signals := make(chan os.Signal, 16)
	// Not those that stop and continue a job: they shall do that to this process, too.
	signal.Notify(signals, syscall.SIGHUP, syscall.SIGINT, syscall.SIGQUIT, syscall.SIGTERM, syscall.SIGUSR1,
		syscall.SIGUSR2)
	if err := cmd.Start(); err != nil {
		signal.Stop(signals)
		return 0, explainForbidden(err)
	}
	passed := make(chan struct{})
	go func() {
		defer close(passed)
		for s := range signals {
			forwardSignal(cmd.Process, s)
		}
	}()
	err := cmd.Wait()
	signal.Stop(signals)
	close(signals)
	<-passed
	var exit *exec.ExitError
	if err != nil && !errors.As(err, &exit) {
		return 0, fmt.Errorf("lab: wait for the run in a user namespace: %w", err)
	}
	if ws := cmd.ProcessState.Sys().(syscall.WaitStatus); ws.Signaled() {
		return 128 + int(ws.Signal()), nil
	}
	return cmd.ProcessState.ExitCode(), nil
}

// forwardSignal sends a signal to the child, unless the terminal sends it to both: a program that gets ^C twice may
// skip its cleanup.
func forwardSignal(child *os.Process, s os.Signal) {
	if (s == syscall.SIGINT || s == syscall.SIGQUIT) && inForeground() {
		return
	}
	_ = child.Signal(s) // it may have ended just now
}

// inForeground reports whether this process is one that its terminal sends signals to.
func inForeground() bool {
	tty, err := os.Open("/dev/tty")
	if err != nil {
		return false
	}
	defer tty.Close()
	group, err := unix.IoctlGetInt(int(tty.Fd()), unix.TIOCGPGRP)
	return err == nil && group == unix.Getpgrp()
}

// explainForbidden explains why user namespaces do not work here.
func explainForbidden(err error) error {
	for _, s := range []struct{ key, bad, cure string }{
		{"user/max_user_namespaces", "0", "a positive number"},
		{"user/max_net_namespaces", "0", "a positive number"},
		{"kernel/unprivileged_userns_clone", "0", "1"},             // Debian before 11
		{"kernel/apparmor_restrict_unprivileged_userns", "1", "0"}, // Ubuntu since 23.10
	} {
		if value, e := os.ReadFile("/proc/sys/" + s.key); e == nil && strings.TrimSpace(string(value)) == s.bad {
			return fmt.Errorf("lab: test hosts need root, or user namespaces, which this machine forbids: sysctl %s is %s, "+
				"should be %s: %w", strings.ReplaceAll(s.key, "/", "."), s.bad, s.cure, err)
		}
	}
	return fmt.Errorf("lab: test hosts need root with CAP_SYS_ADMIN, CAP_NET_ADMIN and CAP_NET_RAW, or user namespaces, "+
		"which this process may not make (a container's seccomp profile, a chroot?): %w", err)
}
