package dashboard

import (
	"encoding/json"
	"net/http/httptest"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/verdict-proxy/verdict/internal/answers/cluster/clustertest"
	"github.com/verdict-proxy/verdict/internal/proxy/flows"
)

// get reads an answer of a server.
func get(t *testing.T, s *Server, path string, into any) {
	t.Helper()
	r := httptest.NewRequest("GET", path, nil)
	r.Header.Set("X-Token", s.token)
	r.Host = "127.0.0.1:8080"
	w := httptest.NewRecorder()
	s.Handler().ServeHTTP(w, r)
	if err := json.Unmarshal(w.Body.Bytes(), into); err != nil || w.Code != 200 {
		t.Fatalf("%s: %d, %v: %s", path, w.Code, err, w.Body)
	}
}

// TestMap: the parts of all nodes are added up, in bounded size, and it is said whose part is missing, and what was
// lost.
func TestMap(t *testing.T) {
	f := world()
	f.Statuses["node-3"] = f.Statuses["node-1"]
	busy := clustertest.Busy("node-1", "node-3")
	f.Flows = busy.Print
	var m Map
	get(t, New(f.Cluster(), "default", time.Second), "/map?since=5m", &m)
	if m.Nodes != 3 || m.Recording != 2 || m.Lossy != 2 || m.Losses.Events != 2*busy.Losses.Events ||
		!strings.HasPrefix(m.Error, "no records of node-2: no answer") {
		t.Errorf("%+v of %+v", m, m.ServiceMap)
	}
	if a := m.Arrows[0]; a.Failures != 6 || a.Client != clustertest.BusyClient(990) || a.Folded != 0 {
		t.Errorf("the first arrow is %+v", a)
	}
	if a := m.Arrows[1]; a.Client != clustertest.BusyClient(0) || a.Sent != 4e9 {
		t.Errorf("the second arrow is %+v", a)
	}
	var sent, want uint64
	for _, a := range m.Arrows {
		sent += a.Sent
	}
	for _, s := range busy.Sums {
		want += s.Sent.Bytes
	}
	if sent != want || len(m.Arrows) > 2*maxArrows+1 {
		t.Errorf("%d bytes in %d arrows; want %d", sent, len(m.Arrows), want)
	}
}

// TestMapOff: nodes that keep no records say so.
func TestMapOff(t *testing.T) {
	f := world()
	f.Flows = func(string, []string) string { return `{"off": true, "arrows": []}` }
	var m Map
	get(t, New(f.Cluster(), "default", time.Second), "/map?since=1h", &m)
	if m.Nodes != 2 || m.Recording != 0 || len(m.Arrows) != 0 {
		t.Errorf("%+v", m.ServiceMap)
	}
}

// TestMapShared: however many windows ask, nodes are asked once in a while.
func TestMapShared(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := world()
		f.Flows = clustertest.Busy("node-1").Print
		s := New(f.Cluster(), "default", time.Second)
		for range 20 {
			var m Map
			get(t, s, "/map?since=5m", &m)
			time.Sleep(time.Second)
		}
		if n := f.Asked.Load(); n != 2*2 {
			t.Errorf("%d commands were run", n)
		}
	})
}

// TestFailures: the last connections that failed are those of all nodes, the newest first, of one client if that is
// asked for.
func TestFailures(t *testing.T) {
	f := world()
	r := &clustertest.Recorded{Nodes: []string{"node-1"}}
	for i := range maxFailures {
		r.Fail(time.Duration(i+1)*time.Second, "shop/web", "shop/cart", flows.Refused, "")
	}
	r.Fail(0, "lab/probe", "shop/cart", flows.Rejected, "no-endpoints")
	r.Failures[0].Client.Zone = "a"
	f.Flows = r.Print
	s := New(f.Cluster(), "default", time.Second)
	for query, want := range map[string]int{"": maxFailures, "&client=lab/probe": 1, "&client=lab/": 1, "&client=lab/x": 0,
		"&client=/": maxFailures, "&zone=a": 1, "&zone=b": 0} {
		var got Failures
		get(t, s, "/failures?since=5m&service=shop/cart"+query, &got)
		if len(got.Records) != want || !strings.Contains(got.Error, "node-2") {
			t.Errorf("%q: %d failures, and %q", query, len(got.Records), got.Error)
			continue
		}
		if query == "" && (got.Records[0].Reason != "no-endpoints" || !got.Records[1].Time.After(got.Records[2].Time)) {
			t.Errorf("the newest are %+v", got.Records[:3])
		}
	}
}
