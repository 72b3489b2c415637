package deploy

import (
	"bytes"
	"encoding/pem"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"

	"github.com/verdict-proxy/verdict/internal/lab"
)

// recorder is an API server with one Node, which takes note of what it is asked.
type recorder struct {
	mu    sync.Mutex
	asked []string
}

// note takes note of a request, and says what it asks for: rest is a resource and perhaps a name.
func (r *recorder) note(q *http.Request) (verb, group string, rest []string) {
	path := strings.Split(strings.TrimPrefix(q.URL.Path, "/"), "/")
	rest = path[2:]
	if path[0] == "apis" {
		group, rest = path[1], path[3:]
	}
	if rest[0] == "namespaces" && len(rest) > 2 {
		rest = rest[2:]
	}
	verb = map[string]string{http.MethodPost: "create", http.MethodPut: "update", http.MethodPatch: "patch",
		http.MethodDelete: "delete"}[q.Method]
	switch {
	case q.Method == http.MethodGet && q.URL.Query().Get("watch") != "":
		verb = "watch"
	case q.Method == http.MethodGet && len(rest) > 1:
		verb = "get"
	case q.Method == http.MethodGet:
		verb = "list"
	}
	r.mu.Lock()
	resource := rest[0]
	if len(rest) > 2 {
		resource += "/" + rest[2]
	}
	if asked := request(verb, group, resource); !slices.Contains(r.asked, asked) {
		r.asked = append(r.asked, asked)
	}
	r.mu.Unlock()
	return verb, group, rest
}

// ServeHTTP answers lists with nothing but that, holds watches open, and takes everything else.
func (r *recorder) ServeHTTP(w http.ResponseWriter, q *http.Request) {
	verb, group, rest := r.note(q)
	w.Header().Set("Content-Type", "application/json")
	switch {
	case verb == "watch" && q.URL.Query().Get("sendInitialEvents") != "":
		// As a server that cannot stream lists: so that it is asked for them, too.
		w.WriteHeader(http.StatusUnprocessableEntity)
		fmt.Fprint(w, `{"kind":"Status","apiVersion":"v1","status":"Failure","reason":"Invalid","code":422}`)
	case verb == "watch":
		w.(http.Flusher).Flush()
		<-q.Context().Done()
	case verb == "list" && rest[0] == "nodes":
		fmt.Fprint(w, node)
	case verb == "list":
		fmt.Fprintf(
			w,
			`{"kind":%q,"apiVersion":%q,"metadata":{"resourceVersion":"1"},"items":[]}`,
			kinds[rest[0]],
			strings.TrimPrefix(group+"/v1", "/"),
		)
	default:
		w.WriteHeader(http.StatusCreated)
		fmt.Fprint(w, `{"kind":"Status","apiVersion":"v1","status":"Success"}`)
	}
}

const node = `{"kind":"NodeList","apiVersion":"v1","metadata":{"resourceVersion":"1"},
"items":[{"metadata":{"name":"node","resourceVersion":"1"},
	"spec":{"taints":[{"key":"verdict-proxy.github.io/not-programmed","effect":"NoSchedule"}]},
	"status":{"addresses":[{"type":"InternalIP","address":"192.0.2.10"}]}}]}`

var kinds = map[string]string{
	"services": "ServiceList", "pods": "PodList", "endpointslices": "EndpointSliceList", "servicecidrs": "ServiceCIDRList",
}

// listen serves where the API server of k3s is on each node.
func (r *recorder) listen(host *lab.Host) (*httptest.Server, error) {
	server := httptest.NewUnstartedServer(r)
	server.Listener.Close()
	err := host.Do(func() (err error) {
		server.Listener, err = net.Listen("tcp", "127.0.0.1:6444")
		return err
	})
	if err == nil {
		server.StartTLS()
	}
	return server, err
}

func (r *recorder) all() []string {
	r.mu.Lock()
	defer r.mu.Unlock()
	return slices.Sorted(slices.Values(r.asked))
}

// ran is what came of a pod.
type ran struct {
	// requests are what it asked of the API server, as "list nodes".
	requests []string
	// status are the status codes of what it serves, by port and path.
	status map[string]int
	// init and log are what the containers wrote.
	init, log string
	// sysctls are those of its network namespace, after it.
	sysctls map[string]string
	// tables are those of nf_tables, while it ran.
	tables string
	// rights are the lines of /proc/PID/status about capabilities.
	rights string

	out output
}

// output is what a container that runs has written so far.
type output struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (o *output) Write(p []byte) (int, error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.b.Write(p)
}

func (o *output) String() string {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.b.String()
}

// optional are the requests that the program makes only with an argument that begins so.
var optional = map[string][]string{"--node-condition": {"patch nodes/status"}, "--startup-taint=": {"patch nodes"},
	recordsOn: {"list pods", "watch pods"}}

// recordsOn is the argument that the chart has in its configuration.
const recordsOn = "--records=on"

