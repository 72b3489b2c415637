package watch

import (
	"fmt"
	"hash/maphash"
	"reflect"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	networkingv1 "k8s.io/api/networking/v1"

	"github.com/verdict-proxy/verdict/internal/system/yamltree"
	"github.com/verdict-proxy/verdict/sync/snapshot"
)

// reader converts the text of manifests into snapshot values.
type reader struct {
	converter
	nodeName string
	seed     maphash.Seed
	// lineSearches counts down the errors whose lines are searched for, so that a file full of errors cannot block the
	// source.
	lineSearches atomic.Int32
	// change, if not nil, says that the text is a change of objects that are known: see LoadChange.
	change *changeReading
	// last are the objects of the last reading of the file that is being read.
	last map[objectKey]*object
}

func newReader(nodeName string) *reader {
	return &reader{nodeName: nodeName, seed: maphash.MakeSeed()}
}

// maxProblems is how many problems of one file are reported: a dump of a newer version may have an unknown field in
// each of ten thousand objects.
const maxProblems = 50

// manifest is the content of one file.
type manifest struct {
	objects []object
	// hash is the hash of the file's text.
	hash uint64
	// chunks are the objects of each chunk without invalid values, by the hash of its text: an edit of a large file costs
	// what it changes.
	chunks map[uint64][]object
	// bad means that a newer text could not be used, and this one stays in force.
	bad bool
	// others counts the objects of kinds that a proxy does not read.
	others int
}

// byKey returns the objects by their keys; of two with the same one that is not flawed. The manifest may be nil.
func (m *manifest) byKey() map[objectKey]*object {
	if m == nil {
		return nil
	}
	all := make(map[objectKey]*object, len(m.objects))
	for i := range m.objects {
		if o := &m.objects[i]; all[o.key] == nil || !o.flawed {
			all[o.key] = o
		}
	}
	return all
}

// keepGood puts the objects of an earlier reading in the place of those that have invalid values now: a wrong port must
// not take the others away. It returns the names of those that it kept, and of those that it kept before and that are
// valid again.
func (m *manifest) keepGood(earlier map[objectKey]*object) (kept, mended []string) {
	for i := range m.objects {
		o := &m.objects[i]
		switch last := earlier[o.key]; {
		case last == nil:
		case !o.flawed && last.kept:
			mended = append(mended, objectName(o.key.kind, o.key.name))
		case o.flawed && !last.flawed:
			o.value, o.flawed, o.kept = last.value, false, true
			kept = append(kept, objectName(o.key.kind, o.key.name))
		}
	}
	return kept, mended
}

// object is one object of a manifest. Its value is a *snapshot.Service, *snapshot.Slice, []*snapshot.Slice (of an
// Endpoints object), *snapshot.Node or *[]netip.Prefix (of a ServiceCIDR), and nil for objects that are not to be
// served.
type object struct {
	key   objectKey
	value any
	line  int
	// flawed means that the object has invalid values, which the value does without.
	flawed bool
	// kept means that the value is that of an earlier text, because this one has invalid values.
	kept bool
}

type objectKey struct {
	kind string
	name snapshot.Name
}

// chunkResult is the result of reading one chunk. bad means that some of it could not be used at all.
type chunkResult struct {
	objects  []object
	problems []*Problem
	bad      bool
	// unparsed means that the chunk as a whole was not valid YAML or JSON.
	unparsed bool
	// others counts the objects of kinds that a proxy does not read.
	others int
}

// reject notes why an object cannot be used.
func (c *chunkResult) reject(t *yamltree.Tree, object, field, format string, args ...any) {
	p := &Problem{Line: t.LineOf(yamltree.PathOf(field)), Object: object, Field: field, Err: fmt.Errorf(format, args...)}
	c.problems, c.bad = append(c.problems, p), true
}

