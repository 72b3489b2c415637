package watch

import (
	"fmt"
	"maps"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/verdict-proxy/verdict/sync/snapshot"
)

// goodAnnotations have a value for each annotation of a Service, and wrongAnnotations one that it cannot have.
var (
	goodAnnotations = map[string]string{nameScheduler: "random", nameWeights: "n1=3,n2=1", nameZones: "prefer",
		nameZoneDemand: "a=3", nameSlowStart: "30s", nameSecondChance: "off", nameDrain: "1m", nameExternalFailover: "pass",
		nameCounters: "true", nameRecords: "off", nameRebalance: "10s", nameLimits: "rate=10",
		nameBackends: `{"ports":[{"port":"http","to":[{"service":"db","port":1}]}]}`, nameLocal: "cache",
		nameLastResort: "on", nameProbe: "http:/healthz", nameClientAddress: "keep"}
	wrongAnnotations = map[string]string{nameScheduler: "rendom", nameWeights: "n1=x,n2", nameZones: "on",
		nameZoneDemand: "a", nameSlowStart: "2h", nameSecondChance: "of", nameDrain: "30", nameLimits: "rate=0",
		nameExternalFailover: "lcuster", nameCounters: "yes", nameRecords: "no", nameBackends: "x", nameRebalance: "on",
		nameLocal: "other/cache", nameLastResort: "yes", nameProbe: "udp", nameClientAddress: "kept"}
)

func annotated(in string, values map[string]string) *corev1.Service {
	s := apiService()
	s.Annotations = map[string]string{}
	for name, value := range values {
		s.Annotations[in+name] = value
	}
	return s
}

// TestAnnotationDomains: the domain and its alias are the same for every annotation.
func TestAnnotationDomains(t *testing.T) {
	if got := slices.Sorted(maps.Keys(goodAnnotations)); !slices.Equal(got, annotationNames["Service"]) {
		t.Fatalf("goodAnnotations has %v, annotationNames %v, which must be sorted", got, annotationNames["Service"])
	}
	c := &converter{}
	without, _ := c.service(apiService(), nil)
	for name, value := range goodAnnotations {
		values := map[string]string{name: value}
		if name == nameZoneDemand {
			values[nameZones] = "prefer"
		}
		one, problems := c.service(annotated(annotationDomain, values), nil)
		other, more := c.service(annotated(annotationAlias, values), nil)
		if len(problems)+len(more) > 0 || sameService(one, without) || !reflect.DeepEqual(one, other) {
			t.Errorf("%s: %+v and %+v, %v, %v", name, one, other, problems, more)
		}
	}
}

// TestUnknownAnnotations: what means nothing under a name of ours is said, with what was probably meant.
func TestUnknownAnnotations(t *testing.T) {
	s := annotated(annotationAlias,
		map[string]string{"secondchance": "off", "darin": "30s", "x": "", "second-chance": "off"})
	s.Annotations["verdict-proxy.github.io/Slow-Start"] = "30s"
	s.Annotations["verdicts/drain"] = "30s"
	s.Annotations["verdict/a\x1b[2J"] = ""
	c := &converter{}
	got, problems := c.service(s, nil)
	if got.SecondChance != snapshot.SecondChanceOff || got.Drain != 0 || invalid(problems) {
		t.Errorf("%+v", got)
	}
	ignored := "ignored, as a Service has no annotation of this name: "
	all := "its annotations are " + strings.Join(annotationNames["Service"], ", ")
	want := []string{
		"Service default/web: metadata.annotations[verdict-proxy.github.io/Slow-Start]: " + ignored +
			`did you mean "slow-start"?`,
		`Service default/web: metadata.annotations["verdict/a\x1b[2J"]: ` + ignored + all,
		"Service default/web: metadata.annotations[verdict/darin]: " + ignored + `did you mean "drain"?`,
		"Service default/web: metadata.annotations[verdict/secondchance]: " + ignored + `did you mean "second-chance"?`,
		"Service default/web: metadata.annotations[verdict/x]: " + ignored + all,
	}
	if got := lines(problems); !slices.Equal(got, want) {
		t.Errorf("got\n%s\nwant\n%s", strings.Join(got, "\n"), strings.Join(want, "\n"))
	}
	sl := apiSlice()
	sl.Annotations = map[string]string{"verdict/drain": "30s", "verdict/weihgt": "2"}
	_, problems = c.slice(sl, nil)
	want = []string{
		"EndpointSlice default/web-abc: metadata.annotations[verdict/drain]: ignored, as an EndpointSlice has no " +
			"annotation of this name: its annotations are weight",
		"EndpointSlice default/web-abc: metadata.annotations[verdict/weihgt]: ignored, as an EndpointSlice has no " +
			`annotation of this name: did you mean "weight"?`,
	}
	if got := lines(problems); !slices.Equal(got, want) {
		t.Errorf("got\n%s\nwant\n%s", strings.Join(got, "\n"), strings.Join(want, "\n"))
	}
}

