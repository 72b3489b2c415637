package kernel

import (
	"fmt"
	"math"
	"net/netip"
	"os"
	"strings"
	"testing"

	"github.com/verdict-proxy/verdict/internal/lab"
	"github.com/verdict-proxy/verdict/internal/lab/labtest"
	"github.com/verdict-proxy/verdict/internal/system/ipfamily"
	"github.com/verdict-proxy/verdict/internal/system/testkit"
	"github.com/verdict-proxy/verdict/sync/dataplane"
	"github.com/verdict-proxy/verdict/sync/snapshot"
)

// slowStartCurve sends connections through a Service of which the last of three endpoints starts, in each of the tenths
// of the slow start and after it, and returns the endpoint's part of the connections and that which is due, in each.
func slowStartCurve(t testing.TB, f ipfamily.Family, n int) (got, want []float64) {
	t.Helper()
	c, b := proxied(t, lab.Config{LocalPods: 4, RemotePods: 3})
	labtest.Check(t, c.Node.Sysctl("net/netfilter/nf_conntrack_udp_timeout", "1"))
	last := netip.AddrPortFrom(c.RemotePods[2].IP(f), targetPort)
	for step := range snapshot.FullTenths + 1 {
		tenths := max(step, 1)
		var starting *snapshot.Starting
		if tenths < snapshot.FullTenths {
			starting = &snapshot.Starting{Endpoints: []snapshot.StartingEndpoint{{
				Endpoint: netip.AddrPortFrom(last.Addr(), 0), Tenths: uint8(tenths)}}}
		}
		s, st := startingService(c, step+1, starting, nil, 1, 1, 1)
		applyOnly(t, b, st, s)
		at := s.frontendOf(c, dataplane.ClusterIP, f)
		spray(t, c.Pods, f, at, n)
		counts := counted(t, b, f, dataplane.Key{Addr: at.Addr(), Protocol: snapshot.UDP, Port: at.Port()})
		total := 0
		for _, k := range counts {
			total += k
		}
		if total != n || len(counts) != 3 {
			t.Fatalf("%v, step %d: %d of %d connections, by endpoint %v", f, step, total, n, counts)
		}
		part := float64(tenths) / snapshot.FullTenths
		got, want = append(got, float64(counts[last])/float64(n)), append(want, part/(2+part))
	}
	return got, want
}

// TestSlowStart: an endpoint that starts gets the part of the connections that is due, in each tenth and after it.
func TestSlowStart(t *testing.T) {
	for _, f := range ipfamily.All {
		const n = 2000
		got, want := slowStartCurve(t, f, n)
		for i := range got {
			// Five standard deviations, and half of one of eleven slots, to which parts are rounded.
			off := 5*math.Sqrt(want[i]*(1-want[i])/n) + 0.5/23
			if math.Abs(got[i]-want[i]) > off {
				t.Errorf("%v, tenth %d: %.3f of the connections, want %.3f ± %.3f", f, i, got[i], want[i], off)
			}
		}
	}
}

// BenchmarkSlowStart reports the curve with 20,000 connections in each tenth. VERDICT_SLOW_START_SVG names a file for
// the picture: docs/images/slow-start.svg.
func BenchmarkSlowStart(b *testing.B) {
	for b.Loop() {
		got, want := slowStartCurve(b, ipfamily.IPv4, testkit.Size(20_000, 2000))
		for i := range got {
			b.Logf("tenth %d: %.2f %% of the connections, of %.2f %% that are due", i, 100*got[i], 100*want[i])
		}
		if file := os.Getenv("VERDICT_SLOW_START_SVG"); file != "" {
			labtest.Check(b, os.WriteFile(file, []byte(slowStartSVG(got)), 0o644))
		}
	}
}

// slowStartSVG draws the steps, and the line of the share that a start without steps would have.
func slowStartSVG(got []float64) string {
	const width, height, left, bottom, most = 640.0, 320.0, 60.0, 40.0, 0.4
	x := func(tenth float64) float64 { return left + tenth/12*(width-left-20) }
	y := func(part float64) float64 { return height - bottom - part/most*(height-bottom-40) }
	var s strings.Builder
	fmt.Fprintf(&s, "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 %.0f %.0f\" font-family=\"sans-serif\" "+
		"font-size=\"12\">\n<rect width=\"100%%\" height=\"100%%\" fill=\"#fff\"/>\n", width, height)
	const title = "A third endpoint starts slowly: its part of new connections"
	fmt.Fprintf(&s, "<text x=\"%.0f\" y=\"20\" font-size=\"14\">%s</text>\n", left, title)
	for p := 0; p <= 4; p++ {
		at := y(float64(p) / 10)
		fmt.Fprintf(&s, "<path d=\"M%.1f %.1fH%.1f\" stroke=\"#e4e4e4\"/><text x=\"%.1f\" y=\"%.1f\" text-anchor=\"end\">"+
			"%d %%</text>\n", left, at, width-20, left-8, at+4, 10*p)
	}
	for tenth := 0; tenth <= 12; tenth += 2 {
		fmt.Fprintf(&s, "<text x=\"%.1f\" y=\"%.1f\" text-anchor=\"middle\">%d %%</text>\n", x(float64(tenth)),
			height-bottom+18, 10*tenth)
	}
	fmt.Fprintf(&s, "<text x=\"%.1f\" y=\"%.1f\" text-anchor=\"middle\">of the time of the slow start</text>\n",
		x(6), height-6)
	var due, steps strings.Builder
	for i := 0; i <= 120; i++ {
		part := min(max(float64(i)/100, 0.1), 1)
		fmt.Fprintf(&due, "%.1f,%.1f ", x(float64(i)/10), y(part/(2+part)))
	}
	for i, part := range got {
		end := float64(i + 1)
		if i == len(got)-1 {
			end = 12
		}
		fmt.Fprintf(&steps, "%.1f,%.1f %.1f,%.1f ", x(float64(i)), y(part), x(end), y(part))
	}
	fmt.Fprintf(&s, "<polyline points=\"%s\" fill=\"none\" stroke=\"#999\" stroke-dasharray=\"4 3\"/>\n", due.String())
	fmt.Fprintf(&s, "<polyline points=\"%s\" fill=\"none\" stroke=\"#1f6fb4\" stroke-width=\"2\"/>\n</svg>\n",
		steps.String())
	return s.String()
}
