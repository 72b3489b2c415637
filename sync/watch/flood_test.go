package watch

import (
	"fmt"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"

	"github.com/verdict-proxy/verdict/sync/snapshot"
)

// hostile are Services and slices as large and as wrong as the API server takes them, or worse.
func hostile() (services map[string]*corev1.Service, slices map[string]*discoveryv1.EndpointSlice) {
	services, slices = map[string]*corev1.Service{}, map[string]*discoveryv1.EndpointSlice{}
	service := func(what string, change func(*corev1.Service)) {
		services[what] = apiService()
		services[what].Annotations = map[string]string{}
		change(services[what])
	}
	slice := func(what string, change func(*discoveryv1.EndpointSlice)) {
		slices[what] = apiSlice()
		slices[what].Annotations = map[string]string{}
		change(slices[what])
	}
	long := strings.Repeat("\x00\u202e", 100_000)
	many := func(n int, text string) []string {
		out := make([]string, n)
		for i := range out {
			out[i] = strings.ReplaceAll(text, "%d", fmt.Sprintf("%d.%d", i/250%250, i%250+1))
		}
		return out
	}
	service("weights of commas",
		func(s *corev1.Service) { s.Annotations[annotationDomain+nameWeights] = strings.Repeat(",", 255_000) })
	service("many wrong weights",
		func(s *corev1.Service) { s.Annotations[annotationDomain+nameWeights] = strings.Repeat("a=-1,", 4000) })
	service("many weights", func(s *corev1.Service) {
		s.Annotations[annotationDomain+nameWeights] = strings.Join(many(50_000, "n%d=1"), ",")
	})
	service("a long wish for counters", func(s *corev1.Service) { s.Annotations[annotationAlias+nameCounters] = long })
	service("a long wish for a second chance",
		func(s *corev1.Service) { s.Annotations[annotationAlias+nameSecondChance] = long })
	service("a long drain deadline", func(s *corev1.Service) { s.Annotations[annotationAlias+nameDrain] = long })
	service("a long wish for a failover",
		func(s *corev1.Service) { s.Annotations[annotationAlias+nameExternalFailover] = long })
	service("a long scheduler", func(s *corev1.Service) { s.Annotations[annotationDomain+nameScheduler] = long })
	service("many flags of a scheduler",
		func(s *corev1.Service) {
			s.Annotations[annotationDomain+nameScheduler] = "mh" + strings.Repeat(",port", 50_000)
		})
	service("many unknown annotations", func(s *corev1.Service) {
		for i := range 10_000 {
			s.Annotations[annotationAlias+fmt.Sprint("drain", i)] = "30s"
		}
		s.Annotations[annotationDomain+long] = ""
	})
	service("leading zeros", func(s *corev1.Service) { s.Spec.ExternalIPs = many(50_000, "198.018.%d") })
	service("wrong external IPs", func(s *corev1.Service) { s.Spec.ExternalIPs = many(50_000, long[:300]+"%d") })
	service("many external IPs", func(s *corev1.Service) { s.Spec.ExternalIPs = many(50_000, "198.18.%d") })
	service("many load balancer addresses", func(s *corev1.Service) {
		for _, a := range many(50_000, "198.18.%d") {
			s.Status.LoadBalancer.Ingress = append(s.Status.LoadBalancer.Ingress, corev1.LoadBalancerIngress{IP: a})
		}
	})
	service("many ports at many addresses", func(s *corev1.Service) {
		s.Spec.ExternalIPs, s.Spec.Ports = many(1000, "198.18.%d"), nil
		for i := range 1000 {
			s.Spec.Ports = append(s.Spec.Ports, corev1.ServicePort{Name: fmt.Sprint("p", i), Port: int32(i + 1)})
		}
	})
	service("ports that are none", func(s *corev1.Service) {
		for i := range 20_000 {
			s.Spec.Ports = append(s.Spec.Ports, corev1.ServicePort{Name: fmt.Sprint("p", i), Port: 80800, NodePort: -1})
		}
	})
	service("ports and names twice", func(s *corev1.Service) {
		for range 20_000 {
			s.Spec.Ports = append(s.Spec.Ports, s.Spec.Ports[0])
		}
	})
	service("ports without a good name", func(s *corev1.Service) {
		for i := range 1000 {
			s.Spec.Ports = append(s.Spec.Ports,
				corev1.ServicePort{Name: long[:400] + fmt.Sprint(i), Port: int32(i + 1), Protocol: "x"})
		}
	})
	service("source ranges", func(s *corev1.Service) { s.Spec.LoadBalancerSourceRanges = many(50_000, "10.9.%d/32") })
	service("wrong source ranges",
		func(s *corev1.Service) { s.Spec.LoadBalancerSourceRanges = many(50_000, "10.9.%d/99") })
	service("affinity for ages", func(s *corev1.Service) {
		s.Spec.SessionAffinity, s.Spec.SessionAffinityConfig = corev1.ServiceAffinityClientIP, stickyFor(1<<31-1)
	})
	service("words that are none", func(s *corev1.Service) {
		s.Spec.SessionAffinity, s.Spec.ExternalTrafficPolicy = corev1.ServiceAffinity(long),
			corev1.ServiceExternalTrafficPolicy(long)
		s.Spec.ClusterIP, s.Spec.ClusterIPs = long, []string{long}
	})
	slice("a time that is none",
		func(s *discoveryv1.EndpointSlice) { s.Annotations[corev1.EndpointsLastChangeTriggerTime] = long })
	slice("a weight that is none",
		func(s *discoveryv1.EndpointSlice) {
			s.Annotations[annotationDomain+nameWeight] = strings.Repeat("1", 250_000)
		})
	slice("two weights", func(s *discoveryv1.EndpointSlice) {
		s.Annotations[annotationDomain+nameWeight], s.Annotations[annotationAlias+nameWeight] = "1", long
	})
	slice("a type that is none", func(s *discoveryv1.EndpointSlice) { s.AddressType = discoveryv1.AddressType(long) })
	slice("the same endpoint", func(s *discoveryv1.EndpointSlice) {
		for range 1000 {
			s.Endpoints = append(s.Endpoints, s.Endpoints[0])
		}
	})
	slice("special endpoints", func(s *discoveryv1.EndpointSlice) {
		for _, a := range []string{"127.0.0.1", "169.254.169.254", "224.0.0.1", "0.0.0.0", "255.255.255.255", "::1",
			"fe80::1%eth0", long} {
			s.Endpoints = append(s.Endpoints, discoveryv1.Endpoint{Addresses: []string{a}}, discoveryv1.Endpoint{})
		}
	})
	slice("many ports", func(s *discoveryv1.EndpointSlice) {
		for i := range 40_000 {
			s.Ports = append(s.Ports, discoveryv1.EndpointPort{Name: new(fmt.Sprint("p", i)), Port: new(int32(i))})
		}
	})
	return services, slices
}

