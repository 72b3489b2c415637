package conntrack

import (
	"context"
	"fmt"
	"math/rand/v2"
	"net"
	"net/netip"
	"os"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/verdict-proxy/verdict/internal/lab"
	"github.com/verdict-proxy/verdict/internal/lab/labtest"
)

// asking is clients that each hold a connection to a Service, send a request now and then, and try one that fails once
// more, by a new connection.
type asking struct {
	*held
	every time.Duration
	mu    sync.Mutex
	// servers counts the open connections of each server, requests those that were answered; idle are the times since
	// the last byte of connections that were reset between requests, and hit those of requests that a reset met; lost
	// counts requests that failed twice.
	servers        map[string]int
	requests, lost int
	idle, hit      []time.Duration
}

// ask is one client.
func (a *asking) ask(ctx context.Context, n int) {
	dice := rand.New(rand.NewPCG(3, uint64(n)))
	var c net.Conn
	var server string
	buf := make([]byte, 200)
	last := time.Now()
	connect := func() bool {
		to := netip.AddrPortFrom(lab.Nth(lab.ServiceRange[0], 1), port).String()
		var err error
		if c, err = a.Pods[0].DialContext(ctx, "tcp", to); err != nil {
			return false
		}
		c.SetDeadline(time.Now().Add(10 * time.Second))
		k, err := c.Read(buf)
		server, last = parseServer(string(buf[:k])), time.Now()
		a.count(func() { a.servers[server]++ })
		return err == nil
	}
	request := func() bool {
		c.SetDeadline(time.Now().Add(10 * time.Second))
		if _, err := c.Write([]byte("a question\n")); err != nil {
			return false
		}
		_, err := c.Read(buf)
		return err == nil
	}
	gone := func(list *[]time.Duration) {
		since := time.Since(last)
		c.Close()
		a.count(func() { a.servers[server]--; *list = append(*list, since) })
	}
	for ok := connect(); ok && ctx.Err() == nil; {
		c.SetReadDeadline(time.Now().Add(time.Duration(dice.ExpFloat64() * float64(a.every))))
		if _, err := c.Read(buf); err != nil && !os.IsTimeout(err) { // reset between requests
			if ctx.Err() == nil {
				gone(&a.idle)
				ok = connect()
			}
			continue
		}
		if ok = request(); !ok && ctx.Err() == nil {
			gone(&a.hit)
			ok = connect() && request()
		}
		last = time.Now()
		a.count(func() { a.requests++ })
	}
	if ctx.Err() == nil {
		a.count(func() { a.lost++ })
	}
}

func (a *asking) count(do func()) {
	a.mu.Lock()
	defer a.mu.Unlock()
	do()
}

// shares are the servers' parts of the connections, at a time.
type shares struct {
	at    time.Duration
	parts []float64
}

// rebalanceLive holds connections of two servers, of clients that ask one question in so long, and gives the Service
// two more. It returns the shares until all are within a fifth, and some seconds longer.
func rebalanceLive(t testing.TB, n int, idle, every time.Duration) (a *asking, curve []shares) {
	h := newHeldWith(t, 4)
	h.rebalance = idle
	h.serve(0, h.RemotePods[:2]...)
	a = &asking{held: h, every: every, servers: map[string]int{}}
	ctx, cancel := context.WithCancel(t.Context())
	var all sync.WaitGroup
	for i := range n {
		all.Go(func() { a.ask(ctx, i) })
	}
	end := func() { cancel(); all.Wait() }
	defer end()
	time.Sleep(max(every, 5*time.Second))
	start := time.Now()
	even := start.Add(time.Hour)
	for added := false; time.Since(even) < 4*time.Second; time.Sleep(100 * time.Millisecond) {
		now := shares{at: time.Since(start)}
		if !added && now.at > 2*time.Second {
			h.serve(0, h.RemotePods...)
			added = true
		}
		a.count(func() {
			for _, pod := range h.RemotePods {
				now.parts = append(now.parts, float64(a.servers[pod.Name])/float64(n))
			}
		})
		curve = append(curve, now)
		if slices.Max(now.parts) <= 1.2/4 && time.Until(even) > time.Minute {
			even = time.Now()
		}
		if now.at > 2*time.Minute {
			t.Fatalf("the shares are still %v", now.parts)
		}
	}
	end() // before what the clients counted is read
	t.Logf("even after %v: %.3f; %d connections were reset between requests, %d of %d requests were hit, %d lost",
		even.Sub(start)-2*time.Second, curve[len(curve)-1].parts, len(a.idle), len(a.hit), a.requests, a.lost)
	return a, curve
}

