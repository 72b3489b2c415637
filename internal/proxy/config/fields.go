package config

import (
	"fmt"
	"math"
	"net/url"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/validation"
	logsapi "k8s.io/component-base/logs/api/v1"
	"k8s.io/kube-proxy/config/v1alpha1"

	"github.com/verdict-proxy/verdict/internal/system/clip"
	"github.com/verdict-proxy/verdict/internal/system/yamltree"
	"github.com/verdict-proxy/verdict/sync/snapshot"
)

// Effect tells when a change of a field takes effect.
type Effect uint8

// The effects.
const (
	// Live means immediately, while the proxy runs.
	Live Effect = iota
	// Restart means at the next start of the proxy.
	Restart
	// Never means that the field has no meaning here.
	Never
)

// field describes one field of a Document, independently of the others.
type field struct {
	name   string
	effect Effect
	// does describes the field's effect, or for Never, why it has none. It is a row of docs/CONFIGURATION.md.
	does string
	// check returns what is wrong with a value, or "". A nil check accepts everything. Its argument is a pointer's target,
	// or one entry of a list.
	check func(v any) string
}

// Why some fields have no effect.
const (
	noWindows = "this is for Windows"
	noBuffer  = "log lines are not buffered"
)

// fields lists all fields, in kube-proxy's order. Tests keep it, the types and docs/CONFIGURATION.md consistent.
var fields = []field{
	{"featureGates", Live, "`AllowServiceExternalIPs=false` leaves `spec.externalIPs` out; `KubeProxyIPVS=false` " +
		"rejects mode `ipvs`. The log names the others in one line: they have no effect, see " +
		"[KUBE-PROXY.md](KUBE-PROXY.md#feature-gates)", nil},
	{"clientConnection.kubeconfig", Restart, "as kube-proxy; empty, without `--master`, means the cluster this runs in",
		nil},
	{"clientConnection.acceptContentTypes", Restart, "as kube-proxy; empty means protobuf, else JSON", checkContentTypes},
	{"clientConnection.contentType", Restart, "protobuf or JSON", oneOf(contentProtobuf, contentJSON)},
	{"clientConnection.qps", Restart, "as kube-proxy", nil},
	{"clientConnection.burst", Restart, "as kube-proxy", atLeast(0)},
	{"logging.format", Restart, "`text` or `json`, written by log/slog", oneOf("text", "json")},
	{"logging.flushFrequency", Never, noBuffer, positive},
	{"logging.verbosity", Live, "0 and 1: what operators should know; from 2 on also a line for each transaction",
		atMost(math.MaxInt32)},
	{"logging.vmodule", Never, "all files have the same verbosity", nil},
	{"logging.options.text.splitStream", Never, noBuffer, nil},
	{"logging.options.text.infoBufferSize", Never, noBuffer, nil},
	{"logging.options.json.splitStream", Never, noBuffer, nil},
	{"logging.options.json.infoBufferSize", Never, noBuffer, nil},
	{"hostnameOverride", Restart, "as kube-proxy: in lower case, without spaces around it; empty means the host's name",
		notBlank},
	{"bindAddress", Live, "as kube-proxy: replaces the Node's address of the same family; no socket is bound to it",
		checkAddr},
	{"healthzBindAddress", Restart, "as kube-proxy", checkAddrPort},
	{"metricsBindAddress", Restart, "as kube-proxy", checkAddrPort},
	{"bindAddressHardFail", Restart, "as kube-proxy", nil},
	{"enableProfiling", Restart, "as kube-proxy", nil},
	{"showHiddenMetricsForVersion", Never, "no metric is hidden", checkVersion},
	{"mode", Live, "selects the section below, as in kube-proxy, where empty means `iptables`. With `ipvs`, IPVS " +
		"chooses the endpoints (see `ipvs` below). `backend` below selects the backend",
		oneOf("", modeIPTables, modeIPVS, modeNFTables)},
	{"iptables.masqueradeBit", Restart, "as kube-proxy, for iptables rules (`backend` and `iptablesCompat` below), " +
		"unless the mode is `nftables`; nftables needs no mark", within(0, 31)},
	{"iptables.masqueradeAll", Live, "as kube-proxy, unless the mode is `nftables`", nil},
	{"iptables.localhostNodePorts", Live, "in every mode, see " +
		"[decisions/0001-localhost-nodeports.md](decisions/0001-localhost-nodeports.md)", nil},
	{"iptables.syncPeriod", Live, "the proxy is unhealthy if changes are pending for twice this long; in modes " +
		"`iptables` and empty", positive},
	{"iptables.minSyncPeriod", Live, "the minimum time between two transactions, in modes `iptables` and empty. 0 (in " +
		"kube-proxy 1s): four times as long as the last one took, up to 50 ms, or with `backend: iptables` eight times, " +
		"up to 1 s ([IPTABLES.md](IPTABLES.md#pace))", notNegative},
	{"ipvs.syncPeriod", Live, "as `iptables.syncPeriod`, in mode `ipvs`", positive},
	{"ipvs.minSyncPeriod", Live, "as `iptables.minSyncPeriod`, in mode `ipvs`", notNegative},
	{"ipvs.scheduler", Live, "as kube-proxy: the default scheduler of Services that IPVS schedules; empty means `rr`",
		checkScheduler},
	{"ipvs.excludeCIDRs", Never, "Verdict changes only its own virtual services", checkPrefix},
	{"ipvs.strictARP", Never, "the node never answers ARP for addresses of Services", nil},
	{"ipvs.tcpTimeout", Restart, "as kube-proxy, while IPVS schedules Services; `verdict cleanup` restores the " +
		"previous value", notNegative},
	{"ipvs.tcpFinTimeout", Restart, "as `ipvs.tcpTimeout`", notNegative},
	{"ipvs.udpTimeout", Restart, "as `ipvs.tcpTimeout`", notNegative},
	{"nftables.masqueradeBit", Restart, "as `iptables.masqueradeBit`, in mode `nftables`", within(0, 31)},
	{"nftables.masqueradeAll", Live, "as kube-proxy, in mode `nftables`", nil},
	{"nftables.syncPeriod", Live, "as `iptables.syncPeriod`, in mode `nftables`", positive},
	{"nftables.minSyncPeriod", Live, "as `iptables.minSyncPeriod`, in mode `nftables`", notNegative},
	{"winkernel.networkName", Never, noWindows, nil},
	{"winkernel.sourceVip", Never, noWindows, nil},
	{"winkernel.enableDSR", Never, noWindows, nil},
	{"winkernel.rootHnsEndpointName", Never, noWindows, nil},
	{"winkernel.forwardHealthCheckVip", Never, noWindows, nil},
	{"detectLocalMode", Live, "as kube-proxy",
		oneOf(modeClusterCIDR, modeNodeCIDR, modeBridgeInterface, modeInterfacePrefix)},
	{"detectLocal.bridgeInterface", Live, "as kube-proxy, in mode `BridgeInterface`", nil},
	{"detectLocal.interfaceNamePrefix", Live, "as kube-proxy, in mode `InterfaceNamePrefix`", nil},
	{"clusterCIDR", Live, "as kube-proxy, in mode `ClusterCIDR`: one range, or one of each family", nil},
	{"nodePortAddresses", Live, "ranges and the keywords `primary`, `localhost` and `all`, in any combination; see " +
		"[decisions/0004-node-ports.md](decisions/0004-node-ports.md). An empty list means `all`, as in kube-proxy; in " +
		"mode `nftables` it means `primary` and `localhost` (in kube-proxy `primary` alone)", nil},
	{"oomScoreAdj", Live, "as kube-proxy", within(-1000, 1000)},
	{"conntrack.maxPerCore", Live, "as kube-proxy, but a higher existing limit is kept", atLeast(0)},
	{"conntrack.min", Live, "as kube-proxy", atLeast(0)},
	{"conntrack.tcpEstablishedTimeout", Live, "as kube-proxy", checkSeconds},
	{"conntrack.tcpCloseWaitTimeout", Live, "as kube-proxy", checkSeconds},
	{"conntrack.tcpBeLiberal", Live, "as kube-proxy; Verdict never resets it", nil},
	{"conntrack.udpTimeout", Live, "as kube-proxy", checkSeconds},
	{"conntrack.udpStreamTimeout", Live, "as kube-proxy", checkSeconds},
	{"configSyncPeriod", Never, "Verdict needs no resync: it handles each change once", positive},
	{"portRange", Never, "it has no effect in kube-proxy either", nil},
	{"windowsRunAsService", Never, noWindows, nil},
	{verdictKind + ".manifests", Restart, "watch objects in this file or directory instead of the Kubernetes API", nil},
	{verdictKind + ".backend", Restart, "what writes the rules: `nftables`, `iptables`, or `auto`: nftables if the " +
		"kernel supports it, otherwise iptables. See [IPTABLES.md](IPTABLES.md)", knownBackend},
	{verdictKind + ".iptablesDispatch", Restart, "how iptables rules find a Service: by a `tree` of chains (a list if " +
		"there are few Services), or by a `list` like kube-proxy's; see [IPTABLES.md](IPTABLES.md)", oneOf("tree", "list")},
	{verdictKind + ".iptablesCompat", Restart, "with nftables, keep the chains KUBE-MARK-MASQ and KUBE-POSTROUTING in " +
		"iptables' nat tables for other programs that jump there; see [IPTABLES.md](IPTABLES.md)", nil},
	{verdictKind + ".keeper", Restart, "what holds the netlink socket during a restart: `auto`, `process`, `systemd` or " +
		"`none`; see [decisions/0008-keeper.md](decisions/0008-keeper.md)", oneOf("auto", "process", "systemd", "none")},
	{verdictKind + ".ownTables", Restart, "prevent other processes from changing the tables, if the kernel supports it " +
		"(Linux 6.9)", nil},
	{verdictKind + ".nodeCondition", Restart, "set the condition `ServicesProgrammed` in the status of this Node, " +
		"which needs a right; see [CLUSTER.md](CLUSTER.md#in-the-node-object)", nil},
	{verdictKind + ".startupTaint", Restart, "the key of a taint to remove from this Node once all Services are " +
		"programmed, which needs a right; see [CLUSTER.md](CLUSTER.md#in-the-node-object)", checkTaintKey},
	{verdictKind + ".takeover", Restart, "`auto` removes kube-proxy's rules from this node once all Services are " +
		"programmed; `never` keeps them; see [INSTALL.md](INSTALL.md)", oneOf("auto", "never")},
	{verdictKind + ".ipvs", Live, "which Services IPVS schedules, see [IPVS.md](IPVS.md): `auto` those that ask for " +
		"it, `always` all that do not ask for nftables, `never` none. In mode `ipvs` the default is `always`",
		oneOf("auto", "always", "never")},
	{verdictKind + ".ipvsServices", Live, "with `auto`: the number of Services at which IPVS schedules all of them, " +
		"until the next start; 0: never", atLeast(0)},
	{verdictKind + ".ipvsAddresses", Live, "ranges of load balancer addresses that only Services have: IPVS may " +
		"schedule there, and the node then accepts such an address as its own. At all others, and at external IPs, " +
		"nftables chooses the endpoint; see [IPVS.md](IPVS.md#which-addresses)", checkNarrowPrefix},
	{verdictKind + ".behavior", Live, "`kube-proxy` disables all default differences from kube-proxy in what packets " +
		"meet that no other field of this configuration sets; see [below](#as-kube-proxy). `verdict` disables none",
		oneOf(behaviorVerdict, behaviorKubeProxy)},
	{verdictKind + ".secondChance", Live, "what happens to TCP endpoints that do not answer this node, or refuse " +
		"connections: `on` ejects them until they answer again, `observe` only reports them, `off` disables it on this " +
		"node; see [below](#endpoints-that-do-not-answer-or-refuse)", oneOf("off", "observe", "on")},
	{verdictKind + ".lastResort", Live, "`on` lets a Service without any usable endpoint use those that are not ready " +
		"and answer a probe of this node; see [below](#the-last-resort)", oneOf("off", "on")},
	{verdictKind + ".clientAddress", Live, "which Services with `externalTrafficPolicy: Cluster` keep the addresses of " +
		"their clients, where nodes are neighbours: `annotated` those that ask for it, `keep` all load balancer " +
		"Services, too, `off` none; see [below](#the-clients-address)", oneOf("off", "annotated", "keep")},
	{verdictKind + ".pingServices", Live, "let cluster IPs and load balancer addresses answer pings while a Service " +
		"has an endpoint there; see [below](#ping-unused-ports-and-nodes-without-endpoints)", nil},
	{verdictKind + ".rejectUnusedPorts", Live, "reject packets from outside to unused ports of load balancer " +
		"addresses, see [below](#ping-unused-ports-and-nodes-without-endpoints)", nil},
	{verdictKind + ".metricsConnections", Restart, "granularity of the connection metrics: `off`, `service` or " +
		"`endpoint`; see [METRICS.md](METRICS.md)", oneOf("off", "service", "endpoint")},
	{verdictKind + ".metricsMaxSeries", Restart, "maximum number of Service ports, and of endpoints, with their own " +
		"series in the metrics", atLeast(1)},
	{verdictKind + ".counterMemoryMiB", Restart, "memory limit of the kernel's counters: 16 bytes for each possible " +
		"processor and frontend, and, if there is room, endpoint; 0 disables counting. The annotation " +
		"`verdict/counters` overrides it for a Service ([METRICS.md](METRICS.md))", atLeast(0)},
	{verdictKind + ".everywhere", Restart, "the Lease of the collector, as `kube-system/verdict-collector`: enables " +
		"`/everywhere`, see [CLUSTER.md](CLUSTER.md#wait-until-every-node-has-programmed-a-change); empty disables it",
		checkLease},
	{verdictKind + ".everywhereToken", Restart, "the file with the token that identifies this node to the collector", nil},
	{verdictKind + ".ledger", Restart, "a directory for a ledger of what was written to the kernel, such as " +
		"`/var/lib/verdict/ledger`, see [LEDGER.md](LEDGER.md); empty disables it", checkAbsolute},
	{verdictKind + ".ledgerMaxMiB", Restart, "maximum size of the files there; the oldest records are deleted",
		within(1, 1<<20)},
	{verdictKind + ".records", Restart, "`on` records connections to Services on this node: who connected, how much was " +
		"sent, how it ended; see [FLOWS.md](FLOWS.md)", oneOf("off", "on")},
	{verdictKind + ".recordsMemoryMiB", Restart, "memory limit of the list of records; the sums take as much again",
		within(1, 1<<12)},
	{verdictKind + ".recordsFile", Restart, "append records to this file, such as `/var/log/verdict/flows.jsonl`, and " +
		"rotate it; see [FLOWS.md](FLOWS.md#export)", checkAbsolute},
	{verdictKind + ".recordsOTLP", Restart, "send records to the OpenTelemetry collector at this URL, such as " +
		"`http://otel-collector.monitoring:4318`; see [FLOWS.md](FLOWS.md#export)", checkURL},
	{verdictKind + ".recordsClientPrefix", Restart, "how many bits records keep of the addresses of clients outside the " +
		"cluster, of IPv4 and of IPv6, such as `24,64`; empty keeps all", checkPrefixLengths},
}

