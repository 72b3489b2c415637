package watch

import (
	"net/netip"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	networkingv1 "k8s.io/api/networking/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/verdict-proxy/verdict/sync/snapshot"
)

func ips(texts ...string) []netip.Addr {
	var out []netip.Addr
	for _, t := range texts {
		out = append(out, netip.MustParseAddr(t))
	}
	return out
}

func nets(texts ...string) []netip.Prefix {
	var out []netip.Prefix
	for _, t := range texts {
		out = append(out, netip.MustParsePrefix(t))
	}
	return out
}

func lines[E error](problems []E) []string {
	var out []string
	for _, p := range problems {
		out = append(out, p.Error())
	}
	return out
}

// apiService is a Service as an API server would send it, and webService what it means.
func apiService() *corev1.Service {
	return &corev1.Service{
		ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "web"},
		Spec: corev1.ServiceSpec{
			Type: corev1.ServiceTypeClusterIP, ClusterIP: "10.96.0.1", ClusterIPs: []string{"10.96.0.1"},
			Ports:           []corev1.ServicePort{{Name: "http", Protocol: corev1.ProtocolTCP, Port: 80}},
			SessionAffinity: corev1.ServiceAffinityNone, InternalTrafficPolicy: new(corev1.ServiceInternalTrafficPolicyCluster),
		},
	}
}

func stickyFor(seconds int32) *corev1.SessionAffinityConfig {
	return &corev1.SessionAffinityConfig{ClientIP: &corev1.ClientIPConfig{TimeoutSeconds: &seconds}}
}

func webService() *snapshot.Service {
	return &snapshot.Service{
		Name: snapshot.Name{Namespace: "default", Name: "web"}, ClusterIPs: ips("10.96.0.1"),
		Ports: []snapshot.Port{{Name: "http", Protocol: snapshot.TCP, Port: 80}},
	}
}

