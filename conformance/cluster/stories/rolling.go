package stories

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/verdict-proxy/verdict/conformance/cluster"
)

// hook is what the servers of a rolling update do before they end.
type hook struct {
	name, preStop string
	// safe says that no connection may fail. barrier says that the hook waits until all nodes have got it.
	safe, barrier bool
}

const everywherePath = "/everywhere?service=default/rolling&timeout=20s"

var (
	sleepHooks = []hook{
		{name: "sleep 0"},
		{name: "sleep 5", preStop: "preStop: {sleep: {seconds: 5}}", safe: true},
		{name: "sleep 30", preStop: "preStop: {sleep: {seconds: 30}}", safe: true},
	}
	// barrierHooks ask whether all nodes have got it: the kubelet asks, or a program in the pod.
	barrierHooks = []hook{
		{name: "barrier, asked by the kubelet", safe: true, barrier: true,
			preStop: fmt.Sprintf("preStop: {httpGet: {host: 127.0.0.1, port: 10256, path: %q}}", everywherePath)},
		{name: "barrier, asked by the pod", safe: true, barrier: true,
			preStop: fmt.Sprintf("preStop: {exec: {command: [/workload, get, %q]}}", "http://$HOST_IP:10256"+everywherePath)},
	}
)

// rollingUnderKubeProxy updates a Deployment whose servers end at once when they are told to. What its clients see is
// only shown: it is not Verdict's doing.
func rollingUnderKubeProxy(ctx context.Context, b *Bed) error {
	hooks := slices.Clone(sleepHooks)
	for i := range hooks {
		hooks[i].safe = false
	}
	return b.rollAll(ctx, hooks)
}

// rolling does so under Verdict, also with hooks that wait until all nodes have got it.
func rolling(ctx context.Context, b *Bed) error {
	err := b.InstallEverywhere(ctx, cluster.VerdictImage, additions("")...)
	if err == nil {
		err = b.rolledOut(ctx, system, "daemonset/verdict")
	}
	if err == nil {
		err = b.rolledOut(ctx, system, "deployment/verdict-collector")
	}
	if err == nil {
		err = b.rollAll(ctx, slices.Concat(sleepHooks, barrierHooks))
	}
	_, errDelete := b.Kubectl(ctx, "-n", system, "delete", "deployment", "verdict-collector", "--ignore-not-found")
	return errors.Join(err, errDelete, b.verdict(ctx, cluster.VerdictImage, ""))
}

// rollAll updates the Deployment once for each hook, and logs what its clients saw.
func (b *Bed) rollAll(ctx context.Context, hooks []hook) (err error) {
	defer func() {
		_, errDelete := b.Kubectl(ctx, "delete", "deployment/rolling", "service/rolling", "daemonset/rolling-client",
			"--wait=true")
		err = errors.Join(err, errDelete)
	}()
	for i, h := range b.chosen(hooks) {
		if err := b.applyRolling(ctx, h, fmt.Sprintf("first-%d", i)); err != nil {
			return fmt.Errorf("%s: %w", h.name, err)
		}
		if err := b.rollOnce(ctx, h, fmt.Sprintf("second-%d", i)); err != nil {
			return fmt.Errorf("%s: %w", h.name, err)
		}
	}
	return nil
}

// chosen returns the hooks that are asked for, each as often as it is rolled.
func (b *Bed) chosen(hooks []hook) (all []hook) {
	for _, h := range hooks {
		if b.Hooks == nil || b.Hooks.MatchString(h.name) {
			all = append(all, slices.Repeat([]hook{h}, max(1, b.Rolls))...)
		}
	}
	return all
}

// applyRolling applies the Deployment with a hook, and waits until no pod of the version before is left.
func (b *Bed) applyRolling(ctx context.Context, h hook, version string) error {
	text := fmt.Sprintf(rollingTraffic, cluster.WorkloadImage, h.preStop, version)
	if err := b.Apply(ctx, text); err != nil {
		return err
	}
	for _, name := range []string{"deployment/rolling", "daemonset/rolling-client"} {
		if err := b.rolledOut(ctx, "default", name); err != nil {
			return err
		}
	}
	return cluster.Wait(ctx, 2*time.Minute, "the old pods are gone", func() error {
		pods, err := b.client.CoreV1().Pods("default").List(ctx, metav1.ListOptions{
			LabelSelector: "app=rolling,version!=" + version})
		if err == nil && len(pods.Items) > 0 {
			err = fmt.Errorf("%d are there", len(pods.Items))
		}
		return err
	})
}

