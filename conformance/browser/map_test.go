//go:build browser

package browser

import (
	"context"
	"fmt"
	"os"
	"strings"
	"testing"

	"github.com/chromedp/chromedp"
	"github.com/chromedp/chromedp/kb"

	"github.com/verdict-proxy/verdict/internal/answers/cluster/clustertest"
)

// overlapping counts the labels of the map that lie on others, or that are wider than their place.
const overlapping = `(() => {
  const all = [...document.querySelectorAll("#map .who")].map((g) => [g.querySelector("rect").getBoundingClientRect(),
    [...g.querySelectorAll("text")].map((t) => t.getBoundingClientRect())]);
  let n = 0;
  for (const [place, texts] of all) {
    const [name, bytes] = texts;
    if (name.left < place.left - 1 || name.right > place.right + 1 || bytes && bytes.left < name.right - 1) n++;
  }
  all.forEach(([a], i) => all.forEach(([b], k) => {
    if (i < k && a.left < b.right && b.left < a.right && a.top < b.bottom - 1 && b.top < a.bottom - 1) n++;
  }));
  return n;
})()`

// number counts the elements of a page.
const number = `document.querySelectorAll('%s').length`

// TestMap: a thousand workloads are a legible map: the largest and those that fail by name, the others folded, and open
// on request. Keys reach everything, and a failure is not told by its colour alone.
func TestMap(t *testing.T) {
	nodes := world()
	nodes.Flows = clustertest.Busy("node-1", "node-2", "node-3").Print
	for _, width := range []int64{1280, 760, 400} {
		ctx, said := page(t, nodes, width, 900)
		count := func(selector string) (n int) {
			do(t, ctx, chromedp.Evaluate(fmt.Sprintf(number, selector), &n))
			return n
		}
		check := func(when string, most int) {
			t.Helper()
			var bad int
			var wide, small float64
			do(t, ctx, chromedp.Evaluate(overlapping, &bad),
				chromedp.Evaluate(`document.documentElement.scrollWidth`, &wide),
				chromedp.Evaluate(`Math.min(...[...document.querySelectorAll("#map .who text")].map((e) =>
					e.getBoundingClientRect().height))`, &small))
			if rows := count("#map .who"); rows < 20 || rows > most || bad > 0 || int64(wide) > width || small < 12 {
				t.Errorf("%s, at %d columns: %d rows, %d labels cover others, the page is %v wide, the smallest label %v high",
					when, width, rows, bad, wide, small)
			}
		}
		until(t, ctx, `document.querySelectorAll("#map .who").length > 0`)
		check("at first", 64)
		if arrows := count("#map .arrow"); arrows < 40 || arrows > 180 {
			t.Errorf("%d arrows", arrows)
		}
		for selector, want := range map[string]string{"#map-note": "360 ends of connections and 9 refusals",
			"#map-legend": "1 GB", "#map": "others of"} {
			var got string
			if do(t, ctx, chromedp.TextContent(selector, &got)); !strings.Contains(got, want) {
				t.Errorf("%s has no %q: %q", selector, want, got)
			}
		}
		// The workload that fails is one of the smallest.
		failing := fmt.Sprintf(`#map .arrow.bad[aria-label^="%s to shop-1/payments"]`, clustertest.BusyClient(990))
		if count(failing) != 1 || count("#map .who.bad") != 2 {
			t.Errorf("%d arrows and %d rows fail", count(failing), count("#map .who.bad"))
		}
		var drawn, label string
		do(t, ctx, chromedp.TextContent(failing+" text", &label), chromedp.Evaluate(fmt.Sprintf(
			`getComputedStyle(document.querySelector('%s path:nth-child(2)')).strokeDasharray`, failing), &drawn))
		if label != "✕ 12 %" || drawn == "none" {
			t.Errorf("the arrow that fails says %q, its dashes are %s", label, drawn)
		}
		do(t, ctx, chromedp.Evaluate(fmt.Sprintf(`document.querySelector('%s').dispatchEvent(
			new MouseEvent("click", { bubbles: true }))`, failing), nil))
		until(t, ctx, `document.querySelectorAll("#failures tbody tr").length === 4`)
		got := text(t, ctx, "#map-detail")
		for _, want := range []string{"6 failed (12 %)", "refused by endpoint",
			clustertest.BusyClient(990) + "-0 (10.244.1.7:40113)"} {
			if !strings.Contains(got, want) || strings.Contains(got, "team-03/another") {
				t.Errorf("the failures have no %q:\n%s", want, got)
			}
		}
		do(t, ctx, chromedp.Evaluate(fmt.Sprintf(`document.querySelector('%s').focus() || true`, failing), nil),
			chromedp.KeyEvent("\x1b"))
		until(t, ctx, `document.querySelector("#map-detail").hidden`)
		keys(t, ctx)
		check("opened", 64+40+40)
		if len(*said) > 0 {
			t.Errorf("the console says %q", *said)
		}
	}
}

