package takeover

import (
	"slices"
	"strings"
	"testing"

	"github.com/verdict-proxy/verdict/internal/lab/labtest"
)

// TestOwn: what has kube-proxy's names and is the caller's stays, in the caller's variant; what kube-proxy alone makes
// does not.
func TestOwn(t *testing.T) {
	const nat = `*nat
:KUBE-SERVICES - [0:0]
:KUBE-SVC-AAAAAAAAAAAAAAAA - [0:0]
:KUBE-SVC-10.96.0.0/17 - [0:0]
:KUBE-MARK-MASQ - [0:0]
:KUBE-POSTROUTING - [0:0]
:KUBE-LOAD-BALANCER - [0:0]
-A PREROUTING -m comment --comment "kubernetes service portals" -j KUBE-SERVICES
-A POSTROUTING -m comment --comment "kubernetes postrouting rules" -j KUBE-POSTROUTING
-A KUBE-SERVICES -j KUBE-SVC-10.96.0.0/17
-A KUBE-SVC-10.96.0.0/17 -j KUBE-SVC-AAAAAAAAAAAAAAAA
-A KUBE-LOAD-BALANCER -j KUBE-MARK-MASQ
COMMIT
*filter
:KUBE-CLUSTER-IPS - [0:0]
:KUBE-CIP-10.96.0.0/17 - [0:0]
:KUBE-IPVS-FILTER - [0:0]
-A KUBE-CLUSTER-IPS -j KUBE-CIP-10.96.0.0/17
COMMIT
`
	chains := func(saved string) string {
		var names []string
		for line := range strings.Lines(saved) {
			if name, ok := strings.CutPrefix(line, ":KUBE-"); ok {
				name, _, _ = strings.Cut(name, " ")
				names = append(names, name)
			}
		}
		return strings.Join(names, " ")
	}
	const all = "CIP-10.96.0.0/17 CLUSTER-IPS IPVS-FILTER LOAD-BALANCER MARK-MASQ POSTROUTING SERVICES " +
		"SVC-10.96.0.0/17 SVC-AAAAAAAAAAAAAAAA"
	for _, variant := range []string{"nft", "legacy"} {
		other := map[string]string{"nft": "legacy", "legacy": "nft"}[variant]
		for _, row := range []struct {
			own  Own
			want string
		}{
			{Own{}, ""},
			{Own{Variant: other, Rules: true}, ""},
			{Own{Variant: variant, Compat: true}, "MARK-MASQ POSTROUTING"},
			{Own{Variant: variant, Rules: true},
				"CIP-10.96.0.0/17 CLUSTER-IPS MARK-MASQ POSTROUTING SERVICES SVC-10.96.0.0/17 SVC-AAAAAAAAAAAAAAAA"},
		} {
			h := labtest.NewHost(t, labtest.NewNet(t), "node")
			labtest.Run(t, h, nat, "iptables-"+variant+"-restore", "--noflush")
			list := func() string {
				names := strings.Fields(chains(labtest.Run(t, h, "", "iptables-"+variant+"-save")))
				slices.Sort(names)
				return strings.Join(names, " ")
			}
			if got := list(); got != all {
				t.Fatalf("%s: it begins with %s", variant, got)
			}
			labtest.Check(t, h.Do(func() error {
				f, err := Find(t.Context(), row.own)
				if err != nil {
					return err
				}
				return f.Remove(t.Context())
			}))
			if got := list(); got != row.want {
				t.Errorf("%s, %+v: left are %q, want %q", variant, row.own, got, row.want)
			}
		}
	}
}
