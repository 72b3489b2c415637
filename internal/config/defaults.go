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

// setDefaults fills in unset fields with kube-proxy's defaults. There is one exception: minSyncPeriod stays 0, where
// kube-proxy uses 1s in modes iptables and nftables. Transactions are cheap here, so there is no reason to wait.
func (d *Document) setDefaults() {
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
	setSectionDefaults(c)

	v := &d.Verdict
	v.APIVersion, v.Kind = verdictVersion, verdictKind
	orDefault(&v.Backend, string(Auto))
	orDefault(&v.IPTablesDispatch, "tree")
	orDefault(&v.Keeper, "auto")
	orPointer(&v.OwnTables, true)
	orDefault(&v.Takeover, "auto")
	if c.Mode == modeIPVS {
		orDefault(&v.IPVS, "always")
	}
	orDefault(&v.IPVS, "auto")
	orPointer(&v.IPVSServices, 0)
	orDefault(&v.SecondChance, DefaultSecondChance)
	orPointer(&v.PingServices, true)
	orPointer(&v.RejectUnusedPorts, true)
	orDefault(&v.MetricsConnections, "service")
	orPointer(&v.MetricsMaxSeries, 5000)
	orPointer(&v.CounterMemoryMiB, DefaultCounterMemoryMiB)
	orDefault(&v.EverywhereToken, "/var/run/secrets/verdict-collector/token")
	orPointer(&v.LedgerMaxMiB, 64)
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

// parseAddr reads an address as Kubernetes does: 010.0.0.1 is 10.0.0.1.
func parseAddr(s string) (netip.Addr, bool) {
	if a, err := netip.ParseAddr(s); err == nil {
		return a.Unmap(), a.Zone() == ""
	}
	octets := strings.Split(s, ".")
	for i, o := range octets {
		if o != "" {
			octets[i] = strings.TrimLeft(o[:len(o)-1], "0") + o[len(o)-1:]
		}
	}
	a, err := netip.ParseAddr(strings.Join(octets, "."))
	return a, err == nil && a.Is4()
}

// parsePrefix reads a range of addresses. It clears host bits, as Kubernetes does.
func parsePrefix(s string) (netip.Prefix, bool) {
	address, bits, ok := strings.Cut(strings.TrimSpace(s), "/")
	a, valid := parseAddr(address)
	n, err := strconv.ParseUint(bits, 10, 8)
	if !ok || !valid || err != nil || strings.Contains(address, "::ffff:") {
		return netip.Prefix{}, false
	}
	p, err := a.Prefix(int(n))
	return p, err == nil
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
