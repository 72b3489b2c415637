package watch

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"sync"
	"time"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"

	"github.com/verdict-proxy/verdict/internal/system/ipfamily"
	"github.com/verdict-proxy/verdict/internal/system/wake"
	"github.com/verdict-proxy/verdict/sync/snapshot"
)

// Link is a source of the other nodes as neighbours of this host: which of them it reaches without a router, by which
// link-layer addresses, and whether they answer. It does nothing until Ask says that somebody needs it.
//
// It has the kernel ask the neighbours, by ARP or NDP, and reads the kernel's table: that takes no raw sockets.
type Link struct {
	// Own returns this node's own addresses, the preferred one first. Safe for concurrent use.
	Own func() []netip.Addr
	// Namespace is a handle of the network namespace, which must stay open; nil means the one Run is called in.
	Namespace *netns.NsHandle
	// Report gets errors that are retried, each once; nil drops them. Calls do not overlap.
	Report func(error)

	mu sync.Mutex
	// decided says that Ask was called, and asked what it said last.
	decided, asked bool
	// nodes are the addresses of all other nodes, by name; nil until SetNodes.
	nodes map[string][]netip.Addr
	// refused are the name and the index of the device that Refuse named.
	refused snapshot.Link
	news    chan struct{}
}

const (
	// linkPause is how often neighbours are asked, all at a time, or less often: linkShare for each of their addresses. So
	// no host sends or answers more than 200 questions a second on average, however large the segment is.
	linkPause = 500 * time.Millisecond
	linkShare = 5 * time.Millisecond
	// A neighbour has failed that did not answer linkMisses questions in a row; after linkHits answers it is back.
	linkMisses, linkHits = 3, 2
	// maxMACs bounds the link-layer addresses that are remembered of a node.
	maxMACs = 4
)

// NewLink returns a Link. Own and report are its fields.
func NewLink(own func() []netip.Addr, report func(error)) *Link {
	return &Link{Own: own, Report: report, news: make(chan struct{}, 1)}
}

// SetNodes replaces the addresses of the other nodes, by name. The map is not changed afterwards.
func (l *Link) SetNodes(nodes map[string][]netip.Addr) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.nodes = nodes
	l.wake()
}

// Ask says whether anybody needs to know the neighbours. Until the first call, the source is not synced.
func (l *Link) Ask(asked bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.asked != asked || !l.decided {
		l.decided, l.asked = true, asked
		l.wake()
	}
}

// Refuse says that the kernel takes no rules at the ingress of a device, until there is another one.
func (l *Link) Refuse(device string, index int) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.refused = snapshot.Link{Device: device, Index: index}
	l.wake()
}

func (l *Link) wake() { wake.Up(l.news) }

// Run puts the Link into sink whenever it differs, until ctx is done; then it returns nil. It is synced once it knows
// what it is asked for, or after firstLook: what the kernel forwards from an earlier process goes on until then.
func (l *Link) Run(ctx context.Context, sink Sink) error {
	w := linkWatch{Link: l, sink: sink, report: serialized(l.Report), known: map[string]*neighbour{}}
	for pause := time.Duration(0); ; {
		var tick <-chan time.Time
		if pause > 0 {
			tick = time.After(pause)
		}
		select {
		case <-ctx.Done():
			return nil
		case <-l.news:
		case <-tick:
		}
		pause = w.step()
	}
}

// Look reads once which nodes are neighbours. It asks none: one has failed that the kernel has asked in vain.
func (l *Link) Look(nodes map[string][]netip.Addr) (snapshot.Link, error) {
	return l.look(nodes, map[string]*neighbour{}, (*neighbour).believe)
}

// linkWatch is a Link at work.
type linkWatch struct {
	*Link
	sink   Sink
	report func(error)
	known  map[string]*neighbour
	last   snapshot.Link
	// told is the error that was reported last, until it passes.
	told   string
	begun  time.Time
	synced bool
	// next is when the neighbours have had their time to answer: news do not make it shorter.
	next time.Time
}

// firstLook is how long the neighbours may take to be known at the start.
const firstLook = 3 * time.Second

