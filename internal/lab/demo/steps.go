package demo

import (
	"context"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/verdict-proxy/verdict/internal/lab"
	"github.com/verdict-proxy/verdict/internal/system/ipfamily"
	"github.com/verdict-proxy/verdict/internal/system/terminal"
	"github.com/verdict-proxy/verdict/internal/system/units"
	"github.com/verdict-proxy/verdict/nft"
	"github.com/verdict-proxy/verdict/sync/snapshot"
)

// topology draws the cluster.
func (d *demo) topology() {
	c := d.cluster
	name := func(h *lab.Host) string { return fmt.Sprintf("%-7s %-12s", h.Name, h.IP4) }
	families := "IPv4; this kernel has no IPv6"
	if len(lab.Families()) > 1 {
		families = "IPv4 and IPv6"
	}
	d.Line("%s in network namespaces, which vanish with the demo.\nAll of it speaks %s.\n",
		d.Paint(terminal.Bold, "A cluster"), families)
	d.Line("   %s──┐", name(d.client))
	node := d.Paint(terminal.Bold, c.Node.Name) + " " + c.Node.IP4.String()
	d.Line("   %s──┼── %s ──┬── %s on %s", name(d.pods[0]), node, name(d.pods[2]), c.Node2.Name)
	d.Line("   %s──┘   runs the proxy    └── %s %s", name(d.pods[1]), c.Outside.Name, c.Outside.IP4)
}

// showServices prints the Services and waits until the kernel carries them.
func (d *demo) showServices(ctx context.Context) error {
	d.heading("Five Services, as manifests in a directory",
		`The proxy reads them as "verdict run --from DIRECTORY" does.`)
	c := terminal.Columns{8, 12, 11, 15, 19}
	d.header(c, "Service", "cluster IP", "node port", "load balancer", "endpoints")
	for _, s := range d.services() {
		port, balancer, pods, note := "-", "-", "none", ""
		if s.NodePort != 0 {
			port = fmt.Sprint(s.NodePort)
		}
		if s.LoadBalancer {
			balancer = s.loadBalancer(ipfamily.IPv4).Addr().String()
		}
		if len(s.pods) > 0 {
			pods = s.names()
		}
		switch s {
		case d.sticky:
			note = "affinity"
		case d.local:
			note = "Local"
		case d.dns:
			note = "UDP"
		}
		d.Line("     %s", c.Row(s.Name, s.clusterIP(ipfamily.IPv4).Addr().String(), port, balancer, pods,
			d.Paint(terminal.Dim, note)))
	}
	d.Line("")
	return d.await(ctx)
}

// byFamily gives the names of columns: these, and one for each family.
func byFamily(names ...string) []string {
	for _, f := range lab.Families() {
		names = append(names, f.String())
	}
	return names
}

// visit is a way to a Service: who goes it, where to, and whom the endpoint must see.
type visit struct {
	from  *lab.Host
	place string
	to    func(ipfamily.Family) netip.AddrPort // invalid where the family has no such way
	saw   string
	// answer is the pod that must answer; nil means any.
	answer *lab.Host
}

// showReach goes all ways to a Service.
func (d *demo) showReach(ctx context.Context) error {
	d.heading("web answers whoever asks, at each of its addresses",
		"The addresses of IPv6 are alike, as [fd00:10:96::a]:80 is to 10.96.0.10:80.")
	node, outside := d.cluster.Node, d.cluster.Outside
	nodePort := func(f ipfamily.Family) netip.AddrPort { return d.web.nodePort(d, f) }
	loopback := func(f ipfamily.Family) netip.AddrPort {
		if f == ipfamily.IPv6 {
			return netip.AddrPort{}
		}
		return netip.AddrPortFrom(netip.AddrFrom4([4]byte{127, 0, 0, 1}), d.web.NodePort)
	}
	c := terminal.Columns{9, 17, 20, 10, 8, 8}
	d.header(c, byFamily("from", "to", "address", "seen as")...)
	for _, v := range []visit{
		{d.client, "cluster IP", d.web.clusterIP, "itself", nil},
		{d.client, "node port", nodePort, "the node", nil},
		{d.client, "load balancer", d.web.loadBalancer, "the node", nil},
		{outside, "node port", nodePort, "the node", nil},
		{outside, "load balancer", d.web.loadBalancer, "the node", nil},
		{node, "cluster IP", d.web.clusterIP, "the node", nil},
		{node, "node port", loopback, "the node", nil},
		{d.pods[0], "its own Service", d.web.clusterIP, "the node", d.pods[0]},
	} {
		if err := d.goOn(ctx); err != nil {
			return err
		}
		d.visit(c, v)
	}
	return nil
}

