package keeper

import (
	"context"
	"errors"
	"net"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/verdict-proxy/verdict/internal/system/clock"
)

// holder is the lease while this process holds it, or runs without it. One goroutine per claimant reads its request;
// run handles the requests.
type holder struct {
	lease *Lease
	// listener is nil while another process holds the name. Then it arrives by acquired, or another proxy holds the lease:
	// heldElsewhere.
	listener      *net.UnixListener
	acquired      chan *net.UnixListener
	heldElsewhere chan struct{}
	// ctx ends when the lease is released. goroutines counts what ends with it.
	ctx         context.Context
	cancel      context.CancelFunc
	goroutines  sync.WaitGroup
	requests    chan *claimant
	disconnects chan *claimant

	// claimants ask for the lease, in the order in which they came; standbys wait for the holder to go.
	claimants, standbys []*claimant
	// socket owns the tables and was brought by a standby. It is nil if there is none.
	socket *os.File
	// evicting says that this is an eviction: claimants wait for its end, and nobody may stand by.
	evicting bool
	// vacant says that no proxy runs here for now: a standby gets the lease at once.
	vacant bool
}

// claimant is an authenticated connection to the lease, and its request.
type claimant struct {
	conn    *net.UnixConn
	peer    Peer
	request string
	socket  *os.File
}

const (
	// maxClaimants bounds the connections of claimants, and maxStandbys those of them that stand by.
	maxClaimants = 64
	maxStandbys  = 32
)

// requestTimeout is how long a claimant may take to send its request. Unauthenticated connections are closed at once.
const requestTimeout = 5 * time.Second

func (s *Lease) newHolder() *holder {
	h := &holder{lease: s, requests: make(chan *claimant), disconnects: make(chan *claimant)}
	h.acquired, h.heldElsewhere = make(chan *net.UnixListener), make(chan struct{})
	h.ctx, h.cancel = context.WithCancel(context.Background())
	return h
}

// hold starts serving the lease on a listener.
func (s *Lease) hold(l *net.UnixListener) *holder {
	h := s.newHolder()
	h.listen(l)
	return h
}

// listen starts accepting connections.
func (h *holder) listen(l *net.UnixListener) {
	h.listener = l
	// SO_PEERCRED names the process that called listen last. A short queue keeps waiting short.
	_ = withDescriptors(filesOf(l), nil, func(fds []int) error { return unix.Listen(fds[0], unix.SOMAXCONN) })
	h.lease.keep(l)
	a, err := newAuthenticator()
	reserve := newReserve(reservedDescriptors)
	h.goroutines.Go(func() {
		defer reserve.release()
		if err != nil {
			h.lease.Log.Error("failed to open a netlink socket: no proxy can take over for now; retrying", "err", err)
		}
		for err != nil && h.ctx.Err() == nil {
			clock.Pause(h.ctx, authenticatorRetry)
			a, err = newAuthenticator()
		}
		if err == nil {
			defer a.close()
			h.accept(a, reserve)
		}
	})
}

// authenticatorRetry is how long to wait when no netlink socket can be opened.
const authenticatorRetry = time.Second

// close releases the lease, unless it was handed over, and closes all connections.
func (h *holder) close() {
	h.cancel()
	if h.listener != nil {
		h.listener.Close()
	}
	h.goroutines.Wait()
	closeFile(h.socket)
}

// accept accepts connections until the lease is closed. It reads nothing from a connection without a ticket and keeps
// no state for it: it sends the port of the authenticator and closes the connection.
func (h *holder) accept(a *authenticator, reserve *descriptorReserve) {
	slots := make(chan struct{}, maxClaimants)
	answer, prefix := wordPort+strconv.FormatUint(uint64(a.port), 10), "@"+h.lease.Name+"-"
	rejected, throttle := rejections{}, rejectThrottle{}
	for {
		conn, err := h.listener.AcceptUnix()
		if err != nil {
			if h.ctx.Err() != nil || errors.Is(err, net.ErrClosed) {
				return
			}
			if !reserve.release() {
				clock.Pause(h.ctx, 100*time.Millisecond)
			}
			continue
		}
		reserve.refill()
		if name := remoteName(conn); strings.HasPrefix(name, prefix) {
			if t, ok := a.redeem(name[1:]); ok && h.confirmAndServe(a, conn, t, slots) {
				continue
			}
		}
		_ = send(conn, answer)
		if n := rejected.add(time.Now()); n > 0 {
			peer, _ := peerOf(conn)
			h.lease.Log.Warn("rejected connections that did not prove CAP_NET_ADMIN",
				"connections", n, "last", peer, "uid", peer.UID)
		}
		conn.Close()
		clock.Pause(h.ctx, throttle.delay(time.Now()))
	}
}

// remoteName returns the name that the other end is bound to.
func remoteName(conn *net.UnixConn) string {
	if a, ok := conn.RemoteAddr().(*net.UnixAddr); ok && a != nil {
		return a.Name
	}
	return ""
}

