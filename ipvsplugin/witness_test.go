package ipvsplugin

import (
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/moby/ipvs"
	"golang.org/x/sys/unix"

	"github.com/verdict-proxy/verdict/internal/lab"
	"github.com/verdict-proxy/verdict/internal/lab/labtest"
	"github.com/verdict-proxy/verdict/internal/system/ipvshandle"
	"github.com/verdict-proxy/verdict/internal/system/testkit"
	"github.com/verdict-proxy/verdict/sync/dataplane"
	"github.com/verdict-proxy/verdict/sync/snapshot"
)

// withClient calls f on a host of its own, whose IPVS has nothing.
func withClient(t testing.TB, f func(*client) error) {
	t.Helper()
	needIPVS(t)
	h := labtest.NewHost(t, labtest.NewNet(t), "node")
	labtest.Check(t, h.Do(func() error {
		s, err := openSocket(unix.NETLINK_GENERIC)
		if err != nil {
			return err
		}
		v := &client{socket: s}
		defer v.close()
		if err := v.open(); err != nil {
			return err
		}
		return f(v)
	}))
}

// commitAll writes ops, of which the kernel rejects none.
func (v *client) commitAll(ops []op, c *contents) error {
	failed, err := v.commitOps(ops, c)
	for _, f := range failed {
		return fmt.Errorf("%s: %w", f.op, f.errno)
	}
	return err
}

// witnessed is what moby/ipvs reads, a line for each object, sorted.
func witnessed(t testing.TB) string {
	h, err := ipvs.New("")
	labtest.Check(t, err)
	defer h.Close()
	services, err := h.GetServices()
	labtest.Check(t, err)
	var lines []string
	for _, s := range services {
		name := fmt.Sprintf("%s %d %d", s.Address, s.Port, s.Protocol)
		lines = append(lines, fmt.Sprintf("%s: %d %s %#x %d %#x", name, s.AddressFamily, s.SchedName, s.Flags&^2, s.Timeout,
			s.Netmask)) // 2 says that the kernel has it in its table
		destinations, err := h.GetDestinations(s)
		labtest.Check(t, err)
		for _, d := range destinations {
			lines = append(lines, fmt.Sprintf("%s: to %s %d: %d %d %d %d %d", name, d.Address, d.Port, d.AddressFamily,
				d.ConnectionFlags, d.Weight, d.UpperThreshold, d.LowerThreshold))
		}
	}
	slices.Sort(lines)
	return strings.Join(lines, "\n")
}

// expected is what witnessed has to say.
func (c *contents) expected() string {
	family := func(a netip.Addr) int { return map[bool]int{false: unix.AF_INET, true: unix.AF_INET6}[a.Is6()] }
	var lines []string
	for k, f := range c.services {
		protocol := map[snapshot.Protocol]int{snapshot.TCP: 6, snapshot.UDP: 17, snapshot.SCTP: 132}[k.Protocol]
		name := fmt.Sprintf("%s %d %d", k.Addr, k.Port, protocol)
		mask := map[bool]uint32{false: 0xffff_ffff, true: 128}[k.Addr.Is6()]
		lines = append(lines, fmt.Sprintf("%s: %d %s %#x %d %#x", name, family(k.Addr), f.Scheduler, f.Flags|0x5644_0000,
			f.Timeout, mask))
		for _, d := range f.dests {
			lines = append(lines, fmt.Sprintf("%s: to %s %d: %d 0 %d %d 0", name, d.Addr(), d.Port(), family(d.Addr()),
				d.Weight, d.Until))
		}
	}
	slices.Sort(lines)
	return strings.Join(lines, "\n")
}