func (d *demo) visit(c terminal.Columns, v visit) {
	cells := []string{v.from.Name, v.place, v.to(ipfamily.IPv4).String(), v.saw}
	var instead []string
	for _, f := range lab.Families() {
		to := v.to(f)
		if !to.IsValid() {
			cells = append(cells, "-")
			continue
		}
		r := d.dial(v.from, snapshot.TCP, to)
		// The chance that the one pod of two is never met is none.
		for n := 0; n < 100 && v.answer != nil && r.Outcome == lab.Answered && r.Endpoint != v.answer.Name; n++ {
			r = d.dial(v.from, snapshot.TCP, to)
		}
		answer := r.Outcome.String()
		switch {
		case r.Outcome == lab.Answered:
			answer = r.Endpoint
			if v.answer != nil && r.Endpoint != v.answer.Name || d.saw(v.from, r) != v.saw {
				instead = append(instead, fmt.Sprintf("%s: %s", to, r))
			}
		default:
			instead = append(instead, fmt.Sprintf("%s: %s", to, r))
		}
		cells = append(cells, answer)
	}
	d.expect(instead == nil, c.Row(cells...), instead...)
}

// dial waits for an answer. Who asks by a datagram must do so once more if there is none.
func (d *demo) dial(from *lab.Host, p snapshot.Protocol, to netip.AddrPort) lab.Result {
	if p != snapshot.UDP {
		return from.Dial(p, to, lab.Options{Timeout: demoPatience})
	}
	r := from.Dial(p, to, lab.Options{Timeout: demoPatience / 2})
	if r.Outcome == lab.TimedOut {
		r = from.Dial(p, to, lab.Options{Timeout: demoPatience / 2})
	}
	return r
}

// tally is what became of several connections.
type tally struct {
	answers map[string]int // by the pod that answered
	saw     map[string]int // by whom the pods saw
	asked   int
	failed  []string
}

// maxFailures is how many of several connections may fail before it is clear that the rest will too.
const maxFailures = 3

func (t *tally) add(r lab.Result, saw string) {
	if t.answers == nil {
		t.answers, t.saw = map[string]int{}, map[string]int{}
	}
	t.asked++
	if r.Outcome != lab.Answered {
		t.failed = append(t.failed, r.String())
		return
	}
	t.answers[r.Endpoint]++
	t.saw[saw]++
}

// String gives "20 × pod-1" or "12 × pod-1, 8 × pod-3".
func (t *tally) String() string {
	var parts []string
	for _, name := range slices.Sorted(maps.Keys(t.answers)) {
		parts = append(parts, fmt.Sprintf("%d × %s", t.answers[name], name))
	}
	if len(t.failed) > 0 {
		parts = append(parts, fmt.Sprintf("%d × %s", len(t.failed), t.failed[0]))
	}
	return strings.Join(parts, ", ")
}

// fair says whether exactly these pods answered, each between half and one and a half of its share. Half a share is
// five standard deviations for 200 connections to three pods, and more for more connections or fewer pods.
func (t *tally) fair(pods []*lab.Host) bool {
	for _, pod := range pods {
		if n := 2 * t.answers[pod.Name] * len(pods); n < t.asked || n > 3*t.asked {
			return false
		}
	}
	return len(t.failed) == 0 && len(t.answers) == len(pods)
}

