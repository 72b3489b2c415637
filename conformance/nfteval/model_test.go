package nfteval_test

import (
	"bytes"
	"errors"
	"flag"
	"fmt"
	"maps"
	"math"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/spf13/pflag"

	"github.com/verdict-proxy/verdict/conformance/nfteval"
	"github.com/verdict-proxy/verdict/internal/lab"
	"github.com/verdict-proxy/verdict/internal/lab/labtest"
	"github.com/verdict-proxy/verdict/internal/proxy/config"
	"github.com/verdict-proxy/verdict/nft/kernel"
	"github.com/verdict-proxy/verdict/sync/dataplane"
	"github.com/verdict-proxy/verdict/sync/snapshot"
	"github.com/verdict-proxy/verdict/sync/watch"
)

const root = "../.."

// rounds is how many rulesets are made up for packets.
var rounds = flag.Int("rounds", 10, "how many rulesets to make up and send packets through")

// program is verdict, built for these tests.
var program string

func TestMain(m *testing.M) {
	flag.Parse()
	labtest.Main(run{m})
}

type run struct{ m *testing.M }

// Run builds the program, and runs the tests.
func (r run) Run() int {
	dir, err := os.MkdirTemp("", "nfteval")
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	defer os.RemoveAll(dir)
	program = filepath.Join(dir, "verdict")
	build := exec.Command("go", "build", "-o", program, "./cmd/verdict")
	build.Dir = root // a module of its own
	if out, err := build.CombinedOutput(); err != nil {
		fmt.Fprintf(os.Stderr, "go build: %v\n%s", err, out)
		return 1
	}
	return r.m.Run()
}

// manifest is a file of objects with the flags that go with it, and what the model knows of both.
type manifest struct {
	name, path string
	flags      []string
	config     dataplane.Config
	snap       *snapshot.Snapshot
	state      *dataplane.State
}

func manifests(t *testing.T) []*manifest {
	t.Helper()
	list := []*manifest{{
		path:  root + "/examples/cluster.yaml",
		flags: []string{"--hostname-override", "node-1", "--cluster-cidr", "10.244.0.0/16,fd00:10:244::/48"},
	}}
	files, err := filepath.Glob(root + "/cmd/verdict/testdata/render/*.yaml")
	labtest.Check(t, err)
	for _, f := range files {
		text, err := os.ReadFile(f)
		labtest.Check(t, err)
		line, _, _ := strings.Cut(string(text), "\n")
		flags := strings.Fields(strings.TrimPrefix(line, "# flags: "))
		if slices.Contains(flags, "--ipvs-scheduler") {
			continue // its rules leave the choice of an endpoint to IPVS, of which a listing says nothing
		}
		list = append(list, &manifest{path: f, flags: flags})
	}
	if len(list) < 6 {
		t.Fatalf("only %d manifests were found", len(list))
	}
	for _, m := range list {
		m.load(t)
	}
	return list
}

func (m *manifest) load(t *testing.T) {
	t.Helper()
	m.name = filepath.Base(m.path)
	var flags config.Flags
	f := pflag.NewFlagSet("render", pflag.ContinueOnError)
	flags.AddPolicy(f)
	labtest.Check(t, f.Parse(m.flags))
	s, _, err := config.Load("", &flags, nil)
	labtest.Check(t, err)
	m.config = s.Policy
	m.config.NodeName = s.NodeName
	m.snap, _, err = watch.Load(t.Context(), m.path, m.config.NodeName)
	labtest.Check(t, err)
	addrs := append(slices.Clone(m.snap.Node.Addresses), netip.MustParseAddr("127.0.0.1"))
	m.snap.Apply(snapshot.Delta{HostAddrs: &addrs})
	m.state, _ = dataplane.Compute(m.config, m.snap)
}

// listings has the ruleset written by netlink, as the proxy does, and what render prints loaded by nft, and gives what
// every nft lists of both.
func (m *manifest) listings(t *testing.T) map[string][]byte {
	t.Helper()
	text, err := exec.Command(program, append([]string{"render", "--from", m.path}, m.flags...)...).Output()
	labtest.Check(t, err)
	out := listings(t, m.name, string(text))
	for name, listing := range m.written(t) {
		out[name] = listing
	}
	return out
}

// written gives what every nft lists of what the proxy writes.
func (m *manifest) written(t *testing.T) map[string][]byte {
	t.Helper()
	h := labtest.NewHost(t, labtest.NewNet(t), "node")
	labtest.Check(t, h.Do(func() error {
		b, err := kernel.Open(kernel.Options{})
		if err != nil {
			return err
		}
		_, err = b.Apply(m.state, dataplane.Change{})
		return errors.Join(err, b.Close())
	}))
	out := map[string][]byte{}
	for _, n := range labtest.Nfts(t) {
		out["written, listed by "+filepath.Base(n.Path)] = list(t, h, n)
	}
	return out
}

