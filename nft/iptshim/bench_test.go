package iptshim

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/verdict-proxy/verdict/internal/lab"
	"github.com/verdict-proxy/verdict/internal/lab/labtest"
	"github.com/verdict-proxy/verdict/internal/system/ipfamily"
	"github.com/verdict-proxy/verdict/internal/system/testkit"
	"github.com/verdict-proxy/verdict/sync/dataplane"
	"github.com/verdict-proxy/verdict/sync/snapshot"
)

// large gives a cluster of Services with cluster IPs and as many endpoints each.
func large(services, endpoints int) *snapshot.Snapshot {
	snap := snapshot.New()
	host, cidrs := []netip.Addr{addr("127.0.0.1"), addr("192.0.2.1")}, []netip.Prefix{prefix("10.96.0.0/12")}
	node := snapshot.Node{Name: "node-1", Addresses: host[1:]}
	snap.Apply(snapshot.Delta{HostAddrs: &host, ServiceCIDRs: &cidrs, Node: &node})
	for i := range services {
		snap.Apply(largeService(i, endpoints, 0))
	}
	return snap
}

// largeService gives one of them, whose endpoints are others in each round.
func largeService(i, endpoints, round int) snapshot.Delta {
	n := snapshot.Name{Namespace: "ns" + strconv.Itoa(i%50), Name: "svc" + strconv.Itoa(i)}
	s := &snapshot.Service{Name: n,
		ClusterIPs: []netip.Addr{netip.AddrFrom4([4]byte{10, 96 + byte(i*7919>>16&15), byte(i * 7919 >> 8), byte(i * 7919)})},
		Ports:      []snapshot.Port{{Name: "p80", Protocol: snapshot.TCP, Port: 80}}}
	slice := &snapshot.Slice{Name: n, Service: n.Name,
		Ports: []snapshot.SlicePort{{Name: "p80", Protocol: snapshot.TCP, Port: 8080}}}
	for e := range endpoints {
		k := i*endpoints + e
		if e == 0 {
			k += round % 200 * 1000
		}
		slice.Endpoints = append(slice.Endpoints, snapshot.Endpoint{Ready: true, Serving: true,
			Addr: netip.AddrFrom4([4]byte{10, 128 + byte(k>>16), byte(k >> 8), byte(k)})})
	}
	return snapshot.Delta{Services: map[snapshot.Name]*snapshot.Service{n: s},
		Slices: map[snapshot.Name]*snapshot.Slice{n: slice}}
}

// planned gives a model that has planned such a cluster, and what changes it.
func planned(b *testing.B, services, endpoints int, o Options) (model *Model, full *Txn, change func(round int) *Txn) {
	b.Helper()
	snap, planner := large(services, endpoints), dataplane.NewPlanner(configs[0])
	model = New(o)
	c, _ := planner.Apply(snap, snapshot.Change{Globals: true})
	full = model.Plan(planner.State(), c)
	return model, full, func(round int) *Txn {
		c, _ := planner.Apply(snap, snap.Apply(largeService(services-1, endpoints, round)))
		return model.Plan(planner.State(), c)
	}
}

// BenchmarkPlan plans all of a cluster, and a change of one endpoint.
func BenchmarkPlan(b *testing.B) {
	for _, n := range testkit.Size([]int{1000, 10000}, []int{1000}) {
		b.Run(fmt.Sprintf("full/%d", n), func(b *testing.B) {
			snap := large(n, 10)
			st, _ := dataplane.Compute(configs[0], snap)
			for b.Loop() {
				_ = New(Options{}).Plan(st, dataplane.Change{}).Text(ipfamily.IPv4)
			}
		})
		b.Run(fmt.Sprintf("one/%d", n), func(b *testing.B) {
			_, _, change := planned(b, n, 10, Options{})
			round := 0
			for b.Loop() {
				round++
				if text := change(round).Text(ipfamily.IPv4); len(text) == 0 {
					b.Fatal("nothing changes")
				}
			}
		})
	}
}

// steps is the Step for a variant.
func steps(variant string) int {
	if variant == "nft" {
		return StepNFT
	}
	return 0
}

// BenchmarkRestore writes clusters with ten endpoints a Service by real programs: all of it, then one endpoint after
// the other.
func BenchmarkRestore(b *testing.B) {
	for _, variant := range variants {
		for _, n := range testkit.Size([]int{1000, 5000, 10000}, []int{1000}) {
			b.Run(fmt.Sprintf("%s/%d", variant, n), func(b *testing.B) {
				h := labtest.NewHost(b, labtest.NewNet(b), "node")
				_, full, change := planned(b, n, 10, Options{Step: steps(variant)})
				start, cpu := time.Now(), childrenCPU()
				restore(b, h, ipfamily.IPv4, variant, full.Text(ipfamily.IPv4))
				cold, coldCPU := time.Since(start), childrenCPU()-cpu
				round := 0
				cpu = childrenCPU()
				for b.Loop() {
					round++
					restore(b, h, ipfamily.IPv4, variant, change(round).Text(ipfamily.IPv4))
				}
				b.ReportMetric(cold.Seconds(), "s-cold")
				b.ReportMetric(coldCPU.Seconds(), "cpu-s-cold")
				b.ReportMetric((childrenCPU()-cpu).Seconds()/float64(round), "cpu-s/op")
			})
		}
	}
}

// childrenCPU is the time that programs we ran have spent on the processors, which says more than the clock on a
// machine that has other work.
func childrenCPU() time.Duration {
	var u syscall.Rusage
	if err := syscall.Getrusage(syscall.RUSAGE_CHILDREN, &u); err != nil {
		panic(err)
	}
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}

// BenchmarkFirstPacket begins connections to the last of 10,000 Services.
func BenchmarkFirstPacket(b *testing.B) {
	for _, variant := range variants {
		for name, d := range map[string]Dispatch{"list": List, "tree": Tree} {
			b.Run(variant+"/"+name, func(b *testing.B) {
				h := labtest.NewHost(b, labtest.NewNet(b), "node")
				model, full, _ := planned(b, testkit.Size(10000, 1000), 1, Options{Dispatch: d, Step: steps(variant)})
				restore(b, h, ipfamily.IPv4, variant, full.Text(ipfamily.IPv4))
				for _, args := range []string{"addr add 192.0.2.1/32 dev lo", "route add local 10.128.0.0/9 dev lo",
					"route add default dev lo src 192.0.2.1"} {
					_, err := h.Run("ip", strings.Fields(args)...)
					labtest.Check(b, err)
				}
				rows := model.families[ipfamily.IPv4].lists[natServices].rows
				last := netip.AddrFrom4([4]byte([]byte(rows[len(rows)-1].key[:4])))
				for b.Loop() {
					begin(b, h, netip.AddrPortFrom(last, 80))
				}
			})
		}
	}
}

// begin opens a connection that nobody accepts. The rules have seen its first packet when it is refused.
func begin(b *testing.B, h *lab.Host, to netip.AddrPort) {
	ctx, cancel := context.WithTimeout(b.Context(), time.Second)
	defer cancel()
	if c, err := h.DialContext(ctx, "tcp", to.String()); err == nil {
		_ = c.Close()
		b.Fatal("somebody is there")
	} else if !errors.Is(err, syscall.ECONNREFUSED) {
		b.Fatal(err)
	}
}
