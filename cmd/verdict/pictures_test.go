package main

import (
	"encoding/xml"
	"errors"
	"fmt"
	"html"
	"io"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"sync"
	"testing"
	"time"
	"unicode/utf8"

	"github.com/verdict-proxy/verdict/internal/lab"
	"github.com/verdict-proxy/verdict/internal/lab/labtest"
	"github.com/verdict-proxy/verdict/internal/system/terminal"
	"github.com/verdict-proxy/verdict/sync/snapshot"
)

// pictures are the commands whose pictures stand in docs/images, taken from the real program in a terminal.
var pictures = []struct {
	name string
	args string
	// lines are how many are shown, or 0 for all.
	lines int
	// varies: the command shows counts that differ from run to run, so only -update takes it.
	varies bool
	// keys, if there are any, are pressed one after the other once there is a full screen.
	keys string
}{
	{name: "explain", args: "explain pod 10.96.20.3:8080 --live"},
	{name: "verify", args: "verify"},
	{name: "demo", args: "demo", lines: 48, varies: true},
	{name: "top", args: "top", varies: true, keys: "j\r"},
}

const pictureWidth = 100

// TestPictures: docs/images has what the commands print now. Flag -update takes the pictures anew.
func TestPictures(t *testing.T) {
	c := newCompared(t)
	labtest.Run(t, c.host, "", "ip", "route", "add", "10.244.0.0/18", "dev", "lo") // to endpoints, not to senders
	for _, p := range pictures {
		path := filepath.Join(repository, "docs", "images", "verdict-"+p.name+".svg")
		if !p.varies || *update {
			take := inTerminal
			if p.keys != "" {
				take = func(t *testing.T, c *compared, args []string) string { return fullScreen(t, c, args, p.keys) }
			}
			picture := svg("$ verdict "+p.args, firstLines(take(t, c, strings.Fields(p.args)), p.lines))
			if *update {
				labtest.Check(t, os.WriteFile(path, []byte(picture), 0o644))
			} else if have, err := os.ReadFile(path); err != nil || string(have) != picture {
				t.Errorf("%s is not what verdict %s prints (%v): -update takes it anew", path, p.args, err)
			}
		}
		file, err := os.Open(path)
		labtest.Check(t, err)
		decoder := xml.NewDecoder(file)
		for err == nil {
			_, err = decoder.Token()
		}
		if !errors.Is(err, io.EOF) {
			t.Errorf("%s: %v", path, err)
		}
		labtest.Check(t, file.Close())
	}
}

// inTerminal gives what a command prints to a terminal, on the host of the objects.
func inTerminal(t *testing.T, c *compared, args []string) string {
	ours, theirs := pty(t, pictureWidth, 60)
	cmd := exec.Command("/proc/self/exe", args...)
	cmd.Env = append(os.Environ(), beVerdict+"=1", "TERM=xterm")
	cmd.Stdout, cmd.Stderr = theirs, theirs
	labtest.Check(t, c.host.Do(cmd.Start))
	labtest.Check(t, theirs.Close())
	labtest.Check(t, ours.SetReadDeadline(time.Now().Add(time.Minute)))
	out, _ := io.ReadAll(ours) // EIO when nobody has the other end open
	labtest.Check(t, cmd.Wait())
	return strings.ReplaceAll(string(out), "\r\n", "\n")
}

