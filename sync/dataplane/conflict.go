package dataplane

import (
	"cmp"
	"fmt"
	"slices"

	"github.com/verdict-proxy/verdict/sync/snapshot"
)

// Claim is the request of a service port to answer at a Key.
type Claim struct {
	Port PortName
	Kind Kind
	// Age is the Service's.
	Age snapshot.Age
}

// Compare orders the claims on one Key; the first claim wins. The rank of the kind decides first, then the age of the
// Service: the oldest keeps the Key. Names decide only between Services of unknown age. All of this is in the objects,
// so every node decides alike, also after a restart.
func (c Claim) Compare(o Claim) int {
	return cmp.Or(cmp.Compare(c.Kind.rank(), o.Kind.rank()), c.Age.Compare(o.Age), cmp.Compare(c.Kind, o.Kind),
		c.Port.Compare(o.Port))
}

// rank orders kinds by how an address is assigned, the most trusted first. The API server gives a cluster IP to one
// Service alone. Controllers assign load balancer addresses, and the API server assigns node ports: where both meet at
// an address of the node, they rank the same. Anybody who may write a Service may write any external IP, so external
// IPs must not take a Key that is, or will be, assigned.
func (k Kind) rank() int {
	return [...]int{ClusterIP: 0, LoadBalancerIP: 1, NodePort: 1, ExternalIP: 2}[k]
}

// String gives "default/web:http (NodePort)".
func (c Claim) String() string { return c.Port.String() + " (" + c.Kind.String() + ")" }

// Before says why a claim goes before another on the same Key, by what Compare asks first.
func (c Claim) Before(o Claim) string {
	switch {
	case c.Kind.rank() != o.Kind.rank():
		return c.Kind.String() + " goes before " + o.Kind.String()
	case c.Age.Compare(o.Age) != 0:
		return "the oldest Service keeps them"
	}
	return "the first one by name keeps them"
}

// Conflict is a Key that two service ports claim. The loser answers at its other frontends only.
type Conflict struct {
	Key           Key
	Winner, Loser Claim
}

// Compare orders by Key, then winner, then loser.
func (c Conflict) Compare(o Conflict) int {
	return cmp.Or(c.Key.Compare(o.Key), c.Winner.Compare(o.Winner), c.Loser.Compare(o.Loser))
}

// String gives a line for the log.
func (c Conflict) String() string {
	return c.Key.String() + " is claimed twice: " + c.Winner.String() + " keeps it, " + c.Loser.String() +
		" is left out there"
}

// ConflictSummary summarizes the conflicts that one Service loses to another.
type ConflictSummary struct {
	// Conflict is the first of them.
	Conflict
	// Keys is how many there are.
	Keys int
}

// String returns one line for the log, however many keys there are.
func (c ConflictSummary) String() string {
	if c.Keys == 1 {
		return c.Conflict.String()
	}
	return fmt.Sprintf("%v and %d more are claimed twice: %v keeps them, %v is left out there", c.Key, c.Keys-1,
		c.Winner, c.Loser)
}

// SummarizeConflicts groups conflicts by winner and loser, sorted by the first conflict of each group.
func SummarizeConflicts(conflicts []Conflict) []ConflictSummary {
	found := conflictSummaries{}
	for _, c := range conflicts {
		found.add(c, len(conflicts))
	}
	return found.sorted()
}

// conflictSummaries collects ConflictSummary values by winner and loser.
type conflictSummaries map[[2]snapshot.Name]*ConflictSummary

// add counts a conflict, and returns false if there are already too many summaries.
func (cs conflictSummaries) add(c Conflict, most int) bool {
	who := [2]snapshot.Name{c.Winner.Port.Service, c.Loser.Port.Service}
	at := cs[who]
	switch {
	case at == nil && len(cs) >= most:
		return false
	case at == nil:
		at = &ConflictSummary{Conflict: c}
		cs[who] = at
	case c.Compare(at.Conflict) < 0:
		at.Conflict = c
	}
	at.Keys++
	return true
}

func (cs conflictSummaries) sorted() []ConflictSummary {
	if len(cs) == 0 {
		return nil
	}
	out := make([]ConflictSummary, 0, len(cs))
	for _, c := range cs {
		out = append(out, *c)
	}
	slices.SortFunc(out, func(a, b ConflictSummary) int { return a.Compare(b.Conflict) })
	return out
}

