package config

import (
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/pflag"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	logsapi "k8s.io/component-base/logs/api/v1"
	"k8s.io/kube-proxy/config/v1alpha1"

	"github.com/verdict-proxy/verdict/internal/system/clip"
)

// Flags are kube-proxy's flags, under their names, and Verdict's own. A flag that is given overrides the file. The zero
// value has no flags; call Add or AddPolicy.
type Flags struct {
	// Config is the file; empty means none. Pass it to Load, which does not read it from here.
	Config string

	// WriteConfigTo, Cleanup, InitOnly and Version ask for something other than a running proxy.
	WriteConfigTo              string
	Cleanup, InitOnly, Version bool

	masterURL string
	given     []given
}

// given is a flag on a command line, with all values in their order.
type given struct {
	flag  *option
	texts []string
}

// option is a flag that sets fields of a Document.
type option struct {
	name, kind, usage string
	// fields names the fields that the flag sets.
	fields []string
	// set writes a value into a Document. More is true if the flag was given before; then the value is appended to a list.
	set func(d *Document, text string, more bool) error
	// about selects the commands with this flag: ofPolicy flags decide about packets, so read-only commands have them too.
	about scope
	// note is reported if the flag is given: it is deprecated, or has no effect.
	note string
	// group is its heading in help.
	group string
}

type scope uint8

const (
	ofRun scope = iota
	ofPolicy
)

// GroupAnnotation is the annotation of a flag that holds its heading in help, one of FlagGroups.
const GroupAnnotation = "group"

// FlagGroups lists the headings of flags, in the order of help.
var FlagGroups = []string{
	"Objects and API server", "Services and packets", "Backends, keeper and counters", "Kernel and timing",
	"Health and metrics servers", "Log",
}

// flags lists all flags that set fields.
var flags = slices.Concat(
	group(FlagGroups[0], clientFlags), group(FlagGroups[1], policyFlags), group(FlagGroups[2], ownFlags),
	group(FlagGroups[3], kernelFlags), group(FlagGroups[4], serverFlags), group(FlagGroups[5], logFlags),
)

// group puts flags under a heading.
func group(name string, options []option) []option {
	for i := range options {
		options[i].group = name
	}
	return options
}

