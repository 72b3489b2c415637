package dataplane

// row is a Route whose pool is not yet chosen.
type row struct {
	from From
	pool poolName
	snat bool
}

// poolName says which of a ServicePort's pools a row leads to.
type poolName uint8

const (
	clusterPool poolName = iota
	localPool
)

// condition is a question of the policy table.
type condition uint8

const (
	either condition = iota
	no
	yes
)

func (c condition) holds(b bool) bool { return c == either || (c == yes) == b }

// policies is the whole traffic policy. The first line whose conditions all hold gives the routes of a frontend.
//
// external: the frontend is a node port, load balancer or external address, not a cluster IP.
// local: the policy for such frontends (internalTrafficPolicy, externalTrafficPolicy) is Local.
// pods: pods can be told from others. masqAll: the operator masquerades everything sent to cluster IPs.
//
// Traffic to an external address that starts on this node never left it. Under Local it is served as if it had gone out
// to a load balancer and come back at a node that has an endpoint. Traffic from the node itself is masqueraded, because
// its source may be the very address it goes to. A packet of this node may also have a pod's address, that of a bridge,
// so the node's row comes first.
var policies = [...]struct {
	external, local, pods, masqAll condition
	rows                           []row
}{
	{no, no, either, yes, []row{{Anyone, clusterPool, true}}},
	{no, no, yes, no, []row{{Pod, clusterPool, false}, {Anyone, clusterPool, true}}},
	{no, no, no, no, []row{{Anyone, clusterPool, false}}},
	{no, yes, either, yes, []row{{Anyone, localPool, true}}},
	{no, yes, yes, no, []row{{Pod, localPool, false}, {Anyone, localPool, true}}},
	{no, yes, no, no, []row{{Anyone, localPool, false}}},
	{yes, no, either, either, []row{{Anyone, clusterPool, true}}},
	{yes, yes, yes, either, []row{{Node, clusterPool, true}, {Pod, clusterPool, false}, {Anyone, localPool, false}}},
	{yes, yes, no, either, []row{{Node, clusterPool, true}, {Anyone, localPool, false}}},
}

// rowsFor returns the rows of the first matching line.
func rowsFor(external, local, pods, masqAll bool) []row {
	for i := range policies {
		p := &policies[i]
		if p.external.holds(external) && p.local.holds(local) && p.pods.holds(pods) && p.masqAll.holds(masqAll) {
			return p.rows
		}
	}
	panic("dataplane: the policy table has a gap")
}

// anyLeadsTo reports whether any row leads to the pool.
func anyLeadsTo(rows []row, to poolName) bool {
	for _, r := range rows {
		if r.pool == to {
			return true
		}
	}
	return false
}
