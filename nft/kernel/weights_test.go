package kernel

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/verdict-proxy/verdict/internal/lab"
	"github.com/verdict-proxy/verdict/internal/lab/labtest"
	"github.com/verdict-proxy/verdict/internal/system/ipfamily"
	"github.com/verdict-proxy/verdict/internal/system/testkit"
	"github.com/verdict-proxy/verdict/nft"
	"github.com/verdict-proxy/verdict/sync/dataplane"
	"github.com/verdict-proxy/verdict/sync/snapshot"
)

// weighedService gives a Service of the matrix whose endpoints, all on the other node, have weights.
func weighedService(c *lab.Cluster, number int, scheduling *snapshot.Scheduling, weights ...uint16) (
	flowService, *dataplane.State,
) {
	return startingService(c, number, nil, scheduling, weights...)
}

// startingService gives one of which some endpoints start slowly.
func startingService(c *lab.Cluster, number int, starting *snapshot.Starting, scheduling *snapshot.Scheduling,
	weights ...uint16,
) (flowService, *dataplane.State) {
	s := flowService{number: number, state: endpointState{"weighed", nil, slices.Repeat([]condition{ready}, len(weights))}}
	d := s.delta(c)
	d.Services[s.name()].Scheduling = scheduling
	for _, sl := range d.Slices {
		for i := range sl.Endpoints {
			sl.Endpoints[i].Weight = snapshot.Weight{Given: true, Parts: snapshot.PartsOf(weights[i])}
		}
	}
	snap := snapshot.New()
	snap.Apply(facts(c))
	snap.Apply(d)
	if starting != nil {
		snap.Apply(snapshot.Delta{Starting: map[snapshot.Name]*snapshot.Starting{s.name(): starting}})
	}
	st, _ := dataplane.Compute(dataplane.Config{NodeName: "node", DetectLocal: clusterCIDR}, snap)
	return s, st
}

// applyOnly has a backend hold a Service in the place of the one with the number before.
func applyOnly(t testing.TB, b *Backend, st *dataplane.State, s flowService) {
	t.Helper()
	before := flowService{number: s.number - 1}
	_, err := b.ApplyAll(st, dataplane.Change{Services: []snapshot.Name{s.name(), before.name()}, Globals: true})
	labtest.Check(t, err)
}