var policyFlags = []option{
	text("hostname-override",
		"name of this node in the cluster, which determines the local endpoints (default: the host's name)", ofPolicy,
		func(d *Document) *string { return &d.KubeProxy.HostnameOverride }, "hostnameOverride"),
	text(
		"bind-address",
		"this node's IP address, replaces the Node object's address of the same family; no socket is bound to it "+
			"(default 0.0.0.0: use the Node object's)",
		ofPolicy,
		func(d *Document) *string { return &d.KubeProxy.BindAddress },
		"bindAddress",
	),
	{name: "proxy-mode", kind: "string", about: ofPolicy, fields: []string{"mode"},
		usage: "iptables, ipvs or nftables: determines the meaning of empty node port addresses, and with ipvs the " +
			"scheduling; --backend selects the backend (default nftables)",
		set: func(d *Document, s string, _ bool) error { d.KubeProxy.Mode = v1alpha1.ProxyMode(s); return nil }},
	boolean("masquerade-all", "masquerade all traffic to cluster IPs", ofPolicy,
		func(d *Document, on bool) {
			d.KubeProxy.IPTables.MasqueradeAll, d.KubeProxy.NFTables.MasqueradeAll = on, on
		},
		"iptables.masqueradeAll", "nftables.masqueradeAll"),
	boolean(
		"iptables-localhost-nodeports",
		"answer IPv4 node ports at 127.0.0.1, too; sets net.ipv4.conf.all.route_localnet and guards the loopback range "+
			"(default true)",
		ofPolicy,
		func(d *Document, on bool) { d.KubeProxy.IPTables.LocalhostNodePorts = &on },
		"iptables.localhostNodePorts",
	),
	{name: "detect-local-mode", kind: "string", about: ofPolicy, fields: []string{"detectLocalMode"},
		usage: "how pod traffic is recognized: ClusterCIDR, NodeCIDR, BridgeInterface or InterfaceNamePrefix (default " +
			"ClusterCIDR)",
		set: func(d *Document, s string, _ bool) error {
			d.KubeProxy.DetectLocalMode = v1alpha1.LocalMode(s)
			return nil
		}},
	text("pod-bridge-interface", "the bridge that pods are connected to (mode BridgeInterface)", ofPolicy,
		func(d *Document) *string { return &d.KubeProxy.DetectLocal.BridgeInterface }, "detectLocal.bridgeInterface"),
	text("pod-interface-name-prefix", "prefix of the names of pods' interfaces (mode InterfaceNamePrefix)", ofPolicy,
		func(d *Document) *string { return &d.KubeProxy.DetectLocal.InterfaceNamePrefix }, "detectLocal.interfaceNamePrefix"),
	text(
		"cluster-cidr",
		"the range of pod addresses, or one of each family, comma-separated; traffic from elsewhere to cluster IPs is "+
			"masqueraded (mode ClusterCIDR)",
		ofPolicy,
		func(d *Document) *string { return &d.KubeProxy.ClusterCIDR },
		"clusterCIDR",
	),
	list("nodeport-addresses",
		"addresses of this host that answer node ports: ranges, primary (the Node object's), localhost, all "+
			"(default primary,localhost)", ofPolicy,
		func(d *Document) *[]string { return &d.KubeProxy.NodePortAddresses }, "nodePortAddresses"),
	{name: "feature-gates", kind: "mapStringBool",
		usage: "NAME=true|false, comma-separated; only AllowServiceExternalIPs and KubeProxyIPVS have an effect",
		about: ofPolicy, fields: []string{"featureGates"}, set: setGates},
	number(
		"iptables-masquerade-bit",
		"bit of the packet mark by which iptables rules masquerade, 0 to 31; nftables needs no mark (default 14)",
		ofPolicy,
		func(d *Document, n int32) {
			d.KubeProxy.IPTables.MasqueradeBit, d.KubeProxy.NFTables.MasqueradeBit = &n, &n
		},
		"iptables.masqueradeBit",
		"nftables.masqueradeBit",
	),
	word(
		"behavior",
		behaviorVerdict+"|"+behaviorKubeProxy,
		"with kube-proxy, everything is off that differs from kube-proxy by default in what packets meet: second chance, "+
			"pings, unused ports and more; other flags win (default "+behaviorVerdict+")",
		ofPolicy,
		func(d *Document) *string { return &d.Verdict.Behavior },
		verdictKind+".behavior",
	),
	word(
		"backend",
		"auto|nftables|iptables",
		"backend that writes the rules (default auto: nftables if the kernel supports it, otherwise iptables)",
		ofPolicy,
		func(d *Document) *string { return &d.Verdict.Backend },
		verdictKind+".backend",
	),
	word(
		"iptables-dispatch",
		"tree|list",
		"how iptables rules find a Service: by a tree of chains, or by one list like kube-proxy's (default tree)",
		ofPolicy,
		func(d *Document) *string { return &d.Verdict.IPTablesDispatch },
		verdictKind+".iptablesDispatch",
	),
	text("ipvs-scheduler", "default IPVS scheduler of Services that IPVS schedules (default rr)", ofPolicy,
		func(d *Document) *string { return &d.KubeProxy.IPVS.Scheduler }, "ipvs.scheduler"),
	list(
		"ipvs-addresses",
		"ranges of load balancer addresses used only by Services, at which IPVS may schedule (default none)",
		ofPolicy,
		func(d *Document) *[]string { return &d.Verdict.IPVSAddresses },
		verdictKind+".ipvsAddresses",
	),
	word(
		"ipvs",
		"auto|always|never",
		"which Services IPVS schedules (default always in mode ipvs, else auto: those that ask for it)",
		ofPolicy,
		func(d *Document) *string { return &d.Verdict.IPVS },
		verdictKind+".ipvs",
	),
	word(
		"second-chance",
		"off|observe|on",
		"what happens to TCP endpoints that do not answer or refuse: on ejects them until they answer again, observe only "+
			"reports them (default "+DefaultSecondChance+")",
		ofPolicy,
		func(d *Document) *string { return (*string)(&d.Verdict.SecondChance) },
		verdictKind+".secondChance",
	),
	boolean(
		"ping-services",
		"let cluster IPs and load balancer addresses with an endpoint answer a ping (default true)",
		ofPolicy,
		func(d *Document, on bool) { d.Verdict.PingServices = &on },
		verdictKind+".pingServices",
	),
	boolean(
		"reject-unused-ports",
		"reject packets from outside to unused ports of load balancer addresses (default true)",
		ofPolicy,
		func(d *Document, on bool) { d.Verdict.RejectUnusedPorts = &on },
		verdictKind+".rejectUnusedPorts",
	),
}

