package health

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"net"
	"net/http"
	"net/netip"
	"slices"
	"strconv"
	"sync"
	"time"

	"github.com/verdict-proxy/verdict/internal/system/ipfamily"
	"github.com/verdict-proxy/verdict/internal/system/wake"
	"github.com/verdict-proxy/verdict/sync/dataplane"
	"github.com/verdict-proxy/verdict/sync/reconcile"
	"github.com/verdict-proxy/verdict/sync/snapshot"
)

// NodePorts serves the health check node ports of Services: it reports whether this node has endpoints. Load balancers
// use it to find nodes for a Service with externalTrafficPolicy Local.
type NodePorts struct {
	// Config decides which endpoints are local, and where node ports answer.
	Config dataplane.Config
	// Healthy reports whether the proxy is healthy.
	Healthy func() bool
	// Report is called, once for each cause, if a port cannot be opened. That is retried.
	Report func(*ListenError)
	// Listen, if not nil, is used instead of net.Listen.
	Listen func(network, addr string) (net.Listener, error)
	// Limits bound sockets and connections; zeros mean those of DefaultLimits.
	Limits Limits

	mu sync.Mutex
	// checks are the Services with such a port. dirty are the checks that Run must look at, including removed ones.
	checks map[snapshot.Name]*check
	dirty  map[*check]struct{}
	// byPort lists the checks of a port. The oldest Service is first, and gets the port.
	byPort map[uint16][]*check
	// addrs are the addresses to listen at; known is true if they match Config.
	addrs []netip.Addr
	known bool
	// failedSockets are sockets that failed by themselves.
	failedSockets []socket
	wake          chan struct{}
	// totals counts the open ports, and those that cannot be opened.
	totals [2]int
}

// ListenError reports that a Service's health check node port cannot be opened.
type ListenError struct {
	Service snapshot.Name
	Addr    netip.AddrPort
	Err     error
}

func (e *ListenError) Error() string {
	return fmt.Sprintf(
		"health check node port of Service %s: %v; load balancers assume that it has no endpoint on this node", e.Service,
		e.Err)
}

func (e *ListenError) Unwrap() error { return e.Err }

// check is one Service's port. NodePorts.mu guards the fields that others read.
type check struct {
	name snapshot.Name
	age  snapshot.Age
	port uint16 // 0 if it is gone
	// serves tells for which families the Service has a cluster IP, and ready how many endpoints are on this node: IPv4,
	// IPv6.
	serves ipfamily.Per[bool]
	ready  ipfamily.Per[int]

	// Only Run's goroutine uses the rest: the open sockets, and the reported failures.
	servers map[netip.AddrPort]*http.Server
	failed  map[netip.AddrPort]string
	// counted is what the totals include of both.
	counted ipfamily.Per[int]
}

type socket struct {
	check  *check
	at     netip.AddrPort
	server *http.Server
}

// errContested means that another Service has the port.
var errContested = errors.New("an older Service has the same port")

// Opening a port is retried after retryFirst, then after twice as long each time, up to retryMost.
const (
	retryFirst = time.Second
	retryMost  = 30 * time.Second
)

// Listener connects the NodePorts to a loop.
func (n *NodePorts) Listener() reconcile.Listener {
	return reconcile.Listener{InSync: n.InSync}
}

// InSync updates the checks to what is programmed. Its cost depends on the change, and it opens no port itself.
func (n *NodePorts) InSync(in reconcile.InSync) {
	s, change := in.Snapshot, in.Change
	n.mu.Lock()
	defer n.mu.Unlock()
	n.init()
	if change.Globals || !n.known {
		n.known = true
		if addrs := dataplane.HealthCheckAddrs(n.Config, s); !slices.Equal(addrs, n.addrs) {
			n.addrs = addrs
			for _, c := range n.checks {
				n.markDirty(c)
			}
		}
	}
	for _, name := range change.Services {
		n.update(&in, name)
	}
}

// SetConfig replaces the Config; addresses follow at the next InSync.
func (n *NodePorts) SetConfig(c dataplane.Config) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.Config, n.known = c, false
}

func (n *NodePorts) init() {
	if n.checks == nil {
		n.checks, n.dirty, n.wake = map[snapshot.Name]*check{}, map[*check]struct{}{}, make(chan struct{}, 1)
		n.byPort = map[uint16][]*check{}
	}
}

// markDirty makes Run look at a check.
func (n *NodePorts) markDirty(c *check) {
	n.dirty[c] = struct{}{}
	wake.Up(n.wake)
}

