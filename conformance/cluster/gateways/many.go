package gateways

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/types"

	"github.com/verdict-proxy/verdict/conformance/cluster"
	"golang.org/x/sync/errgroup"
)

const (
	manyGateways = 100
	listeners    = 10
)

// programmed is the condition of a route that says whether nodes have programmed it.
const programmed = "verdict-proxy.github.io/Programmed"

// many makes 100 Gateways with ten listeners and a route on each, changes one route, and deletes all.
func many(ctx context.Context, b *Bed) (string, error) {
	if err := b.Apply(ctx, manyServices); err != nil {
		return "", err
	}
	before, err := b.writes(ctx)
	if err != nil {
		return "", err
	}
	begin := time.Now()
	if err := b.makeMany(ctx); err != nil {
		return "", err
	}
	made := time.Since(begin)
	if err := b.allAccepted(ctx); err != nil {
		return "", err
	}
	took := time.Since(begin)
	after, err := b.writes(ctx)
	if err != nil {
		return "", err
	}
	memory, err := b.memory(ctx)
	if err != nil {
		return "", err
	}
	one, wrote, err := b.changeOne(ctx)
	if err != nil {
		return "", err
	}
	begin = time.Now()
	if _, err := b.Kubectl(ctx, "delete", "namespace", "many", "--timeout=4m"); err != nil {
		return "", err
	}
	w := after.minus(before)
	return fmt.Sprintf("made in %v, all programmed %v after the first was made; statuses written: %d of Gateways, %d of "+
		"routes, %d of Services; the controller's memory: %s; one route changed: programmed after %v, statuses written "+
		"%+v; deleted in %v", round(made), round(took), w.Gateways, w.Routes, w.Services, memory, round(one), wrote,
		round(time.Since(begin))), nil
}

// makeMany creates Gateways and routes, 20 at a time.
func (b *Bed) makeMany(ctx context.Context) error {
	var group errgroup.Group
	group.SetLimit(20)
	create := func(resourceName, text string) {
		group.Go(func() error {
			o := &unstructured.Unstructured{}
			if err := json.Unmarshal([]byte(text), o); err != nil {
				return err
			}
			_, err := b.objects.Resource(resource(resourceName)).Namespace("many").Create(ctx, o, metav1.CreateOptions{})
			return err
		})
	}
	for g := range manyGateways {
		text := ""
		for l := range listeners {
			if l > 0 {
				text += ", "
			}
			text += fmt.Sprintf(`{"name": "l%d", "protocol": "TCP", "port": %d}`, l, 5000+l)
		}
		create("gateways", fmt.Sprintf(`{"apiVersion": "gateway.networking.k8s.io/v1", "kind": "Gateway",
			"metadata": {"name": "g%d"}, "spec": {"gatewayClassName": "verdict", "listeners": [%s]}}`, g, text))
		for l := range listeners {
			create("tcproutes", fmt.Sprintf(`{"apiVersion": "gateway.networking.k8s.io/v1", "kind": "TCPRoute",
				"metadata": {"name": "g%[1]d-l%[2]d"}, "spec": {"parentRefs": [{"name": "g%[1]d", "sectionName": "l%[2]d"}],
				"rules": [{"backendRefs": [{"name": "s%[2]d", "port": 80, "weight": 80},
				{"name": "next", "port": 80, "weight": 20}]}]}}`, g, l))
		}
	}
	return group.Wait()
}

// allAccepted waits until all Gateways are programmed and all routes accepted.
func (b *Bed) allAccepted(ctx context.Context) error {
	return cluster.Wait(ctx, 5*time.Minute, "all are programmed and accepted", func() error {
		gateways, err := b.objects.Resource(resource("gateways")).Namespace("many").List(ctx, metav1.ListOptions{})
		if err != nil {
			return err
		}
		for i := range gateways.Items {
			if gw := &gateways.Items[i]; !current(gw, gw.Object, "Programmed", "True", "status", "conditions") {
				return fmt.Errorf("not programmed: Gateway %s: %v", gw.GetName(), gw.Object["status"])
			}
		}
		routes, err := b.objects.Resource(resource("tcproutes")).Namespace("many").List(ctx, metav1.ListOptions{})
		if err != nil {
			return err
		}
		for i := range routes.Items {
			if r := &routes.Items[i]; !accepted(r, "Accepted", "True") || !accepted(r, programmed, "True") {
				return fmt.Errorf("TCPRoute %s is not programmed: %v", r.GetName(), r.Object["status"])
			}
		}
		if g, r := len(gateways.Items), len(routes.Items); g != manyGateways || r != manyGateways*listeners {
			return fmt.Errorf("%d Gateways and %d routes", g, r)
		}
		return nil
	})
}

// changeOne changes one route, and returns when nodes had programmed it and what was written.
func (b *Bed) changeOne(ctx context.Context) (time.Duration, writes, error) {
	before, err := b.writes(ctx)
	if err != nil {
		return 0, writes{}, err
	}
	routes := b.objects.Resource(resource("tcproutes")).Namespace("many")
	begin := time.Now()
	_, err = routes.Patch(ctx, "g50-l5", types.MergePatchType,
		[]byte(`{"spec": {"rules": [{"backendRefs": [{"name": "s5", "port": 80}]}]}}`), metav1.PatchOptions{})
	if err != nil {
		return 0, writes{}, err
	}
	err = cluster.Wait(ctx, time.Minute, "the route is programmed", func() error {
		r, err := routes.Get(ctx, "g50-l5", metav1.GetOptions{})
		if err == nil && !(accepted(r, "Accepted", "True") && accepted(r, programmed, "True")) {
			err = errors.New("it is not")
		}
		return err
	})
	took := time.Since(begin)
	after, e := b.writes(ctx)
	return took, after.minus(before), errors.Join(err, e)
}

// manyServices are eleven Services with two endpoints each, to which nobody connects.
var manyServices = func() string {
	text := "apiVersion: v1\nkind: Namespace\nmetadata: {name: many}\n"
	for i := range listeners + 1 {
		name := fmt.Sprintf("s%d", i)
		if i == listeners {
			name = "next"
		}
		text += fmt.Sprintf(`---
apiVersion: v1
kind: Service
metadata: {namespace: many, name: %[1]s}
spec: {ports: [{name: p, port: 80}]}
---
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata: {namespace: many, name: %[1]s, labels: {kubernetes.io/service-name: %[1]s}}
addressType: IPv4
endpoints: [{addresses: [192.0.2.%[2]d]}, {addresses: [192.0.2.%[3]d]}]
ports: [{name: p, port: 8080, protocol: TCP}]
`, name, 10+2*i, 11+2*i)
	}
	return text
}()
