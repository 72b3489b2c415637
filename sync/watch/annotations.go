package watch

import (
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"

	"github.com/verdict-proxy/verdict/internal/system/clip"
	"github.com/verdict-proxy/verdict/internal/system/nearest"
	"github.com/verdict-proxy/verdict/sync/snapshot"
)

// All annotations of Verdict are in one domain, and under an alias, which counts where the qualified name is not given.
const annotationDomain, annotationAlias = "verdict-proxy.github.io/", "verdict/"

// The annotations of a Service. docs/SCHEDULING.md and docs/CONFIGURATION.md say what they mean.
const (
	nameScheduler        = "scheduler"
	nameWeights          = "weights"
	nameZones            = "zones"
	nameZoneDemand       = "zone-demand"
	nameSlowStart        = "slow-start"
	nameSecondChance     = "second-chance"
	nameDrain            = "drain"
	nameRebalance        = "rebalance"
	nameExternalFailover = "external-failover"
	nameCounters         = "counters"
	nameRecords          = "records"
	nameBackends         = "backends"
	nameLocal            = "local"
	nameLastResort       = "last-resort"
	nameProbe            = "probe"
	nameLimits           = "limits"
	nameClientAddress    = "client-address"
)

// nameWeight is the annotation of an EndpointSlice.
const nameWeight = "weight"

// annotationCiliumWeight is Cilium's weight of a slice, from 0 to 65535, where an endpoint without one has 100.
const annotationCiliumWeight = "service.cilium.io/weight"

// annotationNames are the names that an object of a kind may have after the domain.
var annotationNames = map[string][]string{
	"Service": {nameBackends, nameClientAddress, nameCounters, nameDrain, nameExternalFailover, nameLastResort,
		nameLimits, nameLocal, nameProbe, nameRebalance, nameRecords, nameScheduler, nameSecondChance, nameSlowStart,
		nameWeights, nameZoneDemand, nameZones},
	"EndpointSlice": {nameWeight},
}

// annotations reads those of one object. Everything wrong with them is a Warning: the rest of the object counts.
type annotations struct {
	*problemList
	of map[string]string
	// known says that the object was read before. Then an annotation with a wrong value keeps the value that it had.
	known bool
}

func readServiceAnnotations(f *problemList, o *corev1.Service, s, last *snapshot.Service) {
	a := annotations{f, o.Annotations, last != nil && last.Age.UID == s.Age.UID}
	was := &snapshot.Service{}
	if a.known {
		was = last
	}
	s.Backends = a.backends(s, was.Backends, o.Status.Conditions)
	s.Scheduling = a.scheduling(was.Scheduling, s.Backends != nil)
	s.Counters = word(&a, nameCounters, was.Counters, parseCounters, `neither "true" nor "false"`)
	s.NoRecords = word(&a, nameRecords, was.NoRecords, parseNoRecords, `neither "on" nor "off"`)
	s.SecondChance = word(&a, nameSecondChance, was.SecondChance, snapshot.ParseSecondChance,
		`none of "off", "observe" and "on"`)
	s.ExternalFailover = word(&a, nameExternalFailover, was.ExternalFailover, snapshot.ParseExternalFailover,
		`none of "cluster", "reject", "pass" and "drop"`)
	s.Limits = a.limits(was.Limits)
	s.Drain = a.duration(nameDrain, 24, was.Drain)
	s.Rebalance = a.duration(nameRebalance, 1, was.Rebalance)
	s.SlowStart = a.slowStart(s, was.SlowStart)
	s.Local = a.local(s, was.Local)
	s.LastResort = word(&a, nameLastResort, was.LastResort, snapshot.ParseLastResort, `neither "on" nor "off"`)
	s.Probe = a.probe(o, was.Probe)
	s.ClientAddress = a.clientAddress(s, was.ClientAddress)
	a.unknown("Service")
}

