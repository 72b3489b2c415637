// Command mutate plants single faults in the product's code and says which tests find them. It never changes a file:
// the compiler gets mutated ones by an overlay. All faults of a package are in one program, and an environment variable
// chooses one of them, so that a fault costs no more than the tests. A seed always chooses the same places.
package main

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"
)

// target is a package to plant faults in, and the tests that may find them.
type target struct {
	dir string
	// count is how many of 200 faults it gets.
	count int
	// runs are the tests of the package itself, then others.
	runs []tests
}

// tests are those of a package that match a regular expression; all if it is empty.
type tests struct {
	dir, run string
	args     []string
}

var (
	simulation = tests{"nft/kernel", "TestSimulation$", []string{"-sim.steps", "1000"}}
	policy     = tests{dir: "sync/dataplane"}
	loop       = tests{dir: "sync/reconcile"}
	plan       = tests{dir: "nft"}
	// simulated has a table and a clock of its own, and needs no network namespace.
	simulated = tests{dir: "internal/proxy/conntrack", run: "^(TestRelease|TestForecast|TestUnanswered|TestFrontend|" +
		"TestPauses|TestLooksTwice|TestSweeps|TestNothing|TestStorm|TestEndpointArrives|TestFailure|TestNewTCP|TestWrong|" +
		"TestQueries)"}
)

var targets = []target{
	{"sync/snapshot", 15, []tests{{dir: "sync/snapshot"}, policy, loop, simulation}},
	{"sync/dataplane", 60, []tests{policy, plan, loop, simulation}},
	{"sync/reconcile", 45, []tests{loop, simulation}},
	{"nft", 60, []tests{plan, simulation}},
	{"internal/proxy/conntrack", 20, []tests{simulated, {dir: "internal/proxy/conntrack"}}},
}

func main() {
	root := flag.String("root", "..", "the product's module")
	seed := flag.Uint64("seed", 1, "chooses the places")
	only := flag.String("only", "", "a regular expression: only packages that match")
	names := flag.String("faults", "", "a regular expression: faults whose lines in a table match, in place of the seed's")
	out := flag.String("out", "mutations", "a folder for the tables, one for each package, and for the programs")
	flag.Parse()
	which, err := regexp.Compile(*only)
	named, nerr := regexp.Compile(*names)
	err = errors.Join(err, nerr)
	for i := range targets {
		if err == nil && which.MatchString(targets[i].dir) {
			err = plantAll(*root, *out, &choice{*seed, named}, &targets[i])
		}
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "mutate:", err)
		os.Exit(1)
	}
}

// choice says which faults are planted: those that the seed chooses, or all whose lines match, if named is not empty.
type choice struct {
	seed  uint64
	named *regexp.Regexp
}

// plantAll plants the faults of one package, one after the other, and writes the table.
func plantAll(root, out string, which *choice, t *target) error {
	root, err := filepath.Abs(root)
	if err != nil {
		return err
	}
	dir, err := filepath.Abs(filepath.Join(out, strings.ReplaceAll(t.dir, "/", "-")))
	if err != nil {
		return err
	}
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return err
	}
	old, _ := filepath.Glob(filepath.Join(dir, "*.test"))
	for _, program := range old {
		if err := os.Remove(program); err != nil {
			return err
		}
	}
	faults, err := which.of(root, dir, t)
	if err != nil {
		return err
	}
	overlay, err := write(root, dir, t.dir, faults)
	if err != nil {
		return err
	}
	table, err := os.Create(filepath.Join(dir, "table.txt"))
	if err != nil {
		return err
	}
	defer table.Close()
	limits := map[string]time.Duration{}
	for i, f := range faults {
		found, err := find(root, dir, overlay, t, i+1, limits)
		if err != nil {
			return err
		}
		fmt.Fprintf(table, "%d\t%s\t%s\n", i+1, found, f.entry())
	}
	return nil
}

// of returns the faults of a package to plant. None lies within another one, and all compile.
func (c *choice) of(root, dir string, t *target) ([]fault, error) {
	all, err := faultsOf(root, t.dir)
	if err != nil {
		return nil, err
	}
	if c.named.String() != "" {
		return c.matching(all)
	}
	r := rand.New(rand.NewPCG(c.seed, uint64(len(t.dir))))
	r.Shuffle(len(all), func(i, j int) { all[i], all[j] = all[j], all[i] })
	var out []fault
	for len(all) > 0 && len(out) < t.count {
		f := all[0]
		all = all[1:]
		if !slices.ContainsFunc(out, f.overlaps) {
			out = append(out, f)
		}
		if len(out) == t.count {
			if out, err = compiling(root, dir, t, out); err != nil {
				return nil, err
			}
		}
	}
	return out, nil
}

// matching returns the faults whose lines in a table match.
func (c *choice) matching(all []fault) (out []fault, err error) {
	for _, f := range all {
		if !c.named.MatchString(f.entry()) {
			continue
		}
		if slices.ContainsFunc(out, f.overlaps) {
			return nil, fmt.Errorf("%s lies within another one that matches", f.name())
		}
		out = append(out, f)
	}
	return out, nil
}

var compileError = regexp.MustCompile(`(?m)([\w.]+\.go):(\d+):\d+: `)

