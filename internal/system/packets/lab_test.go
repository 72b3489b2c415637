package packets_test

import (
	"fmt"
	"net/netip"
	"slices"
	"testing"
	"time"

	"github.com/verdict-proxy/verdict/internal/lab"
	"github.com/verdict-proxy/verdict/internal/lab/labtest"
	"github.com/verdict-proxy/verdict/internal/system/ipfamily"
	"github.com/verdict-proxy/verdict/internal/system/packets"
	"github.com/verdict-proxy/verdict/nft/kernel"
	"github.com/verdict-proxy/verdict/sync/dataplane"
	"github.com/verdict-proxy/verdict/sync/snapshot"
)

func addr(s string) netip.Addr { return netip.MustParseAddr(s) }

// labServices are Services of every kind for a lab of two pods here and one on the other node.
func labServices(c *lab.Cluster) (snapshot.Delta, []netip.Addr) {
	host := []netip.Addr{addr("127.0.0.1"), addr("10.244.1.1"), c.Node.IP(ipfamily.IPv4)}
	cidrs := []netip.Prefix{prefix("10.96.0.0/16")}
	d := snapshot.Delta{HostAddrs: &host, ServiceCIDRs: &cidrs, Node: &snapshot.Node{Name: "node-1",
		Addresses: host[2:]}, Services: map[snapshot.Name]*snapshot.Service{},
		Slices: map[snapshot.Name]*snapshot.Slice{}}
	here := snapshot.Endpoint{Addr: c.Pods[0].IP(ipfamily.IPv4), Node: "node-1", Ready: true, Serving: true}
	also := snapshot.Endpoint{Addr: c.Pods[1].IP(ipfamily.IPv4), Node: "node-1", Ready: true, Serving: true}
	there := snapshot.Endpoint{Addr: c.RemotePods[0].IP(ipfamily.IPv4), Node: "node-2", Ready: true, Serving: true}
	add := func(n int, change func(*snapshot.Service), endpoints ...snapshot.Endpoint) {
		name := snapshot.Name{Namespace: "lab", Name: fmt.Sprint("s", n)}
		ip := func(format string) []netip.Addr { return []netip.Addr{addr(fmt.Sprintf(format, n))} }
		svc := &snapshot.Service{Name: name, ClusterIPs: ip("10.96.1.%d"), LoadBalancerIPs: ip("203.0.113.%d"),
			ExternalIPs: ip("198.18.1.%d")}
		slice := &snapshot.Slice{Name: name, Service: name.Name, Endpoints: endpoints}
		for i, p := range []snapshot.Protocol{snapshot.TCP, snapshot.UDP} {
			svc.Ports = append(svc.Ports, snapshot.Port{Name: p.String(), Protocol: p, Port: 80,
				NodePort: uint16(30000 + 10*n + i)})
			slice.Ports = append(slice.Ports, snapshot.SlicePort{Name: p.String(), Protocol: p, Port: 8080})
		}
		if change != nil {
			change(svc)
		}
		d.Services[name], d.Slices[name] = svc, slice
	}
	add(1, nil, here, also, there)
	add(2, func(s *snapshot.Service) { s.ExternalLocal = true }, here, there)
	add(3, func(s *snapshot.Service) { s.ExternalLocal, s.InternalLocal = true, true }, there)
	add(4, nil)
	add(5, func(s *snapshot.Service) { s.SourceRanges = []netip.Prefix{prefix("10.244.0.0/16")} }, here)
	add(6, func(s *snapshot.Service) { s.Affinity = time.Hour }, here, also)
	return d, host
}

