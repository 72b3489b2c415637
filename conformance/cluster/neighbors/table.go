package neighbors

import (
	"fmt"
	"slices"
	"strings"
)

// Table writes results of the same neighbors with several proxies as Markdown.
func Table(results []*Result) string {
	var b strings.Builder
	b.WriteString("| beside | proxy | flows | connections | failed | the client's address was lost |\n" +
		"|---|---|---|---|---|---|\n")
	for _, r := range results {
		fmt.Fprintf(&b, "| %s | %s | %d | %d | %d | %d |\n", r.Neighbors, r.Proxy, r.Flows, r.Connections, r.Failed,
			r.WrongSource)
	}
	for _, r := range results {
		for _, line := range append(slices.Clone(r.Notes), r.Wrong...) {
			fmt.Fprintf(&b, "\n%s: %s\n", r.Proxy, line)
		}
	}
	return b.String() + decisionTable(results)
}

// decisionTable shows beside each other what became of the same connections under policies with each proxy.
func decisionTable(results []*Result) string {
	if len(results) == 0 || len(results[0].Decisions) == 0 {
		return ""
	}
	var b strings.Builder
	head, line := "\n| client | way | by the policy |", "|---|---|---|"
	for _, r := range results {
		head, line = head+" "+r.Proxy+" | the server saw |", line+"---|---|"
	}
	b.WriteString(head + "\n" + line + "\n")
	for i := range results[0].Decisions {
		d := &results[0].Decisions[i]
		fmt.Fprintf(&b, "| %s | %s | %s |", d.From, d.To, word(d.Want))
		for _, r := range results {
			fmt.Fprintf(&b, " %s | %s |", &r.Decisions[i], strings.Join(r.Decisions[i].Sources, ", "))
		}
		b.WriteString("\n")
	}
	return b.String()
}

func word(allowed bool) string {
	if allowed {
		return "allowed"
	}
	return "denied"
}

// String is what became of the connections: allowed, denied, or how many of them were allowed.
func (d *Decision) String() string {
	if d.Answered > 0 && d.Answered < d.Asked {
		return fmt.Sprintf("%d of %d allowed", d.Answered, d.Asked)
	}
	return word(d.Answered > 0)
}