// fieldNamed returns the field of this name. It panics if there is none.
func fieldNamed(name string) *field {
	i := slices.IndexFunc(fields, func(f field) bool { return f.name == name })
	if i < 0 {
		panic("config: there is no field " + name)
	}
	return &fields[i]
}

// path gives the field's path.
func (f *field) path() yamltree.Path { return fieldPath(f.name) }

func fieldPath(name string) yamltree.Path { return strings.Split(name, ".") }

// appliesIn reports whether a mode uses the field's section.
func (f *field) appliesIn(mode v1alpha1.ProxyMode) bool {
	section, rest, _ := strings.Cut(f.name, ".")
	switch {
	case section == modeNFTables:
		return mode == modeNFTables
	case section == modeIPVS:
		return mode == modeIPVS
	case section != modeIPTables || rest == "localhostNodePorts":
		return true
	case rest == "syncPeriod" || rest == "minSyncPeriod":
		return mode == modeIPTables || mode == ""
	}
	return mode != modeNFTables
}

func oneOf(words ...string) func(any) string {
	return func(v any) string {
		word := fmt.Sprint(v)
		if slices.Contains(words, word) {
			return ""
		}
		known := slices.DeleteFunc(slices.Clone(words), func(w string) bool { return w == "" })
		return clip.Quote(word) + " is not one of " + strings.Join(known, ", ")
	}
}

