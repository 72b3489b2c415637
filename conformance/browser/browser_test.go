//go:build browser

package browser

import (
	"context"
	"flag"
	"fmt"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/chromedp/cdproto/emulation"
	"github.com/chromedp/cdproto/log"
	"github.com/chromedp/cdproto/runtime"
	"github.com/chromedp/chromedp"

	"github.com/verdict-proxy/verdict/internal/answers/cluster"
	"github.com/verdict-proxy/verdict/internal/answers/cluster/clustertest"
	"github.com/verdict-proxy/verdict/internal/answers/dashboard"
	"github.com/verdict-proxy/verdict/internal/proxy/flows"
	"github.com/verdict-proxy/verdict/internal/proxy/status"
)

var update = flag.Bool("update", false, "take the pictures of docs/images anew")

// world is a cluster with something of everything that the page shows.
func world() *clustertest.Fake {
	now := time.Now()
	began, found := now.Add(-time.Hour), now.Add(-30*time.Second)
	node := func(services int) *status.Status {
		s := &status.Status{Schema: status.Schema, Version: "v0.2.0", Backend: "nftables", First: &began, Services: services,
			Digest: 7, Programmed: status.Versions{Services: "812", EndpointSlices: "8130"}}
		s.Drift.Checked = &now
		for i := range 6 {
			s.Recent = append(s.Recent, status.Change{At: now.Add(-time.Duration(i*i+1) * 3 * time.Second), Count: i + 1,
				Services: []string{"shop/cart"}, Added: i, Replaced: 1, Removed: i / 2, Seconds: 0.0003 * float64(i+1)})
		}
		return s
	}
	sick := node(13)
	sick.Pending.LagSeconds, sick.Pending.EndpointSlices = 4.2, 3
	sick.Quarantined = status.Quarantined{Count: 1, Services: []status.QuarantinedService{
		{Service: "lab/huge", Since: found, Error: "too many elements: 140,000 of 131,072"}}}
	sick.Ejected = status.Ejected{Count: 1, Endpoints: []status.EjectedEndpoint{
		{Service: "shop/web", Endpoint: "10.244.2.10:8080", Cause: "unanswered", Since: found}}}
	drifted := node(13)
	drifted.Drift.Found, drifted.Drift.FoundAt, drifted.Drift.Repaired = 1, &found, &found
	drifted.Drift.Last = []string{"ip verdict: an element of endpoints is gone"}
	f := &clustertest.Fake{Statuses: map[string]*status.Status{"node-1": node(13), "node-2": drifted, "node-3": sick},
		Flows: recorded().Print, Explanation: "Packet     10.244.1.7 -> 10.96.20.3:80/tcp\nService    shop/catalog:http\n" +
			"Outcome    sent to one of 3 endpoints\n"}
	for i, name := range []string{"shop/web", "shop/cart", "shop/catalog", "kube-system/kube-dns", "lab/<i>x</i>"} {
		f.Ports = append(f.Ports, cluster.TopPort{Service: name, Port: "http", Rate: 40.5 / float64(i*i+1),
			Endpoints: []cluster.TopEndpoint{{Address: "10.244.1.5", Port: 8080, Rate: 3}, {Address: "fd00::5", Port: 8080}}})
	}
	return f
}

