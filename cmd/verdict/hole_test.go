package main

import (
	"encoding/json"
	"fmt"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/verdict-proxy/verdict/internal/lab"
	"github.com/verdict-proxy/verdict/internal/lab/labtest"
	"github.com/verdict-proxy/verdict/internal/system/ipfamily"
	"github.com/verdict-proxy/verdict/internal/system/testkit"
	"github.com/verdict-proxy/verdict/sync/snapshot"
)

// hub is an API server, over HTTP/2, with one Service whose endpoint may change.
type hub struct {
	t *testing.T
	*httptest.Server

	mu       sync.Mutex
	version  int
	endpoint netip.Addr
	changed  chan struct{} // closed, and made anew, with each change
}

// newHub serves at a host.
func newHub(t *testing.T, host *lab.Host, endpoint netip.Addr) *hub {
	t.Helper()
	h := &hub{t: t, version: 1, endpoint: endpoint, changed: make(chan struct{})}
	h.Server = httptest.NewUnstartedServer(h)
	h.Listener.Close()
	var err error
	h.Listener, err = host.Listen("tcp", netip.AddrPortFrom(host.IP(ipfamily.IPv4), 6443).String())
	labtest.Check(t, err)
	h.EnableHTTP2 = true
	h.StartTLS()
	t.Cleanup(func() {
		h.CloseClientConnections()
		h.Close()
	})
	return h
}

// move sends the Service elsewhere.
func (h *hub) move(endpoint netip.Addr) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.version++
	h.endpoint = endpoint
	close(h.changed)
	h.changed = make(chan struct{})
}

// now gives the objects of a resource and their version, and what is closed when they change.
func (h *hub) now(resource string) (items []any, version int, changed chan struct{}) {
	h.mu.Lock()
	defer h.mu.Unlock()
	text := ""
	switch resource {
	case "services":
		text = fmt.Sprintf(`{"metadata": {"name": "web", "namespace": "default"}, "spec": {
			"clusterIP": %q, "clusterIPs": [%[1]q],
			"ports": [{"port": 80, "protocol": "TCP"}]}}`, lab.Nth(lab.ServiceRange[0], 1))
	case "endpointslices":
		text = fmt.Sprintf(`{"kind": "EndpointSlice", "apiVersion": "discovery.k8s.io/v1", "metadata": {
				"name": "web-1", "namespace": "default", "resourceVersion": "%d", "labels": {"kubernetes.io/service-name": "web"}},
			"addressType": "IPv4", "ports": [{"name": "", "port": 8080, "protocol": "TCP"}],
			"endpoints": [{"addresses": [%q], "nodeName": "node"}]}`, h.version, h.endpoint)
	case "nodes":
		text = `{"metadata": {"name": "node"}, "status": {"addresses": [{"type": "InternalIP", "address": "192.0.2.10"}]}}`
	}
	if text != "" {
		items = []any{json.RawMessage(text)}
	}
	return items, h.version, h.changed
}

var hubKinds = map[string][2]string{
	"services": {"v1", "ServiceList"}, "endpointslices": {"discovery.k8s.io/v1", "EndpointSliceList"},
	"nodes": {"v1", "NodeList"}, "servicecidrs": {"networking.k8s.io/v1", "ServiceCIDRList"},
}

func (h *hub) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	if r.ProtoMajor != 2 {
		h.t.Errorf("%s %s", r.Proto, r.URL)
	}
	w.Header().Set("Content-Type", "application/json")
	resource := r.URL.Path[strings.LastIndex(r.URL.Path, "/")+1:]
	kind, ok := hubKinds[resource]
	switch {
	case !ok: // an event
		w.WriteHeader(http.StatusCreated)
		fmt.Fprint(w, `{"kind": "Status", "apiVersion": "v1", "status": "Success"}`)
	case r.URL.Query().Has("sendInitialEvents"):
		w.WriteHeader(http.StatusUnprocessableEntity)
		fmt.Fprint(w, `{"kind": "Status", "apiVersion": "v1", "status": "Failure", "reason": "Invalid", "code": 422}`)
	case r.URL.Query().Has("watch"):
		h.watch(w, r, resource)
	default:
		items, version, _ := h.now(resource)
		labtest.Check(h.t, json.NewEncoder(w).Encode(map[string]any{"kind": kind[1], "apiVersion": kind[0], "items": items,
			"metadata": map[string]string{"resourceVersion": strconv.Itoa(version)}}))
	}
}