// knownBackend accepts the backends of this build.
func knownBackend(v any) string {
	words := []string{string(Auto)}
	for _, b := range Backends {
		words = append(words, string(b))
	}
	return oneOf(words...)(v)
}

// checkContentTypes accepts a list with at least one content type that the client can read.
func checkContentTypes(v any) string {
	for one := range strings.SplitSeq(v.(string), ",") {
		switch one, _, _ = strings.Cut(strings.TrimSpace(one), ";"); one {
		case "", "*/*", contentProtobuf, contentJSON:
			return ""
		}
	}
	return clip.Quote(v.(string)) + " has neither " + contentProtobuf + " nor " + contentJSON
}

// asInt64 converts a number of any type that fields have.
func asInt64(v any) int64 {
	switch v := v.(type) {
	case int32:
		return int64(v)
	case logsapi.VerbosityLevel:
		return int64(v)
	}
	panic(fmt.Sprintf("config: %T is not a number", v))
}

func within(least, most int64) func(any) string {
	return func(v any) string {
		if n := asInt64(v); n < least || n > most {
			return fmt.Sprintf("%d is not within %d to %d", n, least, most)
		}
		return ""
	}
}

func atLeast(least int64) func(any) string {
	return func(v any) string {
		if n := asInt64(v); n < least {
			return fmt.Sprintf("%d is less than %d", n, least)
		}
		return ""
	}
}

