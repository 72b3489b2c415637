package routes

import (
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	gatewayv1 "sigs.k8s.io/gateway-api/apis/v1"
)

// dice makes objects as the API server could have them, and often with references to each other.
type dice struct{ *rand.Rand }

func pick[T any](d dice, of ...T) T { return of[d.IntN(len(of))] }

// maybe is a pointer to one of some values, or nil.
func maybe[T any](d dice, of ...T) *T {
	if d.IntN(3) == 0 {
		return nil
	}
	return new(pick(d, of...))
}

func (d dice) meta() metav1.ObjectMeta {
	m := metav1.ObjectMeta{Namespace: pick(d, "edge", "shop", "other", "gone"), Generation: d.Int64N(9) + 1,
		Name:              pick(d, "db", "a.b", "1", strings.Repeat("n", 253), fmt.Sprint("x", d.IntN(9))),
		CreationTimestamp: metav1.Unix(d.Int64N(3), 0)}
	m.UID = types.UID(m.Namespace + m.Name)
	return m
}

func (d dice) gateway() *Gateway {
	g := &Gateway{ObjectMeta: d.meta()}
	if d.IntN(9) == 0 {
		g.DeletionTimestamp = &g.CreationTimestamp
	}
	g.Spec.GatewayClassName = pick[gatewayv1.ObjectName](d, "verdict", "verdict", "else", "params", "gone")
	for i := range d.IntN(5) {
		l := gatewayv1.Listener{Name: gatewayv1.SectionName(fmt.Sprint("l", i)), Port: int32(d.IntN(4)),
			Protocol: pick[gatewayv1.ProtocolType](d, "TCP", "TCP", "UDP", "HTTP", "example.com/x")}
		if d.IntN(4) > 0 {
			l.AllowedRoutes = &gatewayv1.AllowedRoutes{Namespaces: &gatewayv1.RouteNamespaces{
				From: maybe[gatewayv1.FromNamespaces](d, "All", "All", "Same", "Selector", "Never"),
				Selector: maybe(d, metav1.LabelSelector{}, metav1.LabelSelector{MatchLabels: map[string]string{
					"team": "shop"}})}}
			for range d.IntN(3) {
				l.AllowedRoutes.Kinds = append(l.AllowedRoutes.Kinds, gatewayv1.RouteGroupKind{
					Group: maybe[gatewayv1.Group](d, gatewayv1.GroupName, "a.b"),
					Kind:  pick[gatewayv1.Kind](d, kindTCP, kindUDP, "HTTPRoute")})
			}
		}
		g.Spec.Listeners = append(g.Spec.Listeners, l)
	}
	for range max(0, d.IntN(6)-3) {
		a := SpecAddress{Routability: pick(d, "", RoutabilityCluster, "a.b/c")}
		a.Type = maybe[gatewayv1.AddressType](d, gatewayv1.IPAddressType, gatewayv1.IPAddressType, "Hostname")
		a.Value = pick(d, "", "203.0.113.9", "10.96.0.9", "fd00::9", "x")
		g.Spec.Addresses = append(g.Spec.Addresses, a)
	}
	if d.IntN(4) == 0 {
		g.Spec.Infrastructure = &gatewayv1.GatewayInfrastructure{Labels: map[gatewayv1.LabelKey]gatewayv1.LabelValue{
			"a": "b"}, ParametersRef: maybe(d, gatewayv1.LocalParametersReference{})}
	}
	return g
}

