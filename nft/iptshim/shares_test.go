package iptshim

import (
	"fmt"
	"net/netip"
	"testing"
	"time"

	"github.com/verdict-proxy/verdict/internal/lab"
	"github.com/verdict-proxy/verdict/internal/lab/labtest"
	"github.com/verdict-proxy/verdict/internal/system/ipfamily"
	"github.com/verdict-proxy/verdict/sync/dataplane"
	"github.com/verdict-proxy/verdict/sync/snapshot"
)

// refuse has the pools of some ports that have endpoints refuse a share.
func refuse(share func(*dataplane.ServicePort) uint16, ports ...*dataplane.ServicePort) {
	for _, sp := range ports {
		for _, p := range [...]*dataplane.Pool{sp.Cluster, sp.Local} {
			if len(p.Endpoints) > 0 {
				p.Refused = share(sp)
			}
		}
	}
}

// refuseSome does so with the Services that a change names; all of them, if it names none.
func (w world) refuseSome(s *dataplane.State, change dataplane.Change) {
	for _, name := range change.Services {
		if svc := s.Services[name]; svc != nil {
			refuse(func(*dataplane.ServicePort) uint16 { return uint16(w.IntN(3) * w.IntN(5000)) }, svc.Ports...)
		}
	}
}

const sharePort = 8080

// sharedService is a Service with an endpoint on either node, of which half of the connections are refused.
func sharedService(c *lab.Cluster, change func(*snapshot.Service)) *dataplane.State {
	name := snapshot.Name{Namespace: "shares", Name: "web"}
	svc := &snapshot.Service{Name: name, Ports: []snapshot.Port{{Protocol: snapshot.TCP, Port: 80, NodePort: 30080}}}
	slices := map[snapshot.Name]*snapshot.Slice{}
	for i, f := range ipfamily.All {
		svc.ClusterIPs = append(svc.ClusterIPs, lab.Nth(lab.ServiceRange[i], 1))
		svc.LoadBalancerIPs = append(svc.LoadBalancerIPs, lab.Nth(lab.ExternalRange[i], 1))
		svc.ExternalIPs = append(svc.ExternalIPs, lab.Nth(lab.ExternalRange[i], 2))
		sl := &snapshot.Slice{Name: snapshot.Name{Namespace: name.Namespace, Name: fmt.Sprint("web-", i)},
			Service: name.Name, Ports: []snapshot.SlicePort{{Protocol: snapshot.TCP, Port: sharePort}}}
		for pod, node := range map[*lab.Host]string{c.Pods[0]: "node", c.RemotePods[0]: "other"} {
			sl.Endpoints = append(sl.Endpoints, snapshot.Endpoint{Addr: pod.IP(f), Node: node, Ready: true, Serving: true})
		}
		slices[sl.Name] = sl
	}
	change(svc)
	addrs := []netip.Addr{netip.AddrFrom4([4]byte{127, 0, 0, 1}), c.Node.IP(ipfamily.IPv4), c.Node.IP(ipfamily.IPv6)}
	snap, cidrs := snapshot.New(), append([]netip.Prefix{}, lab.ServiceRange...)
	snap.Apply(snapshot.Delta{HostAddrs: &addrs, ServiceCIDRs: &cidrs, Slices: slices,
		Services: map[snapshot.Name]*snapshot.Service{name: svc},
		Node:     &snapshot.Node{Name: "node", Addresses: addrs[1:], PodCIDRs: lab.NodePodRange}})
	st, _ := dataplane.Compute(dataplane.Config{NodeName: "node", DetectLocal: dataplane.DetectLocal{
		ClusterCIDRs: lab.PodRange}}, snap)
	for _, svc := range st.Services {
		refuse(func(*dataplane.ServicePort) uint16 { return 5000 }, svc.Ports...)
	}
	return st
}

// TestRefusedShare: half of the connections to each kind of frontend are reset, by whomever and under every policy; the
// others are answered, and none hangs. Both variants, both families.
func TestRefusedShare(t *testing.T) {
	const dials = 120
	for _, variant := range variants {
		for name, change := range map[string]func(*snapshot.Service){
			"as is":        func(*snapshot.Service) {},
			"affinity":     func(s *snapshot.Service) { s.Affinity = time.Hour },
			"policy Local": func(s *snapshot.Service) { s.ExternalLocal, s.InternalLocal = true, true },
			"source ranges": func(s *snapshot.Service) {
				s.SourceRanges = []netip.Prefix{prefix("0.0.0.0/1"), prefix("128.0.0.0/1"), prefix("::/0")}
			},
		} {
			t.Run(variant+" "+name, func(t *testing.T) {
				c := labtest.NewCluster(t, lab.Config{LocalPods: 2, RemotePods: 1})
				for _, pod := range []*lab.Host{c.Pods[0], c.RemotePods[0]} {
					_, err := pod.Serve(snapshot.TCP, sharePort)
					labtest.Check(t, err)
				}
				model := New(Options{})
				txn := model.Plan(sharedService(c, change), dataplane.Change{})
				for i, f := range ipfamily.All {
					restore(t, c.Node, f, variant, txn.Text(f))
					for _, to := range []netip.Addr{lab.Nth(lab.ServiceRange[i], 1), lab.Nth(lab.ExternalRange[i], 1),
						lab.Nth(lab.ExternalRange[i], 2), c.Node.IP(f)} {
						port := uint16(80)
						if to == c.Node.IP(f) {
							port = 30080
						}
						for _, from := range []*lab.Host{c.Pods[1], c.Node, c.Outside} {
							if from == c.Outside && lab.ServiceRange[i].Contains(to) {
								continue
							}
							refused := 0
							for range dials {
								switch r := from.Dial(snapshot.TCP, netip.AddrPortFrom(to, port), lab.Options{}); r.Outcome {
								case lab.Refused:
									refused++
								case lab.Answered:
								default:
									t.Fatalf("%s -> %s: %v", from.Name, to, r)
								}
							}
							if !labtest.Plausible(refused, dials, 0.5) {
								t.Errorf("%s -> %s: %d of %d are refused", from.Name, to, refused, dials)
							}
						}
					}
				}
			})
		}
	}
}
