package node

import (
	"errors"
	"fmt"
	"maps"
	"slices"

	"github.com/verdict-proxy/verdict/sync/dataplane"
	"github.com/verdict-proxy/verdict/sync/reconcile"
	"github.com/verdict-proxy/verdict/sync/snapshot"
	"github.com/verdict-proxy/verdict/sync/watch"
)

// maxEvents bounds how many Services get an event of one kind after one change or transaction.
const maxEvents = 20

// clusterEvents tell the cluster's operators, and the authors of Services, what they should see. Without an API
// server they are nil inside.
type clusterEvents struct{ *watch.Events }

// listener tells of Services that are not programmed as they ask for.
func (e clusterEvents) listener() reconcile.Listener {
	return reconcile.Listener{Unscheduled: e.unscheduled, Quarantined: e.quarantined, Contested: e.contested}
}

// invalid tells that the configuration file is wrong: nothing else of it is seen from outside.
func (e clusterEvents) invalid(text string) {
	e.Emit(watch.Event{Warning: true, Reason: "InvalidConfiguration", Action: "ReadConfiguration", Note: text})
}

func (e clusterEvents) unscheduled(r *dataplane.Refused) {
	for _, n := range firstServices(r) {
		e.Emit(watch.Event{Warning: true, Reason: "NotScheduled", Action: "Schedule", Service: n,
			Note: "nftables chooses the endpoints: " + r.Services[n].Error()})
	}
}

func (e clusterEvents) quarantined(r *dataplane.Refused) {
	for _, n := range firstServices(r) {
		e.Emit(watch.Event{Warning: true, Reason: "FailedToProgram", Action: "Program", Service: n,
			Note: quarantineNote(r.Services[n])})
	}
}

// firstServices gives the first of the Services.
func firstServices(r *dataplane.Refused) []snapshot.Name {
	names := slices.SortedFunc(maps.Keys(r.Services), snapshot.Name.Compare)
	return names[:min(maxEvents, len(names))]
}

// quarantineNote says why a Service is refused. The words of a program may name other Services, which whoever reads
// the event may not know of: only the log has them.
func quarantineNote(err error) string {
	var about interface {
		error
		// OnlyOfService says that the text tells of nothing but what the Service asks for.
		OnlyOfService()
	}
	if errors.As(err, &about) {
		return about.Error()
	}
	return "this node cannot program the Service as it is; the log of its proxy says why"
}

// contested tells of Services that do not answer at an address they claim. Events are read by whoever may read the
// loser's namespace, so they do not say whose the address is.
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
