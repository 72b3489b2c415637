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
	logs map[string]bool   // files that are kept already
}

// startRecord begins in a directory, which it makes. pods are where the nodes' logs of containers are.
func startRecord(dir string, pods []string) (*record, error) {
	if err := os.MkdirAll(filepath.Join(dir, "pods"), 0o755); err != nil {
		return nil, err
	}
	file, err := os.OpenFile(filepath.Join(dir, "cluster.log"), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o644)
	if err != nil {
		return nil, err
	}
	ctx, stop := context.WithCancel(context.Background())
	r := &record{dir: dir, stop: stop, file: file, last: map[string]string{}, logs: map[string]bool{}}
	r.wait.Go(func() { r.keepLogs(ctx, pods) })
	return r, nil
}

// close ends the record. It returns what could not be written.
func (r *record) close() error {
	r.stop()
	r.wait.Wait()
	r.mu.Lock()
	defer r.mu.Unlock()
	return errors.Join(append(r.errs, r.file.Close())...)
}

// see writes a Node, EndpointSlice or pod if what is told of it has changed.
func (r *record) see(o any, gone bool) {
	name, text := describe(o)
	if name == "" {
		return
	}
	at := time.Now()
	if gone {
		text = "gone"
	}
	r.mu.Lock()
	defer r.mu.Unlock()
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

// describe names an object and tells what matters of it here; without a name, nothing does.
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
