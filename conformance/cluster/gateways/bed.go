// Package gateways holds what happens to Gateways on a real cluster, under clients, and what they cost.
package gateways

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/dynamic"

	"github.com/verdict-proxy/verdict/conformance/cluster"
)

// Bed is a cluster with the controller, a Gateway edge/db, a TCPRoute of the same name, and the Services behind it.
type Bed struct {
	*cluster.Cluster
	objects dynamic.Interface
	// address is where the Gateway listens.
	address string
}

var servers = []string{"edge/db", "edge/db-next", "shop/other"}

// Story is one event.
type Story struct {
	Name string
	// Do makes it happen, and returns what was counted and measured, or why it is not right.
	Do func(context.Context, *Bed) (string, error)
}

// All are the stories. Each begins and ends with a route to db with weight 80 and to db-next with weight 20.
var All = []Story{
	{"weights changed under clients", weights},
	{"backend of another namespace", otherNamespace},
	{"controller killed", killed},
	{"two controllers at once", twice},
	{"API server gone for a minute", serverGone},
	{"1,000 routes on 100 Gateways", many},
}

func resource(name string) schema.GroupVersionResource {
	return schema.GroupVersionResource{Group: "gateway.networking.k8s.io", Version: "v1", Resource: name}
}

// Prepare makes all that the stories need, and waits until the Gateway answers.
func (b *Bed) Prepare(ctx context.Context) error {
	config, err := b.Config()
	if err != nil {
		return err
	}
	if b.objects, err = dynamic.NewForConfig(config); err != nil {
		return err
	}
	text := objects
	for _, name := range servers {
		namespace, name, _ := strings.Cut(name, "/")
		text += fmt.Sprintf(server, namespace, name, cluster.WorkloadImage)
	}
	if err := b.Apply(ctx, text); err != nil {
		return err
	}
	for _, name := range servers {
		namespace, name, _ := strings.Cut(name, "/")
		if _, err := b.Kubectl(ctx, "-n", namespace, "rollout", "status", "deployment/"+name, "--timeout=2m"); err != nil {
			return err
		}
	}
	if _, err := b.route(ctx, 80, 20); err != nil {
		return err
	}
	return b.programmed(ctx)
}

// programmed waits until the Gateway is, and notes its address.
func (b *Bed) programmed(ctx context.Context) error {
	return cluster.Wait(ctx, time.Minute, "the Gateway is programmed", func() error {
		gw, err := b.objects.Resource(resource("gateways")).Namespace("edge").Get(ctx, "db", metav1.GetOptions{})
		if err != nil {
			return err
		}
		if !current(gw, gw.Object, "Programmed", "True", "status", "conditions") {
			return errors.New("it is not")
		}
		addresses, _, err := unstructured.NestedSlice(gw.Object, "status", "addresses")
		if err != nil || len(addresses) == 0 {
			return fmt.Errorf("it has no address: %w", err)
		}
		b.address = fmt.Sprintf("%s:5432", addresses[0].(map[string]any)["value"])
		return nil
	})
}

// current says whether in a list of conditions the one of a type has a status, and is of the object's generation.
func current(o *unstructured.Unstructured, of map[string]any, kind, status string, at ...string) bool {
	conditions, _, _ := unstructured.NestedSlice(of, at...)
	for _, c := range conditions {
		c := c.(map[string]any)
		if c["type"] == kind {
			return c["status"] == status && c["observedGeneration"] == o.GetGeneration()
		}
	}
	return false
}

// route gives the Gateway's route its weights, waits until it is accepted with them, and returns how long that took.
func (b *Bed) route(ctx context.Context, db, next int) (time.Duration, error) {
	backends := fmt.Sprintf(`[{"name": "db", "port": 80, "weight": %d}, {"name": "db-next", "port": 80, "weight": %d}]`,
		db, next)
	return b.patchRoute(ctx, backends, "Accepted", "True")
}

// patchRoute gives the Gateway's route other backends, and waits for a condition.
func (b *Bed) patchRoute(ctx context.Context, backends, kind, status string) (time.Duration, error) {
	begin := time.Now()
	routes := b.objects.Resource(resource("tcproutes")).Namespace("edge")
	_, err := routes.Patch(ctx, "db", types.MergePatchType,
		[]byte(`{"spec": {"rules": [{"backendRefs": `+backends+`}]}}`), metav1.PatchOptions{})
	if err != nil {
		return 0, err
	}
	return b.routeSays(ctx, begin, kind, status)
}

// routeSays waits until the Gateway's route has a condition, and returns how long ago begin is.
func (b *Bed) routeSays(ctx context.Context, begin time.Time, kind, status string) (time.Duration, error) {
	routes := b.objects.Resource(resource("tcproutes")).Namespace("edge")
	err := cluster.Wait(ctx, time.Minute, "the route has "+kind+"="+status, func() error {
		r, err := routes.Get(ctx, "db", metav1.GetOptions{})
		if err != nil {
			return err
		}
		if !accepted(r, kind, status) {
			return fmt.Errorf("its status is %v", r.Object["status"])
		}
		return nil
	})
	return time.Since(begin), err
}

// accepted says whether all parents of a route, of which it has some, have a condition.
func accepted(r *unstructured.Unstructured, kind, status string) bool {
	parents, _, _ := unstructured.NestedSlice(r.Object, "status", "parents")
	for _, p := range parents {
		if !current(r, p.(map[string]any), kind, status, "conditions") {
			return false
		}
	}
	return len(parents) > 0
}

// objects are the Gateway and its route.
const objects = `apiVersion: v1
kind: Namespace
metadata: {name: edge}
---
apiVersion: v1
kind: Namespace
metadata: {name: shop}
---
apiVersion: gateway.networking.k8s.io/v1
kind: Gateway
metadata: {name: db, namespace: edge}
spec:
  gatewayClassName: verdict
  listeners: [{name: db, protocol: TCP, port: 5432}]
---
apiVersion: gateway.networking.k8s.io/v1
kind: TCPRoute
metadata: {name: db, namespace: edge}
spec:
  parentRefs: [{name: db}]
  rules: [{backendRefs: [{name: db, port: 80, weight: 80}, {name: db-next, port: 80, weight: 20}]}]
---
`

// server is a Service with two pods that answer with their names.
const server = `apiVersion: v1
kind: Service
metadata: {namespace: %[1]s, name: %[2]s}
spec: {selector: {app: %[2]s}, ports: [{port: 80, targetPort: 8080}]}
---
apiVersion: apps/v1
kind: Deployment
metadata: {namespace: %[1]s, name: %[2]s}
spec:
  replicas: 2
  selector: {matchLabels: {app: %[2]s}}
  template:
    metadata: {labels: {app: %[2]s}}
    spec:
      terminationGracePeriodSeconds: 1
      containers:
      - name: server
        image: %[3]s
        args: [serve, ":8080"]
        resources: {requests: {cpu: 100m}}
        readinessProbe: {tcpSocket: {port: 8080}, periodSeconds: 2}
---
`
