package packets_test

import (
	"cmp"
	"fmt"
	"net/netip"
	"runtime"
	"strings"
	"testing"

	"github.com/verdict-proxy/verdict/internal/lab"
	"github.com/verdict-proxy/verdict/internal/lab/labtest"
	"github.com/verdict-proxy/verdict/internal/system/packets"
)

// manyCase are rules of other programs, and what becomes of a packet that a host forwards to a pod.
type manyCase struct {
	name string
	// by reads text.
	by   []string
	text string
	from string
	want packets.Verdict
	// err is what the error says; empty if there is none.
	err string
	// allocates is how many bytes may be allocated, in MB.
	allocates uint64
}

// repeated is a line for each of n numbers.
func repeated(n int, line func(i int) string) string {
	var b strings.Builder
	for i := range n {
		b.WriteString(line(i))
	}
	return b.String()
}

// numbered is an IPv4 address with a number.
func numbered(i int) string { return fmt.Sprintf("100.%d.%d.%d", 64+i>>16, i>>8&0xff, i&0xff) }

func manyCases(nft string) []manyCase {
	const many = 20_000
	rule := func(i int) string { return fmt.Sprintf("ip saddr %s tcp dport 80 counter drop\n", numbered(i)) }
	forward := "type filter hook forward priority 0; "
	table := func(chains string) string { return "table inet others {\n" + chains + "}\n" }
	legacy := func(before string, n int, chain string) string {
		return "*filter\n" + before + repeated(n, func(i int) string {
			return fmt.Sprintf("-A %s -s %s/32 -p tcp -m tcp --dport 80 -j DROP\n", chain, numbered(i))
		}) + "COMMIT\n"
	}
	read := []string{nft, "-f", "-"}
	restore := []string{"iptables-legacy-restore"}
	return []manyCase{
		{"rules in a chain that no such packet comes to", read, table("chain elsewhere {\n" + repeated(many, rule) + "}\n" +
			"chain i { type filter hook input priority 0; jump elsewhere; }\nchain f { " + forward +
			"ip saddr 198.51.100.7 drop; }\n"), "198.51.100.7", packets.Dropped, "", 4},
		{"chains that no such packet comes to", read, table(repeated(many, func(i int) string {
			return fmt.Sprintf("chain c%d { }\n", i)
		}) + "chain f { " + forward + "ip saddr 198.51.100.7 jump c7; policy drop; }\n"), "198.51.100.7", packets.Dropped,
			"", 4},
		{"too many rules on the way", read, table("chain f { " + forward + "\n" + repeated(many, rule) + "}\n"),
			"198.51.100.7", packets.Untouched, packets.ErrTooMany.Error(), 16},
		{"too many sets on the way", read, table("chain f { " + forward + "\n" + repeated(many/10, func(i int) string {
			return fmt.Sprintf("ip saddr { %s, %s } drop\n", numbered(2*i), numbered(2*i+1))
		}) + "}\n"), "198.51.100.7", packets.Untouched, "one of more than 1000 sets", 24},
		{"a large set", read, table("set s { type ipv4_addr; elements = { " + repeated(many, func(i int) string {
			return numbered(i) + ","
		}) + "} }\nchain f { " + forward + "ip saddr @s drop; }\n"), numbered(many - 1), packets.Dropped, "", 4},
		{"a large set of ranges", read, table("set s { type ipv4_addr; flags interval; elements = { " +
			repeated(many/4, func(i int) string { return fmt.Sprintf("%s-%s,", numbered(4*i), numbered(4*i+2)) }) +
			"} }\nchain f { " + forward + "ip saddr @s drop; }\n"), numbered(many - 3), packets.Dropped, "", 4},
		{"between the ranges of a large set", read, table("set s { type ipv4_addr; flags interval; elements = { " +
			repeated(many/4, func(i int) string { return fmt.Sprintf("%s-%s,", numbered(4*i), numbered(4*i+2)) }) +
			"} }\nchain f { " + forward + "ip saddr @s drop; }\n"), numbered(many - 1), packets.Untouched, "", 4},
		{"a large map of addresses and ports", read, table("map m { type ipv4_addr . inet_service : verdict\n" +
			"flags interval; elements = { " + repeated(many/4, func(i int) string {
			return fmt.Sprintf("%s . 80-90 : jump c,", numbered(i))
		}) + "} }\nchain c { reject; }\nchain f { " + forward + "ip saddr . tcp dport vmap @m; }\n"), numbered(many/4 - 1),
			packets.Rejected, "", 4},
		{"all others in a map", read, table("map m { type ipv4_addr : verdict; elements = { 192.0.2.1 : accept, " +
			"* : drop }; }\nchain f { " + forward + "ip saddr vmap @m; }\n"), "198.51.100.7", packets.Dropped, "", 4},
		{"legacy rules in a chain that no such packet comes to", restore, legacy("-A FORWARD -s 198.51.100.7 -j DROP\n", many,
			"INPUT"), "198.51.100.7", packets.Dropped, "", 24},
		{"too many legacy rules on the way", restore, legacy("", many, "FORWARD"), "198.51.100.7", packets.Untouched,
			packets.ErrTooMany.Error(), 24},
		{"a legacy table that is too large", restore, legacy("", 3*many, "INPUT"), "198.51.100.7", packets.Untouched,
			packets.ErrTooMany.Error(), 4},
	}
}

// TestOthersBounded: rules and sets of other programs, however many there are, cost a proxy little, and those on a
// packet's way are followed, or it is said that they are too many.
func TestOthersBounded(t *testing.T) {
	for _, c := range manyCases(labtest.Nfts(t)[0].Path) {
		t.Run(c.name, func(t *testing.T) {
			node := labtest.NewCluster(t, lab.Config{LocalPods: 1}).Node
			_, err := node.RunInput(c.text, c.by[0], c.by[1:]...)
			labtest.Check(t, err)
			to := netip.MustParseAddrPort("10.244.1.10:80")
			p := packets.Packet{Source: netip.AddrPortFrom(addr(c.from), 40000), Destination: to, Protocol: packets.TCP,
				Interface: "eth0"}
			var is packets.Crossing
			var before, after runtime.MemStats
			runtime.ReadMemStats(&before)
			err = node.Do(func() error {
				rules, err := packets.ReadOthers("verdict", &packets.Host{})
				if err != nil {
					return err
				}
				defer rules.Close()
				is, err = rules.Forward(p, to)
				return err
			})
			runtime.ReadMemStats(&after)
			if err != nil && !strings.Contains(err.Error(), cmp.Or(c.err, "no error")) || (err == nil) != (c.err == "") ||
				is.Verdict != c.want {
				t.Errorf("got %v, %v; want %v, %q", is, err, c.want, c.err)
			}
			if mb := (after.TotalAlloc - before.TotalAlloc) >> 20; mb > c.allocates {
				t.Errorf("allocated %d MB, want at most %d", mb, c.allocates)
			} else {
				t.Logf("allocated %d MB", mb)
			}
		})
	}
}