// fullScreen gives the screen of a command after some keys, while connections are opened.
func fullScreen(t *testing.T, c *compared, args []string, keys string) string {
	labtest.Run(t, c.host, "", "ip", "route", "add", "10.0.0.0/8", "dev", "lo")
	stop := connectAlways(c, map[string]time.Duration{
		"10.96.0.10:53/udp": 7 * time.Millisecond, "10.96.20.2:50051/tcp": 20 * time.Millisecond,
		"10.96.20.3:8080/tcp": 12 * time.Millisecond, "10.96.20.1:80/tcp": 50 * time.Millisecond,
		"10.96.20.4:80/tcp": 200 * time.Millisecond, "10.96.0.1:443/tcp": 500 * time.Millisecond,
	})
	defer stop()
	ours, theirs := pty(t, pictureWidth, 20)
	cmd := c.host.Command("/proc/self/exe", args...)
	cmd.Env = append(os.Environ(), beVerdict+"=1", "TERM=xterm")
	cmd.Stdin, cmd.Stdout, cmd.Stderr = theirs, theirs, theirs
	labtest.Check(t, cmd.Start())
	const home = "\x1b[H"
	screenOf(t, ours, "conn/s")
	for _, key := range strings.Split(keys, "") {
		_, err := ours.WriteString(key)
		labtest.Check(t, err)
		screenOf(t, ours, home)
	}
	seen := ""
	for range 4 { // so that there are rates of the last seconds
		seen += screenOf(t, ours, home)
	}
	_, err := ours.WriteString("q")
	labtest.Check(t, err)
	seen += screenOf(t, ours, "\x1b[?1049l")
	labtest.Check(t, cmd.Wait())
	frames := strings.Split(seen, home)
	whole, _, _ := strings.Cut(frames[len(frames)-1], "\x1b[J")
	return strings.TrimRight(strings.NewReplacer("\r\n", "\n", "\x1b[K", "").Replace(whole), "\n ")
}

// connectAlways opens connections from the host to frontends, one in each interval, until it is stopped.
func connectAlways(c *compared, frontends map[string]time.Duration) (stop func()) {
	done := make(chan struct{})
	var wait sync.WaitGroup
	for text, interval := range frontends {
		address, protocol, _ := strings.Cut(text, "/")
		to, p := netip.MustParseAddrPort(address), snapshot.TCP
		if protocol == "udp" {
			p = snapshot.UDP
		}
		wait.Go(func() {
			for {
				select {
				case <-done:
					return
				case <-time.After(interval):
				}
				wait.Go(func() { c.host.Dial(p, to, lab.Options{Timeout: 5 * time.Millisecond}) })
			}
		})
	}
	return func() { close(done); wait.Wait() }
}

func firstLines(text string, n int) string {
	lines := strings.Split(strings.TrimRight(text, "\n"), "\n")
	if n > 0 && len(lines) > n {
		lines = append(lines[:n], "...")
	}
	return strings.Join(lines, "\n")
}

// painted is a piece of a line in one way to paint: SGR parameter, text.
var painted = regexp.MustCompile("\x1b\\[([0-9;]*)m([^\x1b]*)")

// svg draws what stands in a terminal, in the reader's choice of light or dark.
func svg(command, text string) string {
	const size, lineHeight, charWidth, margin = 14, 19, 8.43, 14
	lines := append([]string{"\x1b[1m" + command + "\x1b[0m", ""}, strings.Split(text, "\n")...)
	width := 0
	for _, line := range lines {
		width = max(width, utf8.RuneCountInString(terminal.Plain(line)))
	}
	w, h := float64(width)*charWidth+2*margin, len(lines)*lineHeight+2*margin
	var b strings.Builder
	fmt.Fprintf(&b, `<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 %.0f %d" width="%.0f" height="%d" role="img">
<title>%s</title>
<style>
rect { fill: #fbfbfa; stroke: #d8d8d4 }
text { font: %dpx ui-monospace, "DejaVu Sans Mono", Menlo, Consolas, monospace; fill: #24292f; white-space: pre }
.s1, .s7 { font-weight: bold } .s2 { opacity: .65 } .s31 { fill: #b3261e } .s32 { fill: #1a7f37 } .s36 { fill: #0b6e8f }
@media (prefers-color-scheme: dark) {
rect { fill: #16191d; stroke: #30363d } text { fill: #d7dde3 }
.s31 { fill: #ff7b72 } .s32 { fill: #56d364 } .s36 { fill: #56c8e0 } }
</style>
<rect x=".5" y=".5" width="%.0f" height="%d" rx="8"/>
`, w, h, w, h, html.EscapeString(command), size, w-1, h-1)
	for i, line := range lines {
		fmt.Fprintf(&b, `<text x="%d" y="%d">`, margin, margin+(i+1)*lineHeight-5)
		for _, m := range painted.FindAllStringSubmatch("\x1b[0m"+line, -1) {
			if piece := html.EscapeString(m[2]); m[1] == "0" || m[1] == "" {
				b.WriteString(piece)
			} else {
				fmt.Fprintf(&b, `<tspan class="s%s">%s</tspan>`, m[1], piece)
			}
		}
		b.WriteString("</text>\n")
	}
	return b.String() + "</svg>\n"
}
