package inspect

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"slices"
	"strings"

	"github.com/verdict-proxy/verdict/internal/proxy/status"
	"github.com/verdict-proxy/verdict/sync/snapshot"
)

func decodeSlowStarts(r io.Reader) (map[snapshot.Name]*snapshot.Starting, error) {
	var report status.SlowStarts
	if err := json.NewDecoder(r).Decode(&report); err != nil {
		return nil, fmt.Errorf("the report cannot be read: %w", err)
	}
	out := map[snapshot.Name]*snapshot.Starting{}
	for _, s := range report.Services {
		namespace, name, ok := strings.Cut(s.Service, "/")
		if !ok {
			return nil, fmt.Errorf("%.100q is no namespace/name", s.Service)
		}
		for _, e := range s.Endpoints {
			if e.Tenths < 1 || e.Tenths >= snapshot.FullTenths {
				return nil, fmt.Errorf("%d is no number of tenths", e.Tenths)
			}
		}
		slices.SortFunc(s.Endpoints, func(a, b snapshot.StartingEndpoint) int { return a.Endpoint.Compare(b.Endpoint) })
		out[snapshot.Name{Namespace: namespace, Name: name}] = &snapshot.Starting{Endpoints: s.Endpoints}
	}
	return out, nil
}

// addSlowStarts completes the objects with how endpoints start on this node. It returns a note if that is not known;
// empty if it is, or if no Service has a slow start.
func (o *ObjectFlags) addSlowStarts(ctx context.Context, objects *Objects) (note string) {
	any := false
	for _, svc := range objects.Snap.Services {
		any = any || svc.SlowStart > 0
	}
	addr := o.Policy.Settings().Healthz
	if !any {
		return ""
	}
	const unknown = "which endpoints start slowly is not known: "
	if !addr.IsValid() {
		return unknown + "the proxy has no health server"
	}
	err := AskProxy(ctx, addr, "/slow-starts", func(body io.Reader) error {
		starting, err := decodeSlowStarts(body)
		objects.Snap.Apply(snapshot.Delta{Starting: starting})
		return err
	})
	if err != nil {
		return unknown + err.Error()
	}
	return ""
}

// startingText says how an endpoint starts.
func startingText(e *snapshot.StartingEndpoint) string {
	return fmt.Sprintf("slow start: %d %% of its share, full at %s", 100/snapshot.FullTenths*e.Tenths,
		e.Full.UTC().Format("15:04:05Z"))
}
