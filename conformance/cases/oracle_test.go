package cases

import (
	"strings"
	"testing"
)

// state makes a state of words: "a1 ready, b1 serving".
func state(t *testing.T, words string) *State {
	t.Helper()
	s := &State{Endpoints: make(map[string]Endpoint)}
	for part := range strings.SplitSeq(words, ", ") {
		host, is, ok := strings.Cut(part, " ")
		if !ok {
			continue
		}
		is, hints, _ := strings.Cut(is, " for ")
		e := Endpoint{Condition: Condition(is)}
		for place := range strings.FieldsSeq(hints) {
			if isNode(place) {
				e.Nodes = append(e.Nodes, place)
			} else {
				e.Zones = append(e.Zones, place)
			}
		}
		s.Endpoints[host] = e
	}
	return s
}

// TestExpect holds rows of the contract against the rules, by hand.
func TestExpect(t *testing.T) {
	local := Options{ExternalTrafficPolicy: "Local"}
	for _, c := range []struct {
		options     Options
		state, from string
		frontend    Frontend
		want        string
	}{
		{Options{}, "a1 ready, b1 ready", "pod-a", ClusterIP, "one of a1, b1; source kept"},
		{Options{}, "a1 ready, b1 ready", "client-b", ClusterIP, "one of a1, b1; source node-b"},
		{Options{}, "a1 ready, b1 ready", "a1", ClusterIP, "one of a1, b1; source node-a for a1; source kept for b1"},
		{Options{InternalTrafficPolicy: "Local"}, "a1 ready", "pod-b", ClusterIP, "dropped"},
		{Options{InternalTrafficPolicy: "Local"}, "a1 unready", "pod-a", ClusterIP, "refused"},
		{Options{InternalTrafficPolicy: "Local"}, "a1 serving, b1 ready", "pod-a", ClusterIP, "a1; source kept"},
		{Options{}, "a1 serving, b1 ready", "pod-a", ClusterIP, "b1; source kept"},
		{Options{}, "a1 serving, b1 terminating", "pod-b", ClusterIP, "a1; source kept"},
		{Options{}, "a1 terminating, b1 unready", "pod-b", ClusterIP, "refused"},
		{Options{}, "a1 ready", "client-b", LoadBalancer, "a1; source node-b"},
		{Options{}, "a1 ready", "pod-b", LoadBalancer, "a1; source node-b"},
		{local, "a1 ready", "client-a", LoadBalancer, "a1; source kept"},
		{local, "a1 ready", "client-b", LoadBalancer, "dropped"},
		{local, "a1 ready", "pod-b", LoadBalancer, "a1; source kept"},
		{local, "a1 ready", "node-b", LoadBalancer, "a1; source node-b"},
		{local, "a1 ready", "node-b", NodePortA, "a1; source kept"},
		{local, "b1 ready", "node-b", NodePortA, "dropped"},
		{local, "node-a ready", "client-a", LoadBalancer, "node-a; source kept"},
		{Options{}, "node-a ready", "client-a", LoadBalancer, "node-a; source kept"},
		{Options{}, "node-a ready", "client-b", LoadBalancer, "node-a; source node-b"},
		{Options{SourceRanges: []string{"pods"}}, "a1 ready", "client-a", LoadBalancer, "dropped"},
		{Options{SourceRanges: []string{"pods"}}, "a1 ready", "client-a", NodePortA, "a1; source node-a"},
		{Options{SourceRanges: []string{"pods"}}, "a1 ready", "pod-a", LoadBalancer, "a1; source node-a"},
		{Options{SessionAffinity: "ClientIP"}, "a1 ready, b1 ready", "pod-a", ClusterIP,
			"always the same of a1, b1; source kept"},
		{Options{IPMode: "Proxy"}, "a1 ready", "pod-a", LoadBalancer, "router; source kept"},
		{Options{}, "a1 ready for zone-a, b1 ready for zone-b", "pod-a", ClusterIP, "a1; source kept"},
		{Options{}, "a1 ready for zone-a, b1 ready", "pod-a", ClusterIP, "one of a1, b1; source kept"},
		{Options{}, "a1 ready for zone-a, b1 ready for zone-a", "pod-b", ClusterIP, "one of a1, b1; source kept"},
		{Options{}, "a1 ready for node-b zone-a, a2 ready for node-a zone-a", "pod-a", ClusterIP, "a2; source kept"},
		{Options{}, "a1 ready for node-b zone-a, a2 ready for node-c zone-a", "pod-a", ClusterIP,
			"one of a1, a2; source kept"},
	} {
		got, promised := Expect(
			c.options,
			state(t, c.state),
			Flow{From: c.from, Frontend: c.frontend, Protocol: TCP, Family: IPv4},
		)
		if !promised || got.String() != c.want {
			t.Errorf("%+v, endpoints %s, from %s to %s: got %q, want %q", c.options, c.state, c.from, c.frontend, got, c.want)
		}
	}
	if _, promised := Expect(local, state(t, "a1 ready, b1 ready"), Flow{From: "pod-a", Frontend: NodePortB}); promised {
		t.Error("a promise is made for a pod that asks another node's port with policy Local")
	}
}
