package dataplane

import (
	"cmp"
	"slices"

	"github.com/verdict-proxy/verdict/sync/snapshot"
)

// IPVS has a virtual service for each frontend and in each its own list of endpoints, where nftables shares them: what
// a Service asks of it multiplies. Above these numbers of virtual services and destinations nftables chooses.
// docs/decisions/0011-ipvs.md says what they cost.
const (
	// MostOfService is for one Service, whoever wants it scheduled.
	MostOfService = 4096
	// MostOfNamespace is for all Services of a namespace together that ask by their annotations. The oldest are served
	// first.
	MostOfNamespace = 65536
)

// weigh gives as how many a virtual service and a destination count, by the memory and the time that they take from the
// kernel.
func (s *Scheduling) weigh() (service, destination int) {
	switch s.Scheduler {
	case "mh": // a table of 34 KiB, which each change of a destination fills anew
		return 64, 4
	case "lblc", "lblcr":
		return 32, 1
	case "sh", "dh":
		return 8, 1
	}
	return 1, 1
}

// comeback is the part of a bound that has to be free before what was above it is scheduled again, so that a Service at
// the bound does not go to and fro with each endpoint.
const comeback = 8

func lower(most int) int { return most - most/comeback }

// budget keeps the books of what Services ask of IPVS. The zero value is empty.
type budget struct {
	// large are Services above their own bound, or not yet far enough below it.
	large map[snapshot.Name]bool
	// spaces are by namespace, for Services that are not too large.
	spaces map[string]*space
	// moved are namespaces in which something changed since balance.
	moved map[string]bool
}

// space is what the Services of a namespace ask for. Sum is that of all; out are those that do not get it.
type space struct {
	asks  map[snapshot.Name]*ask
	order []*ask // oldest first; nil if it has to be made anew
	sum   int
	out   map[snapshot.Name]bool
}

// ask is what one Service asks for.
type ask struct {
	name snapshot.Name
	age  snapshot.Age
	cost int
}

// judge books what a Service asks for, and says whether it gets it.
func (b *budget) judge(i *IPVS, a ask, annotated bool) NotScheduled {
	most := cmp.Or(i.MostOfService, MostOfService)
	if a.cost > most || b.large[a.name] && a.cost > lower(most) {
		b.forget(a.name)
		if b.large == nil {
			b.large = map[snapshot.Name]bool{}
		}
		b.large[a.name] = true
		return ServiceTooLarge
	}
	delete(b.large, a.name)
	if a.cost == 0 || !annotated || i.Mode != IPVSAuto { // the operator wants them all scheduled
		b.forget(a.name)
		return Schedulable
	}
	s := b.spaces[a.name.Namespace]
	if s == nil {
		s = &space{asks: map[snapshot.Name]*ask{}, out: map[snapshot.Name]bool{}}
		if b.spaces == nil {
			b.spaces, b.moved = map[string]*space{}, map[string]bool{}
		}
		b.spaces[a.name.Namespace] = s
	}
	if s.put(a) {
		b.moved[a.name.Namespace] = true
	}
	if s.out[a.name] {
		return NamespaceFull
	}
	return Schedulable
}

// put books an ask, and says whether it is another than before.
func (s *space) put(a ask) bool {
	was := s.asks[a.name]
	switch {
	case was == nil || was.age != a.age:
		s.order = nil
	case was.cost == a.cost:
		return false
	}
	if was != nil {
		s.sum -= was.cost
		was.age, was.cost = a.age, a.cost
	} else {
		s.asks[a.name] = &a
	}
	s.sum += a.cost
	return true
}

// forget takes a Service out of the books.
func (b *budget) forget(n snapshot.Name) {
	delete(b.large, n)
	s := b.spaces[n.Namespace]
	if s == nil || s.asks[n] == nil {
		return
	}
	s.sum -= s.asks[n].cost
	delete(s.asks, n)
	delete(s.out, n)
	s.order, b.moved[n.Namespace] = nil, true
	if len(s.asks) == 0 {
		delete(b.spaces, n.Namespace)
		delete(b.moved, n.Namespace)
	}
}

// reopen has balance look at all namespaces, since the bounds may be others.
func (b *budget) reopen() {
	for namespace := range b.spaces {
		b.moved[namespace] = true
	}
}

// balance gives the Services that get what they ask for and did not before, or the other way round: judge says
// something else of them now.
func (b *budget) balance(i *IPVS) (flipped []snapshot.Name) {
	for namespace := range b.moved {
		if s := b.spaces[namespace]; s != nil {
			flipped = s.balance(cmp.Or(i.MostOfNamespace, MostOfNamespace), flipped)
		}
	}
	clear(b.moved)
	slices.SortFunc(flipped, snapshot.Name.Compare)
	return flipped
}

// balance goes through the Services, oldest first. One that does not fit is left out, and younger ones may.
func (s *space) balance(most int, flipped []snapshot.Name) []snapshot.Name {
	if s.sum <= lower(most) && len(s.out) == 0 {
		return flipped
	}
	if s.order == nil {
		for _, a := range s.asks {
			s.order = append(s.order, a)
		}
		slices.SortFunc(s.order, func(a, b *ask) int { return cmp.Or(a.age.Compare(b.age), a.name.Compare(b.name)) })
	}
	taken := 0
	for _, a := range s.order {
		out, limit := s.out[a.name], most
		if out {
			limit = lower(most)
		}
		fits := taken+a.cost <= limit
		if fits {
			taken += a.cost
		}
		if fits != out {
			continue
		}
		if flipped = append(flipped, a.name); fits {
			delete(s.out, a.name)
		} else {
			s.out[a.name] = true
		}
	}
	return flipped
}

// cost is how many virtual services and destinations a Service asks for, as they are weighed.
func (s *Service) cost() (n int) {
	for _, sp := range s.Ports {
		if sp.Scheduling == nil {
			continue
		}
		service, destination := sp.Scheduling.weigh()
		for i := range sp.Frontends {
			if pool := sp.Scheduled(&sp.Frontends[i]); pool != nil {
				n += service + destination*len(pool.Endpoints)
			}
		}
	}
	return n
}

// bound leaves a Service that asks for too much to nftables. Nobody else may hold it yet.
func (b *builder) bound(s *Service, svc *snapshot.Service) {
	why := Schedulable
	switch {
	case b.scheduling == nil:
		b.budget.forget(s.Name)
	case svc.Affinity > 0 && b.host.ipvs.Mode == IPVSAuto:
		b.budget.forget(s.Name)
		why = WithAffinity
	default:
		why = b.budget.judge(&b.host.ipvs, ask{s.Name, svc.Age, s.cost()}, svc.AsksForIPVS())
	}
	if why == Schedulable {
		return
	}
	for _, sp := range s.Ports {
		sp.Scheduling = nil
		for i := range sp.Frontends {
			sp.Frontends[i].NotScheduled = why
		}
	}
}

// NotScheduled says why nothing of a Service is scheduled, or not all of it, though it asks for that. The Service may
// be nil.
func (s *Service) NotScheduled() (why NotScheduled) {
	for _, sp := range s.ports() {
		for i := range sp.Frontends {
			why = max(why, sp.Frontends[i].NotScheduled)
		}
	}
	return why
}
