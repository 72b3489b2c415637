package kernel

import (
	"encoding/hex"
	"errors"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/verdict-proxy/verdict/internal/lab"
	"github.com/verdict-proxy/verdict/internal/lab/labtest"
	"github.com/verdict-proxy/verdict/internal/system/ipfamily"
	"github.com/verdict-proxy/verdict/internal/system/netlink"
	"github.com/verdict-proxy/verdict/nft"
	"github.com/verdict-proxy/verdict/sync/dataplane"
	"github.com/verdict-proxy/verdict/sync/snapshot"
)

func TestMain(m *testing.M) { labtest.Main(m) }

func addr(s string) netip.Addr { return netip.MustParseAddr(s) }

// host gives an empty network namespace with a backend in it.
func host(t testing.TB) (*lab.Host, *Backend) {
	t.Helper()
	h := labtest.NewHost(t, labtest.NewNet(t), "node")
	return h, open(t, h, Options{})
}

// open gives another backend on a host.
func open(t testing.TB, h *lab.Host, o Options) *Backend {
	t.Helper()
	var b *Backend
	labtest.Check(t, h.Do(func() (err error) {
		b, err = Open(o)
		return err
	}))
	t.Cleanup(func() { b.Close() })
	return b
}

// quiet has a backend do what it does between transactions, in which nothing strange may be found.
func quiet(t testing.TB, b *Backend) {
	t.Helper()
	if found := check(t, b); found != nil {
		t.Errorf("found what nobody did: %v", found)
	}
}

// check calls Check until it is through.
func check(t testing.TB, b *Backend) []string {
	t.Helper()
	for {
		found, again, err := b.Check()
		labtest.Check(t, err)
		if found != nil || again == 0 {
			return found
		}
	}
}

// cluster gives a snapshot with every kind of Service there is; random chooses their policies and endpoints.
func cluster(random *rand.Rand, services int, affinity bool) *snapshot.Snapshot {
	s := snapshot.New()
	addrs := []netip.Addr{addr("127.0.0.1"), addr("192.0.2.1"), addr("2001:db8::1")}
	cidrs := []netip.Prefix{netip.MustParsePrefix("10.96.0.0/16"), netip.MustParsePrefix("10.97.0.0/16"),
		netip.MustParsePrefix("fd00:96::/112")}
	d := snapshot.Delta{
		HostAddrs:    &addrs,
		ServiceCIDRs: &cidrs,
		Node:         &snapshot.Node{Name: "node-1", Addresses: addrs[1:]},
		Services:     map[snapshot.Name]*snapshot.Service{},
		Slices:       map[snapshot.Name]*snapshot.Slice{},
	}
	for i := range services {
		d.Merge(serviceDelta(random, i, affinity))
	}
	s.Apply(d)
	return s
}

func serviceDelta(random *rand.Rand, i int, affinity bool) snapshot.Delta {
	n := snapshot.Name{Namespace: "default", Name: fmt.Sprintf("s%d", i)}
	yes := func() bool { return random.IntN(2) == 0 }
	svc := &snapshot.Service{
		Name:          n,
		ClusterIPs:    []netip.Addr{lab.Nth(lab.ServiceRange[0], i+1), lab.Nth(lab.ServiceRange[1], i+1)},
		InternalLocal: yes(), ExternalLocal: yes(), ExternalFailover: snapshot.ExternalFailover(random.IntN(4)),
		Ports: []snapshot.Port{{Name: "a", Protocol: snapshot.TCP, Port: 80, NodePort: 30000 + uint16(i)},
			{Name: "b", Protocol: snapshot.UDP, Port: 53}, {Name: "c", Protocol: snapshot.SCTP, Port: 9}},
	}
	if affinity && yes() {
		svc.Affinity = time.Duration(1+random.IntN(100000)) * time.Second
	}
	if yes() {
		svc.LoadBalancerIPs = []netip.Addr{lab.Nth(lab.ExternalRange[0], i+1), lab.Nth(lab.ExternalRange[1], i+1)}
		svc.SourceRanges = []netip.Prefix{netip.MustParsePrefix("198.51.100.0/25"), netip.MustParsePrefix("0.0.0.0/1"),
			netip.MustParsePrefix("2001:db8:1::/48")}
	}
	if i%5 == 4 { // more frontends than have the class of their pool themselves
		for k := range 5 {
			svc.ExternalIPs = append(svc.ExternalIPs, lab.Nth(lab.ExternalRange[0], 100+5*i+k),
				lab.Nth(lab.ExternalRange[1], 100+5*i+k))
		}
	}
	d := snapshot.Delta{Services: map[snapshot.Name]*snapshot.Service{n: svc}, Slices: map[snapshot.Name]*snapshot.Slice{}}
	for part, pods := range []netip.Prefix{lab.NodePodRange[0], lab.NodePodRange[1]} {
		sl := &snapshot.Slice{
			Name:    snapshot.Name{Namespace: n.Namespace, Name: fmt.Sprintf("%s-%d", n.Name, part)},
			Service: n.Name,
			Ports: []snapshot.SlicePort{
				{Name: "a", Protocol: snapshot.TCP, Port: 8080},
				{Name: "b", Protocol: snapshot.UDP, Port: 53},
				{Name: "c", Protocol: snapshot.SCTP, Port: 9},
			},
		}
		for e := range random.IntN(5) {
			sl.Endpoints = append(sl.Endpoints, snapshot.Endpoint{Addr: lab.Nth(pods, 10+random.IntN(4)+4*e),
				Node: fmt.Sprintf("node-%d", 1+random.IntN(2)), Ready: true, Serving: true})
		}
		d.Slices[sl.Name] = sl
	}
	return d
}

