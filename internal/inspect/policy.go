package inspect

import (
	"fmt"
	"os"

	"github.com/spf13/pflag"

	"github.com/verdict-proxy/verdict/internal/config"
	"github.com/verdict-proxy/verdict/sync/dataplane"
)

// Policy are the flags of run that decide about packets, for commands that only look: kube-proxy's, and its
// configuration file.
type Policy struct {
	flags config.Flags
	// told says that what there is to say about the file was said.
	told bool
	// said is what Config gave last.
	said dataplane.Config
	// settings are all of what was said.
	settings *config.Settings
}

// AddFlags defines the flags.
func (p *Policy) AddFlags(f *pflag.FlagSet) { p.flags.AddPolicy(f) }

// Config checks the flags and the file and gives what they say. What is wrong with the file goes to standard error, and
// the rest of it counts, as in run.
func (p *Policy) Config() (dataplane.Config, error) {
	s, problems, err := config.Load(p.flags.Config, &p.flags, nil)
	if err != nil {
		return dataplane.Config{}, err
	}
	for _, problem := range problems {
		if problem.Severity != config.Note && !p.told {
			fmt.Fprintln(os.Stderr, "verdict:", problem)
		}
	}
	p.told = true
	s.Policy.NodeName, err = s.Node()
	p.said, p.settings = s.Policy, s
	return s.Policy, err
}

// Settings are all of what the flags and the file say; nil before Config was called.
func (p *Policy) Settings() *config.Settings { return p.settings }

// saysPods says whether the flags or the configuration file tell pods from others.
func (p *Policy) saysPods() bool {
	d := p.said.DetectLocal
	return len(d.ClusterCIDRs) > 0 || d.Interface != "" || d.Mode == dataplane.DetectNodeCIDR
}
