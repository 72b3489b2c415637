// Package recorder makes histories: it changes Services in the testbed of the conformance suite while clients connect,
// lets proxies and the API server fail, and writes down what was sent, acknowledged and seen.
package recorder

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"sync"
	"sync/atomic"
	"time"

	v1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/intstr"

	"github.com/verdict-proxy/verdict/conformance/history"
	"github.com/verdict-proxy/verdict/conformance/testbed"
	"github.com/verdict-proxy/verdict/internal/lab"
	"github.com/verdict-proxy/verdict/internal/lab/blackbox"
	"github.com/verdict-proxy/verdict/sync/snapshot"
)

// recording is one history while it is made.
type recording struct {
	*bed
	ctx       context.Context
	settings  Settings
	namespace string
	began     time.Time
	services  []*web
	// old holds the proxies that run their older version.
	old      map[*testbed.Proxy]bool
	failures *testbed.Failures

	mu      sync.Mutex
	history *history.History
	undo    []func() error
}

// floor and ceil give the time of the history, rounded down and up.
func (r *recording) floor() int64 { return time.Since(r.began).Microseconds() }
func (r *recording) ceil() int64  { return time.Since(r.began).Microseconds() + 1 }

// note adds to the history.
func (r *recording) note(add func(*history.History)) {
	r.mu.Lock()
	defer r.mu.Unlock()
	add(r.history)
}

// atEnd has something undone in the end, the last first.
func (r *recording) atEnd(undo func() error) { r.undo = append(r.undo, undo) }

func (r *recording) end() (err error) {
	for i := len(r.undo) - 1; i >= 0; i-- {
		err = errors.Join(err, r.undo[i]())
	}
	return err
}

// server answers at a port of a pod, with a name that may change.
type server struct {
	pod     *pod
	address netip.AddrPort
	name    atomic.Pointer[string]
}

// serve starts a server on behalf of a Service.
func (r *recording) serve(p *pod, port uint16, of *web) (*server, error) {
	s := &server{pod: p, address: netip.AddrPortFrom(p.IP4, port)}
	r.give(s, of)
	l, err := p.Listen("tcp4", fmt.Sprintf(":%d", port))
	if err != nil {
		return nil, err
	}
	r.atEnd(l.Close)
	go s.accept(l)
	return s, nil
}

// give has the server answer for a Service from now on, by a name that nobody had before.
func (r *recording) give(s *server, to *web) {
	r.note(func(h *history.History) {
		name := fmt.Sprintf("%s/%s.%d", to.name, s.pod.Name, len(h.Serves))
		h.Serves = append(h.Serves, history.Serve{
			At: r.floor(), Address: s.address.String(), Endpoint: name, Service: to.name,
		})
		s.name.Store(&name)
	})
}

func (s *server) accept(l net.Listener) {
	for {
		c, err := l.Accept()
		if errors.Is(err, net.ErrClosed) {
			return
		}
		if err != nil { // out of descriptors, for instance
			time.Sleep(time.Millisecond)
			continue
		}
		go s.greet(c)
	}
}

// greet says who this is, in the words of a server of the lab, and waits until the client is gone.
func (s *server) greet(c net.Conn) {
	defer c.Close()
	if err := c.SetDeadline(time.Now().Add(clientLimit)); err != nil {
		return
	}
	if _, err := fmt.Fprintf(c, "%s %s %s\n", *s.name.Load(), c.RemoteAddr(), c.LocalAddr()); err == nil {
		_, _ = c.Read(make([]byte, 1))
	}
}

// web is a Service with its endpoints.
type web struct {
	*recording
	name  string
	to    netip.AddrPort
	port  uint16
	slice *discovery.EndpointSlice
	// pool are servers that the Service may use, states those that are in its EndpointSlice.
	pool   []*server
	states map[*server]history.State
}

// servicePort is the port of all Services.
const servicePort = 80

// createService makes a Service without endpoints.
func (r *recording) createService(name string, port uint16, affinity int) (*web, error) {
	w := &web{recording: r, name: name, port: port, states: make(map[*server]history.State)}
	service := &v1.Service{
		ObjectMeta: metav1.ObjectMeta{Name: name, Namespace: r.namespace},
		Spec: v1.ServiceSpec{Ports: []v1.ServicePort{{
			Name: "http", Port: servicePort, Protocol: v1.ProtocolTCP, TargetPort: intstr.FromInt32(int32(port)),
		}}},
	}
	if affinity > 0 {
		service.Spec.SessionAffinity = v1.ServiceAffinityClientIP
		service.Spec.SessionAffinityConfig = &v1.SessionAffinityConfig{
			ClientIP: &v1.ClientIPConfig{TimeoutSeconds: new(int32(affinity))},
		}
	}
	client := r.Client.CoreV1().Services(r.namespace)
	err := r.write(history.Write{Service: name, Affinity: affinity}, func(ctx context.Context) error {
		made, err := client.Create(ctx, service, metav1.CreateOptions{})
		if err == nil {
			w.to = netip.AddrPortFrom(netip.MustParseAddr(made.Spec.ClusterIP), servicePort)
			w.Made(made)
		}
		return err
	})
	if err != nil {
		return nil, err
	}
	r.atEnd(func() error {
		return client.Delete(context.WithoutCancel(r.ctx), name, metav1.DeleteOptions{})
	})
	w.slice = &discovery.EndpointSlice{
		ObjectMeta: metav1.ObjectMeta{
			Name: name, Namespace: r.namespace, Labels: map[string]string{discovery.LabelServiceName: name},
		},
		AddressType: discovery.AddressTypeIPv4,
		Ports:       []discovery.EndpointPort{{Name: new("http"), Port: new(int32(port)), Protocol: new(v1.ProtocolTCP)}},
	}
	return w, nil
}

