package takeover

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"
)

// fakeNode is a node as a Runner sees it.
type fakeNode struct {
	start time.Time
	// rules says whether there are rules at a time since the start, running the processes to be seen, and connections
	// those of IPVS.
	rules       func(time.Duration) bool
	running     func(time.Duration) []int
	connections func(time.Duration) int
	refuse      error
	// looks and removals are when they happened.
	looks, removals []time.Duration
}

func (n *fakeNode) find(context.Context) (leftovers, error) {
	at := time.Since(n.start)
	n.looks = append(n.looks, at)
	f := &fakeFound{node: n, at: at}
	f.rules = n.rules(at)
	if n.running != nil {
		f.running = n.running(at)
	}
	if n.connections != nil {
		f.connections = n.connections(at)
	}
	return f, nil
}

type fakeFound struct {
	node        *fakeNode
	at          time.Duration
	rules       bool
	running     []int
	connections int
}

func (f *fakeFound) Empty() bool       { return !f.rules && f.connections == 0 }
func (f *fakeFound) HasServices() bool { return f.rules }
func (f *fakeFound) Running() []int    { return f.running }
func (f *fakeFound) Connections() int  { return f.connections }
func (f *fakeFound) Summary() []string {
	if f.Empty() {
		return nil
	}
	return []string{"rules"}
}
func (f *fakeFound) Kept() []string { return nil }
func (f *fakeFound) Remove(context.Context) error {
	f.node.removals = append(f.node.removals, f.at)
	return f.node.refuse
}

// TestRunner lets a Runner work for a day on nodes of several kinds, and sees when it removes rules, when it looks for
// the last time, and what it says.
func TestRunner(t *testing.T) {
	never := func(time.Duration) bool { return false }
	const m = time.Minute
	for _, c := range []struct {
		name string
		mode Mode
		node fakeNode
		// removals is when it removes, last when it looks for the last time; said is the log.
		removals []time.Duration
		last     time.Duration
		said     []string
	}{
		{name: "nothing there", mode: Auto, node: fakeNode{rules: never}, last: 5*m + 10*time.Second},
		{
			name: "left of a former one", mode: Auto,
			node:     fakeNode{rules: func(at time.Duration) bool { return at == 0 }},
			removals: []time.Duration{0}, last: 5*m + 10*time.Second,
			said: []string{`INFO removed kube-proxy's rules what=rules`},
		},
		{
			name: "told not to", mode: Never, node: fakeNode{rules: func(time.Duration) bool { return true }},
			said: []string{`INFO kube-proxy's rules are kept, as configured what=rules`},
		},
		{
			// One that is at work, in a container that is not to be seen, until its DaemonSet is removed after two hours. It has
			// written its rules again by the next look. Each removal waits for twice as long.
			name: "at work", mode: Auto,
			node: fakeNode{rules: func(at time.Duration) bool { return at < 2*time.Hour+m }},
			removals: []time.Duration{0, 70 * time.Second, 190 * time.Second, 430 * time.Second, 910 * time.Second,
				1870 * time.Second, 3790 * time.Second},
			last: 2*time.Hour + 5*m + 10*time.Second,
			said: append([]string{
				`INFO removed kube-proxy's rules what=rules`,
				`WARN kube-proxy is running on this node and writes its rules again: remove its DaemonSet. No connection is ` +
					`lost, but both proxies do the work pids=[] what=rules`,
			}, slices.Repeat([]string{`INFO removed kube-proxy's rules what=rules`}, 6)...),
		},
		{
			name: "at work, and to be seen", mode: Auto,
			node: fakeNode{
				rules:   func(at time.Duration) bool { return at <= 31*m },
				running: func(at time.Duration) []int { return map[bool][]int{true: {7}}[at < 30*m] },
			},
			removals: []time.Duration{0, 30*m + 10*time.Second}, last: 35*m + 10*time.Second,
			said: []string{
				`INFO removed kube-proxy's rules what=rules`,
				`WARN kube-proxy is running on this node and writes its rules again: remove its DaemonSet. No connection is ` +
					`lost, but both proxies do the work pids=[7] what=rules`,
				`INFO removed kube-proxy's rules what=rules`,
			},
		},
		{
			name: "connections of IPVS", mode: Auto,
			node:     fakeNode{rules: never, connections: func(at time.Duration) int { return max(0, 4-int(at/m)) }},
			removals: []time.Duration{0, 10 * time.Second, 70 * time.Second, 130 * time.Second, 190 * time.Second},
			last:     8*m + 10*time.Second,
			said: []string{`INFO connections still use kube-proxy's IPVS virtual services, which are removed once the ` +
				`connections have ended connections=4 what=rules`},
		},
		{
			name: "an error", mode: Auto,
			node:     fakeNode{rules: func(at time.Duration) bool { return at < 2*m }, refuse: errors.New("table nat is busy")},
			removals: []time.Duration{0, 10 * time.Second, 70 * time.Second}, last: 6*m + 10*time.Second,
			said: []string{`WARN table nat is busy`},
		},
	} {
		t.Run(c.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				var log bytes.Buffer
				handler := slog.NewTextHandler(&log, &slog.HandlerOptions{ReplaceAttr: func(_ []string, a slog.Attr) slog.Attr {
					if a.Key == slog.TimeKey {
						return slog.Attr{}
					}
					return a
				}})
				node := &c.node
				r := Runner{Mode: c.mode, Log: slog.New(handler), find: node.find}
				ready := make(chan struct{})
				time.AfterFunc(time.Hour, func() { node.start = time.Now(); close(ready) })
				ctx, cancel := context.WithTimeout(t.Context(), 25*time.Hour)
				defer cancel()
				r.Run(ctx, ready)
				if !slices.Equal(node.removals, c.removals) {
					t.Errorf("removed at %v, want %v", node.removals, c.removals)
				}
				if last := node.looks[len(node.looks)-1]; last != c.last {
					t.Errorf("looked at %v for the last time, want %v", last, c.last)
				}
				var said []string
				for line := range strings.Lines(log.String()) {
					line = strings.NewReplacer("level=", "", `msg="`, "", `" `, " ", "\"\n", "\n").Replace(line)
					said = append(said, strings.TrimSpace(line))
				}
				if fmt.Sprint(said) != fmt.Sprint(c.said) {
					t.Errorf("said\n%s\nwant\n%s", strings.Join(said, "\n"), strings.Join(c.said, "\n"))
				}
			})
		})
	}
}

// TestRunnerEnds ends a Runner before the kernel carries anything: nothing may be removed.
func TestRunnerEnds(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithTimeout(t.Context(), time.Hour)
		defer cancel()
		r := Runner{Mode: Auto, Log: slog.New(slog.DiscardHandler), find: func(context.Context) (leftovers, error) {
			t.Error("it looked")
			return &fakeFound{}, nil
		}}
		r.Run(ctx, nil)
	})
}