func TestService(t *testing.T) {
	tests := []struct {
		name     string
		change   func(*corev1.Service)
		want     func(*snapshot.Service) // nil: there is no Service
		problems []string
	}{
		{"plain", func(*corev1.Service) {}, func(*snapshot.Service) {}, nil},
		{"headless", func(s *corev1.Service) { s.Spec.ClusterIP, s.Spec.ClusterIPs = "None", []string{"None"} }, nil, nil},
		{"headless by the list alone", func(s *corev1.Service) { s.Spec.ClusterIP, s.Spec.ClusterIPs = "", []string{"None"} },
			nil, nil},
		{"not allocated yet", func(s *corev1.Service) { s.Spec.ClusterIP, s.Spec.ClusterIPs = "", nil }, nil, nil},
		{"ExternalName with a cluster IP left over", func(s *corev1.Service) { s.Spec.Type = corev1.ServiceTypeExternalName },
			nil, nil},
		{"another proxy's, whatever the value", func(s *corev1.Service) {
			s.Labels = map[string]string{"service.kubernetes.io/service-proxy-name": ""}
		}, nil, nil},
		{"the headless label is for slices", func(s *corev1.Service) {
			s.Labels = map[string]string{"service.kubernetes.io/headless": ""}
		}, func(*snapshot.Service) {}, nil},
		{"from before dual stack", func(s *corev1.Service) { s.Spec.ClusterIPs = nil }, func(*snapshot.Service) {}, nil},
		{"scheduled by IPVS", func(s *corev1.Service) {
			s.Annotations = map[string]string{"verdict/scheduler": "mh, port,fallback", "verdict/weights": "node-1=3, node-2=1"}
		}, func(s *snapshot.Service) {
			s.Scheduling = &snapshot.Scheduling{Scheduler: "mh", Port: true, Fallback: true,
				Weights: map[string]uint16{"node-1": 3, "node-2": 1}}
		}, nil},
		{"not scheduled by IPVS",
			func(s *corev1.Service) { s.Annotations = map[string]string{"verdict/scheduler": "nftables"} },
			func(s *snapshot.Service) { s.Scheduling = &snapshot.Scheduling{Scheduler: "nftables"} }, nil},
		{"an unknown scheduler", func(s *corev1.Service) {
			s.Annotations = map[string]string{"verdict/scheduler": "best", "verdict/weights": "node-1=-1,node-2,node-3=2"}
		}, func(s *snapshot.Service) {
			s.Scheduling = &snapshot.Scheduling{Weights: map[string]uint16{"node-3": 2}}
		}, []string{
			`Service default/web: metadata.annotations[verdict/scheduler]: ` +
				`"best" is unknown: write one of random, hash, nftables, rr, wrr, lc, wlc, fo, ovf, lblc, ` +
				`lblcr, dh, sh, mh, sed, nq, twos`,
			`Service default/web: metadata.annotations[verdict/weights]: ` +
				`"node-1=-1" is not a node's weight such as node-1=3; weights are 0 to 65535`,
			`Service default/web: metadata.annotations[verdict/weights]: ` +
				`"node-2" is not a node's weight such as node-1=3; weights are 0 to 65535`,
		}},
		{"flags of a scheduler without",
			func(s *corev1.Service) { s.Annotations = map[string]string{"verdict/scheduler": "lc,port"} },
			func(*snapshot.Service) {}, []string{
				"Service default/web: metadata.annotations[verdict/scheduler]: lc takes no flags; only hash, sh and mh do"}},
		{"a flag of another scheduler",
			func(s *corev1.Service) {
				s.Annotations = map[string]string{"verdict-proxy.github.io/scheduler": "hash,fallback"}
			},
			func(*snapshot.Service) {}, []string{"Service default/web: " +
				`metadata.annotations[verdict-proxy.github.io/scheduler]: "fallback" is not a flag of hash: write port`}},
		{"by qualified names", func(s *corev1.Service) {
			s.Annotations = map[string]string{"verdict-proxy.github.io/scheduler": "hash,port",
				"verdict-proxy.github.io/weights": "node-1=0", "verdict/weights": "node-1=0"}
		}, func(s *snapshot.Service) {
			s.Scheduling = &snapshot.Scheduling{Scheduler: "hash", Port: true, Weights: map[string]uint16{"node-1": 0}}
		}, nil},
		{"by two names", func(s *corev1.Service) {
			s.Annotations = map[string]string{"verdict-proxy.github.io/scheduler": "random", "verdict/scheduler": "lc"}
		}, func(s *snapshot.Service) { s.Scheduling = &snapshot.Scheduling{Scheduler: "random"} }, []string{
			`Service default/web: metadata.annotations[verdict/scheduler]: ` +
				`"lc" is ignored: verdict-proxy.github.io/scheduler is given, too, with another value`}},
		{"counted first", func(s *corev1.Service) { s.Annotations = map[string]string{"verdict/counters": "true"} },
			func(s *snapshot.Service) { s.Counters = snapshot.CountersFirst }, nil},
		{"never counted", func(s *corev1.Service) { s.Annotations = map[string]string{"verdict/counters": "false"} },
			func(s *snapshot.Service) { s.Counters = snapshot.CountersNever }, nil},
		{"counted perhaps", func(s *corev1.Service) { s.Annotations = map[string]string{"verdict/counters": "True"} },
			func(*snapshot.Service) {}, []string{
				`Service default/web: metadata.annotations[verdict/counters]: "True" is neither "true" nor "false"`}},
		{"a second chance", func(s *corev1.Service) { s.Annotations = map[string]string{"verdict/second-chance": "on"} },
			func(s *snapshot.Service) { s.SecondChance = snapshot.SecondChanceOn }, nil},
		{"a second chance on paper",
			func(s *corev1.Service) { s.Annotations = map[string]string{"verdict/second-chance": "observe"} },
			func(s *snapshot.Service) { s.SecondChance = snapshot.SecondChanceObserve }, nil},
		{"no second chance", func(s *corev1.Service) { s.Annotations = map[string]string{"verdict/second-chance": "off"} },
			func(s *snapshot.Service) { s.SecondChance = snapshot.SecondChanceOff }, nil},
		{"perhaps a second chance",
			func(s *corev1.Service) { s.Annotations = map[string]string{"verdict/second-chance": "true"} },
			func(*snapshot.Service) {}, []string{
				`Service default/web: metadata.annotations[verdict/second-chance]: "true" is none of "off", "observe" and "on"`}},
		{"starts slowly",
			func(s *corev1.Service) {
				s.Annotations = map[string]string{"verdict-proxy.github.io/slow-start": "30s", "verdict/slow-start": "30s"}
			}, func(s *snapshot.Service) { s.SlowStart = 30 * time.Second }, nil},
		{"starts slowly, by the older name",
			func(s *corev1.Service) { s.Annotations = map[string]string{"verdict/slow-start": "1h"} },
			func(s *snapshot.Service) { s.SlowStart = time.Hour }, nil},
		{"starts too slowly", func(s *corev1.Service) { s.Annotations = map[string]string{"verdict/slow-start": "61m"} },
			func(*snapshot.Service) {}, []string{`Service default/web: metadata.annotations[verdict/slow-start]: ` +
				`"61m" is not a duration of whole seconds from 1s to 1h, such as 30s`}},
		{"starts slowly with a hash",
			func(s *corev1.Service) {
				s.Annotations = map[string]string{"verdict/slow-start": "30s", "verdict/scheduler": "hash"}
			}, func(s *snapshot.Service) { s.Scheduling = &snapshot.Scheduling{Scheduler: snapshot.Hash} },
			[]string{`Service default/web: metadata.annotations[verdict-proxy.github.io/slow-start]: it is ignored: ` +
				`with the scheduler hash, all nodes must have the same table at all times`}},
		{"drains", func(s *corev1.Service) { s.Annotations = map[string]string{"verdict/drain": "1m30s"} },
			func(s *snapshot.Service) { s.Drain = 90 * time.Second }, nil},
		{"drains for a part of a second",
			func(s *corev1.Service) { s.Annotations = map[string]string{"verdict/drain": "1500ms"} },
			func(*snapshot.Service) {}, []string{`Service default/web: metadata.annotations[verdict/drain]: ` +
				`"1500ms" is not a duration of whole seconds from 1s to 24h, such as 30s`}},
		{"drains at once", func(s *corev1.Service) { s.Annotations = map[string]string{"verdict/drain": "0s"} },
			func(*snapshot.Service) {}, []string{`Service default/web: metadata.annotations[verdict/drain]: ` +
				`"0s" is not a duration of whole seconds from 1s to 24h, such as 30s`}},
		{"drains for too long", func(s *corev1.Service) { s.Annotations = map[string]string{"verdict/drain": "24h1s"} },
			func(*snapshot.Service) {}, []string{`Service default/web: metadata.annotations[verdict/drain]: ` +
				`"24h1s" is not a duration of whole seconds from 1s to 24h, such as 30s`}},
		{"drains without a unit", func(s *corev1.Service) { s.Annotations = map[string]string{"verdict/drain": "30"} },
			func(*snapshot.Service) {}, []string{`Service default/web: metadata.annotations[verdict/drain]: ` +
				`"30" is not a duration of whole seconds from 1s to 24h, such as 30s`}},
		{"a failover", func(s *corev1.Service) { s.Annotations = map[string]string{"verdict/external-failover": "pass"} },
			func(s *snapshot.Service) { s.ExternalFailover = snapshot.FailoverPass }, nil},
		{"a failover of kube-proxy",
			func(s *corev1.Service) { s.Annotations = map[string]string{"verdict/external-failover": "drop"} },
			func(*snapshot.Service) {}, nil},
		{"a failover in other words",
			func(s *corev1.Service) { s.Annotations = map[string]string{"verdict/external-failover": "Cluster"} },
			func(*snapshot.Service) {}, []string{`Service default/web: metadata.annotations[verdict/external-failover]: ` +
				`"Cluster" is none of "cluster", "reject", "pass" and "drop"`}},
		{"dual stack", func(s *corev1.Service) { s.Spec.ClusterIPs = append(s.Spec.ClusterIPs, "fd00::1") },
			func(s *snapshot.Service) { s.ClusterIPs = ips("10.96.0.1", "fd00::1") }, nil},
		{"two cluster IPs of a family", func(s *corev1.Service) {
			s.Spec.ClusterIPs = append(s.Spec.ClusterIPs, "10.96.0.2", "fd00::1", "fd00::2")
		}, func(s *snapshot.Service) { s.ClusterIPs = ips("10.96.0.1", "fd00::1") }, []string{
			"Service default/web: spec.clusterIPs[1]: " +
				"10.96.0.2 is a second address of its family: a Service has one of each at most",
			"Service default/web: spec.clusterIPs[3]: " +
				"fd00::2 is a second address of its family: a Service has one of each at most",
		}},
		{"one bad cluster IP of two", func(s *corev1.Service) {
			s.Spec.ClusterIPs = append(s.Spec.ClusterIPs,
				"::ffff:10.96.0.9")
		},
			func(*snapshot.Service) {}, []string{
				"Service default/web: spec.clusterIPs[1]: " +
					"10.96.0.9 is a second address of its family: a Service has one of each at most",
				`Service default/web: spec.clusterIPs[1]: "::ffff:10.96.0.9" is read as 10.96.0.9, as kube-proxy does: write that`,
			}},
		{"leading zeros", func(s *corev1.Service) {
			s.Spec.Type = corev1.ServiceTypeLoadBalancer
			s.Spec.ClusterIP, s.Spec.ClusterIPs = "10.96.04.001", []string{"10.96.04.001", "fd00::00001"}
			s.Spec.ExternalIPs = []string{"192.168.099.022", "192.168.99.22"}
			s.Spec.LoadBalancerSourceRanges = []string{" 192.168.007.000/025"}
			s.Status.LoadBalancer.Ingress = []corev1.LoadBalancerIngress{{IP: "1.2.3.004"}, {IP: "::ffff:1.2.3.5"}}
		}, func(s *snapshot.Service) {
			s.ClusterIPs, s.ExternalIPs = ips("10.96.4.1", "fd00::1"), ips("192.168.99.22")
			s.SourceRanges, s.LoadBalancerIPs = nets("192.168.7.0/25"), ips("1.2.3.4", "1.2.3.5")
		}, []string{
			`Service default/web: spec.clusterIPs[0]: "10.96.04.001" is read as 10.96.4.1, as kube-proxy does: write that`,
			`Service default/web: spec.clusterIPs[1]: "fd00::00001" is read as fd00::1, as kube-proxy does: write that`,
			`Service default/web: spec.externalIPs[0]: "192.168.099.022" is read as 192.168.99.22, as kube-proxy does: ` +
				`write that`,
			`Service default/web: status.loadBalancer.ingress[0].ip: "1.2.3.004" is read as 1.2.3.4, as kube-proxy does: ` +
				`write that`,
			`Service default/web: status.loadBalancer.ingress[1].ip: "::ffff:1.2.3.5" is read as 1.2.3.5, as kube-proxy ` +
				`does: write that`,
			`Service default/web: spec.loadBalancerSourceRanges[0]: "192.168.007.000/025" is read as 192.168.7.0/25, as ` +
				`kube-proxy does: write that`,
		}},
		{"bad cluster IP alone", func(s *corev1.Service) { s.Spec.ClusterIP, s.Spec.ClusterIPs = "10.96.0.0.1", nil }, nil,
			[]string{`Service default/web: spec.clusterIP: "10.96.0.0.1" is not an IP address`}},
		{"cluster IPs that contradict each other", func(s *corev1.Service) { s.Spec.ClusterIP = "10.96.0.7" },
			func(*snapshot.Service) {},
			[]string{`Service default/web: spec.clusterIP: "10.96.0.7" is not the first of clusterIPs: the list counts`}},
		{"external IPs", func(s *corev1.Service) {
			s.Spec.ExternalIPs = []string{"192.0.2.1", "fe80::1%eth0", "2001:db8::1", "192.0.2.1", "127.0.0.1", "fe80::1",
				"x\ny", ""}
		}, func(s *snapshot.Service) { s.ExternalIPs = ips("192.0.2.1", "2001:db8::1") }, []string{
			`Service default/web: spec.externalIPs[1]: "fe80::1%eth0" has a zone: write fe80::1`,
			`Service default/web: spec.externalIPs[4]: 127.0.0.1 is special: nothing can be served there`,
			`Service default/web: spec.externalIPs[5]: fe80::1 is special: nothing can be served there`,
			`Service default/web: spec.externalIPs[6]: "x\ny" is not an IP address`,
			`Service default/web: spec.externalIPs[7]: "" is not an IP address`,
		}},
		{"load balancer", func(s *corev1.Service) {
			s.Status.LoadBalancer.Ingress = []corev1.LoadBalancerIngress{
				{IP: "192.0.2.1"}, {IP: "192.0.2.2", IPMode: new(corev1.LoadBalancerIPModeVIP)},
				{IP: "192.0.2.3", IPMode: new(corev1.LoadBalancerIPModeProxy)}, {Hostname: "lb.example.com"},
				{IP: "0.0.0.0"}, {IP: "2001:db8::1"}, {IP: "192.0.2.1"},
			}
		}, func(s *snapshot.Service) { s.LoadBalancerIPs = ips("192.0.2.1", "192.0.2.2", "2001:db8::1") }, []string{
			"Service default/web: status.loadBalancer.ingress[4].ip: 0.0.0.0 is special: nothing can be served there",
		}},
		{"internal policy Local", func(s *corev1.Service) {
			s.Spec.InternalTrafficPolicy = new(corev1.ServiceInternalTrafficPolicyLocal)
		}, func(s *snapshot.Service) { s.InternalLocal = true }, nil},
		{"unknown policies", func(s *corev1.Service) {
			s.Spec.Type, s.Spec.InternalTrafficPolicy, s.Spec.ExternalTrafficPolicy = corev1.ServiceTypeNodePort,
				new(corev1.ServiceInternalTrafficPolicy("local")), "Global"
		}, func(*snapshot.Service) {}, []string{
			`Service default/web: spec.internalTrafficPolicy: "local" is unknown: write Cluster or Local`,
			`Service default/web: spec.externalTrafficPolicy: "Global" is unknown: write Cluster or Local`,
		}},
		{"external policy Local without being external", func(s *corev1.Service) { s.Spec.ExternalTrafficPolicy = "Local" },
			func(*snapshot.Service) {}, nil},
		{"external policy Local by external IPs", func(s *corev1.Service) {
			s.Spec.ExternalTrafficPolicy, s.Spec.ExternalIPs = "Local", []string{"192.0.2.1"}
		}, func(s *snapshot.Service) { s.ExternalLocal, s.ExternalIPs = true, ips("192.0.2.1") }, nil},
		{"node port, whose health check port doesn't count", func(s *corev1.Service) {
			s.Spec.Type, s.Spec.ExternalTrafficPolicy, s.Spec.HealthCheckNodePort = corev1.ServiceTypeNodePort, "Local", 32000
			s.Spec.Ports[0].NodePort = 30080
		}, func(s *snapshot.Service) { s.ExternalLocal, s.Ports[0].NodePort = true, 30080 }, nil},
		{"health check port", func(s *corev1.Service) {
			s.Spec.Type, s.Spec.ExternalTrafficPolicy, s.Spec.HealthCheckNodePort = corev1.ServiceTypeLoadBalancer, "Local",
				32000
		}, func(s *snapshot.Service) { s.ExternalLocal, s.HealthCheckNodePort = true, 32000 }, nil},
		{"health check port with policy Cluster", func(s *corev1.Service) {
			s.Spec.Type, s.Spec.HealthCheckNodePort = corev1.ServiceTypeLoadBalancer, 32000
		}, func(*snapshot.Service) {}, nil},
		{"bad health check port", func(s *corev1.Service) {
			s.Spec.Type, s.Spec.ExternalTrafficPolicy, s.Spec.HealthCheckNodePort = corev1.ServiceTypeLoadBalancer, "Local", -1
		}, func(s *snapshot.Service) { s.ExternalLocal = true },
			[]string{"Service default/web: spec.healthCheckNodePort: -1 is not a port (1-65535)"}},
		{"affinity by default", func(s *corev1.Service) { s.Spec.SessionAffinity = "ClientIP" },
			func(s *snapshot.Service) { s.Affinity = 3 * time.Hour }, nil},
		{"affinity", func(s *corev1.Service) {
			s.Spec.SessionAffinity = "ClientIP"
			s.Spec.SessionAffinityConfig = stickyFor(10)
		}, func(s *snapshot.Service) { s.Affinity = 10 * time.Second }, nil},
		{"affinity for too long", func(s *corev1.Service) {
			s.Spec.SessionAffinity = "ClientIP"
			s.Spec.SessionAffinityConfig = stickyFor(86401)
		}, func(s *snapshot.Service) { s.Affinity = 3 * time.Hour }, []string{
			"Service default/web: spec.sessionAffinityConfig.clientIP.timeoutSeconds: " +
				"86401 is not between 1 and 86400: using 10800",
		}},
		{"unknown affinity", func(s *corev1.Service) { s.Spec.SessionAffinity = "Cookie" }, func(*snapshot.Service) {},
			[]string{`Service default/web: spec.sessionAffinity: "Cookie" is unknown: write ClientIP or None`}},
		{"ports", func(s *corev1.Service) {
			s.Spec.Ports = []corev1.ServicePort{
				{Name: "a", Port: 53}, {Name: "b", Port: 53, Protocol: "UDP"},
				{Name: "c", Port: 9, Protocol: "SCTP", NodePort: 70000},
				{Name: "d", Port: 0}, {Name: "e", Port: 1, Protocol: "ICMP"}, {Name: "a", Port: 54}, {Name: "f", Port: 53},
				{Name: `g"; flush ruleset`, Port: 2},
			}
		}, func(s *snapshot.Service) {
			s.Ports = []snapshot.Port{
				{Name: "a", Protocol: snapshot.TCP, Port: 53}, {Name: "b", Protocol: snapshot.UDP, Port: 53}, {Name: "c",
					Protocol: snapshot.SCTP, Port: 9},
			}
		}, []string{
			"Service default/web: spec.ports[2].nodePort: 70000 is not a port (1-65535)",
			"Service default/web: spec.ports[3].port: 0 is not a port (1-65535)",
			`Service default/web: spec.ports[4].protocol: "ICMP" is unknown: write TCP, UDP or SCTP`,
			`Service default/web: spec.ports[5].name: "a" is the name of two ports: the first one counts`,
			"Service default/web: spec.ports[6].port: 53/tcp is there twice: the first one counts",
			`Service default/web: spec.ports[7].name: "g\"; flush ruleset": a name has letters, digits, '-' and '.' only`,
		}},
		{"a name that is none", func(s *corev1.Service) { s.Name = "web\"\n" }, nil,
			[]string{`Service default/"web\"\n": metadata.name: "web\"\n": a name has letters, digits, '-' and '.' only`}},
		{"no name", func(s *corev1.Service) { s.Name = "" }, nil, []string{"Service: metadata.name: missing"}},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			in := apiService()
			test.change(in)
			var want *snapshot.Service
			if test.want != nil {
				want = webService()
				test.want(want)
			}
			got, problems := (&converter{}).service(in, nil)
			if !reflect.DeepEqual(got, want) {
				t.Errorf("got  %+v\nwant %+v", got, want)
			}
			if !slices.Equal(lines(problems), test.problems) {
				t.Errorf("problems:\n%s\nwant:\n%s", strings.Join(lines(problems), "\n"), strings.Join(test.problems, "\n"))
			}
		})
	}
}

