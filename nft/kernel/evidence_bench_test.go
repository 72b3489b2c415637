package kernel

import (
	"errors"
	"fmt"
	"net/netip"
	"runtime"
	"slices"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/verdict-proxy/verdict/internal/lab"
	"github.com/verdict-proxy/verdict/internal/lab/labtest"
	"github.com/verdict-proxy/verdict/internal/system/ipfamily"
	"github.com/verdict-proxy/verdict/internal/system/testkit"
	"github.com/verdict-proxy/verdict/nft"
	"github.com/verdict-proxy/verdict/sync/dataplane"
	"github.com/verdict-proxy/verdict/sync/snapshot"
)

// BenchmarkReadNoEvidence measures the processor time of a Read while there is no evidence.
func BenchmarkReadNoEvidence(b *testing.B) {
	h, back := benchHost(b)
	apply(b, back, &dataplane.State{Evidence: true})
	labtest.Check(b, h.Do(func() error {
		r, err := OpenEvidence()
		if err != nil {
			return err
		}
		defer r.Close()
		start, err := lab.ThreadTime()
		if err != nil {
			return err
		}
		for b.Loop() {
			if list, err := r.Read(); err != nil || len(list) > 0 {
				b.Fatal(list, err)
			}
		}
		end, err := lab.ThreadTime()
		b.ReportMetric(float64((end-start).Nanoseconds())/1000/float64(b.N), "cpu-us/op")
		return err
	}))
}

// BenchmarkRetryServices writes Services with 10 endpoints into an empty kernel, without evidence and with refused
// connections tried again at each of them.
func BenchmarkRetryServices(b *testing.B) {
	for _, evidence := range []bool{false, true} {
		snap := snapshot.New()
		snap.Apply(large(testkit.Size(10000, 1000), 10))
		config := configs["cluster CIDR"]
		if evidence {
			config.SecondChance = snapshot.SecondChanceOn
		}
		st, _ := dataplane.Compute(config, snap)
		retryAll(st)
		name := "without"
		if evidence {
			name = "with"
		}
		b.Run(name, func(b *testing.B) {
			var r dataplane.Receipt
			for b.Loop() {
				_, back := benchHost(b)
				var err error
				r, err = back.ApplyAll(st, dataplane.Change{})
				labtest.Check(b, err)
			}
			b.ReportMetric(float64(r.Added), "elements")
			b.ReportMetric(float64(r.Bytes), "bytes")
			l := nft.List(st)
			b.ReportMetric(float64(len(l[0].Elements[nft.RetryServices])), "retry-services")
		})
	}
}

// BenchmarkEstablishedFlow measures the processor time of a packet of an established flow that the node forwards to a
// Service's endpoint, from send to receive in one thread: of the same flow without evidence and with it, by turns.
func BenchmarkEstablishedFlow(b *testing.B) {
	for _, p := range []snapshot.Protocol{snapshot.TCP, snapshot.UDP} {
		b.Run(p.String(), func(b *testing.B) {
			f := newEstablishedFlow(b, p)
			time.Sleep(2500 * time.Millisecond) // until connection tracking takes a UDP flow for a stream
			runtime.LockOSThread()
			defer runtime.UnlockOSThread()
			var times [2][]float64
			for b.Loop() {
				for i := range times {
					b.StopTimer()
					f.state.Evidence = i == 1
					_, err := f.backend.ApplyAll(f.state, dataplane.Change{Globals: true})
					labtest.Check(b, err)
					b.StartTimer()
					times[i] = append(times[i], f.round(b))
				}
			}
			for i := range times {
				slices.Sort(times[i])
			}
			without, with := times[0][len(times[0])/2], times[1][len(times[1])/2]
			b.ReportMetric(without, "without-ns/packet")
			b.ReportMetric(with, "with-ns/packet")
			b.ReportMetric(100*(with/without-1), "%more")
		})
	}
}

// establishedFlow is a connected socket of a client outside of a node, and that of the endpoint.
type establishedFlow struct {
	client, server int
	state          *dataplane.State
	backend        *Backend
}

func newEstablishedFlow(b *testing.B, p snapshot.Protocol) *establishedFlow {
	c := labtest.NewCluster(b, lab.Config{LocalPods: 1, RemotePods: 1})
	s := flowService{number: 1, state: endpointState{"there", nil, []condition{ready}}}
	f := &establishedFlow{state: oneState(c, s, asIs), backend: open(b, c.Node, Options{})}
	apply(b, f.backend, f.state)
	kind := map[snapshot.Protocol]int{snapshot.TCP: unix.SOCK_STREAM, snapshot.UDP: unix.SOCK_DGRAM}[p]
	socket := func(h *lab.Host, use func(fd int) error) (fd int) {
		labtest.Check(b, h.Do(func() (err error) {
			if fd, err = unix.Socket(unix.AF_INET, kind|unix.SOCK_CLOEXEC, 0); err != nil {
				return err
			}
			return use(fd)
		}))
		b.Cleanup(func() { unix.Close(fd) })
		return fd
	}
	f.server = socket(c.RemotePods[0], func(fd int) error {
		err := unix.Bind(fd, &unix.SockaddrInet4{Port: targetPort})
		if p == snapshot.TCP {
			err = errors.Join(err, unix.Listen(fd, 1))
		}
		return err
	})
	to := s.frontendOf(c, dataplane.ClusterIP, ipfamily.IPv4)
	f.client = socket(c.Pods[0], func(fd int) error {
		return unix.Connect(fd, &unix.SockaddrInet4{Addr: to.Addr().As4(), Port: int(to.Port())})
	})
	f.greet(b, p)
	return f
}

