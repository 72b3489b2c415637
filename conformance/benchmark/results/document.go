package results

import (
	"fmt"
	"os"
	"strings"
)

// The marks around what is generated in a document: "<!-- bench: NAME -->" and "<!-- bench: end -->".
const endMark = "<!-- bench: end -->"

func beginMark(name string) string { return "<!-- bench: " + name + " -->" }

// UpdateFile puts new content between the marks of this name in a file. Marks that are missing or in disorder are an
// error.
func UpdateFile(path, name, content string) error {
	b, err := os.ReadFile(path)
	if err != nil {
		return err
	}
	text, err := update(string(b), name, content)
	if err != nil {
		return fmt.Errorf("%s: %w", path, err)
	}
	return replaceFile(path, []byte(text))
}

func update(text, name, content string) (string, error) {
	head, rest, found := strings.Cut(text, beginMark(name)+"\n")
	if !found {
		return "", fmt.Errorf("there is no line %q", beginMark(name))
	}
	_, tail, found := strings.Cut(rest, endMark)
	if !found {
		return "", fmt.Errorf("no line %q follows %q", endMark, beginMark(name))
	}
	return head + beginMark(name) + "\n" + strings.TrimSpace(content) + "\n" + endMark + tail, nil
}

// readmeSize is the size that the README shows.
var readmeSize = Size{10000, 10}

// ReadmeTable gives the short table for the README: one size, a line for each question.
func (r *Results) ReadmeTable() string {
	var b strings.Builder
	proxies := r.Proxies()
	fmt.Fprintf(
		&b,
		"| %s Services x %d endpoints | %s |\n",
		grouped(readmeSize.Services),
		readmeSize.Endpoints,
		strings.Join(proxies, " | "),
	)
	fmt.Fprintf(&b, "|---|%s\n", strings.Repeat("---|", len(proxies)))
	line := func(name string, cell func(*Row) string) {
		fmt.Fprintf(&b, "| %s |", name)
		for _, p := range proxies {
			fmt.Fprintf(&b, " %s |", cell(r.Row(readmeSize, p)))
		}
		b.WriteByte('\n')
	}
	line("start, until every Service answers", func(row *Row) string { return row.Start.short(Seconds) })
	line("restart, nothing changed, until at rest / processor time", func(row *Row) string {
		return row.Restart.short(Seconds) + " / " + row.RestartCPU.short(Seconds)
	})
	line("restart, one endpoint changed meanwhile", func(row *Row) string { return row.Away.short(Seconds) })
	line("one endpoint changed, median / p99", func(row *Row) string { return row.Change.text() })
	for _, rate := range r.Settings.Rates {
		line(
			fmt.Sprintf("the same at %v changes a second", rate),
			func(row *Row) string { return row.Churn[rate].Quantiles.text() },
		)
		line("processor cores then", func(row *Row) string { return row.Churn[rate].Cores.short(cores) })
	}
	line("memory, after the start / peak / of the kernel", func(row *Row) string {
		return row.Resident.short(mebibytes) + " / " + row.Peak.short(mebibytes) + " / " + row.Kernel.short(mebibytes)
	})
	r.readmePaths(line)
	return b.String()
}
