package report

import (
	"bytes"
	"encoding/json"
	"encoding/xml"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"reflect"
	"regexp"
	"strings"
	"testing"
	"time"
	"unicode/utf8"

	"golang.org/x/net/html"
)

var update = flag.Bool("update", false, "write the golden anew")

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func written(t *testing.T, r *Run, write func(*bytes.Buffer, *Run) error) string {
	t.Helper()
	var b bytes.Buffer
	must(t, write(&b, r))
	return b.String()
}

func asHTML(b *bytes.Buffer, r *Run) error   { return WriteHTML(b, r) }
func asJUnit(b *bytes.Buffer, r *Run) error  { return WriteJUnit(b, r) }
func asTable(b *bytes.Buffer, r *Run) error  { return WriteTable(b, r) }
func asColour(b *bytes.Buffer, r *Run) error { return WriteColourTable(b, r) }
func asJSON(b *bytes.Buffer, r *Run) error   { return WriteJSON(b, r) }

// TestJSON: every field of a run is written under a name of its own.
func TestJSON(t *testing.T) {
	r, got := synthetic(60, 0.2), &Run{}
	d := json.NewDecoder(strings.NewReader(written(t, r, asJSON)))
	d.DisallowUnknownFields()
	must(t, d.Decode(got))
	if !reflect.DeepEqual(got, r) {
		t.Error("what is read is not what was written")
	}
}

// read is JUnit as a CI system reads it: the names are those of the format, and not taken from what writes it.
type read struct {
	Tests    int `xml:"tests,attr"`
	Failures int `xml:"failures,attr"`
	Errors   int `xml:"errors,attr"`
	Skipped  int `xml:"skipped,attr"`
	Suites   []struct {
		Name     string  `xml:"name,attr"`
		Tests    int     `xml:"tests,attr"`
		Failures int     `xml:"failures,attr"`
		Errors   int     `xml:"errors,attr"`
		Skipped  int     `xml:"skipped,attr"`
		Time     float64 `xml:"time,attr"`
		Cases    []struct {
			Class   string  `xml:"classname,attr"`
			Name    string  `xml:"name,attr"`
			Time    float64 `xml:"time,attr"`
			Failure *struct {
				Message string `xml:"message,attr"`
				Text    string `xml:",chardata"`
			} `xml:"failure"`
			Error   *struct{} `xml:"error"`
			Skipped *struct {
				Message string `xml:"message,attr"`
			} `xml:"skipped"`
			Out string `xml:"system-out"`
		} `xml:"testcase"`
	} `xml:"testsuite"`
}

func TestJUnit(t *testing.T) {
	r := synthetic(300, 0.2)
	r.Cases[3].Results["verdict"] = &Result{Outcome: Broken, Why: "a control character: \x01, and ]]> <b>"}
	var got read
	must(t, xml.Unmarshal([]byte(written(t, r, asJUnit)), &got))
	if len(got.Suites) != len(r.Proxies) {
		t.Fatalf("%d suites, want one for each of %d proxies", len(got.Suites), len(r.Proxies))
	}
	var sum [4]int
	for i, s := range got.Suites {
		p, c := r.Proxies[i], r.Count(r.Proxies[i].Name)
		if s.Name != p.Name || s.Failures != c.Fail || s.Errors != c.Broken || s.Skipped != c.Skipped ||
			s.Tests != len(r.Cases) ||
			s.Time != p.Took.Seconds() {
			t.Errorf(
				"suite %s: %d tests, %d failures, %d errors, %d skipped, %g s; counted %+v",
				s.Name,
				s.Tests,
				s.Failures,
				s.Errors,
				s.Skipped,
				s.Time,
				c,
			)
		}
		for k, n := range []int{s.Tests, s.Failures, s.Errors, s.Skipped} {
			sum[k] += n
		}
		for k, kase := range s.Cases {
			want := r.Cases[k].Results[p.Name]
			is := map[Outcome]bool{Fail: kase.Failure != nil, Broken: kase.Error != nil, Skipped: kase.Skipped != nil}
			for _, o := range []Outcome{Fail, Broken, Skipped} {
				if is[o] != (want.Outcome == o) {
					t.Errorf("%s, %s: %s is %v, but it is %s", p.Name, kase.Name, o, is[o], want.Outcome)
				}
			}
			if kase.Name != r.Cases[k].Name || kase.Class != r.Cases[k].Theme || kase.Time != want.Took.Seconds() {
				t.Errorf("%s: case %d is %s of %s in %g s", p.Name, k, kase.Name, kase.Class, kase.Time)
			}
			if want.Outcome == Differs && !strings.Contains(kase.Out, want.Why) {
				t.Errorf("%s, %s: system-out %q lacks the reason", p.Name, kase.Name, kase.Out)
			}
			if want.Outcome == Fail && !strings.Contains(kase.Failure.Text, "want refused, got dropped") {
				t.Errorf("%s, %s: the failure lacks the packets: %q", p.Name, kase.Name, kase.Failure.Text)
			}
		}
	}
	if sum != [4]int{got.Tests, got.Failures, got.Errors, got.Skipped} {
		t.Errorf("totals %d, %d, %d, %d; the suites have %v", got.Tests, got.Failures, got.Errors, got.Skipped, sum)
	}
}

