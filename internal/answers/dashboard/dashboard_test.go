package dashboard

import (
	"bufio"
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"regexp"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/verdict-proxy/verdict/internal/answers/cluster"
	"github.com/verdict-proxy/verdict/internal/answers/cluster/clustertest"
	"github.com/verdict-proxy/verdict/internal/proxy/status"
)

func world() *clustertest.Fake {
	began := time.Now().Add(-time.Hour)
	healthy := &status.Status{Schema: status.Schema, Version: "v1", Backend: "nftables", First: &began, Services: 2,
		Recent: []status.Change{{At: began, Services: []string{"shop/web"}, Count: 1, Added: 2, Seconds: 0.003}}}
	return &clustertest.Fake{Statuses: map[string]*status.Status{"node-1": healthy, "node-2": nil},
		Ports: []cluster.TopPort{
			{Service: "shop/web", Port: "http", Rate: 3, Endpoints: []cluster.TopEndpoint{
				{Address: "10.244.1.5", Port: 8080, Rate: 2}, {Address: "10.244.1.6", Port: 8080, Rate: 1}}},
			{Service: "shop/<b>", Rate: 0}},
		Explanation: "Outcome    sent to one of 2 endpoints\n"}
}

// TestStrangers: without the token nothing of the cluster is shown, and by another name of this host nothing at all.
func TestStrangers(t *testing.T) {
	f := world()
	s := New(f.Cluster(), "default", time.Second)
	for _, test := range []struct {
		host, path string
		token      string
		want       int
	}{
		{"127.0.0.1:8080", "/", "", 200},
		{"localhost:8080", "/script.js", "", 200},
		{"[::1]:8080", "/", "", 200},
		{"evil.example:8080", "/", s.token, 403},
		{"127.0.0.1:8080", "/views", "", 403},
		{"127.0.0.1:8080", "/views", "x" + s.token, 403},
		{"127.0.0.1:8080", "/service?service=a/b", "", 403},
		{"127.0.0.1:8080", "/explain?pod=a&service=b", "", 403},
		{"127.0.0.1:8080", "/map?since=5m", "", 403},
		{"127.0.0.1:8080", "/failures?since=5m&service=a/b", "", 403},
		{"127.0.0.1:8080", "/map?since=5m", s.token, 200},
		{"127.0.0.1:8080", "/map?since=24h", s.token, 400},
		{"127.0.0.1:8080", "/failures?since=5m&service=a/b", s.token, 200},
		{"127.0.0.1:8080", "/failures?since=5m&service=", s.token, 400},
		{"127.0.0.1:8080", "/explain?pod=a&service=b", s.token, 200},
		{"127.0.0.1:8080", "/explain?pod=a/b/c/d&service=b", s.token, 502},
		{"127.0.0.1:8080", "/service?service=shop/web", s.token, 200},
		{"127.0.0.1:8080", "/service?service=", s.token, 400},
		{"127.0.0.1:8080", "/page/", s.token, 404},
	} {
		r := httptest.NewRequest("GET", test.path, nil)
		r.Host = test.host
		r.Header.Set("X-Token", test.token)
		w := httptest.NewRecorder()
		before := f.Asked.Load()
		s.Handler().ServeHTTP(w, r)
		if w.Code != test.want || w.Code == 403 && f.Asked.Load() != before {
			t.Errorf("%s of %s: %d, want %d; %d commands were run\n%s", test.path, test.host, w.Code, test.want,
				f.Asked.Load()-before, w.Body)
		}
		if policy := w.Header().Get("Content-Security-Policy"); !strings.Contains(policy, "default-src 'none'") {
			t.Errorf("%s: the policy is %q", test.path, policy)
		}
	}
}