// TestMapLooks takes the picture of a thousand workloads with flag -update.
func TestMapLooks(t *testing.T) {
	if !*update {
		t.Skip("pictures are taken with -update")
	}
	nodes := world()
	nodes.Flows = clustertest.Busy("node-1", "node-2", "node-3").Print
	ctx, _ := page(t, nodes, 1280, 900)
	until(t, ctx, `document.querySelectorAll("#map .who").length > 0`)
	var picture []byte
	do(t, ctx, chromedp.Screenshot("section[aria-labelledby=h-map]", &picture))
	if err := os.WriteFile("../../docs/images/service-map.png", picture, 0o644); err != nil {
		t.Fatal(err)
	}
}

// keys opens, by keys alone, the others of all namespaces, and then the clients of one of these.
func keys(t *testing.T, ctx context.Context) {
	t.Helper()
	focus := func(key, label string) {
		t.Helper()
		for range 100 {
			var at string
			do(t, ctx, chromedp.KeyEvent(key), chromedp.Evaluate(`document.activeElement.getAttribute("aria-label")`, &at))
			if strings.Contains(at, label) {
				return
			}
		}
		t.Fatalf("no key leads to %q", label)
	}
	do(t, ctx, chromedp.Evaluate(`document.activeElement.blur() || true`, nil), chromedp.KeyEvent("m"))
	until(t, ctx, `document.activeElement.closest("#map") !== null`)
	do(t, ctx, chromedp.KeyEvent(kb.ArrowLeft), chromedp.KeyEvent(kb.ArrowLeft))
	focus(kb.ArrowDown, "namespaces")
	do(t, ctx, chromedp.KeyEvent(kb.Enter))
	focus(kb.ArrowUp, "others of team-")
	do(t, ctx, chromedp.KeyEvent(kb.Enter))
	until(t, ctx, `[...document.querySelectorAll("#map .who")].some((g) =>
		g.getAttribute("aria-label").includes("worker-4"))`)
	do(t, ctx, chromedp.KeyEvent(kb.ArrowDown), chromedp.KeyEvent(kb.ArrowRight))
	until(t, ctx, `document.activeElement.matches("#map .arrow")`)
	do(t, ctx, chromedp.KeyEvent(kb.ArrowRight))
	until(t, ctx, `document.activeElement.getAttribute("aria-label").startsWith("Service ")`)
}

// TestMapZones: the clients can be zones. Without records, the map says how to switch them on.
func TestMapZones(t *testing.T) {
	nodes := world()
	nodes.Flows = clustertest.Busy("node-1", "node-2", "node-3").Print
	ctx, _ := page(t, nodes, 1280, 900)
	until(t, ctx, `document.querySelectorAll("#map .who").length > 0`)
	do(t, ctx, chromedp.SetValue("#map-by", "zone"),
		chromedp.Evaluate(`document.querySelector("#map-by").dispatchEvent(new Event("change"))`, nil))
	until(t, ctx, `[...document.querySelectorAll('#map .who[aria-label^="client"]')].map((g) =>
		g.getAttribute("aria-label")[7]).sort().join("") === "abcu"`)
	nodes.Flows = func(string, []string) string { return `{"off": true, "arrows": []}` }
	ctx, said := page(t, nodes, 1280, 900)
	until(t, ctx, `document.querySelector("#map-note").innerText.includes("switches them on")`)
	if len(*said) > 0 {
		t.Errorf("the console says %q", *said)
	}
}
