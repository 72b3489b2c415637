package kernel

import (
	"fmt"
	"math/rand/v2"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"github.com/verdict-proxy/verdict/internal/lab"
	"github.com/verdict-proxy/verdict/internal/lab/labtest"
	"github.com/verdict-proxy/verdict/internal/system/ipfamily"
	"github.com/verdict-proxy/verdict/nft"
	"github.com/verdict-proxy/verdict/sync/dataplane"
	"github.com/verdict-proxy/verdict/sync/snapshot"
)

func openReader(t testing.TB, h *lab.Host) *Reader {
	t.Helper()
	var r *Reader
	labtest.Check(t, h.Do(func() (err error) {
		r, err = OpenReader()
		return err
	}))
	t.Cleanup(func() { r.Close() })
	return r
}

// TestReaderReadsStructures: what rules were made for is read from the rules alone, and the digest of what was read
// is that of the revision.
func TestReaderReadsStructures(t *testing.T) {
	for _, name := range slices.Sorted(mapsKeys(configs)) {
		for _, all := range []bool{false, true} {
			cfg := configs[name]
			cfg.MasqueradeAll = all
			st, _ := dataplane.Compute(cfg, cluster(rand.New(rand.NewPCG(3, 1)), 20, true))
			checkStructure(t, fmt.Sprint(name, " ", all), st)
		}
	}
	for _, pods := range []string{
		"10.244.0.0/16", "10.0.0.0/9", "10.128.0.0/11", "10.1.2.0/24", "10.1.2.3/32", "0.0.0.0/0", "192.0.2.128/25",
	} {
		p := dataplane.Pods{CIDR: netip.MustParsePrefix(pods)}
		checkStructure(t, pods,
			&dataplane.State{Pods4: p, Pods6: dataplane.Pods{InterfacePrefix: "cali"}, LocalhostNodePorts: true})
	}
	for _, pods := range []string{"fd00::/8", "2001:db8:7::/48", "fd00:244::/33", "::/0"} {
		p := dataplane.Pods{CIDR: netip.MustParsePrefix(pods)}
		checkStructure(t, pods, &dataplane.State{Pods4: dataplane.Pods{Interface: "fifteen-letters"}, Pods6: p})
	}
}

func mapsKeys[V any](m map[string]V) func(func(string) bool) {
	return func(yield func(string) bool) {
		for k := range m {
			if !yield(k) {
				return
			}
		}
	}
}

func checkStructure(t *testing.T, name string, st *dataplane.State) {
	t.Helper()
	h, b := host(t)
	apply(t, b, st)
	reader := openReader(t, h)
	c, err := reader.Contents(nil)
	labtest.Check(t, err)
	if !c.Quiet || c.Wrong != nil || c.Contradictions != nil {
		t.Errorf("%s: quiet %v, wrong %v, contradictions %v", name, c.Quiet, c.Wrong, c.Contradictions)
	}
	labtest.Check(t, reader.piecemeal(c))
	if c.Contradictions != nil || c.Wrong != nil || c.Unchecked != 0 {
		t.Errorf("%s: %v %v %d", name, c.Contradictions, c.Wrong, c.Unchecked)
	}
	for i, f := range ipfamily.All {
		want := nft.StructureOf(st, f)
		want.Uses = b.model.Layout(f).Uses
		if got := c.Tables[i].Structure; got != want {
			t.Errorf("%s %s: %+v, want %+v", name, f.NFT(), got, want)
		}
		found := &c.Found[i]
		held, written := nft.DigestsOfElements(f, c.Tables[i].Structure, found), found.Digests.With(found.Revision.Digest)
		if held != written {
			t.Errorf("%s %s: digest %s, the revision says %s", name, f.NFT(), held.Total(), written.Total())
		}
	}
	var m nft.Model
	m.Load(st)
	if d := m.Differences(&c.Found, &ipfamily.Per[nft.Table]{c.Tables[0].Table, c.Tables[1].Table}); d != nil {
		t.Errorf("%s: %v", name, d)
	}
}

