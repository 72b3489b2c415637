package dataplane

import (
	"net/netip"
	"slices"

	"github.com/verdict-proxy/verdict/sync/snapshot"
)

// Config is what the node's operator decided. Fields mean what kube-proxy's options of the same name mean.
type Config struct {
	// NodeName is compared with the endpoints' nodeName to tell which are local.
	NodeName string
	// NodeIP takes the place of the Node object's addresses of its family; the zero Addr leaves them.
	NodeIP netip.Addr
	// APIServer is the address by which this node reaches the API server, if one is configured. It may be a cluster IP.
	APIServer netip.Addr
	// DetectLocal says how pods are told from others.
	DetectLocal DetectLocal
	// MasqueradeAll masquerades all traffic to cluster IPs.
	MasqueradeAll bool
	// NodePortAddresses are the ranges whose addresses on this host answer on node ports; a family without a range has no
	// node ports. The zero Prefix is a range that holds nothing.
	NodePortAddresses []netip.Prefix
	// NodePortPrimary adds the node's primary addresses: the Node object's first of each family that is on this host. With
	// neither this nor a range, node ports answer at the primary addresses and on 127.0.0.1.
	NodePortPrimary bool
	// LocalhostNodePorts lets IPv4 node ports answer on 127.0.0.1, if a range holds it or nothing is said about addresses.
	LocalhostNodePorts bool
	// NoExternalIPs leaves out what Services have as spec.externalIPs.
	NoExternalIPs bool
	// SecondChance says what happens to endpoints that do not answer or refuse, for Services that do not say it
	// themselves. SecondChanceDefault is SecondChanceOff, and off holds for all Services, whatever they say: then no
	// evidence is gathered.
	SecondChance snapshot.SecondChance
	// LastResort uses endpoints that are not ready and answer this node, for Services that have no other and do not say
	// it themselves.
	LastResort bool
	// PingServices makes addresses of Services answer a ping: cluster IPs and load balancer addresses.
	PingServices bool
	// RejectUnusedPorts rejects packets from outside to ports of load balancer addresses that no Service has.
	RejectUnusedPorts bool
	// AsKubeProxy does as kube-proxy does where no other field decides: this node's packets with a pod's address are a
	// pod's.
	AsKubeProxy bool
	// Records has the backend log resets, and packets that it rejects or drops.
	Records bool
	// ClientAddress says which Services keep their clients' addresses.
	ClientAddress KeepSetting
	// CannotKeep says that the backend cannot keep any client's address: then none is kept, whatever Services ask for.
	CannotKeep bool
	// IPVS says which Services it schedules.
	IPVS IPVS
}

// KeepSetting is the setting clientAddress.
type KeepSetting uint8

// The settings. KeepLoadBalancers holds for load balancer Services that do not say it themselves.
const (
	KeepAnnotated KeepSetting = iota
	KeepNone
	KeepLoadBalancers
)

var keepSettings = [...]string{KeepAnnotated: "annotated", KeepNone: "off", KeepLoadBalancers: "keep"}

// ParseKeepSetting reads "off", "annotated" or "keep"; anything else is "off".
func ParseKeepSetting(text string) KeepSetting {
	if i := slices.Index(keepSettings[:], text); i >= 0 {
		return KeepSetting(i)
	}
	return KeepNone
}

// AnswersLocalhost says whether IPv4 node ports answer on 127.0.0.1, for which the host has to route its loopback
// range.
func (c Config) AnswersLocalhost() bool { return localhostNodePorts(c) }

// DetectLocal is kube-proxy's detectLocalMode with its argument.
type DetectLocal struct {
	// Mode selects which of the fields below counts.
	Mode DetectLocalMode
	// ClusterCIDRs are looked at in mode ClusterCIDR, the first of each family; none of a family means unknown there.
	ClusterCIDRs []netip.Prefix
	// Interface is the bridge of mode BridgeInterface, or the prefix of mode InterfaceNamePrefix.
	Interface string
}

// DetectLocalMode is one of kube-proxy's modes. The zero value is its default, ClusterCIDR.
type DetectLocalMode uint8

// The modes; NodeCIDR takes the pod ranges from the Node object and follows it.
const (
	DetectClusterCIDR DetectLocalMode = iota
	DetectNodeCIDR
	DetectBridgeInterface
	DetectInterfaceNamePrefix
)
