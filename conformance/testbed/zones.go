package testbed

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"strings"
	"time"

	v1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/verdict-proxy/verdict/internal/lab"
	"github.com/verdict-proxy/verdict/sync/snapshot"
)

const (
	zonesName = "zones"
	// zoneTries is how often a node has to use the endpoint of its own zone in a row, one of two.
	zoneTries = 12
	zoneLimit = 30 * time.Second
	// tellZoneEvery is how often a proxy that forgets its zone is told: it may not listen yet.
	tellZoneEvery = 3 * time.Second
)

// createZoneCanary makes a Service with an endpoint for each zone: the control plane's host, at another port for
// each. Proxies hear of their Node apart from Services, so that they know their zone is seen only by it.
func (tb *Testbed) createZoneCanary(ctx context.Context) error {
	service := &v1.Service{
		ObjectMeta: metav1.ObjectMeta{Name: zonesName, Namespace: canaryNamespace},
		Spec:       v1.ServiceSpec{Ports: []v1.ServicePort{{Name: "p", Port: 80, Protocol: v1.ProtocolTCP}}},
	}
	service, err := tb.Client.CoreV1().Services(canaryNamespace).Create(ctx, service, metav1.CreateOptions{})
	if err != nil {
		return err
	}
	tb.zones = netip.AddrPortFrom(netip.MustParseAddr(service.Spec.ClusterIP), 80)
	for i, node := range tb.Nodes() {
		slice := &discovery.EndpointSlice{
			ObjectMeta: metav1.ObjectMeta{
				Name: fmt.Sprintf(
					"%s-%s",
					zonesName,
					letter(i),
				), Namespace: canaryNamespace, Labels: map[string]string{discovery.LabelServiceName: zonesName},
			},
			AddressType: discovery.AddressTypeIPv4,
			Endpoints: []discovery.Endpoint{{
				Addresses: []string{tb.Host("control").IP4.String()},
				Hints:     &discovery.EndpointHints{ForZones: []discovery.ForZone{{Name: Zones[node]}}},
			}},
			Ports: []discovery.EndpointPort{{Name: new("p"), Port: new(int32(zoneTarget(i))), Protocol: new(v1.ProtocolTCP)}},
		}
		if _, err := tb.Client.DiscoveryV1().EndpointSlices(canaryNamespace).Create(ctx, slice,
			metav1.CreateOptions{}); err != nil {
			return err
		}
	}
	return nil
}

func zoneTarget(node int) uint16 { return firstCanaryTarget + uint16(node) }

// AwaitStart waits until proxies that were started know their zones and the ranges of Services.
func (tb *Testbed) AwaitStart(ctx context.Context) error {
	if err := tb.awaitZones(ctx); err != nil {
		return err
	}
	return tb.awaitRanges(ctx)
}

// awaitZones waits until the proxies know their zones; those that may have missed it are told, again while they start.
func (tb *Testbed) awaitZones(ctx context.Context) error {
	for i, node := range tb.Nodes() {
		told := time.Time{}
		err := until(ctx, tb.Slow.Times(zoneLimit), func() error {
			if tb.Kind.forgetsZone && time.Since(told) > tellZoneEvery {
				if err := errors.Join(tb.label(ctx, node, ""), tb.label(ctx, node, Zones[node])); err != nil {
					return err
				}
				told = time.Now()
			}
			for range zoneTries {
				r := tb.Host(node).Dial(snapshot.TCP, tb.zones, lab.Options{})
				if r.Outcome != lab.Answered || r.Destination.Port() != zoneTarget(i) {
					return fmt.Errorf("%s does not know that it is in %s: %s", node, Zones[node], r)
				}
			}
			return nil
		})
		if err != nil {
			return err
		}
	}
	return nil
}

// awaitRanges waits until the proxies drop what goes to addresses of the range that no Service has. Those that may have
// missed the ranges are made to sync in full, by changes of their Nodes.
func (tb *Testbed) awaitRanges(ctx context.Context) error {
	if !tb.Kind.forgetsRanges {
		return nil
	}
	for _, node := range tb.Nodes() {
		var told time.Time
		err := until(ctx, tb.Slow.Times(zoneLimit), func() error {
			for _, family := range []string{"ip", "ip6"} {
				out, err := tb.Host(node).Run("nft", "list", "chain", family, "kube-proxy", "cluster-ips-check")
				if err == nil && strings.Contains(out, "Drop traffic to unallocated ClusterIPs") {
					continue
				}
				err = errors.Join(fmt.Errorf("%s has no rule for unallocated addresses (%s): %s", node, family, out), err)
				if time.Since(told) > tb.Slow.Times(time.Second) {
					told = time.Now()
					err = errors.Join(err, tb.label(ctx, node, ""), tb.label(ctx, node, Zones[node]))
				}
				return err
			}
			return nil
		})
		if err != nil {
			return err
		}
	}
	return nil
}

// label sets the zone of a Node; empty takes it away.
func (tb *Testbed) label(ctx context.Context, node, zone string) error {
	value := "null"
	if zone != "" {
		value = fmt.Sprintf("%q", zone)
	}
	patch := fmt.Sprintf(`{"metadata":{"labels":{%q:%s}}}`, v1.LabelTopologyZone, value)
	_, err := tb.Client.CoreV1().Nodes().Patch(ctx, node, types.MergePatchType, []byte(patch), metav1.PatchOptions{})
	return err
}
