package node

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"strings"
	"syscall"

	"github.com/verdict-proxy/verdict/internal/proxy/backends"
	"github.com/verdict-proxy/verdict/internal/proxy/config"
	"github.com/verdict-proxy/verdict/internal/system/sysctl"
)

// setSysctls sets the sysctls of connection tracking, and logs the changes. Call it after the rules are written: they
// make the kernel load connection tracking.
func setSysctls(host sysctl.Host, s *config.Settings, log *logger) {
	changed, errs := host.Apply(s.Sysctls(host.CPUs()))
	for _, c := range changed {
		log.Info("set a sysctl", "name", c.Name, "value", c.Now, "was", c.Before)
	}
	var told []string
	denied := false
	for _, err := range errs {
		denied = denied || errors.Is(err, fs.ErrPermission) || errors.Is(err, syscall.EROFS)
		told = append(told, err.Error())
	}
	if len(told) > 0 {
		text := "failed to set the conntrack sysctls"
		if denied {
			text += "; an init container that is privileged can set them with --init-only, " +
				"and conntrack.maxPerCore 0 with timeouts of 0s leaves them alone"
		}
		log.Warn(text, "err", strings.Join(told, "; "))
	}
}

// setOOMScore sets oom_score_adj. To lower it, the process needs CAP_SYS_RESOURCE.
func setOOMScore(host sysctl.Host, score int) error {
	_, errs := host.Apply([]sysctl.Setting{{Path: "proc/self/oom_score_adj", Value: score}})
	return errors.Join(errs...)
}

// InitOnly sets the sysctls, for which a container must be privileged. Run then finds them set. The error has one line
// for each sysctl that could not be set.
func InitOnly(host sysctl.Host, s *config.Settings, problems []*config.Problem, out io.Writer) error {
	for _, p := range problems {
		fmt.Fprintln(os.Stderr, "verdict:", p)
	}
	wanted := s.Sysctls(host.CPUs())
	if s.Policy.AnswersLocalhost() {
		wanted = append(wanted, sysctl.Setting{Path: "proc/sys/net/ipv4/conf/all/route_localnet", Value: 1})
	}
	for _, b := range backends.All {
		if b.Sysctls != nil {
			wanted = append(wanted, b.Sysctls(s)...)
		}
	}
	changed, errs := host.Apply(wanted)
	if s.Policy.Records {
		more, failed := recordNotes(host).Set(recordSysctls)
		changed, errs = append(changed, more...), append(errs, failed...)
	}
	for _, c := range changed {
		fmt.Fprintf(out, "%s = %d (was %d)\n", c.Name, c.Now, c.Before)
	}
	return errors.Join(errs...)
}

// WriteConfig writes the settings to a file. It fails if there are invalid values.
func WriteConfig(path string, s *config.Settings, problems []*config.Problem) error {
	var bad []error
	for _, p := range problems {
		if p.Severity == config.Invalid {
			bad = append(bad, p)
		} else {
			fmt.Fprintln(os.Stderr, "verdict:", p)
		}
	}
	if len(bad) > 0 {
		return errors.Join(bad...)
	}
	f, err := os.Create(path)
	if err != nil {
		return fmt.Errorf("--write-config-to: %w", err)
	}
	return errors.Join(s.Write(f), f.Close())
}

// RouteLocalnet sets the sysctl that lets packets from 127.0.0.1 leave the host, in the network namespace of the
// calling thread.
func RouteLocalnet() error {
	const path = "/proc/sys/net/ipv4/conf/all/route_localnet"
	if v, err := os.ReadFile(path); err == nil && string(v) == "1\n" {
		return nil
	}
	return os.WriteFile(path, []byte("1"), 0o644)
}
