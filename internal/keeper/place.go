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
)

// place is the name while this process holds it, or works without it. Callers are heard in goroutines of their own,
// and judged in that of occupy.
type place struct {
	seat *Seat
	// listener is nil while somebody else has the name; then it comes by found, or another proxy has it: moved.
	listener *net.UnixListener
	found    chan *net.UnixListener
	moved    chan struct{}
	// until ends when the place is given up; work counts what ends with it.
	until context.Context
	stop  context.CancelFunc
	work  sync.WaitGroup
	asked chan *caller
	left  chan *caller

	// askers want the place, in the order they came; waiters stand by.
	askers, waiters []*caller
	// socket is the one that owns the tables, which somebody who stands by brought.
	socket *os.File
	// closed says that this is an eviction: askers wait for its end, and nobody may stand by.
	closed bool
	// offered says that nobody works here for now: who would stand by gets the place.
	offered bool
}

// caller is a connection to the place of somebody who has shown that he may have it, and what he wants.
type caller struct {
	conn    *net.UnixConn
	peer    Peer
	request string
	socket  *os.File
}

const (
	// mostCallers bounds the connections of callers, and mostWaiters those of them that stand by.
	mostCallers = 64
	mostWaiters = 32
)

// patienceForRequest is how long a caller may stay without a word. Whoever is no caller is not waited for at all.
const patienceForRequest = 5 * time.Second

func (s *Seat) newPlace() *place {
	p := &place{seat: s, asked: make(chan *caller), left: make(chan *caller)}
	p.found, p.moved = make(chan *net.UnixListener), make(chan struct{})
	p.until, p.stop = context.WithCancel(context.Background())
	return p
}

// take takes the place that a listener stands for.
func (s *Seat) take(l *net.UnixListener) *place {
	p := s.newPlace()
	p.open(l)
	return p
}

// open begins to listen.
func (p *place) open(l *net.UnixListener) {
	p.listener = l
	// Who connects is told of the process that called listen last. A short queue is a short time to wait for.
	_ = withDescriptors(filesOf(l), nil, func(fds []int) error { return unix.Listen(fds[0], unix.SOMAXCONN) })
	p.seat.keepPlace(l)
	d, err := openDoor()
	spare := spareDescriptors(spares)
	p.work.Go(func() {
		defer spare.release()
		if err != nil {
			p.seat.Log.Error("nobody can take over for now; it will be tried again", "err", err)
		}
		for err != nil && p.until.Err() == nil {
			pause(p.until, doorAgain)
			d, err = openDoor()
		}
		if err == nil {
			defer d.close()
			p.accept(d, spare)
		}
	})
}

// doorAgain is how long to wait when there is no netlink socket to be had.
const doorAgain = time.Second

// close gives the place up, unless it was handed over, and ends all connections.
func (p *place) close() {
	p.stop()
	if p.listener != nil {
		p.listener.Close()
	}
	p.work.Wait()
	closeFile(p.socket)
}

// accept sees who comes until the place is closed. Nothing is read from somebody who has no ticket, and nothing kept
// of him: he is told where the door is, and his connection is closed.
func (p *place) accept(d *door, spare *reserve) {
	slots := make(chan struct{}, mostCallers)
	answer, ours := greeting+strconv.FormatUint(uint64(d.port), 10), "@"+p.seat.Name+"-"
	strangers, turned := tally{}, pace{}
	for {
		conn, err := p.listener.AcceptUnix()
		if err != nil {
			if p.until.Err() != nil || errors.Is(err, net.ErrClosed) {
				return
			}
			if !spare.release() {
				pause(p.until, 100*time.Millisecond)
			}
			continue
		}
		spare.refill()
		if from := remoteName(conn); strings.HasPrefix(from, ours) {
			if t, ok := d.admit(from[1:]); ok && p.welcome(d, conn, t, slots) {
				continue
			}
		}
		_ = send(conn, answer)
		if n := strangers.add(time.Now()); n > 0 {
			peer, _ := peerOf(conn)
			p.seat.Log.Warn("turned connections away that showed no right to take over",
				"connections", n, "last", peer, "uid", peer.UID)
		}
		conn.Close()
		pause(p.until, turned.rest(time.Now()))
	}
}

// remoteName gives the name that the other end is bound to.
func remoteName(conn *net.UnixConn) string {
	if a, ok := conn.RemoteAddr().(*net.UnixAddr); ok && a != nil {
		return a.Name
	}
	return ""
}

