package conntrack

import (
	"cmp"
	"net/netip"
	"slices"

	"github.com/verdict-proxy/verdict/internal/ipfamily"
	"github.com/verdict-proxy/verdict/sync/dataplane"
	"github.com/verdict-proxy/verdict/sync/snapshot"
)

// query is what the kernel is asked to list. All but the family may be zero, and is not compared then.
type query struct {
	family   ipfamily.Family
	protocol snapshot.Protocol
	// addr and port are what the flow was sent to first.
	addr netip.Addr
	port uint16
}

// queryFor asks for the flows to a frontend, as far as the kernel is able to tell them. It compares ports for TCP and
// UDP only. IPv6 addresses it compares the wrong way round, and lists just the others: ctnetlink_filter_match_tuple,
// from 5.8 on and still in 6.18.
func queryFor(k dataplane.Key) query {
	q := query{family: ipfamily.Of(k.Addr), protocol: k.Protocol}
	if q.family == ipfamily.IPv4 {
		q.addr = k.Addr
	}
	if k.Protocol == snapshot.UDP {
		q.port = k.Port
	}
	return q
}

// matches says whether a flow is what the query asks for.
func (q *query) matches(f *flow) bool {
	return (q.protocol == 0 || f.frontend.Protocol == q.protocol) &&
		(!q.addr.IsValid() || f.frontend.Addr == q.addr) && (q.port == 0 || f.frontend.Port == q.port)
}

func (q query) compare(o query) int {
	return cmp.Or(cmp.Compare(q.family, o.family), cmp.Compare(q.protocol, o.protocol), q.addr.Compare(o.addr),
		cmp.Compare(q.port, o.port))
}

// maxSingle is how many frontends of a family and protocol are asked for one by one. Each time the kernel walks its
// whole table, so for more of them it is cheaper to be told all flows of the protocol once.
const maxSingle = 4

// queries plans how to list the flows to frontends, sorted and unique. Without filters it is a whole family at a
// time. Other flows may be listed, too.
func queries(keys []dataplane.Key, filters bool) []query {
	groups := map[query][]query{}
	for _, k := range keys {
		q := queryFor(k)
		if !filters {
			q = query{family: q.family}
		}
		all := query{family: q.family, protocol: q.protocol}
		if group := groups[all]; len(group) <= maxSingle && !slices.Contains(group, q) {
			groups[all] = append(group, q)
		}
	}
	var list []query
	for all, group := range groups {
		if len(group) > maxSingle {
			group = []query{all}
		}
		list = append(list, group...)
	}
	slices.SortFunc(list, query.compare)
	return list
}
