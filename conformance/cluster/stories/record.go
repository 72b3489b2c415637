package stories

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/cache"
)

// record writes down what Nodes, EndpointSlices and pods become, with the times at which a watch told it, from the
// beginning of a run to its end. It keeps containers' logs, which the kubelet removes with their pods.
type record struct {
	dir  string
	stop context.CancelFunc
	wait sync.WaitGroup

	mu   sync.Mutex
	file *os.File
	errs []error
	last map[string]string // what was written of an object last
	echo readiness
	logs map[string]bool // files that are kept already
}

// readiness is how many endpoints of the servers' Service are ready, and when none was.
type readiness struct {
	ready map[string]int // by slice
	none  []span
}

// span is a time; its end is zero as long as it lasts.
type span struct{ from, to time.Time }

// has says whether a time is within the span, or so shortly after that proxies need not know yet.
func (s span) has(t time.Time) bool {
	return !t.Before(s.from) && (s.to.IsZero() || t.Before(s.to.Add(settle)))
}

// set takes over how many of a slice are ready at a time; -1 if there is no such slice any more.
func (r *readiness) set(slice string, ready int, at time.Time) {
	if r.ready == nil {
		r.ready = map[string]int{}
	}
	if r.ready[slice] = ready; ready < 0 {
		delete(r.ready, slice)
	}
	most := 0
	for _, n := range r.ready {
		most = max(most, n)
	}
	open := len(r.none) > 0 && r.none[len(r.none)-1].to.IsZero()
	switch {
	case most == 0 && !open:
		r.none = append(r.none, span{from: at})
	case most > 0 && open:
		r.none[len(r.none)-1].to = at
	}
}

// startRecord begins in a directory, which it makes. pods are where the nodes' logs of containers are.
func startRecord(client kubernetes.Interface, dir string, pods []string) (*record, error) {
	if err := os.MkdirAll(filepath.Join(dir, "pods"), 0o755); err != nil {
		return nil, err
	}
	file, err := os.OpenFile(filepath.Join(dir, "cluster.log"), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o644)
	if err != nil {
		return nil, err
	}
	ctx, stop := context.WithCancel(context.Background())
	r := &record{dir: dir, stop: stop, file: file, last: map[string]string{}, logs: map[string]bool{}}
	factory := informers.NewSharedInformerFactory(client, 0)
	for _, informer := range []cache.SharedIndexInformer{factory.Core().V1().Nodes().Informer(),
		factory.Core().V1().Pods().Informer(), factory.Discovery().V1().EndpointSlices().Informer()} {
		_, e := informer.AddEventHandler(cache.ResourceEventHandlerFuncs{
			AddFunc: func(o any) { r.see(o, false) }, UpdateFunc: func(_, o any) { r.see(o, false) },
			DeleteFunc: func(o any) { r.see(o, true) }})
		err = errors.Join(err, e)
	}
	factory.StartWithContext(ctx)
	factory.WaitForCacheSync(ctx.Done())
	r.wait.Go(func() { r.keepLogs(ctx, pods) })
	return r, err
}

// close ends the record. It returns what could not be written.
func (r *record) close() error {
	r.stop()
	r.wait.Wait()
	r.mu.Lock()
	defer r.mu.Unlock()
	return errors.Join(append(r.errs, r.file.Close())...)
}

// see writes an object if what is told of it has changed.
func (r *record) see(o any, gone bool) {
	if unknown, is := o.(cache.DeletedFinalStateUnknown); is {
		o = unknown.Obj
	}
	name, text := describe(o)
	at := time.Now()
	if gone {
		text = "gone"
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	s, is := o.(*discoveryv1.EndpointSlice)
	if is && s.Namespace == "default" && s.Labels[discoveryv1.LabelServiceName] == "echo" {
		ready := readyOf(s)
		if gone {
			ready = -1
		}
		r.echo.set(s.Name, ready, at)
	}
	if r.last[name] != text {
		r.last[name] = text
		r.write(at, name+": "+text)
	}
}

// note writes a line of ours.
func (r *record) note(format string, args ...any) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.write(time.Now(), fmt.Sprintf(format, args...))
}

