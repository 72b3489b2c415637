package main

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
	"unicode"

	"github.com/verdict-proxy/verdict/internal/lab/labtest"
)

// hostileObjects have words of their authors that would clear a screen.
const hostileObjects = `
apiVersion: v1
kind: Service
metadata: {name: web, namespace: shop}
spec:
  clusterIP: 10.96.0.9
  clusterIPs: [10.96.0.9]
  ports: [{port: 80, protocol: TCP}]
---
apiVersion: v1
kind: Service
metadata: {name: "bad\e[2Jname", namespace: "shop\u009b2J", annotations: {verdict/drain: "\e[2J"}}
spec:
  clusterIP: 10.96.0.9
  clusterIPs: [10.96.0.9]
  ports: [{port: 80, protocol: TCP}]
---
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata: {name: web, namespace: shop, labels: {kubernetes.io/service-name: web}}
addressType: IPv4
ports: [{name: "", port: 80, protocol: TCP}]
endpoints:
- {addresses: [10.244.1.9], nodeName: "n\e[2J\nOutcome", zone: "z\u009b2J\u202e", conditions: {ready: true}}
- {addresses: [10.244.1.10], zone: "z\e[2J", conditions: {ready: true}, hints: {forNodes: [{name: "n\e[2J"}]}}
---
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata: {name: web-2, namespace: shop, labels: {kubernetes.io/service-name: web}}
addressType: IPv4
ports: [{name: "a\e[2J", port: 80, protocol: TCP}]
endpoints: [{addresses: [10.244.1.11], conditions: {ready: true}}]
`

// TestHostileObjects: what objects say reaches no terminal as something that controls it, whatever prints it.
func TestHostileObjects(t *testing.T) {
	path := filepath.Join(t.TempDir(), "hostile.yaml")
	labtest.Check(t, os.WriteFile(path, []byte(hostileObjects), 0o644))
	for _, args := range []string{"explain 192.0.2.1 10.96.0.9:80 --from", "explain 192.0.2.1 10.96.0.9:80 --json --from",
		"render --from", "plan --live=false --from ../../examples/cluster.yaml -f"} {
		words := append(strings.Fields(args), path, "--hostname-override", "n")
		var out string
		var err error
		stderr := captureStderr(t, func() { out, err = command(words...) })
		if !strings.Contains(out+stderr, "2J") {
			t.Errorf("%s prints nothing of it: %v: %s%s", args, err, out, stderr)
		}
		checkHarmless(t, args, out)
		checkHarmless(t, args, stderr)
	}
}

func checkHarmless(t *testing.T, what, text string) {
	t.Helper()
	for line := range strings.Lines(text) {
		if strings.HasPrefix(line, "Outcome (") ||
			strings.ContainsFunc(strings.Trim(line, "\t\n"), func(r rune) bool { return !unicode.IsPrint(r) }) {
			t.Errorf("%s prints %q", what, line)
		}
	}
}

// captureStderr returns what a function writes to standard error.
func captureStderr(t *testing.T, f func()) string {
	t.Helper()
	file, err := os.Create(filepath.Join(t.TempDir(), "stderr"))
	labtest.Check(t, err)
	before := os.Stderr
	os.Stderr = file
	defer func() { os.Stderr = before }()
	f()
	labtest.Check(t, file.Close())
	text, err := os.ReadFile(file.Name())
	labtest.Check(t, err)
	return string(text)
}
