package gateway

import (
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/verdict-proxy/verdict/internal/gateway/routes"
)

// strays removes Services whose Gateways are not to have any; ours are the Gateways of the plan. A Gateway that has
// another controller now loses our status first: once the Service is gone, nothing says that it was ours.
func (p *pass) strays(ours map[types.NamespacedName]bool) {
	for _, n := range p.plan.Delete {
		s := p.world.services.known[n]
		if s == nil {
			continue
		}
		g := types.NamespacedName{Namespace: n.Namespace}
		if owner := metav1.GetControllerOfNoCopy(s); owner != nil {
			g.Name = owner.Name
		}
		if known := p.world.gateways.known[g]; known != nil && !ours[g] && p.strip(known) {
			continue
		}
		p.remove(s)
	}
}

// strip removes our status from a Gateway that has another controller now, and reports whether there is any: conditions
// of an older generation, in which the Gateway was ours. Once somebody has written a condition since, all is theirs.
func (p *pass) strip(g *routes.Gateway) bool {
	ours := false
	for _, c := range g.Status.Conditions {
		if c.ObservedGeneration >= g.Generation {
			return false
		}
		ours = ours || c.Status != metav1.ConditionUnknown
	}
	if ours {
		status(p, p.world.gateways, gateways, g, any(g.Status), any(struct {
			Conditions []metav1.Condition `json:"conditions,omitempty"`
		}{}))
	}
	return ours
}
