package blackbox

import (
	"errors"
	"fmt"
	"io"
	"net/netip"
	"os"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/verdict-proxy/verdict/internal/proxy/conntrack"
	"github.com/verdict-proxy/verdict/internal/system/netlink"
	"github.com/verdict-proxy/verdict/sync/snapshot"
)

// sizes are how many records a namespace's rings hold.
type sizes struct{ packets, flows, changes, commits, counts int }

const (
	// pollCommits is how often the number of nf_tables' last transaction is read in a namespace that has seen one, and
	// pollIdle how often in others, and how often counters are read. A listener would make every transaction slower.
	pollCommits = 4 * time.Millisecond
	pollIdle    = 200 * time.Millisecond
	// eventPace bounds how many events of connection tracking are read in a captureWindow.
	eventPace = 5_000
)

// flow is the beginning or the end of an entry of connection tracking.
type flow struct {
	at    int64
	ended bool
	// asked is the direction of the client's first packet, sent that of the packet as it was sent on.
	asked, sent tuple
	// by is the port of the socket that deleted the entry; 0 if none did.
	by       uint32
	answered bool
}

func (f *flow) String() string {
	what := "begins"
	if f.ended {
		what = "ends"
	}
	s := fmt.Sprintf("entry %s: %v", what, f.asked)
	if f.sent != f.asked {
		s += fmt.Sprintf(", sent as %v", f.sent)
	}
	if f.by != 0 {
		s += fmt.Sprintf(", deleted by the socket %d", f.by)
	}
	return s
}

// flowOf is the beginning of an entry.
func flowOf(f *conntrack.Flow, at int64) flow {
	p := uint8(f.Frontend.Protocol)
	return flow{at: at, by: f.By, answered: f.Answered,
		asked: tupleOf(p, f.Client, netip.AddrPortFrom(f.Frontend.Addr, f.Frontend.Port)),
		sent:  tupleOf(p, f.Masquerade, f.Endpoint)}
}

// commit is a transaction of nf_tables: it happened after since, and at the latest at at.
type commit struct {
	since, at  int64
	generation uint32
}

// space is a network namespace with what was recorded in it.
type space struct {
	name    string
	packets *ring[packet]
	flows   *ring[flow]
	changes *ring[change]
	counts  *ring[count]
	commits *ring[commit]

	mu sync.Mutex
	// network is what it has just now, or had last.
	network *network
	// began is when packets were recorded first; zero if none are. gone is when it was closed; zero while it is there.
	began, gone time.Time
	// attached is what watches it now, or did last; nil if nothing has.
	attached *attachment
}

func newSpace(name string, of sizes) *space {
	return &space{name: name, network: &network{}, packets: newRing[packet](of.packets), flows: newRing[flow](of.flows),
		changes: newRing[change](of.changes), commits: newRing[commit](of.commits), counts: newRing[count](of.counts)}
}

// link names a link.
func (s *space) link(index int32) string {
	s.mu.Lock()
	defer s.mu.Unlock()
	if name := s.network.links[index]; name != "" {
		return name
	}
	return fmt.Sprintf("link %d", index)
}

// owns says whether an address is one of the namespace's.
func (s *space) owns(a netip.Addr) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	_, own := s.network.addresses[a]
	return own
}

// translation returns how connection tracking translates a direction now; false if it has no entry of it, or nothing
// watches the namespace any more.
func (s *space) translation(t tuple) (sent tuple, ok bool) {
	s.mu.Lock()
	a := s.attached
	s.mu.Unlock()
	if a == nil {
		return sent, false
	}
	a.looking.Lock()
	defer a.looking.Unlock()
	select {
	case <-a.done:
		return sent, false
	default:
	}
	f, ok, err := a.table.Find(snapshot.Protocol(t.protocol), t.from.to(), t.to.to())
	return flowOf(&f, 0).sent, ok && err == nil
}

// attachment is what watches a namespace. It keeps it alive until it is closed.
type attachment struct {
	space    *space
	capture  *capture
	events   *conntrack.Events
	table    *conntrack.Conn
	routes   *netlink.Listener
	rules    *netlink.Conn
	counters *counters
	opened   []io.Closer
	done     chan struct{}
	once     sync.Once
	// looking is held while the table is asked.
	looking sync.Mutex
	wait    sync.WaitGroup
}

