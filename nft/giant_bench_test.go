package nft

import (
	"fmt"
	"net/netip"
	"testing"

	"github.com/verdict-proxy/verdict/sync/dataplane"
	"github.com/verdict-proxy/verdict/sync/snapshot"
)

// BenchmarkGiant replaces one endpoint of a Service with 300 external IPs and 50 ports, in turns. What its 15,000
// frontends need of their addresses does not change.
func BenchmarkGiant(b *testing.B) {
	giant := webService()
	for i := range 300 {
		giant.ExternalIPs = append(giant.ExternalIPs, netip.AddrFrom4([4]byte{198, 51, byte(i >> 8), byte(i)}))
	}
	for p := range 49 {
		giant.Ports = append(giant.Ports, snapshot.Port{Name: fmt.Sprint("p", p), Protocol: snapshot.UDP,
			Port: uint16(1000 + p)})
	}
	var m Model
	states := [2]*dataplane.State{stateOf(giant, 1, 2, 3), stateOf(giant, 1, 2, 4)}
	m.Plan(states[0], dataplane.Change{}, 0)
	change := dataplane.Change{Services: []snapshot.Name{giant.Name}}
	b.ReportAllocs()
	for i := 1; b.Loop(); i++ {
		m.Plan(states[i%2], change, 0)
	}
}
