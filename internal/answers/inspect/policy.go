package inspect

import (
	"github.com/spf13/pflag"

	"github.com/verdict-proxy/verdict/internal/proxy/config"
	"github.com/verdict-proxy/verdict/internal/system/terminal"
	"github.com/verdict-proxy/verdict/sync/dataplane"
)

// Policy holds the flags of run that decide about packets, for read-only commands: kube-proxy's flags, and its
// configuration file.
type Policy struct {
	flags config.Flags
	// printed is true once the problems of the file are printed.
	printed bool
	// policy is the last result of Config.
	policy dataplane.Config
	// settings holds the complete configuration.
	settings *config.Settings
}

// AddFlags defines the flags.
func (p *Policy) AddFlags(f *pflag.FlagSet) { p.flags.AddPolicy(f) }

// File returns the configuration file; empty if there is none.
func (p *Policy) File() string { return p.flags.Config }

// Config validates the flags and the file. Invalid values go to standard error; the rest of the file still applies, as
// in run.
func (p *Policy) Config() (dataplane.Config, error) {
	s, problems, err := config.Load(p.flags.Config, &p.flags, nil)
	if err != nil {
		return dataplane.Config{}, err
	}
	for _, problem := range problems {
		if problem.Severity != config.Note && !p.printed {
			terminal.Warn(problem)
		}
	}
	p.printed = true
	s.Policy.NodeName, err = s.Node()
	p.policy, p.settings = s.Policy, s
	return s.Policy, err
}

// Settings returns the complete configuration; nil before Config is called.
func (p *Policy) Settings() *config.Settings { return p.settings }

// detectsPods reports whether flags or file tell pods from others.
func (p *Policy) detectsPods() bool {
	d := p.policy.DetectLocal
	return len(d.ClusterCIDRs) > 0 || d.Interface != "" || d.Mode == dataplane.DetectNodeCIDR
}