func (d dice) routeSpec() (spec gatewayv1.CommonRouteSpec, refs []gatewayv1.BackendRef) {
	for range d.IntN(4) {
		m := d.meta()
		spec.ParentRefs = append(spec.ParentRefs, gatewayv1.ParentReference{Name: gatewayv1.ObjectName(m.Name),
			Namespace: maybe(d, gatewayv1.Namespace(m.Namespace)), Port: maybe[int32](d, 1, 2, 3),
			SectionName: maybe[gatewayv1.SectionName](d, "", "", "l0", "l1"),
			Kind:        maybe[gatewayv1.Kind](d, "Gateway", "Gateway", "Service")})
	}
	for range d.IntN(4) {
		m := d.meta()
		ref := gatewayv1.BackendRef{Weight: maybe[int32](d, 0, 1, 1_000_000, -1)}
		ref.Name, ref.Namespace = gatewayv1.ObjectName(m.Name), maybe(d, gatewayv1.Namespace(m.Namespace))
		ref.Port, ref.Kind = maybe[int32](d, 1, 2), maybe[gatewayv1.Kind](d, "Service", "Service", "Bucket")
		refs = append(refs, ref)
	}
	return spec, refs
}

func (d dice) cluster() *cluster {
	c := newCluster()
	c.Bundles[0].Channel = pick(d, "standard", "experimental")
	c.add(&gatewayv1.GatewayClass{ObjectMeta: metav1.ObjectMeta{Name: "else"}})
	c.add(&gatewayv1.GatewayClass{ObjectMeta: metav1.ObjectMeta{Name: "params"}, Spec: gatewayv1.GatewayClassSpec{
		ControllerName: ControllerName, ParametersRef: maybe(d, *paramsRef("p"))}})
	c.configs[types.NamespacedName{Namespace: "edge", Name: "p"}] = map[string]string{
		"serviceType": pick(d, "ClusterIP", "LoadBalancer", "x")}
	for range d.IntN(4) {
		g := d.gateway()
		if !slices.ContainsFunc(c.Gateways, func(o *Gateway) bool { return o.Key() == g.Key() }) {
			c.add(g)
		}
	}
	for range d.IntN(6) {
		spec, refs := d.routeSpec()
		r := &gatewayv1.TCPRoute{ObjectMeta: d.meta(), Spec: gatewayv1.TCPRouteSpec{CommonRouteSpec: spec}}
		for range d.IntN(9)/8 + 1 {
			r.Spec.Rules = append(r.Spec.Rules, gatewayv1.TCPRouteRule{BackendRefs: refs})
		}
		if !slices.ContainsFunc(c.TCPRoutes, func(o *gatewayv1.TCPRoute) bool {
			return o.Namespace == r.Namespace && o.Name == r.Name
		}) {
			c.add(r)
		}
		spec, refs = d.routeSpec()
		c.add(&gatewayv1.UDPRoute{ObjectMeta: d.meta(), Spec: gatewayv1.UDPRouteSpec{CommonRouteSpec: spec,
			Rules: []gatewayv1.UDPRouteRule{{BackendRefs: refs}}}})
		s := &corev1.Service{ObjectMeta: d.meta(), Spec: corev1.ServiceSpec{
			Type: pick(d, corev1.ServiceTypeClusterIP, corev1.ServiceTypeClusterIP, corev1.ServiceTypeExternalName),
			Ports: []corev1.ServicePort{{Port: 1, Protocol: pick[corev1.Protocol](d, "", "UDP")},
				{Port: 2, Protocol: "TCP"}}}}
		s.Name = pick(d, "db", "x1", "x2", "db-verdict")
		c.add(s)
		c.add(&gatewayv1.ReferenceGrant{ObjectMeta: d.meta(), Spec: gatewayv1.ReferenceGrantSpec{
			From: []gatewayv1.ReferenceGrantFrom{{Group: gatewayv1.GroupName, Kind: pick[gatewayv1.Kind](d, kindTCP, kindUDP),
				Namespace: gatewayv1.Namespace(d.meta().Namespace)}},
			To: []gatewayv1.ReferenceGrantTo{{Kind: "Service", Name: maybe[gatewayv1.ObjectName](d, "db")}}}})
	}
	return c
}