// manifest reads a file's text; before is the file's last content, or nil, and last that by its keys. The result has
// the valid part of the text even if bad is true.
func (r *reader) manifest(file, text string, before *manifest, last map[objectKey]*object,
) (m *manifest, problems []error, bad bool) {
	r.lineSearches.Store(20)
	r.last = last
	defer func() { r.last = nil }()
	m = &manifest{hash: maphash.String(r.seed, text), chunks: map[uint64][]object{}}
	if r.change != nil && isDiff(text) {
		return m, []error{&Problem{File: file, Err: errDiff}}, true
	}
	var chunks []yamltree.Chunk
	docs := yamltree.Documents(text)
	for i := range docs {
		if parts := docs[i].Items(); parts != nil {
			chunks = append(chunks, parts...)
		} else {
			chunks = append(chunks, docs[i])
		}
	}
	hidden := 0
	for i, got := range r.chunks(chunks, before) {
		c := &chunks[i]
		for j := range got.objects {
			o := got.objects[j]
			o.line += c.Line - 1
			m.objects = append(m.objects, o)
		}
		for _, p := range got.problems {
			if len(problems) == maxProblems {
				hidden++
				continue
			}
			p.File, p.Line = file, max(p.Line, 1)+c.Line-1
			problems = append(problems, p)
		}
		if !invalid(got.problems) && c.Text != "" {
			m.chunks[r.hash(c)] = got.objects
		}
		bad = bad || got.bad
		m.others += got.others
	}
	if hidden > 0 {
		problems = append(problems, &Problem{File: file, Err: fmt.Errorf("... and %d more problems", hidden)})
	}
	return m, problems, bad
}

// chunks reads all chunks on all processors, because parsing YAML is slow.
func (r *reader) chunks(chunks []yamltree.Chunk, before *manifest) []chunkResult {
	out := make([]chunkResult, len(chunks))
	var (
		next atomic.Int64
		wg   sync.WaitGroup
	)
	for range min(runtime.GOMAXPROCS(0), len(chunks)) {
		wg.Go(func() {
			for i := int(next.Add(1)) - 1; i < len(chunks); i = int(next.Add(1)) - 1 {
				if before != nil {
					if known, ok := before.chunks[r.hash(&chunks[i])]; ok {
						out[i].objects = known
						continue
					}
				}
				out[i] = r.chunk(&chunks[i])
			}
		})
	}
	wg.Wait()
	r.reparseWhole(chunks, out)
	return out
}

// reparseWhole reads a document as a whole if one of its parts did not parse, unless the document is too large to have
// been written by hand.
func (r *reader) reparseWhole(chunks []yamltree.Chunk, out []chunkResult) {
	for i := 0; i < len(chunks); i++ {
		doc := chunks[i].Whole
		if doc == nil {
			continue
		}
		first, unparsed := i, out[i].unparsed
		for ; i+1 < len(chunks) && chunks[i+1].Whole == doc; i++ {
			unparsed = unparsed || out[i+1].unparsed
		}
		if !unparsed || len(doc.Text) > yamltree.MaxErrorText {
			continue
		}
		whole := r.chunk(doc)
		if whole.unparsed {
			continue
		}
		chunks[first], out[first] = *doc, whole
		for j := first + 1; j <= i; j++ {
			chunks[j], out[j] = yamltree.Chunk{}, chunkResult{}
		}
	}
}

func (r *reader) hash(c *yamltree.Chunk) uint64 {
	var h maphash.Hash
	h.SetSeed(r.seed)
	h.WriteString(c.Text)
	h.WriteByte(0)
	h.WriteString(c.Kind)
	h.WriteByte(0)
	h.WriteString(c.APIVersion)
	return h.Sum64()
}

func (r *reader) chunk(c *yamltree.Chunk) chunkResult {
	t, err := c.Parse(r.lineSearches.Load() > 0)
	if err != nil {
		r.lineSearches.Add(-1)
		p := &Problem{Line: err.Line, Object: objectIn(t), Err: err.Err}
		return chunkResult{problems: []*Problem{p}, bad: true, unparsed: true}
	}
	var out chunkResult
	r.readObjects(t, c.Kind, c.APIVersion, &out)
	return out
}

// kind says how objects of one kind are read.
type kind struct {
	apiVersion string
	namespaced bool
	read       func(*reader, *decoder, *yamltree.Tree) (any, []*Problem)
}

// kinds are the kinds that a proxy reads, by their name in a manifest.
var kinds = map[string]kind{
	"Service":       {"v1", true, (*reader).readService},
	"EndpointSlice": {discoveryv1.SchemeGroupVersion.String(), true, (*reader).readSlice},
	"Endpoints":     {"v1", true, (*reader).readEndpoints},
	"Node":          {"v1", false, (*reader).readNode},
	"ServiceCIDR":   {networkingv1.SchemeGroupVersion.String(), false, (*reader).readServiceCIDR},
}

