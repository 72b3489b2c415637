package config

import (
	"cmp"
	"errors"
	"fmt"
	"maps"
	"reflect"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/pflag"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

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
var flags = slices.Concat(group(0, ofRun, clientFlags), group(1, ofPolicy, policyFlags), group(2, ofRun, ownFlags),
	group(3, ofRun, kernelFlags), group(4, ofRun, serverFlags), group(5, ofRun, logFlags))

// group puts flags under a heading.
func group(heading int, about scope, options []option) []option {
	for i := range options {
		options[i].group, options[i].about = FlagGroups[heading], about
	}
	return options
}

var policyFlags = []option{
	sets("hostname-override", "name of this node in the cluster, which determines the local endpoints (default: the "+
		"host's name)", "hostnameOverride"),
	sets("bind-address", "this node's IP address, replaces the Node object's address of the same family; no socket is "+
		"bound to it (default 0.0.0.0: use the Node object's)", "bindAddress"),
	sets("proxy-mode", "iptables, ipvs or nftables: determines the meaning of empty node port addresses, and with ipvs "+
		"the scheduling; --backend selects the backend (default nftables)", "mode"),
	sets("masquerade-all", "masquerade all traffic to cluster IPs", "iptables.masqueradeAll", "nftables.masqueradeAll"),
	sets("iptables-localhost-nodeports", "answer IPv4 node ports at 127.0.0.1, too; sets "+
		"net.ipv4.conf.all.route_localnet and guards the loopback range (default true)", "iptables.localhostNodePorts"),
	sets("detect-local-mode", "how pod traffic is recognized: ClusterCIDR, NodeCIDR, BridgeInterface or "+
		"InterfaceNamePrefix (default ClusterCIDR)", "detectLocalMode"),
	sets("pod-bridge-interface", "the bridge that pods are connected to (mode BridgeInterface)",
		"detectLocal.bridgeInterface"),
	sets("pod-interface-name-prefix", "prefix of the names of pods' interfaces (mode InterfaceNamePrefix)",
		"detectLocal.interfaceNamePrefix"),
	sets("cluster-cidr", "the range of pod addresses, or one of each family, comma-separated; traffic from elsewhere "+
		"to cluster IPs is masqueraded (mode ClusterCIDR)", "clusterCIDR"),
	sets("nodeport-addresses", "addresses of this host that answer node ports: ranges, primary (the Node object's), "+
		"localhost, all (default primary,localhost)", "nodePortAddresses"),
	sets("feature-gates", "NAME=true|false, comma-separated; only AllowServiceExternalIPs and KubeProxyIPVS have an "+
		"effect", "featureGates"),
	sets("iptables-masquerade-bit", "bit of the packet mark by which iptables rules masquerade, 0 to 31; nftables "+
		"needs no mark (default 14)", "iptables.masqueradeBit", "nftables.masqueradeBit"),
	word("behavior", behaviorVerdict+"|"+behaviorKubeProxy, "with kube-proxy, everything is off that differs from "+
		"kube-proxy by default in what packets meet: second chance, pings, unused ports and more; other flags win "+
		"(default "+behaviorVerdict+")", verdictKind+".behavior"),
	word("backend", "auto|nftables|iptables", "backend that writes the rules (default auto: nftables if the kernel "+
		"supports it, otherwise iptables)", verdictKind+".backend"),
	word("iptables-dispatch", "tree|list", "how iptables rules find a Service: by a tree of chains, or by one list "+
		"like kube-proxy's (default tree)", verdictKind+".iptablesDispatch"),
	sets("ipvs-scheduler", "default IPVS scheduler of Services that IPVS schedules (default rr)", "ipvs.scheduler"),
	sets("ipvs-addresses", "ranges of load balancer addresses used only by Services, at which IPVS may schedule "+
		"(default none)", verdictKind+".ipvsAddresses"),
	word("ipvs", "auto|always|never", "which Services IPVS schedules (default always in mode ipvs, else auto: those "+
		"that ask for it)", verdictKind+".ipvs"),
	word("second-chance", "off|observe|on", "what happens to TCP endpoints that do not answer or refuse: on ejects "+
		"them until they answer again, observe only reports them (default "+DefaultSecondChance+")",
		verdictKind+".secondChance"),
	word("last-resort", "off|on", "whether a Service without any usable endpoint uses those that are not ready and "+
		"answer a probe of this node (default off)", verdictKind+".lastResort"),
	word("client-address", "off|annotated|keep", "which Services keep their clients' addresses, where nodes are "+
		"neighbours: none, those that ask for it, or all load balancer Services, too (default off)",
		verdictKind+".clientAddress"),
	sets("ping-services", "let cluster IPs and load balancer addresses with an endpoint answer a ping (default true)",
		verdictKind+".pingServices"),
	sets("reject-unused-ports", "reject packets from outside to unused ports of load balancer addresses (default true)",
		verdictKind+".rejectUnusedPorts"),
	word("records", "off|on", "whether connections to Services are recorded: who connected, how much was sent, how it "+
		"ended (default off)", verdictKind+".records"),
}

var serverFlags = []option{
	sets("everywhere", "the Lease of the collector, such as kube-system/verdict-collector: whether all nodes have a "+
		"change is asked at /everywhere of the health server (default none)", verdictKind+".everywhere"),
	sets("everywhere-token", "the file with the token that tells the collector which node this is (default "+
		"/var/run/secrets/verdict-collector/token)", verdictKind+".everywhereToken"),
	sets("ledger", "the directory for a ledger of what is written to the kernel, such as /var/lib/verdict/ledger "+
		"(default none)", verdictKind+".ledger"),
	sets("records-file", "file that records are appended to, such as /var/log/verdict/flows.jsonl (default none)",
		verdictKind+".recordsFile"),
	sets("records-otlp", "URL of the OpenTelemetry collector that records are sent to, such as "+
		"http://otel-collector.monitoring:4318 (default none)", verdictKind+".recordsOTLP"),
	sets("records-client-prefix", "bits that records keep of the addresses of clients outside the cluster, of IPv4 and "+
		"of IPv6, such as 24,64 (default all)", verdictKind+".recordsClientPrefix"),
	address("healthz-bind-address", "IP address, with or without a port, of the health server; empty: disabled "+
		"(default 0.0.0.0:10256)", "healthzBindAddress"),
	address("metrics-bind-address", "IP address, with or without a port, of the metrics server; empty: disabled "+
		"(default 127.0.0.1:10249)", "metricsBindAddress"),
	portOnly("healthz-port", "healthz-bind-address", "0.0.0.0", "healthzBindAddress"),
	portOnly("metrics-port", "metrics-bind-address", "127.0.0.1", "metricsBindAddress"),
	sets("bind-address-hard-fail", "exit if one of these servers fails to listen, instead of retrying",
		"bindAddressHardFail"),
	sets("profiling", "serve profiles at /debug/pprof of the metrics server", "enableProfiling"),
	sets("show-hidden-metrics-for-version", "has no effect: Verdict hides no metrics", "showHiddenMetricsForVersion"),
}

var kernelFlags = []option{
	sets("iptables-sync-period", "the proxy is unhealthy if changes are pending for twice this long; in modes iptables "+
		"and nftables (default 30s)", "iptables.syncPeriod", "nftables.syncPeriod"),
	sets("iptables-min-sync-period", "minimum time between two transactions, in modes iptables and nftables (default "+
		"0s: as short as the kernel allows)", "iptables.minSyncPeriod", "nftables.minSyncPeriod"),
	sets("ipvs-sync-period", "as --iptables-sync-period, in mode ipvs (default 30s)", "ipvs.syncPeriod"),
	sets("ipvs-min-sync-period", "as --iptables-min-sync-period, in mode ipvs (default 0s)", "ipvs.minSyncPeriod"),
	sets("ipvs-exclude-cidrs", "has no effect: Verdict changes only its own virtual services", "ipvs.excludeCIDRs"),
	sets("ipvs-strict-arp", "has no effect: the node never answers ARP for addresses of Services", "ipvs.strictARP"),
	sets("ipvs-tcp-timeout", "how long IPVS remembers idle TCP connections; 0 leaves the kernel's", "ipvs.tcpTimeout"),
	sets("ipvs-tcpfin-timeout", "how long IPVS remembers TCP connections after a FIN; 0 leaves the kernel's",
		"ipvs.tcpFinTimeout"),
	sets("ipvs-udp-timeout", "how long IPVS remembers UDP flows; 0 leaves the kernel's", "ipvs.udpTimeout"),
	sets("oom-score-adj", "oom_score_adj of this process, -1000 to 1000 (default -999)", "oomScoreAdj"),
	sets("conntrack-max-per-core", "maximum tracked connections per CPU; 0 leaves the kernel's limit, and ignores "+
		"--conntrack-min (default 32768)", "conntrack.maxPerCore"),
	sets("conntrack-min", "minimum of the limit of tracked connections (default 131072)", "conntrack.min"),
	sets("conntrack-tcp-timeout-established", "how long idle TCP connections are tracked; 0 leaves the kernel's "+
		"(default 24h)", "conntrack.tcpEstablishedTimeout"),
	sets("conntrack-tcp-timeout-close-wait", "how long half-closed TCP connections are tracked; 0 leaves the kernel's "+
		"(default 1h)", "conntrack.tcpCloseWaitTimeout"),
	sets("conntrack-tcp-be-liberal", "treat TCP packets outside of the window as valid", "conntrack.tcpBeLiberal"),
	sets("conntrack-udp-timeout", "how long UDP flows without a reply are tracked; 0 leaves the kernel's",
		"conntrack.udpTimeout"),
	sets("conntrack-udp-timeout-stream", "how long UDP flows with replies are tracked; 0 leaves the kernel's",
		"conntrack.udpStreamTimeout"),
}

var clientFlags = []option{
	sets("from", "read the objects from this manifest file or directory of manifests instead of the Kubernetes API",
		verdictKind+".manifests"),
	sets("kubeconfig", "kubeconfig file of the API server (default: the cluster this runs in)",
		"clientConnection.kubeconfig"),
	sets("kube-api-content-type", "content type of requests to the API server (default "+contentProtobuf+")",
		"clientConnection.contentType"),
	sets("kube-api-burst", "burst of requests to the API server (default 10)", "clientConnection.burst"),
	sets("kube-api-qps", "requests to the API server per second (default 5)", "clientConnection.qps"),
	sets("config-sync-period", "has no effect: Verdict needs no resync", "configSyncPeriod"),
}

var logFlags = []option{
	sets("v", "log verbosity: 2 adds a line for each transaction", "logging.verbosity"),
	sets("logging-format", "text or json (default text)", "logging.format"),
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
	sets("iptables-compat", "with nftables, maintain the iptables chains KUBE-MARK-MASQ and KUBE-POSTROUTING for other "+
		"programs that jump there", verdictKind+".iptablesCompat"),
	word("keeper", "auto|process|systemd|none", "what holds the netlink socket during a restart (default auto)",
		verdictKind+".keeper"),
	sets("own-tables", "prevent other processes from changing the tables, if the kernel supports it (Linux 6.9) "+
		"(default true)", verdictKind+".ownTables"),
	sets("node-condition", "write the condition ServicesProgrammed into the status of this node's Node",
		verdictKind+".nodeCondition"),
	sets("startup-taint", "key of a taint to remove from this node's Node once all Services are programmed",
		verdictKind+".startupTaint"),
	word("takeover", "auto|never", "what happens to kube-proxy's rules once all Services are programmed: auto removes "+
		"them, never keeps them (default auto)", verdictKind+".takeover"),
	sets("ipvs-services", "with --ipvs=auto: number of Services from which on IPVS schedules all of them; 0: never "+
		"(default 0)", verdictKind+".ipvsServices"),
	word("metrics-connections", "off|service|endpoint", "granularity of the connection metrics (default service)",
		verdictKind+".metricsConnections"),
	sets("metrics-max-series", "maximum number of Service ports, and of endpoints, with their own series (default 5000)",
		verdictKind+".metricsMaxSeries"),
	sets("counter-memory-mib", "memory limit of the kernel's counters of frontends and endpoints, in MiB (default 16)",
		verdictKind+".counterMemoryMiB"),
	sets("ledger-max-mib", "maximum size of the files of the ledger, in MiB (default 64)", verdictKind+".ledgerMaxMiB"),
	sets("records-memory-mib", "memory limit of the list of records, in MiB; the sums take as much again (default 32)",
		verdictKind+".recordsMemoryMiB"),
}

// sets makes a flag that sets fields of one type.
func sets(name, usage string, fields ...string) option {
	t := (&Document{}).at(fieldPath(fields[0])).Type()
	if t.Kind() == reflect.Pointer {
		t = t.Elem()
	}
	parser := parsers[t.Kind()]
	return option{name: name, kind: parser.kind, usage: usage, fields: fields,
		set: func(d *Document, s string, more bool) error {
			for _, f := range fields {
				v := d.at(fieldPath(f))
				if v.Kind() == reflect.Pointer {
					v.Set(reflect.New(t))
					v = v.Elem()
				}
				if err := parser.set(v, s, more); err != nil {
					return err
				}
			}
			return nil
		}}
}

// parsers read the text of a flag into a field. More is true if the flag was given before.
var parsers = map[reflect.Kind]struct {
	kind string
	set  func(v reflect.Value, s string, more bool) error
}{
	reflect.String: {"string", func(v reflect.Value, s string, _ bool) error { v.SetString(s); return nil }},
	reflect.Bool: {"bool", func(v reflect.Value, s string, _ bool) error {
		on, err := strconv.ParseBool(s)
		v.SetBool(on)
		return withText(err, clip.Quote(s)+" is neither true nor false")
	}},
	reflect.Int32: {"int32", func(v reflect.Value, s string, _ bool) error {
		n, err := strconv.ParseInt(s, 0, 32)
		v.SetInt(n)
		return withText(err, clip.Quote(s)+" is not a whole number")
	}},
	reflect.Uint32: {"level", func(v reflect.Value, s string, _ bool) error {
		n, err := strconv.ParseUint(s, 10, 31)
		v.SetUint(n)
		return withText(err, clip.Quote(s)+" is not a whole number")
	}},
	reflect.Float32: {"float32", func(v reflect.Value, s string, _ bool) error {
		n, err := strconv.ParseFloat(s, 32)
		v.SetFloat(n)
		return withText(err, clip.Quote(s)+" is not a number")
	}},
	reflect.Struct: {"duration", func(v reflect.Value, s string, _ bool) error {
		t, err := time.ParseDuration(s)
		v.Set(reflect.ValueOf(metav1.Duration{Duration: t}))
		return withText(err, clip.Quote(s)+" is "+exampleDurations)
	}},
	reflect.Slice: {"strings", func(v reflect.Value, s string, more bool) error {
		if !more {
			v.SetZero()
		}
		if s != "" {
			v.Set(reflect.AppendSlice(v, reflect.ValueOf(strings.Split(s, ","))))
		}
		return nil
	}},
	reflect.Map: {"mapStringBool", setGates},
}

// word makes a flag that accepts only the words of the field's check. An invalid one is an error at once.
func word(name, kind, usage, field string) option {
	f := sets(name, usage, field)
	set := f.set
	f.kind, f.set = kind, func(d *Document, s string, more bool) error {
		if reason := fieldNamed(field).check(s); reason != "" {
			return errors.New(reason)
		}
		return set(d, s, more)
	}
	return f
}

// textAt returns a field that is a text.
func (d *Document) textAt(field string) *string {
	return d.at(fieldPath(field)).Addr().Interface().(*string)
}

// address makes a flag for a server's address. An empty one disables the server; kube-proxy's help promises that, but
// kube-proxy does not do it.
func address(name, usage, field string) option {
	f := sets(name, usage, field)
	f.kind, f.set = "ipport", func(d *Document, s string, _ bool) error {
		*d.textAt(field) = cmp.Or(s, off)
		return nil
	}
	return f
}

// portOnly makes a deprecated flag for a port. As in kube-proxy, it applies only if the address has no port.
func portOnly(name, better, host, field string) option {
	return option{
		name:   name,
		kind:   "int32",
		usage:  "port of --" + better + "; 0: disabled",
		fields: []string{field},
		note:   "it is deprecated: give --" + better + " a port",
		set: func(d *Document, s string, _ bool) error {
			at := d.textAt(field)
			n, err := strconv.ParseUint(s, 10, 16)
			switch _, hasPort := parseAddrPort(*at); {
			case err != nil:
				return fmt.Errorf("%s is not a port", clip.Quote(s))
			case n == 0:
				*at = off
			case *at == "":
				*at = withPort(host, int(n))
			case !hasPort:
				*at = withPort(*at, int(n))
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

// setGates adds feature gates to those that are set.
func setGates(v reflect.Value, s string, _ bool) error {
	gates := map[string]bool{}
	maps.Copy(gates, v.Interface().(map[string]bool))
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
	v.Set(reflect.ValueOf(gates))
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
	fs.StringVar(&f.WriteConfigTo, "write-config-to", "",
		"write the effective configuration, with all flags and defaults, to this file, and exit")
	fs.BoolVar(&f.Cleanup, "cleanup", false, `remove everything of ours from this node, and exit: "verdict cleanup"`)
	fs.BoolVar(&f.InitOnly, "init-only", false,
		"set the sysctls and exit; only this needs a privileged container, the rest only CAP_NET_ADMIN")
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
