package benchmark

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"net/http"
	"net/netip"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	v1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/intstr"

	"github.com/verdict-proxy/verdict/conformance/benchmark/results"
	"github.com/verdict-proxy/verdict/conformance/testbed"
	"github.com/verdict-proxy/verdict/internal/lab"
)

// outageBed is a testbed in which scenarios run.
type outageBed struct {
	*testbed.Testbed
	settings results.OutageSettings
	// counts says that the proxy counts ejections.
	counts bool
	// from are two pods of node-a: one waiting client alone is no evidence.
	from []*lab.Host

	ports atomic.Int32 // handed out so far
}

// newOutageBed adds the second client and looks whether the proxy counts ejections.
func newOutageBed(ctx context.Context, tb *testbed.Testbed, settings results.OutageSettings) (*outageBed, error) {
	b := &outageBed{Testbed: tb, settings: settings}
	second, err := b.AddPod("node-a")
	if err != nil {
		return nil, err
	}
	b.from = []*lab.Host{tb.Host("pod-a"), second}
	_, b.counts, err = b.metric(ctx)
	return b, err
}

// Every scenario has a port of its own for its endpoints, so that a proxy does not know them from another one.
const firstOutagePort = 9300

// scene is one run of a scenario: a Service with endpoints of its own.
type scene struct {
	*outageBed
	ctx       context.Context
	namespace string
	port      uint16
	to        netip.AddrPort // the Service
	began     time.Time
	clients   *outageClients
	held      []*heldConn
	failures  *testbed.Failures
	cell      *results.Outage
	// old are the endpoints at the beginning, young those that come later.
	old, young []*endpoint

	mu     sync.Mutex
	states map[*endpoint]state
	undo   []func() error
}

// state is how an endpoint stands in the EndpointSlice.
type state struct{ ready, terminating bool }

var (
	ready    = state{ready: true}
	draining = state{terminating: true} // still serving
)

// play runs a scenario and judges what its clients saw. It returns lines about failures that the scenario does not
// expect, if the bed has a recorder.
func (b *outageBed) play(ctx context.Context, def *scenario, cell *results.Outage) (unexpected []string, err error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	s := &scene{
		outageBed: b, ctx: ctx, namespace: def.name, port: firstOutagePort + uint16(b.ports.Add(1)),
		states: make(map[*endpoint]state), cell: cell, failures: b.Failures(def.expects...),
	}
	s.clients = &outageClients{limit: seconds(b.settings.Timeout)}
	defer func() { err = errors.Join(err, s.end()) }()
	if err := s.createService(); err != nil {
		return nil, err
	}
	if err := def.prepare(s); err != nil {
		return nil, err
	}
	if err := s.publish(); err != nil {
		return nil, err
	}
	if err := b.Sync(ctx); err != nil {
		return nil, err
	}
	before, err := b.ejections(ctx)
	if err != nil {
		return nil, err
	}
	s.began = time.Now()
	if err := def.run(s); err != nil {
		return nil, err
	}
	s.clients.wait.Wait()
	if def.alone && b.counts { // the counter does not say which scenario it counted
		after, err := b.ejections(ctx)
		if err != nil {
			return nil, err
		}
		cell.Ejections = new(after - before)
	}
	cell.Causes, unexpected = s.failures.Causes()
	s.clients.judge(cell, seconds(b.settings.Before))
	return unexpected, nil
}

// atEnd has something undone at the end of the scene, the last first.
func (s *scene) atEnd(undo func() error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.undo = append(s.undo, undo)
}

func (s *scene) end() error {
	var errs []error
	for _, c := range s.held {
		errs = append(errs, c.close())
	}
	for i := len(s.undo) - 1; i >= 0; i-- {
		errs = append(errs, s.undo[i]())
	}
	return errors.Join(errs...)
}