var configs = map[string]dataplane.Config{
	"cluster CIDR": {NodeName: "node-1", LocalhostNodePorts: true, DetectLocal: dataplane.DetectLocal{
		ClusterCIDRs: []netip.Prefix{netip.MustParsePrefix("10.244.0.0/16"), netip.MustParsePrefix("fd00:10:244::/48")}}},
	"edge": {NodeName: "node-1", PingServices: true, RejectUnusedPorts: true, DetectLocal: dataplane.DetectLocal{
		ClusterCIDRs: []netip.Prefix{netip.MustParsePrefix("10.244.0.0/16"), netip.MustParsePrefix("fd00:10:244::/48")}}},
	"odd cluster CIDR": {NodeName: "node-1", DetectLocal: dataplane.DetectLocal{
		ClusterCIDRs: []netip.Prefix{netip.MustParsePrefix("10.244.0.0/13"), netip.MustParsePrefix("fd00:10:240::/47")}}},
	"everybody": {NodeName: "node-1", DetectLocal: dataplane.DetectLocal{
		ClusterCIDRs: []netip.Prefix{netip.MustParsePrefix("0.0.0.0/0"), netip.MustParsePrefix("::/0")}}},
	"as kube-proxy": {NodeName: "node-1", AsKubeProxy: true, DetectLocal: dataplane.DetectLocal{
		ClusterCIDRs: []netip.Prefix{netip.MustParsePrefix("10.244.0.0/16"), netip.MustParsePrefix("fd00:10:244::/47")}}},
	"evidence": {NodeName: "node-1", SecondChance: snapshot.SecondChanceOn},
	"records": {NodeName: "node-1", Records: true, SecondChance: snapshot.SecondChanceOn, LocalhostNodePorts: true,
		RejectUnusedPorts: true},
	"unknown":        {NodeName: "node-1"},
	"masquerade all": {NodeName: "node-1", MasqueradeAll: true},
	"bridge": {
		NodeName:          "node-1",
		RejectUnusedPorts: true,
		DetectLocal:       dataplane.DetectLocal{Mode: dataplane.DetectBridgeInterface, Interface: "cni0"},
	},
	"prefix": {
		NodeName:     "node-1",
		PingServices: true,
		DetectLocal:  dataplane.DetectLocal{Mode: dataplane.DetectInterfaceNamePrefix, Interface: "veth"},
	},
}

func text(t testing.TB, st *dataplane.State) string {
	t.Helper()
	var b strings.Builder
	for _, l := range nft.List(st) {
		labtest.Check(t, l.Print(&b))
	}
	return b.String()
}