// TestRebalanceHeld: clients hold connections of two servers, and get two more. The shares get even, no connection is
// reset that had a byte lately, and no request is lost that is tried again.
func TestRebalanceHeld(t *testing.T) {
	const idle = 2 * time.Second
	a, _ := rebalanceLive(t, 300, idle, 4*time.Second)
	if a.lost > 0 || len(a.idle) == 0 {
		t.Errorf("%d requests were lost, %d connections were reset", a.lost, len(a.idle))
	}
	young := 0
	for _, since := range slices.Concat(a.idle, a.hit) {
		if since < idle {
			t.Logf("a connection was reset %v after its last byte, which came while it was being reset", since)
			young++
		}
	}
	if young > 1+len(a.idle)/50 {
		t.Errorf("%d of %d connections were not idle", young, len(a.idle))
	}
}

// BenchmarkRebalance reports the same for 1,000 connections. VERDICT_REBALANCE_SVG names a file for the picture:
// docs/images/rebalance.svg.
func BenchmarkRebalance(b *testing.B) {
	for b.Loop() {
		_, curve := rebalanceLive(b, 1000, 5*time.Second, 10*time.Second)
		if file := os.Getenv("VERDICT_REBALANCE_SVG"); file != "" {
			labtest.Check(b, os.WriteFile(file, []byte(rebalanceSVG(curve)), 0o644))
		}
	}
}

// rebalanceSVG draws the servers' shares over time, and the band in which they are even.
func rebalanceSVG(curve []shares) string {
	const width, height, left, bottom, most = 640.0, 320.0, 60.0, 40.0, 0.6
	end := curve[len(curve)-1].at.Seconds()
	x := func(seconds float64) float64 { return left + seconds/end*(width-left-20) }
	y := func(part float64) float64 { return height - bottom - part/most*(height-bottom-40) }
	var s strings.Builder
	fmt.Fprintf(&s, "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 %.0f %.0f\" font-family=\"sans-serif\" "+
		"font-size=\"12\">\n<rect width=\"100%%\" height=\"100%%\" fill=\"#fff\"/>\n", width, height)
	const title = "1,000 held connections of two endpoints (blue); two more come: shares"
	fmt.Fprintf(&s, "<text x=\"%.0f\" y=\"20\" font-size=\"14\">%s</text>\n", left, title)
	fmt.Fprintf(&s, "<rect x=\"%.1f\" y=\"%.1f\" width=\"%.1f\" height=\"%.1f\" fill=\"#eef4ee\"/>\n", left, y(0.3),
		width-20-left, y(0.2)-y(0.3))
	for p := 0; p <= 6; p++ {
		at := y(float64(p) / 10)
		fmt.Fprintf(&s, "<path d=\"M%.1f %.1fH%.1f\" stroke=\"#e4e4e4\"/><text x=\"%.1f\" y=\"%.1f\" text-anchor=\"end\">"+
			"%d %%</text>\n", left, at, width-20, left-8, at+4, 10*p)
	}
	for seconds := 0.0; seconds <= end; seconds += 5 {
		fmt.Fprintf(&s, "<text x=\"%.1f\" y=\"%.1f\" text-anchor=\"middle\">%.0f s</text>\n", x(seconds),
			height-bottom+18, seconds)
	}
	for i, color := range []string{"#1f6fb4", "#0b3d66", "#d9822b", "#8a4b0f"} {
		var line strings.Builder
		for n := 0; n < len(curve); n += 4 {
			p := curve[n]
			fmt.Fprintf(&line, "%.1f,%.1f ", x(p.at.Seconds()), y(p.parts[i]))
		}
		fmt.Fprintf(&s, "<polyline points=\"%s\" fill=\"none\" stroke=\"%s\" stroke-width=\"2\"/>\n", line.String(), color)
	}
	return s.String() + "</svg>\n"
}
