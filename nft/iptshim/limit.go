package iptshim

import (
	"fmt"

	"github.com/verdict-proxy/verdict/internal/ipfamily"
	"github.com/verdict-proxy/verdict/sync/dataplane"
)

// MaxRules is how many rules one Service may have in a family. Each change of any Service goes through all rules, with
// the legacy variant, and the nft variant's time for the chains of one Service grows by the square:
// docs/decisions/0012-iptables.md has figures.
const MaxRules = 1 << 15

// TooManyRules is why a Service is not written.
type TooManyRules struct {
	Family ipfamily.Family
	// Rules is about how many there would be.
	Rules int
}

func (e *TooManyRules) Error() string {
	return fmt.Sprintf("the Service would have about %d rules of iptables in %v: %d at most", e.Rules, e.Family, MaxRules)
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
			rules[ipfamily.Of(sp.Frontends[0].Key.Addr)] += estimate(sp)
		}
	}
	for _, f := range ipfamily.All {
		if rules[f] > MaxRules {
			return &TooManyRules{Family: f, Rules: rules[f]}
		}
	}
	return nil
}

// policyRules is how many rules of a port follow from its policies alone, at most.
const policyRules = 8

// estimate gives about how many rules a port has, and fewer only by maxRefusals: two for each frontend, and three or
// with affinity four for each endpoint of a pool. Source ranges stand in one chain for all frontends.
func estimate(sp *dataplane.ServicePort) (rules int) {
	each, sources := 3, 0
	if sp.Affinity > 0 {
		each++
	}
	for i := range sp.Frontends {
		sources = max(sources, len(sp.Frontends[i].Sources))
	}
	return policyRules + 2*len(sp.Frontends) + sources + each*(len(sp.Cluster.Endpoints)+len(sp.Local.Endpoints))
}
