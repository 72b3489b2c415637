package node

import (
	"encoding/json"
	"io"
	"net/http"
	"net/http/httptest"
	"slices"
	"sync"
	"testing"
	"time"

	"k8s.io/client-go/rest"

	"github.com/verdict-proxy/verdict/internal/system/testkit"
	"github.com/verdict-proxy/verdict/sync/dataplane"
	"github.com/verdict-proxy/verdict/sync/reconcile"
	"github.com/verdict-proxy/verdict/sync/snapshot"
	"github.com/verdict-proxy/verdict/sync/watch"
)

// TestClientAddressNotKept: a Service gets one event for each reason why its clients are masqueraded, and none while
// they keep their addresses, or while there is nothing to keep.
func TestClientAddressNotKept(t *testing.T) {
	var mu sync.Mutex
	var notes []string
	server := httptest.NewServer(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
		var e struct{ Reason, Note string }
		body, _ := io.ReadAll(r.Body)
		if err := json.Unmarshal(body, &e); err != nil {
			t.Error(err)
		}
		mu.Lock()
		defer mu.Unlock()
		notes = append(notes, e.Reason+": "+e.Note)
	}))
	defer server.Close()
	e := clusterEvents{watch.NewEvents(&rest.Config{Host: server.URL}, "a", func(err error) { t.Error(err) })}
	var running sync.WaitGroup
	t.Cleanup(running.Wait)
	running.Go(func() { _ = e.Run(t.Context()) })
	is := func(why ...dataplane.NotKept) *dataplane.Service {
		svc := &dataplane.Service{Name: snapshot.Name{Namespace: "shop", Name: "web"}}
		for _, w := range why {
			svc.Ports = append(svc.Ports, &dataplane.ServicePort{NotKept: w})
		}
		return svc
	}
	last := (*dataplane.Service)(nil)
	for _, next := range []*dataplane.Service{
		is(dataplane.NotKeptNowhere), is(dataplane.KeptOrNotAsked, dataplane.NotKeptOffLink),
		is(dataplane.NotKeptOffLink, dataplane.NotKeptOffLink), is(dataplane.NotKeptFailed), is(dataplane.KeptOrNotAsked),
		is(dataplane.NotKeptOff), nil,
	} {
		e.listener().Committed(reconcile.Commit{Before: []*dataplane.Service{last}, After: []*dataplane.Service{next}})
		last = next
	}
	want := []string{
		"ClientAddressNotKept: node a masquerades clients from outside: " + dataplane.NotKeptOffLink.Text(),
		"ClientAddressNotKept: node a masquerades clients from outside: " + dataplane.NotKeptFailed.Text(),
	}
	got := func() []string {
		mu.Lock()
		defer mu.Unlock()
		return slices.Clone(notes)
	}
	testkit.Eventually(t, time.Minute, "both events", func() bool { return len(got()) >= 2 })
	if !slices.Equal(got(), want) {
		t.Errorf("%q", got())
	}
}
