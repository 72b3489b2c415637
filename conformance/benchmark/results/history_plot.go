package results

import (
	"fmt"
	"image/color"
	"maps"
	"path/filepath"
	"slices"

	"gonum.org/v1/plot"
	"gonum.org/v1/plot/plotter"
	"gonum.org/v1/plot/vg"
	"gonum.org/v1/plot/vg/draw"
)

// leastStale is what stands for a staleness that is smaller, since the axis is logarithmic.
const leastStale = 1 // ms

// WritePlot writes the picture into a directory and gives its name: the staleness by scenario, a mark for each run, and
// a thin line from the smallest to the largest. The name is empty if there is nothing to draw.
func (r *Histories) WritePlot(dir string, scenarios []string) (name string, err error) {
	var lines []line
	var ticks plot.ConstantTicks
	for i, proxy := range r.proxies() {
		l := line{proxy: proxy}
		offset := 0.16 * (float64(i) - float64(len(r.proxies())-1)/2)
		for n, s := range scenarios {
			for _, c := range r.of(s, proxy) {
				at := plotter.XY{X: float64(n+1) + offset, Y: max(c.E(), leastStale)}
				l.points, l.high = append(l.points, at), append(l.high, at)
				l.limits, l.open = append(l.limits, false), append(l.open, false)
			}
		}
		if len(l.points) > 0 {
			lines = append(lines, l)
		}
	}
	if len(lines) == 0 {
		return "", nil
	}
	for n, s := range scenarios {
		ticks = append(ticks, plot.Tick{Value: float64(n + 1), Label: s})
	}
	b, err := drawHistories(lines, ticks)
	if err != nil {
		return "", fmt.Errorf("draw histories: %w", err)
	}
	name = "history.svg"
	return name, replaceFile(filepath.Join(dir, name), b)
}

func drawHistories(lines []line, ticks plot.ConstantTicks) ([]byte, error) {
	pl := plot.New()
	pl.BackgroundColor = color.White
	pl.Y.Label.Text = "milliseconds"
	style(pl)
	axes(pl, lines)
	pl.X.Scale, pl.X.Tick.Marker = plot.LinearScale{}, ticks
	pl.X.Min, pl.X.Max = 0.5, float64(len(ticks))+0.5
	pl.X.Tick.Label.Rotation, pl.X.Tick.Label.XAlign, pl.X.Tick.Label.YAlign = 0.5, draw.XRight, draw.YCenter
	grid := plotter.NewGrid()
	grid.Vertical.Width, grid.Horizontal.Color = 0, color.NRGBA{0xe4, 0xe4, 0xe4, 0xff}
	pl.Add(grid)
	for _, l := range lines {
		if err := l.addHistory(pl); err != nil {
			return nil, err
		}
	}
	return render(pl, "Staleness e of each run: the latest connection that saw what had been replaced", lines)
}

// addHistory draws a mark for each run, and a thin line between the lowest and the highest of a scenario.
func (l line) addHistory(pl *plot.Plot) error {
	look := lookOf(l.proxy)
	ends := make(map[float64][2]float64)
	for _, p := range l.points {
		e, ok := ends[p.X]
		if !ok {
			e = [2]float64{p.Y, p.Y}
		}
		ends[p.X] = [2]float64{min(e[0], p.Y), max(e[1], p.Y)}
	}
	for _, x := range slices.Sorted(maps.Keys(ends)) {
		e := ends[x]
		thin, err := plotter.NewLine(plotter.XYs{{X: x, Y: e[0]}, {X: x, Y: e[1]}})
		if err != nil {
			return err
		}
		thin.LineStyle = draw.LineStyle{Color: look.color, Width: vg.Points(0.8)}
		pl.Add(thin)
	}
	marks, err := plotter.NewScatter(l.points)
	if err != nil {
		return err
	}
	marks.GlyphStyle = draw.GlyphStyle{Color: look.color, Radius: 3, Shape: look.shape}
	if look.dashes != nil {
		marks.GlyphStyle.Shape = draw.RingGlyph{} // not Verdict's
	}
	pl.Add(marks)
	return nil
}