// nodes gives the elements below a node for which is says yes.
func nodes(n *html.Node, is func(*html.Node) bool) (list []*html.Node) {
	for d := range n.Descendants() {
		if d.Type == html.ElementNode && is(d) {
			list = append(list, d)
		}
	}
	return list
}

func attr(n *html.Node, key string) string {
	for _, a := range n.Attr {
		if a.Key == key {
			return a.Val
		}
	}
	return ""
}

func content(n *html.Node) string {
	var b strings.Builder
	for d := range n.Descendants() {
		if d.Type == html.TextNode {
			b.WriteString(d.Data)
		}
	}
	return b.String()
}

func class(tag, name string) func(*html.Node) bool {
	return func(n *html.Node) bool { return n.Data == tag && attr(n, "class") == name }
}

// TestHTML holds the matrix of the page against the run, cell by cell.
func TestHTML(t *testing.T) {
	r := synthetic(300, 0.2)
	delete(r.Cases[7].Results, "verdict")
	doc, err := html.Parse(strings.NewReader(written(t, r, asHTML)))
	must(t, err)
	cases := nodes(doc, class("details", "c"))
	if len(cases) != len(r.Cases) {
		t.Fatalf("%d cases, want %d", len(cases), len(r.Cases))
	}
	texts := map[string]string{}
	for _, pre := range nodes(doc, func(n *html.Node) bool { return n.Data == "pre" }) {
		texts[attr(pre, "id")] = content(pre)
	}
	for i, c := range cases {
		want := &r.Cases[i]
		summary := c.FirstChild
		if got := content(summary.FirstChild); got != want.Name {
			t.Fatalf("case %d is called %q, want %q", i, got, want.Name)
		}
		cells := nodes(summary, func(n *html.Node) bool { return n.Data == "i" })
		for k, p := range r.Proxies {
			mark := pageCell{"n", "·", ""}
			if result := want.Results[p.Name]; result != nil {
				mark = marks[result.Outcome]
			}
			if attr(cells[k], "class") != mark.Class || content(cells[k]) != mark.Symbol {
				t.Errorf("%s, %s: the cell is %s %s", want.Name, p.Name, attr(cells[k], "class"), content(cells[k]))
			}
		}
		checkFindings(t, r, want, c, texts)
	}
}

// checkFindings looks at what a case shows of results that are no passes.
func checkFindings(t *testing.T, r *Run, want *Case, c *html.Node, texts map[string]string) {
	t.Helper()
	found := nodes(c, func(n *html.Node) bool { return n.Data == "section" })
	for _, p := range r.Proxies {
		result := want.Results[p.Name]
		if result == nil || result.Outcome == Pass {
			continue
		}
		if len(found) == 0 {
			t.Fatalf("%s: nothing is said of %s", want.Name, p.Name)
		}
		text := content(found[0])
		parts := []string{p.Name, result.Why, result.Right}
		for _, l := range result.Looks {
			parts = append(parts, l.From, l.To, l.Want, l.Got, l.Step)
		}
		for _, part := range parts {
			if !strings.Contains(text, part) {
				t.Errorf("%s, %s: %q is missing in %q", want.Name, p.Name, part, text)
			}
		}
		var linked []string
		for _, d := range nodes(found[0], class("details", "text")) {
			linked = append(linked, texts[attr(d, "data-text")])
		}
		if result.Outcome != Skipped && !reflect.DeepEqual(linked, []string{result.Objects, result.Listing, result.Logged}) {
			t.Errorf("%s, %s: objects, listing or log are others: %q", want.Name, p.Name, linked)
		}
		found = found[1:]
	}
	if len(found) > 0 {
		t.Errorf("%s: %d findings too many", want.Name, len(found))
	}
}