// recorded is what the nodes of world recorded.
func recorded() *clustertest.Recorded {
	r := &clustertest.Recorded{Nodes: []string{"node-1", "node-2", "node-3"}}
	for i, s := range []struct {
		client, service string
		bytes           uint64
		failures        uint64
	}{
		{"ingress/gateway", "shop/web", 9e9, 0}, {"shop/web", "shop/cart", 8e8, 0}, {"shop/web", "shop/catalog", 3e9, 0},
		{"shop/cart", "shop/payments", 2e6, 9}, {"shop/cart", "kube-system/kube-dns", 3e5, 0},
		{"shop/web", "kube-system/kube-dns", 9e5, 0}, {"jobs/report", "shop/catalog", 4e7, 0},
		{"monitoring/prometheus", "shop/web", 6e6, 0}, {"monitoring/prometheus", "shop/cart", 5e6, 0},
		{"198.51.100.0/24", "ingress/gateway", 7e9, 0}, {"203.0.113.0/24", "ingress/gateway", 2e8, 0},
	} {
		r.Sums = append(r.Sums, flows.Sum{Client: s.client, ClientZone: string(rune('a' + i%3)), Service: s.service,
			Connections: 60, Failures: s.failures, Sent: flows.Traffic{Bytes: s.bytes / 10},
			Received: flows.Traffic{Bytes: s.bytes}})
	}
	for i := range 3 {
		r.Fail(time.Duration(i*i+1)*7*time.Second, "shop/cart", "shop/payments", flows.Refused, "")
	}
	r.Fail(40*time.Second, "shop/cart", "shop/payments", flows.Rejected, "no-endpoints")
	return r
}

// page opens the dashboard in a browser of its own and gives what its console said.
func page(t *testing.T, nodes *clustertest.Fake, width, height int64) (ctx context.Context, said *[]string) {
	t.Helper()
	l := httptest.NewUnstartedServer(nil)
	s := dashboard.New(nodes.Cluster(), "shop", 300*time.Millisecond)
	l.Config.Handler = s.Handler()
	l.Start()
	t.Cleanup(l.Close)
	options := append(chromedp.DefaultExecAllocatorOptions[:], chromedp.NoSandbox, // root may not have one
		chromedp.WindowSize(int(width), int(height)))
	allocated, end := chromedp.NewExecAllocator(t.Context(), options...)
	t.Cleanup(end)
	ctx, end = chromedp.NewContext(allocated, chromedp.WithErrorf(t.Logf))
	t.Cleanup(end)
	if err := chromedp.Run(ctx); err != nil { // the browser lives as long as the context of its first call
		t.Fatal(err)
	}
	said = &[]string{}
	chromedp.ListenTarget(ctx, func(event any) {
		switch e := event.(type) {
		case *runtime.EventExceptionThrown:
			*said = append(*said, e.ExceptionDetails.Error())
		case *log.EventEntryAdded:
			*said = append(*said, e.Entry.Text)
		}
	})
	do(t, ctx, chromedp.EmulateViewport(width, height), log.Enable(), chromedp.Navigate(s.URL(l.Listener.Addr())),
		chromedp.WaitVisible(`#state.live`), chromedp.WaitVisible(`#services tbody tr[data-name]`))
	return ctx, said
}

func do(t *testing.T, ctx context.Context, actions ...chromedp.Action) {
	t.Helper()
	limited, cancel := context.WithTimeout(ctx, time.Minute)
	defer cancel()
	if err := chromedp.Run(limited, actions...); err != nil {
		t.Fatal(err)
	}
}

func text(t *testing.T, ctx context.Context, selector string) (out string) {
	t.Helper()
	do(t, ctx, chromedp.Text(selector, &out))
	return out
}

// until waits for a condition of the page, in its own language.
func until(t *testing.T, ctx context.Context, condition string) {
	t.Helper()
	do(t, ctx, chromedp.Poll(condition, nil, chromedp.WithPollingInterval(20*time.Millisecond)))
}

// press presses a key until it has its effect: chromium loses keys while a dialog opens or closes.
func press(t *testing.T, ctx context.Context, key, effect string) {
	t.Helper()
	for range 100 {
		var done bool
		do(t, ctx, chromedp.KeyEvent(key), chromedp.Sleep(50*time.Millisecond), chromedp.Evaluate(effect, &done))
		if done {
			return
		}
	}
	t.Fatalf("after %q it is not so that %s", key, effect)
}

