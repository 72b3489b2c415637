package collector

import (
	"context"
	"fmt"
	"maps"
	"net/http"
	"slices"
	"strings"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"
	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"

	ours "github.com/verdict-proxy/verdict/internal/answers/cluster"
	"github.com/verdict-proxy/verdict/internal/proxy/status"
	"github.com/verdict-proxy/verdict/sync/snapshot"
)

// cluster is what a barrier must know of the cluster. All of it is read on demand.
type cluster interface {
	// read reads what the API has of a Service now, and which of its pods on some nodes are being deleted.
	read(ctx context.Context, service snapshot.Name, nodes []string) (*state, error)
	// roster returns the nodes that must answer, as they are or were a moment ago.
	roster(ctx context.Context) (*roster, error)
	// gone returns those of some nodes that hold nobody, and knownGone says it of one without asking.
	gone(ctx context.Context, nodes []string) []string
	knownGone(node string) bool
}

// state is what the API has of a Service.
type state struct {
	goal status.Goal
	// objects has the versions of the Service and its slices.
	objects string
	// nothing says why there is nothing to wait for; else it is empty.
	nothing string
	// ready are the pods that are ready endpoints, and deleting those on each node that are being deleted.
	ready    map[podID]bool
	deleting map[string][]podID
}

// roster is a list of nodes. It does not change.
type roster struct {
	names []string // sorted
	index map[string]int
}

func newRoster(nodes map[string]bool) *roster {
	r := &roster{names: slices.Sorted(maps.Keys(nodes)), index: make(map[string]int, len(nodes))}
	for i, n := range r.names {
		r.index[n] = i
	}
	return r
}

// objects is a cluster behind an API server.
type objects struct {
	api *api
	// daemonSet has a pod on each node that must answer.
	daemonSet snapshot.Name

	// rostering lets one caller at a time read the roster.
	rostering sync.Mutex
	known     *roster
	// version is that of the DaemonSet when the roster was read, checked is when it was compared last, and listed when
	// the pods were.
	version         string
	checked, listed time.Time

	mu sync.Mutex
	// leases says of nodes whether they are gone, and until when that is believed. listedLeases is when all were read.
	leases       map[string]lease
	listedLeases time.Time
}

// lease is what was read of a node's Lease.
type lease struct {
	gone  bool
	until time.Time
}

const (
	// rosterFresh is how long a roster is believed. Then the DaemonSet's version says whether it may have changed: its
	// status counts its pods. It is read again in any case after rosterOld.
	rosterFresh, rosterOld = 2 * time.Second, 5 * time.Minute
	// leaseFresh is how long a node's Lease is believed. More than fewLeases are read by one list.
	leaseFresh, fewLeases = 5 * time.Second, 16
	// leaseMargin is how much longer than its term a Lease is believed: clocks differ.
	leaseMargin = 5 * time.Second
	// parallel is how many requests of one kind are sent at once.
	parallel = 8
)

func newObjects(a *api, ds snapshot.Name) *objects {
	return &objects{api: a, daemonSet: ds, leases: map[string]lease{}}
}

func (o *objects) read(ctx context.Context, n snapshot.Name, nodes []string) (*state, error) {
	var svc *corev1.Service
	var list *discoveryv1.EndpointSliceList
	group, inGroup := errgroup.WithContext(ctx)
	group.Go(func() (err error) {
		svc, err = o.api.service(inGroup, n)
		return err
	})
	group.Go(func() (err error) {
		list, err = o.api.slices(inGroup, n)
		return err
	})
	if err := group.Wait(); isStatus(err, http.StatusNotFound) {
		return &state{nothing: "the Service does not exist"}, nil
	} else if err != nil {
		return nil, err
	}
	goal, err := ours.GoalOf(svc, list)
	if err != nil {
		return &state{nothing: err.Error()}, nil
	}
	s := &state{goal: goal, objects: versionsOf(svc, list), ready: map[podID]bool{}, deleting: map[string][]podID{}}
	if svc.Spec.PublishNotReadyAddresses || len(svc.Spec.Selector) == 0 {
		return s, nil // its slices never say that a pod is not ready, or do not follow pods
	}
	for i := range list.Items {
		for j := range list.Items[i].Endpoints {
			if e := &list.Items[i].Endpoints[j]; e.TargetRef != nil && (e.Conditions.Ready == nil || *e.Conditions.Ready) {
				s.ready[e.TargetRef.UID] = true
			}
		}
	}
	return s, o.readDeleting(ctx, svc, nodes, s)
}

