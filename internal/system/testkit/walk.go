package testkit

import (
	"cmp"
	"flag"
	"fmt"
	"maps"
	"math"
	"math/rand/v2"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"
)

// Walk is one random walk, which a seed chooses. Each step has random numbers of its own, so that steps can be left out
// without changing what the others choose.
type Walk struct {
	Seed  uint64
	Steps []int
	// Step is the one that is taken; the random numbers are its own.
	Step int
	*rand.Rand
	// Count says how often what happened.
	Count map[string]int
	// Failure is what was wrong first; empty if nothing was.
	Failure string
	notes   []string
}

// NewWalk returns a walk before its first step.
func NewWalk(seed uint64, steps []int) *Walk {
	w := &Walk{Seed: seed, Steps: steps, Count: map[string]int{}}
	w.Begin(math.MinInt)
	w.Step = 0
	return w
}

// End is the step after all others.
const End = 1 << 62

// Begin begins a step.
func (w *Walk) Begin(step int) { w.Step, w.Rand = step, rand.New(rand.NewPCG(w.Seed, uint64(step))) }

// Note adds to what is told when the walk fails.
func (w *Walk) Note(format string, args ...any) {
	if len(w.notes) > 1000 {
		w.notes = slices.Clone(w.notes[500:])
	}
	text := fmt.Sprintf(format, args...)
	w.notes = append(w.notes, fmt.Sprintf("%6s  ", w.at())+text[:min(len(text), 400)])
}

// Fail says what was wrong. The first time counts.
func (w *Walk) Fail(format string, args ...any) {
	if w.Failure == "" {
		w.Failure = fmt.Sprintf("step %s: ", w.at()) + fmt.Sprintf(format, args...)
	}
}

func (w *Walk) at() string {
	if w.Step == End {
		return "end"
	}
	return strconv.Itoa(w.Step)
}

// Stop ends a walk of Walks where it is.
func (w *Walk) Stop() { panic(w) }

// Story tells what failed, how to see it again, and what happened before.
func (w *Walk) Story(again string) string {
	return fmt.Sprintf("seed %d, %s\ntake it again with %s\n%s", w.Seed, w.Failure, again,
		strings.Join(w.notes[max(0, len(w.notes)-60):], "\n"))
}

// Tally lists what was counted.
func Tally(count map[string]int) string {
	out := ""
	for _, name := range slices.Sorted(maps.Keys(count)) {
		out += fmt.Sprintf("%8d %s\n", count[name], name)
	}
	return out
}

// Walks are the random walks of a test. Its flags begin with a name: -NAME.seed takes one walk, -NAME.first says with
// which seed several begin, -NAME.steps how many steps are taken in all, and -NAME.only which ones of the one walk, as
// a failure lists them.
type Walks struct {
	test, name string
	// length is how many steps a walk takes at most: another seed is another world.
	length      int
	seed, first *uint64
	steps       *int
	only        *string
}

// NewWalks defines the flags.
func NewWalks(test, name string, length int) *Walks {
	return &Walks{test, name, length,
		flag.Uint64(name+".seed", 0, test+" takes only this seed; 0 means several"),
		flag.Uint64(name+".first", 1, "the first seed, if "+test+" takes several"),
		flag.Int(name+".steps", 0, "how many steps "+test+" takes in all; 0 means as many as everyday tests should"),
		flag.String(name+".only", "", test+" takes only these steps of the seed")}
}

// Long says whether more steps are asked for than an everyday test takes.
func (ws *Walks) Long(everyday int) bool { return *ws.steps > everyday }