// TestIPVSWitness has moby/ipvs read what our batches wrote, of every verb and in both families, and our statistics
// agree with it.
func TestIPVSWitness(t *testing.T) {
	withClient(t, func(v *client) error {
		have := newContents()
		write := func(what string, ops []op) {
			labtest.Check(t, v.commitAll(ops, &have))
			if got, want := witnessed(t), have.expected(); got != want {
				t.Errorf("%s: moby/ipvs reads\n%s\nwant\n%s", what, got, want)
			}
		}
		configs := []Config{{Scheduler: "rr"}, {Scheduler: "wrr"}, {Scheduler: "rr", Flags: Persistent, Timeout: 10800},
			{Scheduler: "sh", Flags: SchedPort | SchedFallback}, {Scheduler: "mh", Flags: SchedPort}, {Scheduler: "lc"}}
		var add, change, remove []op
		for i := range 60 {
			k := dataplane.Key{Addr: lab.Nth(lab.ServiceRange[i%2], i+1), Protocol: protocols[i%3], Port: uint16(80 + i)}
			add = append(add, op{verb: newService, key: k, config: configs[i%len(configs)]})
			change = append(change, op{verb: setService, key: k, config: configs[(i+1)%len(configs)]})
			for n := range 10 {
				d := Destination{AddrPort: netip.AddrPortFrom(lab.Nth(lab.PodRange[i%2], 300+n), 8080),
					Weight: []uint32{1, 0, 65535}[n%3]}
				add = append(add, op{verb: newDest, key: k, dest: d})
				switch d.Weight = uint32(n); n % 3 {
				case 0:
					d.Weight, d.Until = 0, uint32(time.Now().Unix())+3600
					change = append(change, op{verb: setDest, key: k, dest: d})
				case 1:
					change = append(change, op{verb: delDest, key: k, dest: d})
				}
			}
			if i%4 > 0 {
				remove = append(remove, op{verb: delService, key: k})
			}
		}
		write("new", add)
		write("changed", change)
		agree(t, v, &have)
		write("removed", remove)
		agree(t, v, &have)
		return nil
	})
}

// agree compares what we read, by both ways, with what was written.
func agree(t *testing.T, v *client, have *contents) {
	t.Helper()
	for _, r := range []reader{v, bulk{v}} {
		read, err := readContents(r, newContents())
		labtest.Check(t, err)
		if got, want := read.expected(), have.expected(); got != want {
			t.Errorf("%T reads\n%s\nwant\n%s", r, got, want)
		}
	}
	all, err := v.statistics()
	labtest.Check(t, err)
	counted := newContents()
	for _, s := range all {
		f := &found{Config: s.Config, dests: map[netip.AddrPort]Destination{}}
		for _, d := range s.Destinations {
			is := have.services[s.Key].dests[d.AddrPort]
			f.dests[d.AddrPort] = Destination{AddrPort: d.AddrPort, Weight: d.Weight, Until: is.Until}
		}
		counted.put(s.Key, f)
	}
	if got, want := counted.expected(), have.expected(); got != want {
		t.Errorf("the statistics are of\n%s\nwant\n%s", got, want)
	}
}

// TestIPVSStatistics64 has 64-bit statistics count what moby/ipvs counts in 32.
func TestIPVSStatistics64(t *testing.T) {
	w := newWorld(t, 2, 0, dataplane.IPVSAlways)
	w.apply(w.delta(app{number: 1, scheduling: scheduler("rr"), here: ready(0)}))
	w.count(w.Pods[1], snapshot.TCP, vip(1, lab.Families()[0]), 5)
	at := vip(1, lab.Families()[0])
	w.until("the counters follow", func() (same bool) {
		w.inside(func() error {
			ours, there, err := ReadService(dataplane.Key{Addr: at.Addr(), Protocol: snapshot.TCP, Port: at.Port()})
			if err != nil || !there {
				return fmt.Errorf("%v: %w", there, err)
			}
			h, err := ipvshandle.Open()
			if err != nil {
				return err
			}
			defer h.Close()
			theirs, err := h.Service(ipvshandle.NewService(at, unix.IPPROTO_TCP))
			if err != nil {
				return err
			}
			s := theirs.Stats
			same = ours.Connections == 5 && s.Connections == 5 && ours.PacketsIn == uint64(s.PacketsIn) &&
				ours.PacketsOut == uint64(s.PacketsOut) && ours.BytesIn == s.BytesIn && ours.BytesOut == s.BytesOut &&
				s.BytesIn > 0 && s.BytesOut > 0
			return nil
		})
		return same
	})
}

