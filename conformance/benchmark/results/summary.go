package results

import (
	"cmp"
	"slices"
)

// Baseline is the name of a node without a proxy.
const Baseline = "no-proxy"

// Row is what all repeats of a proxy in one size say together.
type Row struct {
	Size  Size
	Proxy string
	// Errors are what cells said that ended early.
	Errors []string

	// Start, Restart and Away are in seconds, and so is the processor time in them.
	Start, Restart             Spread
	Away, StartCPU, RestartCPU Spread
	Change                     Quantiles
	// Churn is by the rate.
	Churn map[float64]ChurnRow
	// Resident, Peak and Kernel are in bytes.
	Resident, Peak, Kernel     Spread
	GiantCreated, GiantDeleted GiantRow
	// Paths are what packets cost, by turns with those of others.
	Paths map[Path]PathRow
}

// GiantRow is what all repeats say of the giant when it was created, or deleted.
type GiantRow struct {
	// Wait and Processor are in seconds, Longest, of the changes meanwhile, in milliseconds.
	Wait, Processor, Longest Spread
	// Resident, Peak and Kernel are the growth in bytes.
	Resident, Peak, Kernel Spread
}

// ChurnRow is what all repeats say of one rate.
type ChurnRow struct {
	Quantiles
	// Written is changes a second, Cores processor time by time, Behind seconds, Write milliseconds.
	Written, Cores, Behind, Write Spread
}

// Row sums up a proxy in one size.
func (r *Results) Row(size Size, proxy string) *Row {
	row := &Row{Size: size, Proxy: proxy, Churn: map[float64]ChurnRow{}}
	var cells []*Cell
	for _, c := range r.Cells {
		if c.Size == size && c.Proxy == proxy {
			cells = append(cells, c)
			if c.Error != "" {
				row.Errors = append(row.Errors, c.Error)
			}
		}
	}
	row.Start = waits(cells, func(c *Cell) *Wait { return c.Start })
	row.Restart = waits(cells, func(c *Cell) *Wait { return c.Restart })
	row.Away = waits(cells, func(c *Cell) *Wait { return c.Away })
	row.StartCPU = processor(cells, func(c *Cell) *Wait { return c.Start })
	row.RestartCPU = processor(cells, func(c *Cell) *Wait { return c.Restart })
	row.Change = quantilesOf(gather(cells, func(c *Cell) (Spans, bool) { return deref(c.Change), c.Change != nil }))
	for _, rate := range r.Settings.Rates {
		row.Churn[rate] = churnRow(cells, rate)
	}
	memory := func(of func(Memory) uint64) Spread {
		return spreadOf(gather(cells, func(c *Cell) (float64, bool) {
			bytes := of(deref(c.Memory))
			return float64(bytes), bytes != 0
		}), 0)
	}
	row.Resident = memory(func(m Memory) uint64 { return m.Resident })
	row.Peak = memory(func(m Memory) uint64 { return m.Peak })
	row.Kernel = memory(func(m Memory) uint64 { return m.Kernel })
	row.Paths = r.paths(size, proxy)
	row.GiantCreated = giantRow(cells, func(g Giant) GiantStep { return g.Created })
	row.GiantDeleted = giantRow(cells, func(g Giant) GiantStep { return g.Deleted })
	return row
}

func giantRow(cells []*Cell, step func(Giant) GiantStep) (row GiantRow) {
	steps := gather(cells, func(c *Cell) (GiantStep, bool) { return step(deref(c.Giant)), c.Giant != nil })
	var waits, longest []Wait
	var processor, resident, peak, kernel []float64
	for _, s := range steps {
		waits = append(waits, s.Wait)
		processor = append(processor, s.Processor)
		longest = append(longest, Wait{Seconds: slices.Max(append(s.Others.Milliseconds, 0)), Limit: s.Others.Open > 0})
		resident = append(resident, float64(s.Resident))
		peak = append(peak, float64(s.Peak))
		if s.Kernel != 0 {
			kernel = append(kernel, float64(s.Kernel))
		}
	}
	return GiantRow{
		waitSpread(waits), spreadOf(processor, 0), waitSpread(longest),
		spreadOf(resident, 0), spreadOf(peak, 0), spreadOf(kernel, 0),
	}
}

