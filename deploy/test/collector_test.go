package deploy

import (
	"bytes"
	"context"
	"encoding/base64"
	"encoding/json"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	rbacv1 "k8s.io/api/rbac/v1"

	"github.com/verdict-proxy/verdict/internal/lab/control"
	"github.com/verdict-proxy/verdict/internal/proxy/everywhere"
	"github.com/verdict-proxy/verdict/internal/proxy/status"
	"github.com/verdict-proxy/verdict/internal/system/testkit"
)

// collectorAPI is an API server with two nodes, of which one is connected and the other is gone, and a Service.
type collectorAPI struct {
	recorder
	mu    sync.Mutex
	lease []byte
}

func (a *collectorAPI) ServeHTTP(w http.ResponseWriter, q *http.Request) {
	verb, _, rest := a.note(q)
	name := strings.Join(rest[1:], "/")
	a.mu.Lock()
	defer a.mu.Unlock()
	switch {
	case rest[0] == "leases" && verb == "list", rest[0] == "leases" && verb == "get" && name != "verdict-collector":
		http.NotFound(w, q)
	case rest[0] == "leases" && verb == "get" && a.lease == nil:
		http.NotFound(w, q)
	case rest[0] == "leases" && verb == "get":
		_, _ = w.Write(a.lease)
	case rest[0] == "leases":
		var b bytes.Buffer
		_, _ = b.ReadFrom(q.Body)
		a.lease = b.Bytes()
		_, _ = w.Write(a.lease)
	case rest[0] == "tokenreviews":
		w.WriteHeader(http.StatusCreated)
		fmt.Fprint(w, `{"status":{"authenticated":true,"audiences":["verdict-collector"],"user":{
			"username":"system:serviceaccount:kube-system:verdict",
			"extra":{"authentication.kubernetes.io/node-name":["a"]}}}}`)
	case rest[0] == "services":
		fmt.Fprint(w, `{"metadata":{"namespace":"shop","name":"cart","resourceVersion":"5"},"spec":{
			"clusterIP":"10.43.0.9","clusterIPs":["10.43.0.9"],"selector":{"app":"cart"},"ports":[{"port":80}]}}`)
	case rest[0] == "endpointslices":
		fmt.Fprint(w, `{"metadata":{"resourceVersion":"9"},"items":[]}`)
	case rest[0] == "daemonsets":
		fmt.Fprint(w, `{"metadata":{"namespace":"kube-system","name":"verdict","uid":"u","resourceVersion":"3"},
			"spec":{"selector":{"matchLabels":{"app.kubernetes.io/name":"verdict"}}}}`)
	case rest[0] == "pods":
		fmt.Fprint(w, `{"items":[
			{"metadata":{"ownerReferences":[{"uid":"u"}]},"spec":{"nodeName":"a"}},
			{"metadata":{"ownerReferences":[{"uid":"u"}]},"spec":{"nodeName":"b"}}]}`)
	default:
		http.Error(w, "what?", http.StatusBadRequest)
	}
}

// TestCollectorRights: the collector's roles allow what it asks for, and no more.
func TestCollectorRights(t *testing.T) {
	o, err := decode(kustomize(t, "../../test/testdata/collector"))
	check(t, err)
	allowed := collectorRights(o)
	api := &collectorAPI{}
	runCollector(t, "collect", api, func() { ask(t, api) })
	if asked := askedOfCollector(api); !slices.Equal(asked, allowed) {
		t.Errorf("allowed are %q; asked for are %q", allowed, asked)
	}
	pod := o["Deployment/verdict-collector"].(*appsv1.Deployment).Spec.Template.Spec
	s := pod.Containers[0].SecurityContext
	if !*pod.SecurityContext.RunAsNonRoot || *s.AllowPrivilegeEscalation || len(s.Capabilities.Add) > 0 {
		t.Errorf("it has rights on its host: %+v", s)
	}
	labels, selects := o["Deployment/verdict-collector"].(*appsv1.Deployment).Spec.Template.Labels, true
	for k, v := range objects(o).daemonSet().Spec.Selector.MatchLabels {
		selects = selects && labels[k] == v
	}
	if selects {
		t.Error("the DaemonSet's selector selects it")
	}
}

// collectorRights are those of the collector's account.
func collectorRights(o objects) (allowed []string) {
	rules := slices.Concat(o["ClusterRole/verdict-collector"].(*rbacv1.ClusterRole).Rules,
		o["Role/verdict-collector"].(*rbacv1.Role).Rules, o["Role/verdict-collector-nodes"].(*rbacv1.Role).Rules)
	if more, ok := o["ClusterRole/verdict-gateway"].(*rbacv1.ClusterRole); ok {
		rules = append(rules, more.Rules...)
	}
	for _, r := range rules {
		for _, resource := range r.Resources {
			for _, verb := range r.Verbs {
				allowed = append(allowed, request(verb, r.APIGroups[0], resource))
			}
		}
	}
	slices.Sort(allowed)
	return slices.Compact(allowed)
}

