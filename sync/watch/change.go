package watch

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/verdict-proxy/verdict/sync/snapshot"
)

// ChangeFiles name a change of objects.
type ChangeFiles struct {
	// Apply are manifests of objects to create or to replace, and Delete manifests of objects to delete. Each is a path
	// as in Load: a file, a directory, or a pipe.
	Apply, Delete []string
	// Gone are objects to delete, as KIND/NAMESPACE/NAME.
	Gone []string
	// NodeName is the name of the Node to read; other Nodes change nothing.
	NodeName string
}

// ObjectChange is what a change does to the objects that a snapshot holds.
type ObjectChange struct {
	Delta snapshot.Delta
	// Objects says which objects change, as "Service shop/cart", sorted.
	Objects []ChangedObject
	// Same counts the objects that are what they were, and Others those of kinds that a proxy does not read.
	Same, Others int
	// Notes say what could not be followed.
	Notes []string
}

// ChangedObject is one object of a change.
type ChangedObject struct {
	// Object is the kind and name: "Service shop/cart".
	Object string
	// Verb is created, changed or deleted.
	Verb string
}

// LoadChange reads a change of the objects in a snapshot. It reads an object as the whole object that the API server
// would hold. Where a manifest lacks what the API server allocates or keeps (cluster IPs, node ports, the load
// balancer's addresses, the age), that is taken from the object in the snapshot.
//
// All problems are errors: what a part of a change does is not what the change does.
func LoadChange(ctx context.Context, c ChangeFiles, now *snapshot.Snapshot) (*ObjectChange, error) {
	b := changeBuilder{now: now, out: &ObjectChange{}, seen: map[objectKey]place{}}
	for _, part := range []struct {
		paths   []string
		deletes bool
	}{{c.Apply, false}, {c.Delete, true}} {
		for _, path := range part.paths {
			b.read(ctx, path, c.NodeName, part.deletes)
		}
	}
	for _, text := range c.Gone {
		key, err := parseKey(text)
		if err != nil {
			b.report(err)
		} else if key.kind != "Node" || key.name.Name == c.NodeName {
			b.add(object{key: key}, "", true)
		}
	}
	b.prefixes()
	slices.SortFunc(b.out.Objects, func(x, y ChangedObject) int { return strings.Compare(x.Object, y.Object) })
	return b.out, errors.Join(b.problems...)
}

// GoneObjects returns the objects that manifests name, as KIND/NAMESPACE/NAME: see ChangeFiles.Gone.
func GoneObjects(ctx context.Context, paths []string) (refs []string, err error) {
	b := changeBuilder{now: snapshot.New(), out: &ObjectChange{}, seen: map[objectKey]place{}}
	for _, path := range paths {
		b.read(ctx, path, anyNode, true)
	}
	for key := range b.seen {
		refs = append(refs, key.kind+"/"+key.name.Namespace+"/"+key.name.Name)
	}
	slices.Sort(refs)
	return refs, errors.Join(b.problems...)
}

// maxChangeText bounds what ChangeText returns.
const maxChangeText = 8 << 20

// ChangeText returns the text of manifests as one manifest, of 8 MiB at most.
func ChangeText(ctx context.Context, paths []string) (string, error) {
	var out strings.Builder
	for _, path := range paths {
		name := path
		if path == "-" {
			path, name = "/dev/stdin", "standard input"
		}
		d := newManifestDir(path, "", nil)
		d.pipes = true
		l, err := d.list(ctx)
		if err != nil {
			return "", fmt.Errorf("%s: %w", name, pathless(err))
		}
		for _, file := range l.names {
			text, err := d.text(ctx, file, true)
			if err != nil {
				return "", fmt.Errorf("%s: %w", d.file(file), pathless(err))
			}
			if isDiff(text) {
				return "", fmt.Errorf("%s: %w", name, errDiff)
			}
			if out.Len()+len(text) > maxChangeText {
				return "", fmt.Errorf("%s: the change is larger than %d MiB", name, maxChangeText>>20)
			}
			out.WriteString(text + "\n---\n")
		}
	}
	return out.String(), nil
}

// parseKey reads KIND/NAMESPACE/NAME.
func parseKey(text string) (objectKey, error) {
	parts := strings.Split(text, "/")
	if len(parts) != 3 {
		return objectKey{}, fmt.Errorf("%s is no object: write KIND/NAMESPACE/NAME, as Service/shop/cart", quote(text))
	}
	k, known := kinds[parts[0]]
	switch {
	case !known:
		return objectKey{}, fmt.Errorf("%s: a proxy reads no %s, but Service, EndpointSlice, Endpoints, ServiceCIDR "+
			"and Node", quote(text), quote(parts[0]))
	case parts[2] == "" || k.namespaced != (parts[1] != ""):
		return objectKey{}, fmt.Errorf("%s is no object: write Service/NAMESPACE/NAME, or Node//NAME", quote(text))
	}
	return objectKey{parts[0], snapshot.Name{Namespace: parts[1], Name: parts[2]}}, nil
}

