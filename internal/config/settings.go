// Package config is what the operator decided: kube-proxy's own configuration file and flags, and a small section for
// what kube-proxy has no words for. It reads one file and, where no name is given, the host's; it is pure otherwise.
//
// A value that cannot be meant stops nothing else. It is reported with file, line and field, and what was in force
// before stays in force; at the start, where there is no before, the default. A bad entry of a list is left out, and a
// list of addresses without a good one is empty: a typing error must not open what it was to close.
package config

import (
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"os"
	"strings"
	"time"

	"github.com/verdict-proxy/verdict/internal/sysctl"
	"github.com/verdict-proxy/verdict/sync/dataplane"
)

// Settings are all decisions, checked and complete.
type Settings struct {
	// Document is what they were made from, with flags and defaults in it.
	Document Document

	// NodeName is the node's name; empty stands for this host's.
	NodeName string
	// Policy decides about packets. Its NodeName is the one above.
	Policy dataplane.Config
	// Backend writes it.
	Backend Backend
	// IPTablesCompat keeps two chains of iptables beside nftables, for others that jump there; MasqueradeBit is the bit of
	// the mark that these, and all rules of iptables, set: 0 to 31.
	IPTablesCompat bool
	MasqueradeBit  int
	// IPTablesList says that rules of iptables find a Service by one list, as kube-proxy's, and not by a tree of chains.
	IPTablesList bool

	Client Client
	// Manifests is a file or a directory to take the objects from; empty means from the Kubernetes API.
	Manifests string

	// Healthz and Metrics are where the servers listen; the zero AddrPort means that there is none.
	Healthz, Metrics netip.AddrPort
	// HardFail ends the process if one of them cannot listen.
	HardFail bool
	// Profiling serves profiles at Metrics.
	Profiling bool

	// SyncPeriod is kube-proxy's; twice as long the kernel may be behind before the proxy counts as unhealthy.
	SyncPeriod time.Duration
	// MinSyncPeriod is the least time between two transactions; 0 leaves that to the loop.
	MinSyncPeriod time.Duration

	// OOMScoreAdj is for /proc/self/oom_score_adj.
	OOMScoreAdj int
	Log         Log

	// Keeper is the name of a keeper.Mode, and OwnTables lets nobody else change the tables.
	Keeper    string
	OwnTables bool

	// IPVSServices is from how many Services on IPVS schedules all of them, if Policy.IPVS says auto; 0 means never.
	// IPVSTimeouts are how long it remembers TCP connections, those after a FIN, and UDP flows; 0 is the kernel's.
	IPVSServices int
	IPVSTimeouts [3]time.Duration

	// Takeover is the name of a takeover.Mode, and MetricsConnections that of a metrics.Detail.
	Takeover, MetricsConnections string
	// MetricsMaxSeries is how many Service ports, and how many endpoints, have a series of their own.
	MetricsMaxSeries int
	// CounterMemoryMiB is how much memory the kernel's counters of frontends and endpoints may take.
	CounterMemoryMiB int
}

// Client says how to reach the Kubernetes API.
type Client struct {
	// Kubeconfig and Master are a file and the address of a server; if both are empty it is the cluster this runs in.
	Kubeconfig, Master              string
	ContentType, AcceptContentTypes string
	QPS                             float32
	Burst                           int
}

// Log says how to log.
type Log struct {
	JSON  bool
	Level slog.Level
}

// Backend is what writes to the kernel.
type Backend string

// The backends. kube-proxy's mode decides about none of them: it says what was best there, and is in every file that
// kubeadm wrote.
const (
	// Auto is NFTables where the kernel can, else IPTables.
	Auto     Backend = "auto"
	NFTables Backend = "nftables"
	IPTables Backend = "iptables"
)

// Backends are those that a file or a flag may name besides Auto. Package backends sets them to those there are.
var Backends = []Backend{NFTables, IPTables}

// kube-proxy's words.
const (
	modeIPTables = "iptables"
	modeIPVS     = "ipvs"
	modeNFTables = "nftables"

	modeClusterCIDR     = "ClusterCIDR"
	modeNodeCIDR        = "NodeCIDR"
	modeBridgeInterface = "BridgeInterface"
	modeInterfacePrefix = "InterfaceNamePrefix"

	contentProtobuf = "application/vnd.kubernetes.protobuf"
	contentJSON     = "application/json"

	// keywords of nodePortAddresses
	primary      = "primary"
	localhost    = "localhost"
	allAddresses = "all"

	gateExternalIPs = "AllowServiceExternalIPs"
	gateIPVS        = "KubeProxyIPVS"
)