// TestTwoWritersOneListing writes states by netlink, and loads the text of the same states with every nft at hand:
// each of them must list both the same.
func TestTwoWritersOneListing(t *testing.T) {
	for name, cfg := range configs {
		t.Run(name, func(t *testing.T) {
			st, _ := dataplane.Compute(cfg, cluster(rand.New(rand.NewPCG(7, 7)), 12, true))
			withoutAffinity, _ := dataplane.Compute(cfg, cluster(rand.New(rand.NewPCG(7, 7)), 12, false))
			for _, s := range []*dataplane.State{st, withoutAffinity} {
				retryAll(s)
				for _, svc := range s.Services {
					refuse(svc.Ports...)
				}
			}
			for _, n := range labtest.Nfts(t) {
				loadable := withoutAffinity
				if n.LoadsWideUpdates() {
					loadable = st
				}
				h, b := host(t)
				apply(t, b, st)
				if got := n.List(t, h); !strings.Contains(got, "map services") {
					t.Errorf("%s lists no map services:\n%s", n.Path, got)
				}
				labtest.Check(t, b.Remove())
				if !n.LoadsRanges(t, h) {
					continue
				}
				apply(t, open(t, h, Options{}), loadable)
				// A revision's number is that of the kernel's transaction.
				number := regexp.MustCompile(`0x[0-9a-f]{8}( comment "[0-9a-f]{32} counts)`)
				written := number.ReplaceAllString(n.List(t, h), "0x00000001$1")
				labtest.Check(t, b.Remove())
				labtest.Run(t, h, text(t, loadable), n.Path, "-f", "-")
				if loaded := number.ReplaceAllString(n.List(t, h), "0x00000001$1"); loaded != written {
					t.Errorf("%s lists what it loaded and what we wrote differently:\n%s", n.Path,
						labtest.FirstDifference(loaded, written))
				}
			}
		})
	}
}

func apply(t testing.TB, b *Backend, st *dataplane.State) {
	t.Helper()
	_, err := b.ApplyAll(st, dataplane.Change{})
	labtest.Check(t, err)
}

// TestSetsAreWhatNftMakes compares the kernel's sets, userdata included, with those that nft makes of our text.
func TestSetsAreWhatNftMakes(t *testing.T) {
	st, _ := dataplane.Compute(configs["evidence"], cluster(rand.New(rand.NewPCG(1, 1)), 3, false))
	retryAll(st)
	for _, svc := range st.Services {
		for _, sp := range svc.Ports {
			sp.Limits, _ = snapshot.ParseLimits("rate=5 client-rate=2")
		}
	}
	h, b := host(t)
	apply(t, b, st)
	written := setAttributes(t, b.conn)
	labtest.Check(t, b.Remove())
	n := labtest.NewNft(t)
	labtest.Run(t, h, text(t, st), n.Path, "-f", "-")
	loaded := setAttributes(t, b.conn)
	want := 0
	for s := range nft.NumSets {
		if !s.IsIngress() { // which have a table only where there is a device
			want += len(ipfamily.All)
		}
	}
	if len(written) != want {
		t.Errorf("%d sets were written; want %d", len(written), want)
	}
	for name, want := range loaded {
		if got := written[name]; got != want {
			t.Errorf("set %s:\nwritten: %s\nby nft:  %s", name, got, want)
		}
	}
}

// setAttributes gives everything the kernel says about our sets, but for what it made up itself.
func setAttributes(t *testing.T, c *Conn) map[string]string {
	t.Helper()
	out := map[string]string{}
	for _, f := range ipfamily.All {
		var w netlink.Buffer
		w.Reset()
		w.End(w.Netfilter(netlink.NFTables(unix.NFT_MSG_GETSET), unix.NLM_F_DUMP, f.NFProto()))
		labtest.Check(t, c.dump(w.Bytes(), func() {}, func(attrs []byte) {
			var name string
			var lines []string
			for typ, v := range netlink.Each(attrs) {
				const handle, id, typeName, count = 16, unix.NFTA_SET_ID, 21, 22
				switch typ {
				case unix.NFTA_SET_NAME:
					name = unix.ByteSliceToString(v)
				case handle, id, typeName, count:
				default:
					lines = append(lines, fmt.Sprintf("%d=%s", typ, hex.EncodeToString(v)))
				}
			}
			slices.Sort(lines)
			out[f.NFT()+" "+name] = strings.Join(lines, " ")
		}))
	}
	return out
}

