package metrics

import (
	"encoding/json"
	"io"
	"net/http"
	"net/http/pprof"

	"github.com/verdict-proxy/verdict/internal/proxy/flows"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promhttp"
)

// Pages says what the metrics server shows besides metrics.
type Pages struct {
	// Mode is what /proxyMode says; tests of Kubernetes go by it.
	Mode string
	// Config gives what is shown at /configz, as JSON; nil shows nothing.
	Config func() any
	// Flows answers /flows; nil says that nothing is recorded.
	Flows http.Handler
	// Profiling adds /debug/pprof/.
	Profiling bool
}

// Handler answers /metrics, /metrics/slis, /healthz, /proxyMode, /configz and, if asked for, /debug/pprof/, as
// kube-proxy's metrics server does.
func (m *Metrics) Handler(p Pages) http.Handler {
	mux := http.NewServeMux()
	mux.Handle("/metrics", m.show(m.registry))
	mux.Handle("/metrics/slis", m.show(m.slis))
	mux.HandleFunc("/healthz", func(w http.ResponseWriter, _ *http.Request) { writeText(w, "ok") })
	mux.HandleFunc("/proxyMode", func(w http.ResponseWriter, _ *http.Request) { writeText(w, p.Mode) })
	mux.HandleFunc("/configz", func(w http.ResponseWriter, _ *http.Request) { p.configz(w) })
	if p.Flows == nil {
		p.Flows = http.HandlerFunc(flows.Off)
	}
	mux.Handle("GET /flows", p.Flows)
	if p.Profiling {
		mux.HandleFunc("/debug/pprof/", pprof.Index)
		mux.HandleFunc("/debug/pprof/cmdline", pprof.Cmdline)
		mux.HandleFunc("/debug/pprof/profile", pprof.Profile)
		mux.HandleFunc("/debug/pprof/symbol", pprof.Symbol)
		mux.HandleFunc("/debug/pprof/trace", pprof.Trace)
	}
	return mux
}

func (p *Pages) configz(w http.ResponseWriter) {
	var config any = struct{}{}
	if p.Config != nil {
		config = p.Config()
	}
	text, err := json.Marshal(config)
	if err != nil {
		http.Error(w, err.Error(), http.StatusInternalServerError)
		return
	}
	w.Header().Set("Content-Type", "application/json")
	w.Header().Set("X-Content-Type-Options", "nosniff")
	_, _ = w.Write(text)
}

// maxScrapes bounds how many are answered at the same time; others are told to come back.
const maxScrapes = 4

func (m *Metrics) show(g prometheus.Gatherer) http.Handler {
	return promhttp.HandlerFor(g, promhttp.HandlerOpts{
		ErrorHandling: promhttp.ContinueOnError, MaxRequestsInFlight: maxScrapes, ProcessStartTime: m.begin,
	})
}

func writeText(w http.ResponseWriter, text string) {
	w.Header().Set("Content-Type", "text/plain; charset=utf-8")
	w.Header().Set("X-Content-Type-Options", "nosniff")
	_, _ = io.WriteString(w, text)
}
