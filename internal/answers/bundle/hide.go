package bundle

import (
	"fmt"
	"net/netip"
	"regexp"
	"strings"

	"github.com/verdict-proxy/verdict/internal/system/ipfamily"
	"github.com/verdict-proxy/verdict/internal/system/sloppy"
)

// hidden is what takes the place of a secret.
const hidden = "[secret left out]"

// secrets are what none of the files should have anyway; what is in their first group stays.
var secrets = []*regexp.Regexp{
	regexp.MustCompile(`eyJ[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]*`), // of a ServiceAccount
	regexp.MustCompile(`(?i)((?:bearer|basic) +)[A-Za-z0-9._~+/=-]{8,}`),
	regexp.MustCompile(`(?i)((?:token|password|secret|key-data|certificate-data|authority-data)"?\s*[:=]\s*"?)` +
		`[^\s"/,}\[][^\s",}]{3,}`), // a path may stay
	regexp.MustCompile(`(?s)-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(?:-----END [A-Z ]*PRIVATE KEY-----|$)`),
}

func withoutSecrets(text []byte) []byte {
	for _, s := range secrets {
		text = s.ReplaceAll(text, []byte("${1}"+hidden))
	}
	return text
}

var (
	// sixLike are letters of IPv6 addresses in a row, behind the last letter of a word if there is one.
	sixLike  = regexp.MustCompile(`[G-Zg-z_]?[0-9A-Fa-f:.]*:[0-9A-Fa-f:.]*:[0-9A-Fa-f:.]*`)
	fourLike = regexp.MustCompile(`\d{1,3}(?:\.\d{1,3}){3}`)
	// dashed is how clouds write an address in the name of a node.
	dashed = regexp.MustCompile(`\b\d{1,3}(?:-\d{1,3}){3}\b`)
)

// addresses gives each address a name of its own.
type addresses struct {
	names map[netip.Addr]string
	count ipfamily.Per[int]
}

func newAddresses() *addresses { return &addresses{names: map[netip.Addr]string{}} }

// replace replaces all addresses of a text; ports, and the lengths of prefixes, stay.
func (a *addresses) replace(text []byte) []byte {
	text = sixLike.ReplaceAllFunc(text, func(like []byte) []byte { return []byte(a.six(string(like))) })
	text = fourLike.ReplaceAllFunc(text, func(like []byte) []byte { return []byte(a.name(string(like))) })
	return dashed.ReplaceAllFunc(text, func(like []byte) []byte {
		return []byte(a.name(strings.ReplaceAll(string(like), "-", ".")))
	})
}

// six replaces an IPv6 address in a run of such letters: what is before and behind it may be another text's.
func (a *addresses) six(run string) string {
	head := ""
	if c := run[0]; c == '_' || c > 'f' || c >= 'G' && c <= 'Z' { // the end of a word, before a colon
		at := strings.IndexByte(run, ':') + 1
		head, run = run[:at], run[at:]
	}
	for end := len(run); end > 1; end-- {
		if name := a.name(run[:end]); strings.Contains(run[:end], ":") && name != run[:end] {
			return head + name + run[end:]
		}
		if c := run[end-1]; c != ':' && c != '.' {
			break
		}
	}
	return head + run
}

// name returns the name of an address, or a text that is none as it is.
func (a *addresses) name(text string) string {
	addr, _, ok := sloppy.ParseAddr(text) // objects may have leading zeros
	if !ok {
		return text
	}
	if a.names[addr] == "" {
		f := ipfamily.Of(addr)
		a.count[f]++
		a.names[addr] = fmt.Sprintf("%s-%d", f, a.count[f])
	}
	return a.names[addr]
}
