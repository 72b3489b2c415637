package conntrack

import (
	"cmp"
	"iter"
	"net/netip"
	"slices"

	"github.com/verdict-proxy/verdict/internal/system/ipfamily"
	"github.com/verdict-proxy/verdict/sync/dataplane"
	"github.com/verdict-proxy/verdict/sync/snapshot"
)

// query selects the flows that the kernel lists. Fields other than family may be zero; they are not compared then.
type query struct {
	family ipfamily.Family
	// both asks for everything, in both families; all else is zero.
	both     bool
	protocol snapshot.Protocol
	// addr and port are the original destination of the flow.
	addr netip.Addr
	port uint16
	// endpoint is the source of the replies, of whatever address if that is unspecified. If it is set, addr and port are
	// not.
	endpoint netip.AddrPort
	// unanswered asks for flows that nobody has answered. A kernel before 5.15 lists others, too.
	unanswered bool
}

// queryFor returns a query for the flows to a frontend, as narrow as the kernel supports. The kernel compares ports
// only for TCP and UDP. It compares IPv6 addresses the wrong way round and lists exactly the others: see
// ctnetlink_filter_match_tuple, from 5.8 on and still in 6.18.
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

// matches says whether the query asks for a flow.
func (q *query) matches(f *flow) bool {
	if e := q.endpoint; e.IsValid() && (f.endpoint.Port() != e.Port() || !q.anyAddr() && f.endpoint != e) {
		return false
	}
	return (q.protocol == 0 || f.frontend.Protocol == q.protocol) &&
		(!q.addr.IsValid() || f.frontend.Addr == q.addr) && (q.port == 0 || f.frontend.Port == q.port)
}

// covers says whether a list of q shows what o asks for.
func (q query) covers(o query) bool {
	if q.anyAddr() {
		o.endpoint = netip.AddrPortFrom(q.endpoint.Addr(), o.endpoint.Port())
	}
	return (q.both || !o.both && q.family == o.family) && (q.protocol == 0 || q.protocol == o.protocol) &&
		(!q.addr.IsValid() || q.addr == o.addr) && (q.port == 0 || q.port == o.port) &&
		(!q.endpoint.IsValid() || q.endpoint == o.endpoint) && (!q.unanswered || o.unanswered)
}

var unspecified = ipfamily.Per[netip.Addr]{netip.IPv4Unspecified(), netip.IPv6Unspecified()}

// anyAddr says that the query asks for endpoints with a port, whatever their addresses.
func (q query) anyAddr() bool { return q.endpoint.Addr().IsUnspecified() }

// breadth is 1 if the query asks for all flows of a protocol, or of all protocols.
func (q query) breadth() int {
	if q.addr.IsValid() || q.port != 0 || q.endpoint.IsValid() {
		return 0
	}
	return 1
}

func (q query) compare(o query) int {
	return cmp.Or(cmp.Compare(q.family, o.family), cmp.Compare(q.protocol, o.protocol), q.addr.Compare(o.addr),
		cmp.Compare(q.port, o.port))
}

// maxSingle is how many frontends of a family and protocol get a query each, and maxSingleEndpoints how many endpoints.
// The kernel walks its whole table for each query, so listing all flows of the protocol once is cheaper for more: for
// TCP, that takes as long as some ten walks that find little.
const (
	maxSingle          = 4
	maxSingleEndpoints = 8
)

// queries returns the queries that list the flows to all keys, sorted and without duplicates, whatever the order of the
// keys. If they are not narrow, there is one query for each family. The kernel may list other flows, too.
func queries(keys []dataplane.Key, narrow bool) []query {
	return reduce(func(yield func(query) bool) {
		for _, k := range keys {
			if !yield(queryFor(k)) {
				return
			}
		}
	}, narrow)
}

// endpointQueries is the same for the TCP flows to some endpoints, or to all.
func endpointQueries(endpoints iter.Seq[netip.AddrPort], all, narrow bool) (list []query) {
	return reduce(func(yield func(query) bool) {
		for _, f := range ipfamily.All {
			if all && !yield(query{family: f, protocol: snapshot.TCP}) {
				return
			}
		}
		for e := range endpoints {
			q := query{family: ipfamily.Of(e.Addr()), protocol: snapshot.TCP, endpoint: e}
			if q.family == ipfamily.IPv6 { // the kernel compares the port alone
				q.endpoint = netip.AddrPortFrom(unspecified[q.family], e.Port())
			}
			if !yield(q) {
				return
			}
		}
	}, narrow)
}

// reduce returns the queries that show what others ask for, without too many for a family and protocol.
func reduce(wanted iter.Seq[query], narrow bool) (list []query) {
	groups := map[query][]query{}
	for q := range wanted {
		all := query{family: q.family, both: q.both, protocol: q.protocol, unanswered: q.unanswered}
		if !narrow {
			all = query{family: q.family, both: q.both}
			q = all
		}
		switch group := groups[all]; {
		case slices.ContainsFunc(group, func(o query) bool { return o.covers(q) }):
		case q.endpoint.IsValid() && len(group) >= maxSingleEndpoints:
			groups[all] = byPort(append(group, q), all)
		case !q.endpoint.IsValid() && len(group) >= maxSingle:
			groups[all] = []query{all}
		default:
			groups[all] = append(group, q)
		}
	}
	for all, group := range groups {
		if slices.Contains(group, all) {
			group = []query{all}
		}
		list = append(list, group...)
	}
	slices.SortFunc(list, query.compare)
	return list
}

// maxPorts is how many ports get a query each, where there are many endpoints.
const maxPorts = 2

// byPort returns queries for the ports of endpoints, whatever their addresses, or one for all if there are many ports.
// Endpoints of one Service mostly have one port, so that little else is listed.
func byPort(group []query, all query) (list []query) {
	for _, q := range group {
		q.endpoint = netip.AddrPortFrom(unspecified[q.family], q.endpoint.Port())
		if !slices.Contains(list, q) {
			list = append(list, q)
		}
	}
	if len(list) > maxPorts {
		return []query{all}
	}
	return list
}

// merge returns the lists that serve several looks, narrow ones first. One list takes the place of those of TCP and of
// UDP. One of everything serves both families: the kernel filters by a protocol only within a family.
func merge(wanted []query) (lists []query) {
	lists = reduce(slices.Values(wanted), true)
	for _, f := range ipfamily.All {
		if slices.Contains(lists, query{family: f, protocol: snapshot.TCP}) &&
			slices.Contains(lists, query{family: f, protocol: snapshot.UDP}) {
			lists = append(lists, query{family: f})
		}
	}
	if slices.Contains(lists, query{}) && slices.Contains(lists, query{family: ipfamily.IPv6}) {
		lists = append(lists, query{both: true})
	}
	lists = slices.DeleteFunc(slices.Clone(lists), func(q query) bool {
		return slices.ContainsFunc(lists, func(o query) bool { return o != q && o.covers(q) })
	})
	slices.SortStableFunc(lists, func(a, b query) int { return a.breadth() - b.breadth() })
	return lists
}
