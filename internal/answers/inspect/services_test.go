package inspect

import (
	"fmt"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"strings"
	"testing"

	"github.com/verdict-proxy/verdict/internal/system/terminal"
)

// TestServices: all pages are read, and the table has the worst first.
func TestServices(t *testing.T) {
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		q := r.URL.Query()
		if q.Get("namespace") != "shop" || q.Get("trouble") != "true" || q.Get("for") != "false" {
			t.Errorf("asked for %v", q)
		}
		if q.Get("after") == "" {
			fmt.Fprint(w, `{"next":"shop/a","services":[{"service":"shop/a","type":"NodePort","state":"programmed",
				"clusterIPs":["10.96.0.1","fd00::1"],"externalIPs":["192.0.2.1"],"loadBalancerIPs":["::2"],
				"ports":[{"port":80,"protocol":"tcp","nodePort":30080,"usable":2,"local":1,"by":"ipvs rr"}],
				"clientAddress":"kept","usable":2,"endpoints":3}]}`)
			return
		}
		fmt.Fprintf(w, `{"services":[{"service":"shop/b","for":"G","type":"ClusterIP","state":"rejected","why":%q}],
			"status":{"firstProgrammed":"2026-11-22T14:02:00Z","failing":{"error":"no memory"}}}`,
			strings.Repeat("no ", 40))
	}))
	defer server.Close()
	s, err := LoadServices(t.Context(), netip.MustParseAddrPort(strings.TrimPrefix(server.URL, "http://")),
		ServicesAsked{Namespace: "shop", Trouble: true})
	if err != nil {
		t.Fatal(err)
	}
	for wide, want := range map[bool]string{
		false: `SERVICE     TYPE       ADDRESSES                       PORTS         ENDPOINTS  STATE
shop/b (G)  ClusterIP  -                               -             0/0        rejected: ` +
			strings.Repeat("no ", 20)[:60] + `
shop/a      NodePort   10.96.0.1,fd00::1,192.0.2.1,+1  80:30080/tcp  2/3        programmed
not synced: transactions fail: no memory
`,
		true: `SERVICE     TYPE       ADDRESSES                        PORTS         ` +
			`ENDPOINTS  LOCAL  CHOSEN BY  CLIENTS  STATE
shop/b (G)  ClusterIP  -                                -             0/0        -      -          -        ` +
			"rejected: " + strings.Repeat("no ", 40) + `
shop/a      NodePort   10.96.0.1,fd00::1,192.0.2.1,::2  80:30080/tcp  2/3        1      ipvs rr    kept     programmed
not synced: transactions fail: no memory
`} {
		var text strings.Builder
		PrintServices(terminal.NewPrinter(&text), s, wide)
		if strings.ReplaceAll(text.String(), " \n", "\n") != strings.ReplaceAll(want, " \n", "\n") {
			t.Errorf("wide %v:\n%s", wide, text.String())
		}
	}
}
