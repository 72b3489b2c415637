package gateway

import (
	"flag"
	"io/fs"
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"
	gatewayv1 "sigs.k8s.io/gateway-api/apis/v1"
	"sigs.k8s.io/gateway-api/conformance"
	"sigs.k8s.io/gateway-api/conformance/tests"
	"sigs.k8s.io/gateway-api/conformance/utils/suite"
)

var weighted = flag.Int("weighted", 1, "how often TestWeighted takes each weighted test")

func options(t *testing.T) suite.ConformanceOptions {
	o := conformance.DefaultOptions(t)
	o.ManifestFS = []fs.FS{layer4{conformance.Manifests}}
	return o
}

// TestConformance runs the suite once. Without a cluster there is nothing to run it on.
func TestConformance(t *testing.T) {
	conformance.RunConformanceWithOptions(t, options(t))
}

// TestWeighted runs the weighted tests again and again. Their pods stay; each run begins with a new Gateway and a new
// route, so that it finds out whether the controller says too early that they are programmed.
func TestWeighted(t *testing.T) {
	o := options(t)
	o.CleanupTestResources = false
	s, err := suite.NewConformanceTestSuite(o)
	if err != nil {
		t.Fatal(err)
	}
	both := []suite.ConformanceTest{tests.TCPRouteWeightedRouting, tests.UDPRouteWeightedRouting}
	s.Setup(t, both)
	for range *weighted {
		t.Run("again", func(t *testing.T) { // the suite runs once in each test
			if err := s.Run(t, both); err != nil {
				t.Fatal(err)
			}
		})
		forget(t, o.Client)
	}
}

// forget deletes what the weighted tests route.
func forget(t *testing.T, c client.Client) {
	meta := func(name string) metav1.ObjectMeta {
		return metav1.ObjectMeta{Namespace: suite.InfrastructureNamespace, Name: name}
	}
	for _, o := range []client.Object{
		&gatewayv1.TCPRoute{ObjectMeta: meta("tcp-weighted-route")},
		&gatewayv1.UDPRoute{ObjectMeta: meta("udp-weighted-route")},
		&gatewayv1.Gateway{ObjectMeta: meta("tcp-weighted-gateway")},
		&gatewayv1.Gateway{ObjectMeta: meta("udp-weighted-gateway")},
	} {
		if err := client.IgnoreNotFound(c.Delete(t.Context(), o)); err != nil {
			t.Fatal(err)
		}
	}
}
