package watch

import (
	"context"
	"encoding/json"
	"fmt"
	"sync"
	"time"

	eventsv1 "k8s.io/api/events/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/rest"

	"github.com/verdict-proxy/verdict/sync/snapshot"
)

// Event is something that the cluster's operators should see at an object, with "kubectl get events".
type Event struct {
	// Warning makes it one; else it is normal.
	Warning bool
	// Reason and Action are single words, Note is a sentence.
	Reason, Action, Note string
	// Service is what it is about; zero stands for this Node.
	Service snapshot.Name
}

// Events sends Events to the Kubernetes API. It is not what anything depends on: what cannot be sent within some
// minutes is dropped, and so is what was sent already a short while ago.
type Events struct {
	// Config is the server, as in Kubernetes.
	Config *rest.Config
	// NodeName is the name of this Node.
	NodeName string
	// Report is told, once, that the server does not take an event; nil drops that.
	Report func(error)

	queue chan Event

	// mu guards emitted, which counts the events of each namespace since the time since.
	mu      sync.Mutex
	emitted map[string]int
	since   time.Time
}

// NewEvents gives an Events that keeps what is emitted until Run is called.
func NewEvents(config *rest.Config, nodeName string, report func(error)) *Events {
	return &Events{Config: config, NodeName: nodeName, Report: report, queue: make(chan Event, 64)}
}

// reporter is the name of the controller that events come from. Rules of monitoring systems match on kube-proxy's.
const reporter = "kube-proxy"

const (
	// eventEvery is how soon the same event is sent again.
	eventEvery = 10 * time.Minute
	// eventsEach is how many events a namespace gets within eventEvery, so that what happens in one keeps no others back.
	eventsEach = 20
	// eventTries and eventWait are how often an event is tried and how long is waited at first, and twice as long each
	// time.
	eventTries = 6
	eventWait  = 2 * time.Second
	// maxNote is how long a note may be: the API server takes 1024 bytes.
	maxNote = 1000
)

// Emit has an event sent. It never waits; safe for concurrent use, also on nil, which has nobody to send to.
func (e *Events) Emit(event Event) {
	if e == nil || !e.admit(event.Service.Namespace, time.Now()) {
		return
	}
	select {
	case e.queue <- event:
	default: // there are too many to be read
	}
}

// admit says whether a namespace may have one more event now. What is about the Node itself always goes.
func (e *Events) admit(namespace string, now time.Time) bool {
	if namespace == "" {
		return true
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.emitted == nil || now.Sub(e.since) >= eventEvery {
		e.emitted, e.since = map[string]int{}, now
	}
	e.emitted[namespace]++
	return e.emitted[namespace] <= eventsEach
}

// Run sends events until ctx is done. It fails if Config makes no sense.
func (e *Events) Run(ctx context.Context) error {
	client, err := (&Kubernetes{Config: e.Config}).client(eventsv1.SchemeGroupVersion)
	if err != nil {
		return fmt.Errorf("events: %w", err)
	}
	sent := map[Event]time.Time{}
	told := false
	for {
		select {
		case <-ctx.Done():
			return nil
		case event := <-e.queue:
			now := time.Now()
			if now.Sub(sent[event]) < eventEvery {
				continue
			}
			if len(sent) > 1000 {
				clear(sent)
			}
			sent[event] = now
			if err := e.send(ctx, client, event, now); err != nil && ctx.Err() == nil && !told && e.Report != nil {
				told = true
				e.Report(fmt.Errorf("event %s: %w; events that cannot be sent are left out", event.Reason, err))
			}
		}
	}
}

// send tries to send one event. What the server refuses is not tried again.
func (e *Events) send(ctx context.Context, client *rest.RESTClient, event Event, at time.Time) error {
	o := e.object(event, at)
	body, err := json.Marshal(o)
	if err != nil {
		return err
	}
	wait := eventWait
	for try := 1; ; try++ {
		err := client.Post().Namespace(o.Namespace).Resource("events").SetHeader("Content-Type", "application/json").Body(body).Do(ctx).Error()
		if err == nil || apierrors.IsAlreadyExists(err) {
			return nil
		}
		if try == eventTries || apierrors.IsForbidden(err) || apierrors.IsInvalid(err) || apierrors.IsBadRequest(err) || apierrors.IsNotFound(err) {
			return err
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(wait):
			wait *= 2
		}
	}
}

// object gives an event as the API has it. Those about a Node, which is in no namespace, are in the default one.
func (e *Events) object(event Event, at time.Time) *eventsv1.Event {
	o := &eventsv1.Event{
		TypeMeta:            metav1.TypeMeta{APIVersion: eventsv1.SchemeGroupVersion.String(), Kind: "Event"},
		EventTime:           metav1.NewMicroTime(at),
		ReportingController: reporter,
		ReportingInstance:   cut("verdict-"+e.NodeName, 120),
		Reason:              event.Reason,
		Action:              event.Action,
		Note:                cut(event.Note, maxNote),
		Type:                "Normal",
	}
	o.Namespace = metav1.NamespaceDefault
	o.Regarding.APIVersion, o.Regarding.Kind, o.Regarding.Name = "v1", "Node", e.NodeName
	if event.Service != (snapshot.Name{}) {
		o.Namespace = event.Service.Namespace
		o.Regarding.Kind, o.Regarding.Namespace, o.Regarding.Name = "Service", event.Service.Namespace, event.Service.Name
	}
	if event.Warning {
		o.Type = "Warning"
	}
	o.Name = fmt.Sprintf("%s.%x", o.Regarding.Name, at.UnixNano())
	return o
}