// readObjects reads the objects of a tree: one, those of a list, or none if the kind is not needed. kind and apiVersion
// are defaults for objects without their own.
func (r *reader) readObjects(t *yamltree.Tree, kind, apiVersion string, out *chunkResult) {
	if t.Null() {
		return
	}
	if t.Kind != yamltree.Mapping {
		out.reject(t, "", "", "not a Kubernetes object but %s", t.Kind)
		return
	}
	if named := t.Str("kind"); named != "" {
		kind, apiVersion = named, ""
	}
	if named := t.Str("apiVersion"); named != "" {
		apiVersion = named
	}
	if kind == "" {
		out.reject(t, "", "kind", "missing: not a Kubernetes object")
		return
	}
	item := strings.TrimSuffix(kind, "List")
	if _, known := kinds[item]; kind != item && (known || item == "") {
		r.readItems(t.Get("items"), item, apiVersion, out)
		return
	}
	r.readObject(t, kind, apiVersion, out)
}

// readObject reads an object, if a proxy of this node needs it.
func (r *reader) readObject(t *yamltree.Tree, kind, apiVersion string, out *chunkResult) {
	k, known := kinds[kind]
	if !known {
		if out.others++; r.change != nil && (kind == "TCPRoute" || kind == "UDPRoute") {
			// Silence would read as if it changed nothing. The controller makes a Service of it, which a proxy reads.
			out.reject(t, objectName(kind, nameIn(t, true)), "kind", "a proxy reads no %s: plan the Service of its Gateway, "+
				"whose annotation %s names the backends (docs/GATEWAY.md)", kind, AnnotationBackends)
		}
		return
	}
	key := objectKey{kind, nameIn(t, k.namespaced)}
	name := objectName(kind, key.name)
	if apiVersion != k.apiVersion {
		if apiVersion == "" {
			out.reject(t, name, "apiVersion", "missing: write %s", k.apiVersion)
		} else if group, _, ok := strings.Cut(apiVersion, "/"); !ok || strings.HasSuffix(group, ".k8s.io") {
			out.reject(t, name, "apiVersion", "%s is not supported: write %s", quote(apiVersion), k.apiVersion)
		} // else it is another API's kind of the same name: Knative has Services too
		return
	}
	if kind == "Node" && key.name.Name != r.nodeName && r.nodeName != anyNode {
		return
	}
	if r.change != nil && r.change.deletes {
		if key.name.Name == "" {
			out.reject(t, name, "metadata.name", "missing")
			return
		}
		out.objects = append(out.objects, object{key: r.ownKey(key), line: t.Line})
		return
	}
	r.readValue(t, k, key, out)
}

// readValue reads what an object says.
func (r *reader) readValue(t *yamltree.Tree, k kind, key objectKey, out *chunkResult) {
	d := &decoder{object: objectName(key.kind, key.name)}
	value, problems := k.read(r, d, t)
	for _, p := range problems {
		p.Line = t.LineOf(yamltree.PathOf(p.Field))
	}
	out.problems = append(append(out.problems, d.problems...), problems...)
	if out.bad = out.bad || d.bad; d.bad {
		return
	}
	out.objects = append(out.objects, object{key: r.ownKey(key), value: value, line: t.Line, flawed: invalid(problems)})
}

// ownKey copies the strings of a key: nothing that is kept may reference the file's text.
func (r *reader) ownKey(k objectKey) objectKey {
	return objectKey{r.intern(k.kind),
		snapshot.Name{Namespace: r.intern(k.name.Namespace), Name: string([]byte(k.name.Name))}}
}

// readItems reads the items of a list; kind is empty for a v1 List, whose items name their own.
func (r *reader) readItems(items *yamltree.Tree, kind, apiVersion string, out *chunkResult) {
	if items == nil || items.Null() {
		return
	}
	if items.Kind != yamltree.List {
		err := fmt.Errorf("this is %s: write %s", items.Kind, yamltree.List)
		out.problems, out.bad = append(out.problems, &Problem{Line: items.Line, Field: "items", Err: err}), true
		return
	}
	for i := range items.Parts {
		r.readObjects(&items.Parts[i], kind, apiVersion, out)
	}
}

// nameIn returns an object's name before it is decoded.
func nameIn(t *yamltree.Tree, namespaced bool) snapshot.Name {
	meta := t.Get("metadata")
	if meta == nil {
		meta = &yamltree.Tree{}
	}
	n := snapshot.Name{Name: meta.Str("name")}
	if namespaced {
		n.Namespace = corev1.NamespaceDefault
		if ns := meta.Str("namespace"); ns != "" {
			n.Namespace = ns
		}
	}
	return n
}