// requests gives what the program asks of the API server, with the arguments of a DaemonSet.
func requests(o objects) ([]string, error) {
	p, err := pod()
	if err != nil {
		return nil, err
	}
	args := o.daemonSet().Spec.Template.Spec.Containers[0].Args
	config, ok := o["ConfigMap/verdict"].(*corev1.ConfigMap)
	if ok && strings.Contains(config.Data["config.conf"], "records: \"on\"") {
		args = append(slices.Clone(args), recordsOn)
	}
	all := slices.Clone(p.requests)
	for _, arg := range args {
		for begin, asked := range optional {
			if strings.HasPrefix(arg, begin) {
				all = append(all, asked...)
			}
		}
	}
	return all, nil
}

// pod runs the pod of k3s' overlay, and nodePod that with the component that writes the Node.
var (
	pod = sync.OnceValues(func() (*ran, error) {
		o, err := decodeOverlay("k3s")
		if err != nil {
			return nil, err
		}
		return runPod(o)
	})
	nodePod = sync.OnceValues(func() (*ran, error) {
		o, err := decodeNodeOverlay("k3s")
		if err != nil {
			return nil, err
		}
		return runPod(o, append(optional["--node-condition"], optional["--startup-taint="]...)...)
	})
)

// runPod runs a pod's containers one after the other in a network namespace, with the rights and files they have in a
// cluster: /proc/sys and the root file system are read-only unless a container is privileged. It runs until it has
// asked for what it needs, and more.
func runPod(o objects, more ...string) (p *ran, err error) {
	dir, err := os.MkdirTemp("", "verdict-pod-")
	if err != nil {
		return nil, err
	}
	defer os.RemoveAll(dir)
	n := lab.New()
	defer func() { err = errors.Join(err, n.Close()) }()
	host, err := n.NewHost("node")
	if err != nil {
		return nil, err
	}
	// It forwards, and has its Node's address: the preflight finds nothing.
	if _, err := host.Run("sh", "-ec", `echo 1 | tee /proc/sys/net/ipv4/ip_forward /proc/sys/net/ipv6/conf/all/forwarding
ip addr add 192.0.2.10/32 dev lo`); err != nil {
		return nil, err
	}
	api := &recorder{}
	server, err := api.listen(host)
	if err != nil {
		return nil, err
	}
	defer server.Close()
	defer server.CloseClientConnections()
	ca := pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: server.Certificate().Raw})
	for name, content := range map[string]string{
		"config.conf": o["ConfigMap/verdict"].(*corev1.ConfigMap).Data["config.conf"], "ca.crt": string(ca), "token": "token",
	} {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(content), 0o600); err != nil {
			return nil, err
		}
	}
	spec := o.daemonSet().Spec.Template.Spec
	p = &ran{}
	init, err := container(host, dir, spec.InitContainers[0]).CombinedOutput()
	if p.init = string(init); err != nil {
		return nil, fmt.Errorf("init container: %w: %s", err, init)
	}
	return p, p.carry(host, container(host, dir, spec.Containers[0]), func() bool {
		p.requests = api.all()
		return begin(p.requests, "create") > 0 && begin(p.requests, "watch") == begin(p.requests, "list") &&
			!slices.ContainsFunc(more, func(m string) bool { return !slices.Contains(p.requests, m) })
	})
}

// begin counts the requests with a verb.
func begin(requests []string, verb string) (n int) {
	for _, r := range requests {
		if strings.HasPrefix(r, verb+" ") {
			n++
		}
	}
	return n
}

// carry runs the container that stays until it is ready and complete says so.
func (p *ran) carry(host *lab.Host, c *lab.Cmd, complete func() bool) error {
	c.Stdout, c.Stderr = &p.out, &p.out
	if err := c.Start(); err != nil {
		return err
	}
	client := &http.Client{Transport: &http.Transport{DialContext: host.DialContext, DisableKeepAlives: true}}
	get := func(at string) int {
		answer, err := client.Get("http://127.0.0.1:" + at)
		if err != nil {
			return 0
		}
		answer.Body.Close()
		return answer.StatusCode
	}
	well := func() bool { return get("10256/readyz") == http.StatusOK && complete() }
	for deadline := time.Now().Add(time.Minute); !well() && time.Now().Before(deadline); {
		time.Sleep(20 * time.Millisecond)
	}
	p.status = map[string]int{}
	for _, at := range []string{"10256/readyz", "10256/livez", "10249/metrics"} {
		p.status[at] = get(at)
	}
	status, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", c.Process.Pid))
	for line := range strings.Lines(string(status)) {
		if strings.HasPrefix(line, "CapBnd") || strings.HasPrefix(line, "CapEff") || strings.HasPrefix(line, "NoNewPrivs") {
			p.rights += line
		}
	}
	p.tables, _ = host.Run("nft", "list", "tables")
	p.sysctls = map[string]string{}
	for _, name := range []string{"net/netfilter/nf_conntrack_tcp_timeout_established",
		"net/ipv4/conf/all/route_localnet"} {
		value, _ := host.Run("cat", "/proc/sys/"+name)
		p.sysctls[name] = strings.TrimSpace(value)
	}
	err = errors.Join(err, c.Process.Signal(syscall.SIGTERM), c.Wait())
	p.log = p.out.String()
	if err != nil {
		return fmt.Errorf("%w: %s", err, p.log)
	}
	return nil
}

