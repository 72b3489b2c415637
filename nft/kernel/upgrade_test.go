package kernel

import (
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/verdict-proxy/verdict/internal/lab/labtest"
	"github.com/verdict-proxy/verdict/internal/system/ipfamily"
	"github.com/verdict-proxy/verdict/nft"
	"github.com/verdict-proxy/verdict/sync/dataplane"
	"github.com/verdict-proxy/verdict/sync/snapshot"
)

// cart gives the objects that the rulesets in testdata/layouts were written for: a Service with session affinity of
// both families and externalTrafficPolicy Local.
func cart() *dataplane.State {
	n := snapshot.Name{Namespace: "shop", Name: "cart"}
	snap := snapshot.New()
	slice := func(name string, addrs ...string) *snapshot.Slice {
		s := &snapshot.Slice{Name: snapshot.Name{Namespace: n.Namespace, Name: name}, Service: n.Name,
			Ports: []snapshot.SlicePort{{Name: "http", Protocol: snapshot.TCP, Port: 8080}}}
		for i, a := range addrs {
			s.Endpoints = append(s.Endpoints,
				snapshot.Endpoint{Addr: addr(a), Node: fmt.Sprintf("node-%d", i+1), Ready: true, Serving: true})
		}
		return s
	}
	four, six := slice("cart-1", "10.244.1.2", "10.244.2.2"), slice("cart-2", "fd00:10:244:1::2", "fd00:10:244:2::2")
	snap.Apply(snapshot.Delta{
		Services: map[snapshot.Name]*snapshot.Service{n: {Name: n, Affinity: 3 * time.Hour, ExternalLocal: true,
			ClusterIPs: []netip.Addr{addr("10.96.0.1"),
				addr("fd00:10:96::1")}, LoadBalancerIPs: []netip.Addr{addr("203.0.113.1")},
			SourceRanges: []netip.Prefix{netip.MustParsePrefix("198.51.100.0/24"), netip.MustParsePrefix("10.0.0.0/8")},
			Ports:        []snapshot.Port{{Name: "http", Protocol: snapshot.TCP, Port: 80}}}},
		Slices: map[snapshot.Name]*snapshot.Slice{four.Name: four, six.Name: six},
	})
	cfg := configs["cluster CIDR"]
	cfg.NodeName = "node-1"
	st, _ := dataplane.Compute(cfg, snap)
	return st
}

// TestUpgrade starts on the tables of every earlier layout. They are replaced in one transaction, and the clients
// that they remember stay with their endpoints.
func TestUpgrade(t *testing.T) {
	layouts, err := filepath.Glob("testdata/layouts/*.nft")
	labtest.Check(t, err)
	if len(layouts) == 0 {
		t.Fatal("there are no earlier layouts")
	}
	n := labtest.NewNft(t)
	for _, file := range layouts {
		t.Run(filepath.Base(file), func(t *testing.T) { upgrade(t, file, n) })
	}
}

func upgrade(t *testing.T, file string, n labtest.Nft) {
	h, b := host(t)
	text, err := os.ReadFile(file)
	labtest.Check(t, err)
	labtest.Run(t, h, string(text), n.Path, "-f", "-")
	clients := map[ipfamily.Family][]string{
		ipfamily.IPv4: {"10.244.7.7", "10.244.7.8"},
		ipfamily.IPv6: {"fd00:10:244:7::7", "fd00:10:244:7::8"},
	}
	eps := map[ipfamily.Family][]string{
		ipfamily.IPv4: {"10.244.1.2", "10.244.2.2"},
		ipfamily.IPv6: {"fd00:10:244:1::2", "fd00:10:244:2::2"},
	}
	// The ids that pools have there: of both families, of this node's endpoints, and of nobody any more.
	pools, nodes, gone := []uint32{0x7057c068, 0x70b5e9a0}, uint32(0x7057cf37), uint32(0x56000001)
	key := func(client string, pool uint32) string {
		e := nft.AffinityElement(pool, addr(client))
		return fmt.Sprintf("%x:%x . %d", pool>>16, pool&0xffff, e.Slot())
	}
	if strings.HasPrefix(filepath.Base(file), "3-") {
		pools, nodes = []uint32{0xb12c12, 0x7835c1}, 0xb0224d
	}
	if filepath.Base(file) == "1.nft" {
		pools, nodes = []uint32{0x56558476, 0x566957be}, 0x56558609
		key = func(client string, pool uint32) string {
			return fmt.Sprintf("%s . %x:%x", client, pool>>16, pool&0xffff)
		}
	}
	remember := func(client string, pool uint32, ep string) {
		f := ipfamily.Of(addr(client))
		labtest.Run(t, h, fmt.Sprintf("add element %s verdict affinity { %s timeout 3h expires 2h : %s . 8080 }",
			f.NFT(), key(client, pool), ep), n.Path, "-f", "-")
	}
	for i, f := range ipfamily.All {
		for k, c := range clients[f] {
			remember(c, pools[i], eps[f][k])
		}
	}
	remember("198.51.100.9", nodes, "10.244.1.2")
	remember("10.244.7.9", gone, "10.244.1.2")
	before, err := b.reader.Generation()
	labtest.Check(t, err)
	st := cart()
	st.Evidence = strings.Contains(string(text), "chain evidence {")
	retryAll(st)
	r, err := b.Apply(st, dataplane.Change{})
	labtest.Check(t, err)
	if after, err := b.reader.Generation(); err != nil || after != before+1 || !r.Full || len(r.Left) > 0 {
		t.Errorf("generation %d became %d: %+v", before, after, r)
	}
	got := regexp.MustCompile(`(?m)^ip6? affinity .*\n`).ReplaceAllString(held(t, b), "")
	if want := wanted(st); got != want {
		t.Error(labtest.FirstDifference(got, want))
	}
	listed, err := b.List()
	labtest.Check(t, err)
	stays := func(client, service, iface, ep string) {
		t.Helper()
		reader, err := b.openTolerant()
		labtest.Check(t, err)
		defer reader.Close()
		got, err := trace(reader, dataplane.Packet{Source: addr(client), Destination: addr(service), Protocol: snapshot.TCP,
			Port: 80, Interface: iface}, dataplane.LocalNode{})
		labtest.Check(t, err)
		if end, ok := got.Bound(); !ok || end.Endpoint.Addr() != addr(ep) || end.Left < time.Hour {
			t.Errorf("%s does not stay with %s: %+v", client, ep, got.Endings)
		}
	}
	for i, c := range clients[ipfamily.IPv4] {
		stays(c, "10.96.0.1", "cni0", eps[ipfamily.IPv4][i])
		stays(clients[ipfamily.IPv6][i], "fd00:10:96::1", "cni0", eps[ipfamily.IPv6][i])
	}
	stays("198.51.100.9", "203.0.113.1", "eth0", "10.244.1.2")
	if n := len(listed[0].Elements[nft.Affinity]); n != 3 {
		t.Errorf("%d clients of IPv4 are remembered", n)
	}
	quiet(t, b)
}

