package iptshim

import (
	"net/netip"
	"slices"
	"strings"

	"github.com/verdict-proxy/verdict/sync/dataplane"
)

// Settings are what rules tell of what proxies are told by flags.
type Settings struct {
	Pods                         dataplane.Pods
	MasqueradeAll, GuardLoopback bool
}

// Rules counts the rules in chains that have names like ours, kube-proxy's among them.
func (s *Saved) Rules() (n int) {
	for _, t := range s.tables {
		for name, rules := range t.chains {
			if strings.HasPrefix(name, "KUBE-") {
				n += len(rules)
			}
		}
	}
	return n
}

// Settings reads from the rules how pods are told from others, and whether everything is masqueraded.
func (s *Saved) Settings() (out Settings) {
	if t := s.tables[Filter]; t != nil {
		out.GuardLoopback = slices.ContainsFunc(t.chains[loopbackChain], func(r savedRule) bool {
			return strings.HasPrefix(r.line, "! -s 127.0.0.0/8 -d 127.0.0.0/8 ")
		})
	}
	nat := s.tables[NAT]
	if nat == nil {
		return out
	}
	for name, rules := range nat.chains {
		if !strings.HasPrefix(name, svcPrefix) && !strings.HasPrefix(name, svlPrefix) {
			continue
		}
		for i := range rules { // those of all Services say the same
			if rules[i].target() == markChain {
				out.marks(rules[i].words)
				return out
			}
		}
	}
	return out
}

// marks reads the rule that masquerades what is sent to a cluster IP.
func (s *Settings) marks(words []string) {
	not := slices.Index(words, "!")
	if not < 0 || not+2 >= len(words) || words[not+1] != "-s" && words[not+1] != "-i" {
		s.MasqueradeAll = true
		return
	}
	switch what := words[not+2]; {
	case words[not+1] == "-s":
		if p, err := netip.ParsePrefix(what); err == nil {
			s.Pods.CIDR = p
		}
	case strings.HasSuffix(what, "+"):
		s.Pods.InterfacePrefix = strings.TrimSuffix(what, "+")
	default:
		s.Pods.Interface = what
	}
}
