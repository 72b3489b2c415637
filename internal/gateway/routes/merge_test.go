package routes

import (
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	gatewayv1 "sigs.k8s.io/gateway-api/apis/v1"
)

var now, later = metav1.Unix(1_800_000_000, 0), metav1.NewTime(time.Unix(1_800_000_060, 0))

// TestMergeConditions: each rule of the API for who writes conditions.
func TestMergeConditions(t *testing.T) {
	theirs := metav1.Condition{Type: "Theirs", Status: "True", Reason: "R", ObservedGeneration: 1, LastTransitionTime: now}
	has := func(status metav1.ConditionStatus, reason string, generation int64) []metav1.Condition {
		return []metav1.Condition{theirs, {Type: "Accepted", Status: status, Reason: reason, Message: "m",
			ObservedGeneration: generation, LastTransitionTime: now}}
	}
	for name, r := range map[string]struct {
		has, want []metav1.Condition
	}{
		"first":           {nil, has("True", "New", 5)[1:]},
		"the same status": {has("True", "Old", 4), has("True", "New", 5)},
		"another status":  {has("False", "Old", 5), has("True", "New", 5)},
		"a newer object":  {has("False", "Old", 6), has("False", "Old", 6)},
	} {
		if name == "first" || name == "another status" {
			r.want[len(r.want)-1].LastTransitionTime = later
		}
		before := append([]metav1.Condition(nil), r.has...)
		ours := []metav1.Condition{{Type: "Accepted", Status: "True", Reason: "New", Message: "m", ObservedGeneration: 5}}
		if got := mergeConditions(r.has, ours, later); !equal(got, r.want) {
			t.Errorf("%s: %v, want %v", name, got, r.want)
		}
		if !equal(before, r.has) {
			t.Errorf("%s: the object's conditions were changed", name)
		}
	}
}

// TestMergeGateway: a status that is merged twice is written once, and what is not ours stays.
func TestMergeGateway(t *testing.T) {
	c := readCluster(t, gatewayDB)
	c.Bundles = []Bundle{{"v1.7.0", "experimental"}}
	ours := c.compute().Gateways[0].Programmed
	foreign := metav1.Condition{Type: "Theirs", Status: "True"}
	has := &GatewayStatus{GatewayStatus: gatewayv1.GatewayStatus{AttachedListenerSets: new(int32(2)),
		Conditions: []metav1.Condition{foreign},
		Listeners:  []gatewayv1.ListenerStatus{{Name: "gone"}, {Name: "db", Conditions: []metav1.Condition{foreign}}}}}
	merged, differs := MergeGateway(has, ours, now)
	if !differs || len(merged.Conditions) != 4 || merged.Conditions[0] != foreign || *merged.AttachedListenerSets != 2 ||
		len(merged.Listeners) != 1 || merged.Listeners[0].Conditions[0] != foreign ||
		len(merged.Listeners[0].Conditions) != 5 || len(merged.Addresses) != 1 {
		t.Fatalf("merged %+v", merged)
	}
	if again, differs := MergeGateway(&merged, ours, later); differs {
		t.Errorf("there is something to write: %+v", again)
	}
	if len(has.Conditions) != 1 || len(has.Listeners[1].Conditions) != 1 {
		t.Error("the object was changed")
	}
	c.Bundles = nil
	merged, _ = MergeGateway(&merged, c.compute().Gateways[0].Programmed, later)
	if len(merged.Conditions) != 3 {
		t.Errorf("AddressesAssigned stays: %v", merged.Conditions)
	}
}

func TestMergeClass(t *testing.T) {
	ours := Compute(&newCluster().World).Classes[0].Status
	has := &gatewayv1.GatewayClassStatus{Conditions: []metav1.Condition{{Type: "Theirs"}}}
	merged, differs := MergeClass(has, ours, now)
	if !differs || len(merged.Conditions) != 3 || len(merged.SupportedFeatures) == 0 {
		t.Fatalf("merged %+v", merged)
	}
	if _, differs := MergeClass(&merged, ours, later); differs {
		t.Error("there is something to write")
	}
}

// TestMergeRoute: entries of other controllers stay, entries of ours for parents that are gone go, and an entry that
// waits is not written.
func TestMergeRoute(t *testing.T) {
	yes, no := func(*RouteParent) bool { return true }, func(*RouteParent) bool { return false }
	route := func(objects string) *RoutePlan { return &readCluster(t, objects).compute().Routes[0] }
	served := route(gatewayDB + routeDB + services)
	theirs := gatewayv1.RouteParentStatus{ControllerName: "example.com/c", ParentRef: served.Parents[0].Status.ParentRef}
	gone := gatewayv1.RouteParentStatus{ControllerName: ControllerName,
		ParentRef: gatewayv1.ParentReference{Name: "gone"}}
	served.Status.Parents = []gatewayv1.RouteParentStatus{gone, theirs}
	waits, differs := MergeRoute(served, ControllerName, no, now)
	if !differs || len(waits.Parents) != 1 || !equal(waits.Parents[0], theirs) {
		t.Fatalf("while it waits: %+v", waits)
	}
	merged, _ := MergeRoute(served, ControllerName, yes, now)
	if len(merged.Parents) != 2 || merged.Parents[1].ControllerName != ControllerName ||
		len(merged.Parents[1].Conditions) != 2 || merged.Parents[1].Conditions[0].LastTransitionTime != now {
		t.Fatalf("merged %+v", merged)
	}
	merged.Parents[1].Conditions = append(merged.Parents[1].Conditions, metav1.Condition{Type: "Theirs"})
	*served.Status = merged
	for _, programmed := range []func(*RouteParent) bool{yes, no} {
		if again, differs := MergeRoute(served, ControllerName, programmed, later); differs {
			t.Errorf("there is something to write: %+v", again)
		}
	}
	refused := route(gatewayYAML("db", "{name: db, protocol: TCP, port: 1}") + routeDB)
	if merged, _ := MergeRoute(refused, ControllerName, no, now); len(merged.Parents) != 1 {
		t.Error("a route that is not accepted waits")
	}
	served.Status.Parents = make([]gatewayv1.RouteParentStatus, mostParents)
	if merged, _ := MergeRoute(served, ControllerName, yes, now); len(merged.Parents) != mostParents {
		t.Errorf("%d entries", len(merged.Parents))
	}
	served.Parents, *served.Status = nil, gatewayv1.RouteStatus{}
	if _, differs := MergeRoute(served, ControllerName, yes, now); differs {
		t.Error("an empty list is written in place of none")
	}
}
