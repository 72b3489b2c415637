package dataplane

import (
	"cmp"
	"net/netip"
	"slices"
	"strconv"
	"strings"

	"github.com/verdict-proxy/verdict/sync/snapshot"
)

// A backend writes the settings in force beside its rules, so that whoever reads those need not guess what rules alone
// do not tell. Each setting is a line, NAME=VALUE, under the name of the flag; a list has a line for each entry.

// noAddresses stands for an empty list of addresses that restricts, which is the zero Prefix in Config.
const noAddresses = "none"

const behaviorKubeProxy = "kube-proxy"

// gateExternalIPs is the feature gate that is a setting here.
const gateExternalIPs = "AllowServiceExternalIPs"

var ipvsModes = [...]string{IPVSNever: "never", IPVSAuto: "auto", IPVSAlways: "always"}

var detectModes = [...]string{DetectClusterCIDR: "ClusterCIDR", DetectNodeCIDR: "NodeCIDR",
	DetectBridgeInterface: "BridgeInterface", DetectInterfaceNamePrefix: "InterfaceNamePrefix"}

// Lines returns all settings but the node's name.
func (c *Config) Lines() (lines []string) {
	say := func(name, value string) { lines = append(lines, name+"="+value) }
	truth := func(name string, on bool) { say(name, strconv.FormatBool(on)) }
	optional := func(name, value string, on bool) {
		if on {
			say(name, value)
		}
	}
	ranges := func(name string, list []netip.Prefix) {
		for _, p := range list {
			say(name, rangeText(p))
		}
	}
	if c.NodeIP.IsValid() {
		say("bind-address", c.NodeIP.String())
	}
	if c.APIServer.IsValid() {
		say("master", c.APIServer.String())
	}
	say("detect-local-mode", detectModes[c.DetectLocal.Mode])
	ranges("cluster-cidr", c.DetectLocal.ClusterCIDRs)
	switch c.DetectLocal.Mode {
	case DetectBridgeInterface:
		say("pod-bridge-interface", c.DetectLocal.Interface)
	case DetectInterfaceNamePrefix:
		say("pod-interface-name-prefix", c.DetectLocal.Interface)
	}
	truth("masquerade-all", c.MasqueradeAll)
	if c.NodePortPrimary {
		say("nodeport-addresses", "primary")
	}
	ranges("nodeport-addresses", c.NodePortAddresses)
	truth("iptables-localhost-nodeports", c.LocalhostNodePorts)
	truth("feature-gates="+gateExternalIPs, !c.NoExternalIPs)
	say("second-chance", cmp.Or(c.SecondChance, snapshot.SecondChanceOff).String())
	optional("last-resort", snapshot.LastResortOn.String(), c.LastResort)
	optional("client-address", keepSettings[c.ClientAddress], c.ClientAddress != KeepNone)
	optional("client-address-unsupported", "true", c.CannotKeep)
	optional("behavior", behaviorKubeProxy, c.AsKubeProxy)
	optional("records", "true", c.Records)
	truth("ping-services", c.PingServices)
	truth("reject-unused-ports", c.RejectUnusedPorts)
	say("ipvs", ipvsModes[c.IPVS.Mode])
	if c.IPVS.Default.Scheduler != "" {
		say("ipvs-scheduler", c.IPVS.Default.Scheduler)
	}
	ranges("ipvs-addresses", c.IPVS.Addresses)
	return lines
}

func rangeText(p netip.Prefix) string {
	if !p.IsValid() {
		return noAddresses
	}
	return p.String()
}

// ConfigOf reads what Lines returned. It skips lines that it does not know, as those of another version.
func ConfigOf(lines []string) (c Config) {
	c.ClientAddress = KeepNone // which has no line
	for _, line := range lines {
		if name, value, ok := strings.Cut(line, "="); ok {
			c.take(name, value)
		}
	}
	return c
}

func (c *Config) take(name, value string) {
	prefix, _ := netip.ParsePrefix(value) // noAddresses is the zero Prefix
	switch on := value == "true"; name {
	case "bind-address":
		c.NodeIP, _ = netip.ParseAddr(value)
	case "master":
		c.APIServer, _ = netip.ParseAddr(value)
	case "detect-local-mode":
		c.DetectLocal.Mode = DetectLocalMode(max(slices.Index(detectModes[:], value), 0))
	case "cluster-cidr":
		c.DetectLocal.ClusterCIDRs = append(c.DetectLocal.ClusterCIDRs, prefix)
	case "pod-bridge-interface", "pod-interface-name-prefix":
		c.DetectLocal.Interface = value
	case "masquerade-all":
		c.MasqueradeAll = on
	case "nodeport-addresses":
		if value == "primary" {
			c.NodePortPrimary = true
		} else {
			c.NodePortAddresses = append(c.NodePortAddresses, prefix)
		}
	case "iptables-localhost-nodeports":
		c.LocalhostNodePorts = on
	case "feature-gates":
		c.NoExternalIPs = c.NoExternalIPs || value == gateExternalIPs+"=false"
	case "second-chance":
		c.SecondChance, _ = snapshot.ParseSecondChance(value)
	case "last-resort":
		c.LastResort = value == snapshot.LastResortOn.String()
	case "client-address":
		c.ClientAddress = ParseKeepSetting(value)
	case "client-address-unsupported":
		c.CannotKeep = on
	case "behavior":
		c.AsKubeProxy = value == behaviorKubeProxy
	case "records":
		c.Records = on
	case "ping-services":
		c.PingServices = on
	case "reject-unused-ports":
		c.RejectUnusedPorts = on
	case "ipvs":
		c.IPVS.Mode = IPVSMode(max(slices.Index(ipvsModes[:], value), 0))
	case "ipvs-scheduler":
		c.IPVS.Default = Scheduling{Scheduler: value, Port: value == "mh"}
	case "ipvs-addresses":
		c.IPVS.Addresses = append(c.IPVS.Addresses, prefix)
	}
}

// EndpointHealth is what installed rules say of an unhealthy endpoint of a pool.
type EndpointHealth struct {
	// Port is the service port; its name may be cut. Pool identifies the pool among those that are installed.
	Port PortName
	Pool uint32
	// Since has whole seconds.
	snapshot.Unhealthy
	// Ejected says that the pool is without it. Otherwise it is kept, as half of the pool is ejected already, or as the
	// Service's SecondChance only observes.
	Ejected bool
}

// HealthOf returns what pools say of their endpoints, by Service. The pools of the same Service agree.
func HealthOf(list []EndpointHealth) map[snapshot.Name]*snapshot.Health {
	health := map[snapshot.Name]*snapshot.Health{}
	for _, e := range list {
		h := health[e.Port.Service]
		if h == nil {
			h = &snapshot.Health{}
			health[e.Port.Service] = h
		}
		h.Unhealthy = append(h.Unhealthy, e.Unhealthy)
	}
	for _, h := range health {
		slices.SortFunc(h.Unhealthy, func(a, b snapshot.Unhealthy) int { return a.Endpoint.Compare(b.Endpoint) })
		h.Unhealthy = slices.CompactFunc(h.Unhealthy, func(a, b snapshot.Unhealthy) bool { return a.Endpoint == b.Endpoint })
	}
	return health
}
