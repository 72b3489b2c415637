package watch

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/verdict-proxy/verdict/internal/system/clip"
	"github.com/verdict-proxy/verdict/sync/snapshot"
)

// AnnotationBackends is the annotation of a Service that names the Services whose endpoints serve it.
const AnnotationBackends = annotationDomain + nameBackends

// ConditionGranted is the condition of a Service whose message names the Services of other namespaces that its backends
// may be, separated by spaces, if its status is True. Unlike an annotation, no tenant can write it.
const ConditionGranted = annotationDomain + "BackendsGranted"

const (
	// maxBackendsText is what the API server allows all annotations of an object.
	maxBackendsText = 256 << 10
	// maxBackendsName bounds what names a Gateway, a listener or a route, and why a backend is refused.
	maxBackendsName = 512
	// maxJSONError bounds what the JSON decoder says, which repeats the text.
	maxJSONError = 160
)

const (
	ignoredWithBackends = "it is ignored with " + AnnotationBackends +
		": the shares of backends must not change with their endpoints"
	// notGranted is why the share of a backend is refused that may be granted later.
	notGranted = "it is in another namespace, and nothing grants it"
)

// backendsJSON is the annotation.
type backendsJSON struct {
	For   string             `json:"for"`
	Ports []portBackendsJSON `json:"ports"`
}

type portBackendsJSON struct {
	Port     string        `json:"port"`
	Listener string        `json:"listener"`
	Route    string        `json:"route"`
	To       []backendJSON `json:"to"`
}

type backendJSON struct {
	Service string  `json:"service"`
	Port    int64   `json:"port"`
	Weight  *uint64 `json:"weight"`
	Refused string  `json:"refused"`
}

// backends reads the Services whose endpoints serve those of a Service: nil if it does not name any.
func (a *annotations) backends(s *snapshot.Service, last *snapshot.Backends, conditions []metav1.Condition,
) *snapshot.Backends {
	text, field, ok := a.get(nameBackends)
	if !ok {
		return nil
	}
	b, err := parseBackends(text, s.Name.Namespace)
	if err != nil {
		a.wrong(field, "%w", err)
		if last == nil {
			return nil
		}
		b = &snapshot.Backends{For: last.For, Ports: slices.Clone(last.Ports)}
		for i := range b.Ports {
			b.Ports[i].To = slices.Clone(b.Ports[i].To)
		}
	}
	for i := range b.Ports {
		name := b.Ports[i].Port
		if !slices.ContainsFunc(s.Ports, func(p snapshot.Port) bool { return p.Name == name }) {
			a.warn(field, "ports[%d]: the Service has no port %s", i, quote(name))
		}
	}
	grant(b, s.Name.Namespace, grantedBy(conditions))
	return b
}

// grantedBy returns the names in the condition that grants backends.
func grantedBy(conditions []metav1.Condition) map[string]bool {
	granted := map[string]bool{}
	for i := range conditions {
		if c := &conditions[i]; c.Type == ConditionGranted && c.Status == metav1.ConditionTrue {
			for name := range strings.FieldsSeq(c.Message) {
				granted[name] = true
			}
		}
	}
	return granted
}

// grant refuses the backends of other namespaces than the Service's that are not granted.
func grant(b *snapshot.Backends, own string, granted map[string]bool) {
	for to := range b.Each() {
		switch {
		case to.Service.Namespace == own, to.Refused != "" && to.Refused != notGranted:
		case granted[to.Service.String()]:
			to.Refused = ""
		default:
			to.Refused = notGranted
		}
	}
}

// inheritGrants gives a Service of a manifest without the condition that grants backends what is granted to it now.
func inheritGrants(o *corev1.Service, now *snapshot.Service) {
	has := func(c metav1.Condition) bool { return c.Type == ConditionGranted }
	granted := map[string]bool{}
	for to := range now.Backends.Each() {
		if to.Refused == "" && to.Service.Namespace != o.Namespace {
			granted[to.Service.String()] = true
		}
	}
	if len(granted) > 0 && !slices.ContainsFunc(o.Status.Conditions, has) {
		o.Status.Conditions = append(o.Status.Conditions, metav1.Condition{Type: ConditionGranted,
			Status: metav1.ConditionTrue, Message: strings.Join(slices.Collect(maps.Keys(granted)), " ")})
	}
}