// update updates one Service.
func (n *NodePorts) update(in *reconcile.InSync, name snapshot.Name) {
	c, svc := n.checks[name], in.Snapshot.Services[name]
	if svc == nil || svc.HealthCheckNodePort == 0 {
		if c != nil {
			n.removeCheck(c)
			c.port = 0
			delete(n.checks, name)
			n.markDirty(c)
		}
		return
	}
	if c == nil {
		c = &check{name: name, servers: map[netip.AddrPort]*http.Server{}, failed: map[netip.AddrPort]string{}}
		n.checks[name] = c
	}
	var serves ipfamily.Per[bool]
	for _, a := range svc.ClusterIPs {
		serves[ipfamily.Of(a)] = true
	}
	if c.port != svc.HealthCheckNodePort || c.serves != serves || c.age != svc.Age {
		n.removeCheck(c)
		c.port, c.serves, c.age = svc.HealthCheckNodePort, serves, svc.Age
		n.addCheck(c)
		n.markDirty(c)
	}
	c.ready = ipfamily.Per[int]{}
	if !in.TooManyBackends(name) { // else it has none at all
		c.ready[0], c.ready[1] = dataplane.LocalReady(n.Config.NodeName, in.Snapshot, name)
	}
}

// addCheck adds a check to those of its port, and removeCheck removes it. Both make Run look at the others, too.
func (n *NodePorts) addCheck(c *check) {
	list := n.byPort[c.port]
	i, _ := slices.BinarySearchFunc(list, c, func(a, b *check) int {
		return cmp.Or(a.age.Compare(b.age), a.name.Compare(b.name))
	})
	n.byPort[c.port] = slices.Insert(list, i, c)
	n.lookAt(c.port)
}

func (n *NodePorts) removeCheck(c *check) {
	if c.port == 0 {
		return
	}
	n.byPort[c.port] = slices.DeleteFunc(n.byPort[c.port], func(o *check) bool { return o == c })
	if len(n.byPort[c.port]) == 0 {
		delete(n.byPort, c.port)
	}
	n.lookAt(c.port)
}

func (n *NodePorts) lookAt(port uint16) {
	for _, c := range n.byPort[port] {
		n.markDirty(c)
	}
}

// Run opens and closes ports until ctx is done, then closes all.
func (n *NodePorts) Run(ctx context.Context) error {
	n.mu.Lock()
	n.init()
	n.Limits.Ports = cmp.Or(n.Limits.Ports, DefaultLimits().Ports)
	n.mu.Unlock()
	room := newConnLimit(cmp.Or(n.Limits.PortConnections, DefaultLimits().PortConnections))
	r := &run{NodePorts: n, room: room, open: map[*check]struct{}{}, failing: map[*check]struct{}{}}
	defer r.close()
	wait := retryFirst
	retry := time.NewTimer(0)
	defer retry.Stop()
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-n.wake:
			wait = retryFirst
		case <-retry.C:
		}
		r.sync()
		if len(r.failing) == 0 {
			retry.Stop()
			continue
		}
		retry.Reset(wait)
		wait = min(2*wait, retryMost)
	}
}

// run is the state of Run's goroutine: the checks with open sockets, and those with failed ones.
type run struct {
	*NodePorts
	open, failing map[*check]struct{}
	// sockets counts the open sockets, and room limits their connections.
	sockets int
	room    *connLimit
}

// sync opens and closes sockets. It closes first, because a port may move from one Service to another.
func (r *run) sync() {
	want := r.take()
	for c, t := range want {
		r.sockets -= c.closeBut(t)
	}
	for c, t := range want {
		for _, a := range t.at {
			if t.contested {
				r.fail(c, a, errContested)
			} else {
				r.listen(c, a)
			}
		}
		keep(r.open, c, len(c.servers) > 0)
		keep(r.failing, c, len(c.failed) > 0)
		r.count(c)
	}
}

func keep(set map[*check]struct{}, c *check, in bool) {
	if in {
		set[c] = struct{}{}
	} else {
		delete(set, c)
	}
}

// target lists the addresses of a check. Contested is true if another Service has the port.
type target struct {
	at        []netip.AddrPort
	contested bool
}

