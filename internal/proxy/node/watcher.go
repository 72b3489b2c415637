package node

import (
	"context"
	"os"
	"os/signal"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"

	"github.com/verdict-proxy/verdict/internal/proxy/config"
	"github.com/verdict-proxy/verdict/internal/system/sysctl"
	"github.com/verdict-proxy/verdict/internal/system/wake"
	"github.com/verdict-proxy/verdict/sync/watch"
)

// configWatcher holds the current settings, and reads the file again when it changes.
type configWatcher struct {
	flags *config.Flags
	log   *logger
	// host has the sysctls.
	host sysctl.Host

	settings atomic.Pointer[config.Settings]
	// reported are the problems of the last reading, and failed the error if the file could not be read.
	reported map[string]bool
	failed   string
	// invalid describes the invalid values of the file.
	invalid string
}

// newConfigWatcher starts with settings, and reports their problems.
func newConfigWatcher(flags *config.Flags, s *config.Settings, problems []*config.Problem, log *logger) *configWatcher {
	w := &configWatcher{flags: flags, log: log, reported: map[string]bool{}}
	w.settings.Store(s)
	w.report(problems)
	return w
}

// start is called when the proxy gets the lease, which may be long after the process started. It reads the file again
// and returns the settings, including those that take effect only at a restart.
func (w *configWatcher) start() *config.Settings {
	if s, _ := w.read(nil); s != nil {
		w.settings.Store(s)
	}
	s := w.settings.Load()
	w.log.level.Set(s.Log.Level)
	w.setOOMScore(s)
	return s
}

// read reads the file, and reports what is wrong with it. It returns nil if the file cannot be read. News describes
// what was not wrong before.
func (w *configWatcher) read(last *config.Settings) (s *config.Settings, news string) {
	s, problems, err := config.Load(w.flags.Config, w.flags, last)
	if err == nil {
		if w.failed != "" {
			w.log.Info("the configuration file can be read again")
		}
		w.failed = ""
		return s, w.report(problems)
	}
	if w.failed == err.Error() {
		return nil, ""
	}
	w.failed = err.Error()
	w.log.Error("failed to read the configuration file; its last good version stays in force", "err", err)
	return nil, w.failed
}

// report logs the problems of the file, unless they were reported at the last reading. News describes all invalid
// values, if there is a new one.
func (w *configWatcher) report(problems []*config.Problem) (news string) {
	reported := map[string]bool{}
	var invalid []string
	changed := false
	for _, p := range problems {
		key := *p
		key.Then = "" // what is done about it is another thing at the start than later
		if !w.reported[key.Error()] && !reported[key.Error()] {
			w.log.report(p)
			changed = changed || p.Severity == config.Invalid
		}
		if p.Severity == config.Invalid {
			invalid = append(invalid, p.Error())
		}
		reported[key.Error()] = true
	}
	if w.invalid != "" && len(invalid) == 0 {
		w.log.Info("the configuration has no invalid values any more")
	}
	w.reported, w.invalid = reported, strings.Join(invalid, "; ")
	if changed {
		return w.invalid
	}
	return ""
}

// configListener is called with changes of the file.
type configListener struct {
	// invalid is called with what is wrong with the file, if it was not wrong before.
	invalid func(what string)
	// changed is called after settings change that take effect now; fields names them.
	changed func(s *config.Settings, fields map[string]bool)
}

// run follows changes of the file, and SIGHUP, until the context ends.
func (w *configWatcher) run(ctx context.Context, listener configListener) {
	hangup := make(chan os.Signal, 1)
	signal.Notify(hangup, syscall.SIGHUP)
	defer signal.Stop(hangup)
	changed := make(chan struct{}, 1)
	var watching sync.WaitGroup
	defer watching.Wait()
	if w.flags.Config != "" {
		watching.Go(func() {
			watch.Changes(ctx, w.flags.Config, func() {
				wake.Up(changed) // it is read anyway
			}, reporter(w.log.Logger))
		})
	}
	for {
		select {
		case <-ctx.Done():
			return
		case <-changed:
		case <-hangup:
			w.log.Info("SIGHUP: reading the configuration again; manifests are read whenever they change")
		}
		w.reload(listener)
	}
}

// reload reads the file again, and applies the changes.
func (w *configWatcher) reload(listener configListener) {
	before := w.settings.Load()
	s, news := w.read(before)
	if news != "" {
		listener.invalid(news)
	}
	if s == nil {
		return
	}
	changes := s.Changes(before)
	if len(changes) == 0 {
		return
	}
	now := map[string]bool{}
	for _, c := range changes {
		switch c.Effect {
		case config.Live:
			now[c.Field] = true
			w.log.Info("the configuration has changed: "+c.Field, "is", c.Now, "was", c.Before)
		case config.Restart:
			w.log.Warn("the configuration has changed: "+c.Field+" takes effect at the next start", "is", c.Now, "was", c.Before)
		default:
			w.log.Info("the configuration has changed: "+c.Field+" has no effect", "is", c.Now, "was", c.Before)
		}
	}
	w.settings.Store(s)
	w.log.level.Set(s.Log.Level)
	if now["oomScoreAdj"] {
		w.setOOMScore(s)
	}
	listener.changed(s, now)
}

func (w *configWatcher) setOOMScore(s *config.Settings) {
	if err := setOOMScore(w.host, s.OOMScoreAdj); err != nil {
		w.log.Info(err.Error())
	}
}

func anyInSection(fields map[string]bool, section string) bool {
	for f := range fields {
		if strings.HasPrefix(f, section) {
			return true
		}
	}
	return false
}
