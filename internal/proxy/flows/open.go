package flows

import (
	"github.com/verdict-proxy/verdict/internal/proxy/conntrack"
	"github.com/verdict-proxy/verdict/sync/snapshot"
)

// openFlows are the connections that were open at the last look, with what sums have of their traffic already: of one
// that lives for hours, sums get what it sent since the look before.
type openFlows struct {
	flows map[flowKey]*openFlow
	// looks counts the looks that have begun.
	looks int
}

type openFlow struct {
	sent, received Traffic
	look           int
}

// maxOpen bounds how many are known. Sums have the traffic of the others when they end. A flood of first packets must
// not take their places: who has sent less than fewPackets is not known, unless the endpoint answered more than once.
const (
	maxOpen    = 1 << 16
	fewPackets = 16
)

// isOpen says whether both sides have opened the connection, and neither has closed it. With UDP, who sends has opened.
func isOpen(f *conntrack.Flow) bool {
	return f.Frontend.Protocol != snapshot.TCP || f.Answered && f.State <= conntrack.TCPEstablished
}

// see notes what a flow has sent so far, and leaves in its record what is new. It is not ok if this look has shown the
// flow before.
func (o *openFlows) see(k flowKey, r *Record, assured bool) (ok bool) {
	sent, received := r.Sent, r.Received
	known := o.flows[k]
	switch {
	case known != nil && known.look == o.looks:
		return false
	case known != nil:
		r.counted = [2]Traffic{known.sent, known.received}
	case len(o.flows) >= maxOpen || !assured && sent.Packets < fewPackets:
		r.counted = [2]Traffic{sent, received}
		return true
	default:
		if o.flows == nil {
			o.flows = map[flowKey]*openFlow{}
		}
		known = &openFlow{}
		o.flows[k] = known
	}
	known.sent, known.received, known.look = sent, received, o.looks
	return true
}

// ended forgets a connection, and notes in its record what sums have of it.
func (o *openFlows) ended(k flowKey, r *Record) {
	if known := o.flows[k]; known != nil {
		r.counted = [2]Traffic{known.sent, known.received}
		delete(o.flows, k)
	}
}

// looked ends a look that showed all. Connections that it and the one before did not show are gone, and the kernel has
// not told it.
func (o *openFlows) looked() {
	for k, f := range o.flows {
		if f.look < o.looks-1 {
			delete(o.flows, k)
		}
	}
}

// fresh is what sums do not have yet of a connection's traffic.
func (r *Record) fresh() (sent, received Traffic) {
	return r.Sent.since(r.counted[0]), r.Received.since(r.counted[1])
}

// since is what was sent after an earlier count; nothing if the count was set back.
func (t Traffic) since(earlier Traffic) Traffic {
	if t.Bytes < earlier.Bytes || t.Packets < earlier.Packets {
		return Traffic{}
	}
	return Traffic{Packets: t.Packets - earlier.Packets, Bytes: t.Bytes - earlier.Bytes}
}
