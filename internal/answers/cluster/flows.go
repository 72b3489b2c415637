package cluster

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"io"
	"slices"
	"sync"
	"time"

	"github.com/verdict-proxy/verdict/internal/answers/records"
	"github.com/verdict-proxy/verdict/internal/proxy/flows"
	"github.com/verdict-proxy/verdict/internal/system/terminal"
)

// NodeRecord is a record of a node.
type NodeRecord struct {
	Node string `json:"node"`
	flows.Record
}

// Flows shows the records of all nodes, merged by time, and what each node's records miss. The JSON of it are lines:
// answers, NodeRecords, and the NodeAnswers of nodes without an answer.
type Flows struct {
	// Printer gets a table; nil if JSON gets lines.
	Printer *terminal.Printer
	JSON    *json.Encoder

	table records.Table
	code  int
}

// Code returns the exit status.
func (f *Flows) Code() int { return f.code }

// flowsCommand returns what runs "verdict flows" on a node.
func flowsCommand(q *records.Question, more ...string) func(Target) []string {
	return func(t Target) []string {
		return slices.Concat([]string{"flows", "-o", "json"}, t.Flags, more, q.Args())
	}
}

// Flows asks all nodes once, and shows what they answer.
func (c *Cluster) Flows(ctx context.Context, q *records.Question, to *Flows) error {
	merged, err := c.gather(ctx, q)
	if err != nil {
		return err
	}
	return to.show(merged)
}

// gather asks all nodes once.
func (c *Cluster) gather(ctx context.Context, q *records.Question) (*part, error) {
	targets, _, err := c.Targets(ctx)
	if err != nil {
		return nil, err
	}
	merged := &part{}
	for _, r := range c.Each(ctx, targets, flowsCommand(q)) {
		err := r.failure(0)
		for line := range bytes.Lines(r.Stdout) {
			if err != nil {
				break
			}
			err = merged.add(r.Node, line)
		}
		if err != nil {
			merged.Unanswered.add(r.Node, err)
		}
	}
	return merged, nil
}

// part is what came of nodes in some time.
type part struct {
	records []NodeRecord
	answers []flows.Answer
	Unanswered
}

// add adds a line of a node.
func (p *part) add(node string, text []byte) error {
	line, err := records.Parse(text)
	switch {
	case err != nil:
		return err
	case line.Record != nil:
		p.records = append(p.records, NodeRecord{node, *line.Record})
	case line.Answer != nil:
		line.Answer.Node = node
		p.answers = append(p.answers, *line.Answer)
	}
	return nil
}

// show shows a part, its records in the order of time.
func (f *Flows) show(p *part) (err error) {
	slices.SortStableFunc(p.records, func(a, b NodeRecord) int { return a.Time.Compare(b.Time) })
	f.code = max(f.code, p.Code())
	if f.Printer == nil {
		for i := range p.answers {
			err = errors.Join(err, f.JSON.Encode(&p.answers[i]))
		}
		for i := range p.records {
			err = errors.Join(err, f.JSON.Encode(&p.records[i]))
		}
		for i := range p.Failed {
			err = errors.Join(err, f.JSON.Encode(&p.Failed[i]))
		}
		return err
	}
	f.table.Printer, f.table.Nodes = f.Printer, true
	for i := range p.records {
		f.table.Print(p.records[i].Node, &p.records[i].Record)
	}
	for i := range p.answers {
		records.PrintLosses(f.Printer, &p.answers[i])
	}
	p.Unanswered.print(f.Printer)
	return f.Printer.Err()
}

// holdBack is how long records wait for those of other nodes.
const holdBack = time.Second

