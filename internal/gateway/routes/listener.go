package routes

import (
	"fmt"
	"slices"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	gatewayv1 "sigs.k8s.io/gateway-api/apis/v1"

	"github.com/verdict-proxy/verdict/internal/system/clip"
)

// The kinds of routes that are supported, and the protocols of their listeners.
const (
	kindTCP = "TCPRoute"
	kindUDP = "UDPRoute"
)

var kindOf = map[gatewayv1.ProtocolType]gatewayv1.Kind{
	gatewayv1.TCPProtocolType: kindTCP,
	gatewayv1.UDPProtocolType: kindUDP,
}

// listener is one of a Gateway of ours.
type listener struct {
	*gatewayv1.Listener
	// kinds are the kinds of routes that may attach; invalidKinds says that the listener names others.
	kinds        []gatewayv1.RouteGroupKind
	invalidKinds bool
	// rejected is why it is not accepted; its Reason is empty if it is.
	rejected   listenerReason
	conflicted bool
	// selector selects the namespaces of routes, and allowed has what it said of them so far. Nil for the Gateway's own
	// namespace alone.
	selector labels.Selector
	allowed  map[string]bool

	// attached is how many routes are; last is the last of them.
	attached int32
	last     *route
	// first is the oldest valid route that is attached: it alone is served. Nil if the listener is not.
	first *route
}

// reasoned is a condition's reason and message; the zero value is none.
type reasoned[R ~string] struct {
	Reason  R
	Message string
}

type (
	gatewayReason  = reasoned[gatewayv1.GatewayConditionReason]
	listenerReason = reasoned[gatewayv1.ListenerConditionReason]
	routeReason    = reasoned[gatewayv1.RouteConditionReason]
)

// serves says whether the listener's port is one of the Service's, if the Gateway has a Service.
func (l *listener) serves() bool { return l.rejected.Reason == "" && len(l.kinds) > 0 }

// readListeners reads the listeners of a Gateway.
func readListeners(g *Gateway) []listener {
	list := make([]listener, len(g.Spec.Listeners))
	users := map[listenerPort][]gatewayv1.ProtocolType{}
	for i := range list {
		l := &list[i]
		l.Listener = &g.Spec.Listeners[i]
		users[portOf(l.Listener)] = append(users[portOf(l.Listener)], l.Protocol)
		l.readKinds()
		l.readNamespaces()
		l.check()
	}
	for i := range list {
		l := &list[i]
		l.conflicted = conflicts(l.Protocol, users[portOf(l.Listener)])
		if l.conflicted && l.rejected.Reason == "" {
			l.rejected = listenerReason{gatewayv1.ListenerReasonPortUnavailable, l.conflict()}
		}
	}
	return list
}

// listenerPort is a port of the transport that carries a listener's protocol.
type listenerPort struct {
	number int32
	udp    bool
}

func portOf(l *gatewayv1.Listener) listenerPort {
	return listenerPort{l.Port, l.Protocol == gatewayv1.UDPProtocolType}
}

// conflicts says whether a listener is not distinct from the others on its port: TCP is from nothing, and other
// protocols may be by their hostnames, which does not matter, since they are not supported.
func conflicts(own gatewayv1.ProtocolType, all []gatewayv1.ProtocolType) bool {
	return len(all) > 1 && (kindOf[own] != "" || slices.Contains(all, gatewayv1.TCPProtocolType))
}

// conflict says what is wrong with a listener that is conflicted.
func (l *listener) conflict() string {
	return fmt.Sprintf("port %d is another listener's, too", l.Port)
}

// check sets why the listener is not accepted.
func (l *listener) check() {
	reject := func(reason gatewayv1.ListenerConditionReason, format string, args ...any) {
		l.rejected = listenerReason{reason, fmt.Sprintf(format, args...)}
	}
	switch from := l.from(); {
	case kindOf[l.Protocol] == "":
		reject(gatewayv1.ListenerReasonUnsupportedProtocol, "protocol %s is not supported: only TCP and UDP are",
			clip.Visible(string(l.Protocol), clip.Quoted))
	case l.Port < 1 || l.Port > 65535:
		reject(gatewayv1.ListenerReasonPortUnavailable, "%d is not a port (1-65535)", l.Port)
	case l.selector == nil && from == gatewayv1.NamespacesFromSelector:
		reject(gatewayv1.ListenerReasonUnsupportedValue, "allowedRoutes.namespaces.selector: it is missing or wrong")
	case l.selector == nil && from != gatewayv1.NamespacesFromSame:
		reject(gatewayv1.ListenerReasonUnsupportedValue, "allowedRoutes.namespaces.from: %s is not All, Selector or Same",
			clip.Quote(string(from)))
	}
}