func readSliceAnnotations(f *problemList, of map[string]string, s, last *snapshot.Slice) {
	a := annotations{f, of, last != nil}
	var was snapshot.Weight
	if a.known && len(last.Endpoints) > 0 {
		was = last.Endpoints[0].Weight // all endpoints of a slice have the same
	}
	if w := a.weight(was); w.Given {
		for i := range s.Endpoints {
			s.Endpoints[i].Weight = w
		}
	}
	s.Triggered = a.triggered()
	a.unknown("EndpointSlice")
}

// get returns an annotation's value, and the field that holds it. It reports two names with different values.
func (a *annotations) get(name string) (text, field string, ok bool) {
	qualified, alias := annotationDomain+name, annotationAlias+name
	text, ok = a.of[qualified]
	short, shortGiven := a.of[alias]
	switch {
	case ok && shortGiven && text != short:
		a.warn(fieldOf(alias), "%s is ignored: %s is given, too, with another value", quote(short), qualified)
	case !ok && shortGiven:
		return short, fieldOf(alias), true
	}
	return text, fieldOf(qualified), ok
}

func fieldOf(name string) string { return "metadata.annotations[" + name + "]" }

// wrong reports a wrong value, and what counts in its place.
func (a *annotations) wrong(field, format string, args ...any) {
	if a.known {
		format += "; its last good value counts"
	}
	a.warn(field, format, args...)
}

// unknown reports annotations of our domain that mean nothing on a kind of objects.
func (a *annotations) unknown(kind string) {
	var found []string
	for name := range a.of {
		short, ours := ownName(name)
		if ours && !slices.Contains(annotationNames[kind], short) {
			found = append(found, name)
		}
	}
	slices.Sort(found)
	for i, name := range found {
		if i == maxObjectProblems { // looking for what was meant takes time
			a.omitted += len(found) - i
			return
		}
		short, _ := ownName(name)
		hint := "its annotations are " + strings.Join(annotationNames[kind], ", ")
		if like := nearest.Of(short, annotationNames[kind]); like != "" {
			hint = "did you mean " + quote(like) + "?"
		}
		a.warn(fieldOf(clip.Visible(name, 2*clip.Quoted)), "ignored, as %s has no annotation of this name: %s",
			map[string]string{"Service": "a Service", "EndpointSlice": "an EndpointSlice"}[kind], hint)
	}
}

// ownName returns what follows the domain, or the alias, in the name of an annotation.
func ownName(name string) (short string, ours bool) {
	if short, ours = strings.CutPrefix(name, annotationDomain); ours {
		return short, true
	}
	return strings.CutPrefix(name, annotationAlias)
}

// word reads an annotation that is one of a few words. Without it, the zero value counts.
func word[T any](a *annotations, name string, last T, parse func(string) (T, bool), otherwise string) (v T) {
	text, field, ok := a.get(name)
	if !ok {
		return v
	}
	if v, ok = parse(text); !ok {
		a.wrong(field, "%s is %s", quote(text), otherwise)
		return last
	}
	return v
}

// parseCounters reads what a Service asks of the budget for counters.
func parseCounters(text string) (snapshot.Counters, bool) {
	switch text {
	case "true":
		return snapshot.CountersFirst, true
	case "false":
		return snapshot.CountersNever, true
	}
	return snapshot.CountersByBudget, false
}

// parseNoRecords reads whether a Service's connections are to be left out of records.
func parseNoRecords(text string) (off, ok bool) { return text == "off", text == "off" || text == "on" }

// duration reads an annotation that is a time of up to so many hours. Without it, that is 0.
func (a *annotations) duration(name string, hours int, last time.Duration) time.Duration {
	text, field, ok := a.get(name)
	if !ok {
		return 0
	}
	d, err := time.ParseDuration(text)
	if err != nil || d < time.Second || d > time.Duration(hours)*time.Hour || d%time.Second != 0 {
		a.wrong(field, "%s is not a duration of whole seconds from 1s to %dh, such as 30s", quote(text), hours)
		return last
	}
	return d
}

