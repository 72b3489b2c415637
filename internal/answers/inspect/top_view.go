package inspect

import (
	"fmt"
	"math"
	"slices"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/verdict-proxy/verdict/internal/answers/records"
	"github.com/verdict-proxy/verdict/internal/system/terminal"
	"github.com/verdict-proxy/verdict/internal/system/units"
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
	// filter hides the ports whose names do not contain it. While typing is true, keys change it.
	filter string
	typing bool
	// help shows the keys instead of the ports.
	help bool
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
	if v.typing && k != "\x03" {
		v.typeKey(k)
		return false
	}
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
	case "/":
		v.typing = true
	case "?":
		v.help = !v.help
	case "esc":
		if !v.help {
			v.filter = ""
		}
		v.help = false
	}
	v.selectIndex(at)
	return false
}

// typeKey handles a key while the filter is typed.
func (v *TopView) typeKey(k string) {
	switch {
	case k == "enter":
		v.typing = false
	case k == "esc":
		v.filter, v.typing = "", false
	case k == "\x7f" || k == "\b":
		v.filter = v.filter[:max(len(v.filter)-1, 0)]
	case len(k) == 1 && k[0] > ' ' && k[0] < 0x7f:
		v.filter += k
	}
	v.selectIndex(v.index())
}

// selectIndex selects the port at an index, or the nearest that there is.
func (v *TopView) selectIndex(at int) {
	if ports := v.ports(); len(ports) > 0 {
		v.cursor = ports[min(max(at, 0), len(ports)-1)].Name
	}
}

