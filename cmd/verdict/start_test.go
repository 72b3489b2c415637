package main

import (
	"fmt"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/verdict-proxy/verdict/internal/lab"
	"github.com/verdict-proxy/verdict/internal/lab/labtest"
)

// hostState is what a start could change in a network namespace: a line for each parameter, rule, link and route.
func hostState(t *testing.T, h *lab.Host) string {
	t.Helper()
	var out strings.Builder
	labtest.Check(t, h.Do(func() error {
		return filepath.WalkDir("/proc/sys/net", func(path string, d fs.DirEntry, err error) error {
			if err != nil || d.IsDir() || filepath.Base(path) == "nf_conntrack_count" {
				return err
			}
			if value, err := os.ReadFile(path); err == nil { // some can only be written
				fmt.Fprintf(&out, "%s %s\n", path, value)
			}
			return nil
		})
	}))
	for _, args := range [][]string{{"link"}, {"address"}, {"route", "show", "table", "all"}, {"rule"}} {
		out.WriteString(labtest.Run(t, h, "", "ip", args...))
	}
	out.WriteString(labtest.Nfts(t)[0].List(t, h))
	return out.String()
}

// badStart is a command line with which no proxy can work.
type badStart struct {
	what, wrong string
	// before, if not empty, are programs that start verdict.
	before []string
	flags  []string
}

func badStarts(t *testing.T, good string) []badStart {
	t.Helper()
	dir := t.TempDir()
	file := func(name, text string) string {
		path := filepath.Join(dir, name)
		labtest.Check(t, os.WriteFile(path, []byte(text), 0o644))
		return path
	}
	missing := filepath.Join(dir, "missing")
	from := []string{"--from", good}
	secret := file("secret.yaml", "")
	labtest.Check(t, os.Chmod(secret, 0))
	unprivileged := []string{"setpriv", "--bounding-set=-dac_override,-dac_read_search"}
	return []badStart{
		{"no such manifests", "manifests: " + missing, nil, []string{"--from", missing}},
		{"no such directory", "not a directory", nil, []string{"--from", good + "/slices"}},
		{"manifests that cannot be read", "cannot read it: permission denied", unprivileged, []string{"--from", secret}},
		{"no such kubeconfig", missing, nil, []string{"--kubeconfig", missing}},
		{"a kubeconfig that is none", "kubeconfig", nil, []string{"--kubeconfig", file("kubeconfig", "clusters: 7\n")}},
		{"neither kubeconfig nor cluster", "in-cluster configuration", nil, nil},
		{"no such configuration", missing, nil, append(from, "--config", missing)},
		{"a configuration that is none", "config.yaml", nil, append(from, "--config", file("config.yaml", "kind: [\n"))},
		{"another kind of configuration", "no KubeProxyConfiguration", nil, append(from, "--config",
			file("kubelet.yaml", "apiVersion: kubelet.config.k8s.io/v1beta1\nkind: KubeletConfiguration\n"))},
		{"no such flag", "--form", nil, []string{"--form", good}},
		{"a flag with a wrong value", "cluster-cidr", nil, append(from, "--cluster-cidr", "10.0.0.0/99")},
		{"no rights", "no right to change nf_tables", []string{"setpriv", "--bounding-set=-net_admin"}, from},
		{"no such scheduler", "nosuch", nil, append(from, "--proxy-mode", "ipvs", "--ipvs-scheduler", "nosuch")},
	}
}

// TestBadStart: a start that cannot work ends with an error, changes nothing on the host, and leaves the proxy that
// runs alone.
func TestBadStart(t *testing.T) {
	v := newVictim(t)
	node := v.cluster.Node
	good := filepath.Join(v.dir, "services.yaml")
	program, err := os.Executable()
	labtest.Check(t, err)
	refused := func(bad badStart) {
		t.Helper()
		before := hostState(t, node)
		line := append(append([]string{"timeout", "20"}, bad.before...), program, "run", "--hostname-override", "node")
		line = append(line, bad.flags...)
		cmd := node.Command(line[0], line[1:]...)
		cmd.Env = append(os.Environ(), beVerdict+"=1", "KUBERNETES_SERVICE_HOST=")
		out, err := cmd.CombinedOutput()
		if err == nil || !strings.Contains(string(out), bad.wrong) {
			t.Errorf("%s: %v; want an error with %q:\n%s", bad.what, err, bad.wrong, out)
		}
		if after := hostState(t, node); after != before {
			t.Errorf("%s: it changed the host: %s", bad.what, labtest.FirstDifference(after, before))
		}
	}
	for _, bad := range badStarts(t, good) {
		refused(bad)
	}
	hold(t, node, 10256, func() {
		refused(
			badStart{"the port is taken", "address already in use", nil, []string{"--from", good, "--bind-address-hard-fail"}},
		)
	})

	before := hostState(t, node)
	v.start()
	defer func() {
		_ = v.keeper.Process.Signal(syscall.SIGTERM)
		_ = v.keeper.Wait()
	}()
	v.wait("all Services are programmed", 1)
	v.wait("set a sysctl", 1)
	if hostState(t, node) == before {
		t.Fatal("a good start changes nothing, so this shows nothing")
	}
	for _, bad := range badStarts(t, good) {
		refused(bad)
	}
	if said := v.said(); strings.Contains(said, "another proxy takes over") {
		t.Errorf("the proxy had to make room:\n%s", said)
	}
}

// hold has somebody else listen at a port of a host.
func hold(t *testing.T, h *lab.Host, port int, during func()) {
	t.Helper()
	var taken net.Listener
	labtest.Check(t, h.Do(func() (err error) {
		taken, err = net.Listen("tcp", fmt.Sprintf(":%d", port))
		return err
	}))
	defer taken.Close()
	during()
}