// open opens a window on a server.
func open(t *testing.T, url, token string) (view func() *View, stop func()) {
	r, err := http.Get(url + "/views?token=" + token)
	if err != nil || r.StatusCode != 200 {
		t.Fatal(err, r)
	}
	lines := bufio.NewReaderSize(r.Body, 1<<20)
	return func() *View {
		t.Helper()
		line, err := lines.ReadString('\n')
		for ; err == nil && !strings.HasPrefix(line, "data: "); line, err = lines.ReadString('\n') {
		}
		v := &View{}
		if err == nil {
			err = json.Unmarshal([]byte(strings.TrimPrefix(line, "data: ")), v)
		}
		if err != nil {
			t.Fatal(err)
		}
		return v
	}, func() { r.Body.Close() }
}

// TestViews: a window gets one view after the other, with what the nodes say, and the node that says nothing.
func TestViews(t *testing.T) {
	s := New(world().Cluster(), "default", time.Millisecond)
	server := httptest.NewServer(s.Handler())
	defer server.Close()
	view, stop := open(t, server.URL, s.token)
	defer stop()
	first, second := view(), view()
	if !second.Time.After(first.Time) {
		t.Errorf("the second view is of %v, the first of %v", second.Time, first.Time)
	}
	if n := first.Nodes; len(n) != 2 || n[0].Node != "node-2" || n[0].Level != cluster.Wrong || n[0].Answers ||
		n[1].Level != cluster.InOrder || n[1].Services != 2 || first.TopError == "" {
		t.Errorf("the nodes are %+v, and %q", n, first.TopError)
	}
	if first.Rate != 3 || first.PortCount != 2 || first.Ports[0].Service != "shop/web" || first.Ports[0].Nodes != 1 {
		t.Errorf("the rates are %v of %+v", first.Rate, first.Ports)
	}
	if c := first.Changes; len(c) != 1 || c[0].Nodes.Names[0] != "node-1" || c[0].Seconds != 0.003 ||
		c[0].Services[0] != "shop/web" {
		t.Errorf("the changes are %+v", c)
	}
	r, err := http.Get(server.URL + "/service?service=shop/web:http&token=" + s.token)
	if err != nil {
		t.Fatal(err)
	}
	defer r.Body.Close()
	var ports []cluster.TopPort
	if err := json.NewDecoder(r.Body).Decode(&ports); err != nil || len(ports) != 1 || len(ports[0].Endpoints) != 2 ||
		ports[0].Endpoints[0] != (cluster.TopEndpoint{Address: "10.244.1.5", Port: 8080, Rate: 2, Nodes: 1}) {
		t.Errorf("the endpoints are %+v (%v)", ports, err)
	}
	e, err := http.Get(server.URL + "/explain?pod=web-0&service=shop/web:http&token=" + s.token)
	if err != nil {
		t.Fatal(err)
	}
	defer e.Body.Close()
	if text, _ := io.ReadAll(e.Body); !strings.HasPrefix(string(text), "on node ") {
		t.Errorf("explain says %q", text)
	}
}

// TestAskedOnlyWhileWatched: nobody is asked before the first window and after the last one, more windows cost nothing
// more, and there are not more of them than allowed.
func TestAskedOnlyWhileWatched(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := world()
		s := New(f.Cluster(), "default", time.Second)
		quiet := func(when string) {
			t.Helper()
			synctest.Wait()
			before := f.Asked.Load()
			time.Sleep(time.Minute)
			if n := f.Asked.Load() - before; n != 0 {
				t.Errorf("%s %d commands were run", when, n)
			}
		}
		quiet("before the first window")
		begin := f.Asked.Load() // before the first look, which begins beside what follows
		var windows []chan []byte
		for range maxWatchers {
			w, ok := s.watch()
			if !ok {
				t.Fatal("a window was refused")
			}
			windows = append(windows, w)
		}
		if _, ok := s.watch(); ok {
			t.Error("there are more windows than allowed")
		}
		time.Sleep(10*time.Second + time.Millisecond)
		synctest.Wait()
		// Each look runs status and top on both nodes; the first look was at the beginning.
		if n := f.Asked.Load() - begin; n != 11*4 {
			t.Errorf("%d commands in 10 s", n)
		}
		for _, w := range windows {
			if len(w) != 1 {
				t.Error("a window has no view")
			}
			s.leave(w)
		}
		quiet("after the last window")
	})
}

