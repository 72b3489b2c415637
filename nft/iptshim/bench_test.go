package iptshim

import (
	"fmt"
	"net/netip"
	"os"
	"strconv"
	"testing"
	"time"

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
	s := &snapshot.Service{Name: n, ClusterIPs: []netip.Addr{netip.AddrFrom4([4]byte{10, 96 + byte(i*7919>>16&15), byte(i * 7919 >> 8), byte(i * 7919)})},
		Ports: []snapshot.Port{{Name: "p80", Protocol: snapshot.TCP, Port: 80}}}
	slice := &snapshot.Slice{Name: n, Service: n.Name, Ports: []snapshot.SlicePort{{Name: "p80", Protocol: snapshot.TCP, Port: 8080}}}
	for e := range endpoints {
		k := i*endpoints + e
		if e == 0 {
			k += round * 1 << 20
		}
		slice.Endpoints = append(slice.Endpoints, snapshot.Endpoint{Ready: true, Serving: true,
			Addr: netip.AddrFrom4([4]byte{10, 128 + byte(k>>16), byte(k >> 8), byte(k)})})
	}
	return snapshot.Delta{Services: map[snapshot.Name]*snapshot.Service{n: s}, Slices: map[snapshot.Name]*snapshot.Slice{n: slice}}
}

// TestDump writes the texts of a large cluster to files.
func TestDump(t *testing.T) {
	dir := os.Getenv("DUMP")
	if dir == "" {
		t.Skip()
	}
	n, _ := strconv.Atoi(os.Getenv("N"))
	d, _ := strconv.Atoi(os.Getenv("D"))
	step, _ := strconv.Atoi(os.Getenv("STEP"))
	snap, planner, model := large(n, 10), dataplane.NewPlanner(configs[0]), New(Options{Dispatch: Dispatch(d), Step: step})
	change, _ := planner.Apply(snap, snapshot.Change{All: true})
	start := time.Now()
	text := model.Plan(planner.State(), change).Text(IPv4)
	fmt.Println("full", time.Since(start), len(text))
	os.WriteFile(fmt.Sprintf("%s/full-%d-%d", dir, n, d), text, 0o644)
	start = time.Now()
	change, _ = planner.Apply(snap, snap.Apply(largeService(n-1, 10, 1)))
	text = model.Plan(planner.State(), change).Text(IPv4)
	fmt.Println("one", time.Since(start), len(text))
	os.WriteFile(fmt.Sprintf("%s/one-%d-%d", dir, n, d), text, 0o644)
}
