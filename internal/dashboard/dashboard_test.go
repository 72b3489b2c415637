package dashboard

import (
	"bufio"
	"encoding/json"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/verdict-proxy/verdict/internal/cluster"
	"github.com/verdict-proxy/verdict/internal/cluster/clustertest"
	"github.com/verdict-proxy/verdict/internal/status"
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
	if n := first.Report.Nodes; len(n) != 2 || n[0].Status == nil || n[1].Error == "" || first.TopError == "" {
		t.Errorf("the nodes are %+v, and %q", n, first.TopError)
	}
	if first.Rate != 3 || first.PortCount != 2 || first.Ports[0].Service != "shop/web" || first.Ports[0].Nodes != 1 {
		t.Errorf("the rates are %v of %+v", first.Rate, first.Ports)
	}
	if c := first.Changes; len(c) != 1 || c[0].Node != "node-1" || c[0].Seconds != 0.003 ||
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
		begin := f.Asked.Load()
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