// TestWrongAnnotationFallsBackAlone: a wrong value leaves the one annotation what it was, and everything else of the
// same edit counts. Where nothing was before, the default counts.
func TestWrongAnnotationFallsBackAlone(t *testing.T) {
	for name := range goodAnnotations {
		wrong := wrongAnnotations[name]
		if wrong == "" {
			t.Fatalf("wrongAnnotations has no value for %s", name)
		}
		var reported []error
		st := newStore((&converter{}).service, sameService, func(err error) { reported = append(reported, err) }, func() {})
		st.put = func(map[snapshot.Name]*snapshot.Service) {}
		update := func(o *corev1.Service) *snapshot.Service {
			reported = nil
			must(t, st.Update(o))
			return st.known[nameOf(o)]
		}
		good := update(annotated(annotationAlias, goodAnnotations))
		values := maps.Clone(goodAnnotations)
		values[name] = wrong
		o := annotated(annotationDomain, values)
		o.Spec.Ports[0].Port = 81
		got := update(o)
		want := *good
		want.Ports = []snapshot.Port{{Name: "http", Protocol: snapshot.TCP, Port: 81}}
		if !sameService(got, &want) {
			t.Errorf("%s: got %+v\nwant %+v", name, got, want)
		}
		text := fmt.Sprint(reported)
		value, _, _ := strings.Cut(wrong, ",")
		for _, part := range []string{"Service default/web", name, value, "its last good value counts"} {
			if !strings.Contains(text, part) {
				t.Errorf("%s: reported %s", name, text)
			}
		}
		if update(o); len(reported) > 0 {
			t.Errorf("%s: reported again: %v", name, reported)
		}
		o.UID = types.UID("another")
		if got := update(o); sameService(got, &want) || got.Ports[0].Port != 81 ||
			strings.Contains(fmt.Sprint(reported), "last good") {
			t.Errorf("%s: a new Service of the same name has values of the old one: %+v, %v", name, got, reported)
		}
	}
}

func TestWrongSliceAnnotationFallsBackAlone(t *testing.T) {
	c := &converter{}
	o := apiSlice()
	o.Annotations = map[string]string{"verdict/weight": "7"}
	last, _ := c.slice(o, nil)
	o.Annotations = map[string]string{"verdict-proxy.github.io/weight": "-7"}
	o.Endpoints = append(o.Endpoints, discoveryv1.Endpoint{Addresses: []string{"10.1.0.99"}})
	got, problems := c.slice(o, last)
	n := len(got.Endpoints)
	if n != len(last.Endpoints)+1 || got.Endpoints[n-1].Weight.Parts != 700 || len(problems) != 1 {
		t.Errorf("%+v, %v", got, problems)
	}
}

// TestFilesWrongAnnotation: in manifests, too, a wrong annotation holds nothing up, whatever kind of value it has; and
// an edit of something else does not say it again.
func TestFilesWrongAnnotation(t *testing.T) {
	path := filepath.Join(t.TempDir(), "a.yaml")
	text := func(port int, drain, more string) string {
		return fmt.Sprintf("apiVersion: v1\nkind: Service\nmetadata: {name: web, annotations: {verdict/drain: %s}}\n"+
			"spec: {clusterIP: 10.96.0.1, ports: [{port: %d}]}\n---\n%s", drain, port, more)
	}
	write(t, path, text(80, "1m", ""))
	v := watchFiles(t, path)
	for i, test := range []struct{ drain, problem string }{
		{"1d", `"1d" is not a duration of whole seconds from 1s to 24h, such as 30s; its last good value counts`},
		{"[30s]", "this is a list, not text: put it in quotation marks"},
		{"30", "this is a number, not text: put it in quotation marks"},
	} {
		write(t, path, text(81+i, test.drain, ""))
		v.await("the edit", func() bool {
			s := v.snap.Services[snapshot.Name{Namespace: "default", Name: "web"}]
			return s.Ports[0].Port == uint16(81+i) && s.Drain == time.Minute
		})
		got := strings.Join(v.take(1), "\n")
		want := path + ":3: Service default/web: metadata.annotations[verdict/drain]: " + test.problem
		if !strings.HasPrefix(got, want) {
			t.Errorf("reported %s, want %s", got, want)
		}
	}
	write(t, path, text(83, "30", service("api", "10.96.0.2")))
	v.awaitServices("default/api 10.96.0.2", "default/web 10.96.0.1")
	write(t, path, text(83, "30", service("api", "x")))
	if got := v.take(1); strings.Contains(fmt.Sprint(got), "annotation") {
		t.Errorf("reported %q", got)
	}
}

// TestChangeNotes: a plan says what a proxy will say of annotations, and goes on as a proxy does.
func TestChangeNotes(t *testing.T) {
	now := changeBase(t)
	name := snapshot.Name{Namespace: "shop", Name: "web"}
	was := *now.Services[name]
	was.Drain = time.Minute
	now.Apply(snapshot.Delta{Services: map[snapshot.Name]*snapshot.Service{name: &was}})
	c, err := LoadChange(t.Context(), ChangeFiles{NodeName: "n", Apply: []string{manifestOf(t, "c.yaml", `
apiVersion: v1
kind: Service
metadata: {name: web, namespace: shop, annotations: {verdict/drain: "30", verdict/secondchance: "off"}}
spec: {ports: [{name: http, port: 81}]}
`)}}, now)
	if err != nil {
		t.Fatal(err)
	}
	if got := c.Delta.Services[name]; got == nil || got.Drain != time.Minute || got.Ports[0].Port != 81 {
		t.Errorf("%+v", got)
	}
	if text := strings.Join(c.Notes, "\n"); len(c.Notes) != 2 || !strings.Contains(text, "its last good value counts") ||
		!strings.Contains(text, `did you mean "second-chance"?`) {
		t.Errorf("notes %q", c.Notes)
	}
}