// watch sends the slice each time it changes.
func (h *hub) watch(w http.ResponseWriter, r *http.Request, resource string) {
	known, _ := strconv.Atoi(r.URL.Query().Get("resourceVersion"))
	w.(http.Flusher).Flush()
	for {
		items, version, changed := h.now(resource)
		if version > known && resource == "endpointslices" {
			if json.NewEncoder(w).Encode(map[string]any{"type": "MODIFIED", "object": items[0]}) != nil {
				return
			}
			w.(http.Flusher).Flush()
		}
		known = version
		select {
		case <-changed:
		case <-r.Context().Done():
			return
		}
	}
}

// kubeconfig is for clients of the server, whose certificate is for another address.
func (h *hub) kubeconfig() string {
	file := filepath.Join(h.t.TempDir(), "kubeconfig")
	labtest.Check(h.t, os.WriteFile(file, fmt.Appendf(nil, `{"apiVersion": "v1", "kind": "Config", "current-context": "c",
		"clusters": [{"name": "c", "cluster": {"server": %q, "insecure-skip-tls-verify": true}}], "users": [{"name": "u"}],
		"contexts": [{"name": "c", "context": {"cluster": "c", "user": "u"}}]}`, h.URL), 0o600))
	return file
}

// hole drops all packets between a host and the API server, without a word, and counts attempts to connect.
const hole = `table inet hole {
	counter attempts { }
	chain input { type filter hook input priority -400; tcp sport 6443 drop; }
	chain output {
		type filter hook output priority -400;
		tcp dport 6443 tcp flags & (syn | ack) == syn counter name attempts
		tcp dport 6443 drop
	}
}`

// TestBlackHole: packets to the API server and from it vanish. The client notices by pings over HTTP/2, which only
// come and go faster here than usual, since TCP would not for a quarter of an hour; meanwhile Services stay; and once
// packets arrive again, what has changed comes into force.
func TestBlackHole(t *testing.T) {
	s := newShown(t, newLog(t))
	_, err := s.cluster.Pods[1].Serve(snapshot.TCP, 8080)
	labtest.Check(t, err)
	first, second := s.cluster.Pods[0], s.cluster.Pods[1]
	api := newHub(t, s.cluster.Outside, first.IP(ipfamily.IPv4))
	s.env = []string{"HTTP2_READ_IDLE_TIMEOUT_SECONDS=1", "HTTP2_PING_TIMEOUT_SECONDS=1"}
	s.startWith("--kubeconfig", api.kubeconfig())
	s.wait("all Services are programmed", 1)
	s.sends(first)

	labtest.Run(t, s.cluster.Node, hole, "nft", "-f", "-")
	api.move(second.IP(ipfamily.IPv4))
	testkit.Eventually(t, patience, "somebody notices", func() bool {
		attempts := labtest.Run(t, s.cluster.Node, "", "nft", "list", "counter", "inet", "hole", "attempts")
		return !strings.Contains(attempts, "packets 0 ")
	}, s.said)
	s.sends(first)
	labtest.Run(t, s.cluster.Node, "", "nft", "delete", "table", "inet", "hole")
	testkit.Eventually(t, 2*time.Minute, "the change comes", func() bool { return s.sentTo() == second.Name }, s.said)
	s.ends()
}

// sentTo gives the name of the endpoint that a new connection gets; empty if none.
func (s *shown) sentTo() string {
	at := netip.AddrPortFrom(s.clusterIP(), 80)
	r := s.cluster.Outside.Dial(snapshot.TCP, at, lab.Options{Timeout: 10 * time.Second})
	return r.Endpoint
}

func (s *shown) sends(to *lab.Host) {
	s.t.Helper()
	if got := s.sentTo(); got != to.Name {
		s.t.Fatalf("a new connection is sent to %q, not to %s\n%s", got, to.Name, s.said())
	}
}