// ports returns the ports that the filter shows.
func (v *TopView) ports() []PortSample {
	switch {
	case v.sample == nil:
		return nil
	case v.filter == "":
		return v.sample.Ports
	}
	return slices.DeleteFunc(slices.Clone(v.sample.Ports), func(p PortSample) bool {
		return !strings.Contains(records.Named(p.Name, p.For), v.filter)
	})
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

// topColumns are rate, total, endpoints and name; trafficTopColumns also have the bytes sent and received. On a screen
// narrower than wideTop these take the place of total; on one narrower than narrowTop there are only rate and name.
var (
	topColumns        = terminal.Columns{12, 14, 11, 1}
	trafficTopColumns = terminal.Columns{12, 14, 11, 11, 11, 1}
	narrowTopColumns  = terminal.Columns{10, 1}
)

const narrowTop, wideTop = 60, 100

// right aligns text to the right of a column, followed by a space.
func right(text string, width int) string {
	return strings.Repeat(" ", max(width-1-utf8.RuneCountInString(text), 0)) + text
}

// topLine returns a row of top, cut to the width of the screen. Traffic are two cells, or none.
func topLine(width int, rate, total, endpoints string, traffic []string, name string) string {
	if width < narrowTop {
		return clip(narrowTopColumns.Row(right(rate, 9), name), width)
	}
	columns, cells := topColumns, []string{right(rate, 11), right(total, 13), right(endpoints, 10), name}
	if len(traffic) > 0 {
		columns, cells = trafficTopColumns, slices.Insert(cells, 3, right(traffic[0], 10), right(traffic[1], 10))
		if width < wideTop {
			columns, cells = slices.Delete(slices.Clone(columns), 1, 2), slices.Delete(cells, 1, 2)
		}
	}
	return clip(columns.Row(cells...), width)
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
	trouble := ""
	if v.failure != nil {
		trouble = v.failure.Error()
	} else if v.sample != nil {
		trouble = v.sample.Notice()
	}
	lines := []string{
		s.Paint(terminal.Bold, clip(v.head(), v.Width)),
		s.Paint(terminal.Red, clip(trouble, v.Width)),
		s.Paint(terminal.Dim, v.sample.heads(v.Width)),
	}
	ports := v.ports()
	if v.help {
		lines, ports = append(lines[:2], v.helpLines()...), nil
	}
	for i := v.first; i < len(ports) && len(lines) < v.Height-1; i++ {
		lines = append(lines, v.portLines(s, &ports[i])...)
	}
	lines = lines[:min(len(lines), max(v.Height-1, 1))]
	for len(lines) < v.Height-1 {
		lines = append(lines, "")
	}
	keys := "q quit  ? help  / filter  s sort  enter endpoints"
	switch {
	case v.typing:
		keys = "/" + v.filter + "_   enter keeps the filter, esc removes it"
	case v.filter != "":
		keys = "/" + v.filter + "   esc removes the filter   " + keys
	}
	return append(lines, s.Paint(terminal.Dim, clip(keys, v.Width)))
}

// head is the first line: the node, the order, and sums. What matters most comes first, since it may be cut.
func (v *TopView) head() string {
	head := fmt.Sprintf("verdict top  %s  by %s, every %s  ", v.node, v.order, v.interval)
	switch {
	case v.sample == nil:
		return head + "reading ..."
	case len(v.sample.Ports) == 0:
		return head + "there are no Services of Verdict on this node"
	}
	busy := 0
	for _, p := range v.sample.Ports {
		if p.Rate > 0 {
			busy++
		}
	}
	return head + fmt.Sprintf("%s conn/s  %s of %s ports busy", rateText(v.sample.Rate), units.Thousands(busy),
		units.Thousands(len(v.sample.Ports)))
}

// helpLines explains the keys and the columns.
func (v *TopView) helpLines() []string {
	lines := []string{
		"up k, down j     select a Service port",
		"pageup b, pagedown space, home g, end G",
		"enter            show and hide its endpoints",
		"s                sort by rate, total or name",
		"/                filter by a part of the name",
		"esc              close this help, or remove the filter",
		"?                close this help",
		"q                quit",
		"",
		"CONN/S           new connections a second",
		"TOTAL            since the first endpoint came",
		"ENDPOINTS        slots, or who chooses",
		"SENT/S, RECV/S   by clients, of what ended in the last minute; with records on",
		"red              connections, but no endpoint; or one is ejected",
	}
	for i, l := range lines {
		lines[i] = clip(l, v.Width)
	}
	return lines
}

// portLines returns the line of a port, and those of its endpoints if it is expanded.
func (v *TopView) portLines(s *terminal.Printer, p *PortSample) []string {
	selected := p.Name == v.cursor
	mark := "  "
	if selected {
		mark = "> "
	}
	line := portLine(mark, p, v.Width)
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
func portLine(mark string, p *PortSample, width int) string {
	return topLine(width, countText(p, rateText(p.Rate)), countText(p, units.Thousands(int(p.Total))), choicesText(p),
		p.Traffic.texts(), topName(mark, p))
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
	if p.AtMost {
		return "≤" + units.Thousands(p.Choices)
	}
	return units.Thousands(p.Choices)
}

// topName is the name, followed by what asked for the backends, by how many endpoints are ejected, by what was
// over limits, and by IPVS's counts
// if the port is expanded.
func topName(mark string, p *PortSample) string {
	name := mark + records.Named(p.Name, p.For)
	if n := len(p.Ejected); n > 0 {
		name += fmt.Sprintf("  %d ejected", n)
	}
	if o := p.OverLimit; o != nil {
		name += fmt.Sprintf("  %s over limits, %s/s", units.Thousands(int(o.Total)), rateText(o.Rate))
	}
	if p.Scheduler == nil {
		return name
	}
	return name + "  " + schedulerText(p.Scheduler)
}

// ejectedLines returns a line for each ejected endpoint of a port's Service.
func ejectedLines(p *PortSample, width int) (lines []string) {
	for _, o := range p.Ejected {
		text := "    " + o.AddrPort().String() + "  " + sinceText(o.Cause, o.Since) + ", ejected"
		lines = append(lines, topLine(width, "", "", "", p.Traffic.blank(), text))
	}
	return lines
}

// endpointText is the address, followed by IPVS's weight and counts.
func endpointText(e *EndpointSample) string {
	text := "    " + e.AddrPort().String()
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
		total := units.Thousands(int(e.Total))
		lines = append(lines, topLine(width, rateText(e.Rate), total, share, p.Traffic.blank(), endpointText(&e)))
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
