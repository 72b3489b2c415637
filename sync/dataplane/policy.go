package dataplane

import "github.com/verdict-proxy/verdict/sync/snapshot"

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
	// rejectingPool and passingPool have no endpoints.
	rejectingPool
	passingPool
)

// failover says which snapshot.ExternalFailover is in force for a port's external frontends.
type failover uint8

const (
	// noFailover: their policy is Cluster, or this node has a usable endpoint, or the packets are dropped.
	noFailover failover = iota
	failoverCluster
	failoverReject
	// failoverPass is for clients from outside, failoverPassAll for everybody: there is no usable endpoint anywhere.
	failoverPass
	failoverPassAll
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
// pods: pods can be told from others. masqAll: the operator masquerades everything sent to cluster IPs. failover: what
// is in force instead of the policy Local.
//
// Traffic to an external address that starts on this node never left it. Under Local it is served as if it had gone out
// to a load balancer and come back at a node that has an endpoint. Traffic from the node itself is masqueraded, because
// its source may be the very address it goes to. A packet of this node may also have a pod's address, that of a bridge,
// so the node's row comes first; see podsFirst.
var policies = [...]struct {
	external, local, pods, masqAll condition
	failover                       failover
	rows                           []row
}{
	{no, no, either, yes, noFailover, []row{{Anyone, clusterPool, true}}},
	{no, no, yes, no, noFailover, []row{{Pod, clusterPool, false}, {Anyone, clusterPool, true}}},
	{no, no, no, no, noFailover, []row{{Anyone, clusterPool, false}}},
	{no, yes, either, yes, noFailover, []row{{Anyone, localPool, true}}},
	{no, yes, yes, no, noFailover, []row{{Pod, localPool, false}, {Anyone, localPool, true}}},
	{no, yes, no, no, noFailover, []row{{Anyone, localPool, false}}},
	{yes, no, either, either, noFailover, []row{{Anyone, clusterPool, true}}},
	{yes, yes, yes, either, noFailover,
		[]row{{Node, clusterPool, true}, {Pod, clusterPool, false}, {Anyone, localPool, false}}},
	{yes, yes, no, either, noFailover, []row{{Node, clusterPool, true}, {Anyone, localPool, false}}},
	{yes, yes, either, either, failoverCluster, []row{{Anyone, clusterPool, true}}},
	{yes, yes, yes, either, failoverReject,
		[]row{{Node, clusterPool, true}, {Pod, clusterPool, false}, {Anyone, rejectingPool, false}}},
	{yes, yes, no, either, failoverReject, []row{{Node, clusterPool, true}, {Anyone, rejectingPool, false}}},
	{yes, yes, yes, either, failoverPass,
		[]row{{Node, clusterPool, true}, {Pod, clusterPool, false}, {Anyone, passingPool, false}}},
	{yes, yes, no, either, failoverPass, []row{{Node, clusterPool, true}, {Anyone, passingPool, false}}},
	{yes, yes, either, either, failoverPassAll, []row{{Anyone, passingPool, false}}},
}

// rowsFor returns the rows of the first matching line.
func rowsFor(external, local, pods, masqAll bool, f failover) []row {
	for i := range policies {
		p := &policies[i]
		if p.external.holds(external) && p.local.holds(local) && p.pods.holds(pods) && p.masqAll.holds(masqAll) &&
			p.failover == f {
			return p.rows
		}
	}
	panic("dataplane: the policy table has a gap")
}

// podsFirst puts the pods' row before the node's, as kube-proxy does: a packet of this node that has a pod's address is
// a pod's.
func podsFirst(rows []row) []row {
	if len(rows) < 2 || rows[0].from != Node || rows[1].from != Pod {
		return rows
	}
	return append([]row{rows[1], rows[0]}, rows[2:]...)
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

// failover returns what is in force for the external frontends of the port whose endpoints were collected.
func (b *builder) failover(svc *snapshot.Service) failover {
	if !svc.ExternalLocal || svc.ExternalFailover == snapshot.FailoverDrop {
		return noFailover
	}
	included := func(fs filters) bool {
		for i := range b.candidates {
			if fs.decide(&b.candidates[i]).Included() {
				return true
			}
		}
		return false
	}
	switch {
	case included(b.localFilters()):
		return noFailover
	case svc.ExternalFailover == snapshot.FailoverCluster:
		return failoverCluster
	case svc.ExternalFailover == snapshot.FailoverReject:
		return failoverReject
	case included(b.clusterFilters()):
		return failoverPass
	}
	return failoverPassAll
}
