package gateway

import (
	"bytes"
	"io/fs"
	"testing"

	"sigs.k8s.io/gateway-api/conformance"
)

// TestSwapped finds no listener of HTTP in what is swapped, every other line as it is, and other manifests untouched.
func TestSwapped(t *testing.T) {
	m := layer4{conformance.Manifests}
	for _, name := range swapped {
		before, after := read(t, conformance.Manifests, name), read(t, m, name)
		for _, left := range []string{"protocol: HTTP", "hostname:", "certificateRefs"} {
			if bytes.Contains(after, []byte(left)) {
				t.Errorf("%s still has %q", name, left)
			}
		}
		for _, same := range []string{"kind: Gateway\n", "kind: Deployment\n", "kind: Service\n", "kind: Namespace\n",
			"port: 80\n"} {
			if b, a := bytes.Count(before, []byte(same)), bytes.Count(after, []byte(same)); a != b {
				t.Errorf("%s: %q stands there %d times, want %d", name, same, a, b)
			}
		}
	}
	const other = "tests/tcproute-weighted-routing.yaml"
	if !bytes.Equal(read(t, conformance.Manifests, other), read(t, m, other)) {
		t.Errorf("%s is another one", other)
	}
}

func read(t *testing.T, from fs.FS, name string) []byte {
	t.Helper()
	text, err := fs.ReadFile(from, name)
	if err != nil {
		t.Fatal(err)
	}
	return text
}
