package benchmark

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"github.com/verdict-proxy/verdict/internal/lab"
	"github.com/verdict-proxy/verdict/internal/lab/blackbox"
)

// scenario is something that happens to endpoints of a Service while clients use it.
type scenario struct {
	name string
	// alone says that it disturbs others, or counts what they would add to.
	alone bool
	// prepare makes the endpoints, run begins the traffic and does the harm.
	prepare func(*scene) error
	run     func(*scene) error
	// expects are the causes that failures may have once the harm is done.
	expects []string
}

// expecting is a scenario whose harm makes connections fail for these causes.
func (s scenario) expecting(causes ...string) scenario {
	s.expects = causes
	return s
}

// four are where the endpoints of most scenarios are; the clients are on the node of the first three.
var four = []string{"a1", "a2", "a3", "b1"}

// scenarios are all, in the order of the table.
var scenarios = []scenario{
	harm("one-blackholed", func(s *scene, all []*endpoint) error { return s.blackhole(all[0]) }).expecting(silent...),
	harm("one-refusing", func(_ *scene, all []*endpoint) error { return all[0].refuse() }).expecting(closed...),
	harm("one-flapping", flap).expecting(closed...),
	harm("one-answers-late", func(_ *scene, all []*endpoint) error { return all[0].slow(lateness, false) }).
		expecting("server was silent"),
	harm("one-accepts-late", func(_ *scene, all []*endpoint) error { return all[0].slow(lateness, true) }).
		expecting(append(silent, "server was silent", "accept queue overflowed")...),
	harm("all-dead", func(s *scene, all []*endpoint) error { return each(all, s.blackhole) }).expecting(silent...),
	harm("all-refusing", func(_ *scene, all []*endpoint) error { return each(all, (*endpoint).refuse) }).
		expecting(closed...),
	scenario{name: "no-endpoint", alone: true, prepare: prepareFour, run: noEndpoint}.
		expecting("no ready endpoint", "not programmed yet"),
	rollout("rollout-grace-0s", 0).expecting(gone...),
	rollout("rollout-grace-1s", time.Second).expecting(gone...),
	rollout("rollout-grace-30s", 30*time.Second).expecting(gone...),
	alone(harm("node-cut", func(s *scene, _ []*endpoint) error { return s.cut("node-b") })).expecting(cut...),
	heldCut("held-node-cut-slice-after-1s", true).expecting(cut...),
	heldCut("held-node-cut-slice-never", false).expecting(cut...),
	scenario{name: "held-graceful-rollout", alone: true, prepare: prepareGraceful, run: graceful}.expecting(closed...),
	many("loss-5-percent", func(s *scene, all []*endpoint) error {
		return each(all, func(e *endpoint) error { return s.lossy(e, 5) })
	}).expecting(lossy...),
	many("loss-20-percent", func(s *scene, all []*endpoint) error {
		return each(all, func(e *endpoint) error { return s.lossy(e, 20) })
	}).expecting(lossy...),
	many("syn-flood", flood),
	many("one-client-forbidden", forbid),
}

// What failures of the scenarios are expected to come from, as the recorder calls it. A proxy deletes the entries of a
// connection without an answer, so that its next packet goes to another endpoint.
var (
	silent = []string{"endpoint was silent", "entry deleted"}
	closed = []string{"nothing listened", "server closed"}
	gone   = append([]string{"no way to the endpoint", "endpoint was gone", "server was silent", "released"},
		slices.Concat(silent, closed)...)
	cut = append([]string{"no way to the endpoint", "lost on the way", "server was silent", "released"}, silent...)
	// The recorder sees packets before the rules that lose them do.
	lossy = append([]string{"lost on the way", "server was silent", blackbox.Unexplained}, silent...)
)

// lateness is how long a slow server takes.
const lateness = 3 * time.Second

func each(all []*endpoint, do func(*endpoint) error) error {
	var errs []error
	for _, e := range all {
		errs = append(errs, do(e))
	}
	return errors.Join(errs...)
}

func alone(s scenario) scenario {
	s.alone = true
	return s
}

// prepareFour makes four endpoints.
func prepareFour(s *scene) (err error) {
	s.old, err = s.endpoints(four...)
	return err
}

// harm has clients connect for a while before and after something happens to the endpoints.
func harm(name string, do func(*scene, []*endpoint) error) scenario {
	return scenario{name: name, prepare: prepareFour, run: func(s *scene) error {
		s.traffic(s.settings.Rate, seconds(s.settings.Length))
		if err := s.untilHarm(); err != nil {
			return err
		}
		if err := do(s, s.old); err != nil {
			return err
		}
		return s.until(seconds(s.settings.Length))
	}}
}

