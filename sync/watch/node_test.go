package watch

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/rest"
)

// nodeServer has one Node, which it gives to who lists it, and takes note of patches.
type nodeServer struct {
	t       *testing.T
	node    *corev1.Node
	patches []string
	// answers are the status codes of the next patches; without one it is 200.
	answers []int
	// meanwhile is called before each patch.
	meanwhile func()
}

func (s *nodeServer) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	w.Header().Set("Content-Type", "application/json")
	if r.Method == http.MethodGet {
		if got := r.URL.Path + "?" + r.URL.RawQuery; got != "/api/v1/nodes?fieldSelector=metadata.name%3Dnode-1" {
			s.t.Errorf("it reads %s", got)
		}
		list := corev1.NodeList{TypeMeta: metav1.TypeMeta{Kind: "NodeList", APIVersion: "v1"}}
		if s.node != nil {
			list.Items = append(list.Items, *s.node)
		}
		_ = json.NewEncoder(w).Encode(list)
		return
	}
	body, _ := io.ReadAll(r.Body)
	s.patches = append(s.patches, fmt.Sprintf("%s %s %s %s", r.Method, r.URL.Path, r.Header.Get("Content-Type"), body))
	if s.meanwhile != nil {
		s.meanwhile()
	}
	code := http.StatusOK
	if len(s.answers) > 0 {
		code, s.answers = s.answers[0], s.answers[1:]
	}
	reasons := map[int]metav1.StatusReason{200: "", 403: metav1.StatusReasonForbidden, 409: metav1.StatusReasonConflict,
		422: metav1.StatusReasonInvalid, 500: metav1.StatusReasonInternalError}
	w.WriteHeader(code)
	_ = json.NewEncoder(w).Encode(metav1.Status{TypeMeta: metav1.TypeMeta{Kind: "Status", APIVersion: "v1"},
		Status: "Failure", Code: int32(code), Reason: reasons[code], Message: "as the server says"})
}

func newNodeWriter(t *testing.T, s *nodeServer) *NodeWriter {
	t.Helper()
	server := httptest.NewServer(s)
	t.Cleanup(server.Close)
	w, err := NewNodeWriter(&rest.Config{Host: server.URL, QPS: -1}, "node-1")
	if err != nil {
		t.Fatal(err)
	}
	return w
}

const taintKey = "verdict-proxy.github.io/not-programmed"

func taints(keys ...string) (out []corev1.Taint) {
	for _, k := range keys {
		out = append(out, corev1.Taint{Key: k, Effect: corev1.TaintEffectNoSchedule})
	}
	return out
}

// TestRemoveTaint: only taints with the key go, by a patch that tests each place; without one there is no patch.
func TestRemoveTaint(t *testing.T) {
	const head = "PATCH /api/v1/nodes/node-1 application/json-patch+json "
	op := func(i int) string {
		return fmt.Sprintf(`{"op":"test","path":"/spec/taints/%d/key","value":"%s"},`+
			`{"op":"remove","path":"/spec/taints/%[1]d"}`, i, taintKey)
	}
	for _, c := range []struct {
		taints  []corev1.Taint
		patches []string
	}{
		{nil, nil},
		{taints("a", "b"), nil},
		{taints(taintKey), []string{head + "[" + op(0) + "]"}},
		{taints("a", taintKey, "b", taintKey), []string{head + "[" + op(3) + "," + op(1) + "]"}},
	} {
		s := &nodeServer{t: t, node: &corev1.Node{Spec: corev1.NodeSpec{Taints: c.taints}}}
		done, err := newNodeWriter(t, s).Apply(t.Context(), NodeWish{WithoutTaint: taintKey})
		if err != nil || done.Taint != (c.patches != nil) || done.Condition || !slices.Equal(s.patches, c.patches) {
			t.Errorf("%v: %+v %v %q", c.taints, done, err, s.patches)
		}
	}
}

// TestTaintConflicts: if the Node has changed meanwhile, the patch is made from a new reading, some times.
func TestTaintConflicts(t *testing.T) {
	for _, code := range []int{http.StatusConflict, http.StatusUnprocessableEntity} {
		s := &nodeServer{t: t, node: &corev1.Node{Spec: corev1.NodeSpec{Taints: taints(taintKey)}}, answers: []int{code}}
		s.meanwhile = func() { s.node.Spec.Taints = taints("other", taintKey) }
		done, err := newNodeWriter(t, s).Apply(t.Context(), NodeWish{WithoutTaint: taintKey})
		if err != nil || !done.Taint || len(s.patches) != 2 || !strings.Contains(s.patches[1], "/spec/taints/1/key") {
			t.Errorf("after %d: %+v %v %q", code, done, err, s.patches)
		}
		s = &nodeServer{t: t, node: s.node, answers: slices.Repeat([]int{code}, 100)}
		if _, err = newNodeWriter(t, s).Apply(t.Context(), NodeWish{WithoutTaint: taintKey}); err == nil ||
			len(s.patches) != maxConflicts {
			t.Errorf("it is always %d: %v after %d patches", code, err, len(s.patches))
		}
	}
}

