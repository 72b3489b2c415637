package iptshim

import (
	"bytes"
	"fmt"
	"net/netip"
	"slices"
	"strings"
)

// Saved is what iptables-save printed of one family, or what iptables-restore is to be told.
type Saved struct {
	tables map[Table]*savedTable
}

// savedTable is one table.
type savedTable struct {
	chains map[string][]savedRule
}

// savedRule is a rule as its words say it.
type savedRule struct {
	chain string
	// words are those after the chain's name; line is the text of them.
	words []string
	line  string
}

// Parse reads what iptables-save printed for a family. What is said of several tables, also in several texts one after
// the other, is put together; tables in which we have no chains are passed over. The error names the line.
func Parse(text []byte) (*Saved, error) {
	s := &Saved{tables: map[Table]*savedTable{}}
	var t *savedTable
	others := false
	for n, raw := range bytes.Split(text, []byte("\n")) {
		line := strings.TrimRight(string(raw), " \r")
		if line == "" || line[0] == '#' || line == "COMMIT" {
			continue
		}
		if line[0] == '*' {
			name := Table(line[1:])
			if others = !slices.Contains(Tables[:], name); !others {
				t = s.table(name)
			}
			continue
		}
		if others {
			continue
		}
		if t == nil {
			return nil, fmt.Errorf("iptables: line %d stands in no table: %s", n+1, line)
		}
		if err := t.read(line); err != nil {
			return nil, fmt.Errorf("iptables: line %d: %w: %s", n+1, err, line)
		}
	}
	return s, nil
}

// table gives a table, which may hold nothing yet.
func (s *Saved) table(name Table) *savedTable {
	t := s.tables[name]
	if t == nil {
		t = &savedTable{chains: map[string][]savedRule{}}
		s.tables[name] = t
	}
	return t
}

// read takes one line.
func (t *savedTable) read(line string) error {
	if line[0] == ':' {
		f := strings.Fields(line[1:])
		if len(f) < 2 {
			return fmt.Errorf("a chain has a name and a policy")
		}
		if t.chains[f[0]] == nil {
			t.chains[f[0]] = []savedRule{}
		}
		return nil
	}
	if line[0] == '[' { // counters
		_, line, _ = strings.Cut(line, " ")
	}
	verb, rest, _ := strings.Cut(line, " ")
	name, spec, _ := strings.Cut(rest, " ")
	words, err := split(spec)
	if err != nil {
		return err
	}
	r := savedRule{name, words, spec}
	switch verb {
	case "-A":
		t.chains[name] = append(t.chains[name], r)
	case "-I":
		t.chains[name] = slices.Insert(t.chains[name], 0, r)
	case "-X":
		delete(t.chains, name)
	default:
		return fmt.Errorf("it begins with %q", verb)
	}
	return nil
}

// split divides a rule into words, which may stand between quotation marks.
func split(s string) (words []string, err error) {
	for {
		s = strings.TrimLeft(s, " ")
		if s == "" {
			return words, nil
		}
		if s[0] != '"' {
			word, rest, _ := strings.Cut(s, " ")
			words, s = append(words, word), rest
			continue
		}
		var word []byte
		i := 1
		for ; i < len(s) && s[i] != '"'; i++ {
			if s[i] == '\\' && i+1 < len(s) {
				i++
			}
			word = append(word, s[i])
		}
		if i == len(s) {
			return nil, fmt.Errorf("a quotation mark is not closed")
		}
		words, s = append(words, string(word)), s[i+1:]
	}
}

// rule puts a rule in the form that we write it in, whoever wrote it: what it is for first, then the comment, then the
// matches in their order.
func (r *savedRule) rule() rule {
	var head [5]string
	var out rule
	var after strings.Builder
	words := r.words
	for i := 0; i < len(words); i++ {
		bang := ""
		if words[i] == "!" && i+1 < len(words) {
			bang, i = " !", i+1
		}
		word := words[i]
		at := slices.Index([]string{"-s", "-d", "-i", "-o", "-p"}, word)
		switch {
		case at >= 0 && i+1 < len(words):
			i++
			head[at] = bang + " " + word + " " + addressWord(words[i])
		case word == "-m" && i+3 < len(words) && words[i+1] == "comment" && words[i+2] == "--comment":
			out.comment, i = words[i+3], i+3
		case strings.ContainsAny(word, ` "`):
			after.WriteString(bang + ` "` + word + `"`)
		default:
			after.WriteString(bang + " " + word)
		}
	}
	out.before, out.after = strings.Join(head[:], ""), after.String()
	return out
}

// canonical gives a rule as one that was read is given. Only in jumps the comment has another place, which kube-proxy
// looks for.
func (r *rule) canonical() rule {
	words, err := split(r.text())
	if err != nil {
		panic("iptshim: " + err.Error())
	}
	return (&savedRule{words: words}).rule()
}

// addressWord writes an address or a range in one way.
func addressWord(s string) string {
	if p, err := netip.ParsePrefix(s); err == nil {
		return p.String()
	}
	if a, err := netip.ParseAddr(s); err == nil {
		return addrText(a)
	}
	return s
}

// target gives the chain or the verdict that a rule leads to; empty if it has none.
func (r *savedRule) target() string {
	for i, w := range r.words {
		if (w == "-j" || w == "-g") && i+1 < len(r.words) {
			return r.words[i+1]
		}
	}
	return ""
}

// chain gives a chain of a table as we would write it.
func (s *Saved) chain(t Table, name string) chain {
	c := chain{table: t, name: name}
	if table := s.tables[t]; table != nil {
		for i := range table.chains[name] {
			c.rules = append(c.rules, table.chains[name][i].rule())
		}
	}
	return c
}

// has says whether a chain is there.
func (s *Saved) has(t Table, name string) bool {
	table := s.tables[t]
	if table == nil {
		return false
	}
	_, ok := table.chains[name]
	return ok
}