// TestLarge: of 150 nodes those that need attention come first, each once, and as many as the page counts; what many
// nodes say alike is said once, and no node that cannot be asked stays unnamed.
func TestLarge(t *testing.T) {
	v := New(clustertest.Large().Cluster(), "default", time.Second).view(t.Context())
	if len(v.Nodes) != 150 {
		t.Fatalf("%d nodes", len(v.Nodes))
	}
	for i, n := range v.Nodes {
		want := cluster.InOrder
		switch {
		case i < clustertest.LargeWrong:
			want = cluster.Wrong
		case i < clustertest.LargeWrong+clustertest.LargeWatch:
			want = cluster.Watch
		}
		if n.Level != want || (len(n.Reasons) > 0) != (want > cluster.InOrder) {
			t.Errorf("row %d: %+v; want level %d", i, n, want)
		}
	}
	for _, i := range []int{40, 77, 149} {
		if !strings.Contains(v.TopError, clustertest.LargeNode(i)) {
			t.Errorf("%s is not in %q", clustertest.LargeNode(i), v.TopError)
		}
	}
	if strings.Count(v.TopError, "no answer within") != 1 {
		t.Errorf("the same error is not said once: %q", v.TopError)
	}
	if c := v.Changes; len(c) != 2 || c[0].Nodes.Count != 147 || c[1].Nodes.Count != 147 ||
		len(c[0].Nodes.Names) != maxNames || c[0].Seconds < 0.04 {
		t.Errorf("the changes are %+v", c)
	}
	if b := v.Troubles; len(b) != 2 || b[0].What != "lab/huge" || b[0].Nodes.Count != 2 || !b[1].Ejected ||
		b[1].Nodes.Count != 3 {
		t.Errorf("the troubles are %+v", b)
	}
}

// TestTogether: a change is one if different nodes make it within a while, and more if a node makes it again, or later.
func TestTogether(t *testing.T) {
	at := time.Now()
	recent := func(ages ...time.Duration) *status.Status {
		s := &status.Status{}
		for _, age := range ages {
			s.Recent = append(s.Recent, status.Change{At: at.Add(-age), Services: []string{"a/b"}, Count: 1, Added: 1})
		}
		return s
	}
	v := &View{}
	v.addChanges([]cluster.NodeStatus{{Node: "a", Status: recent(0, time.Second)}, {Node: "b", Status: recent(0)},
		{Node: "c", Status: recent(9 * time.Second)}, {Node: "d", Status: recent(time.Minute)}, {Node: "e"}})
	var got []string
	for _, c := range v.Changes {
		got = append(got, strings.Join(c.Nodes.Names, ","))
	}
	if want := "a,b,c a d"; strings.Join(got, " ") != want {
		t.Errorf("the changes are of %q; want %q", got, want)
	}
}

// TestPage: the scripts find all elements that they name.
func TestPage(t *testing.T) {
	html, err := page.ReadFile("page/index.html")
	if err != nil {
		t.Fatal(err)
	}
	for script, least := range map[string]int{"script.js": 15, "map.js": 10} {
		text, err := page.ReadFile("page/" + script)
		if err != nil {
			t.Fatal(err)
		}
		names := regexp.MustCompile(`(?:\$|fill|figure)\("([a-z-]+)"`).FindAllSubmatch(text, -1)
		if len(names) < least {
			t.Fatalf("%s: only %d names", script, len(names))
		}
		for _, name := range names {
			if !bytes.Contains(html, fmt.Appendf(nil, `id="%s"`, name[1])) {
				t.Errorf("no element has the name %s of %s", name[1], script)
			}
		}
	}
}