// spray sends datagrams from pods to an address, each from a port of its own, without waiting for answers.
func spray(t testing.TB, pods []*lab.Host, f ipfamily.Family, to netip.AddrPort, n int) {
	t.Helper()
	domain, at := unix.AF_INET, func(a netip.AddrPort) unix.Sockaddr {
		return &unix.SockaddrInet4{Port: int(a.Port()), Addr: a.Addr().As4()}
	}
	if f == ipfamily.IPv6 {
		domain, at = unix.AF_INET6, func(a netip.AddrPort) unix.Sockaddr {
			return &unix.SockaddrInet6{Port: int(a.Port()), Addr: a.Addr().As16()}
		}
	}
	const first, ports = 10000, 50000 // past those of the servers
	for done := 0; done < n; done += ports {
		pod := pods[done/ports]
		labtest.Check(t, pod.Do(func() error {
			for i := range min(ports, n-done) {
				fd, err := unix.Socket(domain, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
				if err != nil {
					return err
				}
				err = unix.Bind(fd, at(netip.AddrPortFrom(pod.IP(f), uint16(first+i))))
				if err == nil {
					err = unix.Sendto(fd, []byte("hello\n"), 0, at(to))
				}
				unix.Close(fd)
				if err != nil {
					return fmt.Errorf("from port %d: %w", first+i, err)
				}
			}
			return nil
		}))
	}
}

// forgetFlows empties a host's connection tracking: in a small guest it would become full of flows that are over.
func forgetFlows(t testing.TB, h *lab.Host) {
	t.Helper()
	labtest.Check(t, h.Do(func() error { return netlink.ConntrackTableFlush(netlink.ConntrackTable) }))
}

// countArrivals counts the datagrams that reach a host for an address from now on: in a slow guest the sender's own
// queues lose some of a flood.
func countArrivals(t testing.TB, h *lab.Host, at netip.AddrPort) func() int {
	t.Helper()
	family := ipfamily.Of(at.Addr()).NFT()
	labtest.Run(t, h, fmt.Sprintf(`table inet arrivals
		delete table inet arrivals
		table inet arrivals {
			chain c { type filter hook prerouting priority raw; %s daddr %s udp dport %d counter; }
		}`, family, at.Addr(), at.Port()), "nft", "-f", "-")
	return func() int {
		text := labtest.Run(t, h, "", "nft", "list", "table", "inet", "arrivals")
		_, text, _ = strings.Cut(text, "counter packets ")
		var n int
		_, err := fmt.Sscan(text, &n)
		labtest.Check(t, err)
		return n
	}
}

// counted gives how many connections each endpoint of a frontend has had, over all its slots.
func counted(t testing.TB, b *Backend, f ipfamily.Family, at dataplane.Key) map[netip.AddrPort]int {
	t.Helper()
	listed, err := b.List()
	labtest.Check(t, err)
	l, pool := listed[f], uint32(0)
	for _, e := range l.Elements[nft.Services] {
		if e.FrontendKey() == at {
			pool = e.PoolID()
		}
	}
	out := map[netip.AddrPort]int{}
	for _, e := range l.Elements[nft.Endpoints] {
		if e.ID() == pool {
			out[e.Target()] += int(e.Packets)
		}
	}
	return out
}

// checkWeights sends connections through several Services with weights, and gives the chi-square of each.
func checkWeights(t testing.TB, n int) map[string]float64 {
	t.Helper()
	c, b := proxied(t, lab.Config{LocalPods: 4, RemotePods: 3})
	chi := map[string]float64{}
	number := 0
	for _, weights := range [][]uint16{{1, 1, 1}, {3, 1}, {100, 1}, {2, 1, 0}} {
		for _, f := range ipfamily.All {
			number++
			s, st := weighedService(c, number, nil, weights...)
			applyOnly(t, b, st, s)
			at := s.frontendOf(c, dataplane.ClusterIP, f)
			forgetFlows(t, c.Node)
			// Not before: the rules load the module.
			labtest.Check(t, c.Node.Sysctl("net/netfilter/nf_conntrack_udp_timeout", "1"))
			arrived := countArrivals(t, c.Node, at)
			spray(t, c.Pods, f, at, n)
			arrivals := arrived()
			got := counted(t, b, f, dataplane.Key{Addr: at.Addr(), Protocol: snapshot.UDP, Port: at.Port()})
			sum, total, x := 0, 0, 0.0
			for _, w := range weights {
				sum += int(w)
			}
			for i, w := range weights {
				k := got[netip.AddrPortFrom(c.RemotePods[i].IP(f), targetPort)]
				total += k
				if w == 0 {
					if k != 0 {
						t.Errorf("%v %v: the endpoint that drains got %d connections", f, weights, k)
					}
					continue
				}
				expected := float64(arrivals) * float64(w) / float64(sum)
				x += (float64(k) - expected) * (float64(k) - expected) / expected
			}
			chi[fmt.Sprintf("%v %v", f, weights)] = x
			if total != arrivals || arrivals < n/2 || x > 20 { // by chance once in 20,000 times
				t.Errorf("%v %v: chi-square %.1f, %d of %d connections, %v", f, weights, x, total, arrivals, got)
			}
		}
	}
	return chi
}

// TestWeights: each endpoint gets the share of its weight, in both families, and with the weight 0 nothing.
func TestWeights(t *testing.T) { t.Log(checkWeights(t, 3000)) }

// BenchmarkWeights does the same with 100,000 connections each, and reports the chi-squares.
func BenchmarkWeights(b *testing.B) {
	for b.Loop() {
		for name, x := range checkWeights(b, testkit.Size(100_000, 3000)) {
			b.Logf("%s: chi-square %.2f", name, x)
		}
	}
}

// TestHash: a client's connections all go to the endpoint of the slot that ClientSlot gives, from other ports too
// unless they are hashed; with several endpoints and in both families.
func TestHash(t *testing.T) {
	c, b := proxied(t, lab.Config{LocalPods: 3, RemotePods: 3})
	for number, port := range []bool{false, true} {
		hash := dataplane.HashAddr
		if port {
			hash = dataplane.HashAddrPort
		}
		s, st := weighedService(c, number+1, &snapshot.Scheduling{Scheduler: snapshot.Hash, Port: port}, 1, 1, 2)
		applyOnly(t, b, st, s)
		listed, err := b.List()
		labtest.Check(t, err)
		seen := map[string]bool{}
		for _, f := range ipfamily.All {
			at := s.frontendOf(c, dataplane.ClusterIP, f)
			table := map[uint32]netip.AddrPort{}
			for _, e := range listed[f].Elements[nft.Endpoints] {
				if e.Key()[4] == byte(snapshot.TCP) { // behind the pool's id
					table[e.Slot()] = e.Target()
				}
			}
			for _, pod := range c.Pods {
				for source := range uint16(20) {
					from := netip.AddrPortFrom(pod.IP(f), 20000+1000*uint16(number)+source)
					r := pod.Dial(snapshot.TCP, at, lab.Options{From: from})
					want := table[nft.ClientSlot(hash, from, uint32(len(table)))]
					i := slices.IndexFunc(c.RemotePods, func(h *lab.Host) bool { return h.IP(f) == want.Addr() })
					if i < 0 || r.Endpoint != c.RemotePods[i].Name {
						t.Fatalf("%v, from %v of %d slots: %v, want %v", hash, from, len(table), r, want)
					}
					seen[r.Endpoint] = true
				}
			}
		}
		if len(seen) < 2 {
			t.Errorf("%v: all clients got %v", hash, seen)
		}
	}
}

// TestHashIsListed: every nft lists a chain that hashes as Verdict prints it, and loads what it listed. A new process
// writes nothing.
func TestHashIsListed(t *testing.T) {
	c, b := proxied(t, lab.Config{LocalPods: 1, RemotePods: 2})
	for number, port := range []bool{false, true} {
		s, st := weighedService(c, number+1, &snapshot.Scheduling{Scheduler: snapshot.Hash, Port: port}, 1, 1)
		applyOnly(t, b, st, s)
		id := nft.ChainID{Kind: nft.PickHash, N: 4093}
		if port {
			id.Kind = nft.PickHashPort
		}
		listed, err := b.List()
		labtest.Check(t, err)
		for _, n := range labtest.Nfts(t) {
			for _, f := range ipfamily.All {
				chain, ok := nft.ChainNamed(listed[f].Table, nft.Structure{}, id.Name())
				text := labtest.Run(t, c.Node, "", n.Path, "list", "chain", f.NFT(), nft.TableName, id.Name())
				if want := chain.Rules[0].Text(f); !ok || !strings.Contains(text, "\t\t"+want+"\n") {
					t.Errorf("%s, %v: %s\nwant %s", n.Path, f, text, want)
				}
				// Without elements, whose thousands take a guest many minutes.
				all := labtest.Run(t, c.Node, "", n.Path, "-t", "list", "table", f.NFT(), nft.TableName)
				labtest.Run(t, c.Outside, all, n.Path, "-c", "-f", "-")
			}
		}
		b = open(t, c.Node, Options{})
		if r, err := b.Apply(st, dataplane.Change{}); err != nil || r.Added+r.Removed+r.Replaced > 0 {
			t.Errorf("%v: a new process writes: %+v, %v", id.Name(), r, err)
		}
	}
}

// BenchmarkSlots changes one of ten endpoints of a Service in one family, and reports the elements written for it, the
// slots there are, and about what they take in the kernel.
func BenchmarkSlots(b *testing.B) {
	for _, c := range []struct {
		name       string
		scheduling *snapshot.Scheduling
		weights    []uint16
	}{
		{"equal", nil, []uint16{1}},
		{"weights", nil, []uint16{30, 17}},
		{"large weights", nil, []uint16{65535, 40001, 11, 7}},
		{"hash", &snapshot.Scheduling{Scheduler: snapshot.Hash}, []uint16{1}},
	} {
		b.Run(c.name, func(b *testing.B) {
			_, backend := host(b)
			memory, err := labtest.NewMemory(b)
			labtest.Check(b, err)
			memory.Enter(b)
			snap := snapshot.New()
			svc := &snapshot.Service{Name: snapshot.Name{Namespace: "default", Name: "web"}, Scheduling: c.scheduling,
				ClusterIPs: []netip.Addr{netip.MustParseAddr("10.96.0.1")},
				Ports:      []snapshot.Port{{Protocol: snapshot.TCP, Port: 80}}}
			state := func(last int) *dataplane.State {
				sl := &snapshot.Slice{Name: snapshot.Name{Namespace: "default", Name: "web-1"}, Service: "web",
					Ports: []snapshot.SlicePort{{Protocol: snapshot.TCP, Port: 8080}}}
				for i := range 10 {
					if i == 9 {
						i = last
					}
					sl.Endpoints = append(sl.Endpoints, snapshot.Endpoint{Addr: netip.AddrFrom4([4]byte{10, 244, 1, byte(i)}),
						Ready: true, Serving: true, Weight: snapshot.Weight{Given: true,
							Parts: snapshot.PartsOf(c.weights[i%len(c.weights)])}})
				}
				snap.Apply(snapshot.Delta{Services: map[snapshot.Name]*snapshot.Service{svc.Name: svc},
					Slices: map[snapshot.Name]*snapshot.Slice{sl.Name: sl}})
				st, _ := dataplane.Compute(dataplane.Config{NodeName: "node"}, snap)
				return st
			}
			apply(b, backend, &dataplane.State{})
			before := memory.Kernel(b)
			_, err = backend.ApplyAll(state(9), dataplane.Change{Services: []snapshot.Name{svc.Name}})
			labtest.Check(b, err)
			b.Logf("%d bytes of kernel memory", memory.Kernel(b)-before)
			states := [2]*dataplane.State{state(10), state(9)}
			written, n := 0, 0
			for b.Loop() {
				r, err := backend.ApplyAll(states[n%2], dataplane.Change{Services: []snapshot.Name{svc.Name}})
				labtest.Check(b, err)
				written += r.Added + r.Removed + r.Replaced
				n++
			}
			b.ReportMetric(float64(written)/float64(n), "elements/op")
			b.ReportMetric(float64(backend.model.Count(ipfamily.IPv4, nft.Endpoints)), "slots")
		})
	}
}