// A range that can't be read must never open what it was to close.
func TestSourceRanges(t *testing.T) {
	tests := []struct {
		in       []string
		want     []netip.Prefix
		problems int
	}{
		{nil, nil, 0},
		{[]string{" 10.1.2.3/8\t", "fd00::1/48", "10.0.0.0/8"}, nets("10.0.0.0/8", "fd00::/48"), 0},
		{[]string{"0.0.0.0/0"}, nets("0.0.0.0/0"), 0},
		{[]string{"10.0.0.0/33"}, nets("0.0.0.0/32", "::/128"), 1},
		{[]string{""}, nets("0.0.0.0/32", "::/128"), 1},
		{[]string{"10.0.0.1"}, nets("0.0.0.0/32", "::/128"), 1},
		{[]string{"10.0.0.0/8", "fd00:zz::/48"}, nets("10.0.0.0/8", "::/128"), 1},
		{[]string{"::ffff:10.0.0.0/104", "fd00::/48"}, nets("10.0.0.0/8", "fd00::/48"), 0},
		{[]string{"::ffff:10.0.0.0/129", "fd00::/48"}, nets("fd00::/48", "0.0.0.0/32"), 1},
		{[]string{"10.0.0.0/8", "10.0.0.0/99", "fd00::/48"}, nets("10.0.0.0/8", "fd00::/48"), 1},
	}
	for _, test := range tests {
		f := &problemList{object: "Service default/web"}
		got := sourceRanges(f, test.in)
		if !slices.Equal(got, test.want) || len(f.list) != test.problems {
			t.Errorf("%q: got %v and %q, want %v and %d problems", test.in, got, lines(f.list), test.want, test.problems)
		}
	}
	f := &problemList{object: "Service default/web"}
	sourceRanges(f, []string{"10.0.0.1"})
	want := `Service default/web: spec.loadBalancerSourceRanges[0]: "10.0.0.1" is an address, not a range: ` +
		"add /32 or /128 for this address alone; a family with no good range is closed"
	if got := lines(f.list); got[0] != want {
		t.Errorf("got %q\nwant %q", got[0], want)
	}
}