// Run takes walks, at the same time if they are parallel. One that fails is told with the fewest steps that still fail.
// Of as many steps as enough says, those that do not fail must have counted one of each of mustSee.
func (ws *Walks) Run(t *testing.T, everyday int, parallel bool, take func(*testing.T, *Walk), enough int,
	mustSee ...string) {
	all, total := cmp.Or(*ws.steps, everyday), make(chan map[string]int, 1)
	total <- map[string]int{}
	start := time.Now()
	one := func(t *testing.T, seed uint64, steps []int, shrinks bool) {
		w := ws.take(t, seed, steps, take)
		if w.Failure != "" {
			if shrinks {
				w = ws.shrink(t, w, take)
			}
			t.Fatal(w.Story(ws.flags(w)))
		}
		count := <-total
		for name, n := range w.Count {
			count[name] += n
		}
		total <- count
	}
	if *ws.seed != 0 {
		one(t, *ws.seed, ws.chosen(), false)
		t.Logf("\n%s", Tally(<-total))
		return
	}
	t.Run("walks", func(t *testing.T) {
		for seed, left := *ws.first, all; left > 0 && !t.Failed(); seed, left = seed+1, left-ws.length {
			t.Run(fmt.Sprintf("seed=%d", seed), func(t *testing.T) {
				if parallel {
					t.Parallel()
				}
				one(t, seed, UpTo(min(left, ws.length)), true)
			})
		}
	})
	count := <-total
	t.Logf("%d steps in %v\n%s", all, time.Since(start).Round(time.Millisecond), Tally(count))
	for _, name := range mustSee {
		if count[name] == 0 && all >= enough && !t.Failed() {
			t.Errorf("in %d steps there was not one %q", all, name)
		}
	}
}

// take takes one walk to its end, or to where it stops.
func (ws *Walks) take(t *testing.T, seed uint64, steps []int, take func(*testing.T, *Walk)) (w *Walk) {
	w = NewWalk(seed, steps)
	defer func() {
		if x := recover(); x != nil && x != any(w) {
			panic(x)
		}
	}()
	take(t, w)
	return w
}

// shrink looks for fewer steps that fail, too, for a minute.
func (ws *Walks) shrink(t *testing.T, w *Walk, take func(*testing.T, *Walk)) *Walk {
	deadline := time.Now().Add(time.Minute)
	fails := func(steps []int) bool {
		fewer := ws.take(t, w.Seed, steps, take)
		if fewer.Failure != "" {
			w = fewer
		}
		return fewer.Failure != ""
	}
	if at := slices.Index(w.Steps, w.Step); at >= 0 {
		fails(w.Steps[:at+1])
	}
	for size := len(w.Steps) / 2; size > 0; {
		smaller := false
		for from := 0; from < len(w.Steps); {
			if time.Now().After(deadline) {
				return w
			}
			if fails(slices.Concat(w.Steps[:from], w.Steps[min(from+size, len(w.Steps)):])) {
				smaller = true
			} else {
				from += size
			}
		}
		if !smaller || size > 1 {
			size /= 2
		}
	}
	return w
}

// flags are those that lead to the same failure.
func (ws *Walks) flags(w *Walk) string {
	out := fmt.Sprintf("-run '%s$' -%s.seed %d", ws.test, ws.name, w.Seed)
	if n := len(w.Steps); slices.Equal(w.Steps, UpTo(n)) {
		return out + fmt.Sprintf(" -%s.steps %d", ws.name, n)
	}
	only := strings.Trim(strings.ReplaceAll(fmt.Sprint(w.Steps), " ", ","), "[]")
	return out + fmt.Sprintf(" -%s.only %s", ws.name, only)
}

// chosen gives the steps that the flags choose.
func (ws *Walks) chosen() (steps []int) {
	if *ws.only == "" {
		return UpTo(cmp.Or(*ws.steps, ws.length))
	}
	for word := range strings.SplitSeq(*ws.only, ",") {
		if step, err := strconv.Atoi(word); err == nil {
			steps = append(steps, step)
		}
	}
	return steps
}

// UpTo returns the first steps of a walk.
func UpTo(n int) []int {
	steps := make([]int, n)
	for i := range steps {
		steps[i] = i
	}
	return steps
}