// local reads the name of another Service of the same namespace. Of another namespace, nobody there was asked.
func (a *annotations) local(s *snapshot.Service, last string) string {
	text, field, ok := a.get(nameLocal)
	if !ok {
		return ""
	}
	of := s.Name
	namespace, name, qualified := strings.Cut(text, "/")
	if !qualified {
		namespace, name = of.Namespace, text
	}
	switch {
	case len(text) > maxLocalName || name == "" || strings.Contains(name, "/"):
		a.wrong(field, "%s is not the name of a Service, such as node-local-dns", quote(text))
		return last
	case namespace != of.Namespace:
		a.wrong(field, "%s is refused: a Service may only name one of its own namespace, %s", quote(text),
			short(of.Namespace))
		return last
	case name == of.Name:
		a.wrong(field, "%s is this Service itself: name another one, such as a cache on each node", quote(text))
		return last
	case s.Backends != nil:
		a.warn(field, ignoredWithBackends)
		return ""
	}
	return name
}

// probe reads how a Service's endpoints are probed. The kubelet probes those that a selector chooses, by the rules of
// their pods.
func (a *annotations) probe(o *corev1.Service, last snapshot.Probe) snapshot.Probe {
	p := word(a, nameProbe, last, snapshot.ParseProbe, `neither "tcp" nor "http:/path", with a path of at most 256 `+
		`printable characters`)
	if p.Asked && len(o.Spec.Selector) > 0 {
		a.warn(fieldOf(annotationDomain+nameProbe),
			"it is ignored: the Service has a selector, and the kubelet probes its pods")
		return snapshot.Probe{}
	}
	return p
}

// maxLocalName is longer than the names of any namespace and any Service.
const maxLocalName = 512

// slowStart reads a Service's slow start. It ignores that of a Service that hashes its clients, or has backends.
func (a *annotations) slowStart(s *snapshot.Service, last time.Duration) time.Duration {
	d := a.duration(nameSlowStart, 1, last)
	field := fieldOf(annotationDomain + nameSlowStart)
	switch {
	case d == 0:
	case s.Scheduling != nil && hashes(s.Scheduling.Scheduler):
		a.warn(field, "it is ignored: with the scheduler %s, all nodes must have the same table at all times",
			s.Scheduling.Scheduler)
		return 0
	case s.Backends != nil:
		a.warn(field, ignoredWithBackends)
		return 0
	}
	return d
}

// clientAddress reads whether clients from outside keep their address, as they do anyway with externalTrafficPolicy
// Local.
func (a *annotations) clientAddress(s *snapshot.Service, last snapshot.ClientAddress) snapshot.ClientAddress {
	c := word(a, nameClientAddress, last, snapshot.ParseClientAddress, `neither "keep" nor "masquerade"`)
	if c != snapshot.ClientAddressDefault && s.ExternalLocal {
		a.warn(fieldOf(annotationDomain+nameClientAddress), "it is ignored: externalTrafficPolicy is Local")
		return snapshot.ClientAddressDefault
	}
	return c
}

// maxLimits bounds the text of limits.
const maxLimits = 256

// limits reads the limits of a Service's connections; without them, there are none.
func (a *annotations) limits(last snapshot.Limits) snapshot.Limits {
	text, field, ok := a.get(nameLimits)
	if !ok {
		return snapshot.Limits{}
	}
	l, err := snapshot.ParseLimits(text[:min(len(text), maxLimits)])
	switch {
	case len(text) > maxLimits:
		a.wrong(field, "%d bytes are too many: %d at most", len(text), maxLimits)
		return last
	case err != nil:
		a.wrong(field, "%s: %w", quote(text), err)
		return last
	}
	return l
}

// triggered reads when the event happened for which the controller last changed a slice.
func (a *annotations) triggered() time.Time {
	text, ok := a.of[corev1.EndpointsLastChangeTriggerTime]
	if !ok {
		return time.Time{}
	}
	t, err := time.Parse(time.RFC3339Nano, text)
	if err != nil {
		a.warn(fieldOf(corev1.EndpointsLastChangeTriggerTime), "%s is not a time such as 2006-01-02T15:04:05Z", quote(text))
	}
	return t
}
