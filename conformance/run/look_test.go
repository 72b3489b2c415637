package run

import (
	"net/netip"
	"testing"

	"github.com/verdict-proxy/verdict/conformance/cases"
	"github.com/verdict-proxy/verdict/conformance/report"
	"github.com/verdict-proxy/verdict/conformance/testbed"
	"github.com/verdict-proxy/verdict/internal/lab"
	"github.com/verdict-proxy/verdict/internal/lab/labtest"
	"github.com/verdict-proxy/verdict/sync/snapshot"
)

func TestMain(m *testing.M) { labtest.Main(m) }

func answered(endpoint, source string) lab.Result {
	return lab.Result{
		Outcome:     lab.Answered,
		Endpoint:    endpoint,
		Source:      netip.AddrPortFrom(netip.MustParseAddr(source), 40000),
		Destination: netip.MustParseAddrPort("10.244.1.10:8080"),
	}
}

// TestFits holds the judgement of packets: what is wanted passes, and everything else fails.
func TestFits(t *testing.T) {
	topology, err := testbed.NewTopology()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { labtest.Check(t, topology.Close()) })
	const pod, node = "10.244.1.9", "192.0.2.10" // pod-a, node-a
	both := cases.Want{
		Outcome:   cases.Answered,
		Endpoints: []string{"a1", "b1"},
		Sources:   map[string]string{"a1": cases.Kept, "b1": "node-a"},
	}
	sticky := both
	sticky.Sticky = true
	refused, dropped := lab.Result{Outcome: lab.Refused}, lab.Result{Outcome: lab.TimedOut}
	for _, c := range []struct {
		name         string
		want         cases.Want
		at           uint16
		seen         []lab.Result
		fits, enough bool
	}{
		{"both", both, 0, []lab.Result{answered("a1", pod), answered("b1", node)}, true, true},
		{"one of both", both, 0, []lab.Result{answered("a1", pod)}, true, false},
		{"a third", both, 0, []lab.Result{answered("a2", pod)}, false, false},
		{"a source that should be kept", both, 0, []lab.Result{answered("a1", node)}, false, false},
		{"a source that should not be kept", both, 0, []lab.Result{answered("b1", pod)}, false, false},
		{"the gateway is the node, too", both, 0, []lab.Result{answered("b1", "10.244.1.1")}, true, false},
		{"refused once", both, 0, []lab.Result{answered("a1", pod), refused}, false, false},
		{"dropped once", both, 0, []lab.Result{answered("a1", pod), dropped}, false, false},
		{"another port", both, 8081, []lab.Result{answered("a1", pod)}, false, false},
		{"sticky", sticky, 0,
			[]lab.Result{answered("a1", pod), answered("a1", pod), answered("a1", pod), answered("a1", pod),
				answered("a1", pod), answered("a1", pod)}, true, true},
		{"not sticky", sticky, 0, []lab.Result{answered("a1", pod), answered("b1", node)}, false, false},
		{"refused", cases.Want{Outcome: cases.Refused}, 0, []lab.Result{refused}, true, true},
		{"refused, got dropped", cases.Want{Outcome: cases.Refused}, 0, []lab.Result{dropped}, false, true},
		{"refused, got answered", cases.Want{Outcome: cases.Refused}, 0, []lab.Result{answered("a1", pod)}, false, true},
		{"dropped", cases.Want{Outcome: cases.Dropped}, 0, []lab.Result{dropped}, true, true},
		{"dropped, got refused", cases.Want{Outcome: cases.Dropped}, 0, []lab.Result{refused}, false, true},
		{"unanswered", cases.Want{Outcome: cases.Unanswered}, 0, []lab.Result{refused}, true, true},
		{"unanswered, got answered", cases.Want{Outcome: cases.Unanswered}, 0, []lab.Result{answered("a1", pod)}, false,
			true},
		{"it could not be tried", cases.Want{Outcome: cases.Dropped}, 0, []lab.Result{{Err: lab.ErrClosed}}, false, true},
	} {
		t.Run(c.name, func(t *testing.T) {
			s := newSeen()
			for _, r := range c.seen {
				s.note(r)
			}
			if fits := s.fits(topology, asked{from: "pod-a", want: c.want, at: c.at}); fits != c.fits {
				t.Errorf("fits: %v", fits)
			}
			if enough := s.enough(c.want); c.fits && enough != c.enough {
				t.Errorf("enough: %v", enough)
			}
		})
	}
}

// TestTopology sends packets to every host that serves, and finds them where they are said to be.
func TestTopology(t *testing.T) {
	topology, err := testbed.NewTopology()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { labtest.Check(t, topology.Close()) })
	for _, from := range []string{"pod-a", "pod-b", "a1", "node-a", "node-b", "client-a", "client-b"} {
		for _, to := range []string{"a1", "a2", "a3", "b1", "b2", "b3", "node-a", "node-b"} {
			for _, f := range lab.Families() {
				want := cases.Want{Outcome: cases.Answered, Endpoints: []string{to}, Sources: map[string]string{to: cases.Kept}}
				q := asked{
					from:     from,
					to:       netip.AddrPortFrom(topology.Host(to).IP(f), podPort),
					protocol: snapshot.TCP,
					want:     want,
					at:       podPort,
				}
				if got, ok := look(topology, 1, q); !ok {
					t.Errorf("%s to %s, %s: got %s", from, to, f, got.words(topology, q))
				}
			}
		}
		if from != "pod-a" && from != "client-b" {
			continue
		}
		for i := range testbed.ServiceRange {
			q := asked{
				from:     from,
				to:       netip.AddrPortFrom(lab.Nth(testbed.ServiceRange[i], 77), 80),
				protocol: snapshot.UDP,
				want:     cases.Want{Outcome: cases.Dropped},
			}
			if got, ok := look(topology, 1, q); !ok {
				t.Errorf("%s to %s: got %s", from, q.to, got.words(topology, q))
			}
		}
	}
}

func TestJudge(t *testing.T) {
	d := &cases.Difference{Right: "verdict", Why: "since", Source: "there"}
	good, bad := report.Look{OK: true}, report.Look{}
	for _, c := range []struct {
		name  string
		looks []report.Look
		d     []*cases.Difference
		want  report.Outcome
	}{
		{"all good", []report.Look{good, good}, []*cases.Difference{nil, nil}, report.Pass},
		{"one bad", []report.Look{good, bad, good}, []*cases.Difference{nil, nil, nil}, report.Fail},
		{"one differs", []report.Look{good, good, good}, []*cases.Difference{nil, d, nil}, report.Differs},
		{"one differs, one bad", []report.Look{good, bad}, []*cases.Difference{d, nil}, report.Fail},
		{"one bad, one differs", []report.Look{bad, good}, []*cases.Difference{nil, d}, report.Fail},
		{"a difference that is not there", []report.Look{bad}, []*cases.Difference{d}, report.Fail},
	} {
		r := &report.Result{Outcome: report.Pass}
		for i := range c.looks {
			judge(r, &c.looks[i], c.d[i])
		}
		if r.Outcome != c.want {
			t.Errorf("%s: got %s, want %s", c.name, r.Outcome, c.want)
		}
	}
}

func TestGrep(t *testing.T) {
	listing := "# node-a: nft list ruleset\nmap x {\n  10.0.0.1 comment \"shop/web:p\"\n  10.0.0.2 comment " +
		"\"shop/web2:p\"\n}\n"
	if got, want := grep(listing, "shop/web:"),
		"# node-a: nft list ruleset\n  10.0.0.1 comment \"shop/web:p\""; got != want {
		t.Errorf("got %q", got)
	}
}
