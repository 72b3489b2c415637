// Package clustertest is a cluster for tests of what shows one: nodes with a pod of Verdict each, whose answers the
// test makes.
package clustertest

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
	"sync/atomic"
	"time"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/verdict-proxy/verdict/internal/answers/cluster"
	"github.com/verdict-proxy/verdict/internal/proxy/status"
)

// Fake is a cluster. Its fields may not change while it is asked.
type Fake struct {
	// Objects creates and removes; nil if a test does not.
	cluster.Objects
	// Statuses are the answers of the nodes by name; nil is a node that does not answer.
	Statuses map[string]*status.Status
	// Ports are what every node counts. Endpoints are shown if their Service is asked for.
	Ports []cluster.TopPort
	// Explanation is what explain prints.
	Explanation string
	// Flows, if not nil, says what flows prints on a node.
	Flows func(node string, argv []string) string
	// Answers are what other commands print, by their names.
	Answers map[string]string
	// Asked counts the commands that were run.
	Asked atomic.Int64
}

// Cluster returns the cluster to ask.
func (f *Fake) Cluster() *cluster.Cluster {
	return &cluster.Cluster{API: f, Exec: f, Namespace: cluster.DefaultNamespace, Selector: cluster.DefaultSelector,
		Timeout: cluster.DefaultTimeout, Parallel: cluster.DefaultParallel}
}

// Nodes implements cluster.API.
func (f *Fake) Nodes(context.Context) (nodes []corev1.Node, err error) {
	for name := range f.Statuses {
		nodes = append(nodes, corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: name}})
	}
	return nodes, nil
}

// Pods implements cluster.API.
func (f *Fake) Pods(context.Context, string, string) (pods []corev1.Pod, err error) {
	for name := range f.Statuses {
		p, _ := f.Pod(context.Background(), cluster.DefaultNamespace, "verdict-"+name)
		pods = append(pods, *p)
	}
	return pods, nil
}

// Pod implements cluster.API. Verdict's pods are on the nodes that they are named after, others on one that answers.
func (f *Fake) Pod(_ context.Context, namespace, name string) (*corev1.Pod, error) {
	p := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: name},
		Spec: corev1.PodSpec{Containers: []corev1.Container{{Name: "verdict"}}},
		Status: corev1.PodStatus{Phase: corev1.PodRunning, PodIPs: []corev1.PodIP{{IP: "10.244.1.7"}},
			ContainerStatuses: []corev1.ContainerStatus{{Name: "verdict",
				State: corev1.ContainerState{Running: &corev1.ContainerStateRunning{}}}}}}
	for node, s := range f.Statuses {
		if name == "verdict-"+node || !strings.HasPrefix(name, "verdict-") && s != nil {
			p.Spec.NodeName = node
		}
	}
	return p, nil
}

// Service implements cluster.API.
func (f *Fake) Service(_ context.Context, namespace, name string) (*corev1.Service, error) {
	return &corev1.Service{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: name},
		Spec: corev1.ServiceSpec{ClusterIPs: []string{"10.96.20.3"},
			Ports: []corev1.ServicePort{{Name: "http", Port: 80, Protocol: corev1.ProtocolTCP}}}}, nil
}

// Slices implements cluster.API.
func (f *Fake) Slices(context.Context, string, string) (*discoveryv1.EndpointSliceList, error) {
	return &discoveryv1.EndpointSliceList{Items: []discoveryv1.EndpointSlice{{ObjectMeta: metav1.ObjectMeta{
		Name: "cart-1", Namespace: "shop", Labels: map[string]string{discoveryv1.LabelServiceName: "cart"}}}}}, nil
}

// Logs implements cluster.API: there are none.
func (f *Fake) Logs(context.Context, string, string, string, int, bool) ([]byte, error) {
	return nil, nil
}

