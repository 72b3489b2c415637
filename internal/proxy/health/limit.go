package health

import (
	"context"
	"errors"
	"net"
	"net/http"
	"slices"
	"sync"
	"sync/atomic"
	"syscall"
	"time"
)

// Limits bound how many file descriptors clients can use (RLIMIT_NOFILE), so that health checks leave enough for the
// metrics, the API server's connection, and a proxy that takes over.
type Limits struct {
	// Connections limits the connections of one server.
	Connections int
	// Ports limits the sockets of health check node ports, and PortConnections the connections of all of them together.
	Ports, PortConnections int
}

// These suffice for all legitimate clients. Load balancers may keep connections to each of their Services' ports.
const (
	mostConnections     = 128
	mostPortConnections = 1024
)

// DefaultLimits derives limits from this process's limit of descriptors: with 128, two servers have 16 connections
// each, and health check node ports 32 sockets and 16 connections.
func DefaultLimits() Limits {
	var l syscall.Rlimit
	if err := syscall.Getrlimit(syscall.RLIMIT_NOFILE, &l); err != nil {
		l.Cur = 1024
	}
	n := int(min(l.Cur, 1<<20))
	part := max(4, n/8)
	return Limits{
		Connections: min(part, mostConnections), Ports: 2 * part, PortConnections: min(part, mostPortConnections),
	}
}

// connLimit limits the open connections that some listeners share. It is safe for concurrent use.
type connLimit struct {
	most int

	mu    sync.Mutex
	open  []*trackedConn // the oldest first
	hosts map[string]int
}

// trackedConn is an open connection.
type trackedConn struct {
	net.Conn
	room *connLimit
	host string
	// closed is guarded by the room's mu.
	closed bool
	// idle is true if the connection was answered, and is kept for the next request.
	idle atomic.Bool
}

// connKey is the key of a request's connection in its context.
type connKey struct{}

// withConn lets a request's handler find its connection.
func withConn(ctx context.Context, c net.Conn) context.Context {
	return context.WithValue(ctx, connKey{}, c)
}

// Hold takes the connection of a request out of the count of connections, so that no other one replaces it, until
// release is called. The caller limits how many it holds.
func Hold(r *http.Request) (release func()) {
	g, ok := r.Context().Value(connKey{}).(*trackedConn)
	if !ok {
		return func() {}
	}
	g.room.leave(g)
	return func() { g.room.count(g) }
}

// recordState records a connection's state, as the server reports it.
func recordState(c net.Conn, state http.ConnState) {
	if g, ok := c.(*trackedConn); ok {
		g.idle.Store(state == http.StateIdle)
	}
}

func newConnLimit(most int) *connLimit { return &connLimit{most: most, hosts: map[string]int{}} }

// listen returns a listener whose connections count towards the limit. At the limit, a new connection replaces one of
// the address that has the most: the oldest idle one, else the oldest. Honest clients need a connection for a moment
// only; a client that opens many and stays silent loses its own.
func (r *connLimit) listen(l net.Listener) net.Listener { return &limitedListener{l, r} }

type limitedListener struct {
	net.Listener
	room *connLimit
}

func (l *limitedListener) Accept() (net.Conn, error) {
	c, err := l.Listener.Accept()
	if errors.Is(err, syscall.EMFILE) || errors.Is(err, syscall.ENFILE) {
		l.room.evict() // if it is ours that are too many
	}
	if err != nil {
		return nil, err
	}
	return l.room.enter(c), nil
}

func (r *connLimit) enter(c net.Conn) *trackedConn {
	host, _, err := net.SplitHostPort(c.RemoteAddr().String())
	if err != nil {
		host = c.RemoteAddr().String()
	}
	g := &trackedConn{Conn: c, room: r, host: host}
	r.count(g)
	return g
}

// count counts a connection that is open, and replaces another one if there are too many.
func (r *connLimit) count(g *trackedConn) {
	r.mu.Lock()
	if g.closed {
		r.mu.Unlock()
		return
	}
	r.open = append(r.open, g)
	r.hosts[g.host]++
	full := len(r.open) > r.most
	r.mu.Unlock()
	if full {
		r.evict()
	}
}

// leave stops counting a connection.
func (r *connLimit) leave(g *trackedConn) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.remove(g)
}

// remove is leave. The caller has locked mu.
func (r *connLimit) remove(g *trackedConn) {
	i := slices.Index(r.open, g)
	if i < 0 {
		return
	}
	r.open = slices.Delete(r.open, i, i+1)
	if r.hosts[g.host]--; r.hosts[g.host] == 0 {
		delete(r.hosts, g.host)
	}
}

// evict closes one connection, if there is one.
func (r *connLimit) evict() {
	r.mu.Lock()
	var victim *trackedConn
	for _, g := range r.open {
		switch {
		case victim == nil, r.hosts[g.host] > r.hosts[victim.host]:
			victim = g
		case g.host == victim.host && g.idle.Load() && !victim.idle.Load():
			victim = g
		}
	}
	r.mu.Unlock()
	if victim != nil {
		victim.Close()
	}
}

// Close closes the connection, and stops counting it.
func (g *trackedConn) Close() error {
	g.room.mu.Lock()
	g.closed = true
	g.room.remove(g)
	g.room.mu.Unlock()
	return g.Conn.Close()
}

// Timeouts for clients that are slow or hostile.
const (
	headerPatience = 5 * time.Second
	readPatience   = 10 * time.Second
	// writeTimeout is longer than a profile takes: net/http/pprof takes 30 seconds by default.
	writeTimeout = time.Minute
	idlePatience = 2 * time.Minute
	maxHeader    = 16 << 10
	// shutdownTimeout is how long running requests may take when the proxy stops.
	shutdownTimeout = 500 * time.Millisecond
)
