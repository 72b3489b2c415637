package blackbox

import (
	"encoding/binary"
	"runtime"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/verdict-proxy/verdict/internal/lab/labtest"
)

// TestFlood: SYNs from as many connections as a busy node has in seconds do not grow the recorder's memory beyond its
// rings, and each is recorded or counted as lost.
func TestFlood(t *testing.T) {
	const syns = 200_000
	r := newRig(t)
	r.watch(r.client, r.Node)
	r.rules(r.Node, chain("prerouting", "ip daddr 10.96.0.0/16 drop"))
	flood(t, r, 1000) // so that all is allocated once
	memory := func() uint64 {
		runtime.GC()
		var m runtime.MemStats
		runtime.ReadMemStats(&m)
		return m.HeapAlloc
	}
	before := memory()
	flood(t, r, syns)
	seen := func() uint64 { // what left the client's host; some may not come to the node
		lost := uint64(0)
		r.box.spaces[0].counts.each(func(c *count) {
			if c.counter == packetsLost {
				lost += c.by
			}
		})
		return r.box.spaces[0].packets.total() + lost
	}
	for end := time.Now().Add(time.Minute); seen() < syns && time.Now().Before(end); {
		time.Sleep(captureWindow)
	}
	c := r.box.recorded()
	if grown := int64(memory()) - int64(before); seen() < syns || grown > 4<<20 {
		t.Errorf("%+v of %d SYNs; memory grew by %d bytes", c, syns, grown)
	}
	t.Logf("%+v", c)
}

// recorded is how much was recorded, and how much there was no room for.
type recorded struct{ packets, flows, changes, commits, packetsLost, eventsLost uint64 }

// recorded adds up all namespaces.
func (b *Box) recorded() (r recorded) {
	b.mu.Lock()
	defer b.mu.Unlock()
	for _, s := range b.spaces {
		r.packets += s.packets.total()
		r.flows += s.flows.total()
		r.changes += s.changes.total()
		r.commits += s.commits.total()
		s.counts.each(func(n *count) {
			switch n.counter {
			case packetsLost:
				r.packetsLost += n.by
			case eventsLost:
				r.eventsLost += n.by
			}
		})
	}
	return r
}

// flood sends SYNs from the client's host by a raw socket, each from another port and address.
func flood(t *testing.T, r *rig, count int) {
	t.Helper()
	var fd int
	labtest.Check(t, r.client.Do(func() (err error) {
		fd, err = unix.Socket(unix.AF_INET, unix.SOCK_RAW|unix.SOCK_CLOEXEC, unix.IPPROTO_RAW)
		return err
	}))
	defer unix.Close(fd)
	to := r.vip.Addr().As4()
	b := make([]byte, 40)
	b[0], b[3], b[8], b[9] = 0x45, 40, 64, unix.IPPROTO_TCP
	copy(b[16:], to[:])
	b[32], b[33] = 5<<4, syn
	binary.BigEndian.PutUint16(b[22:], servicePort)
	for i := range count {
		copy(b[12:], []byte{172, 16, byte(i >> 24), byte(i >> 16)})
		binary.BigEndian.PutUint16(b[20:], uint16(i))
		binary.BigEndian.PutUint32(b[24:], uint32(i))
		labtest.Check(t, unix.Sendto(fd, b, 0, &unix.SockaddrInet4{Addr: to}))
	}
}
