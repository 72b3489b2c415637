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

	"github.com/verdict-proxy/verdict/internal/cluster"
	"github.com/verdict-proxy/verdict/internal/cluster/clustertest"
	"github.com/verdict-proxy/verdict/internal/dashboard"
	"github.com/verdict-proxy/verdict/internal/status"
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
		Explanation: "Packet     10.244.1.7 -> 10.96.20.3:80/tcp\nService    shop/catalog:http\n" +
			"Outcome    sent to one of 3 endpoints\n"}
	for i, name := range []string{"shop/web", "shop/cart", "shop/catalog", "kube-system/kube-dns", "lab/<i>x</i>"} {
		f.Ports = append(f.Ports, cluster.TopPort{Service: name, Port: "http", Rate: 40.5 / float64(i*i+1),
			Endpoints: []cluster.TopEndpoint{{Address: "10.244.1.5", Port: 8080, Rate: 3}, {Address: "fd00::5", Port: 8080}}})
	}
	return f
}

// page opens the dashboard in a browser of its own and gives what its console said.
func page(t *testing.T, width, height int64) (ctx context.Context, said *[]string) {
	t.Helper()
	l := httptest.NewUnstartedServer(nil)
	s := dashboard.New(world().Cluster(), "shop", 300*time.Millisecond)
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

// TestDashboard: the page shows what the nodes say, its keys do what the list of keys says, and its console is silent.
func TestDashboard(t *testing.T) {
	ctx, said := page(t, 1280, 1000)
	for selector, want := range map[string][]string{
		"#nodes":   {"node-1", "nftables", "4.2 s", "an element of endpoints is gone", "repaired"},
		"#bad":     {"lab/huge", "too many elements", "10.244.2.10:8080 of shop/web", "unanswered"},
		"#changes": {"shop/cart", "node-2"}, "#services": {"shop/web:http", "122", "lab/<i>x</i>:http"},
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
	do(t, ctx, chromedp.KeyEvent("\x1b"), chromedp.KeyEvent("?"), chromedp.WaitVisible("#keys"), chromedp.KeyEvent("\x1b"),
		chromedp.WaitNotVisible("#keys"), chromedp.KeyEvent("e"), chromedp.KeyEvent("web-0"),
		chromedp.SetValue("[name=service]", "shop/catalog:http"), chromedp.Click("#explain button"))
	until(t, ctx, `document.querySelector('#answer').innerText.includes('sent to one of 3 endpoints')`)
	do(t, ctx, chromedp.SetValue("[name=pod]", "a/b/c/d"), chromedp.Click("#explain button"),
		chromedp.WaitVisible("pre.bad"))
	if len(*said) > 1 { // the answer 502 to the wrong name is one line
		t.Errorf("the console says %q", *said)
	}
}

// TestDashboardLooks: nothing is wider than the window, at any width and in both themes. Flag -update takes pictures.
func TestDashboardLooks(t *testing.T) {
	for _, width := range []int64{1280, 760, 400} {
		for _, theme := range []string{"light", "dark"} {
			ctx, _ := page(t, width, 900)
			do(t, ctx, emulation.SetEmulatedMedia().WithFeatures(
				[]*emulation.MediaFeature{{Name: "prefers-color-scheme", Value: theme}}), chromedp.KeyEvent("j"),
				chromedp.KeyEvent("\r"))
			until(t, ctx, `document.querySelector('#services').innerText.includes('fd00::5')`)
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
