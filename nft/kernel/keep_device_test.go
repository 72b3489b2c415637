package kernel

import (
	"net/netip"
	"strings"
	"testing"

	"github.com/verdict-proxy/verdict/internal/lab/labtest"
	"github.com/verdict-proxy/verdict/internal/system/ipfamily"
	"github.com/verdict-proxy/verdict/sync/dataplane"
	"github.com/verdict-proxy/verdict/sync/snapshot"
)

// TestKeptDeviceReplaced: the chain at the ingress is there again after its device was replaced by another one of the
// same name. Kernels before Linux 6.16 have deleted the chain by then.
func TestKeptDeviceReplaced(t *testing.T) {
	h := labtest.NewHost(t, labtest.NewNet(t), "node-a")
	labtest.Run(t, h, "", "ip", "link", "add", "eth0", "type", "veth")
	b := open(t, h, Options{})
	s := snapshot.New()
	svc := &snapshot.Service{Name: snapshot.Name{Namespace: "shop", Name: "web"},
		ClientAddress:   snapshot.ClientAddressKeep,
		ClusterIPs:      []netip.Addr{netip.MustParseAddr("10.96.0.80")},
		LoadBalancerIPs: []netip.Addr{netip.MustParseAddr("203.0.113.10")},
		Ports:           []snapshot.Port{{Protocol: snapshot.TCP, Port: 80}}}
	slice := &snapshot.Slice{Name: svc.Name, Service: "web", Ports: []snapshot.SlicePort{{Protocol: snapshot.TCP,
		Port: 8080}}, Endpoints: []snapshot.Endpoint{{Addr: netip.MustParseAddr("10.244.1.5"), Node: "node-b", Ready: true,
		Serving: true}}}
	link := snapshot.Link{Device: "eth0", Index: 7, Nodes: map[string]snapshot.Neighbour{
		"node-b": {Addrs: ipfamily.Per[netip.Addr]{netip.MustParseAddr("192.0.2.3")}, MACs: []snapshot.MAC{{2}}}}}
	planner := dataplane.NewPlanner(dataplane.Config{NodeName: "node-a"})
	apply := func(d snapshot.Delta) {
		c, _ := planner.Apply(s, s.Apply(d))
		_, err := b.ApplyAll(planner.State(), c)
		labtest.Check(t, err)
	}
	apply(snapshot.Delta{Services: map[snapshot.Name]*snapshot.Service{svc.Name: svc}, Link: &link,
		Slices: map[snapshot.Name]*snapshot.Slice{slice.Name: slice}})
	hooked := func() bool {
		return strings.Contains(labtest.Run(t, h, "", "nft", "list", "table", "netdev", "verdict"), "hook ingress")
	}
	if !hooked() {
		t.Fatal("nothing is at the ingress")
	}
	labtest.Run(t, h, "", "ip", "link", "delete", "eth0")
	if hooked() {
		labtest.Run(t, h, "", "nft", "delete", "chain", "netdev", "verdict", "keep-ingress")
	}
	labtest.Run(t, h, "", "ip", "link", "add", "eth0", "type", "veth")
	link.Index++
	apply(snapshot.Delta{Link: &link})
	if !hooked() {
		t.Error("nothing is at the ingress of the new device")
	}
	quiet(t, b)
}