// container prepares the program as a container runtime does, with files from dir.
func container(host *lab.Host, dir string, c corev1.Container) *lab.Cmd {
	script := `
mount --make-rprivate /
mount -t tmpfs none /run
mkdir -p /run/secrets/kubernetes.io/serviceaccount
cp ca.crt token /run/secrets/kubernetes.io/serviceaccount
touch /run/xtables.lock
mount -t tmpfs none /var/lib
mkdir /var/lib/kube-proxy
cp *.conf /var/lib/kube-proxy
`
	rights := []string{}
	if c.SecurityContext.Privileged == nil {
		script += "mount --bind /proc/sys /proc/sys\nmount -o remount,bind,ro /proc/sys\n"
		rights = append(rights, "setpriv", "--no-new-privs", "--inh-caps=-all")
		keep := []string{"-all"}
		for _, name := range c.SecurityContext.Capabilities.Add {
			keep = append(keep, "+"+strings.ToLower(string(name)))
		}
		rights = append(rights, "--bounding-set="+strings.Join(keep, ","))
	}
	script += "mount -o remount,bind,ro /\nexec \"$@\"\n"
	args := append([]string{"--mount", "sh", "-ec", script, "sh"}, append(rights, verdict)...)
	for _, a := range c.Args {
		args = append(args, strings.ReplaceAll(a, "$(NODE_NAME)", "node"))
	}
	cmd := host.Command("unshare", args...)
	cmd.Dir = dir
	cmd.Env = []string{"PATH=" + os.Getenv("PATH")}
	for _, e := range c.Env {
		if e.ValueFrom == nil {
			cmd.Env = append(cmd.Env, e.Name+"="+e.Value)
		}
	}
	return cmd
}

// TestNodePod: to write the Node takes two more requests, and nothing else.
func TestNodePod(t *testing.T) {
	base, err := pod()
	check(t, err)
	p, err := nodePod()
	check(t, err)
	want := slices.Sorted(slices.Values(slices.Concat(base.requests, optional["--node-condition"],
		optional["--startup-taint="])))
	if !slices.Equal(p.requests, want) {
		t.Errorf("requests %v; want %v", p.requests, want)
	}
	if strings.Contains(p.log, "level=WARN") || !strings.Contains(p.log, "removed the taint from the Node") {
		t.Errorf("log:\n%s", p.log)
	}
}

// TestRecordsPod: to record takes two more requests. The container that stays may not set sysctls, nor put them back.
func TestRecordsPod(t *testing.T) {
	base, err := pod()
	check(t, err)
	text, err := buildWith("k3s", "records")
	check(t, err)
	o, err := decode(text)
	check(t, err)
	p, err := runPod(o, optional[recordsOn]...)
	check(t, err)
	want := slices.Sorted(slices.Values(slices.Concat(base.requests, optional[recordsOn])))
	if !slices.Equal(p.requests, want) {
		t.Errorf("requests %v; want %v", p.requests, want)
	}
	if strings.Contains(p.log, "level=WARN") || !strings.Contains(p.log, "for lack of rights") ||
		!strings.Contains(p.init, "net.netfilter.nf_conntrack_acct = 1 (was 0)") {
		t.Errorf("init:\n%slog:\n%s", p.init, p.log)
	}
}

// TestPod: with what the DaemonSet gives, the init container sets the sysctls, and the other one carries the Services
// and has nothing to complain of.
func TestPod(t *testing.T) {
	p, err := pod()
	check(t, err)
	t.Logf("init:\n%slog:\n%srequests: %v", p.init, p.log, p.requests)
	for _, at := range served {
		if p.status[at] != http.StatusOK {
			t.Errorf("%s answers %d", at, p.status[at])
		}
	}
	for name, want := range map[string]string{
		"net/netfilter/nf_conntrack_tcp_timeout_established": "86400", "net/ipv4/conf/all/route_localnet": "1",
	} {
		if p.sysctls[name] != want {
			t.Errorf("%s is %q; want %s", name, p.sysctls[name], want)
		}
	}
	if p.tables != "table ip verdict\ntable ip6 verdict\n" {
		t.Errorf("tables %q", p.tables)
	}
	if strings.Contains(p.log, "level=WARN") || strings.Contains(p.log, "level=ERROR") {
		t.Errorf("it complains:\n%s", p.log)
	}
	// CAP_NET_ADMIN is number 12.
	for _, line := range []string{"CapEff:\t0000000000001000\n", "CapBnd:\t0000000000001000\n", "NoNewPrivs:\t1\n"} {
		if !strings.Contains(p.rights, line) {
			t.Errorf("rights %q lack %q", p.rights, line)
		}
	}
}
