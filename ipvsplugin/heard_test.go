package ipvsplugin

import (
	"testing"
	"time"

	"github.com/verdict-proxy/verdict/internal/lab/labtest"
	"github.com/verdict-proxy/verdict/sync/dataplane"
)

// TestIPVSHeard: while one Apply writes many virtual services, and while a new process reads them, it says again and
// again that the kernel answers. Without IPVS it says nothing.
func TestIPVSHeard(t *testing.T) {
	w := newWorld(t, 1, 0, dataplane.IPVSAuto)
	w.apply(w.delta(app{number: 1, here: ready(0)}))
	if at := w.backend.Heard(); !at.IsZero() {
		t.Errorf("before IPVS is in use it heard from it at %v", at)
	}
	const services = 40 // with 6 virtual services each
	d := w.delta(app{number: 2, scheduling: scheduler("rr"), here: ready(0)})
	for n := range services - 1 {
		d.Merge(w.delta(app{number: 3 + n, scheduling: scheduler("rr"), here: ready(0)}))
	}
	count := func(what string, apply func()) {
		answers := 0
		for _, s := range []*socket{w.backend.ipvs.socket, w.backend.net.socket, w.backend.guard.socket} {
			hear := s.heard
			s.heard = func() { answers++; hear() }
		}
		began := time.Now()
		apply()
		if answers < 6*services || w.backend.Heard().Before(began) {
			t.Errorf("%s: it heard %d answers, the last at %v", what, answers, w.backend.Heard())
		}
	}
	count("it writes", func() { w.apply(d) })
	w.close()
	w.open()
	count("a new process reads", func() {
		_, err := w.try(d)
		labtest.Check(t, err)
	})
}