var serverFlags = []option{
	text(
		"everywhere",
		"the Lease of the collector, such as kube-system/verdict-collector: whether all nodes have a change is asked at "+
			"/everywhere of the health server (default none)",
		ofRun,
		func(d *Document) *string { return &d.Verdict.Everywhere },
		verdictKind+".everywhere",
	),
	text(
		"everywhere-token",
		"the file with the token that tells the collector which node this is (default "+
			"/var/run/secrets/verdict-collector/token)",
		ofRun,
		func(d *Document) *string { return &d.Verdict.EverywhereToken },
		verdictKind+".everywhereToken",
	),
	text(
		"ledger",
		"the directory for a ledger of what is written to the kernel, such as /var/lib/verdict/ledger (default none)",
		ofRun,
		func(d *Document) *string { return &d.Verdict.Ledger },
		verdictKind+".ledger",
	),
	address("healthz-bind-address",
		"IP address, with or without a port, of the health server; empty: disabled (default 0.0.0.0:10256)",
		func(d *Document) *string { return &d.KubeProxy.HealthzBindAddress }, "healthzBindAddress"),
	address("metrics-bind-address",
		"IP address, with or without a port, of the metrics server; empty: disabled (default 127.0.0.1:10249)",
		func(d *Document) *string { return &d.KubeProxy.MetricsBindAddress }, "metricsBindAddress"),
	portOnly("healthz-port",
		"healthz-bind-address",
		func(d *Document) *string { return &d.KubeProxy.HealthzBindAddress }, "0.0.0.0", "healthzBindAddress"),
	portOnly("metrics-port",
		"metrics-bind-address",
		func(d *Document) *string { return &d.KubeProxy.MetricsBindAddress }, "127.0.0.1", "metricsBindAddress"),
	boolean("bind-address-hard-fail", "exit if one of these servers fails to listen, instead of retrying", ofRun,
		func(d *Document, on bool) { d.KubeProxy.BindAddressHardFail = on }, "bindAddressHardFail"),
	boolean("profiling", "serve profiles at /debug/pprof of the metrics server", ofRun,
		func(d *Document, on bool) { d.KubeProxy.EnableProfiling = on }, "enableProfiling"),
	text("show-hidden-metrics-for-version", "has no effect: Verdict hides no metrics", ofRun,
		func(d *Document) *string { return &d.KubeProxy.ShowHiddenMetricsForVersion }, "showHiddenMetricsForVersion"),
}