// TestDashboard: the page shows what the nodes say, its keys do what the list of keys says, and its console is silent.
func TestDashboard(t *testing.T) {
	nodes := world()
	nodes.Ports[2].For = "Gateway edge/catalog"
	ctx, said := page(t, nodes, 1280, 1000)
	until(t, ctx, `document.querySelector('#map .who[aria-label^="Service shop/catalog (Gateway edge/catalog)"]')`)
	for selector, want := range map[string][]string{
		"#nodes":   {"node-1", "nftables", "4.2 s", "an element of endpoints is gone", "repaired"},
		"#bad":     {"lab/huge", "too many elements", "10.244.2.10:8080 of shop/web", "unanswered"},
		"#changes": {"shop/cart", "node-2"}, "#services": {"shop/web:http", "122",
			"shop/catalog:http (Gateway edge/catalog)", "lab/<i>x</i>:http"},
		"#f-nodes": {"2 of 3"}, "#f-ejected": {"1"},
	} {
		for _, w := range want {
			if got := text(t, ctx, selector); !strings.Contains(got, w) {
				t.Errorf("%s has no %q:\n%s", selector, w, got)
			}
		}
	}
	do(t, ctx, chromedp.KeyEvent("j"), chromedp.KeyEvent("j"), chromedp.KeyEvent("\r"))
	until(t, ctx, `document.querySelector('#services').innerText.includes('[fd00::5]:8080')`)
	if got := text(t, ctx, "#services tr[aria-selected=true]"); !strings.Contains(got, "shop/cart") {
		t.Errorf("after j j, %q is selected", got)
	}
	do(t, ctx, chromedp.KeyEvent("\r"))
	until(t, ctx, `!document.querySelector('#services').innerText.includes('fd00::5')`)
	do(t, ctx, chromedp.KeyEvent("/"), chromedp.KeyEvent("dns"))
	until(t, ctx, `document.querySelectorAll('#services tbody tr').length === 1`)
	do(t, ctx, chromedp.KeyEvent("\x1b"), chromedp.KeyEvent("?"), chromedp.WaitVisible("#keys"))
	press(t, ctx, "\x1b", `!document.querySelector('#keys').open`)
	press(t, ctx, "e", `document.activeElement.name === 'pod'`)
	do(t, ctx, chromedp.KeyEvent("web-0"),
		chromedp.SetValue("[name=service]", "shop/catalog:http"), chromedp.SendKeys("[name=service]", "\r"))
	until(t, ctx, `document.querySelector('#answer').innerText.includes('sent to one of 3 endpoints')`)
	do(t, ctx, chromedp.SetValue("[name=pod]", "a/b/c/d"), chromedp.SendKeys("[name=service]", "\r"),
		chromedp.WaitVisible("pre.bad"))
	if len(*said) > 1 { // the answer 502 to the wrong name is one line
		t.Errorf("the console says %q", *said)
	}
}

// TestDashboardLooks: nothing is wider than the window, at any width and in both themes. Flag -update takes pictures.
func TestDashboardLooks(t *testing.T) {
	for _, width := range []int64{1280, 760, 400} {
		for _, theme := range []string{"light", "dark"} {
			ctx, _ := page(t, world(), width, 900)
			do(t, ctx, emulation.SetEmulatedMedia().WithFeatures(
				[]*emulation.MediaFeature{{Name: "prefers-color-scheme", Value: theme}}), chromedp.KeyEvent("j"),
				chromedp.KeyEvent("\r"))
			until(t, ctx, `document.querySelector('#services').innerText.includes('fd00::5')`)
			until(t, ctx, `document.querySelectorAll("#map .arrow.bad").length === 1`)
			do(t, ctx, chromedp.Evaluate(`document.querySelector("#map .arrow.bad").dispatchEvent(
				new MouseEvent("click", { bubbles: true }))`, nil))
			until(t, ctx, `document.querySelectorAll("#failures tbody tr").length === 4`)
			var wide float64
			do(t, ctx, chromedp.Evaluate(`document.documentElement.scrollWidth`, &wide))
			if int64(wide) > width {
				t.Errorf("at %d columns the page is %v wide", width, wide)
			}
			var background string
			do(t, ctx, chromedp.Evaluate(`getComputedStyle(document.body).backgroundColor`, &background))
			if dark := strings.HasPrefix(background, "rgb(18,"); dark != (theme == "dark") {
				t.Errorf("the theme %s has the background %s", theme, background)
			}
			var picture []byte
			do(t, ctx, chromedp.FullScreenshot(&picture, 100))
			if name := fmt.Sprintf("dashboard-%d-%s.png", width, theme); *update && width != 760 {
				if err := os.WriteFile(filepath.Join("..", "..", "docs", "images", name), picture, 0o644); err != nil {
					t.Fatal(err)
				}
			}
		}
	}
}