// take returns the dirty checks and their targets.
func (r *run) take() map[*check]target {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, l := range r.failedSockets {
		if l.check.servers[l.at] == l.server {
			delete(l.check.servers, l.at)
			r.sockets--
		}
	}
	r.failedSockets = nil
	want := map[*check]target{}
	for _, checks := range []map[*check]struct{}{r.dirty, r.failing} {
		for c := range checks {
			want[c] = target{r.wanted(c), c.port != 0 && r.byPort[c.port][0] != c}
		}
	}
	clear(r.dirty)
	return want
}

// wanted returns the addresses of a check.
func (n *NodePorts) wanted(c *check) (out []netip.AddrPort) {
	for _, a := range n.addrs {
		if c.port != 0 && c.serves[ipfamily.Of(a)] {
			out = append(out, netip.AddrPortFrom(a, c.port))
		}
	}
	return out
}

// closeBut closes the unwanted sockets, and returns how many there were.
func (c *check) closeBut(t target) (closed int) {
	for at, srv := range c.servers {
		if t.contested || !slices.Contains(t.at, at) {
			srv.Close()
			delete(c.servers, at)
			closed++
		}
	}
	maps.DeleteFunc(c.failed, func(at netip.AddrPort, _ string) bool { return !slices.Contains(t.at, at) })
	return closed
}

// errTooMany protects the rest of the proxy from the ports of too many Services.
var errTooMany = errors.New("too many health check node ports for this process (RLIMIT_NOFILE)")

// listen opens one port, unless it is open.
func (r *run) listen(c *check, at netip.AddrPort) {
	if c.servers[at] != nil {
		return
	}
	network, listen := "tcp4", r.Listen
	if at.Addr().Is6() {
		network = "tcp6" // so that :: is not 0.0.0.0 too, which has a count of its own
	}
	if listen == nil {
		listen = net.Listen
	}
	var l net.Listener
	err := errTooMany
	if r.sockets < r.Limits.Ports {
		l, err = listen(network, at.String())
	}
	if err != nil {
		r.fail(c, at, err)
		return
	}
	delete(c.failed, at)
	family := ipfamily.Of(at.Addr())
	srv := newHTTPServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { r.answer(w, c, family) }))
	c.servers[at] = srv
	r.sockets++
	go func() {
		if err := srv.Serve(r.room.listen(l)); !errors.Is(err, http.ErrServerClosed) {
			r.report(c, at, err)
			r.mu.Lock()
			defer r.mu.Unlock()
			r.failedSockets = append(r.failedSockets, socket{c, at, srv})
			r.markDirty(c)
		}
	}()
}

// fail records that a port cannot be opened, and reports a new cause.
func (r *run) fail(c *check, at netip.AddrPort, err error) {
	if c.failed[at] != err.Error() {
		r.report(c, at, err)
	}
	c.failed[at] = err.Error()
}

func (r *run) report(c *check, at netip.AddrPort, err error) {
	if r.Report != nil {
		r.Report(&ListenError{c.name, at, err})
	}
}

// count updates the totals for one check.
func (r *run) count(c *check) {
	now := [2]int{len(c.servers), len(c.failed)}
	r.mu.Lock()
	defer r.mu.Unlock()
	r.totals[0] += now[0] - c.counted[0]
	r.totals[1] += now[1] - c.counted[1]
	c.counted = now
}

func (r *run) close() {
	for c := range r.open {
		c.closeBut(target{})
	}
}

// Ports returns how many ports are open, and how many cannot be opened.
func (n *NodePorts) Ports() (open, failing int) {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.totals[0], n.totals[1]
}

// answer tells how many endpoints there are, in kube-proxy's words. The Service's policies make no difference to that,
// nor does what becomes of the node.
func (n *NodePorts) answer(w http.ResponseWriter, c *check, family ipfamily.Family) {
	healthy := n.Healthy()
	n.mu.Lock()
	count := c.ready[family]
	if c.port == 0 { // it is about to be closed
		count = 0
	}
	n.mu.Unlock()
	code := http.StatusServiceUnavailable
	if count > 0 && healthy {
		code = http.StatusOK
	}
	w.Header().Set("X-Load-Balancing-Endpoint-Weight", strconv.Itoa(count))
	writeJSON(w, code, fmt.Appendf(
		nil,
		"{\n\t\"service\": {\n\t\t\"namespace\": %q,\n\t\t\"name\": %q"+
			"\n\t},\n\t\"localEndpoints\": %d,\n\t\"serviceProxyHealthy\": %v\n}",
		c.name.Namespace,
		c.name.Name,
		count,
		healthy,
	))
}