func apiSlice() *discoveryv1.EndpointSlice {
	return &discoveryv1.EndpointSlice{
		ObjectMeta: metav1.ObjectMeta{
			Namespace: "default", Name: "web-abc", Labels: map[string]string{"kubernetes.io/service-name": "web"},
		},
		AddressType: discoveryv1.AddressTypeIPv4,
		Ports: []discoveryv1.EndpointPort{{Name: new("http"), Port: new(int32(8080)),
			Protocol: new(corev1.ProtocolTCP)}},
		Endpoints: []discoveryv1.Endpoint{{Addresses: []string{"10.1.0.1", "10.1.0.99"}}},
	}
}

func webSlice() *snapshot.Slice {
	return &snapshot.Slice{
		Name: snapshot.Name{Namespace: "default", Name: "web-abc"}, Service: "web",
		Ports:     []snapshot.SlicePort{{Name: "http", Protocol: snapshot.TCP, Port: 8080}},
		Endpoints: []snapshot.Endpoint{{Addr: netip.MustParseAddr("10.1.0.1"), Ready: true, Serving: true}},
	}
}

func TestSlice(t *testing.T) {
	tests := []struct {
		name     string
		change   func(*discoveryv1.EndpointSlice)
		want     func(*snapshot.Slice)
		problems []string
	}{
		{"only the first address, conditions by default", func(*discoveryv1.EndpointSlice) {}, func(*snapshot.Slice) {}, nil},
		{"headless", func(s *discoveryv1.EndpointSlice) { s.Labels["service.kubernetes.io/headless"] = "" }, nil, nil},
		{"names", func(s *discoveryv1.EndpointSlice) { s.AddressType = discoveryv1.AddressTypeFQDN }, nil, nil},
		{"no Service", func(s *discoveryv1.EndpointSlice) { s.Labels = nil }, nil, []string{
			"EndpointSlice default/web-abc: metadata.labels[kubernetes.io/service-name]: missing: it says which Service the " +
				"slice belongs to",
		}},
		{"unknown address type", func(s *discoveryv1.EndpointSlice) { s.AddressType = "IP" }, nil, []string{
			`EndpointSlice default/web-abc: addressType: "IP" is unknown: write IPv4 or IPv6`,
		}},
		{"ports", func(s *discoveryv1.EndpointSlice) {
			s.Ports = []discoveryv1.EndpointPort{
				{Name: new("all")}, {Name: new("zero"), Port: new(int32(0))}, {Port: new(int32(1))}, {Name: new(""),
					Port: new(int32(1))},
				{Name: new("big"), Port: new(int32(65536))},
				{Name: new("udp"), Port: new(int32(53)), Protocol: new(corev1.ProtocolUDP)},
				{Name: new("udp"), Port: new(int32(54)), Protocol: new(corev1.ProtocolUDP)},
				{Name: new("x"), Port: new(int32(54)), Protocol: new(corev1.Protocol("tcp"))},
			}
		}, func(s *snapshot.Slice) {
			s.Ports = []snapshot.SlicePort{{Protocol: snapshot.TCP, Port: 1}, {Name: "udp", Protocol: snapshot.UDP, Port: 53}}
		}, []string{
			`EndpointSlice default/web-abc: ports[2].name: missing: write the name of the Service's port, or ""`,
			"EndpointSlice default/web-abc: ports[4].port: 65536 is not a port (1-65535)",
			`EndpointSlice default/web-abc: ports[6].name: "udp" is the name of two ports: the first one counts`,
			`EndpointSlice default/web-abc: ports[7].protocol: "tcp" is unknown: write TCP, UDP or SCTP`,
		}},
		{"weighed", func(s *discoveryv1.EndpointSlice) { s.Annotations = map[string]string{"verdict/weight": "7"} },
			func(s *snapshot.Slice) {
				for i := range s.Endpoints {
					s.Endpoints[i].Weight = snapshot.Weight{Given: true, Parts: 700}
				}
			}, nil},
		{"weighed for Cilium",
			func(s *discoveryv1.EndpointSlice) {
				s.Annotations = map[string]string{"service.cilium.io/weight": "50"}
			},
			func(s *snapshot.Slice) {
				for i := range s.Endpoints {
					s.Endpoints[i].Weight = snapshot.Weight{Given: true, Parts: 50}
				}
			}, nil},
		{"weighed for both, and drained", func(s *discoveryv1.EndpointSlice) {
			s.Annotations = map[string]string{"service.cilium.io/weight": "50", "verdict-proxy.github.io/weight": "0"}
		}, func(s *snapshot.Slice) {
			for i := range s.Endpoints {
				s.Endpoints[i].Weight.Given = true
			}
		}, nil},
		{"weighed with too much",
			func(s *discoveryv1.EndpointSlice) { s.Annotations = map[string]string{"verdict/weight": "70000"} },
			func(*snapshot.Slice) {}, []string{
				`EndpointSlice default/web-abc: metadata.annotations[verdict/weight]: "70000" is not a number from 0 to 65535`}},
		{"when it happened", func(s *discoveryv1.EndpointSlice) {
			s.Annotations = map[string]string{"endpoints.kubernetes.io/last-change-trigger-time": "2026-01-02T03:04:05.6Z"}
		}, func(s *snapshot.Slice) { s.Triggered = time.Date(2026, 1, 2, 3, 4, 5, 6e8, time.UTC) }, nil},
		{"its version", func(s *discoveryv1.EndpointSlice) { s.ResourceVersion = "4711" },
			func(s *snapshot.Slice) { s.Version = "4711" }, nil},
		{"nobody knows when it happened", func(s *discoveryv1.EndpointSlice) {
			s.Annotations = map[string]string{"endpoints.kubernetes.io/last-change-trigger-time": "noon"}
		}, func(*snapshot.Slice) {}, []string{
			`EndpointSlice default/web-abc: metadata.annotations[endpoints.kubernetes.io/last-change-trigger-time]: ` +
				`"noon" is not a time such as 2006-01-02T15:04:05Z`,
		}},
		{"endpoints with leading zeros", func(s *discoveryv1.EndpointSlice) {
			s.Endpoints = []discoveryv1.Endpoint{{Addresses: []string{"10.180.00.001"}},
				{Addresses: []string{"::ffff:10.180.0.2"}}}
		}, func(s *snapshot.Slice) {
			s.Endpoints = nil
			for _, a := range ips("10.180.0.1", "10.180.0.2") {
				s.Endpoints = append(s.Endpoints, snapshot.Endpoint{Addr: a, Ready: true, Serving: true})
			}
		}, []string{
			`EndpointSlice default/web-abc: endpoints[0].addresses[0]: "10.180.00.001" is read as 10.180.0.1, as ` +
				`kube-proxy does: write that`,
			`EndpointSlice default/web-abc: endpoints[1].addresses[0]: "::ffff:10.180.0.2" is read as 10.180.0.2, as ` +
				`kube-proxy does: write that`,
		}},
		{"endpoints", func(s *discoveryv1.EndpointSlice) {
			s.Endpoints = []discoveryv1.Endpoint{
				{Addresses: []string{"10.1.0.1"}, Conditions: discoveryv1.EndpointConditions{Ready: new(false),
					Terminating: new(true)}, NodeName: new("n1")},
				{Addresses: nil},
				{Addresses: []string{"fd00::1"}},
				{Addresses: []string{"10.1.0.2"},
					Conditions: discoveryv1.EndpointConditions{Serving: new(false), Ready: new(false)},
					Hints: &discoveryv1.EndpointHints{
						ForZones: []discoveryv1.ForZone{{Name: "a"}, {Name: "b"}}, ForNodes: []discoveryv1.ForNode{{Name: "n1"}},
					}},
				{Addresses: []string{"10.1.0.1"}, NodeName: new("n2")},
				{Addresses: []string{"10.1.0.1"}, NodeName: new("n3")},
				{Addresses: []string{"169.254.1.1"}},
			}
		}, func(s *snapshot.Slice) {
			s.Endpoints = []snapshot.Endpoint{
				{Addr: netip.MustParseAddr("10.1.0.1"), Node: "n2", Ready: true, Serving: true},
				{Addr: netip.MustParseAddr("10.1.0.2"), ForZones: []string{"a", "b"}, ForNodes: []string{"n1"}},
			}
		}, []string{
			"EndpointSlice default/web-abc: endpoints[1].addresses: an endpoint needs an address",
			"EndpointSlice default/web-abc: endpoints[2].addresses[0]: fd00::1 is not of the slice's addressType IPv4",
			"EndpointSlice default/web-abc: endpoints[4].addresses[0]: 10.1.0.1 is there twice: the endpoint that is not " +
				"terminating counts, else the first",
			"EndpointSlice default/web-abc: endpoints[5].addresses[0]: 10.1.0.1 is there twice: the endpoint that is not " +
				"terminating counts, else the first",
			"EndpointSlice default/web-abc: endpoints[6].addresses[0]: 169.254.1.1 is special: nothing can be served there",
		}},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			in := apiSlice()
			test.change(in)
			var want *snapshot.Slice
			if test.want != nil {
				want = webSlice()
				test.want(want)
			}
			got, problems := (&converter{}).slice(in, nil)
			if !reflect.DeepEqual(got, want) {
				t.Errorf("got  %+v\nwant %+v", got, want)
			}
			if !slices.Equal(lines(problems), test.problems) {
				t.Errorf("problems:\n%s\nwant:\n%s", strings.Join(lines(problems), "\n"), strings.Join(test.problems, "\n"))
			}
		})
	}
}