// FollowFlows follows all nodes until ctx ends, which is no error. Nodes that come later are not followed.
func (c *Cluster) FollowFlows(ctx context.Context, q *records.Question, to *Flows) error {
	targets, _, err := c.Targets(ctx)
	if err != nil {
		return err
	}
	ctx, cancel := context.WithCancel(ctx)
	next, ended := &gathered{}, make(chan struct{})
	var all sync.WaitGroup
	for _, t := range targets {
		all.Go(func() { next.follow(ctx, c, t, flowsCommand(q, "--until-eof")(t)) })
	}
	go func() {
		all.Wait()
		close(ended)
	}()
	defer func() {
		cancel()
		<-ended
	}()
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-ended: // no node is left
			return to.show(next.take())
		case <-time.After(holdBack):
		}
		if err := to.show(next.take()); err != nil {
			return err
		}
	}
}

// gathered is the part that nodes add to while it is not shown.
type gathered struct {
	mu   sync.Mutex
	next part
}

func (g *gathered) take() *part {
	g.mu.Lock()
	defer g.mu.Unlock()
	p := g.next
	g.next = part{}
	return &p
}

// follow adds what a command on a node says.
func (g *gathered) follow(ctx context.Context, c *Cluster, t Target, argv []string) {
	err := c.stream(ctx, t, argv, func(line []byte) error {
		g.mu.Lock()
		defer g.mu.Unlock()
		return g.next.add(t.Node, line)
	})
	if err == nil {
		err = errors.New("the node has ended its answer")
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	if ctx.Err() == nil {
		g.next.Unanswered.add(t.Node, err)
	}
}

// stream runs a command of verdict on a node until ctx ends, and hands on its lines. The command's input ends when ctx
// does: it would not notice otherwise.
func (c *Cluster) stream(ctx context.Context, t Target, argv []string, each func(line []byte) error) error {
	if t.Missing != "" {
		return errors.New(t.Missing)
	}
	stdin, hold := io.Pipe()
	defer context.AfterFunc(ctx, func() { hold.Close() })()
	out, errs := &lineWriter{each: each}, &bounded{left: 64 << 10}
	r := Result{Target: t}
	r.Code, r.Err = c.Exec.Exec(ctx, c.Namespace, t.Pod, container, append([]string{"verdict"}, argv...), stdin, out, errs)
	hold.Close()
	if out.err != nil {
		return out.err
	}
	r.Stderr = bytes.TrimSpace(errs.b.Bytes())
	return r.failure(0)
}

// lineWriter hands on the lines that are written to it.
type lineWriter struct {
	rest []byte
	each func(line []byte) error
	err  error
}

// maxRest bounds a line.
const maxRest = 64 << 10

func (w *lineWriter) Write(p []byte) (n int, err error) {
	w.rest = append(w.rest, p...)
	for {
		line, rest, ok := bytes.Cut(w.rest, []byte("\n"))
		if !ok {
			break
		}
		if w.rest = rest; w.err == nil {
			w.err = w.each(line)
		}
	}
	if len(w.rest) > maxRest && w.err == nil {
		w.err = errors.New("a line of the answer is too long")
	}
	return len(p), w.err
}

// Zones adds up what crossed zones, as all nodes recorded it.
func (c *Cluster) Zones(ctx context.Context, q *records.Question, price float64) (*ClusterZones, error) {
	targets, _, err := c.Targets(ctx)
	if err != nil {
		return nil, err
	}
	sum, out := records.NewZoneSum(), &ClusterZones{}
	for _, r := range c.Each(ctx, targets, flowsCommand(q)) {
		var z records.Zones
		if err := r.read(&z, codeSame); err != nil {
			out.add(r.Node, err)
			continue
		}
		sum.Add(&z)
	}
	out.Zones = sum.Zones(price)
	return out, nil
}

// ClusterZones are the Zones of all nodes.
type ClusterZones struct {
	*records.Zones
	Unanswered
}

// Print prints the pairs of zones, and the nodes without an answer.
func (z *ClusterZones) Print(p *terminal.Printer, price float64) {
	z.Zones.Print(p, price)
	z.Unanswered.print(p)
}
