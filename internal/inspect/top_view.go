package inspect

import (
	"fmt"
	"math"
	"slices"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/verdict-proxy/verdict/internal/terminal"
	"github.com/verdict-proxy/verdict/internal/units"
)

// TopView is the screen of top. It is pure, except for the sample in it.
type TopView struct {
	// sample is the newest; nil before the first.
	sample *Sample
	order  string
	// cursor is the port that is selected, by its name: it stays selected while others change their places. first is
	// the index of the port in the topmost line.
	cursor   string
	first    int
	expanded map[string]bool
	interval time.Duration
	node     string
	// Width and Height are the screen's.
	Width, Height int
	// failure is the last error of reading; shown until reading succeeds again.
	failure error
}

// NewTopView returns a view without a sample, for a screen of 80 by 24.
func NewTopView(node, order string, interval time.Duration) *TopView {
	return &TopView{node: node, order: order, interval: interval, expanded: map[string]bool{}, Width: 80, Height: 24}
}

// The lines of a screen that are no ports: what it is about, the names of the columns, and the keys.
const topMargin = 4

// Key handles a key. Quit is true if top should end.
func (v *TopView) Key(k string) (quit bool) {
	at := v.index()
	page := max(v.Height-topMargin-1, 1)
	switch k {
	case "q", "\x03", "\x04":
		return true
	case "down", "j":
		at++
	case "up", "k":
		at--
	case "pagedown", " ":
		at += page
	case "pageup", "b":
		at -= page
	case "home", "g":
		at = 0
	case "end", "G":
		at = math.MaxInt32
	case "s":
		v.order = Orders[(slices.Index(Orders, v.order)+1)%len(Orders)]
	case "enter":
		if v.cursor != "" {
			v.expanded[v.cursor] = !v.expanded[v.cursor]
		}
	}
	if ports := v.ports(); len(ports) > 0 {
		v.cursor = ports[min(max(at, 0), len(ports)-1)].Name
	}
	return false
}

func (v *TopView) ports() []PortSample {
	if v.sample == nil {
		return nil
	}
	return v.sample.Ports
}

// index returns the index of the selected port; 0 if it is gone.
func (v *TopView) index() int {
	return max(slices.IndexFunc(v.ports(), func(p PortSample) bool { return p.Name == v.cursor }), 0)
}

// Show replaces the sample.
func (v *TopView) Show(s *Sample, err error) {
	if v.failure = err; err != nil {
		return
	}
	v.sample = s
	if ports := v.ports(); len(ports) > 0 && v.cursor == "" {
		v.cursor = ports[0].Name
	}
}

// Visible gives the ports that are on the screen, and a screen more, and those of which the endpoints are shown.
func (v *TopView) Visible() (ports, expanded []string) {
	for i, p := range v.ports() {
		if i >= v.first && i < v.first+2*v.Height {
			ports = append(ports, p.Name)
			if v.expanded[p.Name] {
				expanded = append(expanded, p.Name)
			}
		}
	}
	return ports, expanded
}

// scroll moves the window to the selected port.
func (v *TopView) scroll() {
	at, room := v.index(), max(v.Height-topMargin, 1)
	if at < v.first {
		v.first = at
	}
	for v.first < at && v.linesBetween(v.first, at) > room {
		v.first++
	}
	v.first = max(min(v.first, len(v.ports())-1), 0)
}

// linesBetween counts the lines of the ports from one to another, both included.
func (v *TopView) linesBetween(from, to int) (n int) {
	for _, p := range v.ports()[from : to+1] {
		n++
		if v.expanded[p.Name] {
			n += len(p.Endpoints) + len(p.Ejected)
		}
	}
	return n
}

// topColumns are rate, total, endpoints and name.
var topColumns = terminal.Columns{12, 14, 11, 1}

// right aligns text to the right of a column, followed by a space.
func right(text string, width int) string {
	return strings.Repeat(" ", max(width-1-utf8.RuneCountInString(text), 0)) + text
}

func topLine(rate, total, endpoints, name string) string {
	return topColumns.Row(right(rate, 11), right(total, 13), right(endpoints, 10), name)
}

// rateText formats connections per second.
func rateText(r float64) string {
	switch {
	case r == 0:
		return "0"
	case r >= 1000:
		return units.Thousands(int(math.Round(r)))
	}
	return fmt.Sprintf("%.1f", r)
}