// greet establishes the flow in both directions.
func (f *establishedFlow) greet(b *testing.B, p snapshot.Protocol) {
	if p == snapshot.TCP {
		fd, _, err := unix.Accept(f.server)
		labtest.Check(b, err)
		b.Cleanup(func() { unix.Close(fd) })
		f.server = fd
		labtest.Check(b, unix.SetsockoptInt(f.client, unix.IPPROTO_TCP, unix.TCP_NODELAY, 1))
		labtest.Check(b, unix.SetsockoptInt(f.server, unix.IPPROTO_TCP, unix.TCP_NODELAY, 1))
		return
	}
	_, err := unix.Write(f.client, []byte{0})
	labtest.Check(b, err)
	_, from, err := unix.Recvfrom(f.server, make([]byte, 1), 0)
	labtest.Check(b, err)
	labtest.Check(b, unix.Connect(f.server, from))
}

// round sends packets there and back, and returns the nanoseconds of one.
func (f *establishedFlow) round(b *testing.B) float64 {
	const trips = 2000
	packet := []byte{0}
	start, err := lab.ThreadTime()
	labtest.Check(b, err)
	for range trips {
		for _, hop := range [...][2]int{{f.client, f.server}, {f.server, f.client}} {
			if _, err := unix.Write(hop[0], packet); err != nil {
				b.Fatal(err)
			}
			if _, err := unix.Read(hop[1], packet); err != nil {
				b.Fatal(err)
			}
		}
	}
	end, err := lab.ThreadTime()
	labtest.Check(b, err)
	return float64((end - start).Nanoseconds()) / (2 * trips)
}

// BenchmarkRefusal measures the processor time of a connection that is refused, from the first packet to the client's
// error in one thread, by turns in two states: to a Service without evidence and with it; and from outside past all
// frontends, without sets of load balancer addresses and with them.
func BenchmarkRefusal(b *testing.B) {
	c := labtest.NewCluster(b, lab.Config{LocalPods: 1, RemotePods: 1})
	s := flowService{number: 1, state: endpointState{"there", nil, []condition{ready}}}
	state := func(config dataplane.Config) *dataplane.State {
		config.NodeName, config.DetectLocal = "node", clusterCIDR
		snap := snapshot.New()
		snap.Apply(facts(c))
		snap.Apply(s.delta(c))
		st, _ := dataplane.Compute(config, snap)
		return st
	}
	plain := state(dataplane.Config{})
	back := open(b, c.Node, Options{})
	for _, of := range []struct {
		name string
		from *lab.Host
		to   netip.AddrPort
		with dataplane.Config
	}{
		{"evidence", c.Pods[0], s.frontendOf(c, dataplane.ClusterIP, ipfamily.IPv4),
			dataplane.Config{SecondChance: snapshot.SecondChanceOn}},
		{"edge", c.Outside, at(c.Pods[0], ipfamily.IPv4), dataplane.Config{PingServices: true, RejectUnusedPorts: true}},
	} {
		states := [...]*dataplane.State{plain, state(of.with)}
		b.Run(of.name, func(b *testing.B) {
			runtime.LockOSThread()
			defer runtime.UnlockOSThread()
			var times [2][]float64
			for b.Loop() {
				for i, st := range states {
					b.StopTimer()
					_, err := back.ApplyAll(st, dataplane.Change{Globals: true, Services: []snapshot.Name{s.name()}})
					labtest.Check(b, err)
					b.StartTimer()
					times[i] = append(times[i], refusals(b, of.from, of.to))
				}
			}
			for i := range times {
				slices.Sort(times[i])
			}
			without, with := times[0][len(times[0])/2], times[1][len(times[1])/2]
			b.ReportMetric(without, "without-us")
			b.ReportMetric(with, "with-us")
			b.ReportMetric(with-without, "more-us")
		})
	}
}

// refusals opens connections that are refused, and returns the microseconds of one.
func refusals(b *testing.B, from *lab.Host, to netip.AddrPort) (each float64) {
	const tries = 500
	labtest.Check(b, from.Do(func() error {
		start, err := lab.ThreadTime()
		if err != nil {
			return err
		}
		for range tries {
			fd, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
			if err != nil {
				return err
			}
			err = unix.Connect(fd, &unix.SockaddrInet4{Addr: to.Addr().As4(), Port: int(to.Port())})
			unix.Close(fd)
			if !errors.Is(err, unix.ECONNREFUSED) {
				return fmt.Errorf("connect to %v: %w; it was to be refused", to, err)
			}
		}
		end, err := lab.ThreadTime()
		each = float64((end - start).Nanoseconds()) / 1000 / tries
		return err
	}))
	return each
}
