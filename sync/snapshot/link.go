package snapshot

import (
	"maps"
	"net/netip"
	"slices"

	"github.com/verdict-proxy/verdict/internal/system/ipfamily"
)

// ClientAddress says whether clients from outside keep their address where a Service's externalTrafficPolicy is
// Cluster. The zero value leaves it to the node's setting.
type ClientAddress uint8

const (
	// ClientAddressDefault does as the node's setting says for load balancer Services, and masquerades all others.
	ClientAddressDefault ClientAddress = iota
	// ClientAddressKeep forwards their packets untranslated to a node that has endpoints, where that is possible.
	ClientAddressKeep
	// ClientAddressMasquerade masquerades them, whatever the node's setting says.
	ClientAddressMasquerade
)

var clientAddressNames = []string{"", "keep", "masquerade"}

func (c ClientAddress) String() string { return clientAddressNames[c] }

// ParseClientAddress reads "keep" or "masquerade". It is not ok for any other text.
func ParseClientAddress(text string) (c ClientAddress, ok bool) {
	if text == "" {
		return 0, false
	}
	return byName[ClientAddress](clientAddressNames, text)
}

// MAC is a link-layer address of Ethernet.
type MAC [6]byte

// Link is what this host knows of the other nodes as neighbours: those that it reaches without a router, by one of its
// devices. The zero value says that there are none. A Link is never changed once it is handed over.
type Link struct {
	// Device is the name of the Ethernet device that has this node's own address, and by which packets from outside come
	// in; empty means that it is unknown, or not one of Ethernet: then no client's address is kept here.
	Device string
	// Index is the Device's. Another one under the same name has none of the rules that the kernel held for this one.
	Index int
	// Refused says that the kernel takes no rules at the Device's ingress: then no client's address is kept here either.
	Refused bool
	// Nodes are all other nodes of the cluster, by name, this one excepted. A node that is missing is unknown.
	Nodes map[string]Neighbour
}

// Neighbour is another node of the cluster.
type Neighbour struct {
	// Addrs are the addresses of its Node object, of each family the first that lies in a network of Device; the zero
	// Addr: none does, and the node is not on this link for that family.
	Addrs ipfamily.Per[netip.Addr]
	// MACs are those by which its frames come here, sorted; nil while none is known.
	MACs []MAC
	// Failed says of each family that it does not answer at Addrs, while others do: packets must go elsewhere.
	Failed ipfamily.Per[bool]
}

// AnyDevice is the Device of a Link of which only the nodes are known.
const AnyDevice = "?"

// HasAddr reports whether another node has an address.
func (l Link) HasAddr(a netip.Addr) bool {
	for n := range maps.Values(l.Nodes) {
		if a.IsValid() && slices.Contains(n.Addrs[:], a) {
			return true
		}
	}
	return false
}

// Equal reports whether two Links say the same.
func (l Link) Equal(o Link) bool {
	return l.Device == o.Device && l.Index == o.Index && l.Refused == o.Refused &&
		maps.EqualFunc(l.Nodes, o.Nodes, func(a, b Neighbour) bool {
			return a.Addrs == b.Addrs && a.Failed == b.Failed && slices.Equal(a.MACs, b.MACs)
		})
}
