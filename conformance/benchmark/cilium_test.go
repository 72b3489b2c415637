package benchmark

import (
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/verdict-proxy/verdict/conformance/benchmark/results"
)

// An agent has a control group with this process in it, and a file system of BPF, and leaves nothing.
func TestAgentFiles(t *testing.T) {
	before, err := ownGroup()
	if err != nil {
		t.Fatal(err)
	}
	dir := filepath.Join(t.TempDir(), "files")
	a, err := newAgent(dir)
	if err != nil {
		t.Fatal(err)
	}
	group, err := ownGroup()
	if err != nil || group == before || filepath.Base(group) != filepath.Base(a.group) {
		t.Errorf("this process is in %q, and was in %q; the agent's group is %s: %v", group, before, a.group, err)
	}
	if err := os.Mkdir(filepath.Join(a.maps, "pins"), 0o700); err != nil {
		t.Errorf("in the file system of BPF: %v", err)
	}
	if _, err := os.Stat(filepath.Join(a.sockets, "cgroup.procs")); err != nil {
		t.Errorf("the group as a mount: %v", err)
	}
	if err := a.close(); err != nil {
		t.Fatal(err)
	}
	if after, err := ownGroup(); err != nil || after != before {
		t.Errorf("afterwards this process is in %q, and was in %q: %v", after, before, err)
	}
	left, err := filepath.Glob(filepath.Join(dir, "*", "*"))
	if err != nil || len(left) > 0 {
		t.Errorf("it left %q: %v", left, err)
	}
}

// A command with mounts of its own finds its files in /run, and cannot change the machine's sysctls.
func TestOwnMounts(t *testing.T) {
	run := t.TempDir()
	if err := os.WriteFile(filepath.Join(run, "own"), []byte("own"), 0o600); err != nil {
		t.Fatal(err)
	}
	const script = `cat /run/own
		{ cat /proc/sys/kernel/panic >/proc/sys/kernel/panic; } 2>/dev/null && echo written
		test -w /proc/sys/net/ipv4/ip_forward`
	args := []string{"--mount", "/bin/sh", "-ec", ownMounts, run, "/bin/sh", "-c", script}
	out, err := exec.Command("/usr/bin/unshare", args...).Output()
	if err != nil || string(out) != "own" {
		t.Errorf("%q, %v", out, err)
	}
}

func TestAgentEntries(t *testing.T) {
	for size, want := range map[results.Size]int{
		{Services: 100, Endpoints: 5}: 1 << 16, {Services: 1000, Endpoints: 10}: 1 << 16,
		{Services: 10000, Endpoints: 10}: 1 << 18, {Services: 100000, Endpoints: 10}: 1 << 21,
	} {
		n := &node{world: &world{cluster: newCluster(size)}}
		if got := n.agentEntries(); got != want {
			t.Errorf("%s: %d entries, want %d", size, got, want)
		}
	}
}

// An agent that does not listen, or is not ready, is asked again; one that refuses says why.
func TestCreateEndpoint(t *testing.T) {
	status := http.StatusServiceUnavailable
	var asked string
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		body, _ := io.ReadAll(r.Body)
		asked = r.Method + " " + r.URL.Path + " " + string(body)
		w.WriteHeader(status)
		_, _ = io.WriteString(w, "because")
	}))
	client := server.Client()
	client.Transport = toServer{server.URL, client.Transport}
	if created, err := createEndpoint(t.Context(), client, []byte("body")); created || err != nil {
		t.Errorf("not ready: %v, %v", created, err)
	}
	if asked != "PUT /v1/endpoint/cni-attachment-id:client:eth0 body" {
		t.Errorf("it asked %q", asked)
	}
	status = http.StatusBadRequest
	if created, err := createEndpoint(t.Context(), client, nil); created || err == nil ||
		!strings.Contains(err.Error(), "400 Bad Request: because") {
		t.Errorf("refused: %v, %v", created, err)
	}
	status = http.StatusCreated
	if created, err := createEndpoint(t.Context(), client, nil); !created || err != nil {
		t.Errorf("created: %v, %v", created, err)
	}
	server.Close()
	if created, err := createEndpoint(t.Context(), client, nil); created || err != nil {
		t.Errorf("it does not listen: %v, %v", created, err)
	}
}

// toServer sends every request to one server.
type toServer struct {
	url string
	by  http.RoundTripper
}

func (s toServer) RoundTrip(r *http.Request) (*http.Response, error) {
	r = r.Clone(r.Context())
	r.URL.Host = strings.TrimPrefix(s.url, "http://")
	return s.by.RoundTrip(r)
}
