package routes

import (
	"strings"
	"testing"
)

// The objects that most cases have: a Gateway for everybody's TCP, a route to it, and Services.
const (
	gatewayDB = `
kind: Gateway
metadata: {namespace: edge, name: db}
spec:
  gatewayClassName: verdict
  listeners:
  - {name: db, protocol: TCP, port: 5432, allowedRoutes: {namespaces: {from: All}}}
---
`
	routeDB = `
kind: TCPRoute
metadata: {namespace: shop, name: db}
spec:
  parentRefs: [{namespace: edge, name: db}]
  rules: [{backendRefs: [{name: db, port: 5432}]}]
---
`
	services = `
kind: Service
metadata: {namespace: shop, name: db}
spec: {clusterIP: 10.96.0.1, ports: [{name: pg, port: 5432}, {name: dns, port: 53, protocol: UDP}]}
---
kind: Service
metadata: {namespace: edge, name: near}
spec: {clusterIP: 10.96.0.2, ports: [{port: 5432}]}
---
kind: Service
metadata: {namespace: shop, name: headless}
spec: {clusterIP: None, ports: [{port: 5432}]}
---
kind: Service
metadata: {namespace: shop, name: outside}
spec: {type: ExternalName, externalName: example.com, ports: [{port: 5432}]}
---
kind: Service
metadata: {namespace: shop, name: foreign, labels: {service.kubernetes.io/service-proxy-name: other}}
spec: {clusterIP: 10.96.0.3, ports: [{port: 5432}]}
---
`
)

// route is a TCPRoute of shop with references to parents and to backends, in YAML's flow style.
func routeYAML(name, parents, backends string) string {
	return "kind: TCPRoute\nmetadata: {namespace: shop, name: " + name + "}\nspec:\n  parentRefs: [" + parents +
		"]\n  rules: [{backendRefs: [" + backends + "]}]\n---\n"
}

// gatewayYAML is a Gateway of edge with listeners, and with more fields of its spec.
func gatewayYAML(name, listeners string, more ...string) string {
	return "kind: Gateway\nmetadata: {namespace: edge, name: " + name + "}\nspec:\n  gatewayClassName: verdict\n" +
		"  listeners: [" + listeners + "]\n  " + strings.Join(more, "\n  ") + "\n---\n"
}

const (
	toDB     = "{namespace: edge, name: db}"
	dbOfShop = "{name: db, port: 5432}"
	tcp5432  = "{name: db, protocol: TCP, port: 5432, allowedRoutes: {namespaces: {from: All}}}"
)