func decode[T any](d *decoder, t *yamltree.Tree) *T {
	o := new(T)
	d.decode(t, reflect.ValueOf(o).Elem())
	return o
}

// setNamespace sets the default namespace, as the API server does.
func setNamespace(ns *string) {
	if *ns == "" {
		*ns = corev1.NamespaceDefault
	}
}

func (r *reader) readService(d *decoder, t *yamltree.Tree) (any, []*Problem) {
	o := decode[corev1.Service](d, t)
	if d.bad {
		return nil, nil
	}
	setNamespace(&o.Namespace)
	if r.change != nil {
		r.change.inherit(o)
	}
	f := &problemList{object: d.object}
	switch o.Spec.Type {
	case "", corev1.ServiceTypeClusterIP, corev1.ServiceTypeNodePort, corev1.ServiceTypeLoadBalancer,
		corev1.ServiceTypeExternalName:
	default:
		f.add("spec.type", "%s is unknown: write ClusterIP, NodePort, LoadBalancer or ExternalName",
			quote(string(o.Spec.Type)))
	}
	if isForThisProxy(o) && o.Spec.ClusterIP == "" && len(o.Spec.ClusterIPs) == 0 {
		f.add("spec.clusterIP", "no cluster IP: nothing allocates one for a manifest; write an address or None")
	}
	for i, p := range o.Spec.Ports {
		if p.NodePort == 0 && o.Spec.Type == corev1.ServiceTypeNodePort {
			f.add(fmt.Sprintf("spec.ports[%d].nodePort", i),
				"no node port: nothing allocates one for a manifest; write a number")
		}
	}
	last, _ := r.lastValue("Service", nameOf(o)).(*snapshot.Service)
	s, problems := r.service(o, last)
	if r.change != nil {
		r.change.keepStatus(o, s)
	}
	return s, append(f.problems(), problems...)
}

// lastValue returns what an object was before this reading; nil if that is not known.
func (r *reader) lastValue(kind string, n snapshot.Name) any {
	switch o := r.last[objectKey{kind, n}]; {
	case o != nil:
		return o.value
	case r.change == nil:
		return nil
	case kind == "Service":
		return r.change.now.Services[n]
	}
	return r.change.now.Slices[r.change.now.Owner(n)][n.Name]
}

func (r *reader) readSlice(d *decoder, t *yamltree.Tree) (any, []*Problem) {
	o := decode[discoveryv1.EndpointSlice](d, t)
	if d.bad {
		return nil, nil
	}
	setNamespace(&o.Namespace)
	for i := range o.Ports {
		if o.Ports[i].Name == nil {
			o.Ports[i].Name = new(string)
		}
	}
	if o.AddressType == "" {
		f := &problemList{object: d.object}
		f.add("addressType", "missing: write IPv4 or IPv6")
		return (*snapshot.Slice)(nil), f.problems()
	}
	last, _ := r.lastValue("EndpointSlice", nameOf(o)).(*snapshot.Slice)
	return asAny(r.slice(o, last))
}

func (r *reader) readEndpoints(d *decoder, t *yamltree.Tree) (any, []*Problem) {
	//lint:ignore SA1019 dumps of older clusters, and what people wrote for them, have nothing else
	o := decode[corev1.Endpoints](d, t)
	if d.bad {
		return nil, nil
	}
	setNamespace(&o.Namespace)
	return asAny(r.endpoints(o))
}

func (r *reader) readNode(d *decoder, t *yamltree.Tree) (any, []*Problem) {
	return asAny(r.node(decode[corev1.Node](d, t)))
}

func (r *reader) readServiceCIDR(d *decoder, t *yamltree.Tree) (any, []*Problem) {
	return asAny(r.serviceCIDR(decode[networkingv1.ServiceCIDR](d, t)))
}

func asAny[T any](v T, problems []*Problem) (any, []*Problem) { return v, problems }

// objectIn names the object in a text that did not parse, as far as what did parse tells; t may be nil.
func objectIn(t *yamltree.Tree) string {
	switch {
	case t == nil:
		return ""
	case t.Kind == yamltree.List && len(t.Parts) == 1:
		return objectIn(&t.Parts[0])
	}
	kind := t.Str("kind")
	return objectName(kind, nameIn(t, kinds[kind].namespaced))
}