// attach watches the namespace of the calling thread.
func (s *space) attach() (*attachment, error) {
	a := &attachment{space: s, done: make(chan struct{})}
	if err := a.open(); err != nil {
		a.closeAll()
		return nil, fmt.Errorf("record %s: %w", s.name, err)
	}
	s.mu.Lock()
	s.attached = a
	if s.began.IsZero() {
		s.began = time.Now()
	}
	s.mu.Unlock()
	for _, run := range []func(){a.readPackets, a.readFlows, a.readChanges, a.poll} {
		a.wait.Go(run)
	}
	return a, nil
}

// open opens all that is read.
func (a *attachment) open() (err error) {
	routes, n, err := listenRoutes()
	if a.routes, err = opened(a, routes, err); err != nil {
		return err
	}
	a.space.mu.Lock()
	a.space.network, a.space.gone = n, time.Time{}
	a.space.mu.Unlock()
	events, err := conntrack.Listen(0)
	if a.events, err = opened(a, events, err); err != nil {
		return err
	}
	if err := errors.Join(a.events.All(), a.events.Beginnings(true)); err != nil {
		return err
	}
	table, err := conntrack.Dial(0)
	if a.table, err = opened(a, table, err); err != nil {
		return err
	}
	rules, err := netlink.Dial(unix.NETLINK_NETFILTER, 0)
	if a.rules, err = opened(a, rules, err); err != nil {
		return err
	}
	counters, err := openCounters("/proc/thread-self/net")
	if a.counters, err = opened(a, counters, err); err != nil {
		return err
	}
	capture, err := openCapture()
	a.capture, err = opened(a, capture, err)
	return err
}

// opened has something closed with the attachment.
func opened[C io.Closer](a *attachment, c C, err error) (C, error) {
	if err == nil {
		a.opened = append(a.opened, c)
	}
	return c, err
}

func (a *attachment) closeAll() {
	for _, c := range a.opened {
		c.Close()
	}
}

// Close lets go of the namespace. What was recorded stays.
func (a *attachment) Close() error {
	a.once.Do(func() {
		close(a.done)
		a.looking.Lock()
		a.closeAll()
		a.looking.Unlock()
		a.wait.Wait()
		a.space.mu.Lock()
		defer a.space.mu.Unlock()
		a.space.gone = time.Now()
	})
	return nil
}

func (a *attachment) readPackets() {
	a.capture.run(a.space.packets.add, func(n uint64) {
		now := time.Now()
		a.space.counts.add(&count{now.Add(-2 * captureWindow).UnixNano(), now.UnixNano(), packetsLost, n})
	})
}

func (a *attachment) readFlows() {
	var window time.Time
	var read int
	var lost uint64
	for {
		err := a.events.Receive(time.Now().Add(captureWindow), func(f *conntrack.Flow, ended bool) {
			now := time.Now()
			if now.Sub(window) >= captureWindow {
				window, read = now, 0
			}
			seen := flowOf(f, now.UnixNano())
			seen.ended = ended
			a.space.flows.add(&seen)
			if read++; read >= eventPace {
				time.Sleep(time.Until(window.Add(captureWindow)))
			}
		})
		if n := a.events.Lost(); n > lost {
			now := time.Now()
			a.space.counts.add(&count{now.Add(-2 * captureWindow).UnixNano(), now.UnixNano(), eventsLost, n - lost})
			lost = n
		}
		if err != nil && !errors.Is(err, os.ErrDeadlineExceeded) {
			return
		}
	}
}

func (a *attachment) readChanges() {
	s := a.space
	for {
		err := a.routes.Receive(time.Now().Add(time.Second), func(m netlink.Message) {
			now := time.Now().UnixNano()
			s.mu.Lock()
			defer s.mu.Unlock()
			s.network.apply(m, func(c *change) {
				c.at = now
				s.changes.add(c)
			})
		})
		if err != nil && !errors.Is(err, os.ErrDeadlineExceeded) {
			return
		}
	}
}

// poll reads counters, and the number of nf_tables' last transaction.
func (a *attachment) poll() {
	timer := time.NewTimer(0)
	defer timer.Stop()
	var last uint32
	var lastRead, counted time.Time
	changes := false
	for {
		select {
		case <-a.done:
			return
		case <-timer.C:
		}
		now := time.Now()
		generation, err := a.rules.Generation()
		if err == nil && generation != last {
			if changes = last != 0; changes {
				a.space.commits.add(&commit{lastRead.UnixNano(), time.Now().UnixNano(), generation})
			}
			last = generation
		}
		lastRead = now
		if now.Sub(counted) >= pollIdle {
			counted = now
			a.counters.sample(now.UnixNano(), a.space.counts.add)
		}
		if changes {
			timer.Reset(pollCommits)
		} else {
			timer.Reset(pollIdle)
		}
	}
}
