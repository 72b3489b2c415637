package health

import (
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/netip"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/verdict-proxy/verdict/sync/dataplane"
	"github.com/verdict-proxy/verdict/sync/reconcile"
	"github.com/verdict-proxy/verdict/sync/snapshot"
)

// TestRoom: whoever has most connections loses the oldest of them.
func TestRoom(t *testing.T) {
	r := newConnLimit(3)
	var closed atomic.Int32
	enter := func(host string) *trackedConn { return r.enter(&fakeConn{host: host, closed: &closed}) }
	patient := enter("10.0.0.1:1")
	first := enter("10.0.0.2:1")
	enter("10.0.0.2:2")
	for port := range 100 {
		enter(fmt.Sprintf("10.0.0.2:%d", 3+port))
	}
	if n := closed.Load(); n != 100 || len(r.open) != 3 || r.open[0] != patient {
		t.Errorf("%d are closed, %d are open", n, len(r.open))
	}
	// Who has his answer goes before who has not.
	waits, answered := r.open[1], r.open[2]
	recordState(answered, http.StateIdle)
	enter("10.0.0.2:200")
	if r.open[1] != waits || r.open[2] == answered {
		t.Error("a request is cut off")
	}
	first.Close() // again
	patient.Close()
	for _, g := range append([]*trackedConn{}, r.open...) {
		g.Close()
	}
	if len(r.open) != 0 || len(r.hosts) != 0 {
		t.Errorf("%v, %v are left", r.open, r.hosts)
	}
}

type fakeConn struct {
	net.Conn
	host   string
	closed *atomic.Int32
}

func (f *fakeConn) Close() error         { f.closed.Add(1); return nil }
func (f *fakeConn) RemoteAddr() net.Addr { return address(f.host) }

type address string

func (a address) Network() string { return "tcp" }
func (a address) String() string  { return string(a) }

// TestTooManyNodePorts: they take no more descriptors than they may. When there is room again, the others get it.
func TestTooManyNodePorts(t *testing.T) { synctest.Test(t, tooManyNodePorts) }

func tooManyNodePorts(t *testing.T) {
	var failed []error
	sockets := &fakeSockets{open: map[string]*fakeListener{}, taken: map[string]bool{}}
	n := &NodePorts{Healthy: func() bool { return true }, Listen: sockets.listen,
		Config: dataplane.Config{NodePortAddresses: []netip.Prefix{netip.MustParsePrefix("0.0.0.0/0")}},
		Limits: Limits{Ports: 2, PortConnections: 4}, Report: func(e *ListenError) { failed = append(failed, e) }}
	_, stop := running(t, n)
	s := snapshot.New()
	var names []snapshot.Name
	for i := range 3 {
		name := snapshot.Name{Namespace: "shop", Name: fmt.Sprint("web-", i)}
		names = append(names, name)
		s.Services[name] = &snapshot.Service{Name: name, HealthCheckNodePort: uint16(30000 + i),
			ClusterIPs: []netip.Addr{netip.AddrFrom4([4]byte{10, 96, 0, byte(i)})}}
	}
	n.InSync(reconcile.InSync{Snapshot: s, Change: snapshot.Change{Globals: true, Services: names}})
	open := strings.Split(sockets.list(), ", ")
	if len(failed) != 1 || !errors.Is(failed[0], errTooMany) || len(open) != 2 {
		t.Errorf("open are %q, failed %v", open, failed)
	}
	for _, name := range names {
		if strings.HasSuffix(open[0], fmt.Sprint(s.Services[name].HealthCheckNodePort)) {
			delete(s.Services, name)
		}
	}
	n.InSync(reconcile.InSync{Snapshot: s, Change: snapshot.Change{Services: names}})
	time.Sleep(retryMost)
	if now := strings.Split(sockets.list(), ", "); len(now) != 2 || now[0] == open[0] {
		t.Errorf("open are %q, were %q", now, open)
	}
	stop()
}
