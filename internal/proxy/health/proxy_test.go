package health

import (
	"encoding/json"
	"fmt"
	"net/http/httptest"
	"reflect"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/verdict-proxy/verdict/sync/snapshot"
)

// story is a proxy to which things happen at given seconds.
type story struct {
	p     *Proxy
	begin time.Time
	// what the proxy asks for
	waiting     time.Time
	missing     []string
	quarantined int
	unread      int
}

func newStory(o Options) *story {
	s := &story{begin: time.Now()}
	o.Waiting = func() snapshot.Waiting { return snapshot.Waiting{Since: s.waiting} }
	o.Missing = func() []string { return s.missing }
	o.Quarantined = func() int { return s.quarantined }
	o.Unread = func() int { return s.unread }
	s.p = New(o)
	return s
}

func (s *story) at(second int) {
	time.Sleep(time.Until(s.begin.Add(time.Duration(second) * time.Second)))
}

var node = snapshot.Node{Name: "node-1"}

func leaving(why string) snapshot.Node { return snapshot.Node{Name: "node-1", Leaving: why} }

// TestStates walks through everything that can happen. Each step says what happens, and what the three probes say then.
func TestStates(t *testing.T) {
	type step struct {
		second  int
		what    string
		happens func(*story)
		// want are the codes of healthz, livez and readyz, missing what healthz says.
		want    string
		missing string
	}
	nothing := func(*story) {}
	for _, test := range []struct {
		name  string
		o     Options
		steps []step
	}{
		{"start to end", Options{}, []step{
			{0, "starts", func(s *story) { s.missing = []string{"services", "nodes"} }, "503 200 503",
				"not listed yet: services, nodes"},
			{600, "no API server for ten minutes: starting again would not help", nothing, "503 200 503",
				"not listed yet: services, nodes"},
			{601, "listed", func(s *story) { s.missing, s.waiting = nil, time.Now() }, "503 200 503",
				"not all Services are programmed yet"},
			{602, "in force", func(s *story) { s.waiting = time.Time{}; s.p.InSync(node) }, "200 200 200", ""},
			{9999, "nothing changes for hours", nothing, "200 200 200", ""},
			{10000, "a change comes", func(s *story) { s.waiting = time.Now() }, "200 200 200", ""},
			{10059, "it waits", nothing, "200 200 200", ""},
			{10060, "for too long", nothing, "503 503 503", "changes are pending since 1m0s"},
			{10075, "still", nothing, "503 503 503", "changes are pending since 1m15s"},
			{10076, "it is in", func(s *story) { s.waiting = time.Time{}; s.p.InSync(node) }, "200 200 200", ""},
		}},
		{"the first write does not come", Options{}, []step{
			{0, "listed", func(s *story) { s.waiting = time.Now() }, "503 200 503", "not all Services are programmed yet"},
			{60, "late", nothing, "503 503 503", "changes are pending since 1m0s; not all Services are programmed yet"},
		}},
		{"transactions fail", Options{Late: 10 * time.Second}, []step{
			{0, "in force", func(s *story) { s.p.InSync(node) }, "200 200 200", ""},
			{1, "a repair fails", func(s *story) { s.p.Failed() }, "200 200 200", ""},
			{5, "and again", func(s *story) { s.p.Failed() }, "200 200 200", ""},
			{11, "it goes on from the first failure", nothing, "503 503 503", "the kernel rejects transactions since 10s"},
			{12, "it works", func(s *story) { s.p.InSync(node) }, "200 200 200", ""},
			{30, "and stays so", nothing, "200 200 200", ""},
		}},
		{"the node", Options{NeedsNode: true}, []step{
			{0, "nobody knows the node", func(s *story) { s.p.InSync(snapshot.Node{}) }, "503 200 200",
				"the Node object is unknown"},
			{1, "it is known", func(s *story) { s.p.InSync(node) }, "200 200 200", ""},
			{2, "it leaves", func(s *story) { s.p.InSync(leaving("the Node is tired")) }, "503 200 200", "the Node is tired"},
			{3, "it stays", func(s *story) { s.p.InSync(node) }, "200 200 200", ""},
		}},
		{"without a cluster", Options{}, []step{
			{0, "there is no node", func(s *story) { s.p.InSync(snapshot.Node{}) }, "200 200 200", ""},
		}},
	} {
		t.Run(test.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				s := newStory(test.o)
				var counted []string
				h := s.p.Handler(func(p Probe, code int) { counted = append(counted, fmt.Sprint(p, code)) })
				for _, step := range test.steps {
					s.at(step.second)
					step.happens(s)
					counted = nil
					var codes, want []string
					var body answer
					for _, probe := range []string{"livez", "readyz", "healthz"} {
						w := httptest.NewRecorder()
						h.ServeHTTP(w, httptest.NewRequest("GET", "/"+probe, nil))
						body = answer{}
						if err := json.Unmarshal(w.Body.Bytes(), &body); err != nil {
							t.Fatal(err)
						}
						codes, want = append(codes, fmt.Sprint(w.Code)), append(want, fmt.Sprint(probe, " ", w.Code))
					}
					codes = []string{codes[2], codes[0], codes[1]}
					if got := strings.Join(codes, " "); got != step.want {
						t.Errorf("%d s, %s: %s; want %s", step.second, step.what, got, step.want)
					}
					if got := strings.Join(body.Missing, "; "); got != step.missing {
						t.Errorf("%d s, %s: missing %q; want %q", step.second, step.what, got, step.missing)
					}
					if !slices.Equal(counted, want) {
						t.Errorf("%s: counted %q; want %q", step.what, counted, want)
					}
					if s.p.Healthy() != (codes[2] == "200") {
						t.Errorf("%s: healthy is %v", step.what, s.p.Healthy())
					}
				}
			})
		})
	}
}

