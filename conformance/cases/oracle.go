package cases

import (
	"maps"
	"slices"
	"strings"
)

// Expect says what Kubernetes promises to a flow. It is written from the documentation of Services and shares no code
// with any proxy. promised is false where there is no promise, because the answer depends on the pod network.
func Expect(o Options, s *State, f Flow) (w Want, promised bool) {
	entry := entryNode(f)
	switch {
	case f.Frontend == UnusedPort:
		return Want{Outcome: Refused}, true
	case f.Frontend == SecondNodePortA:
		// Node ports are at the addresses of the Node object by default; the host's own stack answers elsewhere.
		return Want{Outcome: Refused}, true
	case f.Frontend == Localhost && f.Family == IPv6:
		// The kernel forwards nothing from ::1.
		return Want{Outcome: Refused}, true
	case f.Frontend == LoadBalancer && o.IPMode == "Proxy":
		// The packet leaves for the load balancer, which is the one to answer.
		return Want{Outcome: Answered, Endpoints: []string{"router"}, Sources: uniform([]string{"router"}, Kept)}, true
	case f.Frontend == LoadBalancer && !admitted(o.SourceRanges, f.From):
		return Want{Outcome: Dropped}, true
	case f.Frontend == ClusterIP:
		w = internal(o, s, f, entry)
	default:
		if crooked(o, f, entry) {
			return Want{}, false
		}
		w = external(o, s, f, entry)
	}
	w.Sticky = o.SessionAffinity == "ClientIP" && w.Outcome == Answered
	return w, true
}

// entryNode is where a proxy meets the packet: at the sender's own node; for clients at the node that the router
// leads them to; and at the node whose port it is.
func entryNode(f Flow) string {
	switch f.Frontend {
	case NodePortA, SecondNodePortA:
		return "node-a"
	case NodePortB:
		return "node-b"
	}
	if strings.HasPrefix(f.From, "client-") {
		return "node-" + strings.TrimPrefix(f.From, "client-")
	}
	return nodeOf(f.From)
}

// nodeOf gives the node of a pod, or a node itself.
func nodeOf(host string) string {
	if strings.HasPrefix(host, "node-") {
		return host
	}
	if letter, ok := strings.CutPrefix(host, "pod-"); ok {
		return "node-" + letter
	}
	return "node-" + host[:1]
}

func isNode(host string) bool { return strings.HasPrefix(host, "node-") }

func isPod(host string) bool { return !isNode(host) && !strings.HasPrefix(host, "client-") }

// crooked says that answers go back by another way than the question came: a pod asks another node's port, and with
// policy Local its address is kept, so an endpoint elsewhere answers it directly. Whether that works is up to the pod
// network, which may masquerade what pods send to nodes.
func crooked(o Options, f Flow, entry string) bool {
	return o.ExternalTrafficPolicy == "Local" && isPod(f.From) && nodeOf(f.From) != entry
}

// admitted says whether source ranges let a sender reach the load balancer's address.
func admitted(ranges []string, from string) bool {
	if len(ranges) == 0 {
		return true
	}
	return slices.ContainsFunc(ranges, func(r string) bool {
		return r == "everybody" || r == from || r == "pods" && isPod(from) || r == "nodes" && isNode(from)
	})
}

// internal is the cluster IP: pods keep their address, everybody else gets the node's.
func internal(o Options, s *State, f Flow, entry string) Want {
	usable := clusterSet(s, entry)
	if o.InternalTrafficPolicy == "Local" {
		usable = localSet(s, entry)
	}
	source := Kept
	if !isPod(f.From) {
		source = entry
	}
	return answer(usable, s, f, entry, source)
}

// external is the addresses for clients outside. With policy Cluster all endpoints are used and nobody keeps the
// address. With Local, clients outside are led to this node's endpoints and keep it; pods and the node itself are
// treated as if they had gone out and come back at a node that has some.
func external(o Options, s *State, f Flow, entry string) Want {
	switch {
	case o.ExternalTrafficPolicy != "Local":
		return answer(clusterSet(s, entry), s, f, entry, entry)
	case isPod(f.From):
		return answer(clusterSet(s, entry), s, f, entry, Kept)
	case f.From == entry:
		return answer(clusterSet(s, entry), s, f, entry, entry)
	}
	return answer(localSet(s, entry), s, f, entry, Kept)
}

// answer turns a set of endpoints into what is seen. A Service without endpoints refuses; one that has some, but not
// where its policy wants them, drops, since others may find them by another way.
func answer(usable []string, s *State, f Flow, entry, source string) Want {
	if len(usable) == 0 {
		if len(clusterSet(s, entry)) > 0 {
			return Want{Outcome: Dropped}
		}
		return Want{Outcome: Refused}
	}
	sources := make(map[string]string)
	for _, e := range usable {
		switch {
		case e == f.From:
			// Without the node's address it would answer itself, past the node.
			sources[e] = entry
		case e == entry && f.From != entry:
			// What is for the node itself is not sent on, and only what is sent on is masqueraded.
			sources[e] = Kept
		default:
			sources[e] = source
		}
	}
	return Want{Outcome: Answered, Endpoints: usable, Sources: sources}
}

// clusterSet gives the endpoints that a node uses with policy Cluster: those that are ready, narrowed down by hints;
// if none is ready, those that still serve while they terminate.
func clusterSet(s *State, node string) []string {
	ready := with(s, Ready)
	if len(ready) == 0 {
		return with(s, Serving)
	}
	zone := "zone-" + strings.TrimPrefix(node, "node-")
	for _, hints := range []func(Endpoint) ([]string, string){
		func(e Endpoint) ([]string, string) { return e.Nodes, node },
		func(e Endpoint) ([]string, string) { return e.Zones, zone },
	} {
		if narrowed := hinted(s, ready, hints); len(narrowed) > 0 {
			return narrowed
		}
	}
	return ready
}

// hinted gives the endpoints whose hints name the own place, if all have hints; otherwise none.
func hinted(s *State, ready []string, hints func(Endpoint) ([]string, string)) (mine []string) {
	for _, name := range ready {
		places, own := hints(s.Endpoints[name])
		if len(places) == 0 {
			return nil
		}
		if slices.Contains(places, own) {
			mine = append(mine, name)
		}
	}
	return mine
}

// localSet gives the endpoints on a node that a policy Local uses: those that are ready, else those that still serve.
func localSet(s *State, node string) []string {
	elsewhere := func(name string) bool { return nodeOf(name) != node }
	if ready := slices.DeleteFunc(with(s, Ready), elsewhere); len(ready) > 0 {
		return ready
	}
	return slices.DeleteFunc(with(s, Serving), elsewhere)
}

func with(s *State, c Condition) (names []string) {
	for _, name := range slices.Sorted(maps.Keys(s.Endpoints)) {
		if s.Endpoints[name].Condition == c {
			names = append(names, name)
		}
	}
	return names
}
