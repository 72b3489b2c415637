package watch

import (
	"fmt"
	"reflect"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/verdict-proxy/verdict/sync/snapshot"
)

// withBackends is a Service with the annotation, and a condition that grants some names; empty for no condition.
func withBackends(text, granted string) *corev1.Service {
	s := annotated(annotationDomain, map[string]string{nameBackends: text})
	s.Spec.Ports = append(s.Spec.Ports, corev1.ServicePort{Name: "db", Port: 5432})
	s.Status.Conditions = []metav1.Condition{{Type: "Odd", Status: metav1.ConditionTrue, Message: "x/y"}}
	if granted != "" {
		s.Status.Conditions = append(s.Status.Conditions,
			metav1.Condition{Type: ConditionGranted, Status: metav1.ConditionTrue, Message: granted})
	}
	return s
}

const threeBackends = `{"for": "Gateway edge/db", "ports": [{"port": "db", "listener": "l", "route": "TCPRoute shop/db",
	"to": [{"service": "near", "port": 1}, {"service": "shop/db", "port": 5432, "weight": 80},
	{"refused": "no such Service", "weight": 0}]}, {"port": "http"}]}`

// TestBackends reads the annotation, and what is granted of other namespaces.
func TestBackends(t *testing.T) {
	c := &converter{}
	want := func(refused string) *snapshot.Backends {
		return &snapshot.Backends{For: "Gateway edge/db", Ports: []snapshot.PortBackends{{Port: "db", Listener: "l",
			Route: "TCPRoute shop/db", To: []snapshot.Backend{
				{Service: snapshot.Name{Namespace: "default", Name: "near"}, Port: 1, Weight: 1},
				{Service: snapshot.Name{Namespace: "shop", Name: "db"}, Port: 5432, Weight: 80, Refused: refused},
				{Refused: "no such Service"}}}, {Port: "http"}}}
	}
	for granted, refused := range map[string]string{
		"": notGranted, "shop/other shop/db": "", "shop/d shop/db2": notGranted,
	} {
		s, problems := c.service(withBackends(threeBackends, granted), nil)
		if !reflect.DeepEqual(s.Backends, want(refused)) || len(problems) > 0 {
			t.Errorf("granted %q: %+v, %v", granted, s.Backends, problems)
		}
	}
	unsure := withBackends(threeBackends, "shop/db")
	unsure.Status.Conditions[1].Status = metav1.ConditionFalse
	if s, _ := c.service(unsure, nil); !reflect.DeepEqual(s.Backends, want(notGranted)) {
		t.Errorf("a condition that is not True grants: %+v", s.Backends)
	}
}

// TestBackendsLastGood: a wrong annotation leaves the last one in force, but not what was granted to it.
func TestBackendsLastGood(t *testing.T) {
	c := &converter{}
	last, _ := c.service(withBackends(threeBackends, "shop/db"), nil)
	for _, granted := range []string{"", "shop/db", ""} {
		s, problems := c.service(withBackends("{", granted), last)
		if refused := s.Backends.Ports[0].To[1].Refused; (refused == "") != (granted != "") {
			t.Errorf("granted %q: refused %q", granted, refused)
		}
		if len(problems) != 1 || !problems[0].Warning {
			t.Errorf("reported %v", problems)
		}
		if last.Backends.Ports[0].To[1].Refused != "" {
			t.Fatal("the last value was changed")
		}
		last = s
		if granted == "" {
			last, _ = c.service(withBackends(threeBackends, "shop/db"), nil)
		}
	}
}

