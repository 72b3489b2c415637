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

	"golang.org/x/sys/unix"

	"github.com/verdict-proxy/verdict/internal/proxy/status"
	"github.com/verdict-proxy/verdict/internal/system/ipfamily"
	"github.com/verdict-proxy/verdict/internal/system/netlink"
	"github.com/verdict-proxy/verdict/sync/snapshot"
)

// Numbers of linux/netfilter/nfnetlink_conntrack.h.
const (
	messageGet = unix.NFNL_SUBSYS_CTNETLINK<<8 | 1

	ctaTupleOrig, ctaStatus, ctaProtoInfo            = 1, 3, 4
	ctaTupleIP, ctaTupleProto                        = 1, 2
	ctaIPv4Dst, ctaIPv6Dst                           = 2, 4
	ctaProtoNum, ctaProtoDstPort                     = 1, 3
	ctaProtoInfoTCP, ctaProtoInfoTCPState, seenReply = 1, 1, 1 << 1
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

// CountFlows writes how many flows the kernel tracks in this network namespace, by Service, protocol and state, those
// with most first. It lists no flow.
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

// countFlows reads the flows of both families.
func countFlows(ctx context.Context, at map[frontend]string) (counts map[flowKind]int, err error) {
	conn, err := netlink.Dial(unix.NETLINK_NETFILTER, 0)
	if err != nil {
		return nil, fmt.Errorf("conntrack: %w", err)
	}
	defer func() { err = errors.Join(err, conn.Close()) }()
	all := map[flowKind]int{}
	for _, f := range ipfamily.All {
		var out netlink.Buffer
		out.End(out.Netfilter(messageGet, unix.NLM_F_DUMP, f.NFProto()))
		counts := map[flowKind]int{}
		err := conn.Dump(out.Bytes(), func() { clear(counts) }, func(body []byte) {
			if len(body) > netlink.NetfilterLen {
				counts[kindOf(body[netlink.NetfilterLen:], at)]++
			}
		})
		if err = errors.Join(err, ctx.Err()); err != nil {
			return nil, fmt.Errorf("conntrack: %w", err)
		}
		for k, n := range counts {
			all[k] += n
		}
	}
	return all, nil
}

// kindOf reads a flow.
func kindOf(attrs []byte, at map[frontend]string) (k flowKind) {
	original := netlink.Find(attrs, ctaTupleOrig)
	ip, proto := netlink.Find(original, ctaTupleIP), netlink.Find(original, ctaTupleProto)
	var to frontend
	for typ, v := range netlink.Each(ip) {
		if typ == ctaIPv4Dst || typ == ctaIPv6Dst {
			to.addr, _ = netip.AddrFromSlice(v)
		}
	}
	if port := netlink.Find(proto, ctaProtoDstPort); len(port) == 2 {
		to.port = port.Big16()
	}
	if num := netlink.Find(proto, ctaProtoNum); len(num) == 1 {
		to.protocol = snapshot.Protocol(num.Uint8()).String()
	}
	k.protocol, k.state = to.protocol, "unanswered"
	if s := netlink.Find(attrs, ctaStatus); len(s) == 4 && s.Big32()&seenReply != 0 {
		k.state = "answered"
	}
	tcp := netlink.Find(netlink.Find(attrs, ctaProtoInfo), ctaProtoInfoTCP)
	if s := netlink.Find(tcp, ctaProtoInfoTCPState); len(s) == 1 && int(s.Uint8()) < len(tcpStates) {
		k.state = tcpStates[s.Uint8()]
	}
	k.service = cmp.Or(at[to], at[frontend{netip.Addr{}, to.protocol, to.port}], "-")
	return k
}
