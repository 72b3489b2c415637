package collector

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/sha256"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/hex"
	"errors"
	"fmt"
	"log/slog"
	"math/big"
	"net"
	"sync"
	"time"

	"github.com/verdict-proxy/verdict/internal/proxy/everywhere"
	"github.com/verdict-proxy/verdict/internal/proxy/status"
	"github.com/verdict-proxy/verdict/internal/system/clock"
)

// hub accepts the nodes' connections.
type hub struct {
	tls      *tls.Config
	reviewer *reviewer
	barrier  *barrier
	log      *slog.Logger

	mu sync.Mutex
	// greeting counts the connections that have not shown a token yet, in all and by host.
	greeting int
	hosts    map[string]int
}

// stream is the connection of a node.
type stream struct {
	*everywhere.Stream
	node string
	// comparable says whether the node's digests can be compared with ours.
	comparable bool
	// waits are the node's own requests, by its IDs. The barrier's mu guards them.
	waits map[uint64]*waiter
	pace  pace
}

const (
	// maxGreeting bounds the connections that have not shown a token, and maxGreetingOfHost those of one address.
	maxGreeting, maxGreetingOfHost = 1024, 8
	// greetTimeout bounds the handshake and the token, and reviewTimeout the review.
	greetTimeout, reviewTimeout = 5 * time.Second, 10 * time.Second
	// sendPatience is how long a node may take to read.
	sendPatience = time.Second
)

// newCertificate makes a certificate that only its fingerprint vouches for.
func newCertificate() (cert tls.Certificate, fingerprint string, err error) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return cert, "", err
	}
	template := &x509.Certificate{
		SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: everywhere.Audience},
		NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().AddDate(10, 0, 0),
		KeyUsage: x509.KeyUsageDigitalSignature, ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth},
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, &key.PublicKey, key)
	if err != nil {
		return cert, "", err
	}
	sum := sha256.Sum256(der)
	return tls.Certificate{Certificate: [][]byte{der}, PrivateKey: key}, hex.EncodeToString(sum[:]), nil
}

func newHub(cert tls.Certificate, r *reviewer, b *barrier, log *slog.Logger) *hub {
	return &hub{
		// Nobody resumes a session: a ticket would only be bytes.
		tls: &tls.Config{
			MinVersion: tls.VersionTLS13, Certificates: []tls.Certificate{cert}, SessionTicketsDisabled: true,
		},
		reviewer: r, barrier: b, log: log, hosts: map[string]int{},
	}
}

// serve accepts connections until ctx is done, and then closes all.
func (h *hub) serve(ctx context.Context, l net.Listener) error {
	stop := context.AfterFunc(ctx, func() { l.Close() })
	defer stop()
	var all sync.WaitGroup
	defer all.Wait()
	for {
		conn, err := l.Accept()
		switch {
		case ctx.Err() != nil:
			if err == nil {
				conn.Close()
			}
			return nil
		case errors.Is(err, net.ErrClosed):
			return err
		case err != nil: // such as too many open files
			h.log.Warn("failed to accept a connection", "err", err)
			clock.Pause(ctx, 100*time.Millisecond)
			continue
		}
		host, _, _ := net.SplitHostPort(conn.RemoteAddr().String())
		if !h.enter(host) {
			conn.Close()
			continue
		}
		all.Go(func() { h.greet(ctx, &all, conn, host) })
	}
}

// enter counts a connection that has not shown a token, unless there are too many.
func (h *hub) enter(host string) bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.greeting >= maxGreeting || h.hosts[host] >= maxGreetingOfHost {
		return false
	}
	h.greeting++
	h.hosts[host]++
	return true
}

func (h *hub) leave(host string) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.greeting--
	if h.hosts[host]--; h.hosts[host] == 0 {
		delete(h.hosts, host)
	}
}

// greet has a connection show its token, and serves it from a goroutine of its own, whose stack is small.
func (h *hub) greet(ctx context.Context, all *sync.WaitGroup, raw net.Conn, host string) {
	defer h.leave(host)
	stop := context.AfterFunc(ctx, func() { raw.Close() })
	defer stop()
	conn := tls.Server(raw, h.tls)
	s := &stream{Stream: everywhere.NewStream(conn), waits: map[uint64]*waiter{}}
	until, err := h.authenticate(ctx, conn, s, host)
	if err != nil {
		h.barrier.countGreeting(false)
		h.log.Debug("refused a connection", "from", host, "err", err)
		raw.Close()
		return
	}
	h.barrier.countGreeting(true)
	all.Go(func() { h.run(ctx, s, until) })
}

func (h *hub) authenticate(ctx context.Context, conn *tls.Conn, s *stream, host string) (until time.Time, err error) {
	end := time.Now().Add(greetTimeout)
	if err := conn.SetDeadline(end); err != nil {
		return until, err
	}
	if err := conn.HandshakeContext(ctx); err != nil {
		return until, err
	}
	var first everywhere.FromNode
	if err := s.Receive(&first, end); err != nil {
		return until, err
	}
	if first.Hello == nil {
		return until, errors.New("the first line has no token")
	}
	review, cancel := context.WithTimeout(ctx, reviewTimeout)
	defer cancel()
	if s.node, until, err = h.reviewer.node(review, host, first.Hello.Token); err != nil {
		text := "the token cannot be reviewed"
		if _, ok := errors.AsType[errStranger](err); ok {
			text = err.Error()
		}
		_ = s.Send(everywhere.FromCollector{Refused: text}, sendPatience) // it is closed anyway
		return until, err
	}
	s.comparable = first.Hello.Schema == status.Schema
	seconds := int64(time.Until(until) / time.Second)
	if seconds <= 0 {
		return until, errors.New("the token has expired")
	}
	welcome := &everywhere.Welcome{Seconds: seconds, Beat: everywhere.Beat.Milliseconds()}
	return until, s.Send(everywhere.FromCollector{Welcome: welcome}, sendPatience)
}

// run serves a node until its connection ends, or its token expires.
func (h *hub) run(ctx context.Context, s *stream, until time.Time) {
	defer s.Close()
	stop := context.AfterFunc(ctx, s.Close)
	defer stop()
	expired := time.AfterFunc(time.Until(until), s.Close)
	defer expired.Stop()
	h.barrier.join(s)
	defer h.barrier.part(s)
	var beat *time.Timer
	made := make(chan struct{})
	beat = time.AfterFunc(everywhere.Beat, func() {
		<-made
		if s.Send(everywhere.FromCollector{}, sendPatience) == nil {
			beat.Reset(everywhere.Beat)
		}
	})
	close(made)
	defer beat.Stop()
	for {
		var m everywhere.FromNode
		if err := s.Receive(&m, time.Time{}); err != nil {
			return
		}
		switch {
		case len(m.Have) > 0:
			h.barrier.have(s, m.Have)
		case m.Wait != nil:
			h.barrier.wait(s, m.Wait)
		case m.Cancel != 0:
			h.barrier.cancel(s, m.Cancel)
		default:
			_ = s.Send(everywhere.FromCollector{Refused: "this line says nothing"}, sendPatience)
			return
		}
	}
}

// listen listens where nodes reach the collector.
func listen(ctx context.Context, address string) (net.Listener, error) {
	l, err := (&net.ListenConfig{KeepAliveConfig: everywhere.KeepAlive}).Listen(ctx, "tcp", address)
	if err != nil {
		return nil, fmt.Errorf("collector: %w", err)
	}
	return l, nil
}
