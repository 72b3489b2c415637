package cases

import (
	"bytes"
	"embed"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"go.yaml.in/yaml/v3"
)

//go:embed *.yaml
var embedded embed.FS

// Suite is all cases.
type Suite struct {
	Themes []Theme
	Cases  []*Case
	// Stories are the other kind of cases.
	Stories []*Story
}

// Theme is a file of cases.
type Theme struct {
	Theme string `yaml:"theme"`
	// About says in a sentence what it is about.
	About  string   `yaml:"about"`
	Matrix []Matrix `yaml:"matrix"`
	// Stories are raw, since each may stand for several.
	Stories []yaml.Node `yaml:"stories"`
}

// statesFile holds the states of endpoints that matrices name.
const statesFile = "states.yaml"

// Load gives the suite that the program was built with.
func Load() (*Suite, error) { return LoadFrom(embedded) }

// LoadFrom reads all *.yaml files of a directory. An error names file and line.
func LoadFrom(dir fs.FS) (*Suite, error) {
	var states struct {
		States map[string]*State `yaml:"states"`
	}
	if _, err := decode(dir, statesFile, &states); err != nil {
		return nil, err
	}
	names, err := fs.Glob(dir, "*.yaml")
	if err != nil {
		return nil, err
	}
	s := &Suite{}
	var errs []error
	for _, name := range names {
		if name != statesFile {
			errs = append(errs, s.load(dir, name, states.States))
		}
	}
	return s, errors.Join(append(errs, s.unique())...)
}

// decode reads a file strictly, and gives it as a tree, too, which knows its lines.
func decode(dir fs.FS, name string, into any) (*yaml.Node, error) {
	text, err := fs.ReadFile(dir, name)
	if err != nil {
		return nil, err
	}
	d := yaml.NewDecoder(bytes.NewReader(text))
	d.KnownFields(true)
	if err := d.Decode(into); err != nil {
		return nil, fmt.Errorf("%s: %w", name, err)
	}
	var root yaml.Node
	if err := yaml.Unmarshal(text, &root); err != nil {
		return nil, fmt.Errorf("%s: %w", name, err)
	}
	return root.Content[0], nil
}

func (s *Suite) load(dir fs.FS, file string, states map[string]*State) error {
	var t Theme
	root, err := decode(dir, file, &t)
	if err != nil {
		return err
	}
	if t.Theme != strings.TrimSuffix(filepath.Base(file), ".yaml") {
		return fmt.Errorf("%s:%d: theme: it is %q, and should be as the file's name", file, root.Line, t.Theme)
	}
	var errs []error
	for i := range t.Matrix {
		m := &t.Matrix[i]
		if err := m.check(states); err != nil {
			errs = append(errs, fmt.Errorf("%s:%d: matrix %s: %w", file, lineOf(root, "matrix", i), m.Name, err))
			continue
		}
		s.Cases = append(s.Cases, m.cases(t.Theme, states)...)
	}
	for i := range t.Stories {
		stories, err := expand(&t.Stories[i])
		if err != nil {
			errs = append(errs, fmt.Errorf("%s:%d: story: %w", file, t.Stories[i].Line, err))
			continue
		}
		for _, story := range stories {
			story.Theme = t.Theme
			if err := story.check(); err != nil {
				errs = append(errs, fmt.Errorf("%s:%w", file, err))
			}
		}
		s.Stories = append(s.Stories, stories...)
	}
	s.Themes = append(s.Themes, t)
	return errors.Join(errs...)
}

// unique finds names that are there twice.
func (s *Suite) unique() error {
	seen := make(map[string]bool)
	var errs []error
	note := func(name string) {
		if seen[name] {
			errs = append(errs, fmt.Errorf("there are two cases named %s", name))
		}
		seen[name] = true
	}
	for _, c := range s.Cases {
		note(c.Name)
	}
	for _, story := range s.Stories {
		note(story.FullName())
	}
	return errors.Join(errs...)
}

// child gives a value in a tree by its key or its place; nil if there is none.
func child(n *yaml.Node, at any) *yaml.Node {
	if n == nil {
		return nil
	}
	switch at := at.(type) {
	case int:
		if at < len(n.Content) {
			return n.Content[at]
		}
	case string:
		for i := 0; i+1 < len(n.Content); i += 2 {
			if n.Content[i].Value == at {
				return n.Content[i+1]
			}
		}
	}
	return nil
}

func lineOf(root *yaml.Node, at ...any) int {
	line := root.Line
	for _, a := range at {
		if root = child(root, a); root == nil {
			return line
		}
		line = root.Line
	}
	return line
}

