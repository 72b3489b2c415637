package results

import (
	"bytes"
	"fmt"
	"image/color"
	"math"
	"path/filepath"
	"slices"
	"strings"

	"gonum.org/v1/plot"
	"gonum.org/v1/plot/font"
	"gonum.org/v1/plot/plotter"
	"gonum.org/v1/plot/text"
	"gonum.org/v1/plot/vg"
	"gonum.org/v1/plot/vg/draw"
	"gonum.org/v1/plot/vg/vgsvg"
)

// picture is a plot of one thing by the number of Services, a line for each proxy.
type picture struct {
	name, title, unit string
	// value gives what is drawn for a row, high the end of a thin line upwards from there; N is 0 if there is none.
	value, high func(*Row) Spread
	scale       float64 // what a value is multiplied with for the axis
	baseline    bool
}

func nothing(*Row) Spread { return Spread{} }

// pictures gives all of them.
func (r *Results) pictures() []picture {
	all := []picture{
		{
			"start",
			"Start: until every Service answers",
			"seconds",
			func(row *Row) Spread { return row.Start },
			nothing,
			1,
			false,
		},
		{"restart", "Restart: until a change made meanwhile has arrived (thin line to rest, without a change)", "seconds",
			func(row *Row) Spread { return row.Away }, func(row *Row) Spread { return row.Restart }, 1, false},
		{"change", "One endpoint changed: from the API to the kernel (median, thin line to p99)", "milliseconds",
			func(row *Row) Spread { return row.Change.P50 }, func(row *Row) Spread { return row.Change.P99 }, 1, false},
		{"memory", "Resident memory of the proxy and its children (after the start, thin line to the peak)", "MiB",
			func(row *Row) Spread { return row.Resident }, func(row *Row) Spread { return row.Peak }, 1.0 / (1 << 20), false},
		{"new-flow", "Processor time of a new flow that the node forwards to a Service (no proxy: to an endpoint)",
			"microseconds", func(row *Row) Spread { return row.Paths[ForwardedService].Spread }, nothing, 1, true},
	}
	for _, rate := range r.Settings.Rates {
		all = append(
			all,
			picture{
				fmt.Sprintf("churn-%v", rate),
				fmt.Sprintf("%v changes a second: from the API to the kernel (median, thin line to p99)", rate),
				"milliseconds",
				func(row *Row) Spread { return row.Churn[rate].P50 },
				func(row *Row) Spread { return row.Churn[rate].P99 },
				1,
				false,
			},
		)
	}
	return all
}

// WritePlots writes all pictures as bench-NAME.svg into a directory, and gives their names. A picture without values
// is not written.
func (r *Results) WritePlots(dir string) (names []string, err error) {
	for _, p := range r.pictures() {
		b, err := r.draw(p)
		if err != nil {
			return nil, fmt.Errorf("draw %s: %w", p.name, err)
		}
		if b == nil {
			continue
		}
		name := "bench-" + p.name + ".svg"
		if err := replaceFile(filepath.Join(dir, name), b); err != nil {
			return nil, err
		}
		names = append(names, name)
	}
	return names, nil
}

// look is how a proxy's line is drawn: Verdict solid, kube-proxy dashed and its older releases dotted, a colour for
// each mode of the set of Okabe and Ito, which all eyes tell apart, and one for Cilium.
type look struct {
	color  color.NRGBA
	dashes []vg.Length
	shape  draw.GlyphDrawer
}

func lookOf(proxy string) look {
	l := look{color.NRGBA{0x66, 0x66, 0x66, 0xff}, nil, draw.BoxGlyph{}}
	switch {
	case strings.Contains(proxy, "nftables"), proxy == "verdict":
		l.color, l.shape = color.NRGBA{0x00, 0x72, 0xb2, 0xff}, draw.CircleGlyph{}
	case strings.HasSuffix(proxy, "-iptables"):
		l.color, l.shape = color.NRGBA{0xd5, 0x5e, 0x00, 0xff}, draw.PyramidGlyph{}
	case strings.HasSuffix(proxy, "-ipvs"):
		l.color, l.shape = color.NRGBA{0x00, 0x9e, 0x73, 0xff}, draw.BoxGlyph{}
	case strings.HasPrefix(proxy, "cilium"):
		l.color, l.shape = color.NRGBA{0xcc, 0x79, 0xa7, 0xff}, draw.CrossGlyph{}
	}
	switch {
	case strings.HasPrefix(proxy, "kube-proxy-1."): // an older release
		l.dashes = []vg.Length{vg.Points(1), vg.Points(3)}
	case strings.HasPrefix(proxy, "kube-proxy"), proxy == "cilium-socket":
		l.dashes = []vg.Length{vg.Points(5), vg.Points(3)}
	}
	return l
}

// line is what is drawn of one proxy.
type line struct {
	proxy  string
	points plotter.XYs
	high   plotter.XYs // the other end of each point's thin line; the point itself if it has none
	limits []bool      // which points are limits that were hit
	open   []bool      // which thin lines end at such
}