// publish writes the EndpointSlice as it stands now.
func (w *web) publish() error {
	record := history.Write{Service: w.name, Slice: w.name}
	w.slice.Endpoints = []discovery.Endpoint{}
	for _, s := range w.pool {
		state, ok := w.states[s]
		if !ok {
			continue
		}
		record.Endpoints = append(record.Endpoints, history.Endpoint{Address: s.address.String(), State: state})
		w.slice.Endpoints = append(w.slice.Endpoints, discovery.Endpoint{
			Addresses: []string{s.address.Addr().String()}, NodeName: new(s.pod.node), Conditions: conditions(state),
		})
	}
	client := w.Client.DiscoveryV1().EndpointSlices(w.namespace)
	return w.write(record, func(ctx context.Context) error {
		w.Writes(w.slice)
		_, err := client.Update(ctx, w.slice, metav1.UpdateOptions{})
		if apierrors.IsNotFound(err) {
			_, err = client.Create(ctx, w.slice, metav1.CreateOptions{})
		}
		return err
	})
}

func conditions(s history.State) discovery.EndpointConditions {
	terminating := s == history.Serving || s == history.Terminating
	serving := s == history.Ready || s == history.Serving
	return discovery.EndpointConditions{
		Ready: new(s == history.Ready), Serving: &serving, Terminating: &terminating,
	}
}

const (
	// writeLimit is how long a write is repeated, which is longer than the API server is ever gone.
	writeLimit = 2 * time.Minute
	// tryLimit is how long one try may take. A server that is killed may leave it without an answer.
	tryLimit   = 5 * time.Second
	writePause = 20 * time.Millisecond
)

// write repeats a write until it is acknowledged, and records it.
func (r *recording) write(record history.Write, do func(context.Context) error) error {
	ctx, cancel := context.WithTimeout(r.ctx, writeLimit)
	defer cancel()
	record.Sent = r.floor()
	for tries := 1; ; tries++ {
		try, done := context.WithTimeout(ctx, tryLimit)
		err := do(try)
		done()
		if err == nil {
			break
		}
		record.Tries = tries + 1
		if ctx.Err() != nil {
			return fmt.Errorf("write %s: %w", record.Service, err)
		}
		if err := sleep(ctx, writePause); err != nil {
			return err
		}
	}
	record.Acked = r.ceil()
	r.note(func(h *history.History) { h.Writes = append(h.Writes, record) })
	return nil
}

// clientLimit is how long a client waits for an answer.
const clientLimit = 3 * time.Second

// maxConns is how many connections a history may have.
const maxConns = 2_000_000

// connect has a client open one connection after the other, at a rate, until stop is closed.
func (w *web) connect(from *pod, rate float64, stop <-chan struct{}) error {
	period := time.Duration(float64(time.Second) / rate)
	for next := time.Now(); ; next = next.Add(period) {
		if late := time.Since(next); late > period {
			next = time.Now()
		}
		select {
		case <-stop:
			return nil
		case <-w.ctx.Done():
			return context.Cause(w.ctx)
		case <-time.After(time.Until(next)):
		}
		c := history.Conn{Begin: w.floor(), Service: w.name, Client: from.IP4.String(), Node: from.node}
		began := time.Now()
		result := from.Dial(snapshot.TCP, w.to, lab.Options{Timeout: clientLimit})
		c.End = w.ceil()
		if record(&c, result); c.Outcome != history.Answered {
			w.failures.Add(blackbox.Failure{From: from.Name, Client: result.Client, Server: w.to, Began: began,
				Failed: time.Now(), Err: fmt.Sprint(result.Err)})
		}
		full := false
		w.note(func(h *history.History) {
			h.Conns = append(h.Conns, c)
			full = len(h.Conns) > maxConns
		})
		if full {
			return history.ErrTooLong
		}
	}
}

// record writes down what a client learned.
func record(c *history.Conn, r lab.Result) {
	switch r.Outcome {
	case lab.Answered:
		c.Outcome, c.Endpoint, c.At = history.Answered, r.Endpoint, r.Destination.String()
	case lab.Refused:
		c.Outcome = history.Refused
	case lab.TimedOut:
		c.Outcome = history.TimedOut
	default:
		c.Outcome, c.Error = history.Failed, fmt.Sprintf("%.200s", r.Err)
	}
}

func sleep(ctx context.Context, d time.Duration) error {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}