// noEndpoint takes all endpoints out of the slice. Clients come twice as often as elsewhere, and the node limits its
// ICMP errors as a host does by default; those of the lab do not.
func noEndpoint(s *scene) error {
	if err := s.Host("node-a").Sysctl("net/ipv4/icmp_ratemask", "6168"); err != nil {
		return err
	}
	s.atEnd(func() error { return s.Host("node-a").Sysctl("net/ipv4/icmp_ratemask", "0") })
	s.traffic(2*s.settings.Rate, seconds(s.settings.Length))
	if err := s.untilHarm(); err != nil {
		return err
	}
	s.drop(s.old...)
	return errors.Join(s.publish(), s.until(seconds(s.settings.Length)))
}

// flap has the listener of one endpoint go and come each second until the end.
func flap(s *scene, all []*endpoint) error {
	end := s.began.Add(seconds(s.settings.Length))
	for listening := true; time.Now().Before(end); listening = !listening {
		do := all[0].refuse
		if !listening {
			do = all[0].listen
		}
		if err := errors.Join(do(), sleep(s.ctx, time.Second)); err != nil {
			return err
		}
	}
	return nil
}

const (
	// replicas are replaced one after another.
	replicas = 4
	// apiDelay is how long after the kubelet's SIGTERM nodes hear that an endpoint terminates, and after its end that it
	// is gone.
	apiDelay = 300 * time.Millisecond
	// rolloutPause is between a new pod that is ready and the end of an old one, and again before the next pod.
	rolloutPause = time.Second
)

// rollout replaces four pods of both nodes one after another. Each closes its listener at SIGTERM, without a preStop
// hook, and vanishes after its grace period.
func rollout(name string, grace time.Duration) scenario {
	return scenario{name: name, prepare: prepareRollout, run: func(s *scene) error {
		s.traffic(s.settings.Rate, seconds(s.settings.Length))
		if err := s.untilHarm(); err != nil {
			return err
		}
		done := make(chan error, replicas)
		for i, e := range s.old {
			s.set(ready, s.young[i])
			if err := errors.Join(s.publish(), sleep(s.ctx, rolloutPause)); err != nil {
				return err
			}
			go func() { done <- s.terminate(e, grace) }()
			if err := sleep(s.ctx, apiDelay+rolloutPause); err != nil {
				return err
			}
		}
		var errs []error
		for range s.old {
			errs = append(errs, <-done)
		}
		return errors.Join(append(errs, s.until(seconds(s.settings.Length)))...)
	}}
}

// prepareRollout makes the pods before and after, each in a host of its own; those before are ready.
func prepareRollout(s *scene) error {
	for i := range 2 * replicas {
		node := s.Nodes()[i%len(s.Nodes())]
		host, err := s.AddPod(node)
		if err != nil {
			return err
		}
		e, err := s.endpointAt(host, node)
		if err != nil {
			return err
		}
		if i < replicas {
			s.old = append(s.old, e)
		} else {
			s.young = append(s.young, e)
		}
	}
	s.set(ready, s.old...)
	return nil
}

// terminate ends a pod as a kubelet does.
func (s *scene) terminate(e *endpoint, grace time.Duration) error {
	if grace > 0 {
		if err := errors.Join(e.refuse(), sleep(s.ctx, apiDelay)); err != nil {
			return err
		}
		s.set(draining, e)
		if err := errors.Join(s.publish(), sleep(s.ctx, grace-apiDelay)); err != nil {
			return err
		}
	}
	if err := errors.Join(e.vanish(), sleep(s.ctx, apiDelay)); err != nil {
		return err
	}
	s.drop(e)
	return s.publish()
}

// heldCut cuts off the node that all held connections go to, while the Service has endpoints elsewhere; changed says
// that the EndpointSlice loses the dead ones a second later.
func heldCut(name string, changed bool) scenario {
	return scenario{name: name, alone: true, prepare: prepareHeld, run: func(s *scene) error {
		if err := s.hold(s.Host("pod-a"), s.settings.Held); err != nil {
			return err
		}
		s.set(ready, s.young...)
		if err := errors.Join(s.publish(), s.Sync(s.ctx), sleep(s.ctx, 2*heldPause)); err != nil {
			return err
		}
		s.began = time.Now()
		s.traffic(s.settings.Rate/4, seconds(s.settings.Length))
		if err := s.untilHarm(); err != nil {
			return err
		}
		cut := time.Now()
		if err := errors.Join(s.cut("node-b"), sleep(s.ctx, time.Second)); err != nil {
			return err
		}
		if changed {
			s.drop(s.old...)
			if err := s.publish(); err != nil {
				return err
			}
		}
		s.told(cut, seconds(s.settings.Length))
		return s.until(seconds(s.settings.Length))
	}}
}

