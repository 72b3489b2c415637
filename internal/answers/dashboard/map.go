package dashboard

import (
	"context"
	"encoding/json"
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
}

// Failures are the last connections that failed, the newest first.
type Failures struct {
	Records []cluster.NodeRecord `json:"records"`
	Error   string               `json:"error,omitempty"`
}

// drawn is a map that was made.
type drawn struct {
	at   time.Time
	text []byte
}

func spanOf(r *http.Request) (time.Duration, error) {
	span, err := time.ParseDuration(r.URL.Query().Get("since"))
	if err != nil || !slices.Contains(mapSpans, span) {
		return 0, fmt.Errorf("since=%.20q is none of %v", r.URL.Query().Get("since"), mapSpans)
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
	s.mapping.Lock()
	defer s.mapping.Unlock()
	last := s.maps[span]
	if last.text == nil || time.Since(last.at) >= mapFresh {
		text, err := json.Marshal(s.drawMap(r.Context(), span))
		if err != nil {
			panic(err) // a Map has nothing that cannot be written
		}
		last = drawn{time.Now(), text}
		if r.Context().Err() == nil { // else it is of those nodes that had answered
			s.maps[span] = last
		}
	}
	w.Header().Set("Content-Type", "application/json")
	_, _ = w.Write(last.text) // whoever asked may have left
}

func (s *Server) drawMap(ctx context.Context, span time.Duration) *Map {
	all, err := s.nodes.ServiceMap(ctx, span, maxArrows)
	if err != nil {
		return &Map{Error: err.Error()}
	}
	return &Map{ServiceMap: all, Error: failures("records", all.Failed), Failed: len(all.Failed)}
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
	out := Failures{Records: []cluster.NodeRecord{}}
	asked := records.Question{Service: service.String(), Since: span, Failed: true, Limit: maxAsked}
	if client != "" && !strings.HasSuffix(client, "/") {
		asked.From, asked.Limit = client, maxFailures
	}
	found, failed, err := s.nodes.Records(r.Context(), &asked, maxFailures, func(f *flows.Record) bool {
		return (client == "" || servicemap.Covers(client, f.Client.Name())) &&
			(!q.Has("zone") || zone == f.Client.Zone)
	})
	out.Records = append(out.Records, found...)
	if out.Error = failures("records", failed); err != nil {
		out.Error = err.Error()
	}
	w.Header().Set("Content-Type", "application/json")
	_ = json.NewEncoder(w).Encode(out) // whoever asked may have left
}