func TestEndpoints(t *testing.T) {
	//lint:ignore SA1019 manifests still have it
	in := &corev1.Endpoints{
		ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "web"},
		//lint:ignore SA1019 likewise
		Subsets: []corev1.EndpointSubset{{
			Addresses:         []corev1.EndpointAddress{{IP: "10.1.0.1", NodeName: new("n1")}, {IP: "fd00::1"}, {IP: "nobody"}},
			NotReadyAddresses: []corev1.EndpointAddress{{IP: "10.1.0.2"}, {IP: "10.1.0.1"}},
			Ports:             []corev1.EndpointPort{{Name: "http", Port: 8080, Protocol: "TCP"}, {Name: "none"}},
		}, {
			Addresses: []corev1.EndpointAddress{{IP: "10.1.0.3"}},
			Ports:     []corev1.EndpointPort{{Name: "http", Port: 8081}},
		}},
	}
	want := []*snapshot.Slice{{
		Name: snapshot.Name{Namespace: "default", Name: "web:0"}, Service: "web",
		Ports: []snapshot.SlicePort{{Name: "http", Protocol: snapshot.TCP, Port: 8080}},
		Endpoints: []snapshot.Endpoint{
			{Addr: netip.MustParseAddr("10.1.0.1"), Node: "n1", Ready: true, Serving: true},
			{Addr: netip.MustParseAddr("fd00::1"), Ready: true, Serving: true},
			{Addr: netip.MustParseAddr("10.1.0.2")},
		},
	}, {
		Name: snapshot.Name{Namespace: "default", Name: "web:1"}, Service: "web",
		Ports:     []snapshot.SlicePort{{Name: "http", Protocol: snapshot.TCP, Port: 8081}},
		Endpoints: []snapshot.Endpoint{{Addr: netip.MustParseAddr("10.1.0.3"), Ready: true, Serving: true}},
	}}
	got, problems := (&converter{}).endpoints(in)
	if !reflect.DeepEqual(got, want) {
		t.Errorf("got  %+v\nwant %+v", got, want)
	}
	wantProblems := []string{
		`Endpoints default/web: subsets[0].addresses[2].ip: "nobody" is not an IP address`,
		"Endpoints default/web: subsets[0].notReadyAddresses[1].ip: 10.1.0.1 is there twice: the endpoint that is not " +
			"terminating counts, else the first",
	}
	if !slices.Equal(lines(problems), wantProblems) {
		t.Errorf("problems: %q", lines(problems))
	}
	in.Labels = map[string]string{"service.kubernetes.io/headless": ""}
	if got, problems := (&converter{}).endpoints(in); got != nil || problems != nil {
		t.Errorf("headless: %v %v", got, problems)
	}
}