// ask opens n connections, one after the other. The error says what keeps the demo from going on.
func (d *demo) ask(ctx context.Context, n int, from *lab.Host, p snapshot.Protocol, to netip.AddrPort) (*tally, error) {
	t := &tally{}
	for t.asked < n && len(t.failed) < maxFailures {
		if err := d.goOn(ctx); err != nil {
			return nil, err
		}
		r := d.dial(from, p, to)
		t.add(r, d.saw(from, r))
	}
	return t, nil
}

// showBalance counts who answers, and compares it with what the kernel has counted.
func (d *demo) showBalance(ctx context.Context) error {
	const n = 300
	d.heading(fmt.Sprintf("Who answers how often: client opens %d connections to web's cluster IP", n),
		"An endpoint is an element of a map, and counts the connections sent to it.")
	var asked []*tally
	var counted []map[string]int
	for _, f := range lab.Families() {
		before, err := d.counters(f)
		if err != nil {
			return err
		}
		t, err := d.ask(ctx, n, d.client, snapshot.TCP, d.web.clusterIP(f))
		if err != nil {
			return err
		}
		asked = append(asked, t)
		after, err := d.counters(f)
		if err != nil {
			return err
		}
		for name := range after {
			after[name] -= before[name]
		}
		counted = append(counted, after)
	}
	c := terminal.Columns{9, 24, 24}
	d.header(c, append(byFamily(""), "in the kernel")...)
	same := true
	for _, pod := range d.web.pods {
		row, kernel := []string{pod.Name}, []string{}
		for i := range asked {
			row = append(row, d.bar(asked[i].answers[pod.Name], n, 24))
			kernel = append(kernel, fmt.Sprint(counted[i][pod.Name]))
			same = same && asked[i].answers[pod.Name] == counted[i][pod.Name]
		}
		d.Line("     %s", c.Row(append(row, strings.Join(kernel, " and "))...))
	}
	for i, f := range lab.Families() {
		d.expect(asked[i].fair(d.web.pods), fmt.Sprintf("%s: all were answered, by each pod about as often", f),
			asked[i].String())
	}
	d.expect(same, "the kernel has counted the same", fmt.Sprint(counted))
	return nil
}

// counters gives how often each pod was chosen, at all of web's frontends of a family, as the elements count it.
func (d *demo) counters(f ipfamily.Family) (map[string]int, error) {
	family := ipfamily.IPv4
	if f == ipfamily.IPv6 {
		family = ipfamily.IPv6
	}
	elements, err := d.proxy.reader.Elements(family, nft.Endpoints)
	if err != nil {
		return nil, err
	}
	counts := map[string]int{}
	for i := range elements {
		e := &elements[i]
		// 1234:5678 . tcp . 0 counter packets 7 bytes 420 comment "demo/web" : 10.244.1.10 . 8080
		if e.Service() != "demo/"+d.web.Name {
			continue
		}
		for _, pod := range d.pods {
			if e.Target().Addr() == pod.IP(f) {
				counts[pod.Name] += int(e.Packets)
			}
		}
	}
	return counts, nil
}

// showAffinity has clients come back.
func (d *demo) showAffinity(ctx context.Context) error {
	const n = 20
	d.heading("sticky has three endpoints, but each client stays with the one it met first",
		"By sessionAffinity: ClientIP. Its IPv4 and its IPv6 address are two clients.")
	c := terminal.Columns{9, 17, 20, 20}
	d.header(c, byFamily("from", "to")...)
	nodePort := func(f ipfamily.Family) netip.AddrPort { return d.sticky.nodePort(d, f) }
	for _, v := range []visit{
		{from: d.client, place: "cluster IP", to: d.sticky.clusterIP},
		{from: d.cluster.Node2, place: "node port", to: nodePort},
		{from: d.cluster.Outside, place: "node port", to: nodePort},
	} {
		row := []string{v.from.Name, v.place}
		ok := true
		for _, f := range lab.Families() {
			t, err := d.ask(ctx, n, v.from, snapshot.TCP, v.to(f))
			if err != nil {
				return err
			}
			row = append(row, t.String())
			ok = ok && len(t.answers) == 1 && len(t.failed) == 0
		}
		d.expect(ok, c.Row(row...))
	}
	return nil
}

