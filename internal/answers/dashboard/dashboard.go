// Package dashboard serves one page about all nodes to the browser of the one who runs it: their sync status, which
// Services get connections, what changed last. It asks the nodes while somebody looks, and only then.
package dashboard

import (
	"context"
	"crypto/rand"
	"crypto/subtle"
	"embed"
	"encoding/json"
	"fmt"
	"io/fs"
	"net"
	"net/http"
	"strings"
	"sync"
	"time"

	"github.com/verdict-proxy/verdict/internal/answers/cluster"
	"github.com/verdict-proxy/verdict/internal/system/clock"
)

//go:embed page
var page embed.FS

// Bounds.
const (
	// maxWatchers bounds the windows that look at the same time.
	maxWatchers = 8
	// maxPorts, maxEndpoints, maxTroubles and maxChanges bound what a View has.
	maxPorts, maxEndpoints, maxTroubles, maxChanges = 500, 200, 200, 50
	// maxReasons bounds what is said of a node, maxNames the nodes that are named for one thing, and maxErrors the errors
	// that are told.
	maxReasons, maxNames, maxErrors = 4, 3, 3
	// together is how far apart nodes make the same change, by their clocks.
	together = 10 * time.Second
	// maxAnswer bounds the text of an explanation.
	maxAnswer = 64 << 10
)

// Server serves the page. Make one with New.
type Server struct {
	nodes *cluster.Cluster
	// namespace is that of names without one, and interval the pause between two views.
	namespace string
	interval  time.Duration
	token     string

	mu       sync.Mutex
	watchers map[chan []byte]bool
	stop     context.CancelFunc // ends the looking; nil while nobody watches
	last     []byte

	mapping sync.Mutex // lets one window at a time ask for a map
	maps    map[time.Duration]*Map
}

// New returns a Server that looks at the nodes again an interval after the last view. Its token is random.
func New(nodes *cluster.Cluster, namespace string, interval time.Duration) *Server {
	return &Server{nodes: nodes, namespace: namespace, interval: interval, token: rand.Text(),
		watchers: map[chan []byte]bool{}, maps: map[time.Duration]*Map{}}
}

// URL is where a browser finds the page, for a server that listens at an address. Without its token nothing is shown:
// other users of this host, and pages of others in the same browser, do not know it.
func (s *Server) URL(at net.Addr) string { return fmt.Sprintf("http://%s/?token=%s", at, s.token) }

// Handler returns the pages.
func (s *Server) Handler() http.Handler {
	files, err := fs.Sub(page, "page")
	if err != nil {
		panic(err) // the directory is embedded
	}
	mux := http.NewServeMux()
	mux.Handle("GET /", http.FileServerFS(files))
	mux.HandleFunc("GET /views", s.guarded(s.serveViews))
	mux.HandleFunc("GET /service", s.guarded(s.serveService))
	mux.HandleFunc("GET /explain", s.guarded(s.serveExplain))
	mux.HandleFunc("GET /map", s.guarded(s.serveMap))
	mux.HandleFunc("GET /failures", s.guarded(s.serveFailures))
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		h := w.Header()
		h.Set("Content-Security-Policy", "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "+
			"img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'")
		h.Set("X-Content-Type-Options", "nosniff")
		h.Set("Referrer-Policy", "no-referrer")
		h.Set("Cache-Control", "no-store")
		if !localName(r.Host) { // a name that was made to lead here
			http.Error(w, "this page is for this host alone", http.StatusForbidden)
			return
		}
		mux.ServeHTTP(w, r)
	})
}

// localName reports whether a request's host is an address, or localhost.
func localName(host string) bool {
	name, _, err := net.SplitHostPort(host)
	if err != nil {
		name = host
	}
	return name == "localhost" || net.ParseIP(strings.Trim(name, "[]")) != nil
}

// guarded lets only requests with the token pass.
func (s *Server) guarded(next http.HandlerFunc) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		if subtle.ConstantTimeCompare([]byte(r.Header.Get("X-Token")), []byte(s.token)) != 1 &&
			subtle.ConstantTimeCompare([]byte(r.URL.Query().Get("token")), []byte(s.token)) != 1 {
			http.Error(w, "the token is missing: open the address that kubectl verdict dashboard printed",
				http.StatusForbidden)
			return
		}
		next(w, r)
	}
}

// serveViews sends a View after each look, as server-sent events, until the window is closed.
func (s *Server) serveViews(w http.ResponseWriter, r *http.Request) {
	views, ok := s.watch()
	if !ok {
		http.Error(w, fmt.Sprintf("%d windows look already", maxWatchers), http.StatusTooManyRequests)
		return
	}
	defer s.leave(views)
	w.Header().Set("Content-Type", "text/event-stream")
	flush := http.NewResponseController(w)
	for {
		select {
		case <-r.Context().Done():
			return
		case view := <-views:
			if _, err := fmt.Fprintf(w, "data: %s\n\n", view); err != nil || flush.Flush() != nil {
				return
			}
		}
	}
}

// watch adds a watcher, which first gets the last view. The first watcher begins the looking.
func (s *Server) watch() (views chan []byte, ok bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if len(s.watchers) == maxWatchers {
		return nil, false
	}
	views = make(chan []byte, 1)
	s.watchers[views] = true
	if s.last != nil {
		views <- s.last
	}
	if s.stop == nil {
		ctx, stop := context.WithCancel(context.Background())
		s.stop = stop
		go s.look(ctx)
	}
	return views, true
}

// leave removes a watcher. The last one ends the looking.
func (s *Server) leave(views chan []byte) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if delete(s.watchers, views); len(s.watchers) == 0 {
		s.stop()
		s.stop, s.last = nil, nil
	}
}

// look asks the nodes again and again.
func (s *Server) look(ctx context.Context) {
	for ctx.Err() == nil {
		text, err := json.Marshal(s.view(ctx))
		if err != nil {
			panic(err) // a View has nothing that cannot be written
		}
		s.show(ctx, text)
		clock.Pause(ctx, s.interval)
	}
}

// show gives a view to all watchers; who has not taken the last one gets this one instead.
func (s *Server) show(ctx context.Context, view []byte) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if ctx.Err() != nil {
		return
	}
	s.last = view
	for views := range s.watchers {
		select {
		case <-views:
		default:
		}
		views <- view
	}
}