// TestSetCondition: a condition that the Node has is not written again, and its time changes with its status alone.
func TestSetCondition(t *testing.T) {
	want := NodeCondition{Type: "ServicesProgrammed", Status: "True", Reason: "Programmed", Message: "all is well"}
	old := metav1.NewTime(time.Now().Add(-time.Hour).Truncate(time.Second))
	has := func(status, reason string) []corev1.NodeCondition {
		return []corev1.NodeCondition{{Type: "Ready", Status: "True"}, {Type: "ServicesProgrammed",
			Status: corev1.ConditionStatus(status), Reason: reason, Message: "all is well", LastTransitionTime: old}}
	}
	for _, c := range []struct {
		name       string
		conditions []corev1.NodeCondition
		written    bool
		keepsTime  bool
	}{
		{"none", nil, true, false}, {"the same", has("True", "Programmed"), false, false},
		{"another reason", has("True", "Else"), true, true}, {"another status", has("False", "Programmed"), true, false},
	} {
		s := &nodeServer{t: t, node: &corev1.Node{Status: corev1.NodeStatus{Conditions: c.conditions}}}
		done, err := newNodeWriter(t, s).Apply(t.Context(), NodeWish{Condition: want})
		if err != nil || done.Condition != c.written || len(s.patches) > 1 || (len(s.patches) == 1) != c.written {
			t.Errorf("%s: %+v %v %q", c.name, done, err, s.patches)
		}
		if !c.written {
			continue
		}
		const head = "PATCH /api/v1/nodes/node-1/status application/strategic-merge-patch+json "
		text, ok := strings.CutPrefix(s.patches[0], head)
		var patch struct {
			Status struct{ Conditions []corev1.NodeCondition }
		}
		if err := json.Unmarshal([]byte(text), &patch); !ok || err != nil || len(patch.Status.Conditions) != 1 {
			t.Fatalf("%s: %v %q", c.name, err, s.patches)
		}
		got := patch.Status.Conditions[0]
		if got.Type != "ServicesProgrammed" || got.Status != "True" || got.Message != want.Message ||
			got.LastTransitionTime.Equal(&old) != c.keepsTime || time.Since(got.LastHeartbeatTime.Time) > time.Minute {
			t.Errorf("%s: %+v", c.name, got)
		}
	}
}

// TestNodeErrors: a right that is missing is named, for each of the two; a Node that is not there is no failure.
func TestNodeErrors(t *testing.T) {
	wish := NodeWish{Condition: NodeCondition{Type: "ServicesProgrammed", Status: "True",
		Message: strings.Repeat("x", 5000)}, WithoutTaint: taintKey}
	s := &nodeServer{t: t, node: &corev1.Node{Spec: corev1.NodeSpec{Taints: taints(taintKey)}}, answers: []int{403, 403}}
	_, err := newNodeWriter(t, s).Apply(t.Context(), wish)
	for _, part := range []string{"resources: [nodes], verbs: [patch]", "resources: [nodes/status], verbs: [patch]",
		"as the server says"} {
		if err == nil || !strings.Contains(err.Error(), part) {
			t.Errorf("%q is not in %v", part, err)
		}
	}
	if len(s.patches) != 2 || len(s.patches[1]) > 2*maxNote {
		t.Errorf("%d patches, the last one of %d bytes", len(s.patches), len(s.patches[len(s.patches)-1]))
	}
	// One that fails does not keep the other from being written.
	s = &nodeServer{t: t, node: s.node, answers: []int{500, 200}}
	if done, err := newNodeWriter(t, s).Apply(t.Context(), wish); err == nil || done.Taint || !done.Condition {
		t.Errorf("%+v %v", done, err)
	}
	s = &nodeServer{t: t}
	if _, err := newNodeWriter(t, s).Apply(t.Context(), wish); !errors.Is(err, ErrNoNode) {
		t.Errorf("without a Node: %v", err)
	}
}
