package kernel

import (
	"testing"

	"github.com/google/nftables/expr"
	"golang.org/x/sys/unix"

	"github.com/verdict-proxy/verdict/internal/system/ipfamily"
	"github.com/verdict-proxy/verdict/internal/system/netlink"
	"github.com/verdict-proxy/verdict/nft"
)

// TestScratchRegisters: what a rule holds for a moment may be in any register behind the key. In the key's own, or
// not where it is read from, it is another rule.
func TestScratchRegisters(t *testing.T) {
	key := nft.Concat{Fields: []nft.Field{nft.Priority, nft.SourceBucket}, Mod: nft.AffinityBuckets}
	rule := nft.Rule{nft.Update{Map: nft.Affinity, Key: key,
		Data: nft.Concat{Fields: []nft.Field{nft.DestAddr, nft.DestPort}}}}
	for name, c := range map[string]struct {
		hashed, hash, data, update int // words
		want                       bool
	}{
		"as written":                 {4, 4, 4, 4, true},
		"nft 1.0.6, in a lookup":     {6, 6, 4, 4, true},
		"nft 1.1":                    {2, 2, 2, 2, true},
		"the hash overwrites a key":  {0, 0, 4, 4, false},
		"the hash reads another":     {4, 6, 4, 4, false},
		"the data overwrites a key":  {4, 4, 1, 1, false},
		"the update writes another":  {4, 4, 4, 6, false},
		"the sender lies in the key": {1, 1, 4, 4, false},
	} {
		theirs := ruleExprs(ipfamily.IPv4, rule)
		if len(theirs) != 6 {
			t.Fatalf("the rule has %d expressions", len(theirs))
		}
		theirs[1].(*expr.Payload).DestRegister = register(c.hashed)
		theirs[2].(*expr.Hash).SourceRegister = register(c.hash)
		theirs[3].(*expr.Payload).DestRegister = register(c.data)
		theirs[4].(*expr.Payload).DestRegister = register(c.data + 1)
		theirs[5].(*expr.Dynset).SrcRegData = register(c.update)
		var listed netlink.Buffer
		for _, e := range theirs {
			listed.Attr(unix.NFTA_LIST_ELEM|unix.NLA_F_NESTED, marshal(ipfamily.IPv4, e)...)
		}
		if got := sameRules(ipfamily.IPv4, []nft.Rule{rule}, [][]byte{listed.Bytes()}); got != c.want {
			t.Errorf("%s: %v; want %v", name, got, c.want)
		}
	}
}