func (l *listener) from() gatewayv1.FromNamespaces {
	if l.AllowedRoutes == nil || l.AllowedRoutes.Namespaces == nil {
		return gatewayv1.NamespacesFromSame
	}
	return or(l.AllowedRoutes.Namespaces.From, gatewayv1.NamespacesFromSame)
}

// readKinds sets the kinds that the listener allows and that are supported.
func (l *listener) readKinds() {
	l.kinds = []gatewayv1.RouteGroupKind{}
	own := kindOf[l.Protocol]
	supported := gatewayv1.RouteGroupKind{Group: new(gatewayv1.Group(gatewayv1.GroupName)), Kind: own}
	if l.AllowedRoutes == nil || len(l.AllowedRoutes.Kinds) == 0 {
		if own != "" {
			l.kinds = append(l.kinds, supported)
		}
		return
	}
	for _, k := range l.AllowedRoutes.Kinds {
		switch {
		case own == "" || !isKind(k.Group, k.Kind, string(own)):
			l.invalidKinds = true
		case len(l.kinds) == 0:
			l.kinds = append(l.kinds, supported)
		}
	}
}

// readNamespaces sets the selector, as far as it can.
func (l *listener) readNamespaces() {
	switch l.from() {
	case gatewayv1.NamespacesFromAll:
		l.selector = labels.Everything()
	case gatewayv1.NamespacesFromSelector:
		if from := l.AllowedRoutes.Namespaces; from.Selector != nil {
			if s, err := metav1.LabelSelectorAsSelector(from.Selector); err == nil {
				l.selector, l.allowed = s, map[string]bool{}
			}
		}
	}
}

// allows says whether a route of a kind and namespace may attach to a listener of g.
func (c *computation) allows(g *gateway, l *listener, kind, namespace string) bool {
	if len(l.kinds) == 0 || string(l.kinds[0].Kind) != kind {
		return false
	}
	if l.selector == nil {
		return l.from() == gatewayv1.NamespacesFromSame && namespace == g.obj.Namespace
	}
	if l.allowed == nil {
		return true
	}
	allowed, known := l.allowed[namespace]
	if !known {
		of, exists := c.Namespace(namespace)
		allowed = exists && l.selector.Matches(labels.Set(of))
		l.allowed[namespace] = allowed
	}
	return allowed
}

// status is the listener's, given whether its Gateway is programmed. The message says why not.
func (l *listener) status(generation int64, programmed bool, why string) gatewayv1.ListenerStatus {
	accepted := condition(gatewayv1.ListenerConditionAccepted, true, gatewayv1.ListenerReasonAccepted,
		"the listener is valid", generation)
	if l.rejected.Reason != "" {
		accepted = condition(gatewayv1.ListenerConditionAccepted, false, l.rejected.Reason, l.rejected.Message, generation)
	}
	resolved := condition(gatewayv1.ListenerConditionResolvedRefs, true, gatewayv1.ListenerReasonResolvedRefs,
		"all references are resolved", generation)
	if l.invalidKinds {
		resolved = condition(gatewayv1.ListenerConditionResolvedRefs, false, gatewayv1.ListenerReasonInvalidRouteKinds,
			"allowedRoutes.kinds: a listener for TCP supports TCPRoute alone, and one for UDP UDPRoute alone", generation)
	}
	conflicted := condition(gatewayv1.ListenerConditionConflicted, false, gatewayv1.ListenerReasonNoConflicts,
		"no other listener has the port", generation)
	if l.conflicted {
		conflicted = condition(gatewayv1.ListenerConditionConflicted, true, gatewayv1.ListenerReasonProtocolConflict,
			l.conflict(), generation)
	}
	done := condition(gatewayv1.ListenerConditionProgrammed, true, gatewayv1.ListenerReasonProgrammed,
		"all nodes have programmed it", generation)
	switch {
	case !l.serves():
		done = condition(gatewayv1.ListenerConditionProgrammed, false, gatewayv1.ListenerReasonInvalid,
			"the listener is not served", generation)
	case !programmed:
		done = condition(gatewayv1.ListenerConditionProgrammed, false, gatewayv1.ListenerReasonPending, why, generation)
	}
	return gatewayv1.ListenerStatus{Name: l.Name, SupportedKinds: l.kinds, AttachedRoutes: l.attached,
		Conditions: []metav1.Condition{accepted, done, resolved, conflicted}}
}
