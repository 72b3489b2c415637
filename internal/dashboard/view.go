package dashboard

import (
	"context"
	"encoding/json"
	"net/http"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/verdict-proxy/verdict/internal/cluster"
	"github.com/verdict-proxy/verdict/internal/status"
)

// View is what the page shows. Times are of this host, but for those that are said to be a node's.
type View struct {
	Time time.Time `json:"time"`
	// Seconds is how long the look took.
	Seconds float64 `json:"seconds"`
	// Error says why there is no report.
	Error  string          `json:"error,omitempty"`
	Report *cluster.Report `json:"report,omitempty"`
	// Ports are the busiest service ports, at most maxPorts of so many; Rate is the connections per second of all.
	Ports     []cluster.TopPort `json:"ports"`
	PortCount int               `json:"portCount"`
	Rate      float64           `json:"rate"`
	// TopError says why the rates of some nodes are missing.
	TopError string `json:"topError,omitempty"`
	// Changes are the last transactions of all nodes, the newest first, by the nodes' clocks.
	Changes []NodeChange `json:"changes"`
}

// NodeChange is a transaction of a node.
type NodeChange struct {
	Node string `json:"node"`
	status.Change
}

// view looks once: at the nodes' status and at their counters at the same time.
func (s *Server) view(ctx context.Context) *View {
	begin := time.Now()
	v := &View{Ports: []cluster.TopPort{}, Changes: []NodeChange{}}
	var top *cluster.Top
	var topErr error
	var both sync.WaitGroup
	both.Go(func() { top, topErr = s.nodes.Top(ctx, cluster.TopOptions{Interval: time.Second}) })
	report, err := s.nodes.Status(ctx)
	both.Wait()
	if v.Report = report; err != nil {
		v.Error = err.Error()
	}
	v.addTop(top, topErr)
	v.addChanges()
	v.Time, v.Seconds = time.Now(), time.Since(begin).Seconds()
	return v
}

func (v *View) addTop(top *cluster.Top, err error) {
	if err != nil {
		v.TopError = err.Error()
		return
	}
	for _, f := range top.Failed {
		v.TopError = f.Node + ": " + f.Err.Error()
	}
	v.Rate, v.PortCount = top.Rate, top.PortCount
	v.Ports = append(v.Ports, top.Ports[:min(len(top.Ports), maxPorts)]...)
}

func (v *View) addChanges() {
	if v.Report == nil {
		return
	}
	for _, n := range v.Report.Nodes {
		if n.Status == nil {
			continue
		}
		for _, c := range n.Status.Recent {
			v.Changes = append(v.Changes, NodeChange{n.Node, c})
		}
	}
	slices.SortStableFunc(v.Changes, func(a, b NodeChange) int { return b.At.Compare(a.At) })
	v.Changes = v.Changes[:min(len(v.Changes), maxChanges)]
}

// serveService gives the rates of one Service's endpoints: service=NAMESPACE/NAME.
func (s *Server) serveService(w http.ResponseWriter, r *http.Request) {
	name, port, err := cluster.ParseRef(r.URL.Query().Get("service"), s.namespace, "svc")
	if err != nil {
		http.Error(w, err.Error(), http.StatusBadRequest)
		return
	}
	text := name.String()
	if port != "" {
		text += ":" + port
	}
	top, err := s.nodes.Top(r.Context(), cluster.TopOptions{Interval: time.Second, Service: text})
	if err != nil {
		http.Error(w, err.Error(), http.StatusBadGateway)
		return
	}
	for i := range top.Ports {
		p := &top.Ports[i]
		p.Endpoints = p.Endpoints[:min(len(p.Endpoints), maxEndpoints)]
	}
	w.Header().Set("Content-Type", "application/json")
	_ = json.NewEncoder(w).Encode(top.Ports) // whoever asked may have left
}

// serveExplain says what happens to packets from a pod to a Service, as text: pod=[NAMESPACE/]NAME,
// service=[NAMESPACE/]NAME[:PORT].
func (s *Server) serveExplain(w http.ResponseWriter, r *http.Request) {
	text, err := s.explain(r.Context(), r.URL.Query().Get("pod"), r.URL.Query().Get("service"))
	if err != nil {
		http.Error(w, err.Error(), http.StatusBadGateway)
		return
	}
	w.Header().Set("Content-Type", "text/plain; charset=utf-8")
	_, _ = w.Write(text)
}

func (s *Server) explain(ctx context.Context, pod, service string) ([]byte, error) {
	from, _, err := cluster.ParseRef(pod, s.namespace, "pod", "pods", "po")
	if err != nil {
		return nil, err
	}
	to, port, err := cluster.ParseRef(service, s.namespace, "svc", "service", "services")
	if err != nil {
		return nil, err
	}
	asked, err := s.nodes.Resolve(ctx, from, to, port)
	if err != nil {
		return nil, err
	}
	result, err := s.nodes.Explain(ctx, asked, false)
	if err != nil {
		return nil, err
	}
	if result.Err != nil {
		return nil, result.Err
	}
	head := "on node " + result.Node + ": verdict explain " + asked.Source + " " + asked.Destination + "\n"
	text := strings.TrimSpace(head + string(result.Stdout) + "\n" + string(result.Stderr))
	return []byte(text[:min(len(text), maxAnswer)] + "\n"), nil
}