// step looks once, and returns when to look again; 0 means that it is waited for news.
func (w *linkWatch) step() (pause time.Duration) {
	w.mu.Lock()
	decided, asked, nodes, refused := w.decided, w.asked, w.nodes, w.refused
	w.mu.Unlock()
	if decided && w.begun.IsZero() {
		w.begun = time.Now()
	}
	var now snapshot.Link
	if asked {
		again := !time.Now().Before(w.next)
		if again {
			w.next = time.Now().Add(max(linkPause, time.Duration(questions(nodes))*linkShare))
		}
		pause = max(time.Until(w.next), time.Millisecond)
		var err error
		each := (*neighbour).ask
		if !again {
			each = nil
		}
		if now, err = w.look(nodes, w.known, each); err != nil {
			if w.told != err.Error() {
				w.told = err.Error()
				w.report(fmt.Errorf("neighbours: %w; retrying", err))
			}
			now = w.last // what was known stays
		} else {
			w.told = ""
		}
		now.Refused = now.Device != "" && now.Device == refused.Device && now.Index == refused.Index
	}
	if !now.Equal(w.last) {
		w.last = now
		w.sink.Put(snapshot.Delta{Link: &now})
	}
	if !w.synced && decided && (!asked || nodes != nil && allKnown(now) || time.Since(w.begun) > firstLook) {
		w.synced = true
		w.sink.Synced()
	}
	return pause
}

// questions bounds how many addresses are asked: one of each family of a node.
func questions(nodes map[string][]netip.Addr) (n int) {
	for addrs := range maps.Values(nodes) {
		for _, f := range ipfamily.All {
			if slices.ContainsFunc(addrs, f.Has) {
				n++
			}
		}
	}
	return n
}

// allKnown reports whether the frames of all neighbours are known.
func allKnown(l snapshot.Link) bool {
	for n := range maps.Values(l.Nodes) {
		if n.Addrs != (ipfamily.Per[netip.Addr]{}) && n.MACs == nil {
			return false
		}
	}
	return true
}

// neighbour is what is remembered of a node.
type neighbour struct {
	macs []snapshot.MAC
	at   ipfamily.Per[answers]
}

// answers are those of a node at its address of one family: a host may have lost only one of them.
type answers struct {
	// asked says that it was asked at the last look. Of the questions since its last answer, misses are without one; hits
	// are answers since the last miss.
	asked        bool
	misses, hits int
	failed       bool
}

// judgement finds out whether a node answers at its addresses.
type judgement func(n *neighbour, handle *netlink.Handle, index int, at ipfamily.Per[netip.Addr],
	table map[netip.Addr]*netlink.Neigh)

// look reads the kernel's table and takes what it says of each node. If judge is nil, who answers stays as it is.
func (l *Link) look(nodes map[string][]netip.Addr, known map[string]*neighbour, judge judgement) (out snapshot.Link,
	err error) {
	handle, err := l.handle()
	if err != nil {
		return out, err
	}
	defer handle.Close()
	device, networks, err := ethernetOf(handle, l.Own())
	if err != nil || device == nil {
		return out, err
	}
	table, err := neighboursOf(handle, device)
	if err != nil {
		return out, err
	}
	maps.DeleteFunc(known, func(name string, _ *neighbour) bool { return nodes[name] == nil })
	out = snapshot.Link{Device: device.Attrs().Name, Index: device.Attrs().Index,
		Nodes: make(map[string]snapshot.Neighbour, len(nodes))}
	answered := false
	for name, addrs := range nodes {
		n := known[name]
		if n == nil {
			n = &neighbour{}
			known[name] = n
		}
		at := onLink(addrs, networks)
		n.learn(at, table)
		if judge != nil {
			judge(n, handle, out.Index, at, table)
		}
		is := snapshot.Neighbour{Addrs: at, MACs: n.macs}
		for f, a := range at {
			is.Failed[f] = a.IsValid() && n.at[f].failed
			answered = answered || a.IsValid() && !is.Failed[f]
		}
		out.Nodes[name] = is
	}
	if !answered { // then it is this host that is cut off, or nobody has been asked
		for name, n := range out.Nodes {
			n.Failed = ipfamily.Per[bool]{}
			out.Nodes[name] = n
		}
	}
	return out, nil
}

// ask judges who has answered at a node's addresses, and has the kernel ask again.
func (n *neighbour) ask(handle *netlink.Handle, index int, at ipfamily.Per[netip.Addr],
	table map[netip.Addr]*netlink.Neigh) {
	for f, a := range at {
		if !a.IsValid() {
			n.at[f] = answers{}
			continue
		}
		n.at[f].judge(table[a])
		// A question that cannot be asked, as when the kernel's table is full, is one without an answer.
		n.at[f].asked = true
		_ = askNeighbour(handle, index, a, table[a])
	}
}

// believe judges by the kernel's table alone.
func (n *neighbour) believe(_ *netlink.Handle, _ int, at ipfamily.Per[netip.Addr],
	table map[netip.Addr]*netlink.Neigh) {
	for f, a := range at {
		e := table[a]
		n.at[f].failed = e != nil && e.State&noAnswer != 0
	}
}