// expand makes of a story all that it stands for.
func expand(n *yaml.Node) ([]*Story, error) {
	var head struct {
		Name string              `yaml:"name"`
		Each map[string][]string `yaml:"each"`
	}
	if err := n.Decode(&head); err != nil {
		return nil, err
	}
	values := []map[string]string{{}}
	keys := slices.Sorted(maps.Keys(head.Each))
	for _, key := range keys {
		var more []map[string]string
		for _, v := range values {
			for _, word := range head.Each[key] {
				next := maps.Clone(v)
				next[key] = word
				more = append(more, next)
			}
		}
		values = more
	}
	var all []*Story
	for i, v := range values {
		name := head.Name
		for _, key := range keys {
			name += "/" + strings.ToLower(v[key])
		}
		v["number"] = strconv.Itoa(i + 1)
		tree := substitute(n, v)
		story, err := decodeStory(tree)
		if err != nil {
			return nil, fmt.Errorf("%s: %w", name, err)
		}
		story.Name = name
		if story.Differs, err = differing(story.Differs, v); err != nil {
			return nil, fmt.Errorf("%s: %w", name, err)
		}
		all = append(all, story)
	}
	return all, nil
}

// differing gives the differences of a story that its values are meant by.
func differing(all []Difference, values map[string]string) ([]Difference, error) {
	var kept []Difference
	for _, d := range all {
		meant := true
		for key, words := range d.Each {
			value, ok := values[key]
			if !ok {
				return nil, fmt.Errorf("differs: each: the story has no %s", key)
			}
			meant = meant && slices.Contains(words, value)
		}
		if meant {
			kept = append(kept, d)
		}
	}
	return kept, nil
}

// decodeStory reads a story strictly, which takes text, and its lines, which takes the tree.
func decodeStory(tree *yaml.Node) (*Story, error) {
	text, err := yaml.Marshal(tree)
	if err != nil {
		return nil, err
	}
	d := yaml.NewDecoder(bytes.NewReader(text))
	d.KnownFields(true)
	story := &Story{}
	if err := d.Decode(story); err != nil {
		return nil, err
	}
	steps := child(tree, "steps")
	for i := range story.Steps {
		story.Steps[i].Line = child(steps, i).Line
	}
	return story, nil
}

// substitute copies a tree with $(KEY) replaced.
func substitute(n *yaml.Node, values map[string]string) *yaml.Node {
	c := *n
	c.Content = nil
	for _, sub := range n.Content {
		c.Content = append(c.Content, substitute(sub, values))
	}
	if c.Kind != yaml.ScalarNode || !strings.Contains(c.Value, "$(") {
		return &c
	}
	for key, value := range values {
		c.Value = strings.ReplaceAll(c.Value, "$("+key+")", value)
	}
	if c.Style == 0 {
		c.Tag = "" // it may have become a number
	}
	return &c
}

// UnmarshalYAML reads "ready" and "ready for zone-a node-b".
func (e *Endpoint) UnmarshalYAML(n *yaml.Node) error {
	words := strings.Fields(n.Value)
	if n.Kind != yaml.ScalarNode || len(words) == 0 || len(words) > 1 && words[1] != "for" || len(words) == 2 {
		return fmt.Errorf("line %d: an endpoint is such as ready, or ready for zone-a", n.Line)
	}
	e.Condition = Condition(words[0])
	if !slices.Contains([]Condition{Ready, Serving, Terminating, NotReady}, e.Condition) {
		return fmt.Errorf("line %d: %s is none of ready, serving, terminating, unready", n.Line, words[0])
	}
	for _, place := range words[min(2, len(words)):] {
		switch {
		case strings.HasPrefix(place, "zone-"):
			e.Zones = append(e.Zones, place)
		case isNode(place):
			e.Nodes = append(e.Nodes, place)
		default:
			return fmt.Errorf("line %d: %s is no zone and no node", n.Line, place)
		}
	}
	return nil
}

// UnmarshalYAML reads "refused" and "[a1, b1]".
func (a *Answer) UnmarshalYAML(n *yaml.Node) error {
	if n.Kind == yaml.SequenceNode {
		a.Outcome = Answered
		if err := n.Decode(&a.Endpoints); err != nil {
			return err
		}
		slices.Sort(a.Endpoints)
		return nil
	}
	a.Outcome = Outcome(n.Value)
	if !slices.Contains([]Outcome{Answered, Refused, Dropped, Unanswered}, a.Outcome) {
		return fmt.Errorf(
			"line %d: %q is none of refused, dropped, unanswered, answered, and no list of endpoints",
			n.Line,
			n.Value,
		)
	}
	return nil
}

// UnmarshalYAML reads "3s".
func (d *Duration) UnmarshalYAML(n *yaml.Node) error {
	t, err := time.ParseDuration(n.Value)
	if err != nil {
		return fmt.Errorf("line %d: %w", n.Line, err)
	}
	*d = Duration(t)
	return nil
}

// parse reads the specification strictly.
func (s *ServiceStep) parse() error {
	var tree any
	if err := s.Spec.Decode(&tree); err != nil {
		return err
	}
	text, err := json.Marshal(tree)
	if err != nil {
		return err
	}
	d := json.NewDecoder(bytes.NewReader(text))
	d.DisallowUnknownFields()
	if err := d.Decode(&s.Parsed); err != nil {
		return fmt.Errorf("service %s: spec: %w", s.Name, err)
	}
	return nil
}