var kernelFlags = []option{
	period(
		"iptables-sync-period",
		"the proxy is unhealthy if changes are pending for twice this long; in modes iptables and nftables (default 30s)",
		func(d *Document, t metav1.Duration) {
			d.KubeProxy.IPTables.SyncPeriod, d.KubeProxy.NFTables.SyncPeriod = t, t
		},
		"iptables.syncPeriod",
		"nftables.syncPeriod",
	),
	period(
		"iptables-min-sync-period",
		"minimum time between two transactions, in modes iptables and nftables (default 0s: as short as the kernel allows)",
		func(d *Document, t metav1.Duration) {
			d.KubeProxy.IPTables.MinSyncPeriod, d.KubeProxy.NFTables.MinSyncPeriod = t, t
		},
		"iptables.minSyncPeriod",
		"nftables.minSyncPeriod",
	),
	period("ipvs-sync-period", "as --iptables-sync-period, in mode ipvs (default 30s)",
		func(d *Document, t metav1.Duration) { d.KubeProxy.IPVS.SyncPeriod = t }, "ipvs.syncPeriod"),
	period("ipvs-min-sync-period", "as --iptables-min-sync-period, in mode ipvs (default 0s)",
		func(d *Document, t metav1.Duration) { d.KubeProxy.IPVS.MinSyncPeriod = t }, "ipvs.minSyncPeriod"),
	list("ipvs-exclude-cidrs", "has no effect: Verdict changes only its own virtual services", ofRun,
		func(d *Document) *[]string { return &d.KubeProxy.IPVS.ExcludeCIDRs }, "ipvs.excludeCIDRs"),
	boolean("ipvs-strict-arp", "has no effect: the node never answers ARP for addresses of Services", ofRun,
		func(d *Document, on bool) { d.KubeProxy.IPVS.StrictARP = on }, "ipvs.strictARP"),
	period("ipvs-tcp-timeout", "how long IPVS remembers idle TCP connections; 0 leaves the kernel's",
		func(d *Document, t metav1.Duration) { d.KubeProxy.IPVS.TCPTimeout = t }, "ipvs.tcpTimeout"),
	period("ipvs-tcpfin-timeout", "how long IPVS remembers TCP connections after a FIN; 0 leaves the kernel's",
		func(d *Document, t metav1.Duration) { d.KubeProxy.IPVS.TCPFinTimeout = t }, "ipvs.tcpFinTimeout"),
	period("ipvs-udp-timeout", "how long IPVS remembers UDP flows; 0 leaves the kernel's",
		func(d *Document, t metav1.Duration) { d.KubeProxy.IPVS.UDPTimeout = t }, "ipvs.udpTimeout"),
	number("oom-score-adj", "oom_score_adj of this process, -1000 to 1000 (default -999)", ofRun,
		func(d *Document, n int32) { d.KubeProxy.OOMScoreAdj = &n }, "oomScoreAdj"),
	number("conntrack-max-per-core",
		"maximum tracked connections per CPU; 0 leaves the kernel's limit, and ignores --conntrack-min (default 32768)",
		ofRun,
		func(d *Document, n int32) { d.KubeProxy.Conntrack.MaxPerCore = &n }, "conntrack.maxPerCore"),
	number("conntrack-min", "minimum of the limit of tracked connections (default 131072)", ofRun,
		func(d *Document, n int32) { d.KubeProxy.Conntrack.Min = &n }, "conntrack.min"),
	period(
		"conntrack-tcp-timeout-established",
		"how long idle TCP connections are tracked; 0 leaves the kernel's (default 24h)",
		func(d *Document, t metav1.Duration) { d.KubeProxy.Conntrack.TCPEstablishedTimeout = &t },
		"conntrack.tcpEstablishedTimeout",
	),
	period(
		"conntrack-tcp-timeout-close-wait",
		"how long half-closed TCP connections are tracked; 0 leaves the kernel's (default 1h)",
		func(d *Document, t metav1.Duration) { d.KubeProxy.Conntrack.TCPCloseWaitTimeout = &t },
		"conntrack.tcpCloseWaitTimeout",
	),
	boolean("conntrack-tcp-be-liberal", "treat TCP packets outside of the window as valid", ofRun,
		func(d *Document, on bool) { d.KubeProxy.Conntrack.TCPBeLiberal = on }, "conntrack.tcpBeLiberal"),
	period("conntrack-udp-timeout", "how long UDP flows without a reply are tracked; 0 leaves the kernel's",
		func(d *Document, t metav1.Duration) { d.KubeProxy.Conntrack.UDPTimeout = t }, "conntrack.udpTimeout"),
	period("conntrack-udp-timeout-stream", "how long UDP flows with replies are tracked; 0 leaves the kernel's",
		func(d *Document, t metav1.Duration) { d.KubeProxy.Conntrack.UDPStreamTimeout = t }, "conntrack.udpStreamTimeout"),
}

var clientFlags = []option{
	text(
		"from",
		"read the objects from this manifest file or directory of manifests instead of the Kubernetes API",
		ofRun,
		func(d *Document) *string { return &d.Verdict.Manifests },
		verdictKind+".manifests",
	),
	text("kubeconfig", "kubeconfig file of the API server (default: the cluster this runs in)", ofRun,
		func(d *Document) *string { return &d.KubeProxy.ClientConnection.Kubeconfig }, "clientConnection.kubeconfig"),
	text("kube-api-content-type", "content type of requests to the API server (default "+contentProtobuf+")", ofRun,
		func(d *Document) *string { return &d.KubeProxy.ClientConnection.ContentType }, "clientConnection.contentType"),
	number("kube-api-burst", "burst of requests to the API server (default 10)", ofRun,
		func(d *Document, n int32) { d.KubeProxy.ClientConnection.Burst = n }, "clientConnection.burst"),
	{
		name:   "kube-api-qps",
		kind:   "float32",
		usage:  "requests to the API server per second (default 5)",
		fields: []string{"clientConnection.qps"},
		set: func(d *Document, s string, _ bool) error {
			n, err := strconv.ParseFloat(s, 32)
			d.KubeProxy.ClientConnection.QPS = float32(n)
			return withText(err, clip.Quote(s)+" is not a number")
		},
	},
	period("config-sync-period", "has no effect: Verdict needs no resync",
		func(d *Document, t metav1.Duration) { d.KubeProxy.ConfigSyncPeriod = t }, "configSyncPeriod"),
}