// showLocal shows who answers clients from outside, and whom they see, under externalTrafficPolicy Local.
func (d *demo) showLocal(ctx context.Context) error {
	const n = 40
	d.heading("local keeps the address of its clients",
		"By externalTrafficPolicy: Local, only endpoints on the node that they came to",
		"answer clients of its load balancer. Pods may be answered by all endpoints.")
	c := terminal.Columns{9, 21, 23, 23}
	d.header(c, byFamily("from", "seen as")...)
	for _, v := range []struct {
		from *lab.Host
		pods []*lab.Host
	}{
		{d.cluster.Outside, d.pods[:1]},
		{d.client, d.local.pods},
	} {
		row := []string{v.from.Name, fmt.Sprintf("itself, %s", v.from.IP4)}
		var instead []string
		for _, f := range lab.Families() {
			t, err := d.ask(ctx, n, v.from, snapshot.TCP, d.local.loadBalancer(f))
			if err != nil {
				return err
			}
			row = append(row, t.String())
			// That one of two is never met in 40 has a chance of one in 10^12.
			if len(t.failed) > 0 || t.saw["itself"] != n || len(t.answers) != len(v.pods) || t.answers[v.pods[0].Name] == 0 {
				instead = append(instead, fmt.Sprintf("%s: %s, seen as %v", f, t, t.saw))
			}
		}
		d.expect(instead == nil, c.Row(row...), instead...)
	}
	return nil
}

// showDatagrams asks over UDP.
func (d *demo) showDatagrams(ctx context.Context) error {
	const n = 200
	d.heading(fmt.Sprintf("dns answers %d questions over UDP, each from a port of its own", n))
	c := terminal.Columns{9, 13, 25, 25}
	d.header(c, byFamily("from", "to")...)
	row := []string{d.client.Name, "cluster IP"}
	ok := true
	for _, f := range lab.Families() {
		t, err := d.ask(ctx, n, d.client, snapshot.UDP, d.dns.clusterIP(f))
		if err != nil {
			return err
		}
		row = append(row, t.String())
		ok = ok && t.fair(d.dns.pods)
	}
	d.expect(ok, c.Row(row...))
	return nil
}

// showNoAnswer asks where nobody answers.
func (d *demo) showNoAnswer(ctx context.Context) error {
	d.heading("Where nobody can answer, clients are told at once",
		"Only addresses that no Service has are silent.")
	unused := func(f ipfamily.Family) netip.AddrPort { return netip.AddrPortFrom(d.web.clusterIP(f).Addr(), 81) }
	nobody := (&demoService{number: 200}).clusterIP
	c := terminal.Columns{9, 33, 17, 17}
	d.header(c, byFamily("from", "to")...)
	for _, v := range []struct {
		from  *lab.Host
		place string
		to    func(ipfamily.Family) netip.AddrPort
		want  lab.Outcome
	}{
		{d.client, "empty, without an endpoint", d.empty.clusterIP, lab.Refused},
		{d.cluster.Node, "empty, without an endpoint", d.empty.clusterIP, lab.Refused},
		{d.client, "web, at a port it does not have", unused, lab.Refused},
		{d.client, "an address no Service has", nobody, lab.TimedOut},
	} {
		if err := d.goOn(ctx); err != nil {
			return err
		}
		patience := demoPatience
		if v.want == lab.TimedOut {
			patience = demoSilence
		}
		row := []string{v.from.Name, v.place}
		var instead []string
		for _, f := range lab.Families() {
			r := v.from.Dial(snapshot.TCP, v.to(f), lab.Options{Timeout: patience})
			switch {
			case r.Outcome != v.want:
				instead = append(instead, fmt.Sprintf("%s: %s", v.to(f), r))
				row = append(row, r.Outcome.String())
			case r.Outcome == lab.TimedOut:
				row = append(row, "silence")
			default:
				row = append(row, fmt.Sprintf("%s, %s", r.Outcome, units.Brief(r.Latency)))
			}
		}
		d.expect(instead == nil, c.Row(row...), instead...)
	}
	return nil
}

