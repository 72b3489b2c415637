package routes

import (
	"slices"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	gatewayv1 "sigs.k8s.io/gateway-api/apis/v1"
)

// equal takes an empty list or map for a missing one, as the API server does.
func equal(a, b any) bool { return equality.Semantic.DeepEqual(a, b) }

// mergeConditions puts our conditions into those that an object has. Those of other types stay as they are and where
// they are. The time of a condition whose status does not change stays, and so does all of one that tells of a newer
// object than ours does.
func mergeConditions(has, ours []metav1.Condition, now metav1.Time) []metav1.Condition {
	merged := slices.Clone(has)
	for _, c := range ours {
		c.LastTransitionTime = now
		i := slices.IndexFunc(merged, func(m metav1.Condition) bool { return m.Type == c.Type })
		if i < 0 {
			merged = append(merged, c)
			continue
		}
		if merged[i].ObservedGeneration > c.ObservedGeneration {
			continue
		}
		if merged[i].Status == c.Status {
			c.LastTransitionTime = merged[i].LastTransitionTime
		}
		merged[i] = c
	}
	return merged
}

// MergeClass returns the status of a GatewayClass with ours in it, and whether it differs from what the object has.
// Conditions of others stay, as does the time of a condition whose status does not change.
func MergeClass(has *gatewayv1.GatewayClassStatus, ours gatewayv1.GatewayClassStatus, now metav1.Time) (
	gatewayv1.GatewayClassStatus, bool) {
	ours.Conditions = mergeConditions(has.Conditions, ours.Conditions, now)
	return ours, !equal(*has, ours)
}

// MergeGateway is MergeClass for a Gateway. Statuses of listeners that are gone go.
func MergeGateway(has *GatewayStatus, ours GatewayStatus, now metav1.Time) (GatewayStatus, bool) {
	merged := *has
	merged.Addresses, merged.GatewayStatus.Addresses = ours.Addresses, nil
	conditions := has.Conditions
	if !slices.ContainsFunc(ours.Conditions, isAddressesAssigned) {
		conditions = slices.DeleteFunc(slices.Clone(conditions), isAddressesAssigned)
	}
	merged.Conditions = mergeConditions(conditions, ours.Conditions, now)
	merged.Listeners = nil
	for _, l := range ours.Listeners {
		i := slices.IndexFunc(has.Listeners, func(h gatewayv1.ListenerStatus) bool { return h.Name == l.Name })
		var had []metav1.Condition
		if i >= 0 {
			had = has.Listeners[i].Conditions
		}
		l.Conditions = mergeConditions(had, l.Conditions, now)
		merged.Listeners = append(merged.Listeners, l)
	}
	return merged, !equal(*has, merged)
}

func isAddressesAssigned(c metav1.Condition) bool {
	return c.Type == string(gatewayConditionAddressesAssigned)
}

// mostParents is how many entries a route's status may have.
const mostParents = 32

// MergeRoute is MergeClass for a route. Entries of other controllers stay, and those of ours for parents that the route
// does not refer to any more go. An entry that waits for its Gateway stays as the object has it, and is left out if the
// object has none, as long as programmed does not say that it need not wait.
func MergeRoute(p *RoutePlan, by gatewayv1.GatewayController, programmed func(*RouteParent) bool, now metav1.Time) (
	gatewayv1.RouteStatus, bool) {
	find := func(list []gatewayv1.RouteParentStatus, ref gatewayv1.ParentReference) int {
		return slices.IndexFunc(list, func(s gatewayv1.RouteParentStatus) bool {
			return s.ControllerName == by && equal(s.ParentRef, ref)
		})
	}
	merged := gatewayv1.RouteStatus{Parents: []gatewayv1.RouteParentStatus{}}
	for _, s := range p.Status.Parents {
		if s.ControllerName != by || slices.ContainsFunc(p.Parents, func(o RouteParent) bool {
			return equal(o.Status.ParentRef, s.ParentRef)
		}) {
			merged.Parents = append(merged.Parents, s)
		}
	}
	for i := range p.Parents {
		o := &p.Parents[i]
		at := find(merged.Parents, o.Status.ParentRef)
		switch {
		case o.Waits && !programmed(o):
		case at >= 0:
			merged.Parents[at].Conditions = mergeConditions(merged.Parents[at].Conditions, o.Status.Conditions, now)
		case len(merged.Parents) < mostParents:
			s := o.Status
			s.Conditions = mergeConditions(nil, s.Conditions, now)
			merged.Parents = append(merged.Parents, s)
		}
	}
	return merged, !equal(p.Status.Parents, merged.Parents)
}

// MergeGranted returns the conditions of a Service's status with the Gateway's in them, and whether they differ. What
// is granted must be there before the annotation that refers to it: nodes refuse the backend otherwise.
func MergeGranted(has *corev1.Service, granted metav1.Condition, now metav1.Time) ([]metav1.Condition, bool) {
	var merged []metav1.Condition
	if granted.Status == metav1.ConditionTrue {
		merged = mergeConditions(has.Status.Conditions, []metav1.Condition{granted}, now)
	} else {
		merged = slices.DeleteFunc(slices.Clone(has.Status.Conditions), func(c metav1.Condition) bool {
			return c.Type == granted.Type
		})
	}
	return merged, !equal(has.Status.Conditions, merged)
}
