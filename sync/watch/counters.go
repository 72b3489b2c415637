package watch

import "github.com/verdict-proxy/verdict/sync/snapshot"

// annotationCounters says whether a Service's connections are counted.
const annotationCounters = "verdict/counters"

// counters reads what a Service asks of the budget for counters. Any value other than "true" and "false" is reported
// and ignored.
func counters(f *problemList, annotations map[string]string) snapshot.Counters {
	switch text, ok := annotations[annotationCounters]; {
	case !ok:
	case text == "true":
		return snapshot.CountersFirst
	case text == "false":
		return snapshot.CountersNever
	default:
		f.add("metadata.annotations["+annotationCounters+"]", `%s is neither "true" nor "false"`, quote(text))
	}
	return snapshot.CountersByBudget
}