func TestNode(t *testing.T) {
	got, problems := (&converter{}).node(&corev1.Node{
		ObjectMeta: metav1.ObjectMeta{Name: "n1", Labels: map[string]string{"topology.kubernetes.io/zone": "a"}},
		Spec:       corev1.NodeSpec{PodCIDR: "10.244.9.0/24", PodCIDRs: []string{"10.244.1.7/24", "fd00:1::/64", "x"}},
		Status: corev1.NodeStatus{Addresses: []corev1.NodeAddress{
			{Type: corev1.NodeHostName, Address: "n1"}, {Type: corev1.NodeExternalIP, Address: "192.0.2.1"},
			{Type: corev1.NodeInternalIP, Address: "10.0.0.1"}, {Type: corev1.NodeInternalIP, Address: "n1.example"},
			{Type: corev1.NodeInternalIP, Address: "fd00::1"}, {Type: corev1.NodeExternalIP, Address: "10.0.0.1"},
		}},
	})
	want := &snapshot.Node{
		Name: "n1", Zone: "a", Addresses: ips("10.0.0.1", "fd00::1", "192.0.2.1"),
		PodCIDRs: nets("10.244.1.0/24", "fd00:1::/64"),
	}
	if !reflect.DeepEqual(got, want) {
		t.Errorf("got %+v, want %+v", got, want)
	}
	wantProblems := []string{
		`Node n1: status.addresses[3].address: "n1.example" is not an IP address`,
		`Node n1: spec.podCIDRs[2]: "x" is not an address range like 10.0.0.0/8`,
	}
	if !slices.Equal(lines(problems), wantProblems) {
		t.Errorf("problems: %q", lines(problems))
	}
	got, _ = (&converter{}).node(&corev1.Node{Spec: corev1.NodeSpec{PodCIDR: "10.244.9.0/24"}})
	if !slices.Equal(got.PodCIDRs, nets("10.244.9.0/24")) {
		t.Errorf("podCIDR alone: %v", got.PodCIDRs)
	}
}

