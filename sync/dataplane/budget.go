package dataplane

import (
	"cmp"
	"slices"

	"github.com/verdict-proxy/verdict/sync/snapshot"
)

// IPVS keeps a virtual service for each frontend, and each virtual service has its own list of endpoints. nftables
// shares endpoints between frontends. So what a Service asks of IPVS multiplies, and nftables takes over above these
// numbers of virtual services and destinations. docs/decisions/0011-ipvs.md says what they cost.
const (
	// MaxPerService bounds one Service, whoever asks for IPVS.
	MaxPerService = 4096
	// MaxPerNamespace bounds all Services of a namespace that ask by annotation. The oldest Services are scheduled first.
	MaxPerNamespace = 65536
)

// costs returns the weight of a virtual service and of a destination: how much kernel memory and time they take.
func (s *Scheduling) costs() (service, destination int) {
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

// hysteresis is the part of a bound that must be free before a rejected Service is scheduled again. Without it, a
// Service at the bound would switch with every endpoint.
const hysteresis = 8

func readmitLimit(most int) int { return most - most/hysteresis }

// budget records what Services ask of IPVS. The zero value is empty.
type budget struct {
	// tooLarge are Services above their own bound, or not yet far enough below it.
	tooLarge map[snapshot.Name]bool
	// namespaces are by namespace, for Services that are not too large.
	namespaces map[string]*namespaceBudget
	// changed are namespaces in which something changed since balance.
	changed map[string]bool
}

// namespaceBudget records what the Services of a namespace ask for. sum is the total of all requests; rejected holds
// the Services that do not get what they ask for.
type namespaceBudget struct {
	requests map[snapshot.Name]*request
	order    []*request // oldest first; nil if it has to be made anew
	sum      int
	rejected map[snapshot.Name]bool
}

// request is what one Service asks for.
type request struct {
	name snapshot.Name
	age  snapshot.Age
	cost int
}

// admit records what a Service asks for, and returns whether it gets it.
func (b *budget) admit(i *IPVS, a request, annotated bool) NotScheduled {
	most := cmp.Or(i.MaxPerService, MaxPerService)
	if a.cost > most || b.tooLarge[a.name] && a.cost > readmitLimit(most) {
		b.forget(a.name)
		if b.tooLarge == nil {
			b.tooLarge = map[snapshot.Name]bool{}
		}
		b.tooLarge[a.name] = true
		return ServiceTooLarge
	}
	delete(b.tooLarge, a.name)
	if a.cost == 0 || !annotated || i.Mode != IPVSAuto { // the operator wants them all scheduled
		b.forget(a.name)
		return Schedulable
	}
	s := b.namespaces[a.name.Namespace]
	if s == nil {
		s = &namespaceBudget{requests: map[snapshot.Name]*request{}, rejected: map[snapshot.Name]bool{}}
		if b.namespaces == nil {
			b.namespaces, b.changed = map[string]*namespaceBudget{}, map[string]bool{}
		}
		b.namespaces[a.name.Namespace] = s
	}
	if s.record(a) {
		b.changed[a.name.Namespace] = true
	}
	if s.rejected[a.name] {
		return NamespaceFull
	}
	return Schedulable
}

// record records a request, and returns whether it differs from the last one.
func (s *namespaceBudget) record(a request) bool {
	was := s.requests[a.name]
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
		s.requests[a.name] = &a
	}
	s.sum += a.cost
	return true
}

// rejects reports whether a Service does not get what it asks for.
func (b *budget) rejects(n snapshot.Name) bool {
	s := b.namespaces[n.Namespace]
	return b.tooLarge[n] || s != nil && s.rejected[n]
}

// forget removes a Service from the budget.
func (b *budget) forget(n snapshot.Name) {
	delete(b.tooLarge, n)
	s := b.namespaces[n.Namespace]
	if s == nil || s.requests[n] == nil {
		return
	}
	s.sum -= s.requests[n].cost
	delete(s.requests, n)
	delete(s.rejected, n)
	s.order, b.changed[n.Namespace] = nil, true
	if len(s.requests) == 0 {
		delete(b.namespaces, n.Namespace)
		delete(b.changed, n.Namespace)
	}
}

// recheckAll makes the next balance check all namespaces, since the bounds may have changed.
func (b *budget) recheckAll() {
	for namespace := range b.namespaces {
		b.changed[namespace] = true
	}
}

// balance returns the Services for which admit now gives another answer than before.
func (b *budget) balance(i *IPVS) (flipped []snapshot.Name) {
	for namespace := range b.changed {
		if s := b.namespaces[namespace]; s != nil {
			flipped = s.balance(cmp.Or(i.MaxPerNamespace, MaxPerNamespace), flipped)
		}
	}
	clear(b.changed)
	slices.SortFunc(flipped, snapshot.Name.Compare)
	return flipped
}

// balance admits Services in order of age. A Service that does not fit is rejected; younger Services may still fit.
func (s *namespaceBudget) balance(most int, flipped []snapshot.Name) []snapshot.Name {
	if s.sum <= readmitLimit(most) && len(s.rejected) == 0 {
		return flipped
	}
	if s.order == nil {
		for _, a := range s.requests {
			s.order = append(s.order, a)
		}
		slices.SortFunc(s.order, func(a, b *request) int { return cmp.Or(a.age.Compare(b.age), a.name.Compare(b.name)) })
	}
	taken := 0
	for _, a := range s.order {
		out, limit := s.rejected[a.name], most
		if out {
			limit = readmitLimit(most)
		}
		fits := taken+a.cost <= limit
		if fits {
			taken += a.cost
		}
		if fits != out {
			continue
		}
		if flipped = append(flipped, a.name); fits {
			delete(s.rejected, a.name)
		} else {
			s.rejected[a.name] = true
		}
	}
	return flipped
}

// cost is the weight of the virtual services and destinations that a Service asks for.
func (s *Service) cost() (n int) {
	for sp, f := range s.EachFrontend() {
		if pool := sp.Scheduled(f); pool != nil {
			service, destination := sp.Scheduling.costs()
			n += service + destination*len(pool.Endpoints)
		}
	}
	return n
}

// applyBudget leaves a Service to nftables if it asks IPVS for too much. Nobody else may hold the Service yet.
func (b *builder) applyBudget(s *Service, svc *snapshot.Service) {
	why := Schedulable
	switch {
	case b.scheduling == nil:
		b.budget.forget(s.Name)
	case svc.Backends != nil:
		b.budget.forget(s.Name)
		why = WithBackends
	case svc.Affinity > 0 && b.host.ipvs.Mode == IPVSAuto:
		b.budget.forget(s.Name)
		why = WithAffinity
	default:
		why = b.budget.admit(&b.host.ipvs, request{s.Name, svc.Age, s.cost()}, svc.AsksForIPVS())
	}
	if b.tooFar {
		why = TooManyBackends
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

// NotScheduled returns why some or all of a Service is not scheduled although it asks for IPVS. The Service may be nil.
func (s *Service) NotScheduled() (why NotScheduled) {
	for _, f := range s.EachFrontend() {
		why = max(why, f.NotScheduled)
	}
	return why
}
