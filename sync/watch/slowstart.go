package watch

import (
	"slices"
	"time"

	"github.com/verdict-proxy/verdict/sync/snapshot"
)

// annotationSlowStart says over what time a new endpoint of a Service comes to its share of connections.
var annotationSlowStart = annotation{"verdict-proxy.github.io/slow-start", "verdict/slow-start"}

const (
	minSlowStart = time.Second
	maxSlowStart = time.Hour
)

// slowStart reads a Service's slow start: 0 if it has none. An invalid one is reported and ignored, and so is one of a
// Service that hashes its clients.
func slowStart(f *problemList, annotations map[string]string, scheduling *snapshot.Scheduling) time.Duration {
	text, field, ok := annotationSlowStart.get(f, annotations)
	if !ok {
		return 0
	}
	d, err := time.ParseDuration(text)
	switch {
	case err != nil || d < minSlowStart || d > maxSlowStart || d%time.Second != 0:
		f.add(field, "%s is not a duration of whole seconds from 1s to 1h, such as 30s", quote(text))
		return 0
	case scheduling != nil && slices.Contains([]string{snapshot.Hash, "sh", "mh"}, scheduling.Scheduler):
		f.add(field, "%s is ignored: with the scheduler %s, all nodes must have the same table at all times", quote(text),
			scheduling.Scheduler)
		return 0
	}
	return d
}
