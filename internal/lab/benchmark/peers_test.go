//go:build peers

package benchmark

import (
	"os/exec"
	"strings"
	"testing"

	"github.com/verdict-proxy/verdict/internal/lab/labtest"
)

// TestKubeProxyRules has a real kube-proxy write its rules, and measures them.
func TestKubeProxyRules(t *testing.T) {
	out, err := exec.Command("../../../conformance/peers/build", "kube-proxy").Output()
	labtest.Check(t, err)
	o := smallFlow(t, 20)
	o.KubeProxy = strings.TrimSpace(string(out))
	labtest.Check(t, o.Prepare())
	r, err := Flow(t.Context(), o)
	labtest.Check(t, err)
	for _, v := range r.Variants {
		if v.Kind == kubeProxyTables && v.Translated == o.Flows {
			return
		}
	}
	t.Errorf("%+v", r)
}