// anyNode makes a reader read Nodes of any name.
const anyNode = "*"

// changeReading is what a reader must know of a change.
type changeReading struct {
	now *snapshot.Snapshot
	// deletes says that only the objects' names count.
	deletes bool
}

// errDiff says that a text is the output of kubectl diff. Its hunks have three lines around each difference, and no
// more of an object: what an object will be cannot be told from them.
var errDiff = errors.New("this is a diff, which has only parts of objects: pipe the objects themselves, as by " +
	"kubectl apply --dry-run=server -o yaml")

// isDiff reports whether a text begins as diff -u does.
func isDiff(text string) bool {
	for range 2 {
		line, rest, _ := strings.Cut(text, "\n")
		next, _, _ := strings.Cut(rest, "\n")
		if strings.HasPrefix(line, "--- ") && strings.HasPrefix(next, "+++ ") {
			return true
		}
		text = rest
	}
	return false
}

// needsNodePorts reports whether the API server allocates node ports for a Service.
func needsNodePorts(o *corev1.Service) bool {
	return o.Spec.Type == corev1.ServiceTypeNodePort || o.Spec.Type == corev1.ServiceTypeLoadBalancer &&
		(o.Spec.AllocateLoadBalancerNodePorts == nil || *o.Spec.AllocateLoadBalancerNodePorts)
}

// inherit completes a Service with what the API server allocated for the one that is there. Without status, a manifest
// says nothing of it.
func (c *changeReading) inherit(o *corev1.Service) {
	now := c.now.Services[nameOf(o)]
	if now == nil || !isForThisProxy(o) {
		return
	}
	if o.CreationTimestamp.IsZero() && o.UID == "" {
		o.UID = types.UID(now.Age.UID)
		if now.Age.Created != 0 {
			o.CreationTimestamp.Time = time.Unix(now.Age.Created, 0)
		}
	}
	if o.Spec.ClusterIP == "" && len(o.Spec.ClusterIPs) == 0 {
		for _, a := range now.ClusterIPs {
			o.Spec.ClusterIPs = append(o.Spec.ClusterIPs, a.String())
		}
	}
	if needsNodePorts(o) {
		inheritNodePorts(o.Spec.Ports, now.Ports)
	}
	if o.Spec.Type == corev1.ServiceTypeLoadBalancer && o.Spec.HealthCheckNodePort == 0 {
		o.Spec.HealthCheckNodePort = int32(now.HealthCheckNodePort)
	}
	inheritGrants(o, now)
}

// inheritNodePorts gives ports without a node port the one of the port with their name, unless another port has it.
func inheritNodePorts(ports []corev1.ServicePort, now []snapshot.Port) {
	type number struct {
		protocol string
		port     uint16
	}
	taken := map[number]bool{}
	of := func(p *corev1.ServicePort) string { return strings.ToLower(cmp.Or(string(p.Protocol), "tcp")) }
	for i := range ports {
		taken[number{of(&ports[i]), uint16(ports[i].NodePort)}] = true
	}
	for i := range ports {
		p := &ports[i]
		at := slices.IndexFunc(now, func(s snapshot.Port) bool { return s.Name == p.Name })
		if p.NodePort != 0 || at < 0 || taken[number{of(p), now[at].NodePort}] {
			continue
		}
		p.NodePort = int32(now[at].NodePort)
	}
}

// keepStatus gives a Service of a manifest without status the addresses that its load balancer has.
func (c *changeReading) keepStatus(o *corev1.Service, s *snapshot.Service) {
	now := c.now.Services[nameOf(o)]
	if s != nil && now != nil && len(o.Status.LoadBalancer.Ingress) == 0 && o.Spec.Type == corev1.ServiceTypeLoadBalancer {
		s.LoadBalancerIPs = now.LoadBalancerIPs
	}
}

// changeBuilder gathers a change.
type changeBuilder struct {
	now      *snapshot.Snapshot
	out      *ObjectChange
	problems []error
	// hidden counts the problems beyond those in problems.
	hidden int
	// seen are the objects of the change, and where each stands; nowhere if it is named by a flag.
	seen map[objectKey]place
	// come are the ranges of ServiceCIDRs.
	come []netip.Prefix
}

func (b *changeBuilder) report(err error) {
	if len(b.problems) < maxProblems {
		b.problems = append(b.problems, err)
	} else if b.hidden++; b.hidden == 1 {
		b.problems = append(b.problems, errors.New("there are more problems"))
	}
}

