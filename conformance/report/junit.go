package report

import (
	"encoding/xml"
	"fmt"
	"io"
	"strings"
	"time"
)

// The elements of JUnit's XML, as CI systems read it.
type (
	junitSuites struct {
		XMLName  xml.Name     `xml:"testsuites"`
		Name     string       `xml:"name,attr"`
		Tests    int          `xml:"tests,attr"`
		Failures int          `xml:"failures,attr"`
		Errors   int          `xml:"errors,attr"`
		Skipped  int          `xml:"skipped,attr"`
		Time     seconds      `xml:"time,attr"`
		Suites   []junitSuite `xml:"testsuite"`
	}
	junitSuite struct {
		Name       string          `xml:"name,attr"`
		Tests      int             `xml:"tests,attr"`
		Failures   int             `xml:"failures,attr"`
		Errors     int             `xml:"errors,attr"`
		Skipped    int             `xml:"skipped,attr"`
		Time       seconds         `xml:"time,attr"`
		Timestamp  string          `xml:"timestamp,attr"`
		Properties []junitProperty `xml:"properties>property"`
		Cases      []junitCase     `xml:"testcase"`
	}
	junitProperty struct {
		Name  string `xml:"name,attr"`
		Value string `xml:"value,attr"`
	}
	junitCase struct {
		Class     string       `xml:"classname,attr"`
		Name      string       `xml:"name,attr"`
		Time      seconds      `xml:"time,attr"`
		Failure   *junitReason `xml:"failure"`
		Error     *junitReason `xml:"error"`
		Skipped   *junitReason `xml:"skipped"`
		SystemOut string       `xml:"system-out,omitempty"`
	}
	junitReason struct {
		Message string `xml:"message,attr"`
		Text    string `xml:",chardata"`
	}
)

// seconds is a duration, written in seconds with three decimals.
type seconds time.Duration

func (s seconds) MarshalXMLAttr(name xml.Name) (xml.Attr, error) {
	return xml.Attr{Name: name, Value: fmt.Sprintf("%.3f", time.Duration(s).Seconds())}, nil
}

// WriteJUnit writes JUnit XML: a suite for each proxy. A case that Differs counts as passed, with the reason in
// system-out; one that is Broken is an error.
func WriteJUnit(w io.Writer, r *Run) error {
	all := junitSuites{Name: "service proxy conformance", Time: seconds(r.Took)}
	for _, p := range r.Proxies {
		s := r.suite(p)
		all.Tests += s.Tests
		all.Failures += s.Failures
		all.Errors += s.Errors
		all.Skipped += s.Skipped
		all.Suites = append(all.Suites, s)
	}
	if _, err := io.WriteString(w, xml.Header); err != nil {
		return fmt.Errorf("report: write JUnit: %w", err)
	}
	e := xml.NewEncoder(w)
	e.Indent("", " ")
	if err := e.Encode(all); err != nil {
		return fmt.Errorf("report: write JUnit: %w", err)
	}
	_, err := io.WriteString(w, "\n")
	if err != nil {
		return fmt.Errorf("report: write JUnit: %w", err)
	}
	return nil
}

func (r *Run) suite(p Proxy) junitSuite {
	c := r.Count(p.Name)
	s := junitSuite{
		Name: p.Name, Time: seconds(p.Took), Timestamp: r.Begun.UTC().Format("2006-01-02T15:04:05"),
		Failures: c.Fail, Errors: c.Broken, Skipped: c.Skipped,
		Properties: []junitProperty{{"version", p.Version}, {"host", r.Host}},
	}
	if p.Witness != nil {
		s.Properties = append(s.Properties, junitProperty{"witness", p.Witness.String()})
	}
	for i := range r.Cases {
		if result := r.Cases[i].Results[p.Name]; result != nil {
			s.Cases = append(s.Cases, result.junit(&r.Cases[i]))
		}
	}
	s.Tests = len(s.Cases)
	return s
}

func (result *Result) junit(c *Case) junitCase {
	k := junitCase{Class: c.Theme, Name: c.Name, Time: seconds(result.Took)}
	switch result.Outcome {
	case Fail:
		k.Failure = &junitReason{result.firstWrong(), c.Title + "\n" + result.packets()}
		k.SystemOut = result.Objects
	case Broken:
		k.Error = &junitReason{oneLine(result.Why), c.Title + "\n" + result.Why + "\n" + result.packets()}
		k.SystemOut = result.Objects
	case Skipped:
		k.Skipped = &junitReason{Message: oneLine(result.Why)}
	case Differs:
		k.SystemOut = "differs: " + result.Why
		if result.Right != "" {
			k.SystemOut += "\nright in our eyes: " + result.Right
		}
		k.SystemOut += "\n" + result.packets()
	}
	return k
}

// firstWrong says in a line what was seen first that should not be.
func (result *Result) firstWrong() string {
	for _, l := range result.Looks {
		if !l.OK {
			return oneLine(fmt.Sprintf("%s: want %s, got %s", l.packets(), l.Want, l.Got))
		}
	}
	if result.Why != "" {
		return oneLine(result.Why)
	}
	return "failed"
}

// packets writes all looks, a line each.
func (result *Result) packets() string {
	var b strings.Builder
	for _, l := range result.Looks {
		word := "ok   "
		if !l.OK {
			word = "WRONG"
		}
		fmt.Fprintf(&b, "%s %s: want %s, got %s", word, oneLine(l.packets()), oneLine(l.Want), oneLine(l.Got))
		if l.Step != "" {
			fmt.Fprintf(&b, " (%s)", oneLine(l.Step))
		}
		b.WriteByte('\n')
	}
	return b.String()
}
