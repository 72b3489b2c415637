package snapshot

import (
	"net/netip"
	"slices"
	"time"
)

// SecondChance says what happens to TCP endpoints that do not answer this node, or refuse connections. The zero value
// leaves it to the setting of the node.
type SecondChance uint8

const (
	// SecondChanceDefault is the node's setting.
	SecondChanceDefault SecondChance = iota
	// SecondChanceObserve reports such endpoints and changes nothing for a packet.
	SecondChanceObserve
	// SecondChanceOn ejects them: new connections from this node do not reach them until they answer a probe.
	SecondChanceOn
	// SecondChanceOff does nothing.
	SecondChanceOff
)

var secondChanceNames = []string{"", "observe", "on", "off"}

// String returns what ParseSecondChance reads; empty for SecondChanceDefault.
func (s SecondChance) String() string { return secondChanceNames[s] }

// ParseSecondChance reads "off", "observe" or "on". It is not ok for any other text.
func ParseSecondChance(text string) (s SecondChance, ok bool) {
	return byName[SecondChance](secondChanceNames, text)
}

// byName returns the value with a name, which is not empty.
func byName[T ~uint8](names []string, text string) (v T, ok bool) {
	i := slices.Index(names, text)
	return T(max(i, 0)), i >= 0 && text != ""
}

// Cause says what is wrong with an unhealthy endpoint.
type Cause uint8

const (
	// Unanswered means that connections and probes get no answer.
	Unanswered Cause = iota
	// Refused means that connections and probes are refused.
	Refused
	// Resort means that the cluster calls the endpoint not ready, and it accepts probes of this node: it is the last
	// resort of a Service that has no other.
	Resort
)

var causeNames = [...]string{"unanswered", "refused", "last-resort"}

func (c Cause) String() string { return causeNames[c] }

// Health is what this node found out about the TCP endpoints of a Service, whatever the cluster says of them. It is
// immutable, and replaced as a whole.
type Health struct {
	// Unhealthy are those that this node or the cluster calls so. They are sorted by Endpoint and unique. The Service may
	// no longer have some of them.
	Unhealthy []Unhealthy
}

// Find returns what is known of an endpoint; nil if it is not unhealthy. The Health may be nil.
func (h *Health) Find(a netip.AddrPort) *Unhealthy {
	if h == nil {
		return nil
	}
	return FindUnhealthy(h.Unhealthy, a)
}

// FindUnhealthy returns an endpoint of a list that is sorted by Endpoint; nil if the list does not have it.
func FindUnhealthy(list []Unhealthy, a netip.AddrPort) *Unhealthy {
	i, found := slices.BinarySearchFunc(list, a, func(u Unhealthy, a netip.AddrPort) int { return u.Endpoint.Compare(a) })
	if !found {
		return nil
	}
	return &list[i]
}

// Unhealthy is an endpoint that clients and probes of this node cannot use, or, with the Cause Resort, one that they
// can use although the cluster calls it not ready.
type Unhealthy struct {
	Endpoint netip.AddrPort
	Cause    Cause
	// Since is when the first sign of it was read, or when the first probe was accepted. Where not all may be ejected,
	// those of the longest standing are.
	Since time.Time
	// Doubtful says that it refuses some clients and this node, and may answer others: it is not ejected.
	Doubtful bool
}
