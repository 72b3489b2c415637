package node

import (
	"errors"
	"fmt"
	"maps"
	"slices"

	"github.com/verdict-proxy/verdict/internal/proxy/status"
	"github.com/verdict-proxy/verdict/sync/dataplane"
	"github.com/verdict-proxy/verdict/sync/reconcile"
	"github.com/verdict-proxy/verdict/sync/snapshot"
	"github.com/verdict-proxy/verdict/sync/watch"
)

// maxEvents bounds how many Services get an event of one kind after one change or transaction.
const maxEvents = 20

// clusterEvents sends events to the cluster's operators and the authors of Services. Without an API server, Events is
// nil.
type clusterEvents struct{ *watch.Events }

// listener reports Services that are not programmed as they ask for.
func (e clusterEvents) listener() reconcile.Listener {
	return reconcile.Listener{Unscheduled: e.unscheduled, Quarantined: e.quarantined, Contested: e.contested,
		Committed: e.committed}
}

// committed reports Services that ask to keep their clients' addresses and do not, once for each reason. Where the
// operator allows none to, a tenant's annotation is worth no event of each node.
func (e clusterEvents) committed(c reconcile.Commit) {
	if e.Events == nil {
		return
	}
	left := maxEvents
	for i, after := range c.After {
		why := after.NotKept()
		if why == dataplane.KeptOrNotAsked || why == dataplane.NotKeptOff || why == c.Before[i].NotKept() {
			continue
		}
		if left--; left < 0 {
			return
		}
		e.Emit(watch.Event{Warning: true, Reason: "ClientAddressNotKept", Action: "Masquerade", Service: after.Name,
			Note: "node " + e.NodeName + " masquerades clients from outside: " + why.Text()})
	}
}

// invalid reports an invalid configuration file, which is not visible outside the node otherwise.
func (e clusterEvents) invalid(text string) {
	e.Emit(watch.Event{Warning: true, Reason: "InvalidConfiguration", Action: "ReadConfiguration", Note: text})
}

// missing reports that all Services do without a feature that the configuration asks for.
func (e clusterEvents) missing(note string) {
	e.Emit(watch.Event{Warning: true, Reason: "NotScheduled", Action: "Schedule", Note: note})
}

// stopped reports what on this host stops packets of Services.
func (e clusterEvents) stopped(f status.Finding) {
	e.Emit(watch.Event{Warning: true, Reason: "HostConflict", Action: "CheckHost", Note: f.What + ": " + f.Advice})
}

func (e clusterEvents) unscheduled(r *dataplane.Refused) {
	for _, n := range firstServices(r) {
		e.Emit(watch.Event{Warning: true, Reason: "NotScheduled", Action: "Schedule", Service: n,
			Note: "nftables chooses the endpoints " + r.ChosenInstead(n) + ": " + r.Services[n].Error()})
	}
}

func (e clusterEvents) quarantined(r *dataplane.Refused) {
	for _, n := range firstServices(r) {
		e.Emit(watch.Event{Warning: true, Reason: "FailedToProgram", Action: "Program", Service: n,
			Note: quarantineNote(r.Services[n])})
	}
}

// firstServices returns the names of the first Services, at most maxEvents.
func firstServices(r *dataplane.Refused) []snapshot.Name {
	names := slices.SortedFunc(maps.Keys(r.Services), snapshot.Name.Compare)
	return names[:min(maxEvents, len(names))]
}

// quarantineNote explains why a Service is quarantined. A program's own error may name other Services, which readers of
// the event may not be allowed to see, so only the log has it.
func quarantineNote(err error) string {
	var about interface {
		error
		// OnlyOfService marks an error whose text only describes this Service.
		OnlyOfService()
	}
	if errors.As(err, &about) {
		return about.Error()
	}
	return "this node cannot program the Service as it is; the log of its proxy says why"
}

// contested reports Services that do not answer at an address they claim. Events do not name the winner, because their
// readers may not be allowed to see its namespace.
func (e clusterEvents) contested(contests []dataplane.ConflictSummary) {
	for _, c := range contests[:min(maxEvents, len(contests))] {
		what := c.Key.String()
		if c.Keys > 1 {
			what += fmt.Sprintf(" and %d more", c.Keys-1)
		}
		e.Emit(watch.Event{Warning: true, Reason: "AddressConflict", Action: "Serve", Service: c.Loser.Port.Service,
			Note: "another Service has " + what + " and keeps it; this one does not answer there"})
	}
}