// TestNoObjectFloodsTheLog: whatever an object holds, what is said of it is a few lines of bounded length that name the
// object, and what is kept of it is bounded.
func TestNoObjectFloodsTheLog(t *testing.T) {
	services, slices := hostile()
	c := &converter{}
	check := func(what string, problems []*Problem, begin time.Time) {
		t.Helper()
		if n := len(problems); n == 0 || n > 2*maxObjectProblems+1 {
			t.Errorf("%s: %d problems", what, n)
		}
		for _, p := range problems {
			if text := p.Error(); len(text) > 700 || !strings.Contains(text, "default/web") ||
				strings.ContainsAny(text, "\x00\u202e") {
				t.Errorf("%s: %d bytes: %.200q", what, len(text), text)
			}
		}
		if took := time.Since(begin); took > 5*time.Second { // it was 3 s before, for one of them alone, on a machine at rest
			t.Errorf("%s: took %v", what, took)
		}
	}
	for what, o := range services {
		begin := time.Now()
		s, problems := c.service(o, nil)
		check(what, problems, begin)
		if s == nil {
			continue
		}
		if len(s.ExternalIPs) > maxAddresses || len(s.LoadBalancerIPs) > maxAddresses || len(s.SourceRanges) > maxRanges+2 ||
			len(s.Ports) > maxPorts || s.Affinity > maxAffinity ||
			len(s.Ports)*(len(s.ExternalIPs)+len(s.LoadBalancerIPs)+len(s.ClusterIPs)) > maxFrontends {
			t.Errorf("%s: %d external IPs, %d of load balancers, %d ranges, %d ports", what, len(s.ExternalIPs),
				len(s.LoadBalancerIPs), len(s.SourceRanges), len(s.Ports))
		}
		if s.Scheduling != nil && len(s.Scheduling.Weights) > maxWeightList {
			t.Errorf("%s: %d weights", what, len(s.Scheduling.Weights))
		}
	}
	for what, o := range slices {
		begin := time.Now()
		s, problems := c.slice(o, nil)
		check(what, problems, begin)
		if s != nil && (len(s.Ports) > maxPorts || len(s.Endpoints) > 1000) {
			t.Errorf("%s: %d ports, %d endpoints", what, len(s.Ports), len(s.Endpoints))
		}
	}
}