// claims records which Services claim each Key. A Key is in at most one of the first two maps.
type claims struct {
	// only holds Keys with one claim, and the Service that has it. That Service must have won its Key, so that its
	// Frontend holds the rest of the claim.
	only map[Key]snapshot.Name
	// contested holds the claims on Keys with several, sorted: the first wins. Lists are replaced, never changed. During
	// an update a list may hold a single claim.
	contested map[Key][]Claim
	// lost holds the keys that a Service claims but does not win, possibly more than once each.
	lost map[snapshot.Name][]Key
}

func newClaims(keys int) claims {
	return claims{
		only:      make(map[Key]snapshot.Name, keys),
		contested: map[Key][]Claim{},
		lost:      map[snapshot.Name][]Key{},
	}
}

// add records a claim and returns the earlier claims on the Key, sorted. claimOf returns the claim of a Key's only
// claimant.
func (cl *claims) add(k Key, c Claim, claimOf func(snapshot.Name, Key) Claim) (before []Claim) {
	before = cl.contested[k]
	if before == nil {
		owner, owned := cl.only[k]
		if !owned {
			cl.only[k] = c.Port.Service
			return nil
		}
		delete(cl.only, k)
		before = []Claim{claimOf(owner, k)}
	}
	i, _ := slices.BinarySearchFunc(before, c, Claim.Compare)
	cl.contested[k] = slices.Concat(before[:i], []Claim{c}, before[i:])
	return before
}

// remove deletes every claim of a Service on a Key.
func (cl *claims) remove(k Key, n snapshot.Name) {
	list := cl.contested[k]
	if list == nil {
		if cl.only[k] == n {
			delete(cl.only, k)
		}
		return
	}
	list = slices.DeleteFunc(slices.Clone(list), func(c Claim) bool { return c.Port.Service == n })
	if len(list) == 0 {
		delete(cl.contested, k)
	} else {
		cl.contested[k] = list
	}
}

// uncontest records that a Key has a single claimant left. That Service must have won the Key.
func (cl *claims) uncontest(k Key) {
	if list := cl.contested[k]; len(list) == 1 {
		delete(cl.contested, k)
		cl.only[k] = list[0].Port.Service
	}
}

// wins reports whether a recorded claim wins its Key.
func (cl *claims) wins(k Key, c Claim) bool {
	list := cl.contested[k]
	return len(list) == 0 || list[0] == c
}

// winner returns the Service that wins a Key, or the zero Name if nobody claims it.
func (cl *claims) winner(k Key) snapshot.Name {
	if list := cl.contested[k]; list != nil {
		return list[0].Port.Service
	}
	return cl.only[k]
}

// newConflicts returns the conflicts on a Key that did not exist before. Both lists of claims are sorted.
func newConflicts(k Key, before, now []Claim) (found []Conflict) {
	if len(now) < 2 {
		return nil
	}
	for _, c := range now[1:] {
		if len(before) > 0 && before[0] == now[0] {
			if i, known := slices.BinarySearchFunc(before, c, Claim.Compare); known && i > 0 {
				continue
			}
		}
		found = append(found, Conflict{Key: k, Winner: now[0], Loser: c})
	}
	return found
}

// removeLost removes frontends that lost their Key, then ports without frontends. It changes the Service, which nobody
// else may hold yet, and returns nil if nothing is left.
func (s *Service) removeLost(wins func(Key, Claim) bool) (left *Service, lost []Key) {
	if s == nil {
		return nil, nil
	}
	for _, sp := range s.Ports {
		sp.Frontends = slices.DeleteFunc(sp.Frontends, func(f Frontend) bool {
			if wins(f.Key, Claim{sp.Name, f.Kind, s.Age}) {
				return false
			}
			lost = append(lost, f.Key)
			return true
		})
	}
	if lost == nil {
		return s, nil
	}
	s.Ports = slices.DeleteFunc(s.Ports, func(sp *ServicePort) bool { return len(sp.Frontends) == 0 })
	if len(s.Ports) == 0 {
		return nil, lost
	}
	return s, lost
}

// sameClaims reports whether two Services claim the same keys, by the same ports, as the same kinds, at the same age.
// Either may be nil.
func (s *Service) sameClaims(o *Service) bool {
	if s == nil || o == nil {
		return s == o
	}
	return s.Age == o.Age && slices.EqualFunc(s.Ports, o.Ports, func(p, op *ServicePort) bool {
		return p.Name == op.Name && slices.EqualFunc(p.Frontends, op.Frontends, func(f, of Frontend) bool {
			return f.Key == of.Key && f.Kind == of.Kind
		})
	})
}

// eachClaim calls f for every frontend of a Service. The Service may be nil.
func (s *Service) eachClaim(f func(Key, Claim)) {
	for sp, fe := range s.EachFrontend() {
		f(fe.Key, Claim{sp.Name, fe.Kind, s.Age})
	}
}
