package neighbors

// coreDNS is the cluster's DNS, as Kubernetes' own manifest has it.
var coreDNS = Neighbor{
	Name: "coredns", DNS: true,
	module: "kubernetes", source: "k8s.io/kubernetes", manifest: "cluster/addons/dns/coredns/coredns.yaml.base",
	programs: []program{{peer: "coredns", image: "coredns/coredns", at: "/coredns"}},
	settings: []string{"__DNS__DOMAIN__", "cluster.local", "__DNS__SERVER__", "10.96.0.10",
		"__DNS__MEMORY__LIMIT__", "170Mi"},
	workloads: [][2]string{{"kube-system", "deployment/coredns"}},
}
