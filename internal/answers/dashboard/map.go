package dashboard

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"time"

	"github.com/verdict-proxy/verdict/internal/answers/cluster"
	"github.com/verdict-proxy/verdict/internal/answers/records"
	"github.com/verdict-proxy/verdict/internal/answers/servicemap"
	"github.com/verdict-proxy/verdict/internal/proxy/flows"
	"github.com/verdict-proxy/verdict/internal/proxy/health"
)

const (
	// maxArrows bounds the arrows of a map, of which there may be twice as many with those that are folded.
	maxArrows = 5000
	// maxFailures bounds the failed connections that are told, and maxAsked those that a node looks through for them.
	maxFailures, maxAsked = 50, 1000
	// mapFresh is how long a map is believed: its grain is a minute.
	mapFresh = 10 * time.Second
)

// mapSpans are the times that a map may cover.
var mapSpans = []time.Duration{5 * time.Minute, 15 * time.Minute, time.Hour}

// Map is what the page shows of connections.
type Map struct {
	*cluster.ServiceMap
	// Error says why there is no map, or why the parts of Failed nodes are missing.
	Error  string `json:"error,omitempty"`
	Failed int    `json:"failed,omitempty"`
	at     time.Time
}

// Failures are the last connections that failed, the newest first.
type Failures struct {
	Records []cluster.NodeRecord `json:"records"`
	Error   string               `json:"error,omitempty"`
}

func spanOf(r *http.Request) (time.Duration, error) {
	span, _ := time.ParseDuration(r.URL.Query().Get("since"))
	if !slices.Contains(mapSpans, span) {
		return 0, fmt.Errorf("since is none of %v", mapSpans)
	}
	return span, nil
}

// serveMap gives a Map: since=5m. All windows share it for a while.
func (s *Server) serveMap(w http.ResponseWriter, r *http.Request) {
	span, err := spanOf(r)
	if err != nil {
		http.Error(w, err.Error(), http.StatusBadRequest)
		return
	}
	health.AnswerJSON(w, http.StatusOK, s.mapOf(r.Context(), span))
}

// mapOf returns the last map of a time, if it is fresh, or asks the nodes for another one.
func (s *Server) mapOf(ctx context.Context, span time.Duration) *Map {
	s.mapping.Lock()
	defer s.mapping.Unlock()
	if last := s.maps[span]; last != nil && time.Since(last.at) < mapFresh {
		return last
	}
	m, err := &Map{}, error(nil)
	if m.ServiceMap, err = s.nodes.ServiceMap(ctx, span, maxArrows); err != nil {
		m.Error = err.Error()
	} else {
		m.Error, m.Failed = failures("records", m.ServiceMap.Failed), len(m.ServiceMap.Failed)
	}
	if m.at = time.Now(); ctx.Err() == nil { // else it is of those nodes that had answered
		s.maps[span] = m
	}
	return m
}

// serveFailures gives Failures: since=5m, service=NAMESPACE/NAME and, for those of one client or zone alone, client or
// zone.
func (s *Server) serveFailures(w http.ResponseWriter, r *http.Request) {
	q := r.URL.Query()
	span, err := spanOf(r)
	service, _, wrong := cluster.ParseRef(q.Get("service"), s.namespace, "svc")
	if err = errors.Join(err, wrong); err != nil {
		http.Error(w, err.Error(), http.StatusBadRequest)
		return
	}
	client, zone := q.Get("client"), q.Get("zone")
	asked := records.Question{Service: service.String(), Since: span, Failed: true, Limit: maxAsked}
	if client != "" && !strings.HasSuffix(client, "/") {
		asked.From, asked.Limit = client, maxFailures
	}
	found, failed, err := s.nodes.Records(r.Context(), &asked, maxFailures, func(f *flows.Record) bool {
		return (client == "" || servicemap.Covers(client, f.Client.Name())) &&
			(!q.Has("zone") || zone == f.Client.Zone)
	})
	out := Failures{Records: append([]cluster.NodeRecord{}, found...)}
	if out.Error = failures("records", failed); err != nil {
		out.Error = err.Error()
	}
	health.AnswerJSON(w, http.StatusOK, out)
}
