package gateway

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	gatewayv1 "sigs.k8s.io/gateway-api/apis/v1"
	"sigs.k8s.io/yaml"

	"github.com/verdict-proxy/verdict/internal/gateway/routes"
	"github.com/verdict-proxy/verdict/internal/system/testkit"
)

const edgeDB = `kind: Gateway
metadata: {namespace: edge, name: db}
spec:
  gatewayClassName: verdict
  listeners: [{name: db, port: 5432, protocol: TCP, allowedRoutes: {namespaces: {from: All}}}]`

// shopDB is a route with two weights.
func shopDB(first, second int) string {
	return fmt.Sprintf(`kind: TCPRoute
metadata: {namespace: shop, name: db}
spec:
  parentRefs: [{namespace: edge, name: db}]
  rules: [{backendRefs: [{name: db, port: 5432, weight: %d}, {name: db-next, port: 5432, weight: %d}]}]`, first, second)
}

// is reports whether an object has a condition: of a Gateway, or of a route's only parent.
func (r *rig) is(key, condition string, want metav1.ConditionStatus) bool {
	c := r.condition(key, condition)
	return c != nil && c.Status == want
}

func (r *rig) condition(key, condition string) *metav1.Condition {
	var o withConditions
	r.get(key, &o)
	return o.condition(condition)
}

// withConditions is any object of Gateway API.
type withConditions struct {
	Metadata metav1.ObjectMeta
	Status   struct {
		Conditions []metav1.Condition
		Parents    []struct{ Conditions []metav1.Condition }
	}
}

// condition returns a condition of the object as it is; nil if there is none, or one of an older object.
func (o *withConditions) condition(condition string) *metav1.Condition {
	for _, p := range o.Status.Parents {
		o.Status.Conditions = append(o.Status.Conditions, p.Conditions...)
	}
	c := find(o.Status.Conditions, condition)
	if c != nil && c.ObservedGeneration != o.Metadata.Generation {
		return nil
	}
	return c
}

// eventually waits until all objects have their conditions True.
func (r *rig) eventually(t *testing.T, condition string, keys ...string) {
	t.Helper()
	for _, k := range keys {
		testkit.Eventually(t, 30*time.Second, k+" is "+condition, func() bool {
			return r.is(k, condition, metav1.ConditionTrue)
		}, func() string { return fmt.Sprintf("%+v\n%v", r.condition(k, condition), r.objects[k]) })
	}
}

// calm waits until nothing was written for a while, and returns what was since the last call, sorted.
func (r *rig) calm() []string {
	var all []string
	for quiet := 0; quiet < 10; quiet++ {
		time.Sleep(50 * time.Millisecond)
		if w := r.written(); len(w) > 0 {
			all, quiet = append(all, w...), 0
		}
	}
	slices.Sort(all)
	return all
}

const (
	theGateway = "gateways/edge/db"
	theRoute   = "tcproutes/shop/db"
	theService = "services/edge/db-verdict"
	theSlice   = "endpointslices/edge/db-verdict-ipv"
)

// expect waits until so many writes were made as are wanted, and compares them with all that come.
func (r *rig) expect(t *testing.T, what string, want ...string) {
	t.Helper()
	got := r.calm()
	for end := time.Now().Add(20 * time.Second); len(got) < len(want) && time.Now().Before(end); {
		got = append(got, r.calm()...)
	}
	slices.Sort(got)
	if slices.Sort(want); !slices.Equal(got, want) {
		t.Errorf("%s: written was\n  %s\nwant\n  %s", what, strings.Join(got, "\n  "), strings.Join(want, "\n  "))
	}
}

