package node

import (
	"context"
	"fmt"
	"net/netip"

	"github.com/verdict-proxy/verdict/internal/proxy/backends"
	"github.com/verdict-proxy/verdict/internal/proxy/conntrack"
	"github.com/verdict-proxy/verdict/internal/proxy/outlier"
	"github.com/verdict-proxy/verdict/internal/proxy/status"
	"github.com/verdict-proxy/verdict/sync/reconcile"
	"github.com/verdict-proxy/verdict/sync/snapshot"
	"github.com/verdict-proxy/verdict/sync/watch"
)

// outliers finds endpoints that do not answer or refuse.
type outliers struct {
	*outlier.Detector
	evidence backends.EvidenceReader
}

// newOutliers opens what finds them; nil if the node has no Prober, or the backend gathers no evidence.
func newOutliers(n *Node, w *conntrack.Walker, queue *snapshot.Queue) (*outliers, error) {
	if n.Prober == nil || n.Backend.Evidence == nil {
		return nil, nil
	}
	evidence, err := n.Backend.Evidence()
	if err != nil {
		return nil, err
	}
	events := n.serving.events
	d := outlier.New(outlier.Options{
		Evidence: evidence, Prober: n.Prober, Flows: conntrack.NewUnanswered(w), Put: queue.Put, Log: n.Log,
		Ejected: func(service snapshot.Name, endpoint netip.AddrPort, cause snapshot.Cause) {
			events.Emit(watch.Event{Warning: true, Reason: "EndpointEjected", Action: "Eject", Service: service,
				Note: ejectionNote(n.Config.NodeName, endpoint, cause)})
		},
		LastResort: func(service snapshot.Name, endpoint netip.AddrPort) {
			events.Emit(watch.Event{Warning: true, Reason: "LastResort", Action: "UseNotReady", Service: service,
				Note: fmt.Sprintf("no endpoint is ready, and %v accepts connections from node %s, which sends new ones there "+
					"until one is usable", endpoint, n.Config.NodeName)})
		},
	})
	return &outliers{d, evidence}, nil
}

func ejectionNote(node string, endpoint netip.AddrPort, cause snapshot.Cause) string {
	what := "does not answer"
	if cause == snapshot.Refused {
		what = "refuses connections from"
	}
	return fmt.Sprintf("%v %s node %s, which sends no new connections there until it does", endpoint, what, node)
}

// listeners returns what the loop must call: nothing if o is nil.
func (o *outliers) listeners() []reconcile.Listener {
	if o == nil {
		return nil
	}
	return []reconcile.Listener{o.Listener()}
}

// run looks for outliers until the context ends.
func (o *outliers) run(ctx context.Context) error {
	if o == nil {
		return nil
	}
	return o.Run(ctx)
}

// close closes the socket after Run has ended.
func (o *outliers) close() error {
	if o == nil {
		return nil
	}
	return o.evidence.Close()
}

// ejected lists the ejected endpoints; none if nobody looks for them.
func (o *outliers) ejected() (list []status.EjectedEndpoint) {
	if o == nil {
		return nil
	}
	for _, s := range o.Report().Services {
		for _, e := range s.Endpoints {
			if e.Ejected {
				list = append(list, status.EjectedEndpoint{Service: s.Service, Endpoint: e.Endpoint, Cause: e.Cause,
					Since: e.Since})
			}
		}
	}
	return list
}
