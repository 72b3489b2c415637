package watch

import (
	"strconv"
	"strings"

	"github.com/verdict-proxy/verdict/sync/snapshot"
)

// The annotations that say how the endpoints of a Service are chosen; docs/SCHEDULING.md says what they mean.
var (
	annotationScheduler = annotation{"verdict-proxy.github.io/scheduler", "verdict/scheduler"}
	annotationWeights   = annotation{"verdict-proxy.github.io/weights", "verdict/weights"}
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
		s.Weights = weights(f, text, field)
	}
	if s.Scheduler == "" && s.Weights == nil {
		return nil
	}
	return &s
}

// Limits for annotations. Whoever may write a Service may write 256 KiB of them, as often as they like.
const (
	maxScheduler  = 128
	maxWeight     = 16
	maxWeights    = 64 << 10
	maxWeightList = 4096
)

// weights parses "node-1=3,node-2=0". It skips invalid entries, and all of a list that is too long.
func weights(f *problemList, text, field string) map[string]uint16 {
	out := map[string]uint16{}
	if n := 1 + strings.Count(text, ","); len(text) > maxWeights || n > maxWeightList {
		f.add(field, "%d bytes with %d entries are too many: the weights are left out; %d bytes with %d entries at most",
			len(text), n, maxWeights, maxWeightList)
		return nil
	}
	for entry := range strings.SplitSeq(text, ",") {
		node, number, ok := strings.Cut(strings.TrimSpace(entry), "=")
		n, good := weightOf(number)
		if !ok || !good || node == "" {
			f.add(field, "%s is not a node's weight such as node-1=3; weights are 0 to 65535", quote(entry))
			continue
		}
		out[strings.TrimSpace(node)] = n
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
