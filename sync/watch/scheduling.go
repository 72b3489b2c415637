package watch

import (
	"slices"
	"strconv"
	"strings"

	"github.com/verdict-proxy/verdict/sync/snapshot"
)

// The annotations that say how the endpoints of a Service are chosen; docs/SCHEDULING.md says what they mean.
var (
	annotationScheduler = annotation{"verdict-proxy.github.io/scheduler", "verdict/scheduler"}
	annotationWeights   = annotation{"verdict-proxy.github.io/weights", "verdict/weights"}
	annotationZones     = annotation{"verdict-proxy.github.io/zones", "verdict/zones"}
	// annotationZoneDemand belongs to annotationZones.
	annotationZoneDemand = annotation{"verdict-proxy.github.io/zone-demand", "verdict/zone-demand"}
	// annotationWeight is a slice's.
	annotationWeight = annotation{"verdict-proxy.github.io/weight", "verdict/weight"}
)

// annotationCiliumWeight is Cilium's weight of a slice, from 0 to 65535, where an endpoint without one has 100.
const annotationCiliumWeight = "service.cilium.io/weight"

// annotation is an annotation's qualified name, and its older name, which counts if the qualified one is not given.
type annotation struct{ name, older string }

// get returns the annotation's value and the field that holds it. It reports two names with different values.
func (a annotation) get(f *problemList, of map[string]string) (text, field string, ok bool) {
	text, ok = of[a.name]
	older, olderGiven := of[a.older]
	switch {
	case ok && olderGiven && text != older:
		f.add(fieldOf(a.older), "%s is ignored: %s is given, too, with another value", quote(older), a.name)
	case !ok && olderGiven:
		return older, fieldOf(a.older), true
	}
	return text, fieldOf(a.name), ok
}

func fieldOf(name string) string { return "metadata.annotations[" + name + "]" }

// scheduling reads how a Service wants its endpoints to be chosen: nil if it does not say. An invalid value is
// reported, and the node's default applies.
func scheduling(f *problemList, annotations map[string]string) *snapshot.Scheduling {
	var s snapshot.Scheduling
	if text, field, ok := annotationScheduler.get(f, annotations); ok {
		if len(text) > maxScheduler {
			f.add(field, "%d bytes are too many: %d at most", len(text), maxScheduler)
		} else if parsed, err := snapshot.ParseScheduling(text); err != nil {
			f.add(field, "%w", err)
		} else {
			s = parsed
		}
	}
	if text, field, ok := annotationWeights.get(f, annotations); ok {
		s.Weights = nodeWeights.parse(f, text, field)
	}
	zones(f, annotations, &s)
	if s.Scheduler == "" && s.Weights == nil && !s.PreferNear {
		return nil
	}
	return &s
}

// zones reads whether a Service prefers near endpoints. With a hash it cannot: all nodes would have to have the same
// endpoints.
func zones(f *problemList, annotations map[string]string, s *snapshot.Scheduling) {
	text, field, ok := annotationZones.get(f, annotations)
	switch {
	case ok && text != preferZones:
		f.add(field, "%s is not %q", quote(text), preferZones)
	case ok && slices.Contains([]string{snapshot.Hash, "sh", "mh"}, s.Scheduler):
		f.add(field, "it is ignored: with the scheduler %s, all nodes must choose from the same endpoints", s.Scheduler)
	case ok:
		s.PreferNear = true
	}
	text, field, demand := annotationZoneDemand.get(f, annotations)
	switch {
	case demand && s.PreferNear:
		s.ZoneDemand = zoneDemands.parse(f, text, field)
	case demand && !ok:
		f.add(field, "it is ignored without %s: %s", annotationZones.name, preferZones)
	}
}

// preferZones is the value of annotationZones.
const preferZones = "prefer"

// Limits for annotations. Whoever may write a Service may write 256 KiB of them, as often as they like.
const (
	maxScheduler  = 128
	maxWeight     = 16
	maxWeights    = 64 << 10
	maxWeightList = 4096
	maxZones      = 16 << 10
	maxZoneList   = 64
)

// numberList is a list of names with a number each, in an annotation.
type numberList struct {
	// maxBytes and maxEntries bound it.
	maxBytes, maxEntries int
	// all and one say what the list and an entry are.
	all, one string
}

var (
	nodeWeights = numberList{maxWeights, maxWeightList, "weights", "a node's weight such as node-1=3; weights are"}
	zoneDemands = numberList{maxZones, maxZoneList, "demands", "a zone's demand such as zone-a=3; demands are"}
)

// parse parses "node-1=3,node-2=0". It skips invalid entries, and all of a list that is too long.
func (l *numberList) parse(f *problemList, text, field string) map[string]uint16 {
	out := map[string]uint16{}
	if n := 1 + strings.Count(text, ","); len(text) > l.maxBytes || n > l.maxEntries {
		f.add(field, "%d bytes with %d entries are too many: the %s are left out; %d bytes with %d entries at most",
			len(text), n, l.all, l.maxBytes, l.maxEntries)
		return nil
	}
	for entry := range strings.SplitSeq(text, ",") {
		name, number, ok := strings.Cut(strings.TrimSpace(entry), "=")
		n, good := weightOf(number)
		if !ok || !good || name == "" {
			f.add(field, "%s is not %s 0 to 65535", quote(entry), l.one)
			continue
		}
		out[strings.TrimSpace(name)] = n
	}
	return out
}

func weightOf(text string) (uint16, bool) {
	n, err := strconv.ParseUint(strings.TrimSpace(text), 10, 16)
	return uint16(n), err == nil
}

// applyWeight sets the weight of a slice's endpoints from its annotation. Cilium's counts if Verdict's is not given.
func applyWeight(f *problemList, annotations map[string]string, endpoints []snapshot.Endpoint) {
	text, field, ok := annotationWeight.get(f, annotations)
	cilium := !ok
	if cilium {
		if text, ok = annotations[annotationCiliumWeight]; !ok {
			return
		}
		field = fieldOf(annotationCiliumWeight)
	}
	n, good := weightOf(text[:min(len(text), maxWeight)])
	if !good || len(text) > maxWeight {
		f.add(field, "%s is not a number from 0 to 65535", quote(text))
		return
	}
	w := snapshot.Weight{Given: true, Parts: snapshot.PartsOf(n)}
	if cilium {
		w.Parts = uint32(n) // an endpoint without a weight has 100 there
	}
	for i := range endpoints {
		endpoints[i].Weight = w
	}
}
