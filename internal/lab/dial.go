package lab

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"github.com/verdict-proxy/verdict/sync/snapshot"
)

// Outcome is the result of an attempt to reach a Server.
type Outcome uint8

// The outcomes.
const (
	// Failed means that the attempt could not be made, or that something other than a Server answered; see Result.Err.
	Failed Outcome = iota
	// Answered means that a Server answered.
	Answered
	// Refused means that the client got an RST, an SCTP ABORT, or an ICMP error.
	Refused
	// TimedOut means that nothing came back.
	TimedOut
)

// String gives "failed", "answered", "refused" or "timed out".
func (o Outcome) String() string {
	return [...]string{"failed", "answered", "refused", "timed out"}[o]
}

// Result is what a client learned.
type Result struct {
	Outcome Outcome
	// Endpoint is the name of the host that answered; it, Source and Destination are only set if one did.
	Endpoint string
	// Client is the client's own address and port, before any translation; invalid if no socket was made.
	Client netip.AddrPort
	// Source is the client as the endpoint saw it: after SNAT.
	Source netip.AddrPort
	// Destination is what the endpoint was reached at: after DNAT.
	Destination netip.AddrPort
	// Latency is the time from the first packet to the outcome.
	Latency time.Duration
	// Err is what the kernel said, nil if an endpoint answered.
	Err error
	// Lost says that a Server got the datagram, and that its answer did not arrive.
	Lost bool
}

// String is for messages: "answered by pod-1 at 10.244.1.10:80, which saw 10.244.1.11:40000", "refused: ...".
func (r Result) String() string {
	if r.Outcome == Answered {
		return fmt.Sprintf("answered by %s at %s, which saw %s", r.Endpoint, r.Destination, r.Source)
	}
	if r.Lost {
		return fmt.Sprintf("%s: %v, and a server has answered", r.Outcome, r.Err)
	}
	return fmt.Sprintf("%s: %v", r.Outcome, r.Err)
}

// Options configure a dial. The zero value is fine.
type Options struct {
	// Timeout is how long to wait for the endpoint's first words; 0 means one second.
	Timeout time.Duration
	// From is the client's own address and port. A zero port or an invalid address leaves the choice to the kernel.
	From netip.AddrPort
}

func (o Options) timeout() time.Duration {
	if o.Timeout == 0 {
		return time.Second
	}
	return o.Timeout
}

// Dial tries once to reach a Server from the host, and leaves no connection behind: it closes TCP by RST, so that a
// test can dial thousands of times without filling tables. It sends one UDP datagram or SCTP INIT; a TCP SYN is
// repeated after one second. UDP and SCTP use their own ports in turn, so that conntrack entries of earlier dials do
// not matter. Dial is safe for concurrent use.
func (h *Host) Dial(p snapshot.Protocol, to netip.AddrPort, o Options) Result {
	if p == snapshot.SCTP && !h.kernelSCTP() {
		return h.dialSCTP(unmap(to), o)
	}
	c, r := h.Open(p, to, o)
	if c != nil {
		c.abort()
	}
	return r
}

// Conn is an open connection or UDP flow. Only one goroutine may use it at a time.
type Conn struct {
	host     *Host
	conn     net.Conn
	lines    *bufio.Reader // nil for UDP
	greeting Result
	pings    int
	closed   sync.Once
}

// Open dials like Dial and keeps the connection: TCP, UDP, or SCTP if the kernel has it loaded. Conn is nil unless the
// outcome is Answered. It is closed with the host at the latest.
func (h *Host) Open(p snapshot.Protocol, to netip.AddrPort, o Options) (*Conn, Result) {
	start := time.Now()
	c, r := h.openConn(p, to, o, start.Add(o.timeout()))
	r.Latency = time.Since(start)
	return c, r
}

func (h *Host) openConn(p snapshot.Protocol, to netip.AddrPort, o Options, deadline time.Time) (*Conn, Result) {
	if p != snapshot.TCP && p != snapshot.UDP && !(p == snapshot.SCTP && h.kernelSCTP()) {
		return nil, Result{Err: fmt.Errorf("lab: can't keep a %s connection", p)}
	}
	ctx, cancel := context.WithDeadlineCause(context.Background(), deadline, os.ErrDeadlineExceeded)
	defer cancel()
	conn, err := h.connect(ctx, p, o.From, to)
	if err != nil {
		return nil, unconnected(p, to, err)
	}
	c := &Conn{host: h, conn: conn}
	if p != snapshot.UDP {
		c.lines = bufio.NewReader(conn)
	}
	r := c.readGreeting(deadline)
	r.Client = c.Local()
	if r.Outcome != Answered {
		c.abort()
		return nil, r
	}
	c.greeting = r
	if !h.open.add(abortCloser{c}) {
		c.abort()
		return nil, failedResult(ErrClosed)
	}
	return c, r
}

// unconnected is what a client learned that was not connected.
func unconnected(p snapshot.Protocol, to netip.AddrPort, err error) Result {
	var client netip.AddrPort
	if op := (*net.OpError)(nil); errors.As(err, &op) {
		err = op.Err
		if op.Source != nil {
			client = addrPort(op.Source)
		}
	}
	r := failedResult(fmt.Errorf("%s to %s: %w", p, to, err))
	r.Client = client
	return r
}

// readGreeting waits for the first words of an endpoint. TCP servers speak first, UDP servers answer.
func (c *Conn) readGreeting(deadline time.Time) Result {
	if c.lines == nil {
		return c.exchangeDatagram(deadline)
	}
	if err := c.conn.SetDeadline(deadline); err != nil {
		return failedResult(err)
	}
	line, err := c.lines.ReadString('\n')
	if err != nil {
		return failedResult(err)
	}
	return parseGreeting(line)
}