// rollOnce updates the Deployment to another version and counts what its clients see.
func (b *Bed) rollOnce(ctx context.Context, h hook, version string) error {
	select { // connections of the update before
	case <-ctx.Done():
	case <-time.After(settle):
	}
	before, err := b.rollingReports(ctx)
	if err != nil {
		return err
	}
	answers := b.everywhereAnswers
	if !h.barrier {
		answers = func(context.Context) (int, error) { return 0, nil }
	}
	answered, err := answers(ctx)
	if err != nil {
		return err
	}
	b.watch.look() // what failed before is no part of this update
	begin := time.Now()
	if err := b.applyRolling(ctx, h, version); err != nil {
		return err
	}
	took := time.Since(begin)
	select {
	case <-ctx.Done():
	case <-time.After(settle):
	}
	after, err := b.rollingReports(ctx)
	if err != nil {
		return err
	}
	var sum Row
	for name, r := range after {
		sum.add(name, before[name], r)
	}
	failures := sum.opened()
	b.Log("rolling update, %s: %v until the last old pod was gone, %d connections, %d failed %q; all, held ones and "+
		"other clients' too: %s", h.name, took.Round(100*time.Millisecond), sum.Connections, sum.Failed, failures,
		causeWords(b.watch.look()))
	if h.safe && sum.Failed > 0 {
		return fmt.Errorf("%d of %d connections failed: %q", sum.Failed, sum.Connections, failures)
	}
	now, err := answers(ctx)
	if err == nil && h.barrier && now < answered+rollingServers {
		err = fmt.Errorf("the collector has answered %d hooks that all nodes have got it; want %d", now-answered,
			rollingServers)
	}
	return err
}

// everywhereAnswers returns how often the collectors have answered that all nodes have got it.
func (b *Bed) everywhereAnswers(ctx context.Context) (int, error) {
	pods, err := b.client.CoreV1().Pods(system).List(ctx, metav1.ListOptions{
		LabelSelector: "app.kubernetes.io/name=verdict-collector"})
	if err != nil {
		return 0, err
	}
	client := b.fromOutside()
	sum := 0
	for _, p := range pods.Items {
		answer, err := client.Get("http://" + p.Status.PodIP + ":10267/metrics")
		if err != nil {
			return 0, err
		}
		const series = `verdict_collector_wait_duration_seconds_count{outcome="everywhere"} `
		lines := bufio.NewScanner(answer.Body)
		for lines.Scan() {
			if n, ok := strings.CutPrefix(lines.Text(), series); ok {
				count, err := strconv.Atoi(n)
				if err != nil {
					return 0, errors.Join(err, answer.Body.Close())
				}
				sum += count
			}
		}
		if err := errors.Join(lines.Err(), answer.Body.Close()); err != nil {
			return 0, err
		}
	}
	return sum, nil
}

// rollingServers is how many servers the Deployment has.
const rollingServers = 6

// rollingReports asks the clients of the Deployment.
func (b *Bed) rollingReports(ctx context.Context) (map[string]cluster.Report, error) {
	client := b.fromOutside()
	reports := map[string]cluster.Report{}
	for _, n := range b.Nodes {
		pod, err := b.podOf(ctx, "app=rolling-client", n)
		if err != nil {
			return nil, err
		}
		var r cluster.Report
		if err := cluster.Wait(ctx, time.Minute, "the client on "+n.Name+" reports", func() error {
			return fetch(client, pod.Status.PodIP+":9100/report", &r)
		}); err != nil {
			return nil, err
		}
		reports[n.Name] = r
	}
	return reports, nil
}

// rollingTraffic is servers that end at once, and a client on each node.
const rollingTraffic = `apiVersion: v1
kind: Service
metadata: {name: rolling}
spec:
  ipFamilyPolicy: RequireDualStack
  clusterIP: 10.96.0.81
  clusterIPs: [10.96.0.81, "fd00:10:96::81"]
  selector: {app: rolling}
  ports: [{port: 80, targetPort: 8080}]
---
apiVersion: apps/v1
kind: Deployment
metadata: {name: rolling}
spec:
  replicas: 6
  strategy: {rollingUpdate: {maxSurge: 2, maxUnavailable: 0}}
  selector: {matchLabels: {app: rolling}}
  template:
    metadata: {labels: {app: rolling, version: %[3]s}}
    spec:
      topologySpreadConstraints:
      - {maxSkew: 1, topologyKey: kubernetes.io/hostname, whenUnsatisfiable: ScheduleAnyway,
         labelSelector: {matchLabels: {app: rolling}}}
      terminationGracePeriodSeconds: 60
      containers:
      - name: server
        image: %[1]s
        args: [serve, ":8080"]
        env: [{name: HOST_IP, valueFrom: {fieldRef: {fieldPath: status.hostIP}}}]
        resources: {requests: {cpu: 50m}}
        readinessProbe: {tcpSocket: {port: 8080}, periodSeconds: 2}
        lifecycle: {%[2]s}
---
apiVersion: apps/v1
kind: DaemonSet
metadata: {name: rolling-client}
spec:
  selector: {matchLabels: {app: rolling-client}}
  template:
    metadata: {labels: {app: rolling-client}}
    spec:
      terminationGracePeriodSeconds: 1
      containers:
      - name: client
        image: %[1]s
        args: [connect, ":9100", "10.96.0.81:80", "[fd00:10:96::81]:80"]
        resources: {requests: {cpu: 50m}}
`