// TestOverlappingRanges moves between service ranges and source ranges that overlap, touch and replace one another:
// Kubernetes allows all that, and a set of ranges takes no overlaps.
func TestOverlappingRanges(t *testing.T) {
	random := rand.New(rand.NewPCG(5, 5))
	_, b := host(t)
	planner, snap := dataplane.NewPlanner(configs["cluster CIDR"]), cluster(random, 2, false)
	some := func(base string, bits int) []netip.Prefix {
		var out []netip.Prefix
		for range random.IntN(5) {
			a := lab.Nth(netip.PrefixFrom(addr(base), bits), random.IntN(4)<<6)
			out = append(out, netip.PrefixFrom(a, a.BitLen()-random.IntN(10)).Masked())
		}
		slices.SortFunc(out, netip.Prefix.Compare)
		return slices.Compact(out)
	}
	change, _ := planner.Apply(snap, snapshot.Change{})
	for step := range 200 {
		if _, err := b.ApplyAll(planner.State(), change); err != nil {
			t.Fatalf("step %d: %v", step, err)
		}
		if got, want := held(t, b), wanted(planner.State()); got != want {
			t.Fatalf("step %d: %s", step, labtest.FirstDifference(got, want))
		}
		cidrs := slices.Concat(some("10.96.0.0", 16), some("255.255.255.0", 24), some("fd00:96::", 112))
		delta := serviceDelta(random, 0, false)
		for _, s := range delta.Services {
			s.LoadBalancerIPs = []netip.Addr{addr("203.0.113.1"), addr("2001:db8:cb::1")}
			s.SourceRanges = slices.Concat(some("198.51.100.0", 24), some("2001:db8:1::", 112))
		}
		delta.ServiceCIDRs = &cidrs
		change, _ = planner.Apply(snap, snap.Apply(delta))
	}
}

// held gives what the kernel holds, a line for each element. Slots may be in any order, so that their lines are two:
// which slots there are, and which endpoints.
func held(t testing.TB, b *Backend) string {
	t.Helper()
	l, err := b.List()
	labtest.Check(t, err)
	return lines(l[:])
}

func wanted(st *dataplane.State) string {
	l := nft.List(st)
	return lines(l[:])
}

func lines(tables []nft.Listing) string {
	var out []string
	for _, l := range tables {
		for _, c := range l.Table.Chains {
			out = append(out, fmt.Sprintf("%s chain %s", l.Table.Family.NFT(), c.ID.Name()))
		}
		for i := range l.Table.Sets {
			set := &l.Table.Sets[i]
			for _, e := range l.Elements[set.ID] {
				line := fmt.Sprintf("%s %s %s", l.Table.Family.NFT(), set.Name(), e.Element.Text(l.Table.Family, set))
				if set.ID == nft.RevisionSet { // whatever its number
					line = fmt.Sprintf("%s %s %s", l.Table.Family.NFT(), set.Name(), e.Comment)
				}
				if key, data, ok := strings.Cut(line, " : "); ok && set.Key[len(set.Key)-1] == nft.RandomSlot {
					i := strings.LastIndex(key, " . ")
					out = append(out, key, key[:i]+" : "+data)
					continue
				}
				out = append(out, line)
			}
		}
	}
	slices.Sort(out)
	return strings.Join(out, "\n")
}

// TestRefusalNamesTheObject gives the kernel elements it must refuse.
func TestRefusalNamesTheObject(t *testing.T) {
	st, _ := dataplane.Compute(configs["unknown"], cluster(rand.New(rand.NewPCG(1, 1)), 3, false))
	_, b := host(t)
	apply(t, b, st)
	var m nft.Model
	txn := m.Plan(st, dataplane.Change{}, 0)
	services := txn.Tables[0].Add[nft.Services]
	txn.Tables[0].Create = nil
	txn.Tables[0].AddChains = nil
	txn.Tables[1] = nft.TableTxn{}
	for set := range txn.Tables[0].Add {
		txn.Tables[0].Add[set] = nil
	}
	// The last of three is there already and leads somewhere else; the other two are there as they are, which is no error.
	data := slices.Clone(services[2].Data())
	data[2] ^= 0x10
	services[2], _ = nft.ElementFrom(ipfamily.IPv4, nft.Services, services[2].Key(), nil, data, "", services[2].Comment)
	txn.Tables[0].Add[nft.Services] = services[:3]
	err := b.send(b.batch.encode(txn))
	set := nft.SetByID(nft.Services)
	want := "nft: ip verdict: add element services { " + services[2].Text(ipfamily.IPv4, &set) + " }: file exists"
	if linuxBefore(t, 6, 1) { // it says only which message
		want = "nft: ip verdict: add element services { " + services[0].Text(ipfamily.IPv4,
			&set) + " } or one of the 2 after it: file exists"
	}
	if err == nil || err.Error() != want {
		t.Errorf("got  %v\nwant %s", err, want)
	}
}