// TestProgrammed: a Gateway becomes a Service with its backends; statuses are written once, when all nodes have it, and
// so they are after a change of weights. A process that leads next writes nothing.
func TestProgrammed(t *testing.T) {
	r := newRig(t)
	r.put(t, edgeDB)
	r.put(t, shopDB(80, 20))
	r.lead(t)
	r.eventually(t, "Programmed", theGateway)
	r.eventually(t, "Accepted", theRoute)
	r.eventually(t, ProgrammedCondition, theRoute)
	r.expect(t, "at first", "PATCH gatewayclasses//verdict/status", "POST "+theService,
		"PATCH "+theService+"/status", "PATCH "+theGateway+"/status", "PATCH "+theRoute+"/status", "POST "+theSlice+"4")
	var s corev1.Service
	if !r.get(theService, &s) || !strings.Contains(s.Annotations["verdict-proxy.github.io/backends"], `"weight":80`) {
		t.Errorf("the Service is %+v", s)
	}
	if c := find(s.Status.Conditions, "verdict-proxy.github.io/BackendsGranted"); c == nil ||
		c.Message != "shop/db shop/db-next" {
		t.Errorf("granted are %+v", s.Status.Conditions)
	}
	var g routes.Gateway
	if !r.get(theGateway, &g) || len(g.Status.Addresses) != 1 || g.Status.Addresses[0].Value != s.Spec.ClusterIP ||
		g.Status.Listeners[0].AttachedRoutes != 1 {
		t.Errorf("the Gateway's status is %+v", g.Status)
	}

	r.put(t, shopDB(50, 50))
	r.eventually(t, "Accepted", theRoute)
	r.expect(t, "after other weights", "PATCH "+theService, "PATCH "+theRoute+"/status")

	r.stop()
	r.nodes.set("edge/db-verdict", true)
	r.lead(t)
	testkit.Eventually(t, 10*time.Second, "it knows the Gateway", func() bool {
		return r.controller.Stats().Programmed == 1
	})
	r.expect(t, "by the next that leads")
}

// TestLaggard: within patience nothing is said; then statuses name the node that lacks the Service, and are written
// once more when it has it. Routes that have not changed say nothing.
func TestLaggard(t *testing.T) {
	r := newRig(t)
	r.put(t, edgeDB)
	r.put(t, shopDB(1, 1))
	r.put(t, strings.Replace(strings.Replace(edgeDB, "name: db}", "name: other}", 1), "5432", "5433", 1))
	r.nodes.set("edge/db-verdict", true)
	begin := time.Now()
	r.lead(t)
	r.eventually(t, "Programmed", "gateways/edge/other")
	if took := time.Since(begin); took > patience {
		t.Errorf("a Gateway waited %v for another one", took)
	}
	testkit.Eventually(t, 30*time.Second, "the Gateway says that it waits", func() bool {
		return r.is(theGateway, "Programmed", metav1.ConditionFalse) && r.is(theRoute, "Accepted", metav1.ConditionTrue) &&
			r.is(theRoute, ProgrammedCondition, metav1.ConditionFalse)
	})
	if took := time.Since(begin); took < patience {
		t.Errorf("it says so after %v", took)
	}
	testkit.Eventually(t, 5*time.Second, "it names the node", func() bool {
		return strings.Contains(r.condition(theGateway, "Programmed").Message, "node-2")
	})
	r.calm()
	r.nodes.set("edge/db-verdict", false)
	r.eventually(t, "Programmed", theGateway)
	r.eventually(t, ProgrammedCondition, theRoute)
	r.expect(t, "once the node has it", "PATCH "+theGateway+"/status", "PATCH "+theRoute+"/status")

	r.put(t, strings.Replace(shopDB(1, 1), "name: db}", "name: later}", 1)) // its listener has a route
	r.calm()
	r.nodes.set("edge/db-verdict", true)
	r.put(t, shopDB(1, 2))
	testkit.Eventually(t, 30*time.Second, "the route says that it waits", func() bool {
		return r.is(theRoute, ProgrammedCondition, metav1.ConditionFalse)
	})
	for _, w := range r.calm() {
		if strings.Contains(w, "later") {
			t.Errorf("a route that has not changed was written: %s", w)
		}
	}
}