// load is clients that open connections without a pause.
type load struct {
	// stage is noted by each connection when it begins.
	stage    atomic.Int32
	attempts chan attempt
	cancel   context.CancelFunc

	// stages are what became of the connections, by the stage they began in; only for the goroutine that receives.
	stages map[int32]*tally
}

// attempt is one connection of the load.
type attempt struct {
	stage  int32
	result lab.Result
}

// loadPause is what each of the load's clients waits from the beginning of one connection to the next.
const loadPause = 8 * time.Millisecond

// startLoad starts the clients.
func (d *demo) startLoad(ctx context.Context) {
	l := &load{attempts: make(chan attempt, 1024), stages: map[int32]*tally{}}
	ctx, l.cancel = context.WithCancel(ctx)
	var inside, outside []netip.AddrPort
	for _, f := range lab.Families() {
		inside, outside = append(inside, d.web.clusterIP(f)), append(outside, d.web.loadBalancer(f))
	}
	var clients sync.WaitGroup
	for range 2 {
		clients.Go(func() { l.client(ctx, d.client, inside) })
		clients.Go(func() { l.client(ctx, d.cluster.Outside, outside) })
	}
	go func() {
		clients.Wait()
		close(l.attempts)
	}()
	d.load = l
}

// stopLoad stops the clients, and counts the connections that were on their way.
func (d *demo) stopLoad() {
	d.load.cancel()
	for a := range d.load.attempts {
		d.load.count(a)
	}
	d.load = nil
}

func (l *load) client(ctx context.Context, from *lab.Host, to []netip.AddrPort) {
	pause := time.NewTicker(loadPause)
	defer pause.Stop()
	for n := 0; ; n++ {
		stage := l.stage.Load()
		l.attempts <- attempt{stage, from.Dial(snapshot.TCP, to[n%len(to)], lab.Options{Timeout: demoPatience})}
		select {
		case <-ctx.Done():
			return
		case <-pause.C:
		}
	}
}

func (l *load) count(a attempt) { l.tally(a.stage).add(a.result, "") }

func (l *load) tally(stage int32) *tally {
	if l.stages[stage] == nil {
		l.stages[stage] = &tally{}
	}
	return l.stages[stage]
}

// collect begins a stage, and ends it after some time, when at least n connections that began in it have ended.
func (l *load) collect(ctx context.Context, atLeast time.Duration, n int) *tally {
	stage := l.stage.Add(1)
	t := l.tally(stage)
	end := time.NewTimer(atLeast)
	defer end.Stop()
	for over := false; !(over && t.asked >= n) && len(t.failed) < maxFailures; {
		select {
		case a := <-l.attempts:
			l.count(a)
		case <-end.C:
			over = true
		case <-ctx.Done():
			return t
		}
	}
	l.stage.Add(1) // what begins from here on belongs to neither this stage nor the next
	return t
}

// scaling is a stage of scaling web.
type scaling struct {
	news     string // empty in the stage before the first change
	pods     []*lab.Host
	draining *lab.Host
	// ready are those of the pods that new connections go to.
	ready []*lab.Host
}

