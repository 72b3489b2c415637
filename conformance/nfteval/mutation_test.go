package nfteval_test

import (
	"encoding/json"
	"flag"
	"fmt"
	"maps"
	"math/rand/v2"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/verdict-proxy/verdict/conformance/nfteval"
	"github.com/verdict-proxy/verdict/internal/lab/labtest"
)

// mutant is a listing with one thing changed.
type mutant struct {
	// place is what packets must come to so that it can be noticed: a rule as "family handle", an element of a verdict map
	// as "family @map element"; empty if all others tell.
	what, place string
	listing     []byte
}

// untold are sets that tell of the table, and nothing of packets.
var untold = []any{"revision", "digests", "settings", "unhealthy-endpoints"}

// mutants gives a listing without each rule, without each element, and with each element's data and slot changed.
func mutants(t *testing.T, listing []byte) (list []mutant) {
	t.Helper()
	var doc struct {
		Objects []map[string]map[string]any `json:"nftables"`
	}
	labtest.Check(t, json.Unmarshal(listing, &doc))
	write := func(what, place string, objects []map[string]map[string]any) {
		text, err := json.Marshal(map[string]any{"nftables": objects})
		labtest.Check(t, err)
		list = append(list, mutant{what, place, text})
	}
	for i, o := range doc.Objects {
		if r := o["rule"]; r != nil {
			what := fmt.Sprintf("without rule %v %v: %v", r["family"], r["chain"], r["expr"])
			write(what, fmt.Sprintf("%v %v", r["family"], r["handle"]), slices.Delete(slices.Clone(doc.Objects), i, i+1))
		}
		for kind, s := range o {
			elements, _ := s["elem"].([]any)
			if slices.Contains(untold, s["name"]) {
				continue
			}
			for k, e := range elements {
				with := func(elements []any) []map[string]map[string]any {
					c := maps.Clone(s)
					c["elem"] = elements
					objects := slices.Clone(doc.Objects)
					objects[i] = map[string]map[string]any{kind: c}
					return objects
				}
				name := fmt.Sprintf("%v %v: %v", s["family"], s["name"], e)
				place := ""
				if s["map"] == "verdict" {
					place = verdictElement(fmt.Sprintf("%v @%v", s["family"], s["name"]), e)
				}
				write("without element "+name, place, with(slices.Delete(slices.Clone(elements), k, k+1)))
				for how, other := range altered(t, e) {
					changed := slices.Clone(elements)
					changed[k] = other
					write(how+" of element "+name, "", with(changed))
				}
			}
		}
	}
	return list
}

// altered gives an element of a map of slots with another port to go to, and in another slot.
func altered(t *testing.T, element any) map[string]any {
	t.Helper()
	pair, ok := element.([]any)
	if !ok || !strings.Contains(fmt.Sprint(pair[1]), "concat") {
		return nil
	}
	out := map[string]any{}
	for _, how := range []string{"another port", "another slot"} {
		text, err := json.Marshal(pair)
		labtest.Check(t, err)
		var c []any
		labtest.Check(t, json.Unmarshal(text, &c))
		parts := c[1].(map[string]any)["concat"].([]any)
		if how == "another slot" {
			parts = c[0].(map[string]any)["elem"].(map[string]any)["val"].(map[string]any)["concat"].([]any)
		}
		parts[len(parts)-1] = parts[len(parts)-1].(float64) + 1
		out[how] = c
	}
	return out
}

// verdictElement gives an element of a verdict map as the evaluator shows it, behind where it is.
func verdictElement(where string, e any) string {
	pair, _ := e.([]any)
	to, _ := pair[1].(map[string]any)["goto"].(map[string]any)
	return fmt.Sprintf("%s %v : goto %v", where, pair[0], to["target"])
}

// covered gives the places that some packet comes to.
func (m *manifest) covered(t *testing.T, r *nfteval.Ruleset, questions []asked) map[string]bool {
	t.Helper()
	seen := map[string]bool{}
	for _, q := range questions {
		outcomes, err := r.Ask(q.question)
		labtest.Check(t, err)
		for _, o := range outcomes {
			for _, s := range o.Trace {
				seen[fmt.Sprint(s.Family, " ", s.Handle)] = true
				for _, f := range s.Found {
					_, in, _ := strings.Cut(s.Rule, "vmap ")
					seen[s.Family+" "+in+" "+f] = true
				}
			}
		}
	}
	return seen
}