// Exec implements cluster.Executor.
func (f *Fake) Exec(_ context.Context, _, pod, _ string, argv []string, _ io.Reader, stdout, _ io.Writer,
) (int, error) {
	f.Asked.Add(1)
	s := f.Statuses[strings.TrimPrefix(pod, "verdict-")]
	if s == nil {
		return 0, errors.New("no answer within 15s")
	}
	switch argv[1] {
	case "status":
		now := *s
		now.Time = time.Now()
		return 0, json.NewEncoder(stdout).Encode(now)
	case "top":
		only := ""
		if i := slices.IndexFunc(argv, func(a string) bool { return strings.HasPrefix(a, "--service=") }); i >= 0 {
			only = strings.TrimPrefix(argv[i], "--service=")
		}
		ports, sum := f.portsOf(only), 0.0
		for _, p := range ports {
			sum += p.Rate
		}
		return 0, json.NewEncoder(stdout).Encode(map[string]any{"rate": sum, "portCount": len(ports), "ports": ports})
	case "explain":
		_, err := io.WriteString(stdout, f.Explanation)
		return 0, err
	}
	if argv[1] == "flows" && f.Flows != nil {
		_, err := io.WriteString(stdout, f.Flows(strings.TrimPrefix(pod, "verdict-"), argv[1:]))
		return 0, err
	}
	if answer, ok := f.Answers[argv[1]]; ok {
		_, err := io.WriteString(stdout, answer)
		return 0, err
	}
	return 0, fmt.Errorf("nobody answers %q", argv)
}

func (f *Fake) portsOf(only string) (ports []cluster.TopPort) {
	for _, p := range f.Ports {
		if name := p.Service + ":" + p.Port; only != "" && only != p.Service && only != name {
			continue
		}
		if only == "" {
			p.Endpoints = nil
		}
		ports = append(ports, p)
	}
	return ports
}

// Large returns a cluster of 150 nodes with names as clouds give them. Of those, LargeWrong are not in order, the first
// of which reject a Service, and LargeWatch are late or have ejected an endpoint. All nodes made the same change
// twice, within two seconds by their clocks.
func Large() (f *Fake) {
	now := time.Now().Truncate(time.Second)
	began, since := now.Add(-time.Hour), now.Add(-5*time.Minute)
	f = &Fake{Statuses: map[string]*status.Status{}, Explanation: "Outcome    sent to one of 3 endpoints\n"}
	for i := range 150 {
		s := &status.Status{Schema: status.Schema, Version: "v0.2.0", Backend: "nftables", First: &began, Services: 431,
			Digest: 7, Programmed: status.Versions{Services: "812", EndpointSlices: "8130"}}
		s.Drift.Checked = &now
		for k := range 2 {
			at := now.Add(-time.Duration(k)*3*time.Second - time.Duration(i)*13*time.Millisecond)
			s.Recent = append(s.Recent, status.Change{At: at,
				Services: []string{"monitoring/kube-prometheus-stack-prometheus-node-exporter"}, Count: 1, Replaced: 1,
				Seconds: 0.0003 * float64(i+1)})
		}
		name := LargeNode(i)
		switch i {
		case 40, 77, 149:
			f.Statuses[name] = nil
			continue
		case 60, 110:
			s.Quarantined = status.Quarantined{Count: 1, Services: []status.QuarantinedService{
				{Service: "lab/huge", Since: since, Error: "the table ip verdict has no room for 140,000 of 131,072 elements"}}}
		case 90:
			s.Failing = &status.Failing{Since: since, Error: "netlink receive: operation not permitted"}
		case 100:
			s.Pending.LagSeconds, s.Pending.EndpointSlices = 4.2, 3
		}
		if i >= 120 && i < 123 {
			s.Ejected = status.Ejected{Count: 1, Endpoints: []status.EjectedEndpoint{
				{Service: "checkout/payment-gateway-production", Endpoint: "[2001:db8:aaaa:bbbb:cccc:dddd:eeee:1]:8080",
					Cause: "unanswered", Since: since}}}
		}
		f.Statuses[name] = s
	}
	for i := range 40 {
		f.Ports = append(f.Ports, cluster.TopPort{Port: "http-metrics", Rate: 40.5 / float64(i+1),
			Service: fmt.Sprintf("monitoring/kube-prometheus-stack-prometheus-node-exporter-%02d", i)})
	}
	return f
}

// What Look says of the nodes of Large.
const LargeWrong, LargeWatch = 6, 4

// LargeNode is the name of a node of Large.
func LargeNode(i int) string {
	if i%2 == 0 {
		return fmt.Sprintf("ip-10-0-%03d-%d.eu-central-1.compute.internal", i, i+100)
	}
	return fmt.Sprintf("gke-production-europe-west1-highmem-pool-7f3a9c21-x%03d", i)
}