func linuxBefore(t *testing.T, major, minor int) bool {
	t.Helper()
	var name unix.Utsname
	labtest.Check(t, unix.Uname(&name))
	haveMajor, haveMinor, ok := version(unix.ByteSliceToString(name.Release[:]))
	if !ok {
		t.Fatalf("kernel release %q", name.Release)
	}
	return haveMajor < major || haveMajor == major && haveMinor < minor
}

// TestRemove deletes what is ours, twice, and leaves others alone.
func TestRemove(t *testing.T) {
	h, b := host(t)
	foreign := "table ip kube-proxy {\n\tchain services {\n\t\taccept\n\t}\n}\n"
	labtest.Run(t, h, foreign, "nft", "-f", "-")
	st, _ := dataplane.Compute(configs["unknown"], cluster(rand.New(rand.NewPCG(1, 1)), 3, true))
	apply(t, b, st)
	for range 2 {
		labtest.Check(t, b.Remove())
		if got := labtest.Nfts(t)[0].List(t, h); got != foreign {
			t.Fatalf("left behind:\n%s", got)
		}
	}
}

// TestForgetAffinity takes one endpoint away from a sticky Service: the entries of its clients go, the others' stay.
func TestForgetAffinity(t *testing.T) {
	h, b := host(t)
	sticky := func(endpoints ...string) *dataplane.State {
		s := snapshot.New()
		n := snapshot.Name{Namespace: "default", Name: "web"}
		slice := &snapshot.Slice{
			Name:    n,
			Service: "web",
			Ports:   []snapshot.SlicePort{{Name: "a", Protocol: snapshot.TCP, Port: 8080}},
		}
		for _, e := range endpoints {
			slice.Endpoints = append(slice.Endpoints, snapshot.Endpoint{Addr: addr(e), Ready: true, Serving: true})
		}
		s.Apply(snapshot.Delta{
			Services: map[snapshot.Name]*snapshot.Service{
				n: {Name: n, Affinity: time.Hour, ClusterIPs: []netip.Addr{addr("10.96.0.1")},
					Ports: []snapshot.Port{{Name: "a", Protocol: snapshot.TCP, Port: 80}}},
			},
			Slices: map[snapshot.Name]*snapshot.Slice{n: slice}})
		st, _ := dataplane.Compute(configs["unknown"], s)
		return st
	}
	apply(t, b, sticky("10.244.1.1", "10.244.1.2"))
	l, err := b.List()
	labtest.Check(t, err)
	pool := l[0].Elements[nft.Services][0].PoolID()
	id := fmt.Sprintf("%x:%x", pool>>16, pool&0xffff)
	var entries []string
	for i := 1; i <= 200; i++ {
		entries = append(entries, fmt.Sprintf("%s . %d timeout 1h : 10.244.1.%d . 8080", id, i, 1+i%2))
	}
	labtest.Run(t, h, "add element ip verdict affinity { "+strings.Join(entries, ", ")+" }", "nft", "-f", "-")
	_, err = b.ApplyAll(sticky("10.244.1.1"),
		dataplane.Change{Services: []snapshot.Name{{Namespace: "default", Name: "web"}}})
	labtest.Check(t, err)
	quiet(t, b)
	left, err := b.conn.Elements(ipfamily.IPv4, nft.Affinity)
	labtest.Check(t, err)
	if len(left) != 100 {
		t.Errorf("%d entries are left; want 100", len(left))
	}
	for _, e := range left {
		if ep := e.Target(); ep != netip.MustParseAddrPort("10.244.1.1:8080") {
			t.Errorf("an entry still leads to %v", ep)
		}
	}
}