// confirmAndServe serves the owner of a ticket, if there is a slot.
func (h *holder) confirmAndServe(a *authenticator, conn *net.UnixConn, t ticket, slots chan struct{}) bool {
	select {
	case slots <- struct{}{}:
	default:
		return false
	}
	if err := a.confirm(t); err != nil {
		<-slots
		return false
	}
	h.goroutines.Go(func() {
		defer func() { <-slots }()
		h.serve(conn, t)
	})
	return true
}

// serve reads a claimant's request, passes it on, and returns when the claimant leaves or the lease is closed.
func (h *holder) serve(conn *net.UnixConn, t ticket) {
	defer conn.Close()
	defer context.AfterFunc(h.ctx, func() { conn.Close() })()
	c, ok := readRequest(conn, t)
	if !ok {
		return
	}
	select {
	case h.requests <- c:
	case <-h.ctx.Done():
		closeFile(c.socket)
		return
	}
	for err := error(nil); err == nil; {
		var files []*os.File
		_, files, err = receive(conn)
		closeFiles(files)
	}
	select {
	case h.disconnects <- c:
	case <-h.ctx.Done():
	}
}

// readRequest reads the one request of a claimant, and refuses what it may not ask.
func readRequest(conn *net.UnixConn, t ticket) (*claimant, bool) {
	peer, err := peerOf(conn)
	if err != nil {
		return nil, false
	}
	_ = conn.SetReadDeadline(time.Now().Add(requestTimeout))
	text, files, err := receive(conn)
	if err != nil {
		return nil, false // such as Holder, which only asks who is here
	}
	secret, text, _ := strings.Cut(text, " ")
	c := &claimant{conn: conn, peer: peer, request: text}
	switch {
	case secret != t.secret: // the name belongs to another process by now
		closeFiles(files)
		return nil, false
	case text == requestWait && len(files) == 1:
		c.socket = files[0]
	case len(files) > 0 || text != requestHandOver && text != requestEvict && text != requestWait:
		closeFiles(files)
		_ = send(conn, answerRefuse+"unknown request")
		return nil, false
	}
	_ = conn.SetReadDeadline(time.Time{})
	return c, true
}

// run calls the proxy, again if need be, until it ends by itself or the lease is handed over. Then it closes the lease.
// It returns the proxy's result, ErrHandedOver or ErrEvicted.
func (h *holder) run(ctx context.Context, proxy func(context.Context, *os.File) error) error {
	defer h.close()
	for {
		cause, err := h.runOnce(ctx, proxy)
		if cause != nil && err != nil && !errors.Is(err, context.Canceled) && !errors.Is(err, cause) {
			h.lease.Log.Warn("the proxy failed to stop cleanly for a handover", "err", err)
		}
		if errors.Is(cause, errHeldElsewhere) {
			return ErrHandedOver
		}
		if result := h.handOver(); result != nil {
			return result
		}
		if cause == nil || ctx.Err() != nil {
			return err
		}
		if h.socket != nil {
			h.lease.Log.Warn("a standby has the socket that owns the tables: restarting the proxy with it")
			h.lease.replaceSocket(h.socket)
			h.socket = nil
			continue
		}
		h.lease.Log.Warn("the proxy that was taking over has gone: restarting this proxy")
	}
}

// runOnce calls the proxy once, and returns the cause of its cancellation, nil if it ended by itself. A proxy that does
// not end within the grace period is reported to OnStuck.
func (h *holder) runOnce(ctx context.Context, proxy func(context.Context, *os.File) error) (cause, err error) {
	ended := ctx.Done()
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	done := make(chan error, 1)
	go func() { done <- proxy(ctx, h.lease.Socket) }()
	var overdue <-chan time.Time
	stop := func(reason error) {
		if reason != nil && cause == nil {
			cause, overdue = reason, h.lease.graceTimer()
			cancel(reason)
		}
	}
	for {
		select {
		case err := <-done:
			return cause, err
		case <-ended:
			ended, overdue = nil, h.lease.graceTimer()
		case <-overdue:
			h.lease.OnStuck("the proxy was told to stop and did not")
		case l := <-h.acquired:
			h.listen(l)
			h.lease.reportHeld(true)
		case <-h.heldElsewhere:
			stop(errHeldElsewhere)
		case c := <-h.requests:
			stop(h.handleRequest(c))
		case c := <-h.disconnects:
			same := func(other *claimant) bool { return other == c }
			h.claimants, h.standbys = slices.DeleteFunc(h.claimants, same), slices.DeleteFunc(h.standbys, same)
			h.lease.reportStandbys(len(h.standbys))
		}
	}
}