// TestHTMLAlone says that the page asks nobody for anything.
func TestHTMLAlone(t *testing.T) {
	text := written(t, synthetic(50, 0.2), asHTML)
	if found := regexp.MustCompile(`(?i)(src|href|action)\s*=|@import|url\(|https?://`).FindString(text); found != "" {
		t.Errorf("the page has %q", found)
	}
}

// TestHTMLHostile gives the page names and packets that would be markup.
func TestHTMLHostile(t *testing.T) {
	evil := `</script></pre><img src=x onerror=alert(1)>"'<!--`
	r := &Run{Host: evil, Proxies: []Proxy{{Name: evil, Version: evil}}, Cases: []Case{{
		Name: evil, Theme: evil, Title: evil, Source: evil, StandsFor: []string{evil},
		Results: map[string]*Result{evil: {Outcome: Fail, Why: evil, Right: evil, Objects: evil, Listing: evil + "2",
			Looks: []Look{{evil, evil, evil, 1, evil, evil, false}}}},
	}}}
	doc, err := html.Parse(strings.NewReader(written(t, r, asHTML)))
	must(t, err)
	if n := len(nodes(doc, func(n *html.Node) bool { return n.Data == "img" })); n > 0 {
		t.Errorf("%d elements were smuggled in", n)
	}
	if got := content(nodes(doc, class("details", "c"))[0].FirstChild.FirstChild); got != evil {
		t.Errorf("the name became %q", got)
	}
}

// TestHTMLSize says how large a page may be: 5,000 cases, and the same if nothing passes and every listing is long.
func TestHTMLSize(t *testing.T) {
	for name, bad := range map[string]float64{"few fail": 0.02, "most fail": 1} {
		t.Run(name, func(t *testing.T) {
			r := synthetic(5000, bad)
			begun := time.Now()
			text := written(t, r, asHTML)
			t.Logf("%.1f MB in %s", float64(len(text))/1e6, time.Since(begun).Round(time.Millisecond))
			if len(text) >= 10e6 {
				t.Errorf("the page has %d bytes", len(text))
			}
			if strings.Contains(text, "too much for this page") != (bad == 1) {
				t.Error("that texts are left out has to be said, if it is so")
			}
		})
	}
}

func TestHTMLLongListing(t *testing.T) {
	r := synthetic(1, 0)
	r.Cases[0].Results["verdict"] = &Result{Outcome: Fail, Listing: strings.Repeat("é", textLimit)}
	text := written(t, r, asHTML)
	if !utf8.ValidString(text) || !strings.Contains(text, "65,536 more bytes") {
		t.Error("a long listing has to be cut between characters, and it has to be said")
	}
}

// TestTable compares with a golden, which an operator has looked at, and holds the coloured table against the plain
// one.
func TestTable(t *testing.T) {
	r := synthetic(20, 0.15)
	plain := written(t, r, asTable)
	golden := filepath.Join("testdata", "table.txt")
	if *update {
		must(t, os.WriteFile(golden, []byte(plain), 0o644))
	}
	want, err := os.ReadFile(golden)
	must(t, err)
	if plain != string(want) {
		t.Errorf("the table differs from %s (go test -update writes it anew):\n%s", golden, plain)
	}
	if strings.Contains(plain, "\x1b") {
		t.Error("nobody asked for colours")
	}
	colour := written(t, r, asColour)
	if colour == plain || regexp.MustCompile("\x1b\\[[0-9;]+m").ReplaceAllString(colour, "") != plain {
		t.Error("without its colours the coloured table is not the plain one")
	}
}

func TestTableSaysEveryFailure(t *testing.T) {
	r := synthetic(400, 0.1)
	text := written(t, r, asTable)
	for _, p := range r.Proxies {
		for _, c := range r.Cases {
			o := c.Results[p.Name].Outcome
			line := fmt.Sprintf("  %s: %s\n", p.Name, c.Name)
			if strings.Contains(text, line) != (o == Fail || o == Broken) {
				t.Errorf("%s is %s for %s, and the list of failures says otherwise", c.Name, o, p.Name)
			}
		}
	}
	if !r.Failed() || synthetic(20, 0).Failed() {
		t.Error("Failed is wrong")
	}
}

func TestSpan(t *testing.T) {
	for d, want := range map[time.Duration]string{
		0: "0 ms", 340 * time.Millisecond: "340 ms", 12340 * time.Millisecond: "12.3 s", 250 * time.Second: "4 min 10 s",
		2 * time.Hour:            "120 min 0 s",
		59960 * time.Millisecond: "60.0 s",
	} {
		if got := span(d); got != want {
			t.Errorf("%d ns: %q, want %q", d, got, want)
		}
	}
}