// checkConditions fails if conditions are not as the API's definitions want them, and of one generation.
func checkConditions(t *testing.T, conditions []metav1.Condition, generation int64) {
	t.Helper()
	seen := map[string]bool{}
	for _, c := range conditions {
		if c.ObservedGeneration != generation || c.Reason == "" || c.Message == "" || len(c.Message) > 32768 || seen[c.Type] {
			t.Errorf("of generation %d: %+v", generation, conditions)
		}
		seen[c.Type] = true
	}
}

// checkPlan holds what is so of every plan.
func checkPlan(t *testing.T, c *cluster, p *Plan) {
	attached := map[string]int32{}
	for _, r := range p.Routes {
		for _, o := range r.Parents {
			checkConditions(t, o.Status.Conditions, r.Object.GetGeneration())
			if o.Waits != (o.Status.Conditions[0].Status == metav1.ConditionTrue) {
				t.Errorf("waits %v: %+v", o.Waits, o.Status)
			}
			if o.Waits {
				attached[o.Gateway.String()]++
			}
		}
	}
	for i := range p.Gateways {
		g := &p.Gateways[i]
		for _, s := range []GatewayStatus{g.Programmed, g.Waiting} {
			checkConditions(t, s.Conditions, g.Object.Generation)
			if len(s.Listeners) != len(g.Object.Spec.Listeners) {
				t.Errorf("%d statuses of listeners", len(s.Listeners))
			}
			for _, l := range s.Listeners {
				checkConditions(t, l.Conditions, g.Object.Generation)
				if l.AttachedRoutes > attached[g.Object.Key().String()] || l.SupportedKinds == nil {
					t.Errorf("%d routes are accepted: %+v", attached[g.Object.Key().String()], l)
				}
			}
		}
		if (g.Service == nil) != (g.Needs == nil) {
			t.Errorf("needs %v of %v", g.Needs, g.Service)
		}
		if g.Service == nil {
			continue
		}
		if of := asNodes(t, g).Backends; of == nil || len(of.Ports) > len(g.Service.Spec.Ports) {
			t.Errorf("nodes read %v", of)
		}
		if has := c.Service(g.ServiceName); has != nil && g.Programmed.Conditions[0].Status == metav1.ConditionTrue {
			if s, differs := MergeService(has, g.Service); differs {
				t.Errorf("there is something to write: %+v", s)
			}
		}
	}
}

// FuzzCompute: whatever the objects are, the statuses are well-formed, nodes read what is written for them, the order
// of objects means nothing, and nothing of the World is changed.
func FuzzCompute(f *testing.F) {
	for seed := range uint64(200) {
		f.Add(seed)
	}
	f.Fuzz(func(t *testing.T, seed uint64) {
		d := dice{rand.New(rand.NewPCG(seed, 0))}
		c := d.cluster()
		objects := func() string {
			text, err := json.Marshal([]any{c.Classes, c.Gateways, c.TCPRoutes, c.UDPRoutes, c.Grants})
			if err != nil {
				t.Fatal(err)
			}
			return string(text)
		}
		before := objects()
		p := c.compute()
		if objects() != before {
			t.Error("an object was changed")
		}
		checkPlan(t, c, p)
		lines := p.lines()
		d.Shuffle(len(c.Gateways), func(i, j int) { c.Gateways[i], c.Gateways[j] = c.Gateways[j], c.Gateways[i] })
		d.Shuffle(len(c.Grants), func(i, j int) { c.Grants[i], c.Grants[j] = c.Grants[j], c.Grants[i] })
		d.Shuffle(len(c.TCPRoutes), func(i, j int) { c.TCPRoutes[i], c.TCPRoutes[j] = c.TCPRoutes[j], c.TCPRoutes[i] })
		slices.Reverse(c.Classes)
		again := Compute(&c.World).lines()
		if slices.Sort(lines); !slices.Equal(lines, slices.Sorted(slices.Values(again))) {
			t.Errorf("in another order\n%s\nin place of\n%s", strings.Join(again, "\n"), strings.Join(lines, "\n"))
		}
	})
}