// off is the address of a server that a flag switched off. No file can say it: it is no address.
const off = "off"

// settings are what a document says that was checked and has all defaults.
func (d *Document) settings() *Settings {
	c, v := &d.KubeProxy, &d.Verdict
	s := &Settings{
		Document:    *d,
		NodeName:    strings.ToLower(strings.TrimSpace(c.HostnameOverride)),
		Backend:     Backend(v.Backend),
		Manifests:   v.Manifests,
		HardFail:    c.BindAddressHardFail,
		Profiling:   c.EnableProfiling,
		OOMScoreAdj: int(*c.OOMScoreAdj),
		Log:         Log{JSON: c.Logging.Format == "json", Level: level(uint32(c.Logging.Verbosity))},
		Keeper:      v.Keeper,
		OwnTables:   *v.OwnTables,

		IPTablesCompat: v.IPTablesCompat, MasqueradeBit: int(*c.IPTables.MasqueradeBit), IPTablesList: v.IPTablesDispatch == "list",

		IPVSServices: int(*v.IPVSServices),
		IPVSTimeouts: [...]time.Duration{
			c.IPVS.TCPTimeout.Duration,
			c.IPVS.TCPFinTimeout.Duration,
			c.IPVS.UDPTimeout.Duration,
		},

		Takeover: v.Takeover, MetricsConnections: v.MetricsConnections, MetricsMaxSeries: int(*v.MetricsMaxSeries),
		CounterMemoryMiB: int(*v.CounterMemoryMiB),
		Client: Client{
			Kubeconfig: c.ClientConnection.Kubeconfig, ContentType: c.ClientConnection.ContentType,
			AcceptContentTypes: c.ClientConnection.AcceptContentTypes,
			QPS:                c.ClientConnection.QPS, Burst: int(c.ClientConnection.Burst),
		},
	}
	if c.Mode == modeNFTables {
		s.MasqueradeBit = int(*c.NFTables.MasqueradeBit)
	}
	s.Healthz, _ = parseAddrPort(c.HealthzBindAddress)
	s.Metrics, _ = parseAddrPort(c.MetricsBindAddress)
	periods := d.periods()
	s.SyncPeriod, s.MinSyncPeriod = periods.sync.Duration, periods.least.Duration
	s.Policy = d.policy()
	s.Policy.NodeName = s.NodeName
	return s
}

// level maps the verbosity of Kubernetes' programs: 2 is what they recommend to leave on, and it shows a line for each
// transaction.
func level(verbosity uint32) slog.Level {
	if verbosity >= 2 {
		return slog.LevelDebug
	}
	return slog.LevelInfo
}

// policy is what decides about packets. Which section counts follows from the mode, as in kube-proxy.
func (d *Document) policy() dataplane.Config {
	c := &d.KubeProxy
	p := dataplane.Config{
		MasqueradeAll:      c.IPTables.MasqueradeAll,
		LocalhostNodePorts: *c.IPTables.LocalhostNodePorts,
		NoExternalIPs:      disabled(c.FeatureGates, gateExternalIPs),
		IPVS:               d.ipvs(),
	}
	p.NodePortAddresses, p.NodePortPrimary = nodePortAddresses(c.NodePortAddresses, string(c.Mode))
	if c.Mode == modeNFTables {
		p.MasqueradeAll = c.NFTables.MasqueradeAll
	}
	if a, ok := parseAddr(c.BindAddress); ok && !a.IsUnspecified() {
		p.NodeIP = a
	}
	switch c.DetectLocalMode {
	case modeClusterCIDR:
		for _, text := range clusterCIDRs(c.ClusterCIDR) {
			if r, ok := parsePrefix(text); ok {
				p.DetectLocal.ClusterCIDRs = append(p.DetectLocal.ClusterCIDRs, r)
			}
		}
	case modeNodeCIDR:
		p.DetectLocal.Mode = dataplane.DetectNodeCIDR
	case modeBridgeInterface:
		p.DetectLocal.Mode, p.DetectLocal.Interface = dataplane.DetectBridgeInterface, c.DetectLocal.BridgeInterface
	case modeInterfacePrefix:
		p.DetectLocal.Mode, p.DetectLocal.Interface = dataplane.DetectInterfaceNamePrefix, c.DetectLocal.InterfaceNamePrefix
	}
	return p
}

