package kernel

import (
	"context"
	"fmt"
	"hash/fnv"
	"net/netip"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/verdict-proxy/verdict/internal/lab"
	"github.com/verdict-proxy/verdict/internal/lab/labtest"
	"github.com/verdict-proxy/verdict/internal/system/ipfamily"
	"github.com/verdict-proxy/verdict/nft"
	"github.com/verdict-proxy/verdict/sync/dataplane"
	"github.com/verdict-proxy/verdict/sync/snapshot"
)

// refuse has pools of some ports refuse a share, and what is over limits, that follow from the port's name.
func refuse(ports ...*dataplane.ServicePort) {
	for _, sp := range ports {
		h := fnv.New32a()
		h.Write([]byte(sp.Name.String()))
		switch n := h.Sum32(); n >> 8 % 6 {
		case 0:
			sp.Limits.Rate, sp.Limits.Drop = snapshot.RateLimit{Rate: 1 + n%snapshot.MaxRate, Burst: 1 + n>>4%5}, n&1 == 0
		case 1:
			sp.Limits.Client = snapshot.RateLimit{Rate: 20, Burst: 40}
		case 2:
			sp.Limits, sp.Full = snapshot.Limits{Open: 7, Drop: n&1 == 0}, n&2 == 0
		case 3:
			sp.Limits, sp.FullClients = snapshot.Limits{ClientOpen: 7, Drop: n&1 == 0}, senders(sp.Family())[2:]
		}
		for i, p := range [...]*dataplane.Pool{sp.Cluster, sp.Local} {
			if share := h.Sum32() >> i % (2 * dataplane.RefusedOf); share < dataplane.RefusedOf && len(p.Endpoints) > 0 {
				p.Refused = uint16(share)
			}
		}
	}
}

// refuseShare has all pools with endpoints refuse a share.
func refuseShare(st *dataplane.State, share uint16) *dataplane.State {
	for _, svc := range st.Services {
		for _, sp := range svc.Ports {
			for _, p := range [...]*dataplane.Pool{sp.Cluster, sp.Local} {
				if len(p.Endpoints) > 0 {
					p.Refused = share
				}
			}
		}
	}
	return st
}

// sharesCase is a way of choosing an endpoint, before which a share is refused.
type sharesCase struct {
	name   string
	change func(*snapshot.Service)
	// number is that of the Service: those with an even one have many frontends.
	number int
	kind   dataplane.Kind
}

var sharesCases = []sharesCase{
	{"random", asIs, 1, dataplane.ClusterIP},
	{"many frontends", asIs, 2, dataplane.ClusterIP},
	{"affinity", func(s *snapshot.Service) { s.Affinity = time.Hour }, 3, dataplane.ClusterIP},
	{"hash", func(s *snapshot.Service) { s.Scheduling = &snapshot.Scheduling{Scheduler: snapshot.Hash, Port: true} }, 5,
		dataplane.ClusterIP},
	{"policy Local", func(s *snapshot.Service) { s.ExternalLocal = true }, 7, dataplane.ExternalIP},
	{"source ranges", func(s *snapshot.Service) {
		s.SourceRanges = []netip.Prefix{netip.MustParsePrefix("0.0.0.0/0"), netip.MustParsePrefix("::/0")}
	}, 9, dataplane.LoadBalancerIP},
}

// TestRefusedShares: of the connections to a frontend, as large a share is refused as it should be, whoever chooses
// the endpoints of the others; no packet goes on without an endpoint.
func TestRefusedShares(t *testing.T) {
	c, b := proxied(t, lab.Config{LocalPods: 3, RemotePods: 3})
	counters := openCounters(t, c.Node)
	for number, test := range sharesCases {
		for n, share := range []uint16{1, 2000, 5000, 9999} {
			if n != number%4 && number > 0 {
				continue
			}
			s := flowService{number: test.number, state: both}
			st := refuseShare(oneState(c, s, test.change), share)
			applyOnlyState(t, b, st)
			from := c.Pods[2]
			if test.kind != dataplane.ClusterIP {
				from = c.Outside
			}
			for _, f := range ipfamily.All {
				at := s.frontendOf(c, test.kind, f)
				n := 4000
				if few := share == 1 && f == ipfamily.IPv4 || share == 9999 && f == ipfamily.IPv6; few && number == 0 {
					n = 240_000 // of which 0 would be too few
				}
				checkShare(t, c, counters, st, from, at, n, fmt.Sprintf("%s, %v", test.name, f))
			}
		}
	}
	quiet(t, b)
}

