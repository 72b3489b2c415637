package watch

import (
	"strconv"
	"strings"

	"github.com/verdict-proxy/verdict/sync/snapshot"
)

// The annotations by which a Service asks for IPVS, and an EndpointSlice sets the weight of its endpoints.
const (
	annotationScheduler = "verdict/scheduler"
	annotationWeights   = "verdict/weights"
	annotationWeight    = "verdict/weight"
)

// scheduling reads what a Service asks of IPVS: nil if nothing. An invalid value is reported, and the node's default
// applies.
func scheduling(f *problemList, annotations map[string]string) *snapshot.Scheduling {
	var s snapshot.Scheduling
	if text, ok := annotations[annotationScheduler]; ok {
		field := "metadata.annotations[" + annotationScheduler + "]"
		if len(text) > maxScheduler {
			f.add(field, "%d bytes are too many: %d at most", len(text), maxScheduler)
		} else if parsed, err := snapshot.ParseScheduling(text); err != nil {
			f.add(field, "%w", err)
		} else {
			s = parsed
		}
	}
	if text, ok := annotations[annotationWeights]; ok {
		s.Weights = weights(f, text)
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

// weights parses "node-1=3,node-2=1". It skips invalid entries, and all of a list that is too long.
func weights(f *problemList, text string) map[string]uint16 {
	out, field := map[string]uint16{}, "metadata.annotations["+annotationWeights+"]"
	if n := 1 + strings.Count(text, ","); len(text) > maxWeights || n > maxWeightList {
		f.add(field, "%d bytes with %d entries are too many: the weights are left out; %d bytes with %d entries at most",
			len(text), n, maxWeights, maxWeightList)
		return nil
	}
	for entry := range strings.SplitSeq(text, ",") {
		node, number, ok := strings.Cut(strings.TrimSpace(entry), "=")
		n, good := weightOf(number)
		if !ok || !good || node == "" {
			f.add(field, "%s is not a node's weight such as node-1=3; weights are 1 to 65535", quote(entry))
			continue
		}
		out[strings.TrimSpace(node)] = n
	}
	return out
}

func weightOf(text string) (uint16, bool) {
	n, err := strconv.ParseUint(strings.TrimSpace(text), 10, 16)
	return uint16(n), err == nil && n > 0
}

// applyWeight sets the weight of a slice's endpoints from its annotation.
func applyWeight(f *problemList, annotations map[string]string, endpoints []snapshot.Endpoint) {
	text, ok := annotations[annotationWeight]
	if !ok {
		return
	}
	n, good := weightOf(text[:min(len(text), maxWeight)])
	if !good || len(text) > maxWeight {
		f.add("metadata.annotations["+annotationWeight+"]", "%s is not a number from 1 to 65535", quote(text))
		return
	}
	for i := range endpoints {
		endpoints[i].Weight = n
	}
}
