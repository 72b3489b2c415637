package results

import (
	"fmt"
	"image/color"
	"path/filepath"

	"gonum.org/v1/plot"
	"gonum.org/v1/plot/plotter"
	"gonum.org/v1/plot/vg/draw"
)

// plotted is the scenario that the picture shows.
const plotted = "one-blackholed"

// WritePlot writes the picture of one scenario into a directory and gives its name: the longest time to connect of
// each half second, with each proxy, in the first repeat. The name is empty if there is nothing to draw.
func (r *Outages) WritePlot(dir string) (name string, err error) {
	var lines []line
	for _, proxy := range r.proxies() {
		if c := r.Find(plotted, proxy, 1); c != nil && len(c.Timeline) > 0 {
			lines = append(lines, r.outageLine(c))
		}
	}
	if len(lines) == 0 {
		return "", nil
	}
	b, err := r.drawOutage(lines)
	if err != nil {
		return "", fmt.Errorf("draw %s: %w", plotted, err)
	}
	name = "bench-outage.svg"
	return name, replaceFile(filepath.Join(dir, name), b)
}

// shortest is the time that the axis begins with.
const shortest = 0.1 // ms

// outageLine gives the line of a cell. Half seconds in which a client failed have a ring.
func (r *Outages) outageLine(c *Outage) line {
	l := line{proxy: c.Proxy}
	for _, p := range c.Timeline {
		at := plotter.XY{X: p.At, Y: max(p.Longest, shortest)}
		l.points, l.high = append(l.points, at), append(l.high, at)
		l.limits, l.open = append(l.limits, p.Failed > 0), append(l.open, false)
	}
	return l
}

func (r *Outages) drawOutage(lines []line) ([]byte, error) {
	pl := plot.New()
	pl.BackgroundColor = color.White
	pl.X.Label.Text, pl.Y.Label.Text = "seconds", "milliseconds"
	style(pl)
	axes(pl, lines)
	pl.X.Scale, pl.X.Tick.Marker = plot.LinearScale{}, plot.DefaultTicks{}
	pl.X.Min, pl.X.Max = 0, r.Settings.Length
	grid := plotter.NewGrid()
	grid.Horizontal.Color, grid.Vertical.Color = color.NRGBA{0xe4, 0xe4, 0xe4, 0xff}, color.NRGBA{0xf0, 0xf0, 0xf0, 0xff}
	pl.Add(grid)
	for _, l := range lines {
		if err := l.addOutage(pl); err != nil {
			return nil, err
		}
	}
	title := fmt.Sprintf("One of 4 endpoints dies after %v s: longest time to connect, by half seconds", r.Settings.Before)
	return render(pl, title, lines)
}

// addOutage draws the line, and a ring at each half second in which a client failed.
func (l line) addOutage(pl *plot.Plot) error {
	look := lookOf(l.proxy)
	drawn, err := plotter.NewLine(l.points)
	if err != nil {
		return err
	}
	drawn.LineStyle = draw.LineStyle{Color: look.color, Width: 1.2, Dashes: look.dashes}
	pl.Add(drawn)
	for i := range l.points {
		if !l.limits[i] {
			continue
		}
		mark, err := plotter.NewScatter(l.points[i : i+1])
		if err != nil {
			return err
		}
		mark.GlyphStyle = draw.GlyphStyle{Color: look.color, Radius: 3, Shape: draw.RingGlyph{}}
		pl.Add(mark)
	}
	return nil
}