// TestGrant: what is granted is written before the backends that need it, and what is granted no more after them.
func TestGrant(t *testing.T) {
	r := newRig(t)
	r.put(t, edgeDB)
	r.put(t, strings.NewReplacer("namespace: shop", "namespace: edge", "[{name: db", "[{namespace: shop, name: db",
		"{name: db-next", "{namespace: shop, name: db-next").Replace(shopDB(1, 1)))
	const route = "tcproutes/edge/db"
	r.lead(t)
	r.eventually(t, "Accepted", route)
	if !r.is(route, "ResolvedRefs", metav1.ConditionFalse) {
		t.Error("a backend of another namespace counts without a grant")
	}
	r.calm()
	r.put(t, `kind: ReferenceGrant
metadata: {namespace: shop, name: edge}
spec:
  from: [{group: gateway.networking.k8s.io, kind: TCPRoute, namespace: edge}]
  to: [{group: "", kind: Service}]`)
	r.eventually(t, "ResolvedRefs", route)
	if w := r.ofServices(); !slices.Equal(w, []string{"PATCH " + theService + "/status", "PATCH " + theService}) {
		t.Errorf("after the grant: %q", w)
	}
	r.calm()
	other := strings.NewReplacer("namespace: shop", "namespace: edge", "[{name: db, ", "[{namespace: shop, name: db, ",
		", {name: db-next, port: 5432, weight: 1}", "")
	r.put(t, other.Replace(shopDB(1, 1)))
	r.eventually(t, "Accepted", route)
	r.calm()
	r.put(t, strings.Replace(other.Replace(shopDB(1, 1)), "name: db, port", "name: db-next, port", 1))
	r.eventually(t, "Accepted", route)
	var w []string
	testkit.Eventually(t, 10*time.Second, "the Service is written", func() bool {
		w = append(w, r.ofServices()...)
		return len(w) >= 3
	})
	if !slices.Equal(w, []string{"PATCH " + theService + "/status", "PATCH " + theService,
		"PATCH " + theService + "/status"}) {
		t.Errorf("after one backend in place of another: %q", w)
	}
	r.calm()
	r.drop("referencegrants/shop/edge")
	testkit.Eventually(t, 10*time.Second, "nothing is granted", func() bool {
		var s corev1.Service
		return r.get(theService, &s) && len(s.Status.Conditions) == 0
	})
	if w := r.calm(); !slices.Contains(w, "PATCH "+theService) {
		t.Errorf("after the grant is gone: %q", w)
	}
}

// ofServices returns the writes of Services so far, in their order.
func (r *rig) ofServices() (list []string) {
	for _, w := range r.written() {
		if strings.Contains(w, "services/") {
			list = append(list, w)
		}
	}
	return list
}

// TestRejectedService: if the API server does not want a Gateway's Service, the Gateway says so, is tried rarely, and
// others are served.
func TestRejectedService(t *testing.T) {
	r := newRig(t)
	r.fail = func(method, path string) int {
		if method == "POST" && strings.HasSuffix(path, "/namespaces/shop/services") {
			return 422
		}
		return 0
	}
	r.put(t, edgeDB)
	r.put(t, strings.Replace(edgeDB, "namespace: edge", "namespace: shop", 1))
	r.lead(t)
	r.eventually(t, "Programmed", theGateway)
	testkit.Eventually(t, 10*time.Second, "the Gateway says that its Service is rejected", func() bool {
		c := r.condition("gateways/shop/db", "Programmed")
		return c != nil && strings.Contains(c.Message, "rejects the Service shop/db-verdict")
	})
	if n := r.controller.Stats().Writes[Write{services, "rejected"}]; n == 0 || n > 8 {
		t.Errorf("it was tried %d times", n)
	}
}

// TestOtherClass: a Gateway that has another controller now loses its Service and our conditions; one whose class is
// gone keeps all.
func TestOtherClass(t *testing.T) {
	r := newRig(t)
	r.put(t, edgeDB)
	r.put(t, shopDB(1, 1))
	r.lead(t)
	r.eventually(t, "Accepted", theRoute)
	r.calm()
	r.drop("gatewayclasses//verdict")
	testkit.Eventually(t, 10*time.Second, "it knows that the class is gone", func() bool {
		return r.controller.Stats().Objects[classes] == 0
	})
	time.Sleep(4 * settle)
	if w := r.ofServices(); len(w) > 0 {
		t.Errorf("without the class: %q", w)
	}
	r.put(t, `kind: GatewayClass
metadata: {name: other}
spec: {controllerName: example.org/other}`)
	r.put(t, strings.Replace(edgeDB, "gatewayClassName: verdict", "gatewayClassName: other", 1))
	testkit.Eventually(t, 10*time.Second, "the Service is gone", func() bool {
		return !r.get(theService, &corev1.Service{})
	})
	var g routes.Gateway
	if !r.get(theGateway, &g) || len(g.Status.Conditions)+len(g.Status.Addresses)+len(g.Status.Listeners) > 0 {
		t.Errorf("of our status is left %+v", g.Status)
	}
	var route gatewayv1.TCPRoute
	if r.calm(); !r.get(theRoute, &route) || len(route.Status.Parents) > 0 {
		t.Errorf("of the route's status is left %+v", route.Status)
	}
}

