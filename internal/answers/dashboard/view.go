package dashboard

import (
	"cmp"
	"context"
	"fmt"
	"maps"
	"net/http"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/verdict-proxy/verdict/internal/answers/cluster"
	"github.com/verdict-proxy/verdict/internal/proxy/health"
	"github.com/verdict-proxy/verdict/internal/proxy/status"
)

// View is what the page shows. Times are of this host, but for those that are said to be a node's.
type View struct {
	Time time.Time `json:"time"`
	// Seconds is how long the look took.
	Seconds float64 `json:"seconds"`
	// Error says why there are no nodes.
	Error string `json:"error,omitempty"`
	// Nodes are all of them, those that need somebody first.
	Nodes []Node `json:"nodes"`
	// Differences are Services that not all nodes have programmed alike, and Notes say what is not known.
	Differences []cluster.Difference `json:"differences"`
	Notes       []string             `json:"notes"`
	// Troubles are what is quarantined and ejected, at most maxTroubles of TroubleCount.
	Troubles     []Trouble `json:"troubles"`
	TroubleCount int       `json:"troubleCount"`
	// Ports are the busiest service ports, at most maxPorts of so many; Rate is the connections per second of all.
	Ports     []cluster.TopPort `json:"ports"`
	PortCount int               `json:"portCount"`
	Rate      float64           `json:"rate"`
	// TopError says why the rates of some nodes are missing.
	TopError string `json:"topError,omitempty"`
	// Changes are the last transactions, the newest first, by the nodes' clocks.
	Changes []Change `json:"changes"`
}

// Node is a row of the table of nodes. Reasons say why its level is not cluster.InOrder.
type Node struct {
	Node        string        `json:"node"`
	Level       cluster.Level `json:"level"`
	Reasons     []string      `json:"reasons,omitempty"`
	Answers     bool          `json:"answers"`
	Version     string        `json:"version"`
	Backend     string        `json:"backend"`
	Services    int           `json:"services"`
	LagSeconds  float64       `json:"lagSeconds"`
	Quarantined int           `json:"quarantined"`
	Ejected     int           `json:"ejected"`
}

// Nodes are those that something is the same on: the first ones by name, and how many there are.
type Nodes struct {
	Names []string `json:"names"`
	Count int      `json:"count"`
}

func (n *Nodes) add(name string) {
	if n.Count++; len(n.Names) < maxNames {
		n.Names = append(n.Names, name)
	}
}

// Trouble is a Service that nodes reject, or an endpoint that they have ejected, for the same reason. Since is when the
// first of them did.
type Trouble struct {
	What    string    `json:"what"`
	Ejected bool      `json:"ejected"`
	Why     string    `json:"why"`
	Since   time.Time `json:"since"`
	Nodes   Nodes     `json:"nodes"`
}

// Change is a transaction that nodes made alike. At and Seconds are the last node's and the slowest one's.
type Change struct {
	Nodes Nodes `json:"nodes"`
	status.Change
	on map[string]bool
}

// view looks once: at the nodes' status and at their counters at the same time.
func (s *Server) view(ctx context.Context) *View {
	begin := time.Now()
	v := &View{Nodes: []Node{}, Differences: []cluster.Difference{}, Notes: []string{}, Troubles: []Trouble{},
		Ports: []cluster.TopPort{}, Changes: []Change{}}
	var top *cluster.Top
	var topErr error
	var both sync.WaitGroup
	both.Go(func() { top, topErr = s.nodes.Top(ctx, cluster.TopOptions{Interval: time.Second}) })
	report, err := s.nodes.Status(ctx)
	both.Wait()
	if err != nil {
		v.Error = err.Error()
	} else {
		v.addReport(report)
	}
	v.addTop(top, topErr)
	v.Time, v.Seconds = time.Now(), time.Since(begin).Seconds()
	return v
}

func (v *View) addTop(top *cluster.Top, err error) {
	if err != nil {
		v.TopError = err.Error()
		return
	}
	v.TopError = failures("rates", top.Failed)
	v.Rate, v.PortCount = top.Rate, top.PortCount
	v.Ports = append(v.Ports, top.Ports[:min(len(top.Ports), maxPorts)]...)
}

// failures names the nodes that did not send what they were asked for, those with the same error together.
func failures(what string, failed []cluster.NodeAnswer) string {
	var lines []string
	nodes := map[string][]string{}
	for _, f := range failed {
		if nodes[f.Error] == nil {
			lines = append(lines, f.Error)
		}
		nodes[f.Error] = append(nodes[f.Error], f.Node)
	}
	more := len(lines) - maxErrors
	lines = lines[:min(len(lines), maxErrors)]
	for i, text := range lines {
		lines[i] = fmt.Sprintf("no %s of %s: %s", what, cluster.Named(nodes[text]), text)
	}
	if more > 0 {
		lines = append(lines, fmt.Sprintf("and %d more errors", more))
	}
	return strings.Join(lines, "; ")
}

