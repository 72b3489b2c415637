package testbed

import (
	"maps"
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/verdict-proxy/verdict/internal/lab/blackbox"
)

// A cause is expected from the harm on, and printed before; what nobody can explain is always printed. What fails after
// the scenario is no part of it. Without a recorder, nothing happens.
func TestFailures(t *testing.T) {
	tb := &Testbed{}
	if none := tb.Failures("no way out"); none != nil {
		t.Fatal("failures are explained without a recorder")
	}
	var none *Failures
	none.Harm()
	none.Add(blackbox.Failure{})
	if causes, lines := none.Causes(); causes != nil || lines != nil {
		t.Errorf("without a recorder: %v, %q", causes, lines)
	}
	tb.Box = blackbox.New(blackbox.Config{})
	defer tb.Box.Close()
	f := tb.Failures("no way out")
	fail := func(err string) {
		f.Add(blackbox.Failure{From: "pod", Client: netip.MustParseAddrPort("10.244.1.9:40000"),
			Server: netip.MustParseAddrPort("10.96.0.10:80"), Began: time.Now(), Failed: time.Now(), Err: err})
	}
	fail("network is unreachable")
	f.Harm()
	fail("network is unreachable")
	fail("network is unreachable")
	fail("timed out")
	causes, lines := f.Causes()
	fail("too late")
	if want := map[string]int{"no way out": 3, blackbox.Unexplained: 1}; !maps.Equal(causes, want) {
		t.Errorf("causes %v; want %v", causes, want)
	}
	text := strings.Join(lines, "\n")
	for _, want := range []string{"1 unexpected: no way out\npod 10.244.1.9:40000", "1 unexpected: unexplained\npod"} {
		if !strings.Contains(text, want) {
			t.Errorf("%q is missing in\n%s", want, text)
		}
	}
	f = tb.Failures(blackbox.Unexplained)
	f.Harm()
	fail("timed out")
	if causes, lines = f.Causes(); !maps.Equal(causes, map[string]int{expectedUnseen: 1}) || lines != nil {
		t.Errorf("where nothing can be seen: %v, %q", causes, lines)
	}
	if again, _ := f.Causes(); !maps.Equal(again, causes) {
		t.Errorf("afterwards %v; before %v", again, causes)
	}
}