// TestNodeLeaves: for the reasons kube-proxy's health check knows.
func TestNodeLeaves(t *testing.T) {
	taint := func(key string) corev1.NodeSpec {
		return corev1.NodeSpec{Taints: []corev1.Taint{{Key: "a"}, {Key: key}}}
	}
	now := metav1.Now()
	for _, test := range []struct {
		node corev1.Node
		want string
	}{
		{corev1.Node{}, ""},
		{corev1.Node{Spec: taint("node.kubernetes.io/unschedulable")}, ""},
		{corev1.Node{Spec: taint("ToBeDeletedByClusterAutoscaler")}, "the Node has the taint ToBeDeletedByClusterAutoscaler"},
		{corev1.Node{ObjectMeta: metav1.ObjectMeta{DeletionTimestamp: &now}}, "the Node is being deleted"},
	} {
		if got, _ := (&converter{}).node(&test.node); got.Leaving != test.want {
			t.Errorf("%+v: leaving because %q; want %q", test.node, got.Leaving, test.want)
		}
	}
}

func TestServiceCIDRs(t *testing.T) {
	c := &converter{}
	a, problems := c.serviceCIDR(&networkingv1.ServiceCIDR{
		ObjectMeta: metav1.ObjectMeta{Name: "kubernetes"},
		Spec:       networkingv1.ServiceCIDRSpec{CIDRs: []string{"10.96.0.0/12", "fd00::/108", "10.96.0.0"}},
	})
	b, _ := c.serviceCIDR(&networkingv1.ServiceCIDR{Spec: networkingv1.ServiceCIDRSpec{CIDRs: []string{"10.96.0.0/12",
		"10.0.0.0/16"}}})
	if got, want := mergePrefixes([]*[]netip.Prefix{a, b}),
		nets("10.0.0.0/16", "10.96.0.0/12", "fd00::/108"); !slices.Equal(got,
		want) {
		t.Errorf("got %v, want %v", got, want)
	}
	want := `ServiceCIDR kubernetes: spec.cidrs[2]: "10.96.0.0" is an address, not a range: add /32 or /128 for this ` +
		`address alone`
	if !slices.Equal(lines(problems), []string{want}) {
		t.Errorf("problems: %q", lines(problems))
	}
	if mergePrefixes(nil) != nil {
		t.Error("no objects: the ranges must be unknown, which is nil")
	}
}

func TestSharedStrings(t *testing.T) {
	var s interner
	big := strings.Repeat("x", 100) + "node-1"
	if s.intern(big[100:]) != "node-1" || s.intern("") != "" {
		t.Error("text changed its argument")
	}
	a, b := s.internList([]string{big[100:]}), s.internList([]string{"node-1"})
	if &a[0] != &b[0] {
		t.Error("equal lists are not shared")
	}
	for i := range 3 * maxInterned {
		s.intern(strings.Repeat("y", i%7) + string(rune(i)))
	}
	if len(s.strings) > maxInterned {
		t.Errorf("%d strings are kept", len(s.strings))
	}
}
