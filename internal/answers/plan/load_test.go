package plan

import (
	"slices"
	"strings"
	"testing"

	"github.com/verdict-proxy/verdict/internal/proxy/status"
)

// TestQuarantined: a plan says which of its Services the kernel rejects, and keeps the reason short.
func TestQuarantined(t *testing.T) {
	p := &Plan{Services: []*Service{{Name: "shop/cart"}, {Name: "shop/web"}}}
	q := status.Quarantined{Count: 5, Services: []status.QuarantinedService{
		{Service: "other/cart", Error: "no"}, {Service: "shop/web", Error: "too many elements" + strings.Repeat("!", 1000)},
	}}
	got := p.quarantined(q)
	if len(got) != 2 || !strings.HasPrefix(got[0], "shop/web is quarantined") || len(got[0]) > 400 ||
		!strings.Contains(got[0], "too many elements") || !strings.HasPrefix(got[1], "3 more Services") {
		t.Errorf("%q", got)
	}
	for _, q := range []status.Quarantined{{}, {Count: 1, Services: q.Services[:1]}} {
		if got := p.quarantined(q); len(got) > 0 {
			t.Errorf("%+v: %q", q, got)
		}
	}
	if got := (&Plan{}).quarantined(q); !slices.Equal(got, nil) {
		t.Errorf("nothing changes: %q", got)
	}
}