// handleRequest records a request. It returns why the proxy must end for it, nil if it need not.
func (h *holder) handleRequest(c *claimant) (reason error) {
	switch {
	case c.request == requestWait && h.evicting:
		closeFile(c.socket)
		_ = send(c.conn, answerEnd)
	case c.request == requestWait && h.vacant:
		closeFile(c.socket)
		h.claimants = append(h.claimants, c)
		return ErrHandedOver
	case c.request == requestWait && len(h.standbys) == maxStandbys:
		closeFile(c.socket)
		_ = send(c.conn, answerRefuse+"too many stand by")
	case c.request == requestWait:
		h.standbys = append(h.standbys, c)
		h.lease.reportStandbys(len(h.standbys))
		h.lease.Log.Info("another proxy stands by", "peer", c.peer)
		if h.socket == nil && h.lease.ownsTables(c.socket) && !h.lease.ownsTables(h.lease.Socket) {
			h.socket = c.socket
			return errSocketReplaced
		}
		closeFile(c.socket)
	default:
		h.claimants = append(h.claimants, c)
		switch {
		case h.evicting:
		case c.request == requestEvict:
			h.lease.Log.Info("evicted: stopping", "by", c.peer)
			return ErrEvicted
		default:
			h.lease.Log.Info("another proxy takes over", "by", c.peer)
			return ErrHandedOver
		}
	}
	return nil
}

// handOver sends the lease to the first claimant that is still connected, and returns for which request. The others
// find it at its new holder.
func (h *holder) handOver() error {
	if h.evicting || len(h.claimants) == 0 {
		return nil
	}
	// The keeper releases the lease first: there must not be two that listen.
	h.lease.keep(nil)
	for _, c := range h.claimants {
		files := []syscall.Conn{h.listener}
		if h.lease.Socket != nil {
			files = append(files, h.lease.Socket)
		}
		if err := send(c.conn, answerTake, files...); err != nil {
			continue
		}
		if c.request != requestEvict {
			return ErrHandedOver
		}
		for _, w := range h.standbys {
			_ = send(w.conn, answerEnd)
		}
		return ErrEvicted
	}
	h.claimants = nil
	h.lease.keep(h.listener)
	return nil
}

// pollInterval is how often a proxy that runs without the lease tries to acquire it.
const pollInterval = time.Second

// withoutLease returns a holder whose name another program has. It only waits until the name is free.
func (s *Lease) withoutLease() *holder {
	h := s.newHolder()
	h.goroutines.Go(h.pollName)
	return h
}

// pollName waits until the name is free, or another proxy holds it.
func (h *holder) pollName() {
	for h.ctx.Err() == nil {
		l, err := net.ListenUnix("unixpacket", leaseAddress(h.lease.Name))
		if err == nil {
			select {
			case h.acquired <- l:
				h.lease.Log.Info("acquired the lease")
			case <-h.ctx.Done():
				l.Close()
			}
			return
		}
		if m, _, err := authenticate(h.ctx, h.lease.Name, time.Now().Add(pollInterval)); err == nil {
			m.Close()
			select {
			case h.heldElsewhere <- struct{}{}:
			case <-h.ctx.Done():
			}
			return
		}
		clock.Pause(h.ctx, pollInterval)
	}
}

// rejections counts rejected connections, so that they are logged in bulk.
type rejections struct {
	count    int
	since    time.Time
	reported bool
}

const (
	// reportInterval is the shortest time between two reports.
	reportInterval = time.Minute
	// minReported is the smallest number worth reporting: claimants, too, ask for the port first.
	minReported = 32
)

// add counts one rejection, and returns the number to report now, 0 if none is due.
func (t *rejections) add(now time.Time) int {
	if now.Sub(t.since) >= reportInterval {
		n := t.count
		*t = rejections{count: 1, since: now}
		if n >= minReported {
			t.reported = true
			return n
		}
		return 0
	}
	if t.count++; t.count == minReported && !t.reported {
		t.reported = true
		return t.count
	}
	return 0
}

// rejectThrottle bounds the cost of rejecting many connections: maxRejects in rejectInterval, about a seventh of a
// processor.
type rejectThrottle struct {
	since time.Time
	count int
}

const (
	maxRejects     = 100
	rejectInterval = 10 * time.Millisecond
)

// delay counts one rejection, and returns how long to sleep after it.
func (p *rejectThrottle) delay(now time.Time) time.Duration {
	if now.Sub(p.since) >= rejectInterval {
		*p = rejectThrottle{since: now}
	}
	if p.count++; p.count < maxRejects {
		return 0
	}
	return rejectInterval - now.Sub(p.since)
}

// reservedDescriptors is how many descriptors are held back for claimants.
const reservedDescriptors = 8

// descriptorReserve holds descriptors for the time when the process has none left.
type descriptorReserve struct {
	size int
	fds  []int
}

func newReserve(size int) *descriptorReserve {
	r := &descriptorReserve{size: size}
	r.refill()
	return r
}

// refill opens what is missing, as far as descriptors are available.
func (r *descriptorReserve) refill() {
	for len(r.fds) < r.size {
		fd, err := unix.Open("/dev/null", unix.O_RDONLY|unix.O_CLOEXEC, 0)
		if err != nil {
			return
		}
		r.fds = append(r.fds, fd)
	}
}

// release closes all of them, and says whether there were any.
func (r *descriptorReserve) release() bool {
	for _, fd := range r.fds {
		unix.Close(fd)
	}
	any := len(r.fds) > 0
	r.fds = r.fds[:0]
	return any
}

func closeFile(f *os.File) {
	if f != nil {
		f.Close()
	}
}