// rules are cases of the API's rules: the objects, and lines of the plan.
var rules = []struct {
	name, objects string
	want          []string
}{
	{"served", gatewayDB + routeDB + services, []string{
		"class verdict: good", "gateway db: good", "address db: IPAddress 203.0.113.7 unsaid",
		"listener db/db: good [TCPRoute] 1", "service db: LoadBalancer [tcp-5432=5432/TCP]",
		`backends db: {"for":"Gateway edge/db","ports":[{"port":"tcp-5432","listener":"db","route":"TCPRoute shop/db",` +
			`"to":[{"service":"shop/db","port":5432,"weight":1}]}]}`,
		"granted db: shop/db", "needs db: [edge/db-verdict shop/db]", "route db of db/: good"}},
	{"no routes", gatewayDB, []string{"gateway db: good", "listener db/db: good [TCPRoute] 0",
		`backends db: {"for":"Gateway edge/db"}`, "granted db: ", "needs db: [edge/db-verdict]"}},
	{"weights, and what is refused", gatewayDB + services + routeYAML("db", toDB,
		"{name: db, port: 5432, weight: 80}, {name: nope, port: 1, weight: 10}, {name: db, port: 5432, weight: 0}"),
		[]string{`backends db: {"for":"Gateway edge/db","ports":[{"port":"tcp-5432","listener":"db",` +
			`"route":"TCPRoute shop/db","to":[{"service":"shop/db","port":5432,"weight":80},` +
			`{"weight":10,"refused":"the Service shop/nope does not exist"},` +
			`{"service":"shop/db","port":5432,"weight":0}]}]}`,
			"route db of db/: ResolvedRefs=False/BackendNotFound", "listener db/db: good [TCPRoute] 1"}},
	{"a weight of 0 alone", gatewayDB + services + routeYAML("db", toDB, "{name: db, port: 5432, weight: 0}"),
		[]string{"route db of db/: good", "needs db: [edge/db-verdict]", "granted db: shop/db"}},

	// Listeners.
	{"UDP", gatewayYAML("db", "{name: dns, protocol: UDP, port: 53, allowedRoutes: {namespaces: {from: All}}}") +
		services +
		strings.Replace(routeYAML("dns", toDB, "{name: db, port: 53}"), "TCPRoute", "UDPRoute", 1),
		[]string{"service db: LoadBalancer [udp-53=53/UDP]", "listener db/dns: good [UDPRoute] 1",
			"route dns of db/: good"}},
	{"TCP and UDP on one port", gatewayYAML("db", "{name: a, protocol: TCP, port: 53}, "+
		"{name: b, protocol: UDP, port: 53}"),
		[]string{"gateway db: good", "service db: LoadBalancer [tcp-53=53/TCP udp-53=53/UDP]"}},
	{"unsupported protocol alone", gatewayYAML("db", "{name: web, protocol: HTTP, port: 80}") +
		routeYAML("db", toDB, dbOfShop),
		[]string{"gateway db: Accepted=False/ListenersNotValid Programmed=False/Invalid",
			"listener db/web: Accepted=False/UnsupportedProtocol Programmed=False/Invalid [] 0",
			"route db of db/: Accepted=False/NotAllowedByListeners ResolvedRefs=False/BackendNotFound", "no service db"}},
	{"unsupported protocol beside", gatewayYAML("db", tcp5432+", {name: web, protocol: HTTP, port: 80}"),
		[]string{"gateway db: Accepted=True/ListenersNotValid", "listener db/db: good [TCPRoute] 0",
			"listener db/web: Accepted=False/UnsupportedProtocol Programmed=False/Invalid [] 0",
			"service db: LoadBalancer [tcp-5432=5432/TCP]"}},
	{"conflict with HTTP", gatewayYAML("db", tcp5432+", {name: web, protocol: HTTP, port: 5432}, "+
		"{name: ok, protocol: TCP, port: 1}"),
		[]string{"gateway db: Accepted=True/ListenersNotValid", "service db: LoadBalancer [tcp-1=1/TCP]",
			"listener db/db: Accepted=False/PortUnavailable Programmed=False/Invalid Conflicted=True/ProtocolConflict " +
				"[TCPRoute] 0",
			"listener db/web: Accepted=False/UnsupportedProtocol Programmed=False/Invalid " +
				"Conflicted=True/ProtocolConflict [] 0"}},
	{"conflict of all", gatewayYAML("db", tcp5432+", {name: too, protocol: TCP, port: 5432}") + routeDB + services,
		[]string{"gateway db: Accepted=False/ListenersNotValid Programmed=False/Invalid",
			"route db of db/: Accepted=False/NoReadyListeners", "no service db"}},
	{"conflict of UDP", gatewayYAML("db", "{name: a, protocol: UDP, port: 53}, {name: b, protocol: UDP, port: 53}"),
		[]string{"listener db/b: Accepted=False/PortUnavailable Programmed=False/Invalid Conflicted=True/" +
			"ProtocolConflict [UDPRoute] 0"}},
	{"HTTP and HTTPS do not conflict here", gatewayYAML("db", "{name: a, protocol: HTTP, port: 80, hostname: a.b}, "+
		"{name: b, protocol: HTTP, port: 80, hostname: b.b}"),
		[]string{"listener db/a: Accepted=False/UnsupportedProtocol Programmed=False/Invalid [] 0"}},
	{"kinds, none supported", gatewayYAML("db", "{name: db, protocol: TCP, port: 1, allowedRoutes: "+
		"{kinds: [{kind: HTTPRoute}, {group: other.io, kind: TCPRoute}]}}") + routeDB,
		[]string{"gateway db: Programmed=False/Invalid", "no service db",
			"listener db/db: Programmed=False/Invalid ResolvedRefs=False/InvalidRouteKinds [] 0",
			"route db of db/: Accepted=False/NotAllowedByListeners ..."}},
	{"kinds, one supported", gatewayYAML("db", "{name: db, protocol: TCP, port: 1, allowedRoutes: {namespaces: "+
		"{from: All}, kinds: [{kind: UDPRoute}, {kind: TCPRoute}, {kind: TCPRoute}]}}") + routeDB + services,
		[]string{"gateway db: good", "listener db/db: ResolvedRefs=False/InvalidRouteKinds [TCPRoute] 1",
			"route db of db/: good"}},

	// Namespaces of routes.
	{"same namespace is the default", gatewayYAML("db", "{name: db, protocol: TCP, port: 5432}") + routeDB + services,
		[]string{"route db of db/: Accepted=False/NotAllowedByListeners", "listener db/db: good [TCPRoute] 0"}},
	{"same namespace", gatewayYAML("db", "{name: db, protocol: TCP, port: 5432}") + services +
		strings.Replace(routeYAML("db", "{name: db}", "{name: near, port: 5432}"), "shop", "edge", 1),
		[]string{"route db of db/: good", "listener db/db: good [TCPRoute] 1", "granted db: ",
			"needs db: [edge/db-verdict edge/near]", `backends db: {"for":"Gateway edge/db","ports":[{"port":"tcp-5432",` +
				`"listener":"db","route":"TCPRoute edge/db","to":[{"service":"near","port":5432,"weight":1}]}]}`}},
	{"selector", gatewayYAML("db", "{name: db, protocol: TCP, port: 5432, allowedRoutes: {namespaces: "+
		"{from: Selector, selector: {matchLabels: {team: shop}}}}}") + routeDB + services +
		strings.Replace(routeYAML("not", toDB, dbOfShop), "shop", "other", 1),
		[]string{"route db of db/: good", "route not of db/: Accepted=False/NotAllowedByListeners ..."}},
	{"selector of an unknown namespace", gatewayYAML("db", "{name: db, protocol: TCP, port: 5432, allowedRoutes: "+
		"{namespaces: {from: Selector, selector: {}}}}") + strings.Replace(routeDB, "shop", "gone", 1),
		[]string{"route db of db/: Accepted=False/NotAllowedByListeners ..."}},
	{"selector that is missing, or wrong", gatewayYAML("db", "{name: a, protocol: TCP, port: 1, allowedRoutes: "+
		"{namespaces: {from: Selector}}}, {name: b, protocol: TCP, port: 2, allowedRoutes: {namespaces: "+
		"{from: Selector, selector: {matchExpressions: [{key: a, operator: Wrong}]}}}}") + routeDB,
		[]string{"gateway db: Accepted=False/ListenersNotValid ...",
			"listener db/a: Accepted=False/UnsupportedValue Programmed=False/Invalid [TCPRoute] 0",
			"listener db/b: Accepted=False/UnsupportedValue Programmed=False/Invalid [TCPRoute] 0"}},
	{"a word of tomorrow", gatewayYAML("db", "{name: a, protocol: TCP, port: 1, allowedRoutes: {namespaces: "+
		"{from: Nearby}}}") + strings.Replace(routeDB, "shop", "edge", 1),
		[]string{"route db of db/: Accepted=False/NotAllowedByListeners ...",
			"listener db/a: Accepted=False/UnsupportedValue Programmed=False/Invalid [TCPRoute] 0"}},

	// References to parents.
	{"sectionName", gatewayYAML("db", tcp5432+", {name: two, protocol: TCP, port: 2, allowedRoutes: "+
		"{namespaces: {from: All}}}") + services + routeYAML("db", "{namespace: edge, name: db, sectionName: two}", dbOfShop),
		[]string{"route db of db/two: good", "listener db/db: good [TCPRoute] 0", "listener db/two: good [TCPRoute] 1"}},
	{"port", gatewayYAML("db", tcp5432+", {name: two, protocol: TCP, port: 2, allowedRoutes: "+
		"{namespaces: {from: All}}}") + services + routeYAML("db", "{namespace: edge, name: db, port: 2}", dbOfShop),
		[]string{"route db of db/: good", "listener db/db: good [TCPRoute] 0", "listener db/two: good [TCPRoute] 1"}},
	{"sectionName and port of different listeners", gatewayDB + routeYAML("db",
		"{namespace: edge, name: db, sectionName: db, port: 2}", dbOfShop),
		[]string{"route db of db/db: Accepted=False/NoMatchingParent ...", "listener db/db: good [TCPRoute] 0"}},
	{"an empty sectionName", gatewayDB + services + routeYAML("db", "{namespace: edge, name: db, sectionName: ''}",
		dbOfShop), []string{"route db of db/: good"}},
	{"all listeners of the kind", gatewayYAML("db", tcp5432+", {name: two, protocol: TCP, port: 2, allowedRoutes: "+
		"{namespaces: {from: All}}}, {name: dns, protocol: UDP, port: 53, allowedRoutes: {namespaces: {from: All}}}") +
		services + routeDB,
		[]string{"listener db/db: good [TCPRoute] 1", "listener db/two: good [TCPRoute] 1",
			"listener db/dns: good [UDPRoute] 0", "route db of db/: good"}},
	{"two references to one Gateway count once per listener", gatewayDB + services + routeYAML("db",
		toDB+", {namespace: edge, name: db, sectionName: db}", dbOfShop),
		[]string{"listener db/db: good [TCPRoute] 1", "route db of db/: good", "route db of db/db: good"}},
	{"no such Gateway, or another kind", gatewayDB + routeYAML("db", "{name: db}, {namespace: edge, name: db, "+
		"kind: ListenerSet}, {namespace: edge, name: db, group: '', kind: Service}", dbOfShop), []string{"no route db"}},
	{"one listener of two serves", gatewayYAML("db", tcp5432+", {name: a, protocol: TCP, port: 2, allowedRoutes: "+
		"{namespaces: {from: All}}}, {name: b, protocol: HTTP, port: 2}") + routeDB + services,
		[]string{"route db of db/: good", "listener db/db: good [TCPRoute] 1", "listener db/a: Accepted=False/" +
			"PortUnavailable Programmed=False/Invalid Conflicted=True/ProtocolConflict [TCPRoute] 1",
			`backends db: {"for":"Gateway edge/db","ports":[{"port":"tcp-5432","listener":"db","route":"TCPRoute shop/db",` +
				`"to":[{"service":"shop/db","port":5432,"weight":1}]}]}`}},

	{"the listener that is referred to does not serve", gatewayYAML("db", tcp5432+", {name: a, protocol: TCP, "+
		"port: 2, allowedRoutes: {namespaces: {from: All}}}, {name: b, protocol: HTTP, port: 2}") + services +
		routeYAML("db", "{namespace: edge, name: db, sectionName: a}", dbOfShop),
		[]string{"route db of db/a: Accepted=False/NoReadyListeners", "gateway db: Accepted=True/ListenersNotValid"}},

	// Several routes of one listener.
	{"the oldest wins", gatewayDB + services + routeYAML("z", toDB, dbOfShop) +
		routeYAML("a", toDB, "{name: db, port: 1}"),
		[]string{"listener db/db: good [TCPRoute] 2", "route z of db/: good", `backends db: {"for":"Gateway edge/db",` +
			`"ports":[{"port":"tcp-5432","listener":"db","route":"TCPRoute shop/z",...`,
			"route a of db/: ResolvedRefs=False/BackendNotFound"}},
	{"the same age: by name", gatewayDB + services +
		strings.NewReplacer("name: z}", "name: z, creationTimestamp: 2026-01-01T00:00:00Z}").Replace(
			routeYAML("z", toDB, dbOfShop)) +
		strings.NewReplacer("name: a}", "name: a, creationTimestamp: 2026-01-01T00:00:00Z}").Replace(
			routeYAML("a", toDB, dbOfShop)),
		[]string{`backends db: {"for":"Gateway edge/db","ports":[{"port":"tcp-5432","listener":"db",` +
			`"route":"TCPRoute shop/a",...`, "listener db/db: good [TCPRoute] 2"}},
	{"the same age: by namespace first", gatewayDB + services +
		strings.NewReplacer("shop", "other", "name: a}", "name: a, creationTimestamp: 2026-01-01T00:00:00Z}").Replace(
			routeYAML("a", toDB, dbOfShop)) +
		strings.NewReplacer("shop", "edge", "name: z}", "name: z, creationTimestamp: 2026-01-01T00:00:00Z}").Replace(
			routeYAML("z", toDB, dbOfShop)),
		[]string{`backends db: {"for":"Gateway edge/db","ports":[{"port":"tcp-5432","listener":"db",` +
			`"route":"TCPRoute edge/z",...`}},
	{"a route that is not accepted does not win", gatewayDB + services +
		"kind: TCPRoute\nmetadata: {namespace: shop, name: first}\nspec: {parentRefs: [" + toDB +
		"], rules: [{}, {}]}\n---\n" +
		routeDB,
		[]string{"route first of db/: Accepted=False/UnsupportedValue", "route db of db/: good",
			"listener db/db: good [TCPRoute] 1", `backends db: {"for":"Gateway edge/db","ports":[{"port":"tcp-5432",` +
				`"listener":"db","route":"TCPRoute shop/db",...`}},

	// Backends.
	{"a kind that is none", gatewayDB + routeYAML("db", toDB, "{group: other.io, kind: Bucket, name: b}"),
		[]string{"route db of db/: ResolvedRefs=False/InvalidKind"}},
	{"ExternalName", gatewayDB + services + routeYAML("db", toDB, "{name: outside, port: 5432}"),
		[]string{"route db of db/: ResolvedRefs=False/InvalidKind", "needs db: [edge/db-verdict]", "granted db: "}},
	{"headless", gatewayDB + services + routeYAML("db", toDB, "{name: headless, port: 5432}"),
		[]string{"route db of db/: ResolvedRefs=False/InvalidKind"}},
	{"of another proxy", gatewayDB + services + routeYAML("db", toDB, "{name: foreign, port: 5432}"),
		[]string{"route db of db/: ResolvedRefs=False/InvalidKind"}},
	{"no port", gatewayDB + services + routeYAML("db", toDB, "{name: db}"),
		[]string{"route db of db/: ResolvedRefs=False/BackendNotFound"}},
	{"a port that is not there", gatewayDB + services + routeYAML("db", toDB, "{name: db, port: 1}"),
		[]string{"route db of db/: ResolvedRefs=False/BackendNotFound"}},
	{"a port of another protocol", gatewayDB + services + routeYAML("db", toDB, "{name: db, port: 53}"),
		[]string{"route db of db/: ResolvedRefs=False/BackendNotFound"}},
	{"too many", gatewayDB + services + routeYAML("db", toDB, strings.Repeat(dbOfShop+", ", 16)+dbOfShop),
		[]string{"route db of db/: Accepted=False/UnsupportedValue", `backends db: {"for":"Gateway edge/db"}`}},
	{"a weight that is none", gatewayDB + services + routeYAML("db", toDB, "{name: db, port: 5432, weight: -1}"),
		[]string{"route db of db/: Accepted=False/UnsupportedValue"}},

	// Grants.
	{"none", gatewayDB + services + routeYAML("db", toDB, "{namespace: edge, name: near, port: 5432}"),
		[]string{"route db of db/: ResolvedRefs=False/RefNotPermitted", "needs db: [edge/db-verdict]"}},
	{"none, and nothing there", gatewayDB + routeYAML("db", toDB, "{namespace: edge, name: nope, port: 5432}"),
		[]string{"route db of db/: ResolvedRefs=False/RefNotPermitted"}},
	{"granted", gatewayDB + services + routeYAML("db", toDB, "{namespace: edge, name: near, port: 5432}") +
		grantYAML("TCPRoute", "shop", "{group: '', kind: Service, name: near}"),
		[]string{"route db of db/: good", "needs db: [edge/db-verdict edge/near]", "granted db: "}},
	{"granted as a whole", gatewayDB + services + routeYAML("db", toDB, "{namespace: edge, name: near, port: 5432}") +
		grantYAML("TCPRoute", "shop", "{group: '', kind: Service}"), []string{"route db of db/: good"}},
	{"granted to others, or something else", gatewayDB + services + routeYAML("db", toDB,
		"{namespace: edge, name: near, port: 5432}") + grantYAML("TCPRoute", "other", "{group: '', kind: Service}") +
		grantYAML("UDPRoute", "shop", "{group: '', kind: Service}") +
		grantYAML("TCPRoute", "shop", "{group: '', kind: Service, name: far}, {group: '', kind: Secret, name: near}, "+
			"{group: a.b, kind: Service}") +
		strings.Replace(grantYAML("TCPRoute", "shop", "{group: '', kind: Service}"), "gateway.networking.k8s.io", "a.b", 1) +
		strings.Replace(grantYAML("TCPRoute", "shop", "{group: '', kind: Service}"), "edge", "other", 1),
		[]string{"route db of db/: ResolvedRefs=False/RefNotPermitted"}},

	// Classes.
	{"another controller's class", classYAML("else", "example.com/c") + strings.Replace(gatewayDB, "verdict", "else", 1) +
		routeDB, []string{"no class else", "no gateway db", "no route db"}},
	{"no such class", strings.Replace(gatewayDB, "verdict", "gone", 1) + routeDB,
		[]string{"no gateway db", "no route db"}},
	{"a Gateway that is being deleted", strings.Replace(gatewayDB, "name: db}", "name: db, deletionTimestamp: "+
		"2026-01-01T00:00:00Z}", 1) + routeDB, []string{"no gateway db", "no route db"}},
	{"parameters of a Gateway", gatewayYAML("db", tcp5432, "infrastructure: {parametersRef: {group: '', kind: ConfigMap, "+
		"name: x}}") + routeDB + services,
		[]string{"gateway db: Accepted=False/InvalidParameters Programmed=False/Invalid", "no service db",
			"route db of db/: Accepted=False/NoReadyListeners",
			"listener db/db: Programmed=False/Pending [TCPRoute] 0"}},
}

// classYAML is a GatewayClass, with more fields of its spec.
func classYAML(name, controller string, more ...string) string {
	return "kind: GatewayClass\nmetadata: {name: " + name + "}\nspec:\n  controllerName: " + controller + "\n  " +
		strings.Join(more, "\n  ") + "\n---\n"
}

func grantYAML(kind, from, to string) string {
	return "kind: ReferenceGrant\nmetadata: {namespace: edge, name: g}\nspec: {from: [" +
		"{group: gateway.networking.k8s.io, kind: " + kind + ", namespace: " + from + "}], to: [" + to + "]}\n---\n"
}

// TestRules holds what the API says of listeners, references, routes, backends, grants and classes.
func TestRules(t *testing.T) {
	for _, r := range rules {
		t.Run(r.name, func(t *testing.T) {
			readCluster(t, r.objects).compute().check(t, r.want)
		})
	}
}
