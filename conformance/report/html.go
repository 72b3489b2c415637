package report

import (
	_ "embed"
	"fmt"
	"html/template"
	"io"
	"strings"
)

var (
	//go:embed page.html
	pageHTML string
	//go:embed page.css
	pageCSS template.CSS
	//go:embed page.js
	pageJS template.JS

	pageTemplate = template.Must(template.New("page").Parse(pageHTML))
)

const (
	// textLimit bounds one text of a result, such as a listing: that of a large cluster would be megabytes.
	textLimit = 64 << 10
	// whyLimit bounds a reason: an error may hold a whole log.
	whyLimit = 2 << 10
	// pageLimit is what a page may have in bytes, so that it stays usable however much failed. First the cases get their
	// part, then the packets, then objects and listings; a text that several results have in common is written, and
	// counted, once.
	pageLimit = 8_700_000
)

// WriteHTML writes a page that needs nothing but itself. It stays below 10 MB for 5,000 cases and 3 proxies, even if
// none of them passes: packets, objects and listings that go beyond that are left out, and the page says so.
func WriteHTML(w io.Writer, r *Run) error {
	b := pageBuilder{run: r, texts: map[string]string{}, left: pageLimit}
	if err := pageTemplate.Execute(w, b.page()); err != nil {
		return fmt.Errorf("report: write HTML: %w", err)
	}
	return nil
}

// page is what the template shows.
type page struct {
	Style       template.CSS
	Script      template.JS
	Total       string
	Host, Begun string
	Took        string
	Columns     []pageColumn
	Chips       []pageChip
	Themes      []pageTheme
	Texts       []pageText
}

// pageColumn is a proxy, with its totals.
type pageColumn struct {
	Name, Version, Took string
	Cells               []pageChip
	Words               string
	Witness             *Witness
}

// pageChip is an outcome with a number; Share is that of all, in percent.
type pageChip struct {
	Class, Symbol, Word string
	N                   string
	Share               float64
}

type pageTheme struct {
	Name, Total string
	// Open says that there is something in it that did not pass.
	Open  bool
	Cells [][]pageChip
	Cases []pageCase
}

type pageCase struct {
	// Prefix is the theme, if the name begins with it, and Rest what follows.
	Prefix, Rest, Title, Source string
	StandsFor                   []string
	Cells                       []pageCell
	Findings                    []pageFinding
}

// pageCell is empty where there is no result.
type pageCell struct{ Class, Symbol, Word string }

// pageFinding is a result that is no pass.
type pageFinding struct {
	Proxy, Took string
	Cell        pageCell
	Why, Right  string
	Looks       []pageLook
	Texts       []pageRef
	// LeftOut names what the page has no room for.
	LeftOut []string
	result  *Result
}

type pageLook struct {
	Look
	Packets string
}

// pageRef refers to a text at the end of the page.
type pageRef struct{ Label, ID string }

type pageText struct{ ID, Text string }

// marks are how outcomes look. The symbols tell them apart without the colours.
var marks = map[Outcome]pageCell{
	Pass:    {"p", "✓", "passed"},
	Fail:    {"f", "✕", "failed"},
	Differs: {"d", "≠", "differs"},
	Skipped: {"s", "–", "skipped"},
	Broken:  {"b", "!", "broken"},
}

// pageBuilder gathers a page.
type pageBuilder struct {
	run *Run
	// texts are the names of those that were taken, by their contents.
	texts map[string]string
	list  []pageText
	// left is how many bytes are left of pageLimit.
	left int
}

func (b *pageBuilder) page() *page {
	r := b.run
	p := &page{
		Style: pageCSS, Script: pageJS, Total: thousands(len(r.Cases)),
		Host: r.Host, Begun: r.Begun.Format("2 January 2006, 15:04 MST"), Took: span(r.Took),
	}
	var all Counts
	for _, proxy := range r.Proxies {
		c := r.Count(proxy.Name)
		all = all.plus(c)
		p.Columns = append(
			p.Columns,
			pageColumn{proxy.Name, proxy.Version, span(proxy.Took), c.chips(), c.words(), proxy.Witness},
		)
	}
	for i := len(Outcomes) - 1; i >= 0; i-- {
		m := marks[Outcomes[i]]
		p.Chips = append(p.Chips, pageChip{Class: m.Class, Symbol: m.Symbol, Word: m.Word, N: thousands(all.of(Outcomes[i]))})
	}
	for _, g := range r.themes() {
		p.Themes = append(p.Themes, b.theme(g))
	}
	b.fill(p, b.looks)
	b.fill(p, func(f *pageFinding) {
		b.text(f, "Objects", f.result.Objects)
		b.text(f, "What the kernel held", f.result.Listing)
		b.text(f, "What the proxies logged", f.result.Logged)
	})
	p.Texts = b.list
	return p
}

