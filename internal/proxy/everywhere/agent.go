package everywhere

import (
	"context"
	"crypto/sha256"
	"crypto/subtle"
	"crypto/tls"
	"encoding/hex"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"net"
	"net/netip"
	"slices"
	"sync"
	"time"

	"github.com/verdict-proxy/verdict/internal/proxy/status"
	"github.com/verdict-proxy/verdict/internal/system/wake"
	"github.com/verdict-proxy/verdict/sync/reconcile"
	"github.com/verdict-proxy/verdict/sync/snapshot"
)

// Options say what an Agent works with. Functions are safe for concurrent use.
type Options struct {
	// Node is this node's name.
	Node string
	// Leader returns the annotations of the collector's Lease.
	Leader func(context.Context) (map[string]string, error)
	// Token returns a token for Audience that says which node this is.
	Token func() (string, error)
	// Holds reports which goals the node has reached, as status.Tracker does.
	Holds func([]status.Goal) []bool
	// Dial connects to an address; nil means net.Dialer with KeepAlive.
	Dial func(ctx context.Context, network, address string) (net.Conn, error)
	Log  *slog.Logger
}

// Agent holds a node's connection to the collector, answers its questions, and passes on those of this node. Make one
// with New. Its methods are safe for concurrent use.
type Agent struct {
	o Options
	// room bounds the requests that wait.
	room *Room
	// check tells the answering goroutine to look whether goals are reached, and wake ends a pause between two attempts
	// to connect.
	check, wake chan struct{}

	mu sync.Mutex
	// session is the connection; nil while there is none. Then failure says why.
	session *session
	failure string
	// lost is when the last connection ended.
	lost time.Time
	// waits are the requests that wait for a Result, by their IDs.
	waits  map[uint64]*waiting
	lastID uint64
	// local are the endpoints of Services on this node: their pods may ask.
	local map[snapshot.Name][]netip.Addr
	// ofPod counts the requests of pods that wait.
	ofPod map[netip.Addr]int
	stats Stats
}

// Stats counts what an Agent does.
type Stats struct {
	// Connected says whether there is a connection, and Waiting is how many requests wait.
	Connected bool
	Waiting   int
	// Answers counts answered requests by their Outcome.
	Answers map[string]uint64
}

// waiting is a request that waits.
type waiting struct {
	wait   Wait
	until  time.Time
	result chan Answer // holds one
}

// finish ends the wait, unless it has ended.
func (w *waiting) finish(a Answer) {
	select {
	case w.result <- a:
	default:
	}
}

// session is a connection that the collector has accepted.
type session struct {
	stream *Stream
	// silence is how long the collector may send nothing; 0 means for ever.
	silence time.Duration
	mu      sync.Mutex
	asked   map[uint64]status.Goal
}

const (
	// sendPatience is how long the other side may take to read.
	sendPatience = 5 * time.Second
	// helloTimeout bounds dialling and the answer to a Hello, for which the collector asks the API server.
	helloTimeout = 15 * time.Second
	// spread is the time over which all nodes connect again that have lost a collector. Attempts that fail are repeated
	// after up to twice as long each time, up to longestPause, so that a collector that is not there costs little. With
	// somebody waiting, the next attempt is made within hurry.
	spread       = 3 * time.Second
	longestPause = 2 * time.Minute
	hurry        = 500 * time.Millisecond
	// recheck is how often goals are looked at that no transaction reaches: a bookmark or the end of a quarantine may.
	recheck = time.Second
)

// New returns an Agent. Run connects it.
func New(o Options) *Agent {
	if o.Dial == nil {
		o.Dial = (&net.Dialer{KeepAliveConfig: KeepAlive}).DialContext
	}
	return &Agent{o: o, room: NewRoom(maxWaiting), check: make(chan struct{}, 1), wake: make(chan struct{}, 1),
		failure: "the node has not connected yet", waits: map[uint64]*waiting{},
		local: map[snapshot.Name][]netip.Addr{}, ofPod: map[netip.Addr]int{},
		stats: Stats{Answers: map[string]uint64{}}}
}

// Listener connects the Agent to a loop.
func (a *Agent) Listener() reconcile.Listener { return reconcile.Listener{InSync: a.inSync} }

// inSync learns which pods of this node may ask, and has the goals looked at.
func (a *Agent) inSync(s reconcile.InSync) {
	wake.Up(a.check)
	a.mu.Lock()
	defer a.mu.Unlock()
	for _, n := range s.Change.Services {
		var own []netip.Addr
		for _, sl := range s.Snapshot.Slices[n] {
			for i := range sl.Endpoints {
				if e := &sl.Endpoints[i]; e.Node == a.o.Node && !slices.Contains(own, e.Addr) {
					own = append(own, e.Addr)
				}
			}
		}
		if delete(a.local, n); own != nil {
			a.local[n] = own
		}
	}
}

