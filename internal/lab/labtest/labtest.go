// Package labtest gives package lab's hosts to tests.
package labtest

import (
	"fmt"
	"os"
	"path/filepath"
	"testing"

	"github.com/verdict-proxy/verdict/internal/lab"
)

// Main is the TestMain of a package whose tests build hosts: func TestMain(m *testing.M) { labtest.Main(m) }. Without
// the rights, the whole test program runs in a user namespace; where there is none, it fails and says why.
func Main(m interface{ Run() int }) {
	status, done, err := lab.Enter()
	switch {
	case err != nil:
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	case done:
		os.Exit(status)
	}
	os.Exit(m.Run())
}

// NewNet gives a net that is closed when the test ends.
func NewNet(t testing.TB) *lab.Net {
	t.Helper()
	n := lab.New()
	t.Cleanup(func() { Check(t, n.Close()) })
	return n
}

// NewHost adds a host to a net.
func NewHost(t testing.TB, n *lab.Net, name string) *lab.Host {
	t.Helper()
	h, err := n.NewHost(name)
	Check(t, err)
	return h
}

// NewCluster gives a cluster that is closed when the test ends.
func NewCluster(t testing.TB, c lab.Config) *lab.Cluster {
	t.Helper()
	cl, err := lab.NewCluster(c)
	Check(t, err)
	t.Cleanup(func() { Check(t, cl.Close()) })
	return cl
}

// Run runs a program inside a host, which must succeed, with text on standard input, and gives all it wrote.
func Run(t testing.TB, h *lab.Host, input, name string, args ...string) string {
	t.Helper()
	out, err := h.RunInput(input, name, args...)
	Check(t, err)
	return out
}

// Check ends the test if there is an error.
func Check(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// ConfigFile writes a configuration file of kube-proxy's with some fields.
func ConfigFile(t testing.TB, fields string) (path string) {
	t.Helper()
	path = filepath.Join(t.TempDir(), "config.conf")
	text := "apiVersion: kubeproxy.config.k8s.io/v1alpha1\nkind: KubeProxyConfiguration\n" + fields
	Check(t, os.WriteFile(path, []byte(text), 0o644))
	return path
}
