package labtest

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

// NoNamespacesLeft fails the test if a thread or a descriptor of this process is in another network namespace than this
// thread. Threads and descriptors have ten seconds to go.
func NoNamespacesLeft(t testing.TB) {
	t.Helper()
	own, err := os.Readlink("/proc/self/ns/net")
	Check(t, err)
	var others []string
	for deadline := time.Now().Add(10 * time.Second); time.Now().Before(deadline); time.Sleep(10 * time.Millisecond) {
		others = nil
		for _, pattern := range []string{"/proc/self/task/*/ns/net", "/proc/self/fd/*"} {
			links, _ := filepath.Glob(pattern)
			for _, link := range links {
				if ns, err := os.Readlink(link); err == nil && strings.HasPrefix(ns, "net:") && ns != own {
					others = append(others, link+" "+ns)
				}
			}
		}
		if others == nil {
			return
		}
	}
	t.Errorf("network namespaces are left: %v", others)
}