// listings loads a ruleset into a namespace by the first nft that can, and gives what every nft lists of it, by their
// names. The oldest nft comes first: nft 1.0.6 crashes when it lists an anonymous map of lots that a later one wrote.
func listings(t *testing.T, name, text string) map[string][]byte {
	t.Helper()
	out := map[string][]byte{}
	for _, loader := range labtest.Nfts(t) {
		h := labtest.NewHost(t, labtest.NewNet(t), "node")
		if said, err := h.RunInput(text, loader.Path, "-f", "-"); err != nil {
			wide := strings.Contains(text, "# nft 1.0.6 aborts") && !loader.LoadsWideUpdates()
			if !wide && loader.LoadsRanges(t, h) {
				t.Fatalf("%s: %s: %v\n%s", name, loader.Path, err, said)
			}
			continue
		}
		for _, n := range labtest.Nfts(t) {
			out["loaded, listed by "+filepath.Base(n.Path)] = list(t, h, n)
		}
		break
	}
	return out
}

func list(t *testing.T, h *lab.Host, n labtest.Nft) []byte {
	t.Helper()
	out, err := h.Command(n.Path, "--json", "list", "ruleset").Output()
	labtest.Check(t, err)
	return out
}

func parse(t *testing.T, listing []byte) *nfteval.Ruleset {
	t.Helper()
	r, err := nfteval.Parse(bytes.NewReader(listing))
	labtest.Check(t, err)
	return r
}

// asked is a question to both.
type asked struct {
	model    dataplane.Question
	question nfteval.Question
}

func (a asked) String() string {
	return fmt.Sprintf("from %s by %q to %s", a.model.Source, a.model.Interface, a.model.Key)
}

// outsiders are neither pods nor this node. Some lie in source ranges of the manifests.
var outsiders = []string{"198.51.100.7", "192.0.2.77", "172.31.0.1", "2001:db8:ffff::7"}

// questions are all frontends, and what lies beside them, asked by all kinds of senders.
func (m *manifest) questions() (list []asked) {
	sources := m.sources()
	for _, k := range m.keys() {
		for _, s := range sources {
			if s.Is4() != k.Addr.Is4() {
				continue
			}
			for _, iface := range []string{"eth0", "veth-a1", bridge} {
				if m.here(s) {
					iface = ""
				}
				list = append(list, m.question(s, iface, k))
				if iface == "" {
					break
				}
			}
		}
	}
	return list
}

// bridge is one that shows netfilter what it carries. All pods are behind it.
const bridge = "cni0"

func (m *manifest) question(source netip.Addr, iface string, k dataplane.Key) asked {
	var bridged []netip.Prefix
	if iface == bridge {
		bridged = lab.PodRange
	}
	return asked{
		model: dataplane.Question{Source: source, Interface: iface, Key: k},
		question: nfteval.Question{
			Iif: iface, Src: netip.AddrPortFrom(source, 40000), Dst: netip.AddrPortFrom(k.Addr, k.Port),
			Protocol: k.Protocol.String(), Local: m.snap.HostAddrs, Bridged: bridged,
		},
	}
}

func (m *manifest) here(a netip.Addr) bool {
	return a.IsLoopback() || slices.Contains(m.snap.HostAddrs, a)
}

// keys are all frontends; an unused port and another protocol of each address; and addresses of no Service.
func (m *manifest) keys() (list []dataplane.Key) {
	for _, s := range m.state.Services {
		for _, p := range s.Ports {
			for _, f := range p.Frontends {
				other := f.Key
				other.Port = 9
				turned := f.Key
				turned.Protocol = map[snapshot.Protocol]snapshot.Protocol{snapshot.TCP: snapshot.UDP, snapshot.UDP: snapshot.SCTP,
					snapshot.SCTP: snapshot.TCP}[f.Key.Protocol]
				list = append(list, f.Key, other, turned)
			}
		}
	}
	for _, a := range []string{"10.96.255.1", "10.97.1.1", "192.0.2.200", "2001:db8::99", "fd00:10:96::fff0",
		"fd00:10:96::f:1"} {
		list = append(list, dataplane.Key{Addr: netip.MustParseAddr(a), Protocol: snapshot.TCP, Port: 80})
	}
	for _, a := range m.snap.HostAddrs {
		list = append(list, dataplane.Key{Addr: a, Protocol: snapshot.TCP, Port: 22})
	}
	slices.SortFunc(list, dataplane.Key.Compare)
	return slices.Compact(list)
}

// sources are pods, endpoints among them; addresses of this node; and outsiders.
func (m *manifest) sources() (list []netip.Addr) {
	list = slices.Clone(m.snap.HostAddrs)
	for _, a := range append(outsiders, "10.244.9.9", "fd00:10:244:9::9", "::1") {
		list = append(list, netip.MustParseAddr(a))
	}
	for _, s := range m.state.Services {
		for _, p := range s.Ports {
			for _, e := range slices.Concat(p.Cluster.Endpoints, p.Local.Endpoints) {
				list = append(list, e.Addr())
			}
			for _, f := range p.Frontends {
				for _, r := range f.Sources {
					list = append(list, r.Addr())
				}
			}
		}
	}
	slices.SortFunc(list, netip.Addr.Compare)
	return slices.Compact(list)
}

