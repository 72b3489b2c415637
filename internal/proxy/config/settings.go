// Package config reads kube-proxy's configuration file and flags, and a section of Verdict's own settings. It reads one
// file and, if no node name is given, the host's name; otherwise it is pure.
//
// Invalid values are reported with file, line and field; the rest of the file still applies. The previous value stays
// in force; at the start, the default is used, or what changes less. Invalid entries of a list are left out. A list of
// addresses without a valid entry is empty: a typing error must not open what the list should restrict.
package config

import (
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/verdict-proxy/verdict/internal/system/sysctl"
	"github.com/verdict-proxy/verdict/sync/dataplane"
	"github.com/verdict-proxy/verdict/sync/snapshot"
)

// Settings hold the complete, validated configuration.
type Settings struct {
	// Document is the source of these settings, with flags and defaults.
	Document Document

	// NodeName is the node's name; empty means this host's name.
	NodeName string
	// Policy decides about packets. Its NodeName is the one above.
	Policy dataplane.Config
	// Backend writes the rules.
	Backend Backend
	// IPTablesCompat keeps two chains of iptables beside nftables, for others that jump there. MasqueradeBit is the bit of
	// the mark, 0 to 31, that these chains and all rules of iptables set.
	IPTablesCompat bool
	MasqueradeBit  int
	// IPTablesList makes rules of iptables find a Service by one list, as kube-proxy's do, instead of a tree of chains.
	IPTablesList bool

	Client Client
	// Manifests is the file or directory that objects are read from; empty means the Kubernetes API.
	Manifests string

	// Healthz and Metrics are the addresses of the servers; the zero AddrPort means that there is no such server.
	Healthz, Metrics netip.AddrPort
	// HardFail ends the process if one of them cannot listen.
	HardFail bool
	// Profiling serves profiles at Metrics.
	Profiling bool

	// SyncPeriod is kube-proxy's. If a change waits twice as long, the proxy is unhealthy.
	SyncPeriod time.Duration
	// MinSyncPeriod is the least time between two transactions; 0 leaves that to the loop.
	MinSyncPeriod time.Duration

	// OOMScoreAdj is for /proc/self/oom_score_adj.
	OOMScoreAdj int
	Log         Log

	// Keeper is the name of a keeper.Mode, and OwnTables lets nobody else change the tables.
	Keeper    string
	OwnTables bool

	// NodeCondition writes a condition into the Node's status. StartupTaint is the key of the taint that is removed from
	// the Node once all Services are programmed; empty means none.
	NodeCondition bool
	StartupTaint  string

	// IPVSServices is the number of Services at which IPVS begins to schedule all of them, if Policy.IPVS is auto; 0 means
	// never. IPVSTimeouts are those of TCP connections, of TCP connections after a FIN, and of UDP flows; 0 keeps the
	// kernel's.
	IPVSServices int
	IPVSTimeouts [3]time.Duration
	// IPVSNamed says that the operator named always for IPVS, and does not only have the mode ipvs.
	IPVSNamed bool

	// Takeover is the name of a takeover.Mode, and MetricsConnections that of a metrics.Detail.
	Takeover, MetricsConnections string
	// MetricsMaxSeries limits how many Service ports, and how many endpoints, have their own series.
	MetricsMaxSeries int
	// CounterMemoryMiB limits the memory for the kernel's counters of frontends and endpoints.
	CounterMemoryMiB int

	// Everywhere is the Lease of the collector; zero if there is none. EverywhereToken is the file with its token.
	Everywhere      snapshot.Name
	EverywhereToken string

	// Ledger is the directory of the ledger, and LedgerMaxMiB the limit of its size; without a directory there is none.
	Ledger       string
	LedgerMaxMiB int

	// Records says how connections are recorded; nil if they are not.
	Records *Records
}

// Records configures the records of connections.
type Records struct {
	// MemoryMiB limits the memory for the list of records.
	MemoryMiB int
	// File and OTLP are where records are written to; empty means nowhere.
	File, OTLP string
	// ClientBits is how many bits are kept of addresses of clients outside the cluster, of IPv4 and of IPv6; 0 means all.
	ClientBits [2]int
}

func (v *VerdictConfiguration) records() *Records {
	if v.Records == "off" {
		return nil
	}
	bits, _ := parsePrefixLengths(v.RecordsClientPrefix)
	return &Records{MemoryMiB: int(*v.RecordsMemoryMiB), File: v.RecordsFile, OTLP: v.RecordsOTLP, ClientBits: bits}
}

// Client configures the connection to the Kubernetes API.
type Client struct {
	// Kubeconfig is a file, and Master the address of a server. If both are empty, the proxy runs inside the cluster.
	Kubeconfig, Master              string
	ContentType, AcceptContentTypes string
	QPS                             float32
	Burst                           int
}

// Log configures the log.
type Log struct {
	JSON  bool
	Level slog.Level
}

// Backend is what writes to the kernel.
type Backend string

// The backends. kube-proxy's mode selects none of them: every file that kubeadm wrote has the mode that suited
// kube-proxy.
const (
	// Auto means NFTables if the kernel supports it, else IPTables.
	Auto     Backend = "auto"
	NFTables Backend = "nftables"
	IPTables Backend = "iptables"
)

// Backends are the values that a file or flag may name besides Auto, in the order of backends.All.
var Backends = []Backend{NFTables, IPTables}

