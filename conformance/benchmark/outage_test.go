package benchmark

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/verdict-proxy/verdict/conformance/benchmark/results"
	"github.com/verdict-proxy/verdict/internal/lab/blackbox"
)

func TestReason(t *testing.T) {
	for want, err := range map[string]error{
		"":            nil,
		"refused":     fmt.Errorf("dial: %w", os.NewSyscallError("connect", unix.ECONNREFUSED)),
		"unreachable": unix.EHOSTUNREACH,
		"reset":       fmt.Errorf("read: %w", io.EOF),
		"timed out":   fmt.Errorf("dial: %w", context.DeadlineExceeded),
		"other":       errors.New("other"),
	} {
		if got := reason(err); got != want {
			t.Errorf("%v is %q, not %q", err, got, want)
		}
	}
	if got := reason(os.ErrDeadlineExceeded); got != "timed out" {
		t.Errorf("a read that took too long is %q", got)
	}
}

// All attempts are counted, and times are those of attempts after the harm.
func TestJudge(t *testing.T) {
	ms := time.Millisecond
	c := &outageClients{attempts: []attempt{
		{100 * ms, 900 * ms, ""}, {200 * ms, 5 * ms, "refused"}, {1100 * ms, 2 * ms, ""}, {1200 * ms, 3 * ms, ""},
		{1600 * ms, 4000 * ms, "timed out"},
	}}
	var cell results.Outage
	c.judge(&cell, time.Second)
	if cell.Opened != 3 || cell.Failed != 2 || cell.Reasons["refused"] != 1 || cell.Reasons["timed out"] != 1 {
		t.Errorf("%+v", cell)
	}
	if cell.P50 != 3 || cell.P99 != 4000 || cell.Longest != 4000 {
		t.Errorf("times are %v, %v, %v", cell.P50, cell.P99, cell.Longest)
	}
	want := []results.OutagePoint{
		{At: 0, Longest: 900, Failed: 1}, {At: 0.5}, {At: 1, Longest: 3}, {At: 1.5, Longest: 4000, Failed: 1},
	}
	if !slices.Equal(cell.Timeline, want) {
		t.Errorf("the timeline is %+v", cell.Timeline)
	}
}

// Namespaces are named after scenarios, and a picture shows one of them.
func TestScenarioNames(t *testing.T) {
	names := OutageScenarios()
	if slices.Sort(names); len(slices.Compact(slices.Clone(names))) != len(names) {
		t.Errorf("a name is there twice: %v", names)
	}
	if !slices.Contains(names, "one-blackholed") {
		t.Error("the scenario of the picture is missing")
	}
	for _, s := range scenarios {
		if s.prepare == nil || s.run == nil {
			t.Errorf("%s does nothing", s.name)
		}
		for _, cause := range s.expects {
			if !slices.Contains(blackbox.Causes(), cause) && cause != blackbox.Unexplained {
				t.Errorf("%s expects %q, which no failure has", s.name, cause)
			}
		}
	}
}
