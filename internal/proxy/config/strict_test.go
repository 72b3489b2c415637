package config

import (
	"reflect"
	"slices"
	"strings"
	"testing"

	"k8s.io/apimachinery/pkg/runtime"
)

// values are what a field may be given by mistake. Each is of another type than most fields, or nothing.
var values = []string{
	"null", "~", "true", "text", `""`, "1", "-1", "1.5", "1e3", "99999999999999999999", "30", "30s", "2001-01-01",
	"[]", "[null]", "[1]", "[text]", "[[]]", "[{}]", "{}", "{a: null}", "{a: 1}", "{a: true}",
	"[{filePattern: null, verbosity: null}]",
}

// TestWrongTypes gives each field each of the values. What ends kube-proxy is reported here, and nothing else is.
func TestWrongTypes(t *testing.T) {
	tried, refused := 0, 0
	for _, row := range fieldRows {
		if strings.HasPrefix(row.name, verdictKind) {
			continue
		}
		for _, value := range values {
			text := document(row.name, value)
			theirs, err := strict([]byte(text))
			if runtime.IsStrictDecodingError(err) {
				err = nil // kube-proxy reads it once more, and passes over what it does not know
			}
			r, ours := read("f", []byte(text))
			if ours != nil {
				t.Fatalf("%s: %s: %v", row.name, value, ours)
			}
			if theirs != nil && !reflect.DeepEqual(&r.doc.KubeProxy, theirs) {
				t.Errorf("%s: %s: kube-proxy has %+v; here it is %+v", row.name, value, theirs, &r.doc.KubeProxy)
			}
			tried++
			if err != nil {
				refused++
			}
			if (err != nil) != (len(r.fieldErrors) > 0) {
				t.Errorf("%s: %s: kube-proxy says %v; here it is %v", row.name, value, err, r.fieldErrors)
			}
		}
	}
	t.Logf("%d tried, of which %d end kube-proxy", tried, refused)
	if refused == 0 {
		t.Error("nothing ends kube-proxy")
	}
}

// TestNull: a duration that is null is none, and said to be none; other fields that are null are as good as not there.
func TestNull(t *testing.T) {
	_, said := loadText(
		t,
		head+"mode: nftables\nnftables: {minSyncPeriod: null, syncPeriod: ~, masqueradeAll: null}\nclusterCIDR: null\n"+
			"conntrack: {tcpEstablishedTimeout: null, udpTimeout: null}\n",
	)
	want := []string{"f:4: nftables.minSyncPeriod: null is not a duration such as 30s or 1h30m; the default is used, 0s",
		"f:4: nftables.syncPeriod: null is not a duration such as 30s or 1h30m; the default is used, 30s",
		"f:6: conntrack.udpTimeout: null is not a duration such as 30s or 1h30m; the default is used, 0s"}
	slices.Sort(said)
	slices.Sort(want)
	if !slices.Equal(said, want) {
		t.Errorf("it says %q; want %q", said, want)
	}
}
