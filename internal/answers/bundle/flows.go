package bundle

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"net/netip"
	"slices"

	"github.com/verdict-proxy/verdict/internal/proxy/conntrack"
	"github.com/verdict-proxy/verdict/internal/proxy/status"
	"github.com/verdict-proxy/verdict/sync/snapshot"
)

var tcpStates = []string{"NONE", "SYN_SENT", "SYN_RECV", "ESTABLISHED", "FIN_WAIT", "CLOSE_WAIT", "LAST_ACK",
	"TIME_WAIT", "CLOSE", "SYN_SENT2"}

// flowKind is what flows are counted by. Its Service is "-" for those to no Service.
type flowKind struct{ service, protocol, state string }

// maxKinds bounds how many lines a count has.
const maxKinds = 2000

// frontend is where a Service answers; a node port has no address.
type frontend struct {
	addr     netip.Addr
	protocol string
	port     uint16
}

// CountFlows writes how many flows of TCP, UDP and SCTP the kernel tracks in this network namespace, by Service,
// protocol and state, those with most first. It lists no flow.
func CountFlows(ctx context.Context, w io.Writer, services []status.Service) error {
	at := map[frontend]string{}
	for i := range services {
		s := &services[i]
		for _, p := range s.Ports {
			for _, a := range slices.Concat(s.ClusterIPs, s.ExternalIPs, s.LoadBalancerIPs) {
				at[frontend{a, p.Protocol, p.Port}] = s.Service
			}
			if p.NodePort != 0 {
				at[frontend{netip.Addr{}, p.Protocol, p.NodePort}] = s.Service
			}
		}
	}
	counts, err := countFlows(ctx, at)
	if err != nil {
		return err
	}
	kinds := slices.SortedFunc(maps.Keys(counts), func(a, b flowKind) int {
		return cmp.Or(counts[b]-counts[a], cmp.Compare(a.service, b.service), cmp.Compare(a.protocol, b.protocol),
			cmp.Compare(a.state, b.state))
	})
	for i, k := range kinds {
		if i == maxKinds {
			_, err = fmt.Fprintf(w, "and %d more lines\n", len(kinds)-i)
			break
		}
		if _, err = fmt.Fprintf(w, "%8d  %-5s %-12s %s\n", counts[k], k.protocol, k.state, k.service); err != nil {
			break
		}
	}
	return err
}

// countFlows counts the flows of both families.
func countFlows(ctx context.Context, at map[frontend]string) (counts map[flowKind]int, err error) {
	conn, err := conntrack.Dial(0)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, conn.Close()) }()
	counts = map[flowKind]int{}
	return counts, conn.Each(ctx, func() { clear(counts) }, func(f *conntrack.Flow) { counts[kindOf(f, at)]++ })
}

func kindOf(f *conntrack.Flow, at map[frontend]string) flowKind {
	protocol, state := f.Frontend.Protocol.String(), "unanswered"
	switch {
	case f.Frontend.Protocol == snapshot.TCP && int(f.State) < len(tcpStates):
		state = tcpStates[f.State]
	case f.Answered:
		state = "answered"
	}
	service := cmp.Or(at[frontend{f.Frontend.Addr, protocol, f.Frontend.Port}],
		at[frontend{netip.Addr{}, protocol, f.Frontend.Port}], "-")
	return flowKind{service, protocol, state}
}