// TestIPVSReopens goes on with another handle if IPVS did not answer in time by the first.
func TestIPVSReopens(t *testing.T) {
	w := newWorld(t, 2, 0, dataplane.IPVSAlways)
	a := app{number: 1, scheduling: scheduler("rr"), here: ready(0)}
	w.apply(w.delta(a))
	w.backend.ipvs.handle.Close()
	a.here = ready(0, 1)
	w.apply(w.delta(a))
	w.wants()
	w.backend.ipvs.handle.Close()
	testkit.Eventually(t, time.Minute, "Check finds that out", func() bool { return len(w.check()) > 0 }, w.list)
	w.apply()
	w.wants()
	if found := w.check(); found != nil {
		t.Errorf("%q", found)
	}
}

// manyOps are virtual services with destinations, all new.
func manyOps(services, each int) (ops []op) {
	for i := range services {
		k := dataplane.Key{Addr: lab.Nth(lab.ServiceRange[0], i+1), Port: 80}
		ops = append(ops, op{verb: newService, key: k, config: Config{Scheduler: "rr"}})
		for n := range each {
			d := Destination{AddrPort: netip.AddrPortFrom(lab.Nth(lab.PodRange[0], 300+n), 8080), Weight: 1}
			ops = append(ops, op{verb: newDest, key: k, dest: d})
		}
	}
	return ops
}

func removals(c *contents) (ops []op) {
	for k := range c.services {
		ops = append(ops, op{verb: delService, key: k})
	}
	return ops
}

// writeOne writes an op as moby/ipvs does.
func (v *client) writeOne(o op) error {
	return v.handle.Do(func(h *ipvs.Handle) error {
		s, d := o.words()
		if d != nil {
			return h.NewDestination(s, d)
		}
		return h.NewService(s)
	})
}

// BenchmarkIPVSWrite writes 1,000 virtual services with 10 destinations each: in batches, and by moby/ipvs.
func BenchmarkIPVSWrite(b *testing.B) {
	ops := manyOps(1000, 10)
	for _, by := range []string{"batch", "handle"} {
		b.Run(by, func(b *testing.B) {
			b.ReportAllocs()
			withClient(b, func(v *client) error {
				for b.Loop() {
					c := newContents()
					if by == "batch" {
						labtest.Check(b, v.commitAll(ops, &c))
					} else {
						for _, o := range ops {
							labtest.Check(b, v.writeOne(o))
							c.apply(o)
						}
					}
					b.StopTimer()
					labtest.Check(b, v.commitAll(removals(&c), &c))
					b.StartTimer()
				}
				b.ReportMetric(float64(b.Elapsed().Microseconds())/float64(b.N*len(ops)), "us/object")
				return nil
			})
		})
	}
}

func everything(r reader) error {
	_, err := readContents(r, newContents())
	return err
}

// BenchmarkIPVSRead reads the same back: the destinations of one virtual service, as each transaction does, by
// moby/ipvs and by the reader of statistics; and all of them.
func BenchmarkIPVSRead(b *testing.B) {
	for _, read := range []struct {
		name string
		f    func(*client, dataplane.Key) error
	}{
		{"one, handle", func(v *client, k dataplane.Key) error {
			l, _, err := v.service(k)
			if err != nil {
				return err
			}
			_, err = fill(v, l)
			return err
		}},
		{"one, socket", func(v *client, k dataplane.Key) error {
			if _, err := v.Get(v.request(cmdGetService, 0, named(k))); err != nil {
				return err
			}
			_, err := v.destinationStatistics(k)
			return err
		}},
		{"all, handle", func(v *client, _ dataplane.Key) error { return everything(v) }},
		{"all, socket", func(v *client, _ dataplane.Key) error { return everything(bulk{v}) }},
	} {
		b.Run(read.name, func(b *testing.B) {
			b.ReportAllocs()
			withClient(b, func(v *client) error {
				c := newContents()
				if err := v.commitAll(manyOps(1000, 10), &c); err != nil {
					return err
				}
				keys := slices.Collect(maps.Keys(c.services))
				for n := 0; b.Loop(); n++ {
					if err := read.f(v, keys[n%len(keys)]); err != nil {
						return err
					}
				}
				return nil
			})
		})
	}
}