func atMost(most int64) func(any) string {
	return func(v any) string {
		if n := asInt64(v); n > most {
			return fmt.Sprintf("%d is more than %d", n, most)
		}
		return ""
	}
}

// asDuration converts a duration of either type that fields have.
func asDuration(v any) time.Duration {
	switch v := v.(type) {
	case metav1.Duration:
		return v.Duration
	case logsapi.TimeOrMetaDuration:
		return v.Duration.Duration
	}
	panic(fmt.Sprintf("config: %T is not a duration", v))
}

func positive(v any) string {
	if d := asDuration(v); d <= 0 {
		return d.String() + " is not more than 0"
	}
	return ""
}

func notNegative(v any) string {
	if d := asDuration(v); d < 0 {
		return d.String() + " is less than 0"
	}
	return ""
}

// checkSeconds accepts what the kernel can count in seconds.
func checkSeconds(v any) string {
	switch d := asDuration(v); {
	case d < 0:
		return d.String() + " is less than 0"
	case d > 0 && d < time.Second:
		return d.String() + " is less than a second"
	case d/time.Second > math.MaxInt32:
		return d.String() + " is more than the kernel accepts"
	}
	return ""
}

func notBlank(v any) string {
	if s := v.(string); s != "" && strings.TrimSpace(s) == "" {
		return "it is blank"
	}
	return ""
}

