package routes

import (
	"cmp"
	"fmt"
	"net/netip"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	gatewayv1 "sigs.k8s.io/gateway-api/apis/v1"

	"github.com/verdict-proxy/verdict/internal/system/clip"
)

// routabilitySentinel is what conformance tests ask for: it promises nothing.
const routabilitySentinel = "testing.x-k8s.io/sentinel"

// mostAddresses is how many addresses the API lets a Gateway ask for, and have.
const mostAddresses = 16

// addressRequest is one of a Gateway's spec.addresses.
type addressRequest struct {
	// value is the zero value for any address.
	value netip.Addr
	// routability is empty, RoutabilityCluster or routabilitySentinel.
	routability string
	// text names the request in messages; impossible is why nothing can satisfy it, or empty.
	text, impossible string
	// particular says that the Gateway names an address, even if it is none.
	particular bool
}

// clusterIP says whether the request is for a cluster IP.
func (r *addressRequest) clusterIP() bool { return r.routability == RoutabilityCluster }

// readAddresses reads what a Gateway asks for. The second result says what type of address is not supported; it is
// empty if all are.
func readAddresses(g *Gateway) ([]addressRequest, string) {
	var list []addressRequest
	for i := range g.Spec.Addresses {
		a := &g.Spec.Addresses[i]
		text := fmt.Sprintf("spec.addresses[%d] (%s)", i, clip.Visible(a.Value, clip.Quoted))
		if t := or(a.Type, gatewayv1.IPAddressType); t != gatewayv1.IPAddressType {
			return nil, fmt.Sprintf("%s: type %s is not supported: only IPAddress is", text,
				clip.Visible(string(t), clip.Quoted))
		}
		r := addressRequest{text: text, routability: a.Routability, particular: a.Value != ""}
		if a.Value != "" {
			ip, err := netip.ParseAddr(a.Value)
			if err != nil || ip.Zone() != "" {
				r.impossible = "it is not an IP address"
			}
			r.value = ip.Unmap()
		}
		switch a.Routability {
		case "", RoutabilityCluster, routabilitySentinel:
		default:
			r.impossible = fmt.Sprintf("routability %s is not supported", clip.Visible(a.Routability, clip.Quoted))
		}
		list = append(list, r)
	}
	return list, ""
}

// address is one that a Service has.
type address struct {
	ip        netip.Addr
	hostname  string
	clusterIP bool
	taken     bool
}

// addressesOf returns what the Gateway's Service has.
func addressesOf(s *corev1.Service) []address {
	var list []address
	add := func(text string, clusterIP bool) {
		a := address{clusterIP: clusterIP}
		var err error
		a.ip, err = netip.ParseAddr(text)
		if a.ip = a.ip.Unmap(); err == nil && !slices.Contains(list, a) {
			list = append(list, a)
		}
	}
	for _, ip := range s.Spec.ClusterIPs {
		add(ip, true)
	}
	for _, in := range s.Status.LoadBalancer.Ingress {
		if in.IP != "" {
			add(in.IP, false)
		} else if a := (address{hostname: in.Hostname}); in.Hostname != "" && !slices.Contains(list, a) {
			list = append(list, a)
		}
	}
	return list
}

// assign gives each request an address of the Service, those with a value first. Without requests, all addresses of the
// Service's type are the Gateway's. It returns them, and why one is missing.
func (g *gateway) assign() ([]StatusAddress, gatewayReason) {
	var given []StatusAddress
	var list []address
	if g.live != nil {
		list = addressesOf(g.live)
	}
	inCluster := g.serviceType() == corev1.ServiceTypeClusterIP
	if len(g.requests) == 0 {
		for i := range list {
			if list[i].clusterIP == inCluster && len(given) < mostAddresses {
				given = append(given, g.statusAddress(&list[i], ""))
			}
		}
		return given, g.missing(len(given))
	}
	found := make([]*address, len(g.requests))
	for _, exact := range []bool{true, false} {
		for i := range g.requests {
			if r := &g.requests[i]; r.impossible == "" && r.value.IsValid() == exact {
				found[i] = r.find(list, inCluster)
			}
		}
	}
	var open []*addressRequest
	for i, a := range found {
		if a == nil {
			open = append(open, &g.requests[i])
		} else {
			given = append(given, g.statusAddress(a, g.requests[i].routability))
		}
	}
	return given, g.unsatisfied(open)
}

// find takes an address for a request.
func (r *addressRequest) find(list []address, inCluster bool) *address {
	for i := range list {
		a := &list[i]
		if !a.taken && a.ip.IsValid() && a.clusterIP == (inCluster || r.clusterIP()) &&
			(!r.value.IsValid() || r.value == a.ip) {
			a.taken = true
			return a
		}
	}
	return nil
}

func (g *gateway) statusAddress(a *address, routability string) StatusAddress {
	s := StatusAddress{GatewayStatusAddress: gatewayv1.GatewayStatusAddress{
		Type: new(gatewayv1.IPAddressType), Value: a.ip.String()}}
	if a.hostname != "" {
		s.Type, s.Value = new(gatewayv1.HostnameAddressType), a.hostname
	}
	if a.clusterIP {
		routability = RoutabilityCluster
	}
	if g.routability {
		s.Routability = &routability
	}
	return s
}

// missing is why a Gateway that asks for no address and has some cannot be programmed.
func (g *gateway) missing(has int) (why gatewayReason) {
	if has > 0 {
		return why
	}
	why.Reason = gatewayv1.GatewayReasonAddressNotAssigned
	why.Message = fmt.Sprintf("the Service %s has no address yet", g.serviceName)
	if g.serviceType() == corev1.ServiceTypeLoadBalancer {
		why.Message += ": something in the cluster must give Services of type LoadBalancer theirs"
	}
	return why
}

// unsatisfied is why a Gateway some of whose requests have no address cannot be programmed. The API has one reason for
// an address that a Gateway names, and its version 1.7 another one if that is in the cluster.
func (g *gateway) unsatisfied(open []*addressRequest) (why gatewayReason) {
	var list []string
	for _, r := range open {
		if r.particular && !r.clusterIP() {
			why.Reason = gatewayv1.GatewayReasonAddressNotUsable
		}
		why.Reason = cmp.Or(why.Reason, gatewayv1.GatewayReasonAddressNotAssigned)
		problem := fmt.Sprintf("the Service %s does not have it", g.serviceName)
		if r.particular && (r.clusterIP() || g.serviceType() == corev1.ServiceTypeClusterIP) {
			problem += "; the cluster IP of a Service never changes"
		}
		list = append(list, r.text+": "+cmp.Or(r.impossible, problem))
	}
	why.Message = strings.Join(list, "; ")
	return why
}

// addressesAssigned is the condition of version 1.7. A Gateway that has some of its addresses is as one that has none,
// as the API lets us choose: clients would look for it where it is not.
func (g *gateway) addressesAssigned() metav1.Condition {
	if g.noAddress.Reason != "" {
		return condition(gatewayConditionAddressesAssigned, false, gatewayReasonNotAssigned, g.noAddress.Message,
			g.obj.Generation)
	}
	return condition(gatewayConditionAddressesAssigned, true, gatewayReasonAssigned, "all addresses are assigned",
		g.obj.Generation)
}

// What version 1.7 has beside.
const (
	gatewayConditionAddressesAssigned gatewayv1.GatewayConditionType   = "AddressesAssigned"
	gatewayReasonAssigned             gatewayv1.GatewayConditionReason = "AddressesAssigned"
	gatewayReasonNotAssigned          gatewayv1.GatewayConditionReason = "NotAssigned"
)
