package status

import (
	"reflect"
	"strings"
	"testing"
	"time"

	"github.com/verdict-proxy/verdict/internal/system/testkit"
)

// TestUnsynced: whatever keeps a node from being synced is said, the worst first.
func TestUnsynced(t *testing.T) {
	s := Status{First: new(time.Time), Services: 3}
	for _, step := range []struct {
		with func()
		want string
	}{
		{func() {}, ""},
		{func() { s.Pending = Pending{EndpointSlices: 2, LagSeconds: 1} }, "0 changes of Services and 2 of EndpointSlices"},
		{func() { s.Quarantined = Quarantined{2, []QuarantinedService{{Service: "shop/cart", Error: "no room"}}} },
			"the kernel rejects Service shop/cart: no room, and 1 more"},
		{func() { s.Unread = []Unread{{File: "a.yaml", Error: "too large"}} }, "a.yaml cannot be read: too large"},
		{func() { s.Failing = &Failing{Error: "no memory"} }, "transactions fail: no memory"},
		{func() { s.First = nil }, "not all Services are programmed yet"},
	} {
		step.with()
		if got := s.Unsynced(); !strings.HasPrefix(got, step.want) || (got == "") != (step.want == "") {
			t.Errorf("%q; want %q", got, step.want)
		}
	}
}

// TestSteady: of a status, only what changes as time passes is left out.
func TestSteady(t *testing.T) {
	testkit.Compares(t, func(a, b *Status) bool { return reflect.DeepEqual(a.Steady(), b.Steady()) },
		"Time", "Pending.LagSeconds", "Drift.Checked")
}