// Ping asks the endpoint at the other end for a sign of life and waits for it that long; 0 means one second. For TCP it
// is the endpoint of the greeting that answers, or nobody. For UDP it is whoever gets the datagram now.
func (c *Conn) Ping(timeout time.Duration) Result {
	start := time.Now()
	deadline := start.Add(Options{Timeout: timeout}.timeout())
	r := c.greeting
	if c.lines == nil {
		r = c.exchangeDatagram(deadline)
	} else if err := c.echo(deadline); err != nil {
		r = failedResult(err)
	}
	r.Client, r.Latency = c.Local(), time.Since(start)
	return r
}

// questions are the datagrams of this process that wait for an answer: an *atomic.Bool says whether a Server got them.
var (
	questions sync.Map
	asked     atomic.Int64
)

// exchangeDatagram sends a datagram and waits for its answer.
func (c *Conn) exchangeDatagram(deadline time.Time) Result {
	question, received := fmt.Sprintf("ping %d", asked.Add(1)), &atomic.Bool{}
	questions.Store(question, received)
	defer questions.Delete(question)
	r := c.ask(question, deadline)
	r.Lost = r.Outcome != Answered && received.Load()
	return r
}

func (c *Conn) ask(question string, deadline time.Time) Result {
	if err := c.conn.SetDeadline(deadline); err != nil {
		return failedResult(err)
	}
	// A packet that a firewall of this very host rejects or drops gives EPERM here. Whether the client is told of it, by
	// ICMP, or waits in vain shows in reading.
	if _, err := c.conn.Write([]byte(question)); err != nil && !errors.Is(err, unix.EPERM) {
		return failedResult(err)
	}
	buf := make([]byte, 512)
	for {
		n, err := c.conn.Read(buf)
		if err != nil {
			return failedResult(err)
		}
		if greeting, echoed, _ := strings.Cut(string(buf[:n]), "\n"); echoed == question {
			return parseGreeting(greeting)
		}
	}
}

// echo sends a line over TCP and waits until it comes back.
func (c *Conn) echo(deadline time.Time) error {
	c.pings++
	question := fmt.Sprintf("ping %d\n", c.pings)
	if err := c.conn.SetDeadline(deadline); err != nil {
		return err
	}
	if _, err := c.conn.Write([]byte(question)); err != nil {
		return err
	}
	for {
		line, err := c.lines.ReadString('\n')
		if err != nil || line == question {
			return err
		}
	}
}

// Local returns the client's own address and port, before any translation.
func (c *Conn) Local() netip.AddrPort { return addrPort(c.conn.LocalAddr()) }

// Close ends the connection in the ordinary way.
func (c *Conn) Close() error {
	var err error
	c.closed.Do(func() {
		c.host.open.remove(abortCloser{c})
		err = c.conn.Close()
	})
	return err
}

// abort ends the connection by RST.
func (c *Conn) abort() error {
	if tcp, ok := c.conn.(*net.TCPConn); ok {
		_ = tcp.SetLinger(0)
	}
	return c.Close()
}

// abortCloser closes a Conn by RST. A socket that still waits for a host that is gone would hold its namespace for
// minutes.
type abortCloser struct{ *Conn }

func (a abortCloser) Close() error { return a.abort() }

// failedResult converts an error into a Result without an answer.
func failedResult(err error) Result {
	r := Result{Err: err}
	switch {
	case errors.Is(err, os.ErrDeadlineExceeded), errors.Is(err, unix.ETIMEDOUT):
		r.Outcome = TimedOut
	case errors.Is(err, io.EOF):
		r.Outcome = Refused
	default:
		for _, errno := range refusals {
			if errors.Is(err, errno) {
				r.Outcome = Refused
			}
		}
	}
	return r
}

// refusals are the errors that an RST or an ICMP message of any kind becomes.
var refusals = []unix.Errno{
	unix.ECONNREFUSED, unix.ECONNRESET, unix.EPIPE,
	unix.EHOSTUNREACH, unix.ENETUNREACH, unix.EHOSTDOWN, unix.ENONET,
	unix.ENOPROTOOPT, // IPv4 protocol unreachable
	unix.EPROTO,      // IPv6 unknown next header, parameter problem
	unix.EACCES,      // IPv6 administratively prohibited
}

// greeting is what a server says first.
func greeting(name string, source, destination netip.AddrPort) string {
	return fmt.Sprintf("%s %s %s", name, unmap(source), unmap(destination))
}

func parseGreeting(s string) Result {
	fields := strings.Fields(s)
	if len(fields) != 3 {
		return Result{Err: fmt.Errorf("lab: unknown greeting %q", s)}
	}
	source, err1 := netip.ParseAddrPort(fields[1])
	destination, err2 := netip.ParseAddrPort(fields[2])
	if err := errors.Join(err1, err2); err != nil {
		return Result{Err: fmt.Errorf("lab: unknown greeting %q: %w", s, err)}
	}
	return Result{Outcome: Answered, Endpoint: fields[0], Source: source, Destination: destination}
}

// addrPort returns the address of a TCP or UDP connection.
func addrPort(a net.Addr) netip.AddrPort {
	if a, ok := a.(interface{ AddrPort() netip.AddrPort }); ok {
		return unmap(a.AddrPort())
	}
	return netip.AddrPort{}
}
