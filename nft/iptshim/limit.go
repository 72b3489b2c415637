package iptshim

import (
	"fmt"

	"github.com/verdict-proxy/verdict/internal/system/ipfamily"
	"github.com/verdict-proxy/verdict/sync/dataplane"
)

// MaxRules is how many rules one Service may have in a family, and MaxPortRules one of its ports. Each change of any
// Service goes through all rules, with the legacy variant, and the nft variant's time for one chain grows by the square
// of its rules: docs/decisions/0012-iptables.md has figures.
const (
	MaxRules     = 1 << 16
	MaxPortRules = 1 << 15
)

// TooManyRules is why a Service is not written.
type TooManyRules struct {
	Family ipfamily.Family
	// Rules is about how many there would be, and Most how many there may be.
	Rules, Most int
}

func (e *TooManyRules) Error() string {
	of := "the Service"
	if e.Most == MaxPortRules {
		of = "a port of the Service"
	}
	return fmt.Sprintf("%s would have about %d rules of iptables in %v: %d at most; divide it into several Services, "+
		"or run nodes with nftables", of, e.Rules, e.Family, e.Most)
}

// OnlyOfService says that the text tells of nothing but what the Service asks for: its author may read it.
func (e *TooManyRules) OnlyOfService() {}

// Check gives a *TooManyRules for a Service that is too large to be written. The Service may be nil.
func Check(s *dataplane.Service) error {
	if s == nil {
		return nil
	}
	var rules ipfamily.Per[int]
	for _, sp := range s.Ports {
		if len(sp.Frontends) > 0 {
			f, n := ipfamily.Of(sp.Frontends[0].Key.Addr), estimate(sp)
			if rules[f] += n; n > MaxPortRules {
				return &TooManyRules{f, n, MaxPortRules}
			}
		}
	}
	for _, f := range ipfamily.All {
		if rules[f] > MaxRules {
			return &TooManyRules{f, rules[f], MaxRules}
		}
	}
	return nil
}

// policyRules is how many rules of a port follow from its policies alone, at most.
const policyRules = 8

// estimate gives about how many rules a port has, and fewer only by maxRefusals: two for each frontend, or four with a
// refused share, and three or with affinity four for each endpoint of a pool. Source ranges stand in one chain for all
// frontends.
func estimate(sp *dataplane.ServicePort) (rules int) {
	each, sources, frontend := 3, 0, 2
	if sp.Affinity > 0 {
		each++
	}
	if sp.Cluster.Refused+sp.Local.Refused > 0 {
		frontend = 4
	}
	for i := range sp.Frontends {
		sources = max(sources, len(sp.Frontends[i].Sources))
	}
	return policyRules + frontend*len(sp.Frontends) + sources + each*(len(sp.Cluster.Endpoints)+len(sp.Local.Endpoints))
}