// kube-proxy's words.
const (
	modeIPTables = "iptables"
	modeIPVS     = "ipvs"
	modeNFTables = "nftables"

	// ipvsAlways is our own, for the field ipvs.
	ipvsAlways = "always"

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

// off is the address of a server that a flag disabled. A file cannot say it, because it is no valid address.
const off = "off"

// settings converts a document that is valid and has all defaults.
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

		NodeCondition: v.NodeCondition, StartupTaint: v.StartupTaint,

		IPTablesCompat: v.IPTablesCompat, MasqueradeBit: int(*c.IPTables.MasqueradeBit),
		IPTablesList: v.IPTablesDispatch == "list",

		IPVSServices: int(*v.IPVSServices),
		IPVSTimeouts: [...]time.Duration{
			c.IPVS.TCPTimeout.Duration,
			c.IPVS.TCPFinTimeout.Duration,
			c.IPVS.UDPTimeout.Duration,
		},

		Takeover: v.Takeover, MetricsConnections: v.MetricsConnections, MetricsMaxSeries: int(*v.MetricsMaxSeries),
		CounterMemoryMiB: int(*v.CounterMemoryMiB), EverywhereToken: v.EverywhereToken,
		Ledger: v.Ledger, LedgerMaxMiB: int(*v.LedgerMaxMiB), Records: v.records(),
		Client: Client{
			Kubeconfig: c.ClientConnection.Kubeconfig, ContentType: c.ClientConnection.ContentType,
			AcceptContentTypes: c.ClientConnection.AcceptContentTypes,
			QPS:                c.ClientConnection.QPS, Burst: int(c.ClientConnection.Burst),
		},
	}
	if namespace, name, ok := strings.Cut(v.Everywhere, "/"); ok {
		s.Everywhere = snapshot.Name{Namespace: namespace, Name: name}
	}
	if c.Mode == modeNFTables {
		s.MasqueradeBit = int(*c.NFTables.MasqueradeBit)
	}
	s.Healthz, _ = parseAddrPort(c.HealthzBindAddress)
	s.Metrics, _ = parseAddrPort(c.MetricsBindAddress)
	periods := d.periods()
	s.SyncPeriod, s.MinSyncPeriod = periods.sync.Duration, periods.minSync.Duration
	s.Policy = d.policy()
	s.Policy.NodeName = s.NodeName
	return s
}

// level maps the verbosity of Kubernetes' programs. They recommend 2 for production, which here logs each transaction.
func level(verbosity uint32) slog.Level {
	if verbosity >= 2 {
		return slog.LevelDebug
	}
	return slog.LevelInfo
}

// policy returns what decides about packets. The mode selects the section, as in kube-proxy.
func (d *Document) policy() dataplane.Config {
	c := &d.KubeProxy
	p := dataplane.Config{
		MasqueradeAll:      c.IPTables.MasqueradeAll,
		LocalhostNodePorts: *c.IPTables.LocalhostNodePorts,
		NoExternalIPs:      disabled(c.FeatureGates, gateExternalIPs),
		PingServices:       *d.Verdict.PingServices,
		RejectUnusedPorts:  *d.Verdict.RejectUnusedPorts,
		IPVS:               d.ipvs(),
		AsKubeProxy:        d.asKubeProxy(),
		Records:            d.Verdict.Records == "on",
		LastResort:         d.Verdict.LastResort == "on",
		ClientAddress:      dataplane.ParseKeepSetting(d.Verdict.ClientAddress),
	}
	p.SecondChance, _ = snapshot.ParseSecondChance(string(d.Verdict.SecondChance))
	p.NodePortAddresses, p.NodePortPrimary = nodePortAddresses(c.NodePortAddresses, string(c.Mode))
	if d.asKubeProxy() && !p.NodePortPrimary && len(p.NodePortAddresses) > 0 {
		p.NodePortAddresses = allOfUnnamedFamilies(p.NodePortAddresses)
	}
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

// ipvs returns which Services IPVS schedules, and how. Scheduler mh also hashes the clients' ports, as in kube-proxy.
func (d *Document) ipvs() dataplane.IPVS {
	name := d.KubeProxy.IPVS.Scheduler
	if name == "" {
		name = "rr"
	}
	modes := map[string]dataplane.IPVSMode{
		"never":    dataplane.IPVSNever,
		"auto":     dataplane.IPVSAuto,
		ipvsAlways: dataplane.IPVSAlways,
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

// nodePortAddresses converts the list to ranges for the data plane, and reports whether it includes the Node's primary
// addresses. An unset list means all addresses in kube-proxy's older modes. In mode nftables it means primary, to which
// the data plane adds 127.0.0.1. A list that lost all its entries is empty and not nil: it becomes a range that holds
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

// allOfUnnamedFamilies adds, as kube-proxy does, all addresses of a family of which the list has none.
func allOfUnnamedFamilies(list []netip.Prefix) []netip.Prefix {
	for _, all := range everywhere {
		same := func(p netip.Prefix) bool { return p.Addr().Is4() == all.Addr().Is4() }
		if !slices.ContainsFunc(list, func(p netip.Prefix) bool { return p.IsValid() && same(p) }) {
			list = append(list, all)
		}
	}
	return list
}

// Sysctls returns the sysctls to set on a host with this number of CPUs. It never lowers a limit: somebody raised it
// for a reason.
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
		{"tcp_timeout_established", c.TCPEstablishedTimeout.Duration},
		{"tcp_timeout_close_wait", c.TCPCloseWaitTimeout.Duration},
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

// conntrackMax computes the limit as kube-proxy does: perCore for each CPU, but at least least, and at most 1048576.
func conntrackMax(perCore, least, cpus int) int {
	const most = 1 << 20
	if perCore*cpus > most {
		return most
	}
	return max(perCore*cpus, least)
}

// Node returns this node's name in the cluster, as kube-proxy finds it: NodeName, or else the host's name.
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
