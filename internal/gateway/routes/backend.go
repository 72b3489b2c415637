package routes

import (
	"fmt"
	"strings"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"
	gatewayv1 "sigs.k8s.io/gateway-api/apis/v1"

	"github.com/verdict-proxy/verdict/internal/system/clip"
)

// backend is what a reference of a route to a backend leads to.
type backend struct {
	service types.NamespacedName
	port    int32
	weight  int32
	// refused is why its share is refused; empty if it is not.
	refused string
}

// mostRefused bounds in bytes why a backend is refused: nodes hold and show it.
const mostRefused = 256

// labelProxyName marks Services that nodes leave to another proxy.
const labelProxyName = "service.kubernetes.io/service-proxy-name"

// resolve finds the backends of a route, and says why some are refused.
func (c *computation) resolve(r *route) {
	r.resolved = routeReason{gatewayv1.RouteReasonResolvedRefs,
		"all references are resolved"}
	var refused []string
	for i := range r.refs {
		ref := &r.refs[i]
		b, reason := c.backend(r, ref)
		if b.refused != "" {
			if b.refused = clip.Visible(b.refused, mostRefused); len(refused) == 0 {
				r.resolved.Reason = reason
			}
			refused = append(refused, b.refused)
		}
		r.backends = append(r.backends, b)
	}
	if len(refused) > 0 {
		r.resolved.Message = fmt.Sprintf("%d of %d backends are refused: %s", len(refused), len(r.refs),
			strings.Join(refused, "; "))
	}
}

// backend returns a backend, and if it is refused the reason of the condition. Grants are asked first: whether a
// Service exists is no business of those who may not refer to it.
func (c *computation) backend(r *route, ref *gatewayv1.BackendRef) (backend, gatewayv1.RouteConditionReason) {
	own := r.plan.Object.GetNamespace()
	b := backend{weight: or(ref.Weight, 1), port: or(ref.Port, 0), service: types.NamespacedName{
		Namespace: string(or(ref.Namespace, gatewayv1.Namespace(own))), Name: string(ref.Name)}}
	refuse := func(reason gatewayv1.RouteConditionReason, format string, args ...any,
	) (backend, gatewayv1.RouteConditionReason) {
		b.refused = fmt.Sprintf(format, args...)
		return b, reason
	}
	if group, kind := or(ref.Group, ""), or(ref.Kind, "Service"); group != "" || kind != "Service" {
		return refuse(gatewayv1.RouteReasonInvalidKind, "%s of group %q is not supported: only Service is", kind, group)
	}
	if b.service.Namespace != own && !c.grants.allow(r.kind, own, b.service) {
		return refuse(gatewayv1.RouteReasonRefNotPermitted,
			"no ReferenceGrant in namespace %s allows %ss of namespace %s the Service %s", b.service.Namespace, r.kind, own,
			b.service.Name)
	}
	s := c.Service(b.service)
	switch {
	case s == nil:
		return refuse(gatewayv1.RouteReasonBackendNotFound, "the Service %s does not exist", b.service)
	case s.Spec.Type == corev1.ServiceTypeExternalName:
		return refuse(gatewayv1.RouteReasonInvalidKind, "the Service %s is of type ExternalName", b.service)
	case s.Spec.ClusterIP == corev1.ClusterIPNone:
		return refuse(gatewayv1.RouteReasonInvalidKind, "the Service %s is headless", b.service)
	case s.Labels[labelProxyName] != "":
		return refuse(gatewayv1.RouteReasonInvalidKind, "the Service %s is another proxy's: it has the label %s", b.service,
			labelProxyName)
	case ref.Port == nil:
		return refuse(gatewayv1.RouteReasonBackendNotFound, "the reference to the Service %s has no port", b.service)
	}
	for _, p := range s.Spec.Ports {
		if p.Port == b.port && protocolOf(p.Protocol) == r.protocol {
			return b, gatewayv1.RouteReasonResolvedRefs
		}
	}
	return refuse(gatewayv1.RouteReasonBackendNotFound, "the Service %s has no port %d/%s", b.service, b.port, r.protocol)
}

func protocolOf(p corev1.Protocol) corev1.Protocol {
	if p == "" {
		return corev1.ProtocolTCP
	}
	return p
}

// grantIndex finds ReferenceGrants by who refers to whom.
type grantIndex struct {
	grants map[grantPair][]*gatewayv1.ReferenceGrant
	// names are the Services that a pair may refer to, of the pairs that were asked for; empty for all.
	names map[grantPair]map[string]bool
}

// grantPair is a kind of routes in one namespace, and the namespace of backends.
type grantPair struct{ kind, from, to string }

// indexGrants takes time in proportion to the grants, and each pair that is asked for to its grants, once.
func indexGrants(all []*gatewayv1.ReferenceGrant) *grantIndex {
	g := &grantIndex{map[grantPair][]*gatewayv1.ReferenceGrant{}, map[grantPair]map[string]bool{}}
	for _, o := range all {
		for _, from := range o.Spec.From {
			if kind := string(from.Kind); from.Group == gatewayv1.GroupName && (kind == kindTCP || kind == kindUDP) {
				pair := grantPair{kind, string(from.Namespace), o.Namespace}
				g.grants[pair] = append(g.grants[pair], o)
			}
		}
	}
	return g
}

// allow says whether routes of a kind and namespace may refer to a Service.
func (g *grantIndex) allow(kind, from string, to types.NamespacedName) bool {
	pair := grantPair{kind, from, to.Namespace}
	names, known := g.names[pair]
	if !known {
		names = map[string]bool{}
		for _, o := range g.grants[pair] {
			for _, t := range o.Spec.To {
				if t.Group == "" && t.Kind == "Service" {
					names[string(or(t.Name, ""))] = true
				}
			}
		}
		g.names[pair] = names
	}
	return names[""] || names[to.Name]
}
