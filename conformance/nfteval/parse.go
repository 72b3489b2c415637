package nfteval

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"slices"
)

// Ruleset is what a host's tables hold. It is not changed by questions, which may be asked at the same time.
type Ruleset struct {
	// Version is that of the nft that listed it.
	Version string
	chains  map[chainName]*chain
	// bases are the base chains as they were listed.
	bases   []*chain
	sets    map[setName]*set
	dormant map[tableName]bool
}

type (
	tableName struct{ family, table string }
	chainName struct{ family, table, chain string }
	setName   struct{ family, table, set string }
)

// chain is a chain; a base chain has a hook.
type chain struct {
	name               chainName
	kind, hook, policy string
	device             []string
	priority           int64
	rules              []*rule
}

// rule is a rule: a list of statements, as nft's JSON has them.
type rule struct {
	in         chainName
	handle     int64
	statements []any
	text       string
}

// String names the rule and gives its text.
func (r *rule) String() string {
	return fmt.Sprintf("%s %s %s handle %d: %s", r.in.family, r.in.table, r.in.chain, r.handle, r.text)
}

// listed is an object of the listing. Which fields count depends on what it is.
type listed map[string]any

func (l listed) text(key string) string {
	s, _ := l[key].(string)
	return s
}

func (l listed) number(key string) int64 {
	n, _ := l[key].(json.Number)
	i, _ := n.Int64()
	return i
}

func (l listed) list(key string) []any {
	s, _ := l[key].([]any)
	return s
}

// Parse reads what `nft --json list ruleset` prints to standard output; 1.0.6 also warns on standard error. Programs
// from 1.0.6 to 1.1.7 are known; another version of its schema than 1 is an error.
func Parse(rd io.Reader) (*Ruleset, error) {
	d := json.NewDecoder(rd)
	d.UseNumber()
	var doc struct {
		Objects []map[string]listed `json:"nftables"`
	}
	if err := d.Decode(&doc); err != nil {
		return nil, fmt.Errorf("nfteval: read the listing: %w", err)
	}
	r := &Ruleset{chains: map[chainName]*chain{}, sets: map[setName]*set{}, dormant: map[tableName]bool{}}
	for i, o := range doc.Objects {
		for kind, l := range o {
			if err := r.add(kind, l); err != nil {
				return nil, fmt.Errorf("nfteval: nftables[%d].%s: %w", i, kind, err)
			}
		}
	}
	if r.Version == "" {
		return nil, errors.New("nfteval: read the listing: it has no metainfo: is it of nft --json list ruleset?")
	}
	return r, nil
}

// add takes in an object of the listing.
func (r *Ruleset) add(kind string, l listed) error {
	family, table, name := l.text("family"), l.text("table"), l.text("name")
	switch kind {
	case "metainfo":
		r.Version = l.text("version")
		if n := l.number("json_schema_version"); n != 1 {
			return fmt.Errorf("json_schema_version is %d, and only 1 is known", n)
		}
	case "table":
		r.dormant[tableName{family, name}] = slices.Contains(words(l["flags"]), "dormant")
	case "chain":
		c := &chain{
			name: chainName{family, table, name}, kind: l.text("type"), hook: l.text("hook"), policy: l.text("policy"),
			priority: l.number("prio"), device: words(l["dev"]),
		}
		r.chains[c.name] = c
		if c.hook != "" {
			r.bases = append(r.bases, c)
		}
	case "set", "map":
		r.sets[setName{family, table, name}] = newSet(kind, l)
	case "rule":
		c := r.chains[chainName{family, table, l.text("chain")}]
		if c == nil {
			return fmt.Errorf("rule with handle %d of chain %s %s %s, which is not listed", l.number("handle"), family, table,
				l.text("chain"))
		}
		c.rules = append(c.rules, &rule{c.name, l.number("handle"), l.list("expr"), ruleText(l.list("expr"))})
	case "counter", "quota", "limit", "ct helper", "ct timeout", "ct expectation", "flowtable", "synproxy", "secmark",
		"tunnel":
		// Rules that refer to one are what counts.
	default:
		return errors.New("such an object is not known")
	}
	return nil
}

// newSet reads a set or map. What is wrong with it is kept for those who look into it.
func newSet(kind string, l listed) *set {
	s := &set{family: l.text("family"), table: l.text("table"), name: l.text("name"), isMap: kind == "map"}
	if s.key, s.err = typesOf(l["type"]); s.err == nil && s.isMap {
		if s.verdicts = l["map"] == "verdict"; !s.verdicts {
			s.data, s.err = typesOf(l["map"])
		}
	}
	if s.err != nil {
		s.err = fmt.Errorf("set %s: %w", s.name, s.err)
		return s
	}
	s.fill(l.list("elem"))
	return s
}

// words reads what is a word, or a list of words.
func words(node any) (list []string) {
	switch n := node.(type) {
	case string:
		return []string{n}
	case []any:
		for _, w := range n {
			if s, ok := w.(string); ok {
				list = append(list, s)
			}
		}
	}
	return list
}
