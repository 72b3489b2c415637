package results

import (
	"fmt"
	"slices"
	"strings"
)

// pathPair are two paths that are shown in one cell.
type pathPair struct {
	title, about string
	parts        [2]string
	// short is what the README's line says.
	short string
	paths [2]Path
	value func(float64) string
	above func(float64) string
}

var pathPairs = []pathPair{
	{
		"New flow, forwarded", "Processor time of the first packet of a connection that a client opens and the node " +
			"forwards, until it has left the node", whereTo,
		"extra processor time of a new flow that the node forwards, to a Service / straight to an endpoint",
		[2]Path{ForwardedService, ForwardedEndpoint}, hundredths, aboveHundredths,
	},
	{
		"New flow, from the node", "The same of a connection that a process of the node opens", whereTo,
		"the same of a new flow from the node itself", [2]Path{NodeService, NodeEndpoint}, hundredths, aboveHundredths,
	},
	{
		"A packet of an established flow", "Processor time of one packet more to a Service", whereFrom,
		"extra processor time of a packet of an established flow, forwarded / from the node",
		[2]Path{ForwardedPacket, NodePacket}, hundredths, aboveHundredths,
	},
	{
		"Connections", "TCP connections to Services a second, by four clients on this machine, each answered by a byte " +
			"of the server", whereFrom,
		"TCP connections a second, compared with no proxy, forwarded / from the node",
		[2]Path{ForwardedConnections, NodeConnections}, thousands, percentAbove,
	},
	{
		"Bytes of one connection", "Gbit/s of one connection to a Service", whereFrom,
		"bytes a second of one connection, compared with no proxy, forwarded / from the node",
		[2]Path{ForwardedGigabits, NodeGigabits}, gigabits, percentAbove,
	},
}

var (
	whereTo   = [2]string{"to a Service", "straight to an endpoint"}
	whereFrom = [2]string{"forwarded", "from the node"}
)

func hundredths(us float64) string      { return fmt.Sprintf("%.2f", us) }
func aboveHundredths(us float64) string { return fmt.Sprintf("%+.2f", us) }
func percentAbove(n float64) string     { return fmt.Sprintf("%+.0f%%", n*100) }

// pathColumns are the nodes that are shown: those without a proxy first.
func (r *Results) pathColumns() []string {
	return append([]string{Baseline, Tracking}, r.Proxies()...)
}

// writePaths writes the tables of what was measured by turns.
func (r *Results) writePaths(b *strings.Builder) {
	if len(r.Paths) == 0 {
		return
	}
	fmt.Fprintf(b, "### What packets cost\n\n%s\n\n", wrap(pathsAbout))
	for _, pair := range pathPairs {
		about := fmt.Sprintf("%s: %s / %s.", pair.about, pair.parts[0], pair.parts[1])
		cell := func(row *Row) string {
			first, second := pair.text(row, pair.paths[0]), pair.text(row, pair.paths[1])
			if first == none && second == none {
				return none
			}
			return first + " / " + second
		}
		r.writeTable(b, table{title: pair.title, about: about, cell: cell}, r.Sizes(), r.pathColumns())
	}
	r.writeAhead(b)
}

const pathsAbout = "The next five tables were measured by turns, round after round, on nodes that stand beside each " +
	"other: medians of all turns, times in microseconds. Beside each figure stands how much it differs from that of " +
	"no-proxy in the same rounds, where the same goes straight to an endpoint, and in brackets the spread of this " +
	"difference: where its true median lies with a probability of 95%, widened to the medians of the repeats. A " +
	"difference smaller than its spread is left out as within the noise. The node no-proxy does not track connections; " +
	"conntrack is one that does, and translates none."

func (p pathPair) text(row *Row, path Path) string {
	r := row.Paths[path]
	switch {
	case r.N == 0:
		return none
	case row.Proxy == Baseline:
		return r.short(p.value)
	}
	return r.short(p.value) + ", " + r.Above.text(p.above)
}

// readmePaths writes the README's lines: those in which a proxy differs from the node without one beyond the noise.
func (r *Results) readmePaths(line func(name string, cell func(*Row) string)) {
	if len(r.Paths) == 0 {
		return
	}
	for _, pair := range pathPairs {
		if !slices.ContainsFunc(r.Proxies(), func(proxy string) bool { return pair.differs(r.Row(readmeSize, proxy)) }) {
			continue
		}
		line(pair.short, func(row *Row) string {
			first, second := row.Paths[pair.paths[0]].Above, row.Paths[pair.paths[1]].Above
			if first.N == 0 && second.N == 0 {
				return none
			}
			return first.short(pair.unit()) + " / " + second.short(pair.unit())
		})
	}
}

func (p pathPair) differs(row *Row) bool {
	return slices.ContainsFunc(p.paths[:], func(path Path) bool { return !row.Paths[path].Above.Noise() })
}

// unit prints a difference with its unit.
func (p pathPair) unit() func(float64) string {
	if p.paths[0].rate() {
		return p.above
	}
	return func(us float64) string { return p.above(us) + " µs" }
}

// leader is whose figures the others' are compared with.
const leader = "verdict-nftables"

// writeAhead names every figure in which another proxy is ahead of Verdict, beyond the noise.
func (r *Results) writeAhead(b *strings.Builder) {
	if !slices.Contains(r.Proxies(), leader) {
		return
	}
	fmt.Fprintf(b, "### Who is ahead of %s\n\n%s\n\n", leader, wrap("Every figure of these five tables in which another "+
		"proxy is ahead by more than the spread, compared in the same rounds."))
	found := false
	for _, size := range r.Sizes() {
		for _, proxy := range r.Proxies() {
			for _, text := range r.ahead(size, proxy) {
				found = true
				fmt.Fprintf(b, "%s\n", strings.ReplaceAll(wrap("- "+text), "\n", "\n  "))
			}
		}
	}
	if !found {
		b.WriteString("Nobody.\n")
	}
	b.WriteByte('\n')
}

// ahead gives where a proxy is ahead of Verdict in one size.
func (r *Results) ahead(size Size, proxy string) (texts []string) {
	if proxy == leader {
		return nil
	}
	for _, pair := range pathPairs {
		for i, path := range pair.paths {
			d := r.difference(size, proxy, leader, path, path)
			if d.Noise() || (d.Median > 0) != path.rate() {
				continue
			}
			texts = append(texts, fmt.Sprintf("%s x %d: %s, %s, %s: %s", grouped(size.Services), size.Endpoints, proxy,
				strings.ToLower(pair.title[:1])+pair.title[1:], pair.parts[i], d.text(pair.unit())))
		}
	}
	return texts
}

// PathsSummary is a line about turns that were taken.
func PathsSummary(p *Paths) string {
	text := fmt.Sprintf("%-9s by turns %15s %3.0f s ", p.Size, "", p.Took)
	for _, proxy := range sortedKeys(p.Turns) {
		of := p.Turns[proxy]
		text += fmt.Sprintf("  %s %.1f and %.1f µs", proxy, Median(of[ForwardedEndpoint]), Median(of[NodeEndpoint]))
		if len(of[ForwardedService]) > 0 {
			text += fmt.Sprintf(", Services %.1f and %.1f µs", Median(of[ForwardedService]), Median(of[NodeService]))
		}
	}
	if p.Error != "" {
		text += "  failed: " + Shortened(p.Error)
	}
	return text
}
