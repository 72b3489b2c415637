package gateway

import (
	"context"
	"errors"
	"log/slog"
	"slices"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/util/flowcontrol"
)

// TestWriter: namespaces take turns; what is being written is not taken again; what failed waits, unless it follows
// from something else now; and what is not asked for any more is forgotten.
func TestWriter(t *testing.T) {
	w := newWriter(flowcontrol.NewFakeAlwaysRateLimiter(), slog.New(slog.DiscardHandler), func(ref, error) {})
	ask := func(basis string, names ...string) time.Duration {
		var jobs []job
		for _, n := range names {
			jobs = append(jobs, job{ref{resource: services, name: types.NamespacedName{Namespace: n[:1], Name: n}}, basis, nil})
		}
		return w.replace(jobs)
	}
	take := func() (taken []job) {
		for len(w.queue) > 0 {
			j, _ := w.take(t.Context())
			taken = append(taken, j)
		}
		return taken
	}
	names := func(jobs []job) (names []string) {
		for _, j := range jobs {
			names = append(names, j.name.Name)
		}
		return names
	}
	ask("1", "a1", "a2", "a3", "b1")
	jobs := take()
	if got := names(jobs); !slices.Equal(got, []string{"a1", "b1", "a2", "a3"}) {
		t.Errorf("the order is %q", got)
	}
	if wait := ask("2", "a1", "b1", "b2"); wait != 0 || !slices.Equal(names(take()), []string{"b2"}) {
		t.Errorf("while others are written, it waits %v", wait)
	}
	w.finish(t.Context(), jobs[0], errors.New("no"))
	w.finish(t.Context(), jobs[1], nil)
	if wait := ask("1", "a1", "b1"); wait <= 0 || wait > firstRetry || !slices.Equal(names(take()), []string{"b1"}) {
		t.Errorf("after a failure, it waits %v", wait)
	}
	if wait := ask("2", "a1"); wait != 0 || !slices.Equal(names(take()), []string{"a1"}) {
		t.Errorf("after a failure of something else, it waits %v", wait)
	}
	w.finish(t.Context(), jobs[0], errors.New("no"))
	if ask("2"); w.failureOf(jobs[0].ref) != nil {
		t.Error("a failure is remembered of what nobody asks for")
	}
	ended, end := context.WithCancel(t.Context())
	end()
	w.finish(ended, jobs[2], ended.Err())
	if w.failureOf(jobs[2].ref) != nil {
		t.Error("the end of the process is a failure")
	}
}

// TestStore: an event that is older than what a write returned changes nothing, unless the object is another one of
// that name, and neither does what a write returned after later events: the object may be gone. Only news makes the
// world dirty.
func TestStore(t *testing.T) {
	w := newWorld(nil, nil)
	service := func(uid, version, ip string) *corev1.Service {
		yes := true
		return &corev1.Service{ObjectMeta: metav1.ObjectMeta{Namespace: "edge", Name: "db", UID: types.UID(uid),
			ResourceVersion: version, OwnerReferences: []metav1.OwnerReference{{Kind: "Gateway", Controller: &yes}}},
			Spec: corev1.ServiceSpec{ClusterIP: ip}}
	}
	name := types.NamespacedName{Namespace: "edge", Name: "db"}
	wrote := func(o any) error { return w.services.wrote(o.(*corev1.Service)) }
	for i, step := range []struct {
		do    func(any) error
		o     *corev1.Service
		ip    string
		dirty bool
	}{
		{w.services.Add, service("a", "9", "1"), "1", true},
		{w.services.Update, service("a", "10", "2"), "2", true},
		{w.services.Update, service("a", "9", "1"), "2", false},
		{w.services.Update, service("a", "10", "2"), "2", false},
		{w.services.Add, service("b", "8", "3"), "3", true},
		{w.services.Delete, service("a", "12", "2"), "3", false},
		{w.services.Delete, service("b", "12", "3"), "", true},
		{wrote, service("b", "11", "3"), "", false},
		{wrote, service("c", "13", "4"), "4", true},
		{w.services.Add, service("c", "13", "4"), "4", false},
		{w.services.Delete, service("c", "15", "4"), "", true},
		{wrote, service("c", "14", "5"), "", false},
	} {
		if err := step.do(step.o); err != nil {
			t.Fatal(err)
		}
		ip := ""
		if s := w.services.known[name]; s != nil {
			ip = s.Spec.ClusterIP
		}
		dirty := false
		select {
		case <-w.dirty:
			dirty = true
		default:
		}
		if ip != step.ip || dirty != step.dirty {
			t.Errorf("step %d: the address is %q, dirty %v", i, ip, dirty)
		}
	}
}