// same are the only changes after which every packet has the same outcome, by the manifest, with a part of what is
// changed.
var same = map[string][]string{
	"cluster.yaml": {
		"[10.96.20.5 tcp 80]",                             // no endpoints: the rule for unused ports rejects it just so
		"ip hairpin: map[concat:[192.0.2.10 192.0.2.10]]", // the node's own packets are masqueraded anyway
	},
	// outside clients have one endpoint each, so that nobody sees whether it is remembered under their own id
	"affinity.yaml": {
		"element ip outside-sticky", "element ip6 outside-sticky", "rule ip sticky-pool", "rule ip6 sticky-pool",
		"remember-90: [map[jump",
		"rule ip sticky-1: [map[jump:map[target:affinity-lookup]]]",
		"rule ip6 sticky-1: [map[jump:map[target:affinity-lookup]]]",
	},
	// no local endpoints: what is found and leads nowhere is dropped just so
	"local-policies.yaml": {"element ip picks: [200:0"},
	"as-kube-proxy.yaml":  {"element ip picks: [200:0"},
	"zones.yaml":          {"[10.244.1.1 8080]"}, // it has slot 0, too, which takes what the others would have
	"shared-ranges.yaml": {
		"element ip service-cidrs", "rule ip prerouting", "rule ip output", "pass-on: [map[accept", // all of it is shared
		"[fd00:10:96::80 tcp 80]", // no endpoints: the rule for unused ports rejects it just so
	},
}

// unasked names what concerns packets that are not asked about: those after the first one, and pings. The priority is
// cleared for rules behind, of which there are none.
var unasked = []string{"retry-services: ", "rule ip evidence", "rule ip6 evidence", "echo-request",
	"silent-cluster-ip: [map[mangle:map[key:map[meta:map[key:priority]] value:none]]]",
	"from-external: [map[mangle:map[key:map[meta:map[key:priority]] value:none]]]",
	"from-cluster-ip: [map[mangle:map[key:map[meta:map[key:priority]] value:none]]]"}

// otherAddress is an element of an address where nothing is refused: it serves only packets that a change overtakes.
// What is in source-kinds of 127.0.0.1 does not matter either: no pod comes there, so all are masqueraded anyway.
var otherAddress = regexp.MustCompile(`element ip6? addresses: \[\S+ 0:(6|16)\]|` +
	`element ip source-kinds: \[127\.0\.0\.1 `)

// onlySlot is what takes the only slot of a pool, in two rules.
const onlySlot = "pick-1: [map[dnat"

// every is how many of the changes of the large manifest are tried: all take a while.
var every = flag.Int("every", 25, "try each so manieth change of the large manifest; 1 tries all")

// TestSeesMutations takes away each rule that a packet comes to, and each element, and changes elements: the evaluator
// has to disagree with the model then.
func TestSeesMutations(t *testing.T) {
	for _, m := range manifests(t) {
		t.Run(m.name, func(t *testing.T) {
			_, listing := first(m.written(t))
			questions := m.questions()
			rand.New(rand.NewPCG(1, 2)).Shuffle(len(questions), func(i, k int) {
				questions[i], questions[k] = questions[k],
					questions[i]
			})
			covered := m.covered(t, parse(t, listing), questions)
			harmless := slices.Concat(same[m.name], unasked, []string{onlySlot})
			tried, unreached := 0, 0
			for i, mut := range mutants(t, listing) {
				if m.name == "cluster.yaml" && i%*every != 0 {
					continue
				}
				if mut.place != "" && !covered[mut.place] {
					unreached++
					continue
				}
				tried++
				r := parse(t, mut.listing)
				notices := func(q asked) bool { return m.disagreement(r, q) != nil }
				if !slices.ContainsFunc(questions, notices) && !otherAddress.MatchString(mut.what) &&
					!slices.ContainsFunc(harmless, func(s string) bool { return strings.Contains(mut.what, s) }) {
					t.Errorf("nobody notices: %s", mut.what)
				}
			}
			t.Logf("%d changes tried, %d more are of rules no packet comes to", tried, unreached)
		})
	}
}

// first gives the entry with the least key.
func first(m map[string][]byte) (string, []byte) {
	key := slices.Min(slices.Collect(maps.Keys(m)))
	return key, m[key]
}
