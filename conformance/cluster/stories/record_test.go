package stories

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/verdict-proxy/verdict/conformance/cluster"
	"github.com/verdict-proxy/verdict/internal/lab/blackbox"
)

// What failed while no endpoint was usable is the cluster's; what failed before, or long after, is not.
func TestOfCluster(t *testing.T) {
	at := func(s int) time.Time { return time.Unix(int64(s), 0) }
	row := Row{Report: cluster.Report{Failures: []blackbox.Failure{{Failed: at(11)}, {Failed: at(12)},
		{Failed: at(19), Held: true}, {Failed: at(20)}, {Failed: at(40)}, {Failed: at(60)}}}}
	if n := row.ofCluster([]blackbox.Span{{From: at(12), To: at(20)}, {From: at(50)}}); n != 3 {
		t.Errorf("%d failures are the cluster's; want those at 12, 20 and 60 s", n)
	}
}

// A line is written when something has changed, and not before.
func TestRecordOfChanges(t *testing.T) {
	file, err := os.Create(filepath.Join(t.TempDir(), "cluster.log"))
	if err != nil {
		t.Fatal(err)
	}
	r := &record{file: file, last: map[string]string{}}
	node := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "a"}}
	set := func(status corev1.ConditionStatus) {
		node.Status.Conditions = []corev1.NodeCondition{{Type: corev1.NodeReady, Status: status}}
		r.see(node, false)
	}
	set(corev1.ConditionTrue)
	set(corev1.ConditionTrue)
	set(corev1.ConditionUnknown)
	r.see(&discoveryv1.EndpointSlice{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "s"}}, true)
	text, err := os.ReadFile(file.Name())
	if err != nil {
		t.Fatal(err)
	}
	lines := strings.Split(strings.TrimSpace(string(text)), "\n")
	for i, want := range []string{"node a: Ready=True", "node a: Ready=Unknown", "slice default/s: gone"} {
		if i >= len(lines) || !strings.HasSuffix(lines[i], want) {
			t.Errorf("line %d of %q: want %q", i, lines, want)
		}
	}
	if len(lines) != 3 {
		t.Errorf("%d lines", len(lines))
	}
}

// The log of a container is there after the kubelet has removed it.
func TestLogsStay(t *testing.T) {
	dir := t.TempDir()
	pods := filepath.Join(dir, "node")
	name := filepath.Join(pods, "kube-system_verdict_uid", "verdict", "0.log")
	r := &record{dir: dir, logs: map[string]bool{}}
	for _, d := range []string{filepath.Dir(name), filepath.Join(dir, "pods")} {
		if err := os.MkdirAll(d, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.WriteFile(name, []byte("first\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	for range 2 {
		if err := r.linkLogs(pods); err != nil {
			t.Fatal(err)
		}
	}
	f, err := os.OpenFile(name, os.O_APPEND|os.O_WRONLY, 0)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := f.WriteString("last\n"); err != nil {
		t.Fatal(err)
	}
	if err := os.RemoveAll(pods); err != nil {
		t.Fatal(err)
	}
	got, err := os.ReadFile(filepath.Join(dir, "pods", "kube-system_verdict_uid_verdict_0.log"))
	if err != nil || string(got) != "first\nlast\n" {
		t.Errorf("%q, %v", got, err)
	}
}
