package keeper

import (
	"context"
	"errors"
	"net"
	"os"
	"slices"
	"sync"
	"syscall"
	"time"
)

// place is the name while this process holds it. Callers are heard in goroutines of their own, and judged in that of occupy.
type place struct {
	seat     *Seat
	listener *net.UnixListener
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
}

// caller is a connection to the place, and what it wants.
type caller struct {
	conn    *net.UnixConn
	peer    Peer
	request string
	socket  *os.File
}

// mostCallers bounds the connections that are open at a time. Anybody on this host may make some.
const mostCallers = 64

// patienceForRequest is how long a connection may stay without a word.
const patienceForRequest = time.Second

// take takes the place that a listener stands for.
func (s *Seat) take(l *net.UnixListener) *place {
	p := &place{seat: s, listener: l, asked: make(chan *caller), left: make(chan *caller)}
	p.until, p.stop = context.WithCancel(context.Background())
	p.work.Go(p.accept)
	return p
}

// close gives the place up, unless it was handed over, and ends all connections.
func (p *place) close() {
	p.stop()
	p.listener.Close()
	p.work.Wait()
	if p.socket != nil {
		p.socket.Close()
	}
}

// accept listens to all callers until the place is closed.
func (p *place) accept() {
	slots := make(chan struct{}, mostCallers)
	for {
		select {
		case slots <- struct{}{}:
		case <-p.until.Done():
			return
		}
		conn, err := p.listener.AcceptUnix()
		if err != nil {
			if p.until.Err() != nil || errors.Is(err, net.ErrClosed) {
				return
			}
			p.seat.Log.Warn("nobody can take over for now", "err", err)
			pause(p.until, time.Second)
			<-slots
			continue
		}
		p.work.Go(func() {
			defer func() { <-slots }()
			p.hear(conn)
		})
	}
}

// hear reads what a caller wants, passes it on, and stays until the caller leaves or the place is closed.
func (p *place) hear(conn *net.UnixConn) {
	defer conn.Close()
	defer context.AfterFunc(p.until, func() { conn.Close() })()
	c, ok := p.request(conn)
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

// request reads the one request of a caller, and refuses what is not to be granted. A stranger's message is read, too, since
// to close a connection with something unread would keep the answer from it; but its descriptors are not taken.
func (p *place) request(conn *net.UnixConn) (*caller, bool) {
	peer, err := peerOf(conn)
	if err != nil {
		return nil, false
	}
	_ = conn.SetReadDeadline(time.Now().Add(patienceForRequest))
	if !peer.trusted() {
		if _, err := conn.Read(make([]byte, maxText)); err == nil {
			p.seat.Log.Warn("refused to talk to a process that is neither root's nor of the same user", "peer", peer, "uid", peer.UID)
			_ = send(conn, answerRefuse+"you are neither root nor the same user")
		}
		return nil, false
	}
	text, files, err := receive(conn)
	if err != nil {
		return nil, false // such as one that only wanted to know who is here
	}
	c := &caller{conn: conn, peer: peer, request: text}
	switch {
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

// occupy calls the proxy, again and again if need be, until it ends by itself or the place is handed over. Then the place is
// closed. It returns what the proxy returned, ErrHandedOver or ErrEvicted.
func (p *place) occupy(ctx context.Context, proxy func(context.Context, *os.File) error) error {
	defer p.close()
	for {
		told, err := p.call(ctx, proxy)
		if told != nil && err != nil && !errors.Is(err, context.Canceled) && !errors.Is(err, told) {
			p.seat.Log.Warn("the proxy ended with an error when it had to make room", "err", err)
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

// call calls the proxy once, and says why it was told to end, if it was.
func (p *place) call(ctx context.Context, proxy func(context.Context, *os.File) error) (told, err error) {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	done := make(chan error, 1)
	go func() { done <- proxy(ctx, p.seat.Socket) }()
	for {
		select {
		case err := <-done:
			return told, err
		case c := <-p.asked:
			if why := p.consider(c); why != nil && told == nil {
				told = why
				cancel(why)
			}
		case c := <-p.left:
			is := func(other *caller) bool { return other == c }
			p.askers, p.waiters = slices.DeleteFunc(p.askers, is), slices.DeleteFunc(p.waiters, is)
		}
	}
}

// consider takes note of a request and says why the proxy must end for it, if it must.
func (p *place) consider(c *caller) (why error) {
	switch {
	case c.request == requestWait && p.closed:
		closeFile(c.socket)
		_ = send(c.conn, answerEnd)
	case c.request == requestWait:
		p.waiters = append(p.waiters, c)
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

// handOver gives the place to the first asker that is still there, and says for what. The others will find it at its new
// holder.
func (p *place) handOver() error {
	if p.closed {
		return nil
	}
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
	return nil
}

func closeFile(f *os.File) {
	if f != nil {
		f.Close()
	}
}