// endpoints are the addresses in the Gateway's EndpointSlice of a family, 4 or 6, and who owns it.
func (r *rig) endpoints(family string) (addresses []string, owner types.UID) {
	var s discoveryv1.EndpointSlice
	r.get(theSlice+family, &s)
	for _, e := range s.Endpoints {
		addresses = append(addresses, e.Addresses...)
	}
	if o := metav1.GetControllerOfNoCopy(&s); o != nil {
		owner = o.UID
	}
	return addresses, owner
}

// TestSlices: the Gateway's Service has EndpointSlices with the cluster IPs of its backends, as they come and go, and
// what somebody else writes into them does not stay. So it is if answers to writes come after the events that follow.
func TestSlices(t *testing.T) {
	for _, late := range []time.Duration{0, 300 * time.Millisecond} {
		t.Run(late.String(), func(t *testing.T) { testSlices(t, late) })
	}
}

func testSlices(t *testing.T, late time.Duration) {
	r := newRig(t)
	r.late = late
	r.put(t, edgeDB)
	r.put(t, `kind: Service
metadata: {namespace: shop, name: db}
spec: {clusterIP: 10.96.0.8, clusterIPs: [10.96.0.8, "fd00::8"], ports: [{port: 5432, protocol: TCP}]}`)
	r.put(t, shopDB(1, 0))
	r.lead(t)
	has := func(what, four, six string) {
		t.Helper()
		testkit.Eventually(t, 20*time.Second, what, func() bool {
			addresses4, owner4 := r.endpoints("4")
			addresses6, owner6 := r.endpoints("6")
			var s corev1.Service
			return strings.Join(addresses4, " ") == four && strings.Join(addresses6, " ") == six &&
				r.get(theService, &s) && owner4 == s.UID && owner6 == s.UID
		}, func() string { return fmt.Sprintln(r.endpoints("4")) + fmt.Sprintln(r.endpoints("6")) })
	}
	has("there are slices", "10.96.0.8", "fd00::8")
	var next corev1.Service
	r.get("services/shop/db-next", &next)
	r.put(t, shopDB(1, 1))
	has("another backend is in them", "10.96.0.8 "+next.Spec.ClusterIP, "fd00::8")
	var s map[string]any
	r.get(theSlice+"4", &s)
	s["endpoints"] = []any{map[string]any{"addresses": []any{"192.0.2.66"}}}
	text, err := yaml.Marshal(s)
	if err != nil {
		t.Fatal(err)
	}
	r.put(t, string(text))
	has("what another wrote is gone", "10.96.0.8 "+next.Spec.ClusterIP, "fd00::8")
	r.drop("services/shop/db")
	has("a backend is gone", next.Spec.ClusterIP, "")
	r.drop(theService) // nobody collects garbage here
	has("the Service is another one", next.Spec.ClusterIP, "")
	r.drop("services/shop/db-next")
	has("all are refused", "", "")
}

// TestAgain: a Gateway that is deleted and made again takes over the Service that it had, with its address. One that is
// being deleted it leaves alone, and says so.
func TestAgain(t *testing.T) {
	r := newRig(t)
	r.put(t, edgeDB)
	r.put(t, shopDB(1, 1))
	r.lead(t)
	r.eventually(t, "Programmed", theGateway)
	var was, is corev1.Service
	r.get(theService, &was)
	r.drop(theGateway)
	r.put(t, edgeDB)
	r.eventually(t, "Programmed", theGateway)
	r.eventually(t, "Accepted", theRoute)
	var g routes.Gateway
	if !r.get(theGateway, &g) || !r.get(theService, &is) || is.UID != was.UID || !metav1.IsControlledBy(&is, &g) ||
		metav1.IsControlledBy(&was, &g) || len(is.OwnerReferences) != 1 || len(g.Status.Addresses) != 1 {
		t.Errorf("the Service became %+v, the status %+v", is.ObjectMeta, g.Status)
	}
	r.drop(theGateway)
	r.mu.Lock()
	r.objects[theService]["metadata"].(map[string]any)["deletionTimestamp"] = "2026-11-27T12:00:00Z"
	r.store(theService, "MODIFIED", r.objects[theService])
	r.mu.Unlock()
	r.put(t, edgeDB)
	testkit.Eventually(t, 10*time.Second, "it says that it waits", func() bool {
		c := r.condition(theGateway, "Programmed")
		return c != nil && c.Reason == "Pending" && strings.Contains(c.Message, "is being deleted")
	})
	r.drop(theService)
	r.eventually(t, "Programmed", theGateway)
}
