package results

import (
	"cmp"
	"fmt"
	"io"
	"maps"
	"slices"
	"strings"
)

// Comparison is what "verdict compare" found on a node that a proxy had programmed.
type Comparison struct {
	Size  Size
	Proxy string
	// Start is what the proxy took to program all Services. If it hit its limit, there is nothing else.
	Start Wait
	// Seconds is how long the command took, of which Processor were of a processor; Memory is the most that it had
	// resident, in bytes.
	Seconds, Processor float64
	Memory             int64
	// Load is the machine's load average before.
	Load        float64
	Certificate *Certificate
}

// Certificate is what is read here of the JSON that "verdict compare" prints (docs/COMPARE.md).
type Certificate struct {
	Sides []struct {
		Name string
		Size struct{ Rules int }
	}
	Result struct {
		Classes, Same, Unexplained, Unknown int
		Errors                              []string
		Groups                              []struct {
			Reason   string
			Count    int
			Examples []Example
		}
	}
}

// Example is a class of packets with which two sides do different things.
type Example struct {
	Sides, Outcomes                                        [2]string
	Service, Kind, Sender, Source, Destination, Remembered string
}

func (c *Comparison) String() string {
	if c.Certificate == nil {
		return fmt.Sprintf("%-9s %-24s not programmed within %s", c.Size, c.Proxy, Seconds(c.Start.Seconds))
	}
	r := c.Certificate.Result
	return fmt.Sprintf("%-9s %-24s %s classes, %s the same, %d unexplained, %d unknown; %s, %s of a processor, %s  "+
		"load %.1f",
		c.Size, c.Proxy, grouped(r.Classes), grouped(r.Same), r.Unexplained, r.Unknown, Seconds(c.Seconds),
		Seconds(c.Processor), mebibytes(float64(c.Memory)), c.Load)
}

// reasons gives how many classes differ between the proxy and the objects for each reason, the most frequent first;
// "?" if there is none.
func (c *Comparison) reasons() string {
	count := map[string]int{}
	for _, g := range c.Certificate.Result.Groups {
		count[cmp.Or(g.Reason, "?")] += g.Count
	}
	names := slices.SortedFunc(maps.Keys(count), func(a, b string) int {
		return cmp.Or(cmp.Compare(count[b], count[a]), cmp.Compare(a, b))
	})
	for i, name := range names {
		names[i] = fmt.Sprintf("%s `%s`", grouped(count[name]), name)
	}
	return strings.Join(names, ", ")
}

// Unexplained is an error if classes differ for no known reason, or could not be followed, with the first of them.
func (c *Comparison) Unexplained() error {
	if c.Certificate == nil {
		return nil
	}
	r := c.Certificate.Result
	if r.Unexplained+r.Unknown == 0 {
		return nil
	}
	var b strings.Builder
	for _, g := range r.Groups {
		if g.Reason != "" || len(g.Examples) == 0 {
			continue
		}
		d := g.Examples[0]
		fmt.Fprintf(&b, "\n  %d like this: %s, %s from %s (%s) to %s %s: %s: %s; %s: %s", g.Count, d.Service, d.Sender,
			d.Source, d.Remembered, d.Kind, d.Destination, d.Sides[0], d.Outcomes[0], d.Sides[1], d.Outcomes[1])
	}
	for _, text := range r.Errors {
		fmt.Fprintf(&b, "\n  unknown: %s", text)
	}
	return fmt.Errorf("%s: not explained:%s", c, b.String())
}

// rules gives how much the proxy had written.
func (c *Comparison) rules() string {
	for _, s := range c.Certificate.Sides {
		if strings.HasPrefix(s.Name, "kube-proxy") {
			return grouped(s.Size.Rules)
		}
	}
	return none
}

// WriteComparisons writes a table in Markdown.
func WriteComparisons(w io.Writer, all []*Comparison) error {
	var b strings.Builder
	b.WriteString("| Services x endpoints | proxy | rules | classes | the same | differ, and why | " +
		"unexplained or unknown | time / of a processor | memory |\n|---|---|---|---|---|---|---|---|---|\n")
	for _, c := range all {
		if c.Certificate == nil {
			fmt.Fprintf(&b, "| %s x %d | %s | not programmed within %s | | | | | | |\n",
				grouped(c.Size.Services), c.Size.Endpoints, c.Proxy, Seconds(c.Start.Seconds))
			continue
		}
		r := c.Certificate.Result
		fmt.Fprintf(&b, "| %s x %d | %s | %s | %s | %s | %s | %d | %s / %s | %s |\n", grouped(c.Size.Services),
			c.Size.Endpoints, c.Proxy, c.rules(),
			grouped(r.Classes), grouped(r.Same), c.reasons(), r.Unexplained+r.Unknown, Seconds(c.Seconds),
			Seconds(c.Processor), mebibytes(float64(c.Memory)))
	}
	_, err := io.WriteString(w, b.String())
	return err
}
