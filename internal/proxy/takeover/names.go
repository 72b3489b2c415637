package takeover

import (
	"regexp"
	"slices"
	"strings"
)

// The tables of iptables in which kube-proxy has chains, in the order in which they are cleaned up. The nat table comes
// first: the filter table accepts what it marks and translates.
var tableNames = []string{"nat", "filter", "mangle"}

// proxyChains are the chains of kube-proxy that exist once, of iptables and IPVS mode. Not among them is what a kubelet
// makes: KUBE-FIREWALL, of which kube-proxy only writes a copy, KUBE-MARK-DROP, KUBE-IPTABLES-HINT and
// KUBE-KUBELET-CANARY.
var proxyChains = map[string][]string{
	"nat": {"KUBE-SERVICES", "KUBE-NODEPORTS", "KUBE-POSTROUTING", "KUBE-MARK-MASQ", "KUBE-PROXY-CANARY", "KUBE-NODE-PORT",
		"KUBE-LOAD-BALANCER"},
	"filter": {"KUBE-SERVICES", "KUBE-EXTERNAL-SERVICES", "KUBE-NODEPORTS", "KUBE-FORWARD", "KUBE-PROXY-FIREWALL",
		"KUBE-PROXY-CANARY", "KUBE-CLUSTER-IPS", "KUBE-NODE-PORT", "KUBE-SOURCE-RANGES-FIREWALL", "KUBE-IPVS-FILTER",
		"KUBE-IPVS-OUT-FILTER"},
	"mangle": {"KUBE-PROXY-CANARY"},
}

// serviceChain matches the chains of Services and endpoints: their names end in 16 letters and digits of a base32 hash.
// KUBE-XLB was the name of KUBE-EXT and KUBE-SVL before Kubernetes 1.24.
//
// Chains with a range instead of a hash, or with a hash in lower-case hexadecimal digits, and KUBE-CLUSTER-IPS, belong
// to the trees of Verdict's own iptables backend. They are removed when nftables takes over from it.
var serviceChain = regexp.MustCompile(`^KUBE-(SVC|SVL|SEP|EXT|FW|XLB)-[A-Z2-7]{16}$`)

var treeChain = regexp.MustCompile(
	`^KUBE-(SVC|EXT|CIP)-([0-9a-f]{16}|[0-9a-f.:/]+/[0-9]+(-[a-z]+)?(-[0-9]+-[0-9]+)?|[a-z]+(-[0-9]+-[0-9]+)?)$`)

// onlyIPVS are the chains that kube-proxy has only in IPVS mode.
var onlyIPVS = map[string]bool{"KUBE-NODE-PORT": true, "KUBE-LOAD-BALANCER": true, "KUBE-SOURCE-RANGES-FIREWALL": true,
	"KUBE-IPVS-FILTER": true, "KUBE-IPVS-OUT-FILTER": true}

// Own says which chains with names of kube-proxy's iptables mode belong to the caller. The zero value means none.
type Own struct {
	// Variant is "nft" or "legacy": the variant of iptables in which these chains are.
	Variant string
	// Rules means all chains of iptables mode; Compat means KUBE-MARK-MASQ and KUBE-POSTROUTING.
	Rules, Compat bool
}

// owns says whether a chain belongs to the caller.
func (o Own) owns(v variant, table, name string) bool {
	if o.Variant != [...]string{nft: "nft", legacy: "legacy"}[v] {
		return false
	}
	if o.Rules {
		return !onlyIPVS[name] && !strings.HasPrefix(name, "KUBE-XLB-")
	}
	return o.Compat && table == "nat" && (name == "KUBE-MARK-MASQ" || name == "KUBE-POSTROUTING")
}

// isProxyChain says whether a chain of a table has one of kube-proxy's names.
func isProxyChain(table, name string) bool {
	if !strings.HasPrefix(name, "KUBE-") {
		return false
	}
	if slices.Contains(proxyChains[table], name) {
		return true
	}
	if table == "filter" {
		return strings.HasPrefix(name, "KUBE-CIP-") && treeChain.MatchString(name)
	}
	return table == "nat" && (serviceChain.MatchString(name) || treeChain.MatchString(name))
}

// jumpComments are the comments of the rules by which kube-proxy jumps from built-in chains to its own. A rule without
// one of them belongs to somebody else.
var jumpComments = map[string]bool{
	"kubernetes service portals":                    true,
	"kubernetes externally-visible service portals": true,
	"kubernetes postrouting rules":                  true,
	"kubernetes forwarding rules":                   true,
	"kubernetes health check service ports":         true,
	"kubernetes load balancer firewall":             true,
	"kubernetes health check rules":                 true, // IPVS mode
	"kube-proxy firewall rules":                     true, // IPVS mode
	"kubernetes ipvs access filter":                 true, // IPVS mode
}

// proxySets are kube-proxy's ipsets and their types.
var proxySets = map[string]string{
	"KUBE-LOOP-BACK":                 "hash:ip,port,ip",
	"KUBE-CLUSTER-IP":                "hash:ip,port",
	"KUBE-EXTERNAL-IP":               "hash:ip,port",
	"KUBE-EXTERNAL-IP-LOCAL":         "hash:ip,port",
	"KUBE-LOAD-BALANCER":             "hash:ip,port",
	"KUBE-LOAD-BALANCER-FW":          "hash:ip,port",
	"KUBE-LOAD-BALANCER-LOCAL":       "hash:ip,port",
	"KUBE-LOAD-BALANCER-SOURCE-IP":   "hash:ip,port,ip",
	"KUBE-LOAD-BALANCER-SOURCE-CIDR": "hash:ip,port,net",
	"KUBE-NODE-PORT-TCP":             "bitmap:port",
	"KUBE-NODE-PORT-LOCAL-TCP":       "bitmap:port",
	"KUBE-NODE-PORT-UDP":             "bitmap:port",
	"KUBE-NODE-PORT-LOCAL-UDP":       "bitmap:port",
	"KUBE-NODE-PORT-SCTP-HASH":       "hash:ip,port",
	"KUBE-NODE-PORT-LOCAL-SCTP-HASH": "hash:ip,port",
	"KUBE-HEALTH-CHECK-NODE-PORT":    "bitmap:port",
	"KUBE-IPVS-IPS":                  "hash:ip",
}

// maxSetName is the longest name that the kernel allows. kube-proxy truncates the names of its IPv6 sets to it.
const maxSetName = 31

// proxySet returns the IPv4 name of one of kube-proxy's ipsets, by its actual name and type.
func proxySet(name, typ string) (base string, ok bool) {
	for base, t := range proxySets {
		if typ == t && (name == base || name == setName6(base)) {
			return base, true
		}
	}
	return "", false
}

// setName6 returns the name of a set's IPv6 counterpart.
func setName6(base string) string {
	n := strings.Replace(base, "KUBE-", "KUBE-6-", 1)
	return n[:min(len(n), maxSetName)]
}