var logFlags = []option{
	{name: "v", kind: "level", usage: "log verbosity: 2 adds a line for each transaction",
		fields: []string{"logging.verbosity"}, set: func(d *Document, s string, _ bool) error {
			n, err := strconv.ParseUint(s, 10, 31)
			d.KubeProxy.Logging.Verbosity = logsapi.VerbosityLevel(n)
			return withText(err, clip.Quote(s)+" is not a whole number")
		}},
	text("logging-format",
		"text or json (default text)", ofRun,
		func(d *Document) *string { return &d.KubeProxy.Logging.Format }, "logging.format"),
	ignoredFlag("vmodule", "pattern=N,...", "all files have the same verbosity"),
	ignoredFlag("log-flush-frequency", "duration", noBuffer),
	ignoredFlag("log-text-split-stream", "", noBuffer),
	ignoredFlag("log-text-info-buffer-size", "quantity", noBuffer),
	ignoredFlag("log-json-split-stream", "", noBuffer),
	ignoredFlag("log-json-info-buffer-size", "quantity", noBuffer),
	ignoredFlag("boot-id-file", "string", "Verdict does not identify the boot"),
	ignoredFlag("machine-id-file", "string", "the host is identified by its name"),
}

var ownFlags = []option{
	boolean(
		"iptables-compat",
		"with nftables, maintain the iptables chains KUBE-MARK-MASQ and KUBE-POSTROUTING for other programs that jump there",
		ofRun,
		func(d *Document, on bool) { d.Verdict.IPTablesCompat = on },
		verdictKind+".iptablesCompat",
	),
	word(
		"keeper",
		"auto|process|systemd|none",
		"what holds the netlink socket during a restart (default auto)",
		ofRun,
		func(d *Document) *string { return &d.Verdict.Keeper },
		verdictKind+".keeper",
	),
	boolean(
		"own-tables",
		"prevent other processes from changing the tables, if the kernel supports it (Linux 6.9) (default true)",
		ofRun,
		func(d *Document, on bool) { d.Verdict.OwnTables = &on },
		verdictKind+".ownTables",
	),
	boolean(
		"node-condition",
		"write the condition ServicesProgrammed into the status of this node's Node",
		ofRun,
		func(d *Document, on bool) { d.Verdict.NodeCondition = on },
		verdictKind+".nodeCondition",
	),
	text(
		"startup-taint",
		"key of a taint to remove from this node's Node once all Services are programmed",
		ofRun,
		func(d *Document) *string { return &d.Verdict.StartupTaint },
		verdictKind+".startupTaint",
	),
	word(
		"takeover",
		"auto|never",
		"what happens to kube-proxy's rules once all Services are programmed: auto removes them, never keeps them "+
			"(default auto)",
		ofRun,
		func(d *Document) *string { return &d.Verdict.Takeover },
		verdictKind+".takeover",
	),
	number(
		"ipvs-services",
		"with --ipvs=auto: number of Services from which on IPVS schedules all of them; 0: never (default 0)",
		ofRun,
		func(d *Document, n int32) { d.Verdict.IPVSServices = &n },
		verdictKind+".ipvsServices",
	),
	word(
		"metrics-connections",
		"off|service|endpoint",
		"granularity of the connection metrics (default service)",
		ofRun,
		func(d *Document) *string { return &d.Verdict.MetricsConnections },
		verdictKind+".metricsConnections",
	),
	number(
		"metrics-max-series",
		"maximum number of Service ports, and of endpoints, with their own series (default 5000)",
		ofRun,
		func(d *Document, n int32) { d.Verdict.MetricsMaxSeries = &n },
		verdictKind+".metricsMaxSeries",
	),
	number(
		"counter-memory-mib",
		"memory limit of the kernel's counters of frontends and endpoints, in MiB (default 16)",
		ofRun,
		func(d *Document, n int32) { d.Verdict.CounterMemoryMiB = &n },
		verdictKind+".counterMemoryMiB",
	),
	number(
		"ledger-max-mib",
		"maximum size of the files of the ledger, in MiB (default 64)",
		ofRun,
		func(d *Document, n int32) { d.Verdict.LedgerMaxMiB = &n },
		verdictKind+".ledgerMaxMiB",
	),
}