func (s *scene) createService() error {
	if err := s.CreateNamespace(s.ctx, s.namespace); err != nil {
		return err
	}
	service := &v1.Service{
		ObjectMeta: metav1.ObjectMeta{Name: "web", Namespace: s.namespace},
		Spec: v1.ServiceSpec{Ports: []v1.ServicePort{{
			Name: "http", Port: servicePort, Protocol: v1.ProtocolTCP, TargetPort: intstr.FromInt32(int32(s.port)),
		}}},
	}
	client := s.Client.CoreV1().Services(s.namespace)
	service, err := client.Create(s.ctx, service, metav1.CreateOptions{})
	if err != nil {
		return err
	}
	s.to = netip.AddrPortFrom(netip.MustParseAddr(service.Spec.ClusterIP), servicePort)
	s.Made(service)
	s.atEnd(func() error {
		ctx := context.WithoutCancel(s.ctx)
		slices := s.Client.DiscoveryV1().EndpointSlices(s.namespace)
		return errors.Join(
			client.Delete(ctx, service.Name, metav1.DeleteOptions{}),
			slices.DeleteCollection(ctx, metav1.DeleteOptions{}, metav1.ListOptions{}),
		)
	})
	return nil
}

// set changes how endpoints stand, without writing it.
func (s *scene) set(to state, endpoints ...*endpoint) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, e := range endpoints {
		s.states[e] = to
	}
}

// drop takes endpoints out, without writing it.
func (s *scene) drop(endpoints ...*endpoint) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, e := range endpoints {
		delete(s.states, e)
	}
}

// publish writes the EndpointSlice as it stands now.
func (s *scene) publish() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	slice := &discovery.EndpointSlice{
		ObjectMeta: metav1.ObjectMeta{
			Name: "web", Namespace: s.namespace, Labels: map[string]string{discovery.LabelServiceName: "web"},
		},
		AddressType: discovery.AddressTypeIPv4,
		Endpoints:   []discovery.Endpoint{},
		Ports: []discovery.EndpointPort{
			{Name: new("http"), Port: new(int32(s.port)), Protocol: new(v1.ProtocolTCP)},
		},
	}
	for e, is := range s.states {
		slice.Endpoints = append(slice.Endpoints, discovery.Endpoint{
			Addresses: []string{e.host.IP4.String()}, NodeName: new(e.node),
			Conditions: discovery.EndpointConditions{
				Ready: new(is.ready), Serving: new(true), Terminating: new(is.terminating),
			},
		})
	}
	s.Writes(slice)
	client := s.Client.DiscoveryV1().EndpointSlices(s.namespace)
	_, err := client.Update(s.ctx, slice, metav1.UpdateOptions{})
	if apierrors.IsNotFound(err) {
		_, err = client.Create(s.ctx, slice, metav1.CreateOptions{})
	}
	return err
}

// until sleeps until a time of the scene.
func (s *scene) until(at time.Duration) error { return sleep(s.ctx, time.Until(s.began.Add(at))) }

// untilHarm sleeps until the harm is to be done.
func (s *scene) untilHarm() error {
	err := s.until(seconds(s.settings.Before))
	s.failures.Harm()
	return err
}

// ejectionsMetric counts endpoints that Verdict has left out; other proxies have none.
const ejectionsMetric = "verdict_ejections_total"

func (b *outageBed) ejections(ctx context.Context) (int, error) {
	sum, _, err := b.metric(ctx)
	return sum, err
}

// metric sums the metric over its labels, on the node of the clients.
func (b *outageBed) metric(ctx context.Context) (sum int, found bool, err error) {
	transport := &http.Transport{DialContext: b.Host("node-a").DialContext}
	defer transport.CloseIdleConnections()
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://127.0.0.1:10249/metrics", nil)
	if err != nil {
		return 0, false, err
	}
	response, err := (&http.Client{Transport: transport, Timeout: 10 * time.Second}).Do(request)
	if err != nil {
		return 0, false, fmt.Errorf("metrics of the proxy: %w", err)
	}
	defer response.Body.Close()
	lines := bufio.NewScanner(response.Body)
	for lines.Scan() {
		text := lines.Text()
		found = found || strings.HasPrefix(text, "# HELP "+ejectionsMetric+" ")
		if name, _, _ := strings.Cut(text, "{"); name != ejectionsMetric && !strings.HasPrefix(text, ejectionsMetric+" ") {
			continue
		}
		value, err := strconv.ParseFloat(text[strings.LastIndex(text, " ")+1:], 64)
		if err != nil {
			return 0, false, fmt.Errorf("metrics of the proxy: %q: %w", text, err)
		}
		sum += int(value)
	}
	return sum, found, lines.Err()
}
