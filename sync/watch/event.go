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

	"github.com/verdict-proxy/verdict/internal/system/clip"
	"github.com/verdict-proxy/verdict/internal/system/clock"
	"github.com/verdict-proxy/verdict/sync/snapshot"
)

// Event is a Kubernetes event about an object, as in "kubectl get events".
type Event struct {
	// Warning makes the event a warning; else it is normal.
	Warning bool
	// Reason and Action are single words, Note is a sentence.
	Reason, Action, Note string
	// Service is the object of the event; the zero value stands for this Node.
	Service snapshot.Name
}

// Events sends Events to the Kubernetes API. Nothing depends on it: it drops events that cannot be sent within some
// minutes, and repetitions of recent ones.
type Events struct {
	// Config says how to reach the server, as in Kubernetes.
	Config *rest.Config
	// NodeName is the name of this Node.
	NodeName string
	// Report gets, once, the error of the first event that the server does not accept; nil drops it.
	Report func(error)

	queue chan Event

	// mu guards emitted, which counts the events of each namespace since the time since.
	mu      sync.Mutex
	emitted map[string]int
	since   time.Time
}

// NewEvents returns an Events that queues what is emitted until Run is called.
func NewEvents(config *rest.Config, nodeName string, report func(error)) *Events {
	return &Events{Config: config, NodeName: nodeName, Report: report, queue: make(chan Event, 64)}
}

// reporter is the controller name of the events. Rules of monitoring systems match on kube-proxy's.
const reporter = "kube-proxy"

const (
	// eventInterval is the shortest time after which the same event is sent again.
	eventInterval = 10 * time.Minute
	// eventsPerNamespace is how many events a namespace gets within eventInterval, so that one namespace does not crowd
	// out others.
	eventsPerNamespace = 20
	// maxEventAttempts is how often an event is sent. eventRetryDelay is the first delay between attempts; it doubles each
	// time.
	maxEventAttempts = 6
	eventRetryDelay  = 2 * time.Second
	// maxNote is how long a note may be: the API server takes 1024 bytes.
	maxNote = 1000
)

// Emit queues an event. It never waits. It is safe for concurrent use, also on nil, which drops everything.
func (e *Events) Emit(event Event) {
	if e == nil || !e.allow(event.Service.Namespace, time.Now()) {
		return
	}
	select {
	case e.queue <- event:
	default: // the queue is full: drop it
	}
}

// allow says whether a namespace may have one more event now. Events about the Node itself are always allowed.
func (e *Events) allow(namespace string, now time.Time) bool {
	if namespace == "" {
		return true
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.emitted == nil || now.Sub(e.since) >= eventInterval {
		e.emitted, e.since = map[string]int{}, now
	}
	e.emitted[namespace]++
	return e.emitted[namespace] <= eventsPerNamespace
}

// Run sends events until ctx is done. It fails if Config is invalid.
func (e *Events) Run(ctx context.Context) error {
	client, err := (&Kubernetes{Config: e.Config}).client(eventsv1.SchemeGroupVersion)
	if err != nil {
		return fmt.Errorf("events: %w", err)
	}
	sent := map[Event]time.Time{}
	reported := false
	for {
		select {
		case <-ctx.Done():
			return nil
		case event := <-e.queue:
			now := time.Now()
			if now.Sub(sent[event]) < eventInterval {
				continue
			}
			if len(sent) > 1000 {
				clear(sent)
			}
			sent[event] = now
			if err := e.send(ctx, client, event, now); err != nil && ctx.Err() == nil && !reported && e.Report != nil {
				reported = true
				e.Report(fmt.Errorf("event %s: %w; events that cannot be sent are left out", event.Reason, err))
			}
		}
	}
}

// send sends one event, with retries. It does not retry what the server rejects.
func (e *Events) send(ctx context.Context, client *rest.RESTClient, event Event, at time.Time) error {
	o := e.object(event, at)
	body, err := json.Marshal(o)
	if err != nil {
		return err
	}
	wait := eventRetryDelay
	for attempt := 1; ; attempt++ {
		err := client.Post().Namespace(o.Namespace).Resource("events").SetHeader("Content-Type",
			"application/json").Body(body).Do(ctx).Error()
		if err == nil || apierrors.IsAlreadyExists(err) {
			return nil
		}
		if attempt == maxEventAttempts || apierrors.IsForbidden(err) || apierrors.IsInvalid(err) ||
			apierrors.IsBadRequest(err) || apierrors.IsNotFound(err) {
			return err
		}
		if clock.Pause(ctx, wait); ctx.Err() != nil {
			return ctx.Err()
		}
		wait *= 2
	}
}

// object converts an event to the API's type. A Node is in no namespace, so events about it are in the default one.
func (e *Events) object(event Event, at time.Time) *eventsv1.Event {
	o := &eventsv1.Event{
		TypeMeta:            metav1.TypeMeta{APIVersion: eventsv1.SchemeGroupVersion.String(), Kind: "Event"},
		EventTime:           metav1.NewMicroTime(at),
		ReportingController: reporter,
		ReportingInstance:   clip.Cut("verdict-"+e.NodeName, 120),
		Reason:              event.Reason,
		Action:              event.Action,
		Note:                clip.Cut(event.Note, maxNote),
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
