package health

import (
	"errors"
	"net"
	"net/http"
	"sync"
	"sync/atomic"
	"syscall"
	"time"
)

// Limits bound what clients may take of the descriptors of this process (RLIMIT_NOFILE), so that what asks the health
// server takes nothing from the metrics, from the API server's connection, or from a proxy that wants to take over.
type Limits struct {
	// Connections is how many connections one server has at most.
	Connections int
	// Ports is how many sockets of health check node ports there are at most, and PortConnections how many
	// connections they have, all together.
	Ports, PortConnections int
}

// These are enough for all that have reason to ask. Load balancers may keep connections to each of their Services'
// ports.
const (
	mostConnections     = 128
	mostPortConnections = 1024
)

// DefaultLimits go by the limit of descriptors of this process: with 128, two servers may have 16 connections each,
// and health check node ports 32 sockets and 16 connections.
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

// connLimit is what some listeners share: so many connections may be open. It is safe for concurrent use.
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
	once sync.Once
	// idle says that it had its answer, and is kept for the next request.
	idle atomic.Bool
}

// recordState takes note of what a server says of a connection.
func recordState(c net.Conn, state http.ConnState) {
	if g, ok := c.(*trackedConn); ok {
		g.idle.Store(state == http.StateIdle)
	}
}

func newConnLimit(most int) *connLimit { return &connLimit{most: most, hosts: map[string]int{}} }

// listen gives a listener that has its connections in the room. When that is full, a new connection takes the place
// of one of the address that has most of them: the oldest that had its answer, else the oldest. Who asks and takes
// his answer needs moments, and whoever opens many connections and says nothing, or little, loses his own.
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
	r.mu.Lock()
	r.open = append(r.open, g)
	r.hosts[host]++
	full := len(r.open) > r.most
	r.mu.Unlock()
	if full {
		r.evict()
	}
	return g
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

// Close leaves the room.
func (g *trackedConn) Close() error {
	g.once.Do(func() {
		r := g.room
		r.mu.Lock()
		defer r.mu.Unlock()
		for i, o := range r.open {
			if o == g {
				r.open = append(r.open[:i], r.open[i+1:]...)
				break
			}
		}
		if r.hosts[g.host]--; r.hosts[g.host] == 0 {
			delete(r.hosts, g.host)
		}
	})
	return g.Conn.Close()
}

// Timeouts for whoever asks, in case he is slow or wants to do harm.
const (
	headerPatience = 5 * time.Second
	readPatience   = 10 * time.Second
	// writeTimeout is longer than a profile takes, for which net/http/pprof has 30 seconds by default.
	writeTimeout = time.Minute
	idlePatience = 2 * time.Minute
	maxHeader    = 16 << 10
	// shutdownTimeout is how long requests have that are under way when the proxy ends.
	shutdownTimeout = 500 * time.Millisecond
)
