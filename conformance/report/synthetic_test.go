package report

import (
	"fmt"
	"math/rand/v2"
	"strings"
	"time"
)

// synthetic makes up a run as a real one would be: most cases pass, and what does not is unevenly spread.
func synthetic(cases int, bad float64) *Run {
	random := rand.New(rand.NewPCG(1, 2))
	r := &Run{
		Begun: time.Date(2026, 3, 14, 9, 26, 53, 0, time.UTC), Took: 14*time.Minute + 31*time.Second,
		Host: "Linux 6.18.5, 2 cores, nft 1.0.6",
		Proxies: []Proxy{
			{
				Name:    "verdict",
				Version: "verdict 0.5.0",
				Took:    4 * time.Minute,
				Witness: &Witness{Agree: 9312, Took: 3 * time.Second},
			},
			{Name: "kube-proxy-nftables", Version: "Kubernetes v1.36.3", Took: 5 * time.Minute, Witness: &Witness{
				Agree: 9198, Disagree: 2, Took: 4 * time.Second,
				NotAsked: []NotAsked{{"the load balancer answers", 12, ""}, {"a rule is not known", 100, "node-a: rule 17"}},
			}},
			{Name: "kube-proxy-iptables", Version: "Kubernetes v1.36.3", Took: 5 * time.Minute},
		},
	}
	themes := []string{
		"cluster-ip", "external-traffic-policy", "internal-traffic-policy", "load-balancer", "node-port", "no-endpoints",
		"session-affinity", "source-ranges", "terminating-endpoints", "topology",
	}
	for i := range cases {
		name := themes[i*len(themes)/cases]
		c := Case{
			Name: fmt.Sprintf(
				"%s/%s/%s/%s/%s-%d",
				name,
				pick(random, "cluster", "local"),
				pick(random, "endpoints-here", "endpoints-elsewhere", "node-without-endpoints"),
				pick(random, "tcp", "udp", "sctp"),
				pick(random, "ipv4", "ipv6"),
				i,
			),
			Theme: name, Source: "Virtual IPs and Service Proxies, section Traffic policies",
			Title: "A client outside of the cluster asks a load balancer's address of a Service whose traffic policy is " +
				"Local, on a node without endpoints: it gets no answer.",
			Results: map[string]*Result{},
		}
		if i%9 == 0 {
			c.StandsFor = []string{"[sig-network] Services should respect internalTrafficPolicy=Local Pod to Pod"}
		}
		for k, p := range r.Proxies {
			result := &Result{Outcome: Pass, Took: time.Duration(100+random.IntN(900)) * time.Millisecond}
			if name != "cluster-ip" && name != "topology" && random.Float64() < bad*float64(k+1) {
				spoil(random, result)
			}
			c.Results[p.Name] = result
		}
		r.Cases = append(r.Cases, c)
	}
	return r
}

func pick(random *rand.Rand, from ...string) string { return from[random.IntN(len(from))] }

func spoil(random *rand.Rand, result *Result) {
	result.Outcome = Outcomes[random.IntN(4)]
	switch result.Outcome {
	case Skipped:
		result.Why = "this host's kernel has no SCTP"
		return
	case Broken:
		result.Why = "the server in pod b2 did not come up:\nlisten tcp 10.244.2.12:8080: bind: address already in use"
	case Differs:
		result.Why, result.Right = "it drops where the contract says reject: the rule comes after the one that drops",
			"verdict"
	}
	result.Looks = []Look{
		{
			From:  "pod a1",
			To:    "10.96.0.10:80/tcp",
			Count: 24,
			Want:  "one of a1, b1; source unchanged",
			Got:   "a1 13 times, b1 11 times; source unchanged",
			OK:    true,
		},
		{
			Step:  "after the endpoint is gone",
			From:  "outside",
			To:    "203.0.113.10:80/tcp",
			Count: 1,
			Want:  "refused",
			Got:   "dropped",
		},
		{
			Step:  "after the endpoint is gone",
			From:  "node 1 <&>",
			To:    "[fd00:10:96::a]:80/tcp",
			Count: 3,
			Want:  "one of a1, b1; source unchanged",
			Got:   "a1; source is the node's",
		},
	}
	result.Objects = fmt.Sprintf(
		"apiVersion: v1\nkind: Service\nmetadata: {name: web-%d, namespace: default}\nspec:\n  clusterIP: 10.96.0.10\n  "+
			"ports: [{port: 80, targetPort: 8080}]\n",
		random.IntN(1000),
	)
	result.Logged = "# node-a: log\nlevel=WARN msg=\"ejected an endpoint: refused\" probes=2"
	result.Listing = fmt.Sprintf(
		"# %d\n",
		random.IntN(1<<30),
	) + strings.Repeat(
		"table ip verdict {\n\tchain pick-2 {\n\t\tdnat ip to ip daddr . meta l4proto . th dport . numgen random mod 2 "+
			"map @endpoints\n\t}\n}\n",
		60,
	)
}