// checkShare sends datagrams to a frontend.
func checkShare(t *testing.T, c *lab.Cluster, counters *Counters, st *dataplane.State, from *lab.Host,
	at netip.AddrPort, n int, what string,
) {
	t.Helper()
	share, most := 0, 50_000
	for _, svc := range st.Services {
		share = int(svc.Ports[0].Cluster.Refused)
	}
	read := func() int { return int(countAll(t, counters, st).refused[dataplane.RefusedNoEndpoints]) }
	sent, served, refused := 0, 0, -read()
	labtest.Check(t, c.Node.Sysctl("net/netfilter/nf_conntrack_udp_timeout", "1"))
	for ; n > 0; n -= most {
		forgetFlows(t, c.Node)
		arrived, translated := countArrivals(t, c.Node, at), countTranslated(t, c.Node, ipfamily.Of(at.Addr()))
		spray(t, []*lab.Host{from}, ipfamily.Of(at.Addr()), at, min(n, most))
		sent, served = sent+arrived(), served+translated()
	}
	refused += read()
	t.Logf("%s, %d of %d: %d sent, %d refused, %d served", what, share, dataplane.RefusedOf, sent, refused, served)
	if refused+served != sent || sent == 0 {
		t.Errorf("%s, %d: %d packets are neither refused nor translated", what, share, sent-refused-served)
	}
	if !labtest.Plausible(refused, sent, float64(share)/dataplane.RefusedOf) {
		t.Errorf("%s, %d: %d of %d are refused", what, share, refused, sent)
	}
}

// applyOnlyState has a backend hold a State instead of any other.
func applyOnlyState(t *testing.T, b *Backend, st *dataplane.State) {
	t.Helper()
	names := b.model.Names()
	for name := range st.Services {
		names = append(names, name)
	}
	_, err := b.ApplyAll(st, dataplane.Change{Services: names, Globals: true})
	labtest.Check(t, err)
}

// countTranslated counts the first packets that leave a host, or stay there, for an endpoint, from now on.
func countTranslated(t testing.TB, h *lab.Host, f ipfamily.Family) func() int {
	t.Helper()
	labtest.Run(t, h, fmt.Sprintf(`table %[1]s translated
		delete table %[1]s translated
		table %[1]s translated {
			chain c { type filter hook postrouting priority 300; udp dport %[2]d ct status dnat ct direction original counter; }
		}`, f.NFT(), targetPort), "nft", "-f", "-")
	return func() int {
		text := labtest.Run(t, h, "", "nft", "list", "table", f.NFT(), "translated")
		_, text, _ = strings.Cut(text, "counter packets ")
		var n int
		_, err := fmt.Sscan(text, &n)
		labtest.Check(t, err)
		return n
	}
}

// TestRefusedTCP: a client of a refused share gets a reset at once, and the others are answered.
func TestRefusedTCP(t *testing.T) {
	const dials = 400
	c, b := proxied(t, lab.Config{LocalPods: 3, RemotePods: 3})
	s := flowService{number: 1, state: both}
	for _, f := range ipfamily.All {
		apply(t, b, refuseShare(oneState(c, s, asIs), 5000))
		to, outcomes := s.frontendOf(c, dataplane.ClusterIP, f), map[lab.Outcome]int{}
		for range dials {
			outcomes[c.Pods[2].Dial(snapshot.TCP, to, lab.Options{Timeout: 10 * time.Second}).Outcome]++
		}
		if outcomes[lab.Answered]+outcomes[lab.Refused] != dials || !labtest.Plausible(outcomes[lab.Refused], dials, 0.5) {
			t.Errorf("%v: %v", f, outcomes)
		}
	}
}

