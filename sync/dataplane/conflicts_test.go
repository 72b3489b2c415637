package dataplane

import "slices"

// conflicts gives all there are at the moment, sorted.
func (p *Planner) conflicts() []Conflict {
	var all []Conflict
	for k, list := range p.claims.contested {
		all = append(all, newConflicts(k, nil, list)...)
	}
	slices.SortFunc(all, Conflict.Compare)
	return all
}
