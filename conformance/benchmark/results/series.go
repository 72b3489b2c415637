package results

import (
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"os"
	"reflect"
	"slices"
)

// Run says which run a cell is of: a scenario with one proxy, and which of its repeats, counted from 1.
type Run struct {
	Scenario string `json:"scenario"`
	Proxy    string `json:"proxy"`
	Repeat   int    `json:"repeat"`
}

func (r *Run) run() *Run { return r }

// runner is a cell of a Series: a struct with a Run in it.
type runner interface {
	comparable
	run() *Run
}

// Series are scenarios that were run with some proxies, each several times: what was set, and a cell for each run.
type Series[S any, C runner] struct {
	Machine  Machine           `json:"machine"`
	Settings S                 `json:"settings"`
	Versions map[string]string `json:"versions"`
	Cells    []C               `json:"cells"`
}

// Find returns the cell of a run; zero if there is none.
func (r *Series[S, C]) Find(scenario, proxy string, repeat int) (cell C) {
	i := slices.IndexFunc(r.Cells, func(c C) bool { return *c.run() == Run{scenario, proxy, repeat} })
	if i >= 0 {
		cell = r.Cells[i]
	}
	return cell
}

// WriteFile puts the results in the place of a file.
func (r *Series[S, C]) WriteFile(path string) error {
	b, err := json.MarshalIndent(r, "", " ")
	if err != nil {
		return err
	}
	return replaceFile(path, append(b, '\n'))
}

// proxies returns those that were measured, in the order of their names: cells take turns.
func (r *Series[S, C]) proxies() []string {
	names := map[string]bool{}
	for _, c := range r.Cells {
		names[c.run().Proxy] = true
	}
	return slices.Sorted(maps.Keys(names))
}

// versionTexts says what each proxy is.
func (r *Series[S, C]) versionTexts() (texts []string) {
	for _, name := range r.proxies() {
		texts = append(texts, fmt.Sprintf("%s is %s", name, r.Versions[name]))
	}
	return texts
}

// of returns all repeats of a scenario with one proxy.
func (r *Series[S, C]) of(scenario, proxy string) (cells []C) {
	for _, c := range r.Cells {
		if c.run().Scenario == scenario && c.run().Proxy == proxy {
			cells = append(cells, c)
		}
	}
	return cells
}

// readSeries reads a file that WriteFile wrote into r. It returns false if there is no such file. An unknown field is
// an error.
func readSeries[S any, C runner](path string, r *Series[S, C]) (bool, error) {
	f, err := os.Open(path)
	if errors.Is(err, os.ErrNotExist) {
		return false, nil
	}
	if err != nil {
		return false, err
	}
	defer f.Close()
	d := json.NewDecoder(f)
	d.DisallowUnknownFields()
	if err := d.Decode(r); err != nil {
		return false, fmt.Errorf("%s: %w", path, err)
	}
	var none C
	for i, c := range r.Cells {
		if c == none || c.run().Scenario == "" || c.run().Proxy == "" || c.run().Repeat < 1 {
			return false, fmt.Errorf("%s: cells[%d]: scenario, proxy or repeat is missing", path, i)
		}
	}
	return true, nil
}

// Earlier says what becomes of the results of earlier runs.
type Earlier struct {
	// Fresh begins anew, whatever there is. Render only shows what there is, whatever its settings.
	Fresh, Render bool
}

// openSeries fills r with what a file has, or begins anew if there is none.
func openSeries[S any, C runner](path string, r *Series[S, C], settings S, e Earlier) error {
	found := false
	if !e.Fresh || e.Render {
		var err error
		if found, err = readSeries(path, r); err != nil {
			return err
		}
	}
	switch {
	case !found && e.Render:
		return fmt.Errorf("--render: there is no %s", path)
	case !found:
		*r = Series[S, C]{Settings: settings, Versions: map[string]string{}}
	case !e.Render && !reflect.DeepEqual(r.Settings, settings):
		return fmt.Errorf("%s was measured with other settings; --fresh begins anew, --out leaves it alone", path)
	}
	return nil
}