// expected is what the model says, in the evaluator's words.
func (m *manifest) expected(a asked) []nfteval.Outcome {
	x := dataplane.Explain(m.config, m.snap, a.model)
	switch x.Cause.Outcome() {
	case dataplane.Untouched:
		return []nfteval.Outcome{{Verdict: nfteval.Delivered, To: a.question.Dst, Probability: 1}}
	case dataplane.Rejected:
		refusal := "icmp port-unreachable"
		switch {
		case a.model.Key.Protocol == snapshot.TCP:
			refusal = "tcp reset"
		case a.model.Key.Addr.Is6():
			refusal = "icmpv6 port-unreachable"
		}
		return []nfteval.Outcome{{Verdict: nfteval.Refused, Refusal: refusal, Probability: 1}}
	case dataplane.Dropped:
		return []nfteval.Outcome{{Verdict: nfteval.Dropped, Probability: 1}}
	}
	var list []nfteval.Outcome
	all := 0
	for _, c := range x.Endpoints {
		if c.Reason.Included() {
			list = append(list, nfteval.Outcome{Verdict: nfteval.Delivered, To: c.AddrPort, Masqueraded: c.SourceSeen.Node(),
				Probability: float64(c.Share())})
			all += c.Share()
		}
	}
	for i := range list {
		list[i].Probability /= float64(all)
	}
	return list
}

// disagreement says where the evaluator says something else than the model; nil if nowhere.
func (m *manifest) disagreement(r *nfteval.Ruleset, a asked) error {
	got, err := r.Ask(a.question)
	if err != nil {
		return fmt.Errorf("%s: %w", a, err)
	}
	want := m.expected(a)
	if err := equal(got, want); err != nil {
		return fmt.Errorf("%s: %w", a, err)
	}
	x := dataplane.Explain(m.config, m.snap, a.model)
	sticky := x.Cause == dataplane.FrontendFound && x.Port.Affinity > 0
	for _, o := range got {
		if o.Mark != 0 || o.Priority != 0 && o.Verdict == nfteval.Delivered {
			return fmt.Errorf("%s: the packet leaves with priority %#x and mark %#x", a, o.Priority, o.Mark)
		}
		if n := len(o.Updates); sticky != (n == 1) || n > 1 {
			return fmt.Errorf("%s: affinity is %v, and %v is remembered", a, sticky, o.Updates)
		}
		if !sticky {
			continue
		}
		again := a.question
		again.Src = netip.AddrPortFrom(a.question.Src.Addr(), 40001)
		again.State = o.Updates
		next, err := r.Ask(again)
		if err != nil {
			return fmt.Errorf("%s, again: %w", a, err)
		}
		o.Probability = 1
		if err := equal(next, []nfteval.Outcome{o}); err != nil {
			return fmt.Errorf("%s, after %v: %w", a, o.Updates, err)
		}
	}
	return nil
}

// equal says where outcomes are others than expected, in what the model knows of.
func equal(got, want []nfteval.Outcome) error {
	left := slices.Clone(want)
	for _, g := range got {
		i := slices.IndexFunc(left, func(w nfteval.Outcome) bool {
			return g.Verdict == w.Verdict && g.Refusal == w.Refusal && g.To == w.To &&
				g.Masqueraded == w.Masqueraded && !g.Source.IsValid() &&
				math.Abs(g.Probability-w.Probability) < 1e-9
		})
		if i < 0 {
			return fmt.Errorf("nfteval: %v, expected %v\n%s", got, want, trace(g))
		}
		left = slices.Delete(left, i, i+1)
	}
	if len(left) > 0 {
		return fmt.Errorf("nfteval: %v, expected %v", got, want)
	}
	return nil
}

func trace(o nfteval.Outcome) string {
	var b strings.Builder
	for _, s := range o.Trace {
		fmt.Fprintln(&b, "\t", s)
	}
	return b.String()
}

// TestAgreesWithModel asks the evaluator and the model the same, of all manifests, with the listing of every nft. Where
// there are many questions, all are asked of one listing, and some of the others, which differ from it in their form
// only.
func TestAgreesWithModel(t *testing.T) {
	causes := map[dataplane.Cause]int{}
	for _, m := range manifests(t) {
		t.Run(m.name, func(t *testing.T) {
			questions := m.questions()
			for _, q := range questions {
				causes[dataplane.Explain(m.config, m.snap, q.model).Cause]++
			}
			all := m.listings(t)
			for i, name := range slices.Sorted(maps.Keys(all)) {
				r := parse(t, all[name])
				asked, wrong := 0, 0
				for k, q := range questions {
					if i > 0 && len(questions) > 1000 && k%7 != i {
						continue
					}
					asked++
					if err := m.disagreement(r, q); err != nil {
						if wrong++; wrong <= 5 {
							t.Errorf("%s: %v", name, err)
						}
					}
				}
				t.Logf("%s (%s): %d questions, %d disagreements", name, r.Version, asked, wrong)
			}
		})
	}
	for c := dataplane.NotService; c <= dataplane.FromOutsideToLoopback; c++ {
		t.Logf("%s: %d", c, causes[c])
		if causes[c] < 10 {
			t.Errorf("%d questions have the answer %s", causes[c], c)
		}
	}
}