// askedOfCollector is what a collector's API server was asked for. Many nodes that are gone would be looked for by a
// list: that right is allowed, and not asked for here.
func askedOfCollector(api *collectorAPI) []string {
	asked := append(api.all(), "list leases.coordination.k8s.io")
	slices.Sort(asked)
	return asked
}

// runCollector runs a collector until a function returns.
func runCollector(t *testing.T, command string, api http.Handler, until func()) {
	t.Helper()
	server := httptest.NewServer(api)
	defer server.Close()
	dir := t.TempDir()
	kubeconfig := filepath.Join(dir, "kubeconfig")
	check(t, os.WriteFile(kubeconfig, []byte(control.Kubeconfig(server.URL, nil, "x")), 0o600))
	free, err := net.Listen("tcp", "127.0.0.1:0")
	check(t, err)
	address := free.Addr().String()
	free.Close()
	c := exec.Command(verdict, command, "--kubeconfig", kubeconfig, "--identity=x", "--bind-address", address,
		"--advertise-address="+address, "--metrics-bind-address=")
	var log bytes.Buffer
	c.Stdout, c.Stderr = &log, &log
	check(t, c.Start())
	t.Cleanup(func() { _ = c.Process.Kill() })
	until()
	check(t, c.Process.Signal(syscall.SIGTERM))
	if err := c.Wait(); err != nil {
		t.Errorf("%v: %s", err, log.String())
	}
}

// ask connects a node and asks there, until all nodes have answered or are gone.
func ask(t *testing.T, api *collectorAPI) {
	t.Helper()
	claims, _ := json.Marshal(map[string]any{"sub": "system:serviceaccount:kube-system:verdict",
		"exp": time.Now().Add(time.Hour).Unix()})
	agent := everywhere.New(everywhere.Options{Node: "a", Log: slog.New(slog.DiscardHandler),
		Token: func() (string, error) { return "e30." + base64.RawURLEncoding.EncodeToString(claims) + ".e30", nil },
		Holds: func(goals []status.Goal) []bool { return slices.Repeat([]bool{true}, len(goals)) },
		Leader: func(context.Context) (map[string]string, error) {
			api.mu.Lock()
			defer api.mu.Unlock()
			var lease struct {
				Metadata struct{ Annotations map[string]string }
			}
			_ = json.Unmarshal(api.lease, &lease)
			return lease.Metadata.Annotations, nil
		}})
	ctx, cancel := context.WithCancel(t.Context())
	var running sync.WaitGroup
	running.Go(func() { agent.Run(ctx) })
	defer running.Wait()
	defer cancel()
	testkit.Eventually(t, 30*time.Second, "the node is connected", func() bool { return agent.Stats().Connected })
	q := httptest.NewRequest(http.MethodGet, "/everywhere?service=shop/cart&timeout=20s", nil)
	q.RemoteAddr = "127.0.0.1:1"
	w := httptest.NewRecorder()
	agent.ServeHTTP(w, q)
	if !strings.Contains(w.Body.String(), `"everywhere":true,"nodes":2`) || !strings.Contains(w.Body.String(), `["b"]`) {
		t.Errorf("%d %s", w.Code, w.Body.String())
	}
}

// TestNodeFindsTheCollector: the node may read the Lease, and its token is where the program looks for it.
func TestNodeFindsTheCollector(t *testing.T) {
	o, err := decode(kustomize(t, "../../test/testdata/collector"))
	check(t, err)
	rule := o["Role/verdict"].(*rbacv1.Role).Rules
	if len(rule) != 1 || request(rule[0].Verbs[0], rule[0].APIGroups[0], rule[0].Resources[0]) !=
		"get leases.coordination.k8s.io" || !slices.Equal(rule[0].ResourceNames, []string{"verdict-collector"}) {
		t.Errorf("rules %v", rule)
	}
	pod := objects(o).daemonSet().Spec.Template.Spec
	if !slices.Contains(pod.Containers[0].Args, "--everywhere=kube-system/verdict-collector") {
		t.Errorf("args %q", pod.Containers[0].Args)
	}
	mounts, volumes := pod.Containers[0].VolumeMounts, pod.Volumes
	mount, volume := mounts[len(mounts)-1], volumes[len(volumes)-1]
	token := volume.Projected.Sources[0].ServiceAccountToken
	if mount.Name != volume.Name || mount.MountPath != "/var/run/secrets/verdict-collector" || token.Path != "token" ||
		token.Audience != everywhere.Audience {
		t.Errorf("%+v %+v", mount, volume)
	}
}
