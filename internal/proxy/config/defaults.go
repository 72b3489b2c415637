package config

import (
	"net"
	"net/netip"
	"strconv"
	"strings"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	logsapi "k8s.io/component-base/logs/api/v1"
	"k8s.io/kube-proxy/config/v1alpha1"

	"github.com/verdict-proxy/verdict/internal/system/sloppy"
)

// DefaultCounterMemoryMiB is the default limit of memory for the kernel's counters of frontends and endpoints.
const DefaultCounterMemoryMiB = 16

// DefaultSecondChance is what happens by default to TCP endpoints that do not answer or refuse: off, observe or on.
const DefaultSecondChance = "on"

// kube-proxy's ports.
const (
	healthzPort = 10256
	metricsPort = 10249
)

// defaultMasqueradeBit is kube-proxy's: the mark is 0x4000.
const defaultMasqueradeBit = 14

// The behaviors.
const (
	behaviorVerdict   = "verdict"
	behaviorKubeProxy = "kube-proxy"
)

// cautious is what invalid values are replaced by if nothing is in force yet. It differs from the defaults where those
// change what packets meet with kube-proxy, or what others made: who meant to switch that off must not get it by a
// typing error.
func cautious() *Document {
	d := &Document{}
	d.Verdict.Behavior, d.Verdict.Takeover, d.Verdict.IPVS = behaviorKubeProxy, "never", "never"
	d.setDefaults(behaviorKubeProxy)
	return d
}

// asKubeProxy reports whether packets are to meet what they meet with kube-proxy, unless a field says otherwise.
func (d *Document) asKubeProxy() bool { return d.Verdict.Behavior == behaviorKubeProxy }

// setDefaults fills in unset fields with kube-proxy's defaults. There is one exception: minSyncPeriod stays 0, where
// kube-proxy uses 1s in modes iptables and nftables. Transactions are cheap here, so there is no reason to wait. The
// behavior is the one in force.
func (d *Document) setDefaults(behavior string) {
	c := &d.KubeProxy
	c.APIVersion, c.Kind = kubeProxyVersion, kubeProxyKind
	orDefault(&c.BindAddress, "0.0.0.0")
	all, loopback := "0.0.0.0", "127.0.0.1"
	if a, ok := parseAddr(c.BindAddress); ok && a.Is6() {
		all, loopback = "::", "::1"
	}
	orDefault(&c.HealthzBindAddress, all)
	orDefault(&c.MetricsBindAddress, loopback)
	c.HealthzBindAddress = withPort(c.HealthzBindAddress, healthzPort)
	c.MetricsBindAddress = withPort(c.MetricsBindAddress, metricsPort)
	orDefault(&c.DetectLocalMode, modeClusterCIDR)
	orPointer(&c.OOMScoreAdj, -999)
	orDefault(&c.ConfigSyncPeriod.Duration, 15*time.Minute)
	orDefault(&c.ClientConnection.ContentType, contentProtobuf)
	orDefault(&c.ClientConnection.QPS, 5)
	orDefault(&c.ClientConnection.Burst, 10)
	if c.FeatureGates == nil {
		c.FeatureGates = map[string]bool{}
	}
	logsapi.SetRecommendedLoggingConfiguration(&c.Logging)
	v := &d.Verdict
	v.APIVersion, v.Kind = verdictVersion, verdictKind
	orDefault(&v.Behavior, behaviorVerdict)
	d.setBehaviorDefaults(behavior)
	setSectionDefaults(c)
	orDefault(&v.Backend, string(Auto))
	orDefault(&v.IPTablesDispatch, "tree")
	orDefault(&v.Keeper, "auto")
	orPointer(&v.OwnTables, true)
	orDefault(&v.Takeover, "auto")
	if c.Mode == modeIPVS {
		orDefault(&v.IPVS, ipvsAlways)
	}
	orDefault(&v.IPVS, "auto")
	orPointer(&v.IPVSServices, 0)
	orDefault(&v.MetricsConnections, "service")
	orPointer(&v.MetricsMaxSeries, 5000)
	orPointer(&v.CounterMemoryMiB, DefaultCounterMemoryMiB)
	orDefault(&v.EverywhereToken, "/var/run/secrets/verdict-collector/token")
	orPointer(&v.LedgerMaxMiB, 64)
	orDefault(&v.Records, "off")
	orDefault(&v.LastResort, "off")
	orDefault(&v.ClientAddress, "off")
	orPointer(&v.RecordsMemoryMiB, 32)
}

// setBehaviorDefaults fills in the fields by which packets meet something else than with kube-proxy. Its modes nftables
// and ipvs leave 127.0.0.1 out.
func (d *Document) setBehaviorDefaults(behavior string) {
	c, v, helps, chance := &d.KubeProxy, &d.Verdict, true, Switch(DefaultSecondChance)
	if behavior == behaviorKubeProxy {
		helps, chance = false, "off"
		orPointer(&c.IPTables.LocalhostNodePorts, c.Mode != modeNFTables && c.Mode != modeIPVS)
	}
	orDefault(&v.SecondChance, chance)
	orPointer(&v.PingServices, helps)
	orPointer(&v.RejectUnusedPorts, helps)
}

func setSectionDefaults(c *v1alpha1.KubeProxyConfiguration) {
	for _, period := range []*metav1.Duration{&c.IPTables.SyncPeriod, &c.IPVS.SyncPeriod, &c.NFTables.SyncPeriod} {
		orDefault(&period.Duration, 30*time.Second)
	}
	orPointer(&c.IPTables.MasqueradeBit, defaultMasqueradeBit)
	orPointer(&c.NFTables.MasqueradeBit, defaultMasqueradeBit)
	orPointer(&c.IPTables.LocalhostNodePorts, true)
	orPointer(&c.Conntrack.MaxPerCore, 32*1024)
	orPointer(&c.Conntrack.Min, 128*1024)
	orPointer(&c.Conntrack.TCPEstablishedTimeout, metav1.Duration{Duration: 24 * time.Hour})
	orPointer(&c.Conntrack.TCPCloseWaitTimeout, metav1.Duration{Duration: time.Hour})
}

func orDefault[T comparable](v *T, otherwise T) {
	var zero T
	if *v == zero {
		*v = otherwise
	}
}

func orPointer[T any](v **T, otherwise T) {
	if *v == nil {
		*v = &otherwise
	}
}

// withPort adds a port to an address that has none. It leaves invalid addresses to the check.
func withPort(address string, port int) string {
	if address == off {
		return address
	}
	if _, ok := parseAddr(address); ok {
		return net.JoinHostPort(address, strconv.Itoa(port))
	}
	return address
}

// parseAddr reads an address.
func parseAddr(s string) (netip.Addr, bool) {
	a, _, ok := sloppy.ParseAddr(s)
	return a, ok && a.Zone() == ""
}

// parsePrefix reads a range of addresses.
func parsePrefix(s string) (netip.Prefix, bool) {
	p, _, ok := sloppy.ParsePrefix(strings.TrimSpace(s))
	return p, ok
}

// parseAddrPort reads an address with a port.
func parseAddrPort(s string) (netip.AddrPort, bool) {
	host, port, err := net.SplitHostPort(s)
	if err != nil {
		return netip.AddrPort{}, false
	}
	a, ok := parseAddr(host)
	n, err := strconv.ParseUint(port, 10, 16)
	return netip.AddrPortFrom(a, uint16(n)), ok && err == nil && n > 0
}