// gather calls get for every cell and keeps what it says there is.
func gather[T any](cells []*Cell, get func(*Cell) (T, bool)) (all []T) {
	for _, c := range cells {
		if v, ok := get(c); ok {
			all = append(all, v)
		}
	}
	return all
}

func deref[T any](p *T) (v T) {
	if p != nil {
		v = *p
	}
	return v
}

func waits(cells []*Cell, get func(*Cell) *Wait) Spread {
	all := gather(cells, func(c *Cell) (Wait, bool) { w := get(c); return deref(w), w != nil })
	return waitSpread(all)
}

func processor(cells []*Cell, get func(*Cell) *Wait) Spread {
	return spreadOf(gather(cells, func(c *Cell) (float64, bool) {
		w := deref(get(c))
		return w.Processor, w.Processor != 0
	}), 0)
}

func waitSpread(all []Wait) Spread {
	var values []float64
	limits := 0
	for _, w := range all {
		values = append(values, w.Seconds)
		if w.Limit {
			limits++
		}
	}
	return spreadOf(values, limits)
}

func churnRow(cells []*Cell, rate float64) ChurnRow {
	var spans []Spans
	var written, cores, write []float64
	var behind []Wait
	for _, c := range cells {
		for _, ch := range c.Churn {
			if ch.Rate == rate {
				spans = append(spans, ch.Spans)
				write = append(write, ch.Write)
				written, cores, behind = append(written, ch.Written), append(cores, ch.Cores), append(behind, ch.Behind)
			}
		}
	}
	return ChurnRow{quantilesOf(spans), spreadOf(written, 0), spreadOf(cores, 0), waitSpread(behind), spreadOf(write, 0)}
}

// Sizes gives the sizes that were measured, by endpoints of a Service in the order they came first, then by Services.
func (r *Results) Sizes() (sizes []Size) {
	place := map[int]int{}
	var all []Size
	for _, c := range r.Cells {
		all = append(all, c.Size)
	}
	for _, p := range r.Paths {
		all = append(all, p.Size)
	}
	for _, size := range all {
		if _, ok := place[size.Endpoints]; !ok {
			place[size.Endpoints] = len(place)
		}
		if !slices.Contains(sizes, size) {
			sizes = append(sizes, size)
		}
	}
	slices.SortFunc(sizes, func(a, b Size) int {
		return cmp.Or(cmp.Compare(place[a.Endpoints], place[b.Endpoints]), cmp.Compare(a.Services, b.Services))
	})
	return sizes
}

// Proxies gives the proxies that were measured, the known ones in their order.
func (r *Results) Proxies() (names []string) {
	for _, c := range r.Cells {
		if !slices.Contains(names, c.Proxy) {
			names = append(names, c.Proxy)
		}
	}
	for _, p := range r.Paths {
		for _, proxy := range append(sortedKeys(p.Turns), sortedKeys(p.Missing)...) {
			if proxy != Baseline && proxy != Tracking && !slices.Contains(names, proxy) {
				names = append(names, proxy)
			}
		}
	}
	slices.SortStableFunc(names, func(a, b string) int { return cmp.Compare(place(a), place(b)) })
	return names
}

// known is the order in which proxies are shown.
var known = []string{
	"verdict-nftables", "kube-proxy-nftables", "kube-proxy-1.36-nftables", "cilium", "cilium-socket",
	"verdict-iptables", "kube-proxy-iptables", "kube-proxy-1.36-iptables",
	"verdict-iptables-nft", "kube-proxy-iptables-nft", "verdict-ipvs", "kube-proxy-ipvs",
}

func place(proxy string) int {
	if i := slices.Index(known, proxy); i >= 0 {
		return i
	}
	return len(known)
}