// Render returns the lines of the screen, none wider than the screen.
func (v *TopView) Render(s *terminal.Printer) []string {
	v.scroll()
	ports := v.ports()
	busy := 0
	for _, p := range ports {
		if p.Rate > 0 {
			busy++
		}
	}
	head := fmt.Sprintf("verdict top  %s", v.node)
	switch {
	case v.sample == nil:
		head += "  reading ..."
	case len(ports) == 0:
		head += "  there are no Services of Verdict on this node"
	default:
		head += fmt.Sprintf("  %s service ports, %s busy, %s connections/s",
			units.Thousands(len(ports)), units.Thousands(busy), rateText(v.sample.Rate))
	}
	head += fmt.Sprintf("  (every %s, by %s)", v.interval, v.order)
	lines := []string{s.Paint(terminal.Bold, clip(head, v.Width))}
	trouble := ""
	if v.failure != nil {
		trouble = v.failure.Error()
	} else if v.sample != nil {
		trouble = v.sample.Notice()
	}
	lines = append(lines, s.Paint(terminal.Red, clip(trouble, v.Width)))
	lines = append(lines, s.Paint(terminal.Dim, clip(topLine("CONN/S", "TOTAL", "ENDPOINTS", "SERVICE"), v.Width)))
	for i := v.first; i < len(ports) && len(lines) < v.Height-1; i++ {
		lines = append(lines, v.portLines(s, &ports[i])...)
	}
	lines = lines[:min(len(lines), max(v.Height-1, 1))]
	for len(lines) < v.Height-1 {
		lines = append(lines, "")
	}
	keys := "q quit   up/down select   enter endpoints   s sort"
	return append(lines, s.Paint(terminal.Dim, clip(keys, v.Width)))
}

// portLines returns the line of a port, and those of its endpoints if it is expanded.
func (v *TopView) portLines(s *terminal.Printer, p *PortSample) []string {
	selected := p.Name == v.cursor
	mark := "  "
	if selected {
		mark = "> "
	}
	line := clip(portLine(mark, p), v.Width)
	switch {
	case selected:
		line = s.Paint(terminal.Inverse, line)
	case p.Rate > 0 && p.Choices == 0 && !p.Scheduled, len(p.Ejected) > 0:
		line = s.Paint(terminal.Red, line)
	case p.Rate == 0:
		line = s.Paint(terminal.Dim, line)
	}
	lines := []string{line}
	if v.expanded[p.Name] {
		lines = append(append(lines, endpointLines(p, v.Width)...), ejectedLines(p, v.Width)...)
	}
	return lines
}

// portLine is the line of a port.
func portLine(mark string, p *PortSample) string {
	return topLine(countText(p, rateText(p.Rate)), countText(p, units.Thousands(int(p.Total))), choicesText(p),
		topName(mark, p))
}

// countText returns the text, or "-" if the port is not counted.
func countText(p *PortSample, text string) string {
	if p.NotCounted {
		return "-"
	}
	return text
}

// choicesText tells how many endpoints can be chosen, or who chooses.
func choicesText(p *PortSample) string {
	switch {
	case p.Scheduled:
		return "ipvs"
	case p.Choices == 0:
		return "none"
	}
	return units.Thousands(p.Choices)
}

// topName is the name, followed by how many endpoints are ejected, and by IPVS's counts if the port is expanded.
func topName(mark string, p *PortSample) string {
	name := mark + p.Name
	if n := len(p.Ejected); n > 0 {
		name += fmt.Sprintf("  %d ejected", n)
	}
	if p.Scheduler == nil {
		return name
	}
	return name + "  " + schedulerText(p.Scheduler)
}

// ejectedLines returns a line for each ejected endpoint of a port's Service.
func ejectedLines(p *PortSample, width int) (lines []string) {
	for _, o := range p.Ejected {
		text := "    " + o.Endpoint.String() + "  " + unhealthyText(&o.Unhealthy) + ", ejected"
		lines = append(lines, clip(topLine("", "", "", text), width))
	}
	return lines
}

// endpointText is the address, followed by IPVS's weight and counts.
func endpointText(e *EndpointSample) string {
	text := "    " + e.AddrPort.String()
	switch {
	case e.Scheduler == nil:
		return text
	case e.Scheduler.Weight == 0:
		return text + "  draining, " + schedulerText(e.Scheduler)
	}
	return fmt.Sprintf("%s  weight %d, %s", text, e.Scheduler.Weight, schedulerText(e.Scheduler))
}

// endpointLines returns a line for each endpoint of a port.
func endpointLines(p *PortSample, width int) (lines []string) {
	whole := 0.0
	for _, e := range p.Endpoints {
		whole += e.Rate
	}
	for _, e := range p.Endpoints {
		share := ""
		if whole > 0 {
			share = percent(e.Rate / whole)
		}
		lines = append(lines, clip(topLine(rateText(e.Rate), units.Thousands(int(e.Total)), share, endpointText(&e)), width))
	}
	return lines
}

// clip cuts a line to a width.
func clip(line string, width int) string {
	if utf8.RuneCountInString(line) <= width {
		return line
	}
	return string([]rune(line)[:max(width, 0)])
}