func (v *View) addReport(r *cluster.Report) {
	v.Differences, v.Notes = append(v.Differences, r.Differences...), append(v.Notes, r.Notes...)
	for i, reasons := range r.Look() {
		n := Node{Node: r.Nodes[i].Node, Level: cluster.LevelOf(reasons)}
		for _, reason := range reasons[:min(len(reasons), maxReasons)] {
			n.Reasons = append(n.Reasons, reason.Text)
		}
		if more := len(reasons) - maxReasons; more > 0 {
			n.Reasons = append(n.Reasons, fmt.Sprintf("and %d more", more))
		}
		if s := r.Nodes[i].Status; s != nil {
			n.Answers, n.Version, n.Backend, n.Services = true, s.Version, s.Backend, s.Services
			n.LagSeconds, n.Quarantined, n.Ejected = s.Pending.LagSeconds, s.Quarantined.Count, s.Ejected.Count
		}
		v.Nodes = append(v.Nodes, n)
	}
	slices.SortStableFunc(v.Nodes, func(a, b Node) int { return int(b.Level - a.Level) })
	v.addTroubles(r.Nodes)
	v.addChanges(r.Nodes)
}

// addTroubles puts together what several nodes say alike.
func (v *View) addTroubles(nodes []cluster.NodeStatus) {
	at := map[[2]string]int{}
	add := func(node string, t Trouble) {
		key := [2]string{t.What, t.Why}
		i, there := at[key]
		if !there {
			i, at[key] = len(v.Troubles), len(v.Troubles)
			v.Troubles = append(v.Troubles, t)
		}
		if t.Since.Before(v.Troubles[i].Since) {
			v.Troubles[i].Since = t.Since
		}
		v.Troubles[i].Nodes.add(node)
	}
	for _, n := range nodes {
		if n.Status == nil {
			continue
		}
		for _, q := range n.Status.Quarantined.Services {
			add(n.Node, Trouble{What: q.Service, Why: q.Error, Since: q.Since})
		}
		for _, e := range n.Status.Ejected.Endpoints {
			add(n.Node, Trouble{What: e.Endpoint + " of " + e.Service, Ejected: true, Why: e.Cause, Since: e.Since})
		}
	}
	slices.SortStableFunc(v.Troubles, func(a, b Trouble) int {
		if a.Ejected != b.Ejected {
			if b.Ejected {
				return -1
			}
			return 1
		}
		return cmp.Or(b.Nodes.Count-a.Nodes.Count, strings.Compare(a.What, b.What))
	})
	v.TroubleCount = len(v.Troubles)
	v.Troubles = v.Troubles[:min(len(v.Troubles), maxTroubles)]
}

// addChanges puts together what several nodes did alike within a while. A node that does the same again makes another
// change.
func (v *View) addChanges(nodes []cluster.NodeStatus) {
	type one struct {
		node string
		status.Change
	}
	var all []one
	for _, n := range nodes {
		if n.Status == nil {
			continue
		}
		for _, c := range n.Status.Recent {
			all = append(all, one{n.Node, c})
		}
	}
	slices.SortStableFunc(all, func(a, b one) int { return b.At.Compare(a.At) })
	alike := map[string][]int{} // places in v.Changes
	for _, c := range all {
		key := fmt.Sprint(c.Services, c.Count, c.Added, c.Replaced, c.Removed)
		i := slices.IndexFunc(alike[key], func(i int) bool {
			return !v.Changes[i].on[c.node] && v.Changes[i].At.Sub(c.At) <= together
		})
		var g *Change
		if i >= 0 {
			g = &v.Changes[alike[key][i]]
		} else {
			alike[key] = append(alike[key], len(v.Changes))
			v.Changes = append(v.Changes, Change{Change: c.Change, on: map[string]bool{}})
			g = &v.Changes[len(v.Changes)-1]
		}
		g.on[c.node], g.Seconds = true, max(g.Seconds, c.Seconds)
	}
	v.Changes = v.Changes[:min(len(v.Changes), maxChanges)]
	for i := range v.Changes {
		for _, n := range slices.Sorted(maps.Keys(v.Changes[i].on)) {
			v.Changes[i].Nodes.add(n)
		}
	}
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
	health.AnswerJSON(w, http.StatusOK, top.Ports)
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