// TestBodies: what kube-proxy says, kube-proxy's way; and what is ours behind it.
func TestBodies(t *testing.T) {
	synctest.Test(t, func(t *testing.T) { // the time is 2000-01-01
		s := newStory(Options{})
		ask := func(probe string) (text string) {
			w := httptest.NewRecorder()
			s.p.Handler(nil).ServeHTTP(w, httptest.NewRequest("POST", "/"+probe, nil))
			want := map[string][]string{"Content-Type": {"application/json"}, "X-Content-Type-Options": {"nosniff"}}
			if got := map[string][]string(w.Header()); !reflect.DeepEqual(got, want) {
				t.Errorf("%s: headers %v; want %v", probe, got, want)
			}
			return fmt.Sprintf("%d %s", w.Code, strings.ReplaceAll(w.Body.String(), "2000-01-01T", ""))
		}
		expect := func(probe, want string) {
			t.Helper()
			if got := ask(probe); got != want {
				t.Errorf("%s:\n%s\nwant\n%s", probe, got, want)
			}
		}
		expect(
			"healthz",
			`503 {"lastUpdated":"0001-01-01T00:00:00Z","currentTime":"00:00:00Z","nodeEligible":true,"healthy":false,`+
				`"missing":["not all Services are programmed yet"]}`,
		)
		expect("livez", `200 {"lastUpdated":"0001-01-01T00:00:00Z","currentTime":"00:00:00Z","healthy":true,`+
			`"missing":["not all Services are programmed yet"]}`)
		s.p.InSync(node)
		s.at(3)
		expect("healthz", `200 {"lastUpdated":"00:00:03Z","currentTime":"00:00:03Z","nodeEligible":true,"healthy":true,`+
			`"status":{"IPv4":{"lastUpdated":"00:00:00Z","healthy":true},`+
			`"IPv6":{"lastUpdated":"00:00:00Z","healthy":true}}}`)
		s.quarantined, s.unread = 2, 1
		expect("livez", `200 {"lastUpdated":"00:00:03Z","currentTime":"00:00:03Z","healthy":true,`+
			`"status":{"IPv4":{"lastUpdated":"00:00:00Z","healthy":true},"IPv6":{"lastUpdated":"00:00:00Z","healthy":true}},`+
			`"quarantined":2,"unread":1}`)
		s.quarantined, s.unread = 0, 0
		s.p.InSync(leaving("the Node is being deleted"))
		expect("healthz", `503 {"lastUpdated":"00:00:03Z","currentTime":"00:00:03Z","nodeEligible":false,"healthy":true,`+
			`"status":{"IPv4":{"lastUpdated":"00:00:03Z","healthy":true},"IPv6":{"lastUpdated":"00:00:03Z","healthy":true}},`+
			`"missing":["the Node is being deleted"]}`)
		s.p.Failed()
		s.at(70)
		expect("readyz", `503 {"lastUpdated":"00:00:03Z","currentTime":"00:01:10Z","healthy":false,`+
			`"status":{"IPv4":{"lastUpdated":"00:00:03Z","healthy":false},"IPv6":{"lastUpdated":"00:00:03Z","healthy":false}},`+
			`"missing":["the kernel rejects transactions since 1m7s"]}`)
	})
}