// neighboursOf returns the kernel's table of a device.
func neighboursOf(handle *netlink.Handle, device netlink.Link) (map[netip.Addr]*netlink.Neigh, error) {
	entries, err := handle.NeighList(device.Attrs().Index, netlink.FAMILY_ALL)
	if err != nil && !errors.Is(err, netlink.ErrDumpInterrupted) {
		return nil, err
	}
	table := make(map[netip.Addr]*netlink.Neigh, len(entries))
	for i := range entries {
		if a, ok := netip.AddrFromSlice(entries[i].IP); ok {
			table[a.Unmap()] = &entries[i]
		}
	}
	return table, nil
}

func (l *Link) handle() (*netlink.Handle, error) { return (&Host{Namespace: l.Namespace}).handle() }

// ethernetOf returns the device that has the first of some addresses that is on any, and the networks of its addresses.
// It is nil if there is none, or if that device is not one of Ethernet.
func ethernetOf(handle *netlink.Handle, own []netip.Addr) (device netlink.Link, networks []netip.Prefix, err error) {
	list, err := handle.AddrList(nil, netlink.FAMILY_ALL)
	if err != nil {
		return nil, nil, err
	}
	index := 0
	for _, want := range own {
		i := slices.IndexFunc(list, func(a netlink.Addr) bool { return a.IPNet != nil && a.IP.Equal(want.AsSlice()) })
		if i >= 0 {
			index = list[i].LinkIndex
			break
		}
	}
	if index == 0 {
		return nil, nil, nil
	}
	if device, err = handle.LinkByIndex(index); err != nil {
		return nil, nil, err
	}
	if a := device.Attrs(); a.EncapType != "ether" || len(a.HardwareAddr) != len(snapshot.MAC{}) {
		return nil, nil, nil
	}
	for _, a := range list {
		if p, ok := prefixFrom(a.IPNet); ok && a.LinkIndex == index && !p.IsSingleIP() {
			networks = append(networks, p)
		}
	}
	return device, networks, nil
}

// onLink returns of each family the first address that lies in one of the networks.
func onLink(addrs []netip.Addr, networks []netip.Prefix) (at ipfamily.Per[netip.Addr]) {
	for _, a := range addrs {
		f := ipfamily.Of(a)
		if !at[f].IsValid() && slices.ContainsFunc(networks, func(p netip.Prefix) bool { return p.Contains(a) }) {
			at[f] = a
		}
	}
	return at
}

// noAnswer are the states of an entry whose link-layer address the kernel does not know.
const noAnswer = netlink.NUD_INCOMPLETE | netlink.NUD_FAILED

// learn remembers the link-layer addresses by which a node's addresses are reached, also those of entries that are
// gone, since frames of that node may still be on their way. Beyond maxMACs, only those of now are remembered.
func (n *neighbour) learn(at ipfamily.Per[netip.Addr], table map[netip.Addr]*netlink.Neigh) {
	var now []snapshot.MAC
	for _, a := range at {
		e := table[a]
		if e == nil || e.State&noAnswer != 0 || len(e.HardwareAddr) != len(snapshot.MAC{}) {
			continue
		}
		now = append(now, snapshot.MAC(e.HardwareAddr))
	}
	all := sortedMACs(slices.Concat(n.macs, now))
	if len(all) > maxMACs {
		all = sortedMACs(now)
	}
	if !slices.Equal(all, n.macs) { // those that were handed over are not changed
		n.macs = all
	}
}

func sortedMACs(macs []snapshot.MAC) []snapshot.MAC {
	slices.SortFunc(macs, compareMACs)
	return slices.Compact(macs)
}

func compareMACs(a, b snapshot.MAC) int { return slices.Compare(a[:], b[:]) }

// judge takes the answer to the question that was asked at the last look.
func (n *answers) judge(e *netlink.Neigh) {
	switch {
	case !n.asked:
	case e != nil && e.State&(netlink.NUD_REACHABLE|netlink.NUD_PERMANENT|netlink.NUD_NOARP) != 0:
		n.misses = 0
		if n.hits++; n.hits >= linkHits {
			n.failed = false
		}
	default:
		n.hits = 0
		if n.misses++; n.misses >= linkMisses {
			n.failed = true
		}
	}
}

// askNeighbour has the kernel ask a neighbour, also if it has an answer that it would use for half a minute. An entry
// that is being asked again is used meanwhile.
func askNeighbour(handle *netlink.Handle, index int, a netip.Addr, e *netlink.Neigh) error {
	if e != nil && e.State&(netlink.NUD_PERMANENT|netlink.NUD_NOARP) != 0 {
		return nil
	}
	question := netlink.Neigh{LinkIndex: index, IP: a.AsSlice(), Flags: netlink.NTF_USE}
	if e != nil && e.State&noAnswer == 0 && e.State != netlink.NUD_NONE {
		question.Flags, question.State, question.HardwareAddr = 0, netlink.NUD_PROBE, e.HardwareAddr
	}
	return handle.NeighSet(&question)
}