// TestProbe says that the probe passes here and leaves nothing, and what it says of kernels that lack something.
func TestProbe(t *testing.T) {
	h, b := host(t)
	labtest.Check(t, b.Probe())
	if got := labtest.Nfts(t)[0].List(t, h); got != "" {
		t.Fatalf("the probe left:\n%s", got)
	}
	for _, c := range []struct {
		refuse  string
		release string
		want    string
	}{
		{"ip verdict: add rule pick-1 ", "6.1.0", "numgen (Linux 4.9, CONFIG_NFT_NUMGEN)"},
		{"ip verdict: add rule no-endpoints ", "5.8.0", "reject in nat chains at prerouting (Linux 5.9, CONFIG_NFT_REJECT)"},
		{"ip verdict: add set source-ranges", "6.1.0", "ranges inside concatenated keys (Linux 5.6)"},
		{"ip verdict: add chain prerouting", "4.9.0", "nat chains in nf_tables (Linux 4.18, CONFIG_NF_NAT)"},
		{"", "5.4.0-generic", "counters in elements of maps (Linux 5.7; this is 5.4.0-generic)"},
	} {
		var p batch
		p.Reset()
		p.table(ipfamily.IPv4, probeTable(ipfamily.IPv4))
		var refused []netlink.Error
		for _, n := range p.messages {
			what := p.describe(n.seq, 0)
			if c.refuse != "" && strings.HasPrefix(what, c.refuse) ||
				strings.HasPrefix(c.refuse, "ip verdict: add chain") && strings.Contains(what, "add rule prerouting ") {
				refused = append(refused, netlink.Error{Seq: n.seq, Errno: unix.ENOENT})
			}
		}
		err := p.probeResult(refused, c.release)
		if unsupported, ok := err.(*Unsupported); !ok || len(unsupported.Missing) == 0 ||
			!strings.Contains(err.Error(), c.want) {
			t.Errorf("refused %q: got %v; want %s", c.refuse, err, c.want)
		}
	}
}

// TestListIsWhatNftLists compares what List prints of a table that has carried traffic with what nft lists, numbers
// included.
func TestListIsWhatNftLists(t *testing.T) {
	c, b, s, _ := one(t, both, asIs)
	at := s.frontendOf(c, dataplane.ClusterIP, ipfamily.IPv4)
	for range 5 {
		c.Node.Dial(snapshot.TCP, at, lab.Options{})
		c.Node.Dial(snapshot.TCP, netip.AddrPortFrom(at.Addr(), 81), lab.Options{})
	}
	tables, err := b.List()
	labtest.Check(t, err)
	words := func(text string) []string {
		fields := strings.Fields(strings.NewReplacer("priority raw", "priority -300", "priority dstnat - 1", "priority -101",
			"priority srcnat", "priority 100",
			"tcp flags != syn / syn,ack", "tcp flags & (syn | ack) != syn" /* nft 1.0.6 */).Replace(text))
		slices.Sort(fields) // nft orders elements and breaks lines in its own way
		return fields
	}
	var whole []string
	for _, l := range tables {
		var printed strings.Builder
		labtest.Check(t, l.Print(&printed))
		listed := labtest.Run(t, c.Node, "", "nft", "list", "table", l.Table.Family.NFT(), nft.TableName)
		got, want := words(printed.String()), words(listed)
		if !slices.Equal(got, want) {
			t.Errorf("%s: printed and listed differ: %v", l.Table.Family.NFT(), firstWords(got, want))
		}
		whole = append(whole, want...)
		const counted = "fib daddr type != local counter packets 5 "
		if l.Table.Family == ipfamily.IPv4 && !strings.Contains(printed.String(), counted) {
			t.Errorf("5 packets to an unused port are not counted:\n%s", printed.String())
		}
	}
	labtest.Check(t, c.Node.Do(func() error {
		i, err := Inspect()
		if err != nil {
			return err
		}
		var printed strings.Builder
		err = errors.Join(i.Print(t.Context(), &printed), i.Close())
		slices.Sort(whole)
		if got := words(printed.String()); !slices.Equal(got, whole) {
			t.Errorf("an Inspector prints and nft lists otherwise: %v", firstWords(got, whole))
		}
		return err
	}))
}

func firstWords(a, b []string) string {
	for i := range min(len(a), len(b)) {
		if a[i] != b[i] {
			return fmt.Sprintf("%q and %q", a[i:min(i+5, len(a))], b[i:min(i+5, len(b))])
		}
	}
	return fmt.Sprintf("%d and %d words", len(a), len(b))
}