// fill calls do for each finding.
func (b *pageBuilder) fill(p *page, do func(*pageFinding)) {
	for _, t := range p.Themes {
		for _, c := range t.Cases {
			for i := range c.Findings {
				do(&c.Findings[i])
			}
		}
	}
}

// chips gives what was counted, passes first, without what did not occur.
func (c Counts) chips() []pageChip {
	var list []pageChip
	total := c.Pass + c.Fail + c.Differs + c.Skipped + c.Broken
	for i := len(Outcomes) - 1; i >= 0; i-- {
		o := Outcomes[i]
		if n := c.of(o); n > 0 {
			m := marks[o]
			list = append(list, pageChip{m.Class, m.Symbol, m.Word, thousands(n), 100 * float64(n) / float64(total)})
		}
	}
	return list
}

// words says what was counted: "1,969 passed, 9 skipped".
func (c Counts) words() string {
	var list []string
	for _, chip := range c.chips() {
		list = append(list, chip.N+" "+chip.Word)
	}
	return strings.Join(list, ", ")
}

func (c Counts) of(o Outcome) int {
	return map[Outcome]int{Pass: c.Pass, Fail: c.Fail, Differs: c.Differs, Skipped: c.Skipped, Broken: c.Broken}[o]
}

func (c Counts) plus(o Counts) Counts {
	return Counts{c.Pass + o.Pass, c.Fail + o.Fail, c.Differs + o.Differs, c.Skipped + o.Skipped, c.Broken + o.Broken}
}

func (b *pageBuilder) theme(g *theme) pageTheme {
	t := pageTheme{Name: g.name, Total: thousands(len(g.cases))}
	for _, p := range b.run.Proxies {
		c := count(g.cases, p.Name)
		t.Open = t.Open || c.Fail+c.Broken+c.Differs > 0
		t.Cells = append(t.Cells, c.chips())
	}
	for _, c := range g.cases {
		t.Cases = append(t.Cases, b.oneCase(c))
	}
	return t
}

func (b *pageBuilder) oneCase(c *Case) pageCase {
	k := pageCase{Rest: c.Name, Title: c.Title, Source: c.Source, StandsFor: c.StandsFor}
	b.spend(
		markup+(len(b.run.Proxies)+len(c.StandsFor))*40,
		append([]string{c.Name, c.Title, c.Source}, c.StandsFor...)...)
	if rest, ok := strings.CutPrefix(c.Name, c.Theme+"/"); ok && c.Theme != "" {
		k.Prefix, k.Rest = c.Theme+"/", rest
	}
	for _, p := range b.run.Proxies {
		result := c.Results[p.Name]
		if result == nil {
			k.Cells = append(k.Cells, pageCell{Class: "n", Symbol: "·", Word: "not run"})
			continue
		}
		m := marks[result.Outcome]
		k.Cells = append(k.Cells, m)
		if result.Outcome != Pass {
			k.Findings = append(k.Findings, b.finding(p.Name, m, result))
		}
	}
	return k
}

func (b *pageBuilder) finding(proxy string, m pageCell, result *Result) pageFinding {
	f := pageFinding{
		Proxy:  proxy,
		Took:   span(result.Took),
		Cell:   m,
		Why:    cut(result.Why, whyLimit),
		Right:  result.Right,
		result: result,
	}
	b.spend(markup, f.Proxy, f.Why, f.Right)
	return f
}

// markup is about what stands around a case, a finding or a line of packets, in bytes.
const markup = 160

// spend takes bytes off what is left, and says whether there were as many.
func (b *pageBuilder) spend(n int, texts ...string) bool {
	for _, t := range texts {
		n += len(template.HTMLEscapeString(t))
	}
	b.left -= n
	if b.left < 0 {
		b.left += n
		return false
	}
	return true
}

// looks shows the packets of a finding, if there is room.
func (b *pageBuilder) looks(f *pageFinding) {
	for _, l := range f.result.Looks {
		l := pageLook{l, l.packets()}
		if !b.spend(markup, l.Packets, l.Want, l.Got, l.Step) {
			f.LeftOut = append(f.LeftOut, "Packets")
			return
		}
		f.Looks = append(f.Looks, l)
	}
}

// text shows a text, if there is one, and room for it.
func (b *pageBuilder) text(f *pageFinding, label, text string) {
	if text == "" {
		return
	}
	text = cut(text, textLimit)
	id, ok := b.texts[text]
	if !ok {
		if !b.spend(markup, text) {
			f.LeftOut = append(f.LeftOut, label)
			return
		}
		id = fmt.Sprintf("t%d", len(b.list))
		b.texts[text] = id
		b.list = append(b.list, pageText{id, text})
	}
	f.Texts = append(f.Texts, pageRef{label, id})
}

// cut shortens a text, and says so.
func cut(text string, limit int) string {
	if len(text) <= limit {
		return text
	}
	return strings.ToValidUTF8(
		text[:limit],
		"",
	) + fmt.Sprintf(
		"\n... %s more bytes are in the JSON report\n",
		thousands(len(text)-limit),
	)
}