// showScaling changes web's endpoints while connections go on.
func (d *demo) showScaling(ctx context.Context) error {
	d.heading("web is scaled and drained while connections go on",
		"Clients in the pod and outside open connections without a pause. One is held",
		"to pod-2. All addresses of web lead to one pool. Every endpoint has a slot",
		"there, and one element says how many there are.")
	held, r := d.hold(ctx, d.pods[1])
	if held == nil {
		d.expect(false, "a connection to pod-2 is held", r.String())
		return nil
	}
	defer held.Close()
	d.startLoad(ctx)
	l := d.load
	defer func() {
		if d.load != nil {
			d.stopLoad()
		}
	}()
	one, two, three := d.pods[0], d.pods[1], d.pods[2]
	c := terminal.Columns{13, 15, 15, 15, 8}
	d.header(c, "", "pod-1", "pod-2", "pod-3", "failed", "held")
	for _, s := range []scaling{
		{"", []*lab.Host{one, two}, nil, []*lab.Host{one, two}},
		{"pod-3 is added", []*lab.Host{one, two, three}, nil, []*lab.Host{one, two, three}},
		{"pod-3 is removed", []*lab.Host{one, two}, nil, []*lab.Host{one, two}},
		{"pod-2 drains: it terminates, still serves, and is not ready", []*lab.Host{one, two}, two,
			[]*lab.Host{one}},
		{"pod-2 is removed, pod-3 is added", []*lab.Host{one, three}, nil, []*lab.Host{one, three}},
	} {
		if err := d.scale(ctx, c, s, held); err != nil {
			return err
		}
	}
	d.stopLoad()
	asked, failed := 0, []string(nil)
	for _, t := range l.stages {
		asked, failed = asked+t.asked, append(failed, t.failed...)
	}
	d.Line("")
	d.expect(failed == nil, fmt.Sprintf("%d connections were opened while all this went on; %d failed", asked,
		len(failed)),
		failed[:min(len(failed), maxFailures)]...)
	return nil
}

// hold opens a connection from outside to a pod.
func (d *demo) hold(ctx context.Context, pod *lab.Host) (held *lab.Conn, r lab.Result) {
	for range 100 {
		held, r = d.cluster.Outside.Open(snapshot.TCP, d.web.loadBalancer(ipfamily.IPv4), lab.Options{Timeout: demoPatience})
		if held == nil || r.Endpoint == pod.Name || ctx.Err() != nil {
			return held, r
		}
		held.Close()
	}
	return nil, r
}

// scale brings web to a stage and shows who answers in it.
func (d *demo) scale(ctx context.Context, c terminal.Columns, s scaling, held *lab.Conn) error {
	if s.news != "" {
		d.Line("\n     %s", d.Paint(terminal.Bold, "web.yaml: "+s.news))
		d.web.pods, d.web.draining = s.pods, s.draining
		if err := d.edit(ctx, d.web); err != nil {
			return err
		}
	}
	t := d.load.collect(ctx, d.StageTime, 200)
	r := held.Ping(demoPatience)
	if err := d.goOn(ctx); err != nil {
		return err
	}
	row := []string{fmt.Sprintf("%d endpoints", len(s.ready))}
	if len(s.ready) == 1 {
		row[0] = "1 endpoint"
	}
	for _, pod := range d.pods {
		row = append(row, d.bar(t.answers[pod.Name], t.asked, 10))
	}
	row = append(row, fmt.Sprint(len(t.failed)))
	alive := r.Outcome.String()
	if r.Outcome == lab.Answered {
		alive = "answers"
	}
	ok := t.fair(s.ready) && r.Outcome == lab.Answered
	d.expect(ok, c.Row(append(row, alive)...), t.String(), "held connection: "+r.String())
	return nil
}

// showRuleset prints what the kernel holds, once the proxy has ended.
func (d *demo) showRuleset() error {
	if err := d.proxy.stop(); err != nil || !d.Ruleset {
		return err
	}
	listings, err := d.proxy.backend.List()
	if err != nil {
		return err
	}
	d.heading("What the kernel holds, as nft lists it",
		"The proxy has ended, and Services go on as they are.",
		"Elements count connections since they were written.")
	for i := range listings {
		if err := listings[i].Print(d.Out); err != nil {
			return err
		}
	}
	return nil
}
