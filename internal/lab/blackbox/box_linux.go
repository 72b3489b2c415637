// Package blackbox records what is needed to say why one connection failed, and says it. In each network namespace that
// it watches it keeps, in rings of fixed size, the headers of packets, the beginnings and ends of conntrack's entries,
// changes of routes, addresses, neighbours and links, the times of nf_tables' transactions, and counters of what the
// kernel drops. Callers add Services, EndpointSlices and Nodes as they change, and notes about what they do themselves.
//
// It looks on and changes nothing: it has no rules, and no listener that slows transactions.
package blackbox

import (
	"cmp"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/verdict-proxy/verdict/internal/lab"
	"github.com/verdict-proxy/verdict/internal/system/wake"
	"github.com/verdict-proxy/verdict/sync/snapshot"
)

// Config says how much is kept, and where.
type Config struct {
	// Packets is how many packets' headers are kept of each namespace, of some 100 bytes each, and half as many
	// beginnings and ends of entries of connection tracking; 0 means 16,384.
	Packets int
	// Late is how long a change of endpoints may take until a proxy has programmed it, and still explain that a
	// connection was rejected; 0 means 5 s.
	Late time.Duration
	// Dir is where the records of failures go that are unexplained; empty means nowhere.
	Dir string
}

// Failure is a connection that failed.
type Failure struct {
	// From names the client.
	From string
	// Client is its own address and port. If the port is 0, its first packet tells: the one next to Began.
	Client netip.AddrPort
	// Server is where it connected to. Protocol is its protocol; 0 means TCP.
	Server   netip.AddrPort
	Protocol snapshot.Protocol
	// Began is when it began to connect, Failed when it failed. Held says that it had been answered before.
	Began, Failed time.Time
	Held          bool
	// Err is what the client was told.
	Err string
}

func (f *Failure) String() string {
	how := "failed"
	if f.Held {
		how = "broke"
	}
	return fmt.Sprintf("%s %v to %v %s at %s after %v: %s", f.From, f.Client, f.Server, how,
		f.Failed.Format("15:04:05.000"), f.Failed.Sub(f.Began).Round(time.Millisecond), f.Err)
}

// Unexplained is the cause of a failure whose records do not tell why.
const Unexplained = "unexplained"

// Explanation is why a connection failed.
type Explanation struct {
	Failure
	// Cause is one of Causes, or Unexplained. Text says it in words.
	Cause, Text string
	// File holds the records of the connection if it is unexplained, and there was a place to write them to.
	File string
}

func (x *Explanation) String() string {
	s := fmt.Sprintf("%s\n    %s: %s", &x.Failure, x.Cause, x.Text)
	if x.File != "" {
		s += " (records in " + x.File + ")"
	}
	return s
}

// Box is a recorder. Call New, and Close it. It is safe for concurrent use.
type Box struct {
	config  Config
	began   time.Time
	objects *objects
	notes   *ring[note]

	mu       sync.Mutex
	spaces   []*space
	attached map[*attachment]func()
	// asked are failures whose records are not gathered yet, failed those that Explanations will be asked for.
	asked, failed []*evidence
	// examined is how many of those that failed were told the same, and left how many are not examined.
	examined, left map[string]int
	files          int
	wake           chan struct{}
	closed         chan struct{}
	wait           sync.WaitGroup
}

// note is what a caller did.
type note struct {
	at   time.Time
	text string
}

const (
	defaultPackets = 1 << 14
	defaultLate    = 5 * time.Second
	keptNotes      = 1 << 10
	// maxFailures is how many failures are examined, and maxRare how many whose clients were told the same always are.
	// What is beyond is counted by what clients were told, of which maxTold are kept apart.
	maxFailures = 2_000
	maxRare     = 50
	maxTold     = 16
	// settle is how long after a failure its records are gathered. Readers have read them then, unless they wait for a
	// processor.
	settle = 300 * time.Millisecond
)

// patience is how long the records of failures wait for readers.
var patience = 10 * time.Second

// New returns a recorder that watches nothing yet.
func New(c Config) *Box {
	if c.Packets == 0 {
		c.Packets = defaultPackets
	}
	c.Late = cmp.Or(c.Late, defaultLate)
	b := &Box{config: c, began: time.Now().Add(-time.Minute), objects: newObjects(), notes: newRing[note](keptNotes),
		examined: map[string]int{}, left: map[string]int{},
		attached: map[*attachment]func(){}, wake: make(chan struct{}, 1), closed: make(chan struct{})}
	b.wait.Go(b.gatherAll)
	return b
}

// Watch records in a host until the host or the box is closed.
func (b *Box) Watch(hosts ...*lab.Host) error {
	for _, h := range hosts {
		a, err := b.attach(h.Name, h.Do)
		if err != nil {
			return err
		}
		b.mu.Lock()
		b.attached[a] = h.Keep(a)
		b.mu.Unlock()
	}
	return nil
}

// attach records in the namespace that enter runs functions in. The same name again goes on with the same records.
func (b *Box) attach(name string, enter func(func() error) error) (a *attachment, err error) {
	b.mu.Lock()
	i := slices.IndexFunc(b.spaces, func(s *space) bool { return s.name == name })
	if i < 0 {
		i = len(b.spaces)
		n := b.config.Packets
		b.spaces = append(slices.Clone(b.spaces), newSpace(name, sizes{n, n / 2, 1 << 12, 1 << 12, 1 << 10}))
	}
	s := b.spaces[i]
	b.mu.Unlock()
	err = enter(func() (err error) {
		a, err = s.attach()
		return err
	})
	return a, err
}