// brokenWord finds the first word of a reason that does not stand on one line.
const brokenWord = `(() => {
  for (const td of document.querySelectorAll("#nodes td.why, #bad td.why")) {
    const text = td.firstChild, word = /[a-z,:]+/g;
    for (let m; (m = word.exec(text.data)); ) {
      const range = document.createRange();
      range.setStart(text, m.index);
      range.setEnd(text, m.index + m[0].length);
      if (range.getClientRects().length > 1) return m[0] + " of " + text.data;
    }
  }
  return "";
})()`

// TestLarge: with 150 nodes, the page first shows those that need attention, all of them on request, and counts as many
// as it marks; no reason has a broken word, and nothing is wider than the window.
func TestLarge(t *testing.T) {
	for _, width := range []int64{1280, 760, 400} {
		ctx, said := page(t, clustertest.Large(), width, 900)
		const wrong, watch = clustertest.LargeWrong, clustertest.LargeWatch
		rows := func(of string) (n int) {
			do(t, ctx, chromedp.Evaluate(`document.querySelectorAll("#nodes tbody tr`+of+`").length`, &n))
			return n
		}
		if all, bad, warn := rows(""), rows(".bad"), rows(".warn"); all != wrong+watch || bad != wrong || warn != watch {
			t.Errorf("at %d columns: %d rows, %d bad, %d to watch", width, all, bad, warn)
		}
		if bad := rows(".bad:nth-child(-n + 6)"); bad != wrong {
			t.Errorf("at %d columns: only %d of the first rows are bad", width, bad)
		}
		for selector, want := range map[string]string{"#f-nodes": "144 of 150", "#f-watch": "nodes in order, 4 to watch",
			"#f-quarantined": "1", "#f-ejected": "1", "#nodes-more": "140 other nodes in order"} {
			if got := text(t, ctx, selector); got != want {
				t.Errorf("at %d columns: %s is %q; want %q", width, selector, got, want)
			}
		}
		for _, i := range []int{40, 77, 149} {
			if got := text(t, ctx, "#trouble"); !strings.Contains(got, clustertest.LargeNode(i)) {
				t.Errorf("%s is not in %q", clustertest.LargeNode(i), got)
			}
		}
		got := text(t, ctx, "#changes tbody")
		if strings.Count(got, "node-exporter") != 2 || !strings.Contains(got, "147 nodes") {
			t.Errorf("the changes are\n%s", got)
		}
		var broken string
		var wide float64
		for _, nodes := range []int{wrong + watch, 150} {
			if nodes == 150 {
				do(t, ctx, chromedp.KeyEvent("a"))
			}
			until(t, ctx, fmt.Sprintf(`document.querySelectorAll("#nodes tbody tr").length === %d`, nodes))
			do(t, ctx, chromedp.Evaluate(brokenWord, &broken),
				chromedp.Evaluate(`document.documentElement.scrollWidth`, &wide))
			if broken != "" || int64(wide) > width {
				t.Errorf("at %d columns with %d rows: the page is %v wide; broken: %q", width, nodes, wide, broken)
			}
		}
		if len(*said) > 0 {
			t.Errorf("the console says %q", *said)
		}
	}
}