func TestBackendsWrong(t *testing.T) {
	list := func(what string, n int) string { return strings.TrimSuffix(strings.Repeat(what+",", n), ",") }
	var ports []string
	for i := range snapshot.MaxBackendPorts + 1 {
		ports = append(ports, fmt.Sprintf(`{"port":"p%d"}`, i))
	}
	to := func(text string) string { return `{"ports":[{"port":"db","to":[` + text + `]}]}` }
	c := &converter{}
	for text, want := range map[string]string{
		`{"prots":[]}`:               `json: unknown field "prots"`,
		`{} {}`:                      "there is more text after the JSON object",
		`{"ports":"db"}`:             "ports has the wrong kind: string",
		`[]`:                         "the value has the wrong kind: array",
		`{"ports":[{},{}]}`:          `ports[1].port: "" is there twice`,
		`{"ports":[{"port":"a b"}]}`: `ports[0].port: "a b": a name has letters`,
		`{"ports":[` + strings.Join(ports, ",") + `]}`:            "ports: 65 are too many: 64 at most",
		to(list(`{"service":"a","port":1}`, 17)):                  "ports[0].to: 17 are too many: 16 at most",
		to(`{"service":"a"}`):                                     "ports[0].to[0].port: 0 is not a port (1-65535)",
		to(`{"service":"a","port":65536}`):                        "ports[0].to[0].port: 65536 is not a port",
		to(`{"port":1}`):                                          "ports[0].to[0].service: missing",
		to(`{"service":"/a","port":1}`):                           "ports[0].to[0].service: missing",
		to(`{"service":"a/b/c","port":1}`):                        `ports[0].to[0].service: "b/c": a name has`,
		to(`{"service":"a","port":1,"weight":1000001}`):           "weight: 1000001 is not a number from 0 to 1000000",
		to(`{"service":"a","port":1,"weight":-1}`):                "ports.to.weight has the wrong kind: number -1",
		to(`{"refused":"` + strings.Repeat("x", 513) + `"}`):      "refused: 513 bytes are too many: 512 at most",
		`{"for":"` + strings.Repeat("x", 513) + `"}`:              "for: 513 bytes are too many: 512 at most",
		`{"` + strings.Repeat("x", 9999) + `":1}`:                 "json: unknown field",
		`{"for":"` + strings.Repeat("x", maxBackendsText) + `"}`:  "262154 bytes are too many: 262144 at most",
		`{"ports":[{"port":"no","to":[]}]}`:                       `ports[0]: the Service has no port "no"`,
		`{"for":"a\u001b[2J","ports":[{"port":"db"},{"port":9}]}`: "ports.port has the wrong kind: number",
	} {
		s, problems := c.service(withBackends(text, ""), nil)
		got := strings.Join(lines(problems), "\n")
		field := "Service default/web: metadata.annotations[verdict-proxy.github.io/backends]: "
		if len(problems) != 1 || !problems[0].Warning || !strings.HasPrefix(got, field) || !strings.Contains(got, want) ||
			len(got) > 500 || (s.Backends != nil) != strings.Contains(want, "has no port") {
			t.Errorf("%.80s: %+v, reported %s", text, s.Backends, got)
		}
	}
	s, _ := c.service(withBackends(`{"for":"a\u001b[2J"}`, ""), nil)
	if s.Backends.For != `"a\x1b[2J"` {
		t.Errorf("shown as %s", s.Backends.For)
	}
}

// TestIgnoredWithBackends: what moves shares between endpoints is said to mean nothing.
func TestIgnoredWithBackends(t *testing.T) {
	c := &converter{}
	o := withBackends(`{}`, "")
	o.Annotations["verdict/zones"], o.Annotations["verdict/slow-start"] = "prefer", "30s"
	s, problems := c.service(o, nil)
	if s.SlowStart != 0 || s.Scheduling != nil && s.Scheduling.PreferNear || len(problems) != 2 {
		t.Errorf("%+v, %v", s, problems)
	}
}

// TestChangeInheritsGrants: a manifest without status keeps what was granted, and nothing else.
func TestChangeInheritsGrants(t *testing.T) {
	now, name := changeBase(t), snapshot.Name{Namespace: "shop", Name: "web"}
	was := *now.Services[name]
	was.Backends = &snapshot.Backends{Ports: []snapshot.PortBackends{{Port: "http", To: []snapshot.Backend{
		{Service: snapshot.Name{Namespace: "other", Name: "a"}, Port: 1, Weight: 1},
		{Service: snapshot.Name{Namespace: "other", Name: "b"}, Port: 1, Weight: 1, Refused: notGranted}}}}}
	now.Apply(snapshot.Delta{Services: map[snapshot.Name]*snapshot.Service{name: &was}})
	c, err := LoadChange(t.Context(), ChangeFiles{NodeName: "n", Apply: []string{manifestOf(t, "c.yaml", `
apiVersion: v1
kind: Service
metadata:
  name: web
  namespace: shop
  annotations:
    verdict/backends: '{"ports":[{"port":"http","to":[{"service":"other/b","port":1},{"service":"other/a","port":1}]}]}'
spec: {ports: [{name: http, port: 80}]}
`)}}, now)
	if err != nil {
		t.Fatal(err)
	}
	got := c.Delta.Services[name]
	if got == nil || got.Backends.Ports[0].To[0].Refused != notGranted || got.Backends.Ports[0].To[1].Refused != "" {
		t.Errorf("%+v", got)
	}
}
