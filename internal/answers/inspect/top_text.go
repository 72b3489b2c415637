package inspect

import (
	"fmt"

	"github.com/verdict-proxy/verdict/internal/system/terminal"
	"github.com/verdict-proxy/verdict/internal/system/units"
	"github.com/verdict-proxy/verdict/sync/dataplane"
)

// Print prints a table of the first ports of a sample.
func (s *Sample) Print(p *terminal.Printer, shown int) {
	const wide = 1 << 20
	p.Line("%s", p.Paint(terminal.Dim, s.heads(wide)))
	for i := range s.Ports[:shown] {
		port := &s.Ports[i]
		p.Line("%s", portLine("", port, wide))
		for _, l := range append(endpointLines(port, wide), ejectedLines(port, wide)...) {
			p.Line("%s", l)
		}
	}
	if more := len(s.Ports) - shown; more > 0 {
		p.Line("  and %d more (--all)", more)
	}
	if n := s.Notice(); n != "" {
		p.Line("%s", p.Paint(terminal.Red, n))
	}
	if !s.TrafficMinute.IsZero() {
		p.Line("%s", p.Paint(terminal.Dim, "SENT/S and RECV/S: the average of the minute from "+
			s.TrafficMinute.Local().Format("15:04")+" on"))
	}
	p.Line("%s", p.Paint(terminal.Dim, fmt.Sprintf("%s connections/s to %s, over %gs",
		rateText(s.Rate), terminal.Plural(len(s.Ports), "service port"), s.Interval)))
}

// schedulerText is what stands behind the name of what IPVS schedules.
func schedulerText(c *dataplane.SchedulerCount) string {
	return fmt.Sprintf("%s open, in %s/s, out %s/s", units.Thousands(int(c.Active)), bytesText(c.ByteRateIn),
		bytesText(c.ByteRateOut))
}

// bytesText writes a number of bytes.
func bytesText(n uint64) string {
	value, names := float64(n), []string{"B", "kB", "MB", "GB", "TB"}
	i := 0
	for ; value >= 1000 && i < len(names)-1; i++ {
		value /= 1000
	}
	if i == 0 {
		return fmt.Sprintf("%d B", n)
	}
	return fmt.Sprintf("%.1f %s", value, names[i])
}
