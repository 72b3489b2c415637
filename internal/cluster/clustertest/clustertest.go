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

	"github.com/verdict-proxy/verdict/internal/cluster"
	"github.com/verdict-proxy/verdict/internal/status"
)

// Fake is a cluster. Its fields may not change while it is asked.
type Fake struct {
	// Statuses are the answers of the nodes by name; nil is a node that does not answer.
	Statuses map[string]*status.Status
	// Ports are what every node counts. Endpoints are shown if their Service is asked for.
	Ports []cluster.TopPort
	// Explanation is what explain prints.
	Explanation string
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
	return &discoveryv1.EndpointSliceList{}, nil
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