// TestAgreesWithPackets sends real packets of many classes, and holds what happens to each against what the walk
// through the kernel's list says.
func TestAgreesWithPackets(t *testing.T) {
	c := labtest.NewCluster(t, lab.Config{LocalPods: 2, RemotePods: 1})
	for _, h := range []*lab.Host{c.Pods[0], c.Pods[1], c.RemotePods[0]} {
		for _, p := range []snapshot.Protocol{snapshot.TCP, snapshot.UDP} {
			_, err := h.Serve(p, 8080)
			labtest.Check(t, err)
		}
	}
	delta, host := labServices(c)
	snap := snapshot.New()
	snap.Apply(delta)
	state, _ := dataplane.Compute(dataplane.Config{NodeName: "node-1", Records: true,
		DetectLocal: dataplane.DetectLocal{ClusterCIDRs: []netip.Prefix{prefix("10.244.0.0/16")}}}, snap)
	var rules *packets.Rules
	labtest.Check(t, c.Node.Do(func() error {
		b, err := kernel.Open(kernel.Options{})
		if err != nil {
			return err
		}
		t.Cleanup(func() { b.Close() })
		if _, err = b.Apply(state, dataplane.Change{}); err != nil {
			return err
		}
		rules, err = packets.ReadNFTables("verdict", &packets.Host{Addrs: host})
		return err
	}))
	sent, seen := 0, map[packets.Verdict]int{}
	for n := 1; n <= 6; n++ {
		for i, to := range []string{"10.96.1.%d:80", "203.0.113.%d:80", "198.18.1.%d:80", "10.96.1.%d:81", "203.0.113.%d:81",
			"192.0.2.10:300%d0"} {
			for k, protocol := range []packets.Protocol{packets.TCP, packets.UDP} {
				destination := netip.MustParseAddrPort(fmt.Sprintf(to, n))
				if i == 5 {
					destination = netip.AddrPortFrom(destination.Addr(), destination.Port()+uint16(k))
				}
				for _, from := range []struct {
					*lab.Host
					iface string
				}{{c.Outside, "eth0"}, {c.Pods[0], "veth1"}, {c.Node, ""}, {c.RemotePods[0], "eth0"}} {
					sent++
					client := netip.AddrPortFrom(from.IP(ipfamily.IPv4), uint16(20000+sent))
					p := packets.Packet{Source: client, Destination: destination, Protocol: protocol, Interface: from.iface}
					outcomes, err := rules.Walk(p, nil, nil)
					labtest.Check(t, err)
					seen[outcomes[0].Verdict]++
					result := dial(from.Host, p, outcomes)
					if !holds(p, outcomes, result, host) {
						t.Errorf("%s to %s by %s: the walk says %v, and seen is %s", client, destination, protocol, outcomes, result)
					}
				}
			}
		}
	}
	t.Logf("%d connections: %v", sent, seen)
	if len(seen) != 4 {
		t.Errorf("not all verdicts were seen: %v", seen)
	}
}

// dial sends a packet, and waits longer for an answer that has to come.
func dial(from *lab.Host, p packets.Packet, outcomes []packets.Outcome) lab.Result {
	o := lab.Options{From: p.Source, Timeout: 8 * time.Second}
	own := func(o packets.Outcome) bool { return toItself(p, o) }
	if v := outcomes[0].Verdict; v == packets.Dropped || v == packets.Untouched || slices.ContainsFunc(outcomes, own) {
		o.Timeout = 200 * time.Millisecond
	}
	protocol := snapshot.TCP
	if p.Protocol == packets.UDP {
		protocol = snapshot.UDP
	}
	return from.Dial(protocol, p.Destination, o)
}

// toItself reports whether a packet comes back to its sender as if from itself, which takes no such packet.
func toItself(p packets.Packet, o packets.Outcome) bool {
	return o.Verdict == packets.Sent && o.To.Addr() == p.Source.Addr() && !o.Masqueraded
}

// holds reports whether what was seen is one of the outcomes.
func holds(p packets.Packet, outcomes []packets.Outcome, got lab.Result, host []netip.Addr) bool {
	return slices.ContainsFunc(outcomes, func(o packets.Outcome) bool {
		switch o.Verdict {
		case packets.Dropped:
			return got.Outcome == lab.TimedOut || got.Outcome == lab.Failed
		case packets.Untouched: // nobody has the address, or the host has and nobody listens
			return got.Outcome != lab.Answered
		case packets.Rejected:
			return got.Outcome == lab.Refused
		}
		if toItself(p, o) && got.Outcome == lab.TimedOut {
			return true
		}
		masqueraded := slices.Contains(host, got.Source.Addr())
		return got.Outcome == lab.Answered && got.Destination == o.To &&
			(masqueraded == o.Masqueraded || p.Interface == "") && (o.Masqueraded || got.Source.Addr() == p.Source.Addr())
	})
}
