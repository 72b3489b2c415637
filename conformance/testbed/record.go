package testbed

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"sync"
	"time"

	v1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"

	"github.com/verdict-proxy/verdict/internal/lab"
	"github.com/verdict-proxy/verdict/internal/lab/blackbox"
	"github.com/verdict-proxy/verdict/internal/lab/control"
)

// packetsKept is how many packets are kept of each host at most: those of some 30 s of a node under all clients. What
// is never recorded takes no memory.
const packetsKept = 1 << 18

// changesLate is how late proxies may be that are killed, on a machine that is busy. How late they are is what others
// judge.
const changesLate = time.Minute

// Record records why connections fail, in all hosts, those that are added later included, until the testbed is closed.
// The records of failures that nothing explains go to dir.
func (tb *Testbed) Record(ctx context.Context, dir string) error {
	ctx, tb.stopRecord = context.WithCancel(ctx)
	tb.Box = blackbox.New(blackbox.Config{Packets: packetsKept, Late: changesLate, Dir: dir})
	return errors.Join(tb.Box.Watch(tb.Hosts()...), control.Record(ctx, tb.Client, tb.Box, nil))
}

// Made tells the recorder, if there is one, of a Service that was made. Its own watch may be as late as any other after
// the API server was away.
func (tb *Testbed) Made(s *v1.Service) {
	if tb.Box != nil {
		tb.Box.Service(control.ServiceOf(s))
	}
}

// Writes tells the recorder, if there is one, of an EndpointSlice that is about to be written.
func (tb *Testbed) Writes(s *discovery.EndpointSlice) {
	if tb.Box != nil {
		tb.Box.Write(control.SliceOf(s, false))
	}
}

// closeRecord ends the recorder, if there is one.
func (tb *Testbed) closeRecord() error {
	if tb.Box == nil {
		return nil
	}
	tb.stopRecord()
	return tb.Box.Close()
}

// AddPod is that of the topology, under the recorder's eyes.
func (tb *Testbed) AddPod(node string) (*lab.Host, error) {
	pod, err := tb.Topology.AddPod(node)
	if err == nil && tb.Box != nil {
		err = tb.Box.Watch(pod)
	}
	return pod, err
}

const (
	// maxExplained is how many failures of one scenario are explained, and shownOfCause how many lines a cause has that
	// the scenario does not expect.
	maxExplained = 5_000
	shownOfCause = 3
	// notExplained stands for the causes of failures beyond maxExplained.
	notExplained = "not explained"
	// expectedUnseen is the cause of what nothing explains where a scenario expects that.
	expectedUnseen = "the scenario's own, unseen"
)

// Failures explains why connections of one scenario failed. Nil explains nothing. It is safe for concurrent use.
type Failures struct {
	box     *blackbox.Box
	expects []string
	wait    sync.WaitGroup

	mu     sync.Mutex
	over   bool
	asked  int
	harmed time.Time
	causes map[string]int
	shown  map[string][]string
}

// Failures returns what explains the failures of a scenario. From its harm on, the scenario expects these causes;
// blackbox.Unexplained is one where the recorder cannot see the harm.
// Without a recorder, it returns nil.
func (tb *Testbed) Failures(expects ...string) *Failures {
	if tb.Box == nil {
		return nil
	}
	return &Failures{box: tb.Box, expects: expects, causes: map[string]int{}, shown: map[string][]string{}}
}

// Harm says that the scenario does its harm now.
func (f *Failures) Harm() {
	if f == nil {
		return
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	f.harmed = time.Now()
}

// Add has a failure explained, which takes half a second. It returns at once.
func (f *Failures) Add(failure blackbox.Failure) {
	if f == nil {
		return
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.over {
		return
	}
	if f.asked++; f.asked > maxExplained {
		f.causes[notExplained]++
		return
	}
	f.wait.Go(func() { f.add(f.box.Explain(failure)) })
}

func (f *Failures) add(x blackbox.Explanation) {
	f.mu.Lock()
	defer f.mu.Unlock()
	expected := !f.harmed.IsZero() && !x.Failed.Before(f.harmed) && slices.Contains(f.expects, x.Cause)
	if expected && x.Cause == blackbox.Unexplained {
		x.Cause = expectedUnseen
	}
	if f.causes[x.Cause]++; expected {
		return
	}
	f.shown[x.Cause] = append(f.shown[x.Cause], x.String())
}

// Causes waits until all failures so far are explained; later ones are no part of the scenario. It returns how many had
// which cause, and lines about causes that the scenario does not expect: how many there are, and the first ones.
func (f *Failures) Causes() (causes map[string]int, lines []string) {
	if f == nil {
		return nil, nil
	}
	f.mu.Lock()
	f.over = true
	f.mu.Unlock()
	f.wait.Wait()
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, cause := range slices.Sorted(maps.Keys(f.shown)) {
		all := f.shown[cause]
		lines = append(lines, fmt.Sprintf("%d unexpected: %s", len(all), cause))
		lines = append(lines, all[:min(len(all), shownOfCause)]...)
	}
	return f.causes, lines
}