func text(name, usage string, about scope, at func(*Document) *string, fields ...string) option {
	return option{name: name, kind: "string", usage: usage, about: about, fields: fields,
		set: func(d *Document, s string, _ bool) error { *at(d) = s; return nil }}
}

// word makes a flag that accepts only the words of the field's check. An invalid one is an error at once.
func word(name, kind, usage string, about scope, at func(*Document) *string, field string) option {
	return option{name: name, kind: kind, usage: usage, about: about, fields: []string{field},
		set: func(d *Document, s string, _ bool) error {
			*at(d) = s
			if reason := fieldNamed(field).check(s); reason != "" {
				return errors.New(reason)
			}
			return nil
		}}
}

func list(name, usage string, about scope, at func(*Document) *[]string, fields ...string) option {
	return option{name: name, kind: "strings", usage: usage, about: about, fields: fields,
		set: func(d *Document, s string, more bool) error {
			if !more {
				*at(d) = nil
			}
			if s != "" {
				*at(d) = append(*at(d), strings.Split(s, ",")...)
			}
			return nil
		}}
}

func boolean(name, usage string, about scope, set func(*Document, bool), fields ...string) option {
	return option{name: name, kind: "bool", usage: usage, about: about, fields: fields,
		set: func(d *Document, s string, _ bool) error {
			on, err := strconv.ParseBool(s)
			set(d, on)
			return withText(err, clip.Quote(s)+" is neither true nor false")
		}}
}

func number(name, usage string, about scope, set func(*Document, int32), fields ...string) option {
	return option{name: name, kind: "int32", usage: usage, about: about, fields: fields,
		set: func(d *Document, s string, _ bool) error {
			n, err := strconv.ParseInt(s, 0, 32)
			set(d, int32(n))
			return withText(err, clip.Quote(s)+" is not a whole number")
		}}
}

func period(name, usage string, set func(*Document, metav1.Duration), fields ...string) option {
	return option{name: name, kind: "duration", usage: usage, fields: fields,
		set: func(d *Document, s string, _ bool) error {
			t, err := time.ParseDuration(s)
			set(d, metav1.Duration{Duration: t})
			return withText(err, clip.Quote(s)+" is "+exampleDurations)
		}}
}

// address makes a flag for a server's address. An empty one disables the server; kube-proxy's help promises that, but
// kube-proxy does not do it.
func address(name, usage string, at func(*Document) *string, fields ...string) option {
	f := text(name, usage, ofRun, at, fields...)
	f.kind = "ipport"
	f.set = func(d *Document, s string, _ bool) error {
		if *at(d) = s; s == "" {
			*at(d) = off
		}
		return nil
	}
	return f
}

// portOnly makes a deprecated flag for a port. As in kube-proxy, it applies only if the address has no port.
func portOnly(name, better string, at func(*Document) *string, host, field string) option {
	return option{
		name:   name,
		kind:   "int32",
		usage:  "port of --" + better + "; 0: disabled",
		fields: []string{field},
		note:   "it is deprecated: give --" + better + " a port",
		set: func(d *Document, s string, _ bool) error {
			n, err := strconv.ParseUint(s, 10, 16)
			switch _, hasPort := parseAddrPort(*at(d)); {
			case err != nil:
				return fmt.Errorf("%s is not a port", clip.Quote(s))
			case n == 0:
				*at(d) = off
			case *at(d) == "":
				*at(d) = withPort(host, int(n))
			case !hasPort:
				*at(d) = withPort(*at(d), int(n))
			}
			return nil
		},
	}
}

// ignoredFlag makes a flag that is accepted and has no effect.
func ignoredFlag(name, kind, why string) option {
	f := option{name: name, kind: kind, usage: "has no effect: " + why, note: "it has no effect: " + why,
		set: func(*Document, string, bool) error { return nil }}
	if kind == "" {
		f.kind = "bool"
	}
	return f
}

func setGates(d *Document, s string, _ bool) error {
	gates := map[string]bool{}
	for name, on := range d.KubeProxy.FeatureGates {
		gates[name] = on
	}
	for pair := range strings.SplitSeq(s, ",") {
		name, value, _ := strings.Cut(pair, "=")
		on, err := strconv.ParseBool(strings.TrimSpace(value))
		if err != nil && strings.TrimSpace(pair) != "" {
			return fmt.Errorf("%s is neither NAME=true nor NAME=false", clip.Quote(pair))
		}
		if name = strings.TrimSpace(name); name != "" {
			gates[name] = on
		}
	}
	d.KubeProxy.FeatureGates = gates
	return nil
}

