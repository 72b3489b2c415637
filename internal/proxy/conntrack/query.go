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
	family   ipfamily.Family
	protocol snapshot.Protocol
	// addr and port are the original destination of the flow.
	addr netip.Addr
	port uint16
	// endpoint is the source of the replies. If it is set, addr and port are not.
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
	if e := q.endpoint; e.IsValid() && (f.endpoint.Port() != e.Port() || e.Addr().Is4() && f.endpoint != e) {
		return false
	}
	return (q.protocol == 0 || f.frontend.Protocol == q.protocol) &&
		(!q.addr.IsValid() || f.frontend.Addr == q.addr) && (q.port == 0 || f.frontend.Port == q.port)
}

func (q query) compare(o query) int {
	return cmp.Or(cmp.Compare(q.family, o.family), cmp.Compare(q.protocol, o.protocol), q.addr.Compare(o.addr),
		cmp.Compare(q.port, o.port))
}

// maxSingle is how many frontends of a family and protocol get a query each. The kernel walks its whole table for each
// query, so listing all flows of the protocol once is cheaper for more.
const maxSingle = 4

// queries returns the queries that list the flows to all keys, sorted and without duplicates, whatever the order of the
// keys. If they are not narrow, there is one query for each family. The kernel may list other flows, too.
func queries(keys []dataplane.Key, narrow bool) []query {
	groups := map[query][]query{}
	for _, k := range keys {
		q := queryFor(k)
		if !narrow {
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

// maxSingleEndpoints is how many endpoints of a family get a query each. The kernel walks its table for each; a list
// of all TCP flows takes as long as some ten walks that find little.
const maxSingleEndpoints = 8

// endpointQueries returns the queries that list the TCP flows to some endpoints, or to all: at most maxSingleEndpoints
// for each family. The kernel may list other flows, too.
func endpointQueries(endpoints iter.Seq[netip.AddrPort], all, narrow bool) (list []query) {
	var byFamily ipfamily.Per[[]query]
	for e := range endpoints {
		f := ipfamily.Of(e.Addr())
		q := query{family: f, protocol: snapshot.TCP, endpoint: e}
		if f == ipfamily.IPv6 { // the kernel compares the port alone
			q.endpoint = netip.AddrPortFrom(netip.IPv6Unspecified(), e.Port())
		}
		if len(byFamily[f]) <= maxSingleEndpoints && !slices.Contains(byFamily[f], q) {
			byFamily[f] = append(byFamily[f], q)
		}
	}
	for _, f := range ipfamily.All {
		switch group := byFamily[f]; {
		case len(group) == 0 && !all:
		case !narrow:
			list = append(list, query{family: f})
		case all || len(group) > maxSingleEndpoints:
			list = append(list, query{family: f, protocol: snapshot.TCP})
		default:
			list = append(list, group...)
		}
	}
	return list
}
