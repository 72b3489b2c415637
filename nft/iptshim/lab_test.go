package iptshim

import (
	"testing"

	"github.com/verdict-proxy/verdict/internal/lab"
	"github.com/verdict-proxy/verdict/internal/lab/labtest"
	"github.com/verdict-proxy/verdict/internal/system/ipfamily"
)

func TestMain(m *testing.M) { labtest.Main(m) }

// variants are the two programs that write the same rules in different ways.
var variants = []string{"legacy", "nft"}

// program gives the name of one of iptables' programs.
func program(f ipfamily.Family, variant, what string) string {
	return [...]string{"iptables-", "ip6tables-"}[f] + variant + "-" + what
}

// restore writes a text.
func restore(t testing.TB, h *lab.Host, f ipfamily.Family, variant string, text []byte, args ...string) {
	t.Helper()
	if len(text) > 0 {
		labtest.Run(t, h, string(text), program(f, variant, "restore"), append([]string{"--noflush", "-w", "5"}, args...)...)
	}
}

// save reads all tables of ours.
func save(t testing.TB, h *lab.Host, f ipfamily.Family, variant string) *Saved {
	t.Helper()
	var all string
	for _, table := range Tables {
		all += labtest.Run(t, h, "", program(f, variant, "save"), "-t", string(table))
	}
	saved, err := Parse([]byte(all))
	labtest.Check(t, err)
	return saved
}
