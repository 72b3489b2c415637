package main

import (
	"errors"
	"fmt"
	"os"
	"strings"

	"github.com/spf13/pflag"

	"github.com/verdict-proxy/verdict/internal/config"
	"github.com/verdict-proxy/verdict/sync/dataplane"
)

// policyFlags are those of run that decide about packets, for commands that only look: kube-proxy's, and its configuration file.
type policyFlags struct {
	flags config.Flags
	// told says that what there is to say about the file was said.
	told bool
	// said is what config gave last.
	said dataplane.Config
	// settings are all of what was said.
	settings *config.Settings
}

func (p *policyFlags) add(f *pflag.FlagSet) { p.flags.AddPolicy(f) }

// config checks the flags and the file and gives what they say. What is wrong with the file goes to standard error, and the rest of
// it counts, as in run.
func (p *policyFlags) config() (dataplane.Config, error) {
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
	s.Policy.NodeName, err = nodeName(s)
	p.said, p.settings = s.Policy, s
	return s.Policy, err
}

// nodeName gives this node's name in the cluster, as kube-proxy finds it.
func nodeName(s *config.Settings) (string, error) {
	if s.NodeName != "" {
		return s.NodeName, nil
	}
	host, err := os.Hostname()
	if host = strings.ToLower(strings.TrimSpace(host)); err == nil && host == "" {
		err = errors.New("it is empty")
	}
	if err != nil {
		return "", fmt.Errorf("--hostname-override is not given, and the host's name cannot be read: %w", err)
	}
	return host, nil
}
