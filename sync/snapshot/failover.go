package snapshot

// ExternalFailover says what happens to clients from outside of a Service with externalTrafficPolicy Local on a node
// that has no usable endpoint of it. The names are those of KEP-6272. The zero value is the default.
type ExternalFailover uint8

const (
	// FailoverDrop drops their packets.
	FailoverDrop ExternalFailover = iota
	// FailoverCluster sends them to endpoints on other nodes, as with externalTrafficPolicy Cluster.
	FailoverCluster
	// FailoverReject rejects their packets.
	FailoverReject
	// FailoverPass leaves their packets alone, also if there is no usable endpoint anywhere.
	FailoverPass
)

var failoverNames = []string{"drop", "cluster", "reject", "pass"}

func (e ExternalFailover) String() string { return failoverNames[e] }

// ParseExternalFailover reads "drop", "cluster", "reject" or "pass". It is not ok for any other text.
func ParseExternalFailover(text string) (e ExternalFailover, ok bool) {
	return byName[ExternalFailover](failoverNames, text)
}