// TestSharesChangeUnderLoad changes a share, or limits that nobody reaches, or has them come and go, as fast as the
// kernel takes it, while clients connect all the time. Nobody hangs, and nobody is refused whose draw is in neither
// share.
func TestSharesChangeUnderLoad(t *testing.T) {
	const wide = "rate=1000000 client-rate=10000 client-burst=100000"
	for _, test := range []struct {
		shares [2]uint16
		limits [2]string
	}{
		{[2]uint16{0, 1}, [2]string{}}, {[2]uint16{2000, 6000}, [2]string{}}, {[2]uint16{}, [2]string{"", wide}},
		{[2]uint16{0, 2000}, [2]string{wide, "rate=500000 client-rate=5000 client-burst=50000 over=drop"}},
	} {
		t.Run(fmt.Sprint(test), func(t *testing.T) {
			shares := test.shares
			c, b := proxied(t, lab.Config{LocalPods: 3, RemotePods: 3})
			s := flowService{number: 1, state: both}
			var states [2]*dataplane.State
			for i := range states {
				change := asIs
				if test.limits[i] != "" {
					change = limitTo(test.limits[i])
				}
				states[i] = refuseShare(oneState(c, s, change), shares[i])
			}
			apply(t, b, states[0])
			to := s.frontendOf(c, dataplane.ClusterIP, ipfamily.IPv4)
			var outcomes [4]atomic.Int64
			var clients sync.WaitGroup
			ctx, stop := context.WithCancel(t.Context())
			for _, from := range []*lab.Host{c.Node, c.Node2, c.Pods[2]} {
				clients.Go(func() {
					for ctx.Err() == nil {
						outcomes[from.Dial(snapshot.TCP, to, lab.Options{Timeout: 10 * time.Second}).Outcome].Add(1)
					}
				})
			}
			for i := range underLoad(4000) {
				_, err := b.ApplyAll(states[(i+1)%2], dataplane.Change{Services: []snapshot.Name{s.name()}})
				labtest.Check(t, err)
			}
			stop()
			clients.Wait()
			answered, refused := outcomes[lab.Answered].Load(), outcomes[lab.Refused].Load()
			t.Logf("%d answered, %d refused", answered, refused)
			if n := outcomes[lab.TimedOut].Load() + outcomes[lab.Failed].Load(); n > 0 {
				t.Errorf("%d hang or fail, %d are answered", n, answered)
			}
			all, most := int(answered+refused), float64(shares[1])/dataplane.RefusedOf
			if float64(refused) > most*float64(all) && !labtest.Plausible(int(refused), all, most) || all < 1000 {
				t.Errorf("%d of %d are refused", refused, all)
			}
			quiet(t, b)
		})
	}
}

// TestRefusedShareIsListed: every nft lists the rule and the ranges as Verdict prints them; somebody else's range is
// found and corrected; and a new process writes nothing.
func TestRefusedShareIsListed(t *testing.T) {
	c, b := proxied(t, lab.Config{LocalPods: 2, RemotePods: 1})
	st := refuseShare(oneState(c, flowService{number: 1, state: both}, asIs), 2000)
	apply(t, b, st)
	for _, n := range labtest.Nfts(t) {
		text := labtest.Run(t, c.Node, "", n.Path, "list", "table", "ip", nft.TableName)
		if !strings.Contains(text, " . 0-1999 comment \"flows/s1:") ||
			!strings.Contains(text, "\tmeta priority . numgen random mod 10000 @refused-shares counter packets 0 bytes 0 goto") {
			t.Errorf("%s: %s", n.Path, text)
		}
	}
	b = open(t, c.Node, Options{})
	if r, err := b.Apply(st, dataplane.Change{}); err != nil || r.Added+r.Removed+r.Replaced > 0 {
		t.Errorf("a new process writes: %+v, %v", r, err)
	}
	before := held(t, b)
	listed, err := b.List()
	labtest.Check(t, err)
	set, at := nft.SetByID(nft.RefusedShares), ipfamily.IPv4
	text := listed[at].Elements[nft.RefusedShares][0].Text(at, &set)
	labtest.Run(t, c.Node, fmt.Sprintf("delete element ip %[1]s %[2]s { %[3]s }\nadd element ip %[1]s %[2]s { %[4]s }\n",
		nft.TableName, set.Name(), text, strings.Replace(text, "1999", "7999", 1)), "nft", "-f", "-")
	if found := check(t, b); len(found) == 0 {
		t.Error("another share is not found")
	}
	_, err = b.Apply(st, dataplane.Change{})
	labtest.Check(t, err)
	if after := held(t, b); after != before {
		t.Errorf("another share is not corrected: %s", labtest.FirstDifference(after, before))
	}
}