// withText replaces the text of an error, if there is one.
func withText(err error, text string) error {
	if err != nil {
		return fmt.Errorf("%s", text)
	}
	return nil
}

// Add adds all flags.
func (f *Flags) Add(fs *pflag.FlagSet) {
	fs.StringVar(
		&f.WriteConfigTo,
		"write-config-to",
		"",
		"write the effective configuration, with all flags and defaults, to this file, and exit",
	)
	fs.BoolVar(&f.Cleanup, "cleanup", false, `remove everything of ours from this node, and exit: "verdict cleanup"`)
	fs.BoolVar(
		&f.InitOnly,
		"init-only",
		false,
		"set the sysctls and exit; only this needs a privileged container, the rest only CAP_NET_ADMIN",
	)
	fs.BoolVar(&f.Version, "version", false, "print the version, and exit")
	fs.StringVar(&f.masterURL, "master", "", "address of the API server, overrides the kubeconfig file")
	fs.Lookup("master").Annotations = map[string][]string{GroupAnnotation: FlagGroups[:1]}
	f.add(fs, ofRun)
}

// AddPolicy adds the flags that decide about packets, for read-only commands.
func (f *Flags) AddPolicy(fs *pflag.FlagSet) { f.add(fs, ofPolicy) }

func (f *Flags) add(fs *pflag.FlagSet, about scope) {
	fs.StringVar(&f.Config, "config", "", "kube-proxy's configuration file; flags override it")
	for i := range flags {
		def := &flags[i]
		if def.about < about {
			continue
		}
		shorthand := ""
		if def.name == "v" {
			shorthand = "v"
		}
		added := fs.VarPF(&value{f, def, nil}, def.name, shorthand, def.usage)
		if def.kind == "bool" {
			added.NoOptDefVal = "true"
		}
		added.Annotations = map[string][]string{GroupAnnotation: {def.group}}
		added.Hidden = strings.HasPrefix(def.usage, "has no effect") || strings.HasPrefix(def.note, "it is deprecated")
	}
}

// value is a flag on a command line.
type value struct {
	flags *Flags
	def   *option
	texts []string
}

// String is for pflag.
func (v *value) String() string { return strings.Join(v.texts, ",") }

// Type is for pflag.
func (v *value) Type() string { return v.def.kind }

// Set is for pflag. It rejects an invalid value at once.
func (v *value) Set(s string) error {
	d := &Document{}
	if err := v.def.set(d, s, false); err != nil {
		return err
	}
	v.texts = append(v.texts, s)
	i := slices.IndexFunc(v.flags.given, func(g given) bool { return g.flag == v.def })
	if i < 0 {
		i = len(v.flags.given)
		v.flags.given = append(v.flags.given, given{flag: v.def})
	}
	v.flags.given[i].texts = v.texts
	return nil
}

// override writes the given flags into a document, and returns what to report about the flags themselves. Ports are
// written last, since they depend on addresses.
func (f *Flags) override(d *Document) (notes []*Problem) {
	if f == nil {
		return nil
	}
	for _, ports := range []bool{false, true} {
		for _, g := range f.given {
			if strings.HasSuffix(g.flag.name, "-port") != ports {
				continue
			}
			for i, text := range g.texts {
				_ = g.flag.set(d, text, i > 0) // Set has tried it
			}
			if g.flag.note != "" {
				notes = append(notes, &Problem{Severity: Note, Field: "--" + g.flag.name, Text: g.flag.note})
			}
		}
	}
	return notes
}

// flagFor returns the flag that was given for a field, with its dashes, or "".
func (f *Flags) flagFor(field string) string {
	if f == nil {
		return ""
	}
	for _, g := range f.given {
		if slices.Contains(g.flag.fields, field) {
			return "--" + g.flag.name
		}
	}
	return ""
}

// flagAtFault returns the flag that has the invalid value, or "" if the file has it.
func (f *Flags) flagAtFault(c *fieldError) string {
	if c.decoded {
		return ""
	}
	return f.flagFor(c.at.String())
}

func (f *Flags) master() string {
	if f == nil {
		return ""
	}
	return f.masterURL
}
