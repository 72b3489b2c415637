package watch

import (
	"context"
	"encoding/json"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"testing"
	"time"

	eventsv1 "k8s.io/api/events/v1"
	"k8s.io/client-go/rest"

	"github.com/verdict-proxy/verdict/sync/snapshot"
)

// TestEvents: an event goes to the API as kube-proxy's do, once; one that is refused is told of once.
func TestEvents(t *testing.T) {
	type got struct {
		path  string
		event eventsv1.Event
	}
	received := make(chan got, 10)
	refuse := false
	var mu sync.Mutex
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		mu.Lock()
		defer mu.Unlock()
		body, _ := io.ReadAll(r.Body)
		g := got{path: r.Method + " " + r.URL.Path}
		if err := json.Unmarshal(body, &g.event); err != nil {
			t.Errorf("%v: %s", err, body)
		}
		received <- g
		if refuse {
			w.WriteHeader(http.StatusForbidden)
		} else {
			w.WriteHeader(http.StatusCreated)
		}
		w.Header().Set("Content-Type", "application/json")
	}))
	defer server.Close()
	reports := make(chan error, 10)
	e := NewEvents(&rest.Config{Host: server.URL}, "node-1", func(err error) { reports <- err })
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error)
	go func() { done <- e.Run(ctx) }()

	start := Event{Reason: "Starting", Action: "StartKubeProxy"}
	e.Emit(start)
	e.Emit(start) // the same
	service := Event{Warning: true, Reason: "FailedToStartServiceHealthcheck", Action: "Listen",
		Note:    strings.Repeat("x", 3000),
		Service: snapshot.Name{Namespace: "shop", Name: "web"}}
	e.Emit(service)
	g := <-received
	if o := g.event; g.path != "POST /apis/events.k8s.io/v1/namespaces/default/events" || o.Regarding.Kind != "Node" ||
		o.Regarding.Name != "node-1" || o.Reason != "Starting" || o.Action != "StartKubeProxy" || o.Type != "Normal" ||
		o.ReportingController != "kube-proxy" || o.ReportingInstance != "verdict-node-1" || o.EventTime.IsZero() ||
		!strings.HasPrefix(o.Name, "node-1.") {
		t.Errorf("%s %+v", g.path, o)
	}
	g = <-received
	if o := g.event; g.path != "POST /apis/events.k8s.io/v1/namespaces/shop/events" || o.Regarding.Kind != "Service" ||
		o.Regarding.Namespace != "shop" || o.Type != "Warning" || len(o.Note) > 1024 {
		t.Errorf("%s %+v", g.path, o)
	}
	mu.Lock()
	refuse = true
	mu.Unlock()
	for _, note := range []string{"a", "b"} {
		e.Emit(Event{Reason: "Refused", Action: "Try", Note: note})
		<-received
	}
	select {
	case err := <-reports:
		if !strings.HasPrefix(err.Error(), "event Refused: ") {
			t.Error(err)
		}
	case <-time.After(time.Minute):
		t.Error("it is not told that events are refused")
	}
	cancel()
	if err := <-done; err != nil || len(reports) > 0 || len(received) > 0 {
		t.Errorf("%v; %d reports, %d events too many", err, len(reports), len(received))
	}
	(*Events)(nil).Emit(start)
}

// TestEventsOfOneNamespaceKeepNoOthersBack: whoever has an event for each of his edits still leaves room for others.
func TestEventsOfOneNamespaceKeepNoOthersBack(t *testing.T) {
	e := NewEvents(&rest.Config{}, "node-1", nil)
	for i := range 1000 {
		e.Emit(Event{Reason: "AddressConflict", Note: strings.Repeat("x", i),
			Service: snapshot.Name{Namespace: "evil", Name: "web"}})
	}
	e.Emit(Event{Reason: "AddressConflict", Service: snapshot.Name{Namespace: "shop", Name: "web"}})
	e.Emit(Event{Reason: "Starting"})
	of := map[string]int{}
	for len(e.queue) > 0 {
		of[(<-e.queue).Service.Namespace]++
	}
	if of["evil"] != eventsPerNamespace || of["shop"] != 1 || of[""] != 1 {
		t.Errorf("events by namespace: %v", of)
	}
	if e.allow("evil", time.Now()) || !e.allow("evil", time.Now().Add(eventInterval)) {
		t.Error("a namespace gets events again after some time, and not before")
	}
}