// TestReaderSeesForeignHands: what others change with nft is found, and only that.
func TestReaderSeesForeignHands(t *testing.T) {
	c, b, s, st := one(t, both, asIs)
	reader := openReader(t, c.Node)
	nftDo := func(text string) { labtest.Run(t, c.Node, text, labtest.Nfts(t)[0].Path, "-f", "-") }
	look := func() (wrong []string, differences []string, sound bool) {
		t.Helper()
		found, err := reader.Contents(nil)
		labtest.Check(t, err)
		var m nft.Model
		m.Load(st)
		sound = true
		for i, f := range ipfamily.All {
			at := &found.Found[i]
			sound = sound && nft.DigestsOfElements(f, found.Tables[i].Structure, at) == at.Digests.With(at.Revision.Digest)
		}
		for _, d := range found.Contradictions {
			wrong = append(wrong, d.String())
		}
		// What is looked for by pieces, as it must be if the tables are written to all the time, is the same but for slots
		// that no pool leads to.
		pieces := *found
		labtest.Check(t, reader.piecemeal(&pieces))
		for _, d := range found.Contradictions {
			if !strings.Contains(d.Text, "no pool leads there") &&
				!slices.ContainsFunc(pieces.Contradictions, func(p nft.Difference) bool { return p.String() == d.String() }) {
				t.Errorf("by pieces it is not found: %v", d)
			}
		}
		if pieces.Unchecked > 0 || len(pieces.Contradictions) > len(found.Contradictions) ||
			len(pieces.Wrong) > len(found.Wrong) {
			t.Errorf("by pieces: %d unchecked, %v, %v", pieces.Unchecked, pieces.Contradictions, pieces.Wrong)
		}
		tables := ipfamily.Per[nft.Table]{found.Tables[0].Table, found.Tables[1].Table}
		for _, d := range m.Differences(&found.Found, &tables) {
			differences = append(differences, d.String()+" "+d.Port)
		}
		return append(wrong, found.Wrong...), differences, sound
	}
	if wrong, differences, sound := look(); wrong != nil || differences != nil || !sound {
		t.Fatalf("nobody changed anything: %v %v %v", wrong, differences, sound)
	}
	name := s.name().String()
	pool := func(f ipfamily.Family, k dataplane.Key) (id string) {
		for _, l := range nft.List(st) {
			for _, e := range l.Elements[nft.Services] {
				if set := nft.SetByID(nft.Services); l.Table.Family == f && e.FrontendKey() == k {
					_, id, _ = strings.Cut(e.Element.Text(f, &set), " : ")
				}
			}
		}
		return id
	}
	tcp := pool(ipfamily.IPv4, dataplane.Key{Addr: addr("10.96.0.1"), Protocol: snapshot.TCP, Port: 80})
	sctp := pool(ipfamily.IPv4, dataplane.Key{Addr: addr("10.96.0.1"), Protocol: snapshot.SCTP, Port: 80})
	udp := pool(ipfamily.IPv6, dataplane.Key{Addr: addr("fd00:10:96::1"), Protocol: snapshot.UDP, Port: 80})
	for _, test := range []struct {
		text, wrong, differences string
		sound                    bool
	}{
		{"delete element ip verdict endpoints { " + tcp + " . tcp . 1 }", "slot 1 is not there",
			"+ ip endpoints { " + tcp + " . tcp . 1 comment \"" + name + ":tcp\" : 10.244.1.11 . 8080 } " +
				name + ":tcp", false},
		{"add element ip6 verdict endpoints { " + udp + " . udp . 7 : fd00::1 . 1 }",
			"no pool leads there", "- ip6 endpoints { " + udp + " . udp . 7 : fd00::1 . 1 }", false},
		{"delete element ip verdict pools { " + sctp + " }; add element ip verdict pools { " + sctp + " : 0:1 }",
			"its verdict is none that Verdict writes there", "+ ip pools { " + sctp + " comment \"" + name + ":sctp\"", false},
		{"delete element ip verdict pools { " + sctp + " }", "its pool is not there", "+ ip pools { " + sctp, false},
		{"insert rule ip verdict output counter accept",
			"the rules of chain output are others", "- ip chain output { (counter, accept) }", true},
		{"flush chain ip6 verdict translated",
			"the rules of chain translated are others", "+ ip6 chain translated { goto from-cluster-ip }", true},
		{"add chain ip verdict mine",
			"chain mine is not ours", "- ip chain mine", true},
		{"delete element ip verdict addresses { 10.96.0.1 }", "", "+ ip addresses { 10.96.0.1 : 0:1 } " + name, false},
		{"add element ip verdict hairpin { 10.9.9.9 . 10.9.9.9 }", "", "- ip hairpin { 10.9.9.9 . 10.9.9.9 }", false},
		{"add element ip verdict service-cidrs { 10.97.0.0/16 }", "", "- ip service-cidrs { 10.97.0.0/16 }", false},
		{"delete table ip6 verdict", "ip6 verdict: the table is not there",
			"+ ip6 services { fd00:10:96::1 . tcp . 80", false},
	} {
		nftDo(test.text)
		wrong, differences, sound := look()
		if sound != test.sound || !contains(wrong, test.wrong) || !contains(differences, test.differences) {
			t.Errorf("%s:\nsound %v\n%s\n%s", test.text, sound, strings.Join(wrong, "\n"), strings.Join(differences, "\n"))
		}
		labtest.Check(t, b.Remove())
		apply(t, b, st)
		if wrong, differences, sound := look(); wrong != nil || differences != nil || !sound {
			t.Fatalf("after repair: %v %v %v", wrong, differences, sound)
		}
	}
}

// contains says whether a text is in one of the lines; there must be none if it is empty.
func contains(lines []string, text string) bool {
	if text == "" {
		return len(lines) == 0
	}
	return slices.ContainsFunc(lines, func(l string) bool { return strings.Contains(l, text) })
}

// TestReaderKeys reads single elements of every kind of set by their keys.
func TestReaderKeys(t *testing.T) {
	st, _ := dataplane.Compute(configs["cluster CIDR"], cluster(rand.New(rand.NewPCG(5, 1)), 30, true))
	h, b := host(t)
	apply(t, b, st)
	reader := openReader(t, h)
	list := nft.List(st)
	asked := [nft.NumSets]int{}
	for i, f := range ipfamily.All {
		for set := range nft.NumSets {
			for _, want := range list[i].Elements[set] {
				if set == nft.RevisionSet {
					continue
				}
				key := want.Element
				if nft.SetByID(set).Interval {
					key.Bits = uint8(8 * f.AddrLen()) // its first address
				}
				got, err := reader.Get(f, set, []nft.Element{key})
				labtest.Check(t, err)
				s := nft.SetByID(set)
				if len(got) != 1 || got[0].Element.Text(f, &s) != want.Element.Text(f, &s) {
					t.Fatalf("%s %s: asked for %s, got %v", f.NFT(), set, want.Element.Text(f, &s), got)
				}
				if s.Counter && !got[0].Counted {
					t.Fatalf("%s %s: no counter", f.NFT(), set)
				}
				asked[set]++
			}
		}
	}
	for _, set := range []nft.SetID{
		nft.Services, nft.Endpoints, nft.SourceRanges, nft.ServiceCIDRs, nft.Pools,
		nft.UncountedEndpoints, nft.StickyEndpoints,
	} {
		if asked[set] == 0 {
			t.Errorf("%s has no elements", set)
		}
	}
}