// prepareHeld makes three endpoints on node-b that are ready, and three on node-a that are not in the slice yet.
func prepareHeld(s *scene) (err error) {
	if s.young, err = s.endpoints("a1", "a2", "a3"); err != nil {
		return err
	}
	s.drop(s.young...)
	s.old, err = s.endpoints("b1", "b2", "b3")
	return err
}

func prepareGraceful(s *scene) (err error) {
	s.old, err = s.endpoints("a1", "a2", "b1", "b2")
	return err
}

// graceful replaces all endpoints at once. The old ones take no new connections, and serve the open ones until the end.
func graceful(s *scene) error {
	if err := s.hold(s.Host("pod-a"), s.settings.Held/4); err != nil {
		return err
	}
	s.began = time.Now()
	s.traffic(s.settings.Rate/4, seconds(s.settings.Length))
	if err := s.untilHarm(); err != nil {
		return err
	}
	if _, err := s.endpoints("a3", "b3"); err != nil {
		return err
	}
	if err := errors.Join(s.publish(), sleep(s.ctx, rolloutPause)); err != nil {
		return err
	}
	began := time.Now()
	if err := errors.Join(each(s.old, (*endpoint).refuse), sleep(s.ctx, apiDelay)); err != nil {
		return err
	}
	s.set(draining, s.old...)
	if err := s.publish(); err != nil {
		return err
	}
	s.told(began, seconds(s.settings.Drain))
	return s.until(seconds(s.settings.Length))
}

// many has clients connect as often as is asked for while something is wrong that is no fault of an endpoint.
func many(name string, do func(*scene, []*endpoint) error) scenario {
	return scenario{name: name, alone: true, prepare: prepareFour, run: func(s *scene) error {
		if err := do(s, s.old); err != nil {
			return err
		}
		s.began = time.Now()
		s.failures.Harm()
		length := seconds(s.settings.Length)
		if s.counts && s.settings.Connections > 0 {
			length = seconds(float64(s.settings.Connections) / s.settings.ManyRate)
		}
		s.traffic(s.settings.ManyRate, length)
		return s.until(length)
	}}
}

const (
	floodRate  = 1000
	floodPorts = 2000
)

// flood sends SYNs from a client that never answers, each again from the same port after a while.
func flood(s *scene, _ []*endpoint) error {
	attacker, err := s.AddPod("node-a")
	if err != nil {
		return err
	}
	deaf := fmt.Sprintf("chain input { type filter hook input priority 0; tcp sport %d drop; }", servicePort)
	if err := s.rules(attacker, "inet", deaf); err != nil {
		return err
	}
	var socket int
	if err := attacker.Do(func() error { socket, err = rawSocket(attacker.IP4); return err }); err != nil {
		return err
	}
	var stop atomic.Bool
	ended := make(chan struct{})
	s.atEnd(func() error {
		stop.Store(true)
		<-ended
		return unix.Close(socket)
	})
	go func() {
		defer close(ended)
		sendFlood(s, attacker, socket, &stop)
	}()
	return nil
}

func sendFlood(s *scene, attacker *lab.Host, socket int, stop *atomic.Bool) {
	peer := &unix.SockaddrInet4{Addr: s.to.Addr().As4()}
	for i := 0; !stop.Load(); i++ {
		segment := tcpSegment(netip.AddrPortFrom(attacker.IP4, uint16(10000+i%floodPorts)), s.to, synFlag, 0, 0)
		_ = unix.Sendto(socket, segment[:], 0, peer) // what is lost is sent again
		time.Sleep(time.Second / floodRate)
	}
}

// forbid has the pods drop what one client sends, as a NetworkPolicy would, while that client goes on trying.
func forbid(s *scene, all []*endpoint) error {
	client, err := s.AddPod("node-a")
	if err != nil {
		return err
	}
	err = each(all, func(e *endpoint) error {
		return s.rules(e.host, "inet", fmt.Sprintf(
			"chain input { type filter hook input priority 0; ip saddr %s tcp dport %d drop; }", client.IP4, e.port))
	})
	if err != nil {
		return err
	}
	var stop atomic.Bool
	ended := make(chan struct{})
	s.atEnd(func() error {
		stop.Store(true)
		<-ended
		return nil
	})
	go func() {
		defer close(ended)
		for !stop.Load() {
			go func() { _, _, _ = connectOnce(s.ctx, client, s.to, s.clients.limit) }()
			time.Sleep(50 * time.Millisecond)
		}
	}()
	return nil
}
