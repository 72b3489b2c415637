package inspect

import (
	"encoding/json"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/verdict-proxy/verdict/internal/proxy/status"
	"github.com/verdict-proxy/verdict/internal/system/terminal"
)

// TestLoadStatus: all pages of digests are read, and the text names what is wrong.
func TestLoadStatus(t *testing.T) {
	now := time.Date(2026, 11, 22, 14, 2, 0, 0, time.UTC)
	then := now.Add(-90 * time.Second)
	var asked []string
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		asked = append(asked, r.URL.RawQuery)
		s := status.Status{Schema: status.Schema, Time: now, Node: "node-1", Version: "v1", Backend: "nftables", First: &then,
			Services: 2, Digest: 7, Received: status.Versions{Services: "12"}, Programmed: status.Versions{Services: "9"},
			Pending: status.Pending{Services: 1, LagSeconds: 3}, Failing: &status.Failing{Since: then, Error: "no room"},
			Quarantined: status.Quarantined{Count: 1, Services: []status.QuarantinedService{{Service: "a/q", Since: then,
				Error: "invalid"}}},
			Ejected: status.Ejected{Count: 1, Endpoints: []status.EjectedEndpoint{{Service: "a/e", Endpoint: "10.0.0.1:80",
				Cause: "refused", Since: then}}},
			Unread:    []status.Unread{{File: "/etc/a.yaml", Since: then, Error: "no answer within 10s"}},
			Preflight: []status.Finding{{Check: "no-forwarding", What: "this host forwards nothing", Advice: "let it"}},
			Drift:     status.Drift{Checked: &now, Found: 2, FoundAt: &then, Last: []string{"an element"}},
			Ledger: &status.Ledger{Record: 8, Digest: "2931cbec41112a0b2d19479b851a0272", Missing: 3,
				Error: "no space left"},
			Digests: []status.ServiceDigest{{Service: "a/1", Digest: 1, Since: then}}, Next: "a/1"}
		if r.URL.Query().Get("after") != "" {
			s.Digests, s.Next = []status.ServiceDigest{{Service: "a/2", Digest: 2, Since: then}}, ""
		}
		json.NewEncoder(w).Encode(s)
	}))
	defer server.Close()
	addr := netip.MustParseAddrPort(strings.TrimPrefix(server.URL, "http://"))
	s, err := LoadStatus(t.Context(), addr, nil, true)
	if err != nil {
		t.Fatal(err)
	}
	if len(s.Digests) != 2 || s.Next != "" || strings.Join(asked, " ") != "digests=all after=a%2F1&digests=all" {
		t.Errorf("%+v; asked %q", s.Digests, asked)
	}
	var text strings.Builder
	PrintStatus(terminal.NewPrinter(&text), s)
	for _, want := range []string{
		"node          node-1, v1, nftables\n", "programmed    2 Services, digest 0000000000000007\n",
		"versions      services 9 of 12, endpointslices unknown of unknown\n",
		"pending       1 Service and 0 EndpointSlices, the oldest for 3s\n", "failing       for 1m30s: no room\n",
		"  a/q for 1m30s: invalid\n", "  10.0.0.1:80 of a/e for 1m30s: refused\n",
		"drift         2 changes by other programs, the last 1m30s ago, not repaired yet\n  an element\n",
		"unread        /etc/a.yaml for 1m30s: no answer within 10s\n",
		"no-forwarding this host forwards nothing\n              let it\n",
		"0000000000000002 a/2 for 1m30s\n",
		"ledger        record 8, digest 2931cbec41112a0b2d19479b851a0272, 3 records missing\n" +
			"              it cannot be written: no space left\n",
	} {
		if !strings.Contains(text.String(), want) {
			t.Errorf("there is no %q in\n%s", want, text.String())
		}
	}
	text.Reset()
	s.Received, s.Programmed = status.Versions{}, status.Versions{}
	if PrintStatus(terminal.NewPrinter(&text), s); strings.Contains(text.String(), "unknown") {
		t.Errorf("manifests, which have no versions, have some in\n%s", text.String())
	}
}
