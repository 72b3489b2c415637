package inspect

import (
	"github.com/verdict-proxy/verdict/sync/dataplane"
	"github.com/verdict-proxy/verdict/sync/snapshot"
)

// Texts about Services that are not counted because of their annotation, or in spite of it.
const (
	notByWish     = "connections are not counted: the Service's annotation verdict/counters is false"
	notDespite    = "; the annotation verdict/counters asks for more than its share"
	notByWishMany = "-: not counted, by the Service's annotation verdict/counters"
)

// notCounted describes what one of dataplane.Counted... leaves out; empty if everything is counted.
func notCounted(counted string) string {
	switch counted {
	case dataplane.CountedMostEndpoints:
		return "endpoints of very large Services are not counted: all counters would take more than counterMemoryMiB"
	case dataplane.CountedMostFrontends:
		return "endpoints and very large Services are not counted: their counters would take more than counterMemoryMiB"
	case dataplane.CountedFrontends:
		return "endpoints are not counted: their counters would take more than counterMemoryMiB"
	case dataplane.CountedNothing:
		return "nothing is counted: the counters would take more than counterMemoryMiB"
	}
	return ""
}

// allFrontends reports whether the frontends of all Services are counted, except those that opted out.
func allFrontends(counted string) bool {
	return counted == dataplane.CountedEndpoints || counted == dataplane.CountedFrontends
}

// uncountedNote explains why a Service's connections, or those of its endpoints, are not counted; empty if they are.
func (e *explainRun) uncountedNote(t *dataplane.Trace, v *View) string {
	counted := t.Counted
	frontend, endpoints := v.Service.Connections != nil, true
	for _, taken := range v.Endpoints {
		endpoints = endpoints && taken.Connections != nil
	}
	wish, known := e.requestedCounters(t.Port.Service)
	if v.Affinity != nil || len(v.Endpoints) == 0 { // its endpoints count elsewhere, or there are none
		endpoints = notCounted(counted) == "" || known && wish == snapshot.CountersFirst
	}
	switch {
	case frontend && endpoints:
		return ""
	case known && wish == snapshot.CountersNever, !known && !frontend && allFrontends(counted):
		return notByWish
	case known && wish == snapshot.CountersFirst && notCounted(counted) != "":
		return notCounted(counted) + notDespite
	}
	return notCounted(counted)
}

// requestedCounters returns what a Service asks of the budget for counters, if the objects were given.
func (e *explainRun) requestedCounters(service snapshot.Name) (requestedCounters snapshot.Counters, known bool) {
	if e.objects == nil {
		return 0, false
	}
	svc := e.objects.Snap.Services[service]
	if svc == nil {
		return 0, false
	}
	return svc.Counters, true
}