// Run holds a connection until ctx is done.
func (a *Agent) Run(ctx context.Context) {
	told := ""
	for pause := spread; ; {
		begin := time.Now()
		err := a.connect(ctx)
		if ctx.Err() != nil {
			return
		}
		switch {
		case err == nil: // the token gets old: the next connection has another one
			pause = spread
			continue
		case errors.Is(err, errLost):
			pause = spread
		}
		if time.Since(begin) > time.Minute {
			told = ""
		}
		if text := err.Error(); text != told {
			told = text
			a.o.Log.Info("no connection to the collector; retrying", "err", err)
		}
		a.fail(err)
		a.rest(ctx, rand.N(pause))
		pause = min(2*pause, longestPause)
	}
}

// rest pauses, but for no longer than hurry if somebody waits.
func (a *Agent) rest(ctx context.Context, pause time.Duration) {
	end := time.Now().Add(pause)
	for {
		a.mu.Lock()
		waits := len(a.waits) > 0
		a.mu.Unlock()
		left := time.Until(end)
		if waits {
			left = min(left, rand.N(hurry))
		}
		select {
		case <-ctx.Done():
			return
		case <-time.After(left):
			return
		case <-a.wake:
		}
	}
}

// fail notes why there is no connection.
func (a *Agent) fail(err error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.failure = fmt.Sprintf("%.300s", err.Error())
}

// errLost says that a connection was accepted, and ended.
var errLost = errors.New("the connection to the collector ended")

// connect connects to the leader and serves the connection until it ends. It returns nil if that was because the token
// gets old.
func (a *Agent) connect(ctx context.Context) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	s, valid, err := a.greet(ctx)
	if err != nil {
		return err
	}
	defer s.stream.Close()
	stop := context.AfterFunc(ctx, s.stream.Close)
	defer stop()
	// Renewed between 80 and 90 percent of its life: not all nodes at once, and after the kubelet has written a new one.
	life := valid*8/10 + rand.N(valid/10+1)
	renew := time.Now().Add(life)
	aged := time.AfterFunc(life, s.stream.Close)
	defer aged.Stop()
	a.open(s)
	defer a.close(s)
	var answering sync.WaitGroup
	defer answering.Wait()
	answering.Go(func() { a.answer(ctx, s) })
	err = a.read(s)
	cancel()
	if time.Now().After(renew) {
		return nil
	}
	return fmt.Errorf("%w: %w", errLost, err)
}

// greet dials the leader and shows the token.
func (a *Agent) greet(ctx context.Context) (*session, time.Duration, error) {
	ctx, cancel := context.WithTimeout(ctx, helloTimeout)
	defer cancel()
	leader, err := a.o.Leader(ctx)
	if err != nil {
		return nil, 0, err
	}
	if leader[AddressAnnotation] == "" {
		return nil, 0, errors.New("there is no collector: its Lease names no address")
	}
	token, err := a.o.Token()
	if err != nil {
		return nil, 0, err
	}
	raw, err := a.o.Dial(ctx, "tcp", leader[AddressAnnotation])
	if err != nil {
		return nil, 0, fmt.Errorf("collector: %w", err)
	}
	conn := tls.Client(raw, clientConfig(leader[FingerprintAnnotation]))
	stop := context.AfterFunc(ctx, func() { raw.Close() })
	defer stop()
	if err := conn.HandshakeContext(ctx); err != nil {
		raw.Close()
		return nil, 0, fmt.Errorf("collector at %s: %w", leader[AddressAnnotation], err)
	}
	s := &session{stream: NewStream(conn), asked: map[uint64]status.Goal{}}
	err = s.stream.Send(FromNode{Hello: &Hello{status.Schema, token}}, sendPatience)
	var first FromCollector
	if err == nil {
		err = s.stream.Receive(&first, time.Now().Add(helloTimeout))
	}
	switch {
	case err == nil && first.Refused != "":
		err = errors.New(first.Refused)
	case err == nil && (first.Welcome == nil || first.Welcome.Seconds <= 0):
		err = errors.New("it does not answer as a collector does")
	}
	if err != nil {
		conn.Close()
		return nil, 0, fmt.Errorf("collector at %s: %w", leader[AddressAnnotation], err)
	}
	s.silence = time.Duration(min(max(first.Welcome.Beat, 0), maxBeat)) * time.Millisecond * 5 / 2
	return s, time.Duration(min(first.Welcome.Seconds, maxTokenSeconds)) * time.Second, nil
}