// pictureEndpoints is how many endpoints a Service has in the pictures.
const pictureEndpoints = 10

func (r *Results) line(p picture, proxy string) line {
	l := line{proxy: proxy}
	for _, size := range r.Sizes() {
		if size.Endpoints != pictureEndpoints {
			continue
		}
		row := r.Row(size, proxy)
		v := p.value(row)
		if v.N == 0 || !(v.Median*p.scale > 0) {
			continue
		}
		at := plotter.XY{X: float64(size.Services), Y: v.Median * p.scale}
		end, open := at, false
		if h := p.high(row); h.N > 0 && h.Median*p.scale > at.Y {
			end.Y, open = h.Median*p.scale, h.AtLeast
		}
		l.points, l.high = append(l.points, at), append(l.high, end)
		l.limits, l.open = append(l.limits, v.AtLeast), append(l.open, open)
	}
	return l
}

const (
	width, height = 760 * vg.Length(0.75), 420 * vg.Length(0.75) // 760 by 420 pixels
	margin        = 12
	labelSpace    = 150
	titleSpace    = 28
)

// draw gives the picture as SVG; nil if it has no values.
func (r *Results) draw(p picture) ([]byte, error) {
	var lines []line
	proxies := r.Proxies()
	if p.baseline {
		proxies = r.pathColumns()
	}
	for _, proxy := range proxies {
		if l := r.line(p, proxy); len(l.points) > 0 {
			lines = append(lines, l)
		}
	}
	if len(lines) == 0 {
		return nil, nil
	}
	pl := plot.New()
	pl.BackgroundColor = color.White
	pl.X.Label.Text = fmt.Sprintf("Services, %d endpoints each (logarithmic)", pictureEndpoints)
	pl.Y.Label.Text = p.unit + " (logarithmic)"
	style(pl)
	axes(pl, lines)
	grid := plotter.NewGrid()
	grid.Horizontal.Color, grid.Vertical.Color = color.NRGBA{0xe4, 0xe4, 0xe4, 0xff}, color.NRGBA{0xf0, 0xf0, 0xf0, 0xff}
	pl.Add(grid)
	for _, l := range lines {
		if err := l.add(pl); err != nil {
			return nil, err
		}
	}
	return render(pl, p.title, lines)
}

// render draws onto a card that is light whatever is around it, so that the picture can be read on a dark page, too.
func render(pl *plot.Plot, title string, lines []line) ([]byte, error) {
	canvas := vgsvg.New(width, height)
	all := draw.New(canvas)
	all.FillPolygon(color.NRGBA{0xff, 0xff, 0xff, 0xff}, corners(all.Rectangle))
	inner := draw.Crop(all, margin, -margin, margin, -margin)
	heading := face(12)
	heading.YAlign = draw.YTop
	inner.FillText(heading, vg.Point{X: inner.Min.X, Y: inner.Max.Y}, title)
	left := draw.Crop(inner, 0, -labelSpace, 0, -titleSpace)
	pl.Draw(left)
	label(pl, inner, left, lines)
	var b bytes.Buffer
	_, err := canvas.WriteTo(&b)
	return bytes.ReplaceAll(b.Bytes(), []byte(family), []byte(families)), err
}

// The places of words are worked out with Liberation Sans. Where there is none, fonts of the same widths take its
// place.
const (
	family   = "font-family:Liberation Sans;"
	families = "font-family:Liberation Sans,Arial,Helvetica,sans-serif;"
)

func corners(r vg.Rectangle) []vg.Point {
	return []vg.Point{r.Min, {X: r.Max.X, Y: r.Min.Y}, r.Max, {X: r.Min.X, Y: r.Max.Y}}
}

var ink = color.NRGBA{0x33, 0x33, 0x33, 0xff}

func face(size vg.Length) text.Style {
	return text.Style{
		Color:   ink,
		Font:    font.From(font.Font{Typeface: "Liberation", Variant: "Sans"}, size),
		Handler: plot.DefaultTextHandler,
	}
}

func style(pl *plot.Plot) {
	axis, tick := face(10), face(9)
	for _, a := range []*plot.Axis{&pl.X, &pl.Y} {
		align := a.Label.TextStyle
		a.Label.TextStyle.Font, a.Label.TextStyle.Color = axis.Font, ink
		a.Label.TextStyle.XAlign, a.Label.TextStyle.YAlign = align.XAlign, align.YAlign
		a.Tick.Label.Font, a.Tick.Label.Color = tick.Font, ink
		a.LineStyle.Color, a.Tick.LineStyle.Color = color.NRGBA{0x99, 0x99, 0x99, 0xff}, color.NRGBA{0x99, 0x99, 0x99, 0xff}
		a.Scale = plot.LogScale{}
	}
}