// versionsOf names the objects that were read, with their versions.
func versionsOf(svc *corev1.Service, list *discoveryv1.EndpointSliceList) string {
	names := make([]string, 0, len(list.Items))
	for i := range list.Items {
		names = append(names, list.Items[i].Name+"="+list.Items[i].ResourceVersion)
	}
	slices.Sort(names)
	return svc.ResourceVersion + " " + strings.Join(names, " ")
}

// readDeleting finds the pods of a Service on some nodes that are being deleted. The slices may not say so yet, in a
// preStop hook above all.
func (o *objects) readDeleting(ctx context.Context, svc *corev1.Service, nodes []string, s *state) error {
	found := make([][]podID, len(nodes))
	var group errgroup.Group
	group.SetLimit(parallel)
	for i, node := range nodes {
		group.Go(func() (err error) {
			found[i], err = o.api.deleting(ctx, svc.Namespace, node, svc.Spec.Selector)
			return err
		})
	}
	err := group.Wait()
	for i, node := range nodes {
		s.deleting[node] = found[i]
	}
	return err
}

func (o *objects) roster(ctx context.Context) (*roster, error) {
	o.rostering.Lock()
	defer o.rostering.Unlock()
	if o.known != nil && time.Since(o.checked) < rosterFresh {
		return o.known, nil
	}
	begin := time.Now()
	ds, err := o.api.daemonSet(ctx, o.daemonSet)
	if err != nil {
		return nil, err
	}
	if o.known == nil || ds.Metadata.ResourceVersion != o.version || time.Since(o.listed) > rosterOld {
		nodes, err := o.api.nodesOf(ctx, ds)
		if err != nil {
			return nil, err
		}
		if len(nodes) == 0 {
			return nil, fmt.Errorf("the DaemonSet %v has no pods", o.daemonSet)
		}
		o.known, o.version, o.listed = newRoster(nodes), ds.Metadata.ResourceVersion, begin
	}
	o.checked = begin
	return o.known, nil
}

func (o *objects) gone(ctx context.Context, nodes []string) (gone []string) {
	now := time.Now()
	o.mu.Lock()
	maps.DeleteFunc(o.leases, func(_ string, l lease) bool { return now.After(l.until) })
	var unknown []string
	for _, n := range nodes {
		if _, ok := o.leases[n]; !ok {
			unknown = append(unknown, n)
		}
	}
	all := len(unknown) > fewLeases && now.Sub(o.listedLeases) > leaseFresh
	if all {
		o.listedLeases = now
	}
	o.mu.Unlock()
	if all {
		o.listLeases(ctx, unknown)
	} else {
		o.readLeases(ctx, unknown[:min(len(unknown), fewLeases)])
	}
	for _, n := range nodes {
		if o.knownGone(n) {
			gone = append(gone, n)
		}
	}
	return gone
}

// listLeases reads the Leases of all nodes. A node without one is gone.
func (o *objects) listLeases(ctx context.Context, asked []string) {
	list, err := o.api.nodeLeases(ctx)
	if err != nil {
		return // they are waited for
	}
	of := map[string]*coordinationv1.Lease{}
	for i := range list {
		of[list[i].Name] = &list[i]
	}
	for _, n := range asked {
		o.learn(n, expired(of[n], time.Now()))
	}
}

func (o *objects) readLeases(ctx context.Context, asked []string) {
	var group errgroup.Group
	group.SetLimit(parallel)
	for _, n := range asked {
		group.Go(func() error {
			l, err := o.api.nodeLease(ctx, n)
			switch {
			case isStatus(err, http.StatusNotFound):
				o.learn(n, true)
			case err == nil:
				o.learn(n, expired(l, time.Now()))
			}
			return nil // without an answer, the node is waited for
		})
	}
	_ = group.Wait()
}

// expired reports whether a node's Lease is over. Without one, the node is gone.
func expired(l *coordinationv1.Lease, now time.Time) bool {
	if l == nil || l.Spec.RenewTime == nil || l.Spec.LeaseDurationSeconds == nil {
		return l == nil
	}
	term := time.Duration(*l.Spec.LeaseDurationSeconds) * time.Second
	return now.After(l.Spec.RenewTime.Add(term + leaseMargin))
}

func (o *objects) learn(node string, gone bool) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.leases[node] = lease{gone, time.Now().Add(leaseFresh)}
}

func (o *objects) knownGone(node string) bool {
	o.mu.Lock()
	defer o.mu.Unlock()
	l, ok := o.leases[node]
	return ok && l.gone && time.Now().Before(l.until)
}
