package stories

import (
	"context"
	"fmt"
	"maps"
	"net/http"
	"slices"
	"strings"
	"time"

	"github.com/verdict-proxy/verdict/conformance/cluster"
	"github.com/verdict-proxy/verdict/internal/lab/blackbox"
	"github.com/verdict-proxy/verdict/internal/lab/control"
)

// watch records what is needed to explain failures, and asks clients for theirs before that is overwritten.
type watch struct {
	box  *blackbox.Box
	stop context.CancelFunc
	done chan struct{}
	// causes and lines are those of the story so far.
	causes map[string]int
	lines  []string
}

const (
	// packetsKept is how many packets are kept of each node: those of some 30 s.
	packetsKept = 1 << 18
	// askClients is how often clients are asked for their failures.
	askClients = time.Second
	// rollingClientPort is where the clients of rolling updates report.
	rollingClientPort = 9100
)

// record begins to record on all nodes and outside.
func (b *Bed) record(ctx context.Context) (*watch, error) {
	ctx, stop := context.WithCancel(ctx)
	w := &watch{box: blackbox.New(blackbox.Config{Packets: packetsKept, Dir: b.Reports}), stop: stop,
		done: make(chan struct{}), causes: map[string]int{}}
	err := control.Record(ctx, b.client, w.box)
	for _, name := range []string{b.Outside(), b.Nodes[0].Netns(), b.Nodes[1].Netns(), b.Nodes[2].Netns()} {
		if err == nil {
			err = w.box.WatchPath(strings.TrimPrefix(name, "verdict-"), cluster.NetnsPath(name))
		}
	}
	w.box.WatchProcesses(func(groups string) string {
		for _, n := range b.Nodes {
			if n.Runs(groups) {
				return n.Name
			}
		}
		return ""
	})
	go func() {
		defer close(w.done)
		b.askForFailures(ctx, w.box)
	}()
	return w, err
}

func (w *watch) close() error {
	w.stop()
	<-w.done
	return w.box.Close()
}

// askForFailures tells the recorder of the failures of all clients, also of those that do not count.
func (b *Bed) askForFailures(ctx context.Context, box *blackbox.Box) {
	client := b.fromOutside()
	client.Timeout = askClients
	at, known := map[string]string{}, map[string]cluster.Report{}
	for tick := time.NewTicker(askClients); ; {
		select {
		case <-ctx.Done():
			tick.Stop()
			return
		case <-tick.C:
		}
		now, err := b.clients(ctx)
		if err == nil {
			err = b.clientPods(ctx, now, map[string]int{"rolling-client": rollingClientPort})
		}
		if err == nil {
			at = now // while the API server is gone, clients are where they were
		}
		for name, address := range at {
			b.ask(client, name, address, known, box)
		}
	}
}

// ask tells the recorder of what one client has seen since it was asked last.
func (b *Bed) ask(client *http.Client, name, address string, known map[string]cluster.Report, box *blackbox.Box) {
	var r cluster.Report
	before := known[address]
	if fetch(client, fmt.Sprintf("%s/report?after=%d", address, before.Noted), &r) != nil {
		return
	}
	if known[address] = r; before.Started != r.Started {
		return // what it noted before anybody asked is no story's
	}
	for _, f := range r.Failures {
		f.From = name
		box.Failed(f)
	}
	if n := r.Noted - before.Noted - len(r.Failures); n > 0 {
		box.Left("its client did not keep it", n)
	}
}

// look explains why connections failed since the last call, and adds it to the story: for each cause, how many failed,
// and the first of them.
func (w *watch) look() (causes map[string]int) {
	all, left := w.box.Explanations()
	causes = map[string]int{}
	for i := range all {
		x := &all[i]
		causes[x.Cause]++
		if w.causes[x.Cause]++; w.causes[x.Cause] <= shownOfCause {
			w.lines = append(w.lines, x.String())
		}
	}
	for told, n := range left {
		causes["not examined: "+told] += n
		w.causes["not examined: "+told] += n
	}
	return causes
}

// explain returns why connections failed in the story so far, and begins the next one.
func (w *watch) explain() (causes map[string]int, lines []string) {
	w.look()
	causes, lines = w.causes, w.lines
	w.causes, w.lines = map[string]int{}, nil
	return causes, lines
}

// shownOfCause is how many failures of one cause are printed.
const shownOfCause = 3

// causeWords say how often connections failed for which cause.
func causeWords(causes map[string]int) string {
	var all []string
	for _, cause := range slices.Sorted(maps.Keys(causes)) {
		all = append(all, fmt.Sprintf("%d %s", causes[cause], cause))
	}
	return strings.Join(all, ", ")
}