// read reads a file, a directory or a pipe.
func (b *changeBuilder) read(ctx context.Context, path, nodeName string, deletes bool) {
	name := path
	if path == "-" {
		path, name = "/dev/stdin", "standard input"
	}
	d := newManifestDir(path, nodeName, func(err error) {
		p := (*Problem)(nil)
		if errors.As(err, &p) && p.File == path {
			p.File = name
		}
		if p != nil && p.Warning {
			b.out.Notes = append(b.out.Notes, p.Error())
			return
		}
		b.report(err)
	})
	d.pipes, d.reader.change = true, &changeReading{b.now, deletes}
	if err := d.refresh(ctx); err != nil {
		b.report(fmt.Errorf("%s: %w", path, pathless(err)))
		return
	}
	for _, file := range slices.Sorted(maps.Keys(d.files)) {
		b.out.Others += d.files[file].others
		for _, o := range d.files[file].objects {
			b.add(o, d.file(file), deletes)
		}
	}
}

// add adds an object.
func (b *changeBuilder) add(o object, file string, deletes bool) {
	name := objectName(o.key.kind, o.key.name)
	if first, twice := b.seen[o.key]; twice {
		at := "the flags"
		if first.file != "" {
			at = first.String()
		}
		b.report(&Problem{File: file, Line: o.line, Object: name,
			Err: fmt.Errorf("it is in this change twice, first in %s", at)})
		return
	}
	b.seen[o.key] = place{file, o.line}
	n, delta := o.key.name, &b.out.Delta
	switch o.key.kind {
	case "Service":
		v, _ := o.value.(*snapshot.Service)
		if differs(b, name, b.now.Services[n], v, sameService) {
			snapshot.Put(&delta.Services, n, v)
		}
	case "EndpointSlice":
		v, _ := o.value.(*snapshot.Slice)
		if differs(b, name, b.now.Slices[b.now.Owner(n)][n.Name], v, sameSlice) {
			snapshot.Put(&delta.Slices, n, v)
		}
	case "Endpoints":
		v, _ := o.value.([]*snapshot.Slice)
		b.endpoints(name, n, v)
	case "Node":
		was := &b.now.Node
		if was.Name == "" {
			was = nil
		}
		v, _ := o.value.(*snapshot.Node)
		if differs(b, name, was, v, sameNode) {
			delta.Node = cmp.Or(v, &snapshot.Node{})
		}
	case "ServiceCIDR":
		v, _ := o.value.(*[]netip.Prefix)
		b.cidrs(name, v, deletes)
	}
}

// changed takes note of an object that was there or not, and will be there or not.
func (b *changeBuilder) changed(name string, was, is, same bool) {
	verb := "changed"
	switch {
	case !was && !is:
		b.out.Notes = append(b.out.Notes, name+" is not there, or not for this proxy: nothing changes")
		return
	case same:
		b.out.Same++
		return
	case !was:
		verb = "created"
	case !is:
		verb = "deleted"
	}
	b.out.Objects = append(b.out.Objects, ChangedObject{name, verb})
}

// differs is changed for an object that is nil when it is not there. It reports whether there is a difference.
func differs[T any](b *changeBuilder, name string, was, is *T, equal func(a, b *T) bool) bool {
	same := was != nil && is != nil && equal(was, is)
	b.changed(name, was != nil, is != nil, same)
	return !same && (was != nil || is != nil)
}

// endpoints adds an Endpoints object. It counts only where the Service has no EndpointSlices, as in Files.
func (b *changeBuilder) endpoints(name string, n snapshot.Name, v []*snapshot.Slice) {
	var before []*snapshot.Slice
	for slice, s := range b.now.Slices[n] {
		if !strings.HasPrefix(slice, n.Name+":") {
			b.out.Notes = append(b.out.Notes, name+" changes nothing: the Service has EndpointSlices, which count")
			return
		}
		before = append(before, s)
	}
	slices.SortFunc(before, func(x, y *snapshot.Slice) int { return x.Name.Compare(y.Name) })
	same := slices.EqualFunc(before, v, sameSlice)
	if b.changed(name, len(before) > 0, len(v) > 0, same); same {
		return
	}
	for _, s := range before {
		snapshot.Put(&b.out.Delta.Slices, s.Name, nil)
	}
	for _, s := range v {
		snapshot.Put(&b.out.Delta.Slices, s.Name, s)
	}
}

// cidrs adds a ServiceCIDR. The snapshot has the ranges of all of them together, so one that is deleted must say its
// own, which a reader of names alone does not know.
func (b *changeBuilder) cidrs(name string, v *[]netip.Prefix, deletes bool) {
	if deletes {
		b.report(&Problem{Object: name, Err: errors.New("what the deletion of a ServiceCIDR changes is not known: its " +
			"ranges may belong to others, too")})
		return
	}
	if v != nil {
		b.come = append(b.come, *v...)
	}
	same := v == nil || !slices.ContainsFunc(*v, func(p netip.Prefix) bool {
		return !slices.Contains(b.now.ServiceCIDRs, p)
	})
	b.changed(name, same, true, same)
}

// prefixes completes the change with the ranges of ServiceCIDRs.
func (b *changeBuilder) prefixes() {
	all := mergePrefixes([]*[]netip.Prefix{&b.now.ServiceCIDRs, &b.come})
	if !slices.Equal(all, b.now.ServiceCIDRs) {
		b.out.Delta.ServiceCIDRs = &all
	}
}
