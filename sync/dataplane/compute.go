package dataplane

import (
	"maps"
	"slices"

	"github.com/verdict-proxy/verdict/sync/snapshot"
)

// Compute decides everything from a snapshot. It returns the State and all conflicts, sorted. A Planner's increments
// must add up to the same State. The cost grows with the size of the cluster.
func Compute(cfg Config, s *snapshot.Snapshot) (*State, []Conflict) {
	shared := Overlaps(cfg, s)
	b := builder{host: newHost(cfg, s, shared), reserved: reservedIn(s)}
	st := &State{Services: make(map[snapshot.Name]*Service, len(s.Services))}
	st.setGlobals(&b.host, s.ServiceCIDRs, shared)

	b.refer(s, slices.Collect(maps.Keys(s.Services)))
	winner := make(map[Key]Claim, len(s.Services))
	for n := range s.Services {
		svc := b.service(s, n)
		if svc == nil {
			continue
		}
		st.Services[n] = svc
	}
	for _, n := range b.balance() {
		st.Services[n] = b.service(s, n)
	}
	for _, svc := range st.Services {
		svc.eachClaim(func(k Key, c Claim) {
			if w, claimed := winner[k]; !claimed || c.Compare(w) < 0 {
				winner[k] = c
			}
		})
	}
	var found []Conflict
	for n, svc := range st.Services {
		left, _ := svc.removeLost(func(k Key, c Claim) bool {
			if w := winner[k]; c != w {
				found = append(found, Conflict{Key: k, Winner: w, Loser: c})
				return false
			}
			return true
		})
		if left == nil {
			delete(st.Services, n)
		}
	}
	slices.SortFunc(found, Conflict.Compare)
	return st, found
}
