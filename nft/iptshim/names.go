package iptshim

import (
	"crypto/sha256"
	"encoding/base32"
	"net/netip"
	"strings"

	"github.com/verdict-proxy/verdict/sync/dataplane"
)

// Table is one of iptables' tables.
type Table string

// The tables that we write to, in the order in which a text holds them. What rejects comes before what translates.
const (
	Mangle Table = "mangle"
	Filter Table = "filter"
	NAT    Table = "nat"
)

// Tables are all that we write to.
var Tables = [...]Table{Mangle, Filter, NAT}

// The chains that exist once. Their names are kube-proxy's, but for the last one.
const (
	servicesChain    = "KUBE-SERVICES"
	externalChain    = "KUBE-EXTERNAL-SERVICES"
	nodePortsChain   = "KUBE-NODEPORTS"
	postroutingChain = "KUBE-POSTROUTING"
	markChain        = "KUBE-MARK-MASQ"
	forwardChain     = "KUBE-FORWARD"
	firewallChain    = "KUBE-PROXY-FIREWALL"
	loopbackChain    = "KUBE-FIREWALL"
	canaryChain      = "KUBE-PROXY-CANARY"
	clusterIPsChain  = "KUBE-CLUSTER-IPS"
)

// The beginnings of the chains that there are many of. kube-proxy removes all in table nat that begin so and are none
// of its own: with them the branches of our trees, which is why these have no beginning of their own there.
const (
	svcPrefix        = "KUBE-SVC-"
	svlPrefix        = "KUBE-SVL-"
	extPrefix        = "KUBE-EXT-"
	fwPrefix         = "KUBE-FW-"
	sepPrefix        = "KUBE-SEP-"
	clusterIPsPrefix = "KUBE-CIP-"
)

// maxChainName is how long a chain's name may be.
const maxChainName = 28

// hashLen is how much of a hash is in a chain's name.
const hashLen = 16

func hash(s string) string {
	sum := sha256.Sum256([]byte(s))
	return base32.StdEncoding.EncodeToString(sum[:])[:hashLen]
}

// portHash is the part of the names of a service port's chains that is the same in all of them.
func portHash(n dataplane.PortName) string { return hash(n.String() + n.Protocol.String()) }

// endpointChain names the chain of one endpoint of a service port.
func endpointChain(n dataplane.PortName, ep netip.AddrPort) string {
	return sepPrefix + hash(n.String()+n.Protocol.String()+ep.String())
}

// isOurs says whether a chain of a table has a name that only Verdict and kube-proxy use. KUBE-FIREWALL is the
// kubelet's, too.
func isOurs(t Table, chain string) bool {
	switch chain {
	case canaryChain:
		return true
	case servicesChain, nodePortsChain:
		return t == Filter || t == NAT
	case externalChain, forwardChain, firewallChain, clusterIPsChain:
		return t == Filter
	case postroutingChain, markChain:
		return t == NAT
	}
	if t == Filter {
		return strings.HasPrefix(chain, clusterIPsPrefix)
	}
	return t == NAT && isServiceChain(chain)
}

// isServiceChain says whether a chain of table nat belongs to one service port, or to the tree that leads there.
func isServiceChain(chain string) bool {
	for _, p := range [...]string{svcPrefix, svlPrefix, extPrefix, fwPrefix, sepPrefix} {
		if strings.HasPrefix(chain, p) {
			return true
		}
	}
	return false
}

// isBranch says whether a chain of ours is a branch of a tree.
func isBranch(t Table, chain string) bool {
	return t == NAT && isServiceChain(chain) && !commentsRedundant(t, chain) ||
		t == Filter && strings.HasPrefix(chain, clusterIPsPrefix)
}
