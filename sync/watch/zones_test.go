package watch

import (
	"fmt"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// TestZoneAnnotations: what a Service says of zones, and what is reported. Invalid values change nothing.
func TestZoneAnnotations(t *testing.T) {
	const zones, demand = "verdict-proxy.github.io/zones", "verdict-proxy.github.io/zone-demand"
	for _, c := range []struct {
		title       string
		annotations map[string]string
		near        bool
		demand      string
		problem     string
	}{
		{"none", nil, false, "map[]", ""},
		{"prefer", map[string]string{zones: "prefer"}, true, "map[]", ""},
		{"the alias", map[string]string{"verdict/zones": "prefer"}, true, "map[]", ""},
		{"another value", map[string]string{zones: "on"}, false, "map[]", `[` + zones + `]: "on" is not "prefer"`},
		{"a long value", map[string]string{zones: strings.Repeat("x", 1<<16)}, false, "map[]", `x..." is not "prefer"`},
		{"with a hash", map[string]string{zones: "prefer", "verdict-proxy.github.io/scheduler": "hash"}, false, "map[]",
			"[" + zones + "]: it is ignored: with the scheduler hash, all nodes must choose from the same endpoints"},
		{"with demand", map[string]string{zones: "prefer", demand: "a=3, b=0"}, true, "map[a:3 b:0]", ""},
		{"demand alone", map[string]string{demand: "a=3"}, false, "map[]",
			"[" + demand + "]: it is ignored without " + zones + ": prefer"},
		{"invalid demand", map[string]string{zones: "prefer", demand: "a=3,b"}, true, "map[a:3]",
			"[" + demand + `]: "b" is not a zone's demand such as zone-a=3; demands are 0 to 65535`},
		{"too much demand", map[string]string{zones: "prefer", demand: strings.Repeat("a=3,", 64) + "b=1"}, true, "map[]",
			"259 bytes with 65 entries are too many demands: "},
	} {
		var cv converter
		svc, problems := cv.service(&corev1.Service{
			ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "web", Annotations: c.annotations},
			Spec: corev1.ServiceSpec{ClusterIP: "10.96.0.1", ClusterIPs: []string{"10.96.0.1"},
				Ports: []corev1.ServicePort{{Port: 80, Protocol: corev1.ProtocolTCP}}},
		}, nil)
		near, demand := false, "map[]"
		if svc.Scheduling != nil {
			near, demand = svc.Scheduling.PreferNear, fmt.Sprint(svc.Scheduling.ZoneDemand)
		}
		if near != c.near || demand != c.demand {
			t.Errorf("%s: near %v, demand %s", c.title, near, demand)
		}
		text := fmt.Sprint(joinProblems(problems))
		if len(problems) > 1 || (c.problem == "") != (len(problems) == 0) ||
			c.problem != "" && !strings.Contains(text, c.problem) {
			t.Errorf("%s: %s, want %s", c.title, text, c.problem)
		}
	}
}
