package clustertest

import (
	"encoding/json"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"time"

	"github.com/verdict-proxy/verdict/internal/answers/servicemap"
	"github.com/verdict-proxy/verdict/internal/proxy/flows"
)

// Recorded is what the nodes of a Fake recorded: sums and failures are dealt to nodes in turn.
type Recorded struct {
	Nodes    []string
	Sums     []flows.Sum
	Failures []flows.Record
	Losses   flows.Losses
}

// Print is a Fake's Flows.
func (r *Recorded) Print(node string, argv []string) string {
	head := flows.Answer{Node: node, Started: time.Now().Add(-2 * time.Hour), Losses: r.Losses}
	if slices.Contains(argv, "--map") {
		m := servicemap.New(servicemap.Most)
		for i := slices.Index(r.Nodes, node); i >= 0 && i < len(r.Sums); i += len(r.Nodes) {
			m.AddSum(&r.Sums[i])
		}
		return lines(servicemap.Answer{Answer: head, Arrows: m.Arrows()})
	}
	text := lines(head)
	for i := slices.Index(r.Nodes, node); i >= 0 && i < len(r.Failures); i += len(r.Nodes) {
		if f := &r.Failures[i]; slices.Contains(argv, f.Service) {
			text += lines(f)
		}
	}
	return text
}

func lines(v any) string {
	text, err := json.Marshal(v)
	if err != nil {
		panic(err)
	}
	return string(text) + "\n"
}

// Fail adds a connection that failed some time ago, from a client to an endpoint.
func (r *Recorded) Fail(ago time.Duration, client, service string, end flows.End, reason string) {
	f := flows.Record{Time: time.Now().Add(-ago), Service: service, Port: "http", Protocol: "TCP", End: end,
		Reason: reason, Weight: 1, Frontend: netip.MustParseAddrPort("10.96.20.3:80"),
		Client: flows.Peer{Addr: netip.MustParseAddrPort("10.244.1.7:40113"), Pod: client + "-0", Workload: client}}
	if end != flows.Rejected {
		f.Endpoint = flows.Peer{Addr: netip.MustParseAddrPort("10.244.2.10:8080"), Pod: service + "-1"}
	}
	r.Failures = append(r.Failures, f)
}

// BusyClients is how many workloads Busy has.
const BusyClients = 1000

// Busy returns what BusyClients workloads of 40 namespaces did with 60 Services: the first ones the most, some clients
// outside the cluster, and the connections of one of the smallest workloads failed.
func Busy(nodes ...string) *Recorded {
	r := &Recorded{Nodes: nodes, Losses: flows.Losses{Events: 120, Refusals: 3, Sampled: 4000}}
	for i := range BusyClients {
		for k := range 1 + i%4 {
			bytes := uint64(4e9) / uint64((i+1)*(i+1)*(k+1))
			r.Sums = append(r.Sums, flows.Sum{Client: BusyClient(i), ClientZone: string(rune('a' + i%3)),
				Service: fmt.Sprintf("shop-%d/service-with-a-longer-name-%02d", (i+k)%10, (i*7+k*13)%60), Connections: 200,
				Sent: flows.Traffic{Bytes: bytes}, Received: flows.Traffic{Bytes: 3 * bytes}})
		}
	}
	for i := range 30 {
		r.Sums = append(r.Sums, flows.Sum{Client: fmt.Sprintf("198.51.%d.0/24", i), Service: "shop-0/ingress",
			Connections: 10, Sent: flows.Traffic{Bytes: 1e6}, Received: flows.Traffic{Bytes: 2e6}})
	}
	service := "shop-1/payments"
	r.Sums = append(r.Sums, flows.Sum{Client: BusyClient(990), ClientZone: "a", Service: service, Connections: 50,
		Failures: 6})
	for i := range 4 {
		r.Fail(time.Duration(i)*20*time.Second, BusyClient(990), service, flows.Refused, "")
	}
	r.Fail(10*time.Second, "team-03/another", service, flows.Rejected, "no-endpoints")
	return r
}

// BusyClient names a workload of Busy.
func BusyClient(i int) string {
	return fmt.Sprintf("team-%02d/%sworker-%03d", i%40, strings.Repeat("very-", i%5), i)
}
