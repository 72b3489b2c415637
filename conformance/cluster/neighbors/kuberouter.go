package neighbors

// kubeRouter is kube-router as CNI plugin and as engine of network policies, without its Service proxy: dual stack, and
// with bridges that send packets back to the pod from which they came, as pods need that are endpoints of Services that
// they use.
var kubeRouter = Neighbor{
	Name: "kube-router", Network: true, Policies: true,
	module: "kube-router", source: "github.com/cloudnativelabs/kube-router/v2",
	manifest: "daemonset/kubeadm-kuberouter.yaml",
	programs: []program{{peer: "kube-router", image: "/kube-router", at: "/program/kube-router", tools: true}},
	settings: []string{
		"- --run-service-proxy=false", "- --run-service-proxy=false\n        - --enable-ipv6=true\n" +
			"        - --service-cluster-ip-range=10.96.0.0/16\n        - --service-cluster-ip-range=fd00:10:96::/112",
		`"isDefaultGateway":true,`, `"isDefaultGateway":true, "hairpinMode":true,`,
	},
	workloads: [][2]string{{"kube-system", "daemonset/kube-router"}},
}
