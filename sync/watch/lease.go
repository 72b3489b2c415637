package watch

import (
	"context"
	"encoding/json"
	"fmt"

	coordinationv1 "k8s.io/api/coordination/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/rest"

	"github.com/verdict-proxy/verdict/sync/snapshot"
)

// LeaseAnnotations returns a function that reads the annotations of a Lease. It asks for any version that the API
// server has at hand, so that many nodes may ask at once.
func LeaseAnnotations(config *rest.Config, lease snapshot.Name) (
	func(context.Context) (map[string]string, error), error) {
	client, err := (&Kubernetes{Config: config}).client(coordinationv1.SchemeGroupVersion)
	if err != nil {
		return nil, fmt.Errorf("lease %v: %w", lease, err)
	}
	return func(ctx context.Context) (map[string]string, error) {
		raw, err := client.Get().Namespace(lease.Namespace).Resource("leases").Name(lease.Name).
			Param("resourceVersion", "0").SetHeader("Accept", "application/json").DoRaw(ctx)
		if err != nil {
			return nil, fmt.Errorf("lease %v: %w", lease, err)
		}
		var o struct {
			Metadata metav1.ObjectMeta `json:"metadata"`
		}
		if err := json.Unmarshal(raw, &o); err != nil {
			return nil, fmt.Errorf("lease %v: %w", lease, err)
		}
		return o.Metadata.Annotations, nil
	}, nil
}
