package inspect

import (
	"fmt"
	"strings"

	"github.com/verdict-proxy/verdict/internal/system/terminal"
	"github.com/verdict-proxy/verdict/sync/dataplane"
)

// Backend is another Service that gets a share of a port's connections, or whose share is refused.
type Backend struct {
	// Via names what led to it, as in "Gateway edge/db, listener db, TCPRoute shop/db"; empty if nobody said.
	Via string `json:"via,omitempty"`
	// Service and Port are empty if only its refusal is known.
	Service string `json:"service,omitempty"`
	Port    uint16 `json:"port,omitempty"`
	// Weight of Of is its share.
	Weight uint32 `json:"weight"`
	Of     int    `json:"of"`
	// Refused says why its share is refused; empty if it is not. Elsewhere says that only other nodes have endpoints of
	// it, so that the others get its share here.
	Refused   string `json:"refused,omitempty"`
	Elsewhere bool   `json:"elsewhere,omitempty"`
}

// backendsOf returns the backends of the port that answers; nil if it has none.
func backendsOf(x *dataplane.Explanation) (list []Backend) {
	if len(x.Backends) == 0 {
		return nil
	}
	p := x.Object.Backends.Of(x.Port.Name.Port)
	via := []string{x.Object.Backends.For}
	if p.Listener != "" {
		via = append(via, "listener "+p.Listener)
	}
	text := strings.Trim(strings.Join(append(via, p.Route), ", "), ", ")
	for _, s := range x.Backends {
		b := Backend{Via: text, Port: s.Port, Weight: s.Weight, Of: p.Sum(), Elsewhere: s.State == dataplane.ShareElsewhere}
		if s.Service.Name != "" {
			b.Service = s.Service.String()
		}
		if b.Refused = s.Unknown; s.State == dataplane.ShareRefused && b.Refused == "" {
			b.Refused = "it has no endpoint that can be used"
		}
		list = append(list, b)
	}
	return list
}

func (b *Backend) String() string {
	text := "a backend"
	if b.Service != "" {
		text = fmt.Sprintf("backend %s:%d", b.Service, b.Port)
	}
	if b.Via != "" {
		text = b.Via + ": " + text
	}
	text += fmt.Sprintf(", %d of %d", b.Weight, b.Of)
	switch {
	case b.Refused != "":
		text += ", refused: " + b.Refused
	case b.Elsewhere:
		text += ", to the others here: only other nodes have endpoints of it, and the policy is Local"
	}
	return text
}

func printBackends(s *terminal.Printer, list []Backend) {
	for i, b := range list {
		if i > 0 {
			b.Via = ""
		}
		text := b.String()
		if b.Refused != "" {
			text = s.Paint(terminal.Red, text)
		}
		labelled(s, first(i, "Backends"), "%s", text)
	}
}

// refusedText says what part of all connections is refused before an endpoint is chosen; empty if none is.
func refusedText(part float64) string {
	if part == 0 {
		return ""
	}
	return ", and " + percent(part) + " of the connections are refused: the shares of backends without endpoints"
}