// axes gives both axes their ends and ticks: the sizes that were measured, and 1, 2 and 5 of each power of ten.
func axes(pl *plot.Plot, lines []line) {
	var xs, ys []float64
	for _, l := range lines {
		for i := range l.points {
			xs, ys = append(xs, l.points[i].X), append(ys, l.points[i].Y, l.high[i].Y)
		}
	}
	slices.Sort(xs)
	xs = slices.Compact(xs)
	pl.X.Min, pl.X.Max = xs[0]/1.15, xs[len(xs)-1]*1.15
	pl.Y.Min, pl.Y.Max = slices.Min(ys)/1.4, slices.Max(ys)*1.4
	var ticks plot.ConstantTicks
	for _, x := range xs {
		ticks = append(ticks, plot.Tick{Value: x, Label: grouped(int(x))})
	}
	pl.X.Tick.Marker = ticks
	pl.Y.Tick.Marker = plot.ConstantTicks(logTicks(pl.Y.Min, pl.Y.Max))
}

// logTicks gives ticks from low to high, fewer if that is a long way.
func logTicks(low, high float64) (ticks []plot.Tick) {
	steps := []float64{1, 2, 5}
	if high/low > 3000 {
		steps = []float64{1}
	}
	for power := math.Floor(math.Log10(low)); power <= math.Log10(high); power++ {
		for _, s := range steps {
			if v := s * math.Pow(10, power); v >= low && v <= high {
				ticks = append(ticks, plot.Tick{Value: v, Label: tickLabel(v)})
			}
		}
	}
	return ticks
}

func tickLabel(v float64) string {
	if v >= 1000 {
		return grouped(int(math.Round(v)))
	}
	return fmt.Sprintf("%.3g", v)
}

// add draws the line, its points, and the thin lines upwards. A limit that was hit is an empty mark.
func (l line) add(pl *plot.Plot) error {
	look := lookOf(l.proxy)
	drawn, err := plotter.NewLine(l.points)
	if err != nil {
		return err
	}
	drawn.LineStyle = draw.LineStyle{Color: look.color, Width: 2, Dashes: look.dashes}
	pl.Add(drawn)
	for i := range l.points {
		thin, err := plotter.NewLine(plotter.XYs{l.points[i], l.high[i]})
		if err != nil {
			return err
		}
		thin.LineStyle = draw.LineStyle{Color: look.color, Width: 0.8}
		mark, err := plotter.NewScatter(l.points[i : i+1])
		if err != nil {
			return err
		}
		mark.GlyphStyle = draw.GlyphStyle{Color: look.color, Radius: 3.5, Shape: look.shape}
		if l.limits[i] {
			mark.GlyphStyle.Shape, mark.GlyphStyle.Radius = draw.RingGlyph{}, 5
		}
		pl.Add(thin, mark)
		if l.open[i] {
			end, err := plotter.NewScatter(l.high[i : i+1])
			if err != nil {
				return err
			}
			end.GlyphStyle = draw.GlyphStyle{Color: look.color, Radius: 3.5, Shape: draw.RingGlyph{}}
			pl.Add(end)
		}
	}
	return nil
}

// label writes each proxy's name beside the end of its line, and moves names apart that would lie on each other.
func label(pl *plot.Plot, all, left draw.Canvas, lines []line) {
	data := pl.DataCanvas(left)
	_, y := pl.Transforms(&data)
	type name struct {
		text string
		at   vg.Length
		look look
	}
	var names []name
	for _, l := range lines {
		last := len(l.points) - 1
		text := l.proxy
		if l.limits[last] {
			text += " (limit)"
		}
		names = append(names, name{text, y(l.points[last].Y), lookOf(l.proxy)})
	}
	slices.SortStableFunc(names, func(a, b name) int { return int(math.Copysign(1, float64(a.at-b.at))) })
	var at []vg.Length
	for _, n := range names {
		at = append(at, n.at)
	}
	at = apart(at, 13, data.Min.Y, data.Max.Y)
	for i, n := range names {
		style := face(10)
		style.Color, style.YAlign = n.look.color, draw.YCenter
		from := data.Max.X + 6
		all.StrokeLine2(draw.LineStyle{Color: n.look.color, Width: 2, Dashes: n.look.dashes}, from, at[i], from+16, at[i])
		all.FillText(style, vg.Point{X: from + 20, Y: at[i]}, n.text)
	}
}

// apart moves sorted places so that each is gap from the next, as little as that takes from below, and all lie
// between low and high.
func apart(places []vg.Length, gap, low, high vg.Length) []vg.Length {
	out := slices.Clone(places)
	for i := range out {
		out[i] = max(out[i], low)
		if i > 0 {
			out[i] = max(out[i], out[i-1]+gap)
		}
	}
	for i := len(out) - 1; i >= 0; i-- {
		most := high
		if i < len(out)-1 {
			most = out[i+1] - gap
		}
		out[i] = min(out[i], most)
	}
	return out
}
