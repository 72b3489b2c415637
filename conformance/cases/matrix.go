package cases

import (
	"fmt"
	"strings"
)

// Matrix stands for all combinations of what it lists.
type Matrix struct {
	// Name is part of the cases' names; it may be empty in a theme with one matrix.
	Name      string   `yaml:"name"`
	Title     string   `yaml:"title"`
	Source    string   `yaml:"source"`
	StandsFor []string `yaml:"standsFor"`
	// Options are what all Services have, Vary how they differ, States the states of their endpoints. None in Vary means
	// that there is one variation without a name.
	Options Options     `yaml:"options"`
	Vary    []Variation `yaml:"vary"`
	States  []string    `yaml:"states"`
	// Frontends, Protocols, Families and Senders are who asks where. No protocols and families mean all.
	Frontends []Frontend   `yaml:"frontends"`
	Protocols []Protocol   `yaml:"protocols"`
	Families  []Family     `yaml:"families"`
	Senders   []string     `yaml:"senders"`
	Differs   []Difference `yaml:"differs"`
	// Apart says that each frontend has a Service of its own, where looking at one could change what another shows.
	Apart bool `yaml:"apart"`
	// Slice names variations and states of which the short run consists.
	Slice When `yaml:"slice"`
}

// Variation is a way in which a Service of a matrix differs from the others.
type Variation struct {
	Name    string `yaml:"name"`
	Options `yaml:",inline"`
}

// cases gives all combinations: a case for each variation, state, frontend, protocol and family, with a look for each
// sender.
func (m *Matrix) cases(theme string, states map[string]*State) []*Case {
	vary := m.Vary
	if len(vary) == 0 {
		vary = []Variation{{}}
	}
	var all []*Case
	for _, v := range vary {
		for _, state := range m.States {
			base := Case{
				Theme: theme, Source: m.Source, StandsFor: m.StandsFor, Options: m.Options.over(v.Options), State: states[state],
				Service: path("-", m.Name, v.Name, state),
			}
			for _, frontend := range m.Frontends {
				for _, p := range orAll(m.Protocols, Protocols) {
					for _, f := range orAll(m.Families, Families) {
						c := base
						if m.Apart {
							c.Service = path("-", m.Name, v.Name, state, strings.ReplaceAll(string(frontend), "@", "-"))
						}
						c.Name = path("/", theme, m.Name, v.Name, state, string(frontend), string(p), string(f))
						c.Title = fmt.Sprintf("%s Endpoints: %s.", m.Title, states[state].Title)
						c.Looks = m.looks(&c, v.Name, state, Flow{Frontend: frontend, Protocol: p, Family: f})
						c.Slice = m.short(v.Name, state)
						if len(c.Looks) > 0 {
							all = append(all, &c)
						}
					}
				}
			}
		}
	}
	return all
}

func (m *Matrix) short(variation, state string) bool {
	return (len(m.Slice.States) > 0 || len(m.Slice.Variations) > 0) && in(m.Slice.States, state) &&
		in(m.Slice.Variations, variation)
}

func (m *Matrix) looks(c *Case, variation, state string, f Flow) (looks []Look) {
	for _, from := range m.Senders {
		f.From = from
		if f.Frontend == Localhost && !isNode(from) {
			continue
		}
		want, promised := Expect(c.Options, c.State, f)
		if !promised {
			continue
		}
		l := Look{Flow: f, Want: want}
		for i := range m.Differs {
			if d := &m.Differs[i]; d.When.holds(f, state, variation, want.Outcome) {
				l.Differs = append(l.Differs, d)
			}
		}
		looks = append(looks, l)
	}
	return looks
}

func orAll[T any](some, all []T) []T {
	if len(some) == 0 {
		return all
	}
	return some
}

// path joins the parts that are not empty.
func path(sep string, parts ...string) string {
	var some []string
	for _, p := range parts {
		if p != "" {
			some = append(some, p)
		}
	}
	return strings.Join(some, sep)
}