// parseBackends parses the annotation of a Service in a namespace. It keeps no part of the text.
func parseBackends(text, namespace string) (*snapshot.Backends, error) {
	if len(text) > maxBackendsText {
		return nil, fmt.Errorf("%d bytes are too many: %d at most", len(text), maxBackendsText)
	}
	var in backendsJSON
	d := json.NewDecoder(strings.NewReader(text))
	d.DisallowUnknownFields()
	err := d.Decode(&in)
	if err == nil {
		if _, end := d.Token(); !errors.Is(end, io.EOF) {
			err = errors.New("there is more text after the JSON object")
		}
	}
	if wrong := (*json.UnmarshalTypeError)(nil); errors.As(err, &wrong) {
		err = fmt.Errorf("%s has the wrong kind: %s", cmp.Or(wrong.Field, "the value"), wrong.Value)
	}
	if err != nil {
		return nil, errors.New(clip.Visible(err.Error(), maxJSONError))
	}
	out := &snapshot.Backends{}
	if out.For, err = shownName("for", in.For); err != nil {
		return nil, err
	}
	if len(in.Ports) > snapshot.MaxBackendPorts {
		return nil, fmt.Errorf("ports: %d are too many: %d at most", len(in.Ports), snapshot.MaxBackendPorts)
	}
	for i := range in.Ports {
		p, err := in.Ports[i].read(namespace)
		if err == nil && out.Of(p.Port) != nil {
			err = fmt.Errorf("port: %s is there twice", quote(p.Port))
		}
		if err != nil {
			return nil, fmt.Errorf("ports[%d].%w", i, err)
		}
		out.Ports = append(out.Ports, p)
	}
	return out, nil
}

// shownName reads text that only answers show.
func shownName(field, text string) (string, error) {
	if len(text) > maxBackendsName {
		return "", fmt.Errorf("%s: %d bytes are too many: %d at most", field, len(text), maxBackendsName)
	}
	return clip.Visible(text, maxBackendsName), nil
}

func (p *portBackendsJSON) read(namespace string) (out snapshot.PortBackends, err error) {
	if out.Port = p.Port; p.Port != "" {
		if err := checkName(p.Port); err != nil {
			return out, fmt.Errorf("port: %w", err)
		}
	}
	if out.Listener, err = shownName("listener", p.Listener); err != nil {
		return out, err
	}
	if out.Route, err = shownName("route", p.Route); err != nil {
		return out, err
	}
	if len(p.To) > snapshot.MaxBackends {
		return out, fmt.Errorf("to: %d are too many: %d at most", len(p.To), snapshot.MaxBackends)
	}
	for i := range p.To {
		b, err := p.To[i].read(namespace)
		if err != nil {
			return out, fmt.Errorf("to[%d].%w", i, err)
		}
		out.To = append(out.To, b)
	}
	return out, nil
}

// read reads a backend. One that is refused need not say which it is.
func (t *backendJSON) read(namespace string) (out snapshot.Backend, err error) {
	if out.Refused, err = shownName("refused", t.Refused); err != nil {
		return out, err
	}
	if t.Service != "" || out.Refused == "" {
		out.Service = snapshot.Name{Namespace: namespace, Name: t.Service}
		if ns, name, other := strings.Cut(t.Service, "/"); other {
			out.Service = snapshot.Name{Namespace: ns, Name: name}
		}
		if err := cmp.Or(checkName(out.Service.Namespace), checkName(out.Service.Name)); err != nil {
			return out, fmt.Errorf("service: %w", err)
		}
	}
	if t.Port < 0 || t.Port > 65535 || t.Port == 0 && out.Refused == "" {
		return out, fmt.Errorf("port: %d is not a port (1-65535)", t.Port)
	}
	weight := uint64(1)
	if t.Weight != nil {
		weight = *t.Weight
	}
	if weight > snapshot.MaxBackendWeight {
		return out, fmt.Errorf("weight: %d is not a number from 0 to %d", weight, snapshot.MaxBackendWeight)
	}
	out.Port, out.Weight = uint16(t.Port), uint32(weight)
	return out, nil
}