// write writes a line. The lock is held.
func (r *record) write(at time.Time, text string) {
	if _, err := fmt.Fprintf(r.file, "%s %s\n", at.Format("15:04:05.000"), text); err != nil {
		r.errs = append(r.errs, err)
	}
}

// withoutEndpoints says when the servers' Service had no ready endpoint, from a time on.
func (r *record) withoutEndpoints(since time.Time) (all []span) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, s := range r.echo.none {
		if s.to.IsZero() || s.to.After(since) {
			all = append(all, s)
		}
	}
	return all
}

func readyOf(s *discoveryv1.EndpointSlice) (ready int) {
	for _, e := range s.Endpoints {
		if e.Conditions.Ready != nil && *e.Conditions.Ready {
			ready++
		}
	}
	return ready
}

// describe names an object and tells what matters of it here.
func describe(o any) (name, text string) {
	var words []string
	switch o := o.(type) {
	case *corev1.Node:
		name = "node " + o.Name
		for _, c := range o.Status.Conditions {
			words = append(words, fmt.Sprintf("%s=%s", c.Type, c.Status))
		}
		for _, t := range o.Spec.Taints {
			words = append(words, fmt.Sprintf("taint %s:%s", t.Key, t.Effect))
		}
	case *discoveryv1.EndpointSlice:
		name = fmt.Sprintf("slice %s/%s", o.Namespace, o.Name)
		for _, e := range o.Endpoints {
			words = append(words, e.Addresses[0]+conditions(&e))
		}
	case *corev1.Pod:
		name = fmt.Sprintf("pod %s/%s", o.Namespace, o.Name)
		words = []string{string(o.Status.Phase), o.Spec.NodeName, o.Status.PodIP}
		for _, c := range o.Status.Conditions {
			words = append(words, fmt.Sprintf("%s=%s", c.Type, c.Status))
		}
		for _, s := range o.Status.ContainerStatuses {
			words = append(words, fmt.Sprintf("%s restarted %d times", s.Name, s.RestartCount))
		}
		if o.DeletionTimestamp != nil {
			words = append(words, "asked to end")
		}
	}
	return name, strings.Join(words, " ")
}

// conditions are those of an endpoint that hold, and its node.
func conditions(e *discoveryv1.Endpoint) string {
	var all []string
	for name, holds := range map[string]*bool{"ready": e.Conditions.Ready, "serving": e.Conditions.Serving,
		"terminating": e.Conditions.Terminating} {
		if holds != nil && *holds {
			all = append(all, name)
		}
	}
	if e.NodeName != nil {
		all = append(all, *e.NodeName)
	}
	slices.Sort(all)
	return fmt.Sprintf("%v", all)
}

// logInterval is how soon a container's log is found: sooner than the kubelet removes that of a pod which ends.
const logInterval = 500 * time.Millisecond

// keepLogs links the logs of containers, which keeps them when the kubelet removes its own.
func (r *record) keepLogs(ctx context.Context, pods []string) {
	for {
		for _, dir := range pods {
			if err := r.linkLogs(dir); err != nil {
				r.mu.Lock()
				r.errs = append(r.errs, err)
				r.mu.Unlock()
				return
			}
		}
		select {
		case <-ctx.Done():
			return
		case <-time.After(logInterval):
		}
	}
}

// linkLogs links the files that are new: NAMESPACE_POD_UID/CONTAINER/N.log.
func (r *record) linkLogs(dir string) error {
	files, err := filepath.Glob(filepath.Join(dir, "*", "*", "*.log"))
	if err != nil {
		return err
	}
	for _, file := range files {
		if r.logs[file] {
			continue
		}
		name, err := filepath.Rel(dir, file)
		if err != nil {
			return err
		}
		err = os.Link(file, filepath.Join(r.dir, "pods", strings.ReplaceAll(name, string(filepath.Separator), "_")))
		if err != nil && !errors.Is(err, fs.ErrExist) && !errors.Is(err, fs.ErrNotExist) {
			return err
		}
		r.logs[file] = true
	}
	return nil
}