// maxTokenSeconds bounds how long a connection lasts, whatever the token says, and maxBeat the milliseconds between
// heartbeats.
const maxTokenSeconds, maxBeat = 7 * 24 * 3600, 3600_000

// clientConfig trusts only the certificate with a fingerprint, which only the collector could write to its Lease. Names
// and dates of that certificate mean nothing.
func clientConfig(fingerprint string) *tls.Config {
	return &tls.Config{
		MinVersion:         tls.VersionTLS13,
		InsecureSkipVerify: true, // VerifyConnection verifies
		VerifyConnection: func(state tls.ConnectionState) error {
			sum := sha256.Sum256(state.PeerCertificates[0].Raw)
			if subtle.ConstantTimeCompare([]byte(hex.EncodeToString(sum[:])), []byte(fingerprint)) != 1 {
				return errors.New("its certificate is not the one that the Lease names")
			}
			return nil
		},
	}
}

// open makes a session the current one, and sends it the requests that wait.
func (a *Agent) open(s *session) {
	a.mu.Lock()
	a.session = s
	var again []Wait
	for _, w := range a.waits {
		w.wait.Milliseconds = max(1, time.Until(w.until).Milliseconds())
		again = append(again, w.wait)
	}
	a.mu.Unlock()
	for _, w := range again {
		_ = s.stream.Send(FromNode{Wait: &w}, sendPatience) // a failure ends the session
	}
}

func (a *Agent) close(s *session) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.session == s {
		a.session, a.lost = nil, time.Now()
	}
}

// read takes what the collector sends, until the connection ends.
func (a *Agent) read(s *session) error {
	for {
		var m FromCollector
		var until time.Time
		if s.silence > 0 {
			until = time.Now().Add(s.silence)
		}
		if err := s.stream.Receive(&m, until); err != nil {
			return err
		}
		switch {
		case m.Ask != nil:
			g, err := m.Ask.goal()
			if err != nil {
				return err
			}
			s.mu.Lock()
			s.asked[m.Ask.ID] = g
			full := len(s.asked) > MaxAsked
			s.mu.Unlock()
			if full {
				return errors.New("it asks too much")
			}
			wake.Up(a.check)
		case m.Drop != 0:
			s.mu.Lock()
			delete(s.asked, m.Drop)
			s.mu.Unlock()
		case m.Result != nil:
			a.finish(m.Result.ID, m.Result.Answer)
		case m.Refused != "":
			return errors.New(m.Refused)
		}
	}
}

// finish hands an answer to the request that waits for it.
func (a *Agent) finish(id uint64, answer Answer) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if w := a.waits[id]; w != nil {
		delete(a.waits, id)
		w.finish(answer)
	}
}

// answer tells the collector of goals that are reached, until the context ends.
func (a *Agent) answer(ctx context.Context, s *session) {
	for {
		var again <-chan time.Time
		if a.answerOnce(s) {
			again = time.After(recheck)
		}
		select {
		case <-ctx.Done():
			return
		case <-a.check:
		case <-again:
		}
	}
}

// answerOnce tells the collector of the goals that are reached, and reports whether there are others.
func (a *Agent) answerOnce(s *session) (more bool) {
	s.mu.Lock()
	ids, goals := make([]uint64, 0, len(s.asked)), make([]status.Goal, 0, len(s.asked))
	for id, g := range s.asked {
		ids, goals = append(ids, id), append(goals, g)
	}
	s.mu.Unlock()
	if len(ids) == 0 {
		return false
	}
	var reached []uint64
	for i, is := range a.o.Holds(goals) {
		if is {
			reached = append(reached, ids[i])
		}
	}
	s.mu.Lock()
	for _, id := range reached {
		delete(s.asked, id)
	}
	s.mu.Unlock()
	const most = 512 // of a line
	for part := range slices.Chunk(reached, most) {
		if s.stream.Send(FromNode{Have: part}, sendPatience) != nil {
			return false // the session ends
		}
	}
	return len(reached) < len(ids)
}

// Stats returns what was counted so far.
func (a *Agent) Stats() Stats {
	a.mu.Lock()
	defer a.mu.Unlock()
	s := Stats{Connected: a.session != nil, Waiting: len(a.waits), Answers: map[string]uint64{}}
	for _, o := range Outcomes {
		s.Answers[o] = a.stats.Answers[o]
	}
	return s
}