// compiling leaves out the faults in lines that do not compile.
func compiling(root, dir string, t *target, faults []fault) ([]fault, error) {
	for {
		overlay, err := write(root, dir, t.dir, faults)
		if err != nil {
			return nil, err
		}
		build := exec.Command("go", "build", "-gcflags=-e", "-overlay", overlay, "./"+t.dir)
		build.Dir = root
		text, err := build.CombinedOutput()
		if err == nil {
			return faults, nil
		}
		errs := compileError.FindAllSubmatch(text, -1)
		if len(errs) == 0 {
			return nil, fmt.Errorf("%s does not compile: %s", t.dir, text)
		}
		for _, m := range errs {
			line, _ := strconv.Atoi(string(m[2]))
			faults = without(faults, string(m[1]), line)
		}
	}
}

// without leaves out the faults in a line of a file, or the last one before it: a function whose end cannot be reached
// is said to be wrong at its end.
func without(faults []fault, file string, line int) []fault {
	last := 0
	for i := range faults {
		if filepath.Base(faults[i].file) == file && faults[i].line <= line {
			last = max(last, faults[i].line)
		}
	}
	return slices.DeleteFunc(faults, func(f fault) bool { return filepath.Base(f.file) == file && f.line == last })
}

// chooser is what mutated files need. The variable is set before anything else of the package runs.
const chooser = `package %s

import (
	"os"
	"strconv"
)

var mutated, _ = strconv.Atoi(os.Getenv("MUTATED"))

func mutate[T any](n int, without, with T) T {
	if mutated == n {
		return with
	}
	return without
}
`

// write writes the files with all faults, numbered from 1 on, and returns the overlay that leads to them.
func write(root, dir, pkg string, faults []fault) (overlay string, err error) {
	replace := map[string]string{}
	put := func(file string, text []byte) {
		mutated := filepath.Join(dir, filepath.Base(file))
		replace[filepath.Join(root, file)] = mutated
		err = errors.Join(err, os.WriteFile(mutated, text, 0o600))
	}
	byFile := map[string][]int{}
	for i, f := range faults {
		byFile[f.file] = append(byFile[f.file], i)
	}
	for file, list := range byFile {
		slices.SortFunc(list, func(a, b int) int { return cmp.Compare(faults[b].from, faults[a].from) })
		text := string(faults[list[0]].source)
		for _, i := range list {
			f := &faults[i]
			text = text[:f.from] + f.guarded(strconv.Itoa(i+1)) + text[f.to:]
		}
		put(file, []byte(text))
	}
	put(filepath.Join(pkg, "mutated_faults.go"), fmt.Appendf(nil, chooser, filepath.Base(pkg)))
	text, jerr := json.Marshal(map[string]map[string]string{"Replace": replace})
	overlay = filepath.Join(dir, "overlay.json")
	return overlay, errors.Join(err, jerr, os.WriteFile(overlay, text, 0o600))
}

// patience is how many times longer tests with a fault may take than without; whoever takes longer has found it.
const patience = 8

// find returns what finds a fault. limits says how long each run of tests may take.
func find(root, dir, overlay string, t *target, number int, limits map[string]time.Duration) (string, error) {
	for i, run := range t.runs {
		program := filepath.Join(dir, strings.ReplaceAll(run.dir, "/", "-")+".test")
		if !exists(program) {
			build := exec.Command("go", "test", "-c", "-vet=off", "-overlay", overlay, "-o", program, "./"+run.dir)
			build.Dir = root
			if text, err := build.CombinedOutput(); err != nil {
				return "", fmt.Errorf("%w: %s", err, text)
			}
		}
		key := run.dir + run.run
		if limits[key] == 0 {
			start := time.Now()
			if name, err := runTests(root, program, run, 0, 10*time.Minute); err != nil || name != "" {
				return "", fmt.Errorf("without a fault, %s %s fails: %w", run.dir, name, err)
			}
			limits[key] = max(patience*time.Since(start), 10*time.Second)
		}
		name, err := runTests(root, program, run, number, limits[key])
		if err != nil {
			return "", err
		}
		if name != "" {
			own := map[bool]string{true: "own", false: "other"}[i == 0 || run.dir == t.dir]
			return own + ": " + run.dir + " " + name, nil
		}
	}
	return "SURVIVED", nil
}

func exists(path string) bool {
	_, err := os.Stat(path)
	return err == nil
}

var failed = regexp.MustCompile(`(?m)^\s*--- FAIL: (\S+)|^(panic: test timed out|panic:|fatal error:)[^\n]*`)

// runTests runs tests with one fault, and returns the name of one that failed; empty if none did.
func runTests(root, program string, run tests, number int, limit time.Duration) (string, error) {
	ctx, cancel := context.WithTimeout(context.Background(), limit+time.Minute)
	defer cancel()
	args := slices.Concat([]string{"-test.short", "-test.failfast", "-test.timeout", limit.String(), "-test.run", run.run},
		run.args)
	cmd := exec.CommandContext(ctx, program, args...)
	cmd.Dir, cmd.Env = filepath.Join(root, run.dir), append(os.Environ(), "MUTATED="+strconv.Itoa(number))
	text, err := cmd.CombinedOutput()
	var exit *exec.ExitError
	switch {
	case err == nil:
		return "", nil
	case !errors.As(err, &exit):
		return "", err
	}
	if m := failed.FindSubmatch(text); m != nil {
		return string(m[1]) + string(m[2]), nil
	}
	return strings.Join(strings.Fields(string(text[:min(len(text), 300)])), " "), nil
}
