// Package stories holds what happens to Verdict on a real cluster, under clients that connect all the time: migrations,
// upgrades, deaths and reboots. It counts what clients see.
package stories

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"regexp"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"

	"github.com/verdict-proxy/verdict/conformance/cluster"
)

// Bed is a cluster with servers and clients.
type Bed struct {
	*cluster.Cluster
	// OldImage is the image of an older version.
	OldImage string
	// Outage is how long the API server is gone in the story about that.
	Outage time.Duration
	// Hooks chooses what servers of rolling updates do before they end, by name; nil is all. Rolls is how often each is
	// rolled; zero is once.
	Hooks *regexp.Regexp
	Rolls int

	// Reports is the directory for the records of the cluster, the logs of its containers, and the records of failures
	// that nothing explains.
	Reports string

	client  *kubernetes.Clientset
	watch   *watch
	changes *record
	// served is when the API server came back last; zero if it was not away.
	served time.Time
	// away is the node whose clients do not count, since it does not run; nil if there is none.
	away *cluster.Node
}

const (
	podClientPort  = 9100
	nodeClientPort = 9101
	system         = "kube-system"
)

// Prepare starts servers and clients on the cluster, and waits until all clients are answered.
func (b *Bed) Prepare(ctx context.Context) error {
	var err error
	if b.client, err = b.Client(); err != nil {
		return err
	}
	var logs []string
	for _, n := range b.Nodes {
		logs = append(logs, n.PodLogs())
	}
	if b.changes, err = startRecord(b.Reports, logs); err != nil {
		return err
	}
	for _, n := range b.Nodes {
		if err := b.label(ctx, n, "verdict", true); err != nil {
			return err
		}
	}
	if err := b.UseVerdict(ctx, cluster.VerdictImage, additions("")...); err != nil {
		return err
	}
	b.Log("starting servers and clients")
	if b.watch, err = b.record(ctx); err != nil { // of what began before, the recorder would know too little
		return err
	}
	if err := b.Apply(ctx, fmt.Sprintf(traffic, cluster.WorkloadImage)); err != nil {
		return err
	}
	for _, n := range b.Nodes {
		if err := b.startOutside(n); err != nil {
			return err
		}
	}
	for _, name := range []string{"deployment/echo", "daemonset/client", "daemonset/client-node"} {
		if err := b.rolledOut(ctx, "default", name); err != nil {
			return err
		}
	}
	if _, err = b.reports(ctx); err != nil {
		return err
	}
	// Connections that were opened before the servers were ready fail until then.
	select {
	case <-ctx.Done():
	case <-time.After(settle):
	}
	return ctx.Err()
}

// Close ends the clients that are on no node, and the recorder.
func (b *Bed) Close() error {
	var errs []error
	if b.changes != nil {
		errs = append(errs, b.changes.close())
	}
	if b.watch != nil {
		errs = append(errs, b.watch.close())
	}
	for _, n := range b.Nodes {
		errs = append(errs, b.StopOutside(outsideClient(n)))
	}
	return errors.Join(errs...)
}

func outsideClient(n *cluster.Node) string { return "client-" + n.Name }

// outsidePort is where the client reports that uses a node's ports from outside.
func (b *Bed) outsidePort(n *cluster.Node) int {
	for i, other := range b.Nodes {
		if other == n {
			return 9200 + i
		}
	}
	return 0
}

func (b *Bed) startOutside(n *cluster.Node) error {
	if err := b.StopOutside(outsideClient(n)); err != nil {
		return err
	}
	return b.StartOutside(outsideClient(n), "connect", fmt.Sprintf("127.0.0.1:%d", b.outsidePort(n)), n.IP4+":30080",
		"["+n.IP6+"]:30080")
}

// label gives a node a label that a DaemonSet wants, or takes it away.
func (b *Bed) label(ctx context.Context, n *cluster.Node, name string, wanted bool) error {
	label := name + "-"
	if wanted {
		label = name + "=wanted"
	}
	_, err := b.Kubectl(ctx, "label", "--overwrite", "node", n.Name, label)
	return err
}

func (b *Bed) rolledOut(ctx context.Context, namespace, name string) error {
	_, err := b.Kubectl(ctx, "-n", namespace, "rollout", "status", name, "--timeout=4m")
	return err
}

// verdict installs Verdict on the nodes with its label, with a further argument if there is one.
func (b *Bed) verdict(ctx context.Context, image, argument string) error {
	if err := b.InstallVerdict(ctx, image, additions(argument)...); err != nil {
		return err
	}
	return b.rolledOut(ctx, system, "daemonset/verdict")
}

// additions restrict Verdict to the nodes with its label, and give it a further argument if there is one.
func additions(argument string) []cluster.Addition {
	more := []cluster.Addition{{Path: "nodeSelector/verdict", Value: "wanted"}}
	if argument != "" {
		more = append(more, cluster.Addition{Path: "containers/0/args/-", Value: argument})
	}
	return more
}