// textThat accepts the texts for which ok returns true, and says of others that they are not what.
func textThat(what string, ok func(string) bool) func(any) string {
	return func(v any) string {
		if text := v.(string); !ok(text) {
			return clip.Quote(text) + " is not " + what
		}
		return ""
	}
}

// parsed reports whether a function reads a text.
func parsed[T any](parse func(string) (T, bool)) func(string) bool {
	return func(text string) bool {
		_, ok := parse(text)
		return ok
	}
}

var (
	// checkTaintKey accepts what the API accepts as the key of a taint, or nothing.
	checkTaintKey = textThat("the key of a taint such as example.com/not-programmed", func(key string) bool {
		return key == "" || len(validation.IsQualifiedName(key)) == 0
	})
	checkAddr     = textThat("an IP address", parsed(parseAddr))
	checkAddrPort = textThat("an IP address with or without a port, such as 127.0.0.1:10249 or ::1",
		func(text string) bool { return text == off || parsed(parseAddrPort)(text) })
	checkPrefix = textThat("an address range such as 10.244.0.0/16", parsed(parsePrefix))

	version      = regexp.MustCompile(`^[0-9]+\.[0-9]+$`)
	checkVersion = textThat("a version such as 1.35", func(text string) bool {
		return text == "" || version.MatchString(text)
	})
	// checkAbsolute accepts an absolute path, or nothing: the proxy may be started anywhere.
	checkAbsolute = textThat("an absolute path", func(path string) bool {
		return path == "" || strings.HasPrefix(path, "/")
	})
	// checkURL accepts a URL of HTTP, or nothing.
	checkURL = textThat("a URL such as http://otel-collector.monitoring:4318", func(text string) bool {
		u, err := url.Parse(text)
		return text == "" || err == nil && (u.Scheme == "http" || u.Scheme == "https") && u.Hostname() != ""
	})
	// checkPrefixLengths accepts two numbers of bits, or nothing.
	checkPrefixLengths = textThat("two numbers of bits such as 24,64", func(text string) bool {
		return text == "" || parsed(parsePrefixLengths)(text)
	})
	// checkLease accepts NAMESPACE/NAME, or nothing.
	checkLease = textThat("NAMESPACE/NAME, such as kube-system/verdict-collector", func(text string) bool {
		namespace, name, _ := strings.Cut(text, "/")
		return text == "" || namespace != "" && name != "" && !strings.Contains(name, "/") && len(text) <= 2*253+1
	})
	// checkScheduler accepts an IPVS scheduler without flags: kube-proxy's field has none.
	checkScheduler = oneOf(slices.Concat([]string{""}, snapshot.Schedulers)...)
)

// checkNarrowPrefix rejects ranges that hold every address.
func checkNarrowPrefix(v any) string {
	if r, ok := parsePrefix(v.(string)); ok && r.Bits() == 0 {
		return clip.Quote(v.(string)) + " contains every address, including those of nodes and gateways"
	}
	return checkPrefix(v)
}

// checkInterfaceName rejects names that the kernel rejects, and those with * or quotes, which nft would interpret.
func checkInterfaceName(s string) string {
	if len(s) > 15 || strings.ContainsAny(s, "/ \t\n\"\\*") {
		return clip.Quote(s) + " is not an interface name (at most 15 bytes, without spaces, slashes, quotes or stars)"
	}
	return ""
}

// parsePrefixLengths reads the lengths of prefixes of IPv4 and of IPv6: "24,64".
func parsePrefixLengths(text string) (bits [2]int, ok bool) {
	v4, v6, _ := strings.Cut(text, ",")
	a, err4 := strconv.ParseUint(v4, 10, 8)
	b, err6 := strconv.ParseUint(v6, 10, 8)
	ok = err4 == nil && err6 == nil && a >= 1 && a <= 32 && b >= 1 && b <= 128
	return [2]int{int(a), int(b)}, ok
}