// TestEvidenceSwitched turns evidence on and off, under a running backend and between two. Sets, chains and rules of
// evidence come and go in one transaction; the client that is remembered and the counters stay.
func TestEvidenceSwitched(t *testing.T) {
	for _, restart := range []bool{false, true} {
		t.Run(fmt.Sprintf("restart %v", restart), func(t *testing.T) {
			h, b := host(t)
			st := cart()
			apply(t, b, st)
			const client = "b1:2c12 . 5 timeout 3h expires 2h : 10.244.1.2 . 8080"
			const frontend = "10.96.0.1 . tcp . 80"
			labtest.Run(t, h, "add element ip verdict affinity { "+client+" }\n"+
				"delete element ip verdict services { "+frontend+" }\n"+
				"add element ip verdict services { "+frontend+` counter packets 7 bytes 420 comment "shop/cart:http"`+
				" : 90b1:2c12 }", labtest.Nfts(t)[0].Path, "-f", "-")
			for _, evidence := range []bool{true, false, true} {
				st.Evidence, st.Records = evidence, !evidence
				for _, sp := range st.Services[snapshot.Name{Namespace: "shop", Name: "cart"}].Ports {
					sp.SecondChance = snapshot.SecondChanceOff
				}
				retryAll(st)
				if restart {
					b = open(t, h, Options{})
				}
				switchEvidence(t, b, st)
			}
		})
	}
}

// switchEvidence applies a state that only gathers evidence, or no longer does.
func switchEvidence(t *testing.T, b *Backend, st *dataplane.State) {
	t.Helper()
	before, err := b.reader.Generation()
	labtest.Check(t, err)
	r, err := b.Apply(st, dataplane.Change{Globals: true, Services: slices.Collect(maps.Keys(st.Services))})
	labtest.Check(t, err)
	if after, err := b.reader.Generation(); err != nil || after != before+1 || r.Full || len(r.Left) > 0 {
		t.Errorf("generation %d became %d: %+v", before, after, r)
	}
	got := held(t, b)
	entry := regexp.MustCompile(`(?m)^ip affinity .*\n`)
	if !entry.MatchString(got) {
		t.Error("a client is no longer remembered")
	}
	if got, want := entry.ReplaceAllString(got, ""), wanted(st); got != want {
		t.Error(labtest.FirstDifference(got, want))
	}
	if has := strings.Contains(got, "ip chain evidence\n"); has != st.Evidence {
		t.Errorf("evidence %v, chain evidence there: %v", st.Evidence, has)
	}
	if has := strings.Contains(got, "ip chain record-resets\n"); has != st.Records {
		t.Errorf("records %v, chain record-resets there: %v", st.Records, has)
	}
	if has := strings.Contains(got, "retry-services"); has != st.Evidence {
		t.Errorf("evidence %v, a Service is retried: %v", st.Evidence, has)
	}
	listed, err := b.List()
	labtest.Check(t, err)
	counted := func(e nft.Listed) bool { return e.Packets == 7 }
	if !slices.ContainsFunc(listed[0].Elements[nft.Services], counted) {
		t.Errorf("a counter began again: %+v", listed[0].Elements[nft.Services])
	}
	for _, f := range ipfamily.All {
		for _, set := range nft.EvidenceSets {
			if _, _, err := b.reader.setCount(f, set); errors.Is(err, unix.ENOENT) == st.Evidence {
				t.Errorf("evidence %v, set %s %s: %v", st.Evidence, f.NFT(), set, err)
			}
		}
	}
	quiet(t, b)
}