// reports asks every client, by its name, until it has answered and has been answered itself.
func (b *Bed) reports(ctx context.Context) (map[string]cluster.Report, error) {
	at, err := b.clients(ctx)
	if err != nil {
		return nil, err
	}
	client := b.fromOutside()
	var mu sync.Mutex
	var wait sync.WaitGroup
	reports, errs := map[string]cluster.Report{}, []error{}
	for name, address := range at {
		wait.Go(func() {
			var r cluster.Report
			err := cluster.Wait(ctx, time.Minute, "client "+name+" reports", func() error {
				return fetch(client, address+"/report", &r)
			})
			mu.Lock()
			defer mu.Unlock()
			reports[name], errs = r, append(errs, err)
		})
	}
	wait.Wait()
	return reports, errors.Join(errs...)
}

// fromOutside returns a client of HTTP that is no part of the cluster.
func (b *Bed) fromOutside() *http.Client {
	return &http.Client{Timeout: 5 * time.Second,
		Transport: &http.Transport{DialContext: cluster.DialFrom(b.Outside()), DisableKeepAlives: true}}
}

// fetch reads a report at a URL without its scheme.
func fetch(client *http.Client, at string, r *cluster.Report) error {
	answer, err := client.Get("http://" + at)
	if err != nil {
		return err
	}
	defer answer.Body.Close()
	*r = cluster.Report{}
	if err := json.NewDecoder(answer.Body).Decode(r); err != nil {
		return err
	}
	if r.Connections == 0 {
		return fmt.Errorf("no connection yet, %d failed: %v", r.Failed, r.Failures[max(0, len(r.Failures)-1):])
	}
	return nil
}

// clients returns where each client reports. Those of a node that is away are left out.
func (b *Bed) clients(ctx context.Context) (map[string]string, error) {
	at := map[string]string{}
	for _, n := range b.Nodes {
		if n != b.away {
			at["outside "+n.Name] = fmt.Sprintf("127.0.0.1:%d", b.outsidePort(n))
		}
	}
	return at, b.clientPods(ctx, at, map[string]int{"client": podClientPort, "client-node": nodeClientPort})
}

// clientPods adds where clients report that are pods, by the app that they are of.
func (b *Bed) clientPods(ctx context.Context, at map[string]string, ports map[string]int) error {
	for app, port := range ports {
		pods, err := b.client.CoreV1().Pods("default").List(ctx, metav1.ListOptions{LabelSelector: "app=" + app})
		if err != nil {
			return err
		}
		for _, p := range pods.Items {
			if p.Status.Phase == corev1.PodRunning && (b.away == nil || p.Spec.NodeName != b.away.Name) {
				at[app+" "+p.Spec.NodeName] = fmt.Sprintf("%s:%d", p.Status.PodIP, port)
			}
		}
	}
	return nil
}

// traffic is servers on every node, behind a Service of both families, and two clients on each node. A server that is
// asked to end stays for some seconds, as those of careful people do. All ask for processor time: without, a machine
// with other work gives them next to none, and a server that has accepted a connection does not answer it.
const traffic = `apiVersion: v1
kind: Service
metadata: {name: echo}
spec:
  type: NodePort
  ipFamilyPolicy: RequireDualStack
  clusterIP: 10.96.0.80
  clusterIPs: [10.96.0.80, "fd00:10:96::80"]
  selector: {app: echo}
  ports: [{port: 80, targetPort: 8080, nodePort: 30080}]
---
apiVersion: apps/v1
kind: Deployment
metadata: {name: echo}
spec:
  replicas: 6
  selector: {matchLabels: {app: echo}}
  template:
    metadata: {labels: {app: echo}}
    spec:
      topologySpreadConstraints:
      - {maxSkew: 1, topologyKey: kubernetes.io/hostname, whenUnsatisfiable: ScheduleAnyway,
         labelSelector: {matchLabels: {app: echo}}}
      terminationGracePeriodSeconds: 10
      containers:
      - name: echo
        image: %[1]s
        args: [serve, ":8080"]
        resources: {requests: {cpu: 200m}}
        readinessProbe: {tcpSocket: {port: 8080}, periodSeconds: 2}
        lifecycle: {preStop: {sleep: {seconds: 8}}}
---
apiVersion: apps/v1
kind: DaemonSet
metadata: {name: client}
spec:
  selector: {matchLabels: {app: client}}
  template:
    metadata: {labels: {app: client}}
    spec:
      terminationGracePeriodSeconds: 1
      containers:
      - name: client
        image: %[1]s
        args: [connect, ":9100", "10.96.0.80:80", "[fd00:10:96::80]:80"]
        resources: {requests: {cpu: 100m}}
---
apiVersion: apps/v1
kind: DaemonSet
metadata: {name: client-node}
spec:
  selector: {matchLabels: {app: client-node}}
  template:
    metadata: {labels: {app: client-node}}
    spec:
      hostNetwork: true
      terminationGracePeriodSeconds: 1
      containers:
      - name: client
        image: %[1]s
        args: [connect, ":9101", "10.96.0.80:80", "[fd00:10:96::80]:80", "$(NODE_IP):30080"]
        env: [{name: NODE_IP, valueFrom: {fieldRef: {fieldPath: status.hostIP}}}]
        resources: {requests: {cpu: 100m}}
`