// ipvs says which Services IPVS schedules, and how. kube-proxy has mh look at the clients' ports, too.
func (d *Document) ipvs() dataplane.IPVS {
	name := d.KubeProxy.IPVS.Scheduler
	if name == "" {
		name = "rr"
	}
	modes := map[string]dataplane.IPVSMode{
		"never":  dataplane.IPVSNever,
		"auto":   dataplane.IPVSAuto,
		"always": dataplane.IPVSAlways,
	}
	ipvs := dataplane.IPVS{Mode: modes[d.Verdict.IPVS], Default: dataplane.Scheduling{Scheduler: name, Port: name == "mh"}}
	for _, text := range d.Verdict.IPVSAddresses {
		if r, ok := parsePrefix(text); ok {
			ipvs.Addresses = append(ipvs.Addresses, r)
		}
	}
	return ipvs
}

func disabled(gates map[string]bool, name string) bool {
	on, said := gates[name]
	return said && !on
}

// clusterCIDRs splits the ranges of one or both families.
func clusterCIDRs(text string) []string {
	if text == "" {
		return nil
	}
	return strings.Split(text, ",")
}

// The ranges that two keywords of nodePortAddresses stand for.
var (
	everywhere = []netip.Prefix{netip.PrefixFrom(netip.IPv4Unspecified(), 0), netip.PrefixFrom(netip.IPv6Unspecified(), 0)}
	loopback   = []netip.Prefix{netip.MustParsePrefix("127.0.0.0/8"), netip.MustParsePrefix("::1/128")}
)

// nodePortAddresses gives the list as the data plane has it: ranges, and whether the Node's primary addresses are among
// them. An unset list means all addresses in kube-proxy's older modes. In mode nftables it means primary, to which the
// data plane adds 127.0.0.1. A list that lost all its entries, which is empty and not nil, is a range that holds
// nothing.
func nodePortAddresses(list []string, mode string) (ranges []netip.Prefix, atPrimary bool) {
	switch {
	case list == nil && mode == modeNFTables:
		return nil, false
	case list == nil:
		return everywhere, false
	case len(list) == 0:
		return []netip.Prefix{{}}, false
	}
	for _, text := range list {
		switch text {
		case primary:
			atPrimary = true
		case localhost:
			ranges = append(ranges, loopback...)
		case allAddresses:
			ranges = append(ranges, everywhere...)
		default:
			if r, ok := parsePrefix(text); ok {
				ranges = append(ranges, r)
			}
		}
	}
	return ranges, atPrimary
}

// Sysctls gives what is to be set on a host with so many CPUs. A limit is never lowered: somebody raised it for a
// reason.
func (s *Settings) Sysctls(cpus int) []sysctl.Setting {
	c := s.Document.KubeProxy.Conntrack
	const dir = "proc/sys/net/netfilter/nf_conntrack_"
	var list []sysctl.Setting
	if *c.MaxPerCore > 0 {
		most := conntrackMax(int(*c.MaxPerCore), int(*c.Min), cpus)
		list = append(list, sysctl.Setting{Path: dir + "max", Value: most, AtLeast: true},
			sysctl.Setting{Path: "sys/module/nf_conntrack/parameters/hashsize", Value: most / 4, AtLeast: true})
	}
	for _, t := range []struct {
		name string
		time time.Duration
	}{
		{"tcp_timeout_established", c.TCPEstablishedTimeout.Duration}, {"tcp_timeout_close_wait", c.TCPCloseWaitTimeout.Duration},
		{"udp_timeout", c.UDPTimeout.Duration}, {"udp_timeout_stream", c.UDPStreamTimeout.Duration},
	} {
		if t.time > 0 {
			list = append(list, sysctl.Setting{Path: dir + t.name, Value: int(t.time / time.Second)})
		}
	}
	if c.TCPBeLiberal {
		list = append(list, sysctl.Setting{Path: dir + "tcp_be_liberal", Value: 1})
	}
	return list
}

// conntrackMax is kube-proxy's: so many for each CPU, not less than the least, and no more than a million of them.
func conntrackMax(perCore, least, cpus int) int {
	const most = 1 << 20
	if perCore*cpus > most {
		return most
	}
	return max(perCore*cpus, least)
}

// Node gives this node's name in the cluster, as kube-proxy finds it: NodeName, or else the host's.
func (s *Settings) Node() (string, error) {
	if s.NodeName != "" {
		return s.NodeName, nil
	}
	host, err := os.Hostname()
	if host = strings.ToLower(strings.TrimSpace(host)); err == nil && host == "" {
		err = errors.New("it is empty")
	}
	if err != nil {
		return "", fmt.Errorf("--hostname-override is not given, and the host's name cannot be read: %w", err)
	}
	return host, nil
}