// Note records what the caller does just now.
func (b *Box) Note(format string, args ...any) {
	b.notes.add(&note{time.Now(), fmt.Sprintf(format, args...)})
}

// Failed has a failure examined. It returns at once.
func (b *Box) Failed(f Failure) {
	b.mu.Lock()
	defer b.mu.Unlock()
	told := b.told(f.Err)
	if len(b.failed) >= maxFailures && b.examined[told] >= maxRare {
		b.left[told]++
		return
	}
	b.examined[told]++
	b.failed = append(b.failed, b.ask(f))
}

// Left counts failures that cannot be examined, by what they have in common.
func (b *Box) Left(what string, n int) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.left[what] += n
}

// told is the end of an error, which names no addresses. The lock is held.
func (b *Box) told(err string) string {
	told := err[max(0, strings.LastIndex(err, ": ")):]
	told = strings.TrimPrefix(told, ": ")
	if _, known := b.examined[told]; !known && len(b.examined) >= maxTold {
		return "other errors"
	}
	return told
}

// ask has the records of a failure gathered. The lock is held.
func (b *Box) ask(f Failure) *evidence {
	if f.Protocol == 0 {
		f.Protocol = snapshot.TCP
	}
	e := newEvidence(f)
	b.asked = append(b.asked, e)
	wake.Up(b.wake)
	return e
}

// gatherAll gathers the records of failures before they are overwritten.
func (b *Box) gatherAll() {
	for closed := false; !closed; {
		select {
		case <-b.closed:
		case <-b.wake:
		}
		select {
		case <-b.closed:
			closed = true
		case <-time.After(settle):
		}
		b.mu.Lock()
		all, spaces := b.asked, b.spaces
		b.asked = nil
		b.mu.Unlock()
		awaitReaders(all, spaces)
		gather(all, spaces)
	}
}

// awaitReaders waits until all packets are read that came before the failures. Where they are not in time, the records
// do not show what was not seen.
func awaitReaders(all []*evidence, spaces []*space) {
	var last int64
	for _, e := range all {
		last = max(last, e.Failed.UnixNano())
	}
	limit := time.Now().Add(patience)
	for _, s := range spaces {
		for s.behind(last) && time.Now().Before(limit) {
			time.Sleep(10 * time.Millisecond)
		}
		for _, e := range all {
			if s.behind(e.Failed.UnixNano()) {
				e.blind = append(e.blind, fmt.Sprintf("packets in %s since %s were not read in time", s.name,
					instant(s.read.Load())))
			}
		}
	}
}

// Explain says why a connection failed, within half a second if the machine has processors to spare.
func (b *Box) Explain(f Failure) Explanation {
	b.mu.Lock()
	e := b.ask(f)
	b.mu.Unlock()
	<-e.done
	return b.explain(e)
}

// Cause says why a client of the lab failed, as the end of a line.
func (b *Box) Cause(from *lab.Host, p snapshot.Protocol, to netip.AddrPort, r lab.Result, began time.Time,
	held bool) string {
	x := b.Explain(Failure{From: from.Name, Client: r.Client, Server: to, Protocol: p, Began: began, Failed: time.Now(),
		Held: held, Err: fmt.Sprint(r.Err)})
	file := ""
	if x.File != "" {
		file = " (records in " + x.File + ")"
	}
	return fmt.Sprintf("; %s: %s%s", x.Cause, x.Text, file)
}

// Explanations returns why all connections failed that Failed was told of since the last call, and how many more there
// were than are examined, by what their clients were told. The later it is called, the more is known of what became of
// their endpoints.
func (b *Box) Explanations() (all []Explanation, left map[string]int) {
	b.mu.Lock()
	failed := b.failed
	left, b.failed, b.left, b.examined = b.left, nil, map[string]int{}, map[string]int{}
	b.mu.Unlock()
	for _, e := range failed {
		<-e.done
		all = append(all, b.explain(e))
	}
	return all, left
}

// explain classifies, and writes the records of what is unexplained to a file.
func (b *Box) explain(e *evidence) Explanation {
	e.objects, e.notes, e.late = b.objects, b.notes, b.config.Late
	x := Explanation{Failure: e.Failure}
	x.Cause, x.Text = e.classify()
	if x.Cause != Unexplained || b.config.Dir == "" {
		return x
	}
	b.mu.Lock()
	b.files++
	x.File = fmt.Sprintf("%s/unexplained-%d.txt", b.config.Dir, b.files)
	b.mu.Unlock()
	err := errors.Join(os.MkdirAll(b.config.Dir, 0o755), os.WriteFile(x.File, []byte(e.String()), 0o644))
	if err != nil {
		x.File, x.Text = "", fmt.Sprintf("%s; %v", x.Text, err)
	}
	return x
}

// Close ends all recording. Failures that it was told of before are explained still.
func (b *Box) Close() error {
	b.mu.Lock()
	all := b.attached
	b.attached = map[*attachment]func(){}
	b.mu.Unlock()
	var errs []error
	for a, forget := range all {
		forget()
		errs = append(errs, a.Close())
	}
	close(b.closed)
	b.wait.Wait()
	return errors.Join(errs...)
}