// welcome hears the holder of a ticket, if there is a slot.
func (p *place) welcome(d *door, conn *net.UnixConn, t ticket, slots chan struct{}) bool {
	select {
	case slots <- struct{}{}:
	default:
		return false
	}
	if err := d.vouch(t); err != nil {
		<-slots
		return false
	}
	p.work.Go(func() {
		defer func() { <-slots }()
		p.hear(conn, t)
	})
	return true
}

// hear reads what a caller wants, passes it on, and stays until the caller leaves or the place is closed.
func (p *place) hear(conn *net.UnixConn, t ticket) {
	defer conn.Close()
	defer context.AfterFunc(p.until, func() { conn.Close() })()
	c, ok := request(conn, t)
	if !ok {
		return
	}
	select {
	case p.asked <- c:
	case <-p.until.Done():
		closeFile(c.socket)
		return
	}
	for err := error(nil); err == nil; {
		var files []*os.File
		_, files, err = receive(conn)
		closeFiles(files)
	}
	select {
	case p.left <- c:
	case <-p.until.Done():
	}
}

// request reads the one request of a caller, and refuses what is not to be granted.
func request(conn *net.UnixConn, t ticket) (*caller, bool) {
	peer, err := peerOf(conn)
	if err != nil {
		return nil, false
	}
	_ = conn.SetReadDeadline(time.Now().Add(patienceForRequest))
	text, files, err := receive(conn)
	if err != nil {
		return nil, false // such as one that only wanted to know who is here
	}
	secret, text, _ := strings.Cut(text, " ")
	c := &caller{conn: conn, peer: peer, request: text}
	switch {
	case secret != t.secret: // the name is no longer that of whom the ticket was given to
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

// occupy calls the proxy, again and again if need be, until it ends by itself or the place is handed over. Then the
// place is closed. It returns what the proxy returned, ErrHandedOver or ErrEvicted.
func (p *place) occupy(ctx context.Context, proxy func(context.Context, *os.File) error) error {
	defer p.close()
	for {
		told, err := p.call(ctx, proxy)
		if told != nil && err != nil && !errors.Is(err, context.Canceled) && !errors.Is(err, told) {
			p.seat.Log.Warn("the proxy ended with an error when it had to make room", "err", err)
		}
		if errors.Is(told, errSeated) {
			return ErrHandedOver
		}
		if given := p.handOver(); given != nil {
			return given
		}
		if told == nil || ctx.Err() != nil {
			return err
		}
		if p.socket != nil {
			p.seat.Log.Warn("who stands by has the socket that owns the tables; beginning anew with it")
			p.seat.adopt(p.socket)
			p.socket = nil
			continue
		}
		p.seat.Log.Warn("who wanted to take over has gone; beginning anew")
	}
}

// call calls the proxy once, and says why it was told to end, if it was. If it does not end then, the seat has it
// ended.
func (p *place) call(ctx context.Context, proxy func(context.Context, *os.File) error) (told, err error) {
	ended := ctx.Done()
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	done := make(chan error, 1)
	go func() { done <- proxy(ctx, p.seat.Socket) }()
	var late <-chan time.Time
	tell := func(why error) {
		if why != nil && told == nil {
			told, late = why, p.seat.late()
			cancel(why)
		}
	}
	for {
		select {
		case err := <-done:
			return told, err
		case <-ended:
			ended, late = nil, p.seat.late()
		case <-late:
			p.seat.Stuck("the proxy was told to end and does not")
		case l := <-p.found:
			p.open(l)
			p.seat.holds(true)
		case <-p.moved:
			tell(errSeated)
		case c := <-p.asked:
			tell(p.consider(c))
		case c := <-p.left:
			is := func(other *caller) bool { return other == c }
			p.askers, p.waiters = slices.DeleteFunc(p.askers, is), slices.DeleteFunc(p.waiters, is)
			p.seat.standby(len(p.waiters))
		}
	}
}

// consider takes note of a request and says why the proxy must end for it, if it must.
func (p *place) consider(c *caller) (why error) {
	switch {
	case c.request == requestWait && p.closed:
		closeFile(c.socket)
		_ = send(c.conn, answerEnd)
	case c.request == requestWait && p.offered:
		closeFile(c.socket)
		p.askers = append(p.askers, c)
		return ErrHandedOver
	case c.request == requestWait && len(p.waiters) == mostWaiters:
		closeFile(c.socket)
		_ = send(c.conn, answerRefuse+"too many stand by")
	case c.request == requestWait:
		p.waiters = append(p.waiters, c)
		p.seat.standby(len(p.waiters))
		p.seat.Log.Info("another proxy stands by", "peer", c.peer)
		if p.socket == nil && p.seat.owns(c.socket) && !p.seat.owns(p.seat.Socket) {
			p.socket = c.socket
			return errReplaced
		}
		closeFile(c.socket)
	default:
		p.askers = append(p.askers, c)
		switch {
		case p.closed:
		case c.request == requestEvict:
			p.seat.Log.Info("told to make room and end", "by", c.peer)
			return ErrEvicted
		default:
			p.seat.Log.Info("another proxy takes over", "by", c.peer)
			return ErrHandedOver
		}
	}
	return nil
}

// handOver gives the place to the first asker that is still there, and says for what. The others will find it at its
// new holder.
func (p *place) handOver() error {
	if p.closed || len(p.askers) == 0 {
		return nil
	}
	// The keeper lets go first: there must not be two that listen.
	p.seat.keepPlace(nil)
	for _, c := range p.askers {
		files := []syscall.Conn{p.listener}
		if p.seat.Socket != nil {
			files = append(files, p.seat.Socket)
		}
		if err := send(c.conn, answerTake, files...); err != nil {
			continue
		}
		if c.request != requestEvict {
			return ErrHandedOver
		}
		for _, w := range p.waiters {
			_ = send(w.conn, answerEnd)
		}
		return ErrEvicted
	}
	p.askers = nil
	p.seat.keepPlace(p.listener)
	return nil
}

// lookEvery is how often a proxy that works without the place looks whether it can have it.
const lookEvery = time.Second

// without gives a place whose name somebody else has, who is no proxy: there is no more than that to it until the
// name is free.
func (s *Seat) without() *place {
	p := s.newPlace()
	p.work.Go(p.seek)
	return p
}

// seek waits until the name is free, or another proxy has it.
func (p *place) seek() {
	for p.until.Err() == nil {
		l, err := net.ListenUnix("unixpacket", address(p.seat.Name))
		if err == nil {
			select {
			case p.found <- l:
				p.seat.Log.Info("the place is free at last: this proxy takes it")
			case <-p.until.Done():
				l.Close()
			}
			return
		}
		if m, _, err := meet(p.until, p.seat.Name, time.Now().Add(lookEvery)); err == nil {
			m.Close()
			select {
			case p.moved <- struct{}{}:
			case <-p.until.Done():
			}
			return
		}
		pause(p.until, lookEvery)
	}
}

// tally counts what nobody wants to read of one by one.
type tally struct {
	count int
	since time.Time
	said  bool
}

const (
	// tallyEvery is how often a tally is told at most.
	tallyEvery = time.Minute
	// tallyLeast is what is no news: newcomers ask at the door, too.
	tallyLeast = 32
)

// add counts one, and gives the number to tell if it is time for that, else 0.
func (t *tally) add(now time.Time) int {
	if now.Sub(t.since) >= tallyEvery {
		n := t.count
		*t = tally{count: 1, since: now}
		if n >= tallyLeast {
			t.said = true
			return n
		}
		return 0
	}
	if t.count++; t.count == tallyLeast && !t.said {
		t.said = true
		return t.count
	}
	return 0
}

// pace bounds what it costs to turn many away: so many in paceEvery, which is about a seventh of a processor.
type pace struct {
	since time.Time
	count int
}

const (
	paceMost  = 100
	paceEvery = 10 * time.Millisecond
)

// rest counts one, and gives how long to rest after it.
func (p *pace) rest(now time.Time) time.Duration {
	if now.Sub(p.since) >= paceEvery {
		*p = pace{since: now}
	}
	if p.count++; p.count < paceMost {
		return 0
	}
	return paceEvery - now.Sub(p.since)
}

// spares is how many descriptors are held back for callers.
const spares = 8

// reserve are descriptors that are held for the time when there are none left.
type reserve struct {
	most int
	fds  []int
}

func spareDescriptors(most int) *reserve {
	r := &reserve{most: most}
	r.refill()
	return r
}

// refill takes what is missing, as far as there is any.
func (r *reserve) refill() {
	for len(r.fds) < r.most {
		fd, err := unix.Open("/dev/null", unix.O_RDONLY|unix.O_CLOEXEC, 0)
		if err != nil {
			return
		}
		r.fds = append(r.fds, fd)
	}
}

// release gives all back, and says whether there were any.
func (r *reserve) release() bool {
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