// TestLargeServicesAreWhole: a media server with 20,000 ports at a load balancer address, and the ranges of a whole
// country, are below all limits.
func TestLargeServicesAreWhole(t *testing.T) {
	o := apiService()
	o.Spec.Type, o.Spec.Ports = corev1.ServiceTypeLoadBalancer, nil
	o.Spec.ClusterIPs = append(o.Spec.ClusterIPs, "fd00::1")
	o.Status.LoadBalancer.Ingress = []corev1.LoadBalancerIngress{{IP: "203.0.113.1"}, {IP: "2001:db8::1"}}
	sl := apiSlice()
	sl.Ports = nil
	for i := range 20_000 {
		name, number := fmt.Sprint("rtp-", i), int32(30_000+i)
		o.Spec.Ports = append(o.Spec.Ports, corev1.ServicePort{Name: name, Protocol: corev1.ProtocolUDP, Port: number})
		sl.Ports = append(sl.Ports,
			discoveryv1.EndpointPort{Name: &name, Protocol: new(corev1.ProtocolUDP), Port: &number})
	}
	for i := range 16_000 {
		o.Spec.LoadBalancerSourceRanges = append(o.Spec.LoadBalancerSourceRanges,
			fmt.Sprintf("20.%d.%d.0/24", i/128, i%128*2))
	}
	c := &converter{}
	s, problems := c.service(o, nil)
	if len(problems) > 0 || len(s.Ports) != 20_000 || len(s.SourceRanges) != 16_000 || len(s.LoadBalancerIPs) != 2 {
		t.Errorf("%d ports, %d ranges, %v, %v", len(s.Ports), len(s.SourceRanges), s.LoadBalancerIPs, problems)
	}
	if sl, problems := c.slice(sl, nil); len(problems) > 0 || len(sl.Ports) != 20_000 {
		t.Errorf("%d ports of the slice, %v", len(sl.Ports), problems)
	}
}

// TestLimitsKeepWhatIsFirst: who adds too much loses what he added, and opens nothing.
func TestLimitsKeepWhatIsFirst(t *testing.T) {
	services, _ := hostile()
	c := &converter{}
	s, _ := c.service(services["many ports at many addresses"], nil)
	if n := len(s.ExternalIPs); n != maxFrontends/1000-1 || s.ExternalIPs[0].String() != "198.18.0.1" ||
		len(s.Ports) != 1000 {
		t.Errorf("%d ports at %d addresses", len(s.Ports), n)
	}
	ranges := services["source ranges"]
	ranges.Spec.LoadBalancerSourceRanges = append(ranges.Spec.LoadBalancerSourceRanges, "fd00::/8")
	s, _ = c.service(ranges, nil)
	if n := len(s.SourceRanges); n != maxRanges+1 || s.SourceRanges[n-1] != noSource[1] {
		t.Errorf("%d ranges, the last is %v", n, s.SourceRanges[n-1])
	}
	fits := apiService()
	fits.Spec.ExternalIPs = []string{"198.51.100.1"}
	s, problems := c.service(fits, nil)
	if len(problems) != 0 || len(s.ExternalIPs) != 1 || s.Age != (snapshot.Age{}) {
		t.Errorf("%+v %v", s, problems)
	}
}
