package watch

import (
	"cmp"
	"maps"
	"slices"
	"strconv"
	"strings"

	"github.com/verdict-proxy/verdict/sync/snapshot"
)

// scheduling reads how a Service wants its endpoints to be chosen: nil if it does not say. Backed says that it has
// backends, which prefer no zone.
func (a *annotations) scheduling(last *snapshot.Scheduling, backed bool) *snapshot.Scheduling {
	was := cmp.Or(last, &snapshot.Scheduling{})
	var s snapshot.Scheduling
	if text, field, ok := a.get(nameScheduler); ok {
		parsed, err := snapshot.ParseScheduling(text[:min(len(text), maxScheduler)])
		switch {
		case len(text) > maxScheduler:
			a.wrong(field, "%d bytes are too many: %d at most", len(text), maxScheduler)
		case err != nil:
			a.wrong(field, "%w", err)
		}
		s = parsed
		if len(text) > maxScheduler || err != nil {
			s = snapshot.Scheduling{Scheduler: was.Scheduler, Port: was.Port, Fallback: was.Fallback}
		}
	}
	if text, field, ok := a.get(nameWeights); ok {
		s.Weights = nodeWeights.parse(a, text, field, was.Weights)
	}
	a.zones(&s, was)
	if s.PreferNear && backed {
		a.warn(fieldOf(annotationDomain+nameZones), ignoredWithBackends)
		s.PreferNear, s.ZoneDemand = false, nil
	}
	if s.Scheduler == "" && s.Weights == nil && !s.PreferNear {
		return nil
	}
	return &s
}

// hashes reports whether a scheduler chooses by the client's address, by the same table on all nodes.
func hashes(scheduler string) bool {
	return slices.Contains([]string{snapshot.Hash, "sh", "mh"}, scheduler)
}

// zones reads whether a Service prefers near endpoints. With a hash it cannot: all nodes would have to have the same
// endpoints.
func (a *annotations) zones(s, was *snapshot.Scheduling) {
	text, field, ok := a.get(nameZones)
	s.PreferNear = text == preferZones
	if ok && !s.PreferNear {
		a.wrong(field, "%s is not %q", quote(text), preferZones)
		s.PreferNear = was.PreferNear
	}
	if s.PreferNear && hashes(s.Scheduler) {
		a.warn(field, "it is ignored: with the scheduler %s, all nodes must choose from the same endpoints", s.Scheduler)
		s.PreferNear = false
	}
	text, field, demand := a.get(nameZoneDemand)
	switch {
	case demand && s.PreferNear:
		s.ZoneDemand = zoneDemands.parse(a, text, field, was.ZoneDemand)
	case demand && !ok:
		a.warn(field, "it is ignored without %s: %s", annotationDomain+nameZones, preferZones)
	}
}

// preferZones is the value of nameZones.
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

// parse parses "node-1=3,node-2=0". A list that is too long counts as the last one, and so does an invalid entry whose
// name was in that; it skips other invalid entries.
func (l *numberList) parse(a *annotations, text, field string, last map[string]uint16) map[string]uint16 {
	if n := 1 + strings.Count(text, ","); len(text) > l.maxBytes || n > l.maxEntries {
		a.wrong(field, "%d bytes with %d entries are too many %s: %d bytes with %d entries at most", len(text), n, l.all,
			l.maxBytes, l.maxEntries)
		return maps.Clone(last)
	}
	out := map[string]uint16{}
	for entry := range strings.SplitSeq(text, ",") {
		name, number, ok := strings.Cut(strings.TrimSpace(entry), "=")
		name = strings.TrimSpace(name)
		n, good := weightOf(number)
		if !ok || !good || name == "" {
			a.wrong(field, "%s is not %s 0 to 65535", quote(entry), l.one)
			if n, ok = last[name]; !ok {
				continue
			}
		}
		out[name] = n
	}
	return out
}

func weightOf(text string) (uint16, bool) {
	n, err := strconv.ParseUint(strings.TrimSpace(text), 10, 16)
	return uint16(n), err == nil
}

// weight reads the weight of a slice's endpoints. Cilium's counts if Verdict's is not given.
func (a *annotations) weight(last snapshot.Weight) snapshot.Weight {
	text, field, ok := a.get(nameWeight)
	cilium := !ok
	if cilium {
		if text, ok = a.of[annotationCiliumWeight]; !ok {
			return snapshot.Weight{}
		}
		field = fieldOf(annotationCiliumWeight)
	}
	n, good := weightOf(text[:min(len(text), maxWeight)])
	if !good || len(text) > maxWeight {
		a.wrong(field, "%s is not a number from 0 to 65535", quote(text))
		return last
	}
	if cilium {
		return snapshot.Weight{Given: true, Parts: uint32(n)} // an endpoint without a weight has 100 there
	}
	return snapshot.Weight{Given: true, Parts: snapshot.PartsOf(n)}
}
