package takeover

import (
	"regexp"
	"strings"
)

// The tables of iptables in which kube-proxy has chains, in the order in which they are cleared. The nat table comes first:
// what it marks and translates is let through by the filter table.
var tableNames = []string{"nat", "filter", "mangle"}

// proxyChains are the chains of kube-proxy that exist once, of iptables and IPVS mode. Not among them is what a kubelet makes:
// KUBE-FIREWALL, of which kube-proxy only writes a copy, KUBE-MARK-DROP, KUBE-IPTABLES-HINT and KUBE-KUBELET-CANARY.
var proxyChains = map[string][]string{
	"nat": {"KUBE-SERVICES", "KUBE-NODEPORTS", "KUBE-POSTROUTING", "KUBE-MARK-MASQ", "KUBE-PROXY-CANARY", "KUBE-NODE-PORT",
		"KUBE-LOAD-BALANCER"},
	"filter": {"KUBE-SERVICES", "KUBE-EXTERNAL-SERVICES", "KUBE-NODEPORTS", "KUBE-FORWARD", "KUBE-PROXY-FIREWALL",
		"KUBE-PROXY-CANARY", "KUBE-NODE-PORT", "KUBE-SOURCE-RANGES-FIREWALL", "KUBE-IPVS-FILTER", "KUBE-IPVS-OUT-FILTER"},
	"mangle": {"KUBE-PROXY-CANARY"},
}

// serviceChain matches the chains of Services and endpoints: their names end in 16 letters and digits of a base32 hash.
// KUBE-XLB is what KUBE-EXT and KUBE-SVL were before Kubernetes 1.24.
var serviceChain = regexp.MustCompile(`^KUBE-(SVC|SVL|SEP|EXT|FW|XLB)-[A-Z2-7]{16}$`)

// isProxyChain says whether a chain of a table has a name that kube-proxy gives.
func isProxyChain(table, name string) bool {
	if !strings.HasPrefix(name, "KUBE-") {
		return false
	}
	for _, n := range proxyChains[table] {
		if n == name {
			return true
		}
	}
	return table == "nat" && serviceChain.MatchString(name)
}

// jumpComments are the comments of the rules by which kube-proxy leads from built-in chains to its own. A rule without one of
// them is somebody else's.
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

// maxSetName is the length the kernel allows, to which kube-proxy cuts the names of its IPv6 sets.
const maxSetName = 31

// proxySet gives the IPv4 name of one of kube-proxy's ipsets, by its own name and type.
func proxySet(name, typ string) (base string, ok bool) {
	for base, t := range proxySets {
		if typ == t && (name == base || name == setName6(base)) {
			return base, true
		}
	}
	return "", false
}

// setName6 gives the name of a set's IPv6 twin.
func setName6(base string) string {
	n := strings.Replace(base, "KUBE-", "KUBE-6-", 1)
	return n[:min(len(n), maxSetName)]
}
