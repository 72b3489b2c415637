package benchmark

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"time"

	"golang.org/x/sys/unix"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/verdict-proxy/verdict/conformance/benchmark/results"
)

const ciliumAgent = "cilium-agent"

// ciliumReasons say what of Cilium is not measured.
var ciliumReasons = map[string]string{
	results.TitleGiant:        ciliumGiant,
	results.TitleGiantDeleted: ciliumGiant,
}

const ciliumGiant = "its 15,000 frontends with 100 endpoints each would take 1.5 million entries in a map that has " +
	"65,536"

// agent is what Cilium's agent needs of a node besides its network. What it leaves in these directories outlives it,
// as on a node: the next agent takes it up.
//
// Its programs that balance when a socket connects concern all processes of a control group, in whatever network
// namespace they are. So there is a group of its own, and this process, which connects for clients, is in it.
type agent struct {
	// run is mounted in the place of /run, where the agent has paths that cannot be changed.
	run string
	// maps is a file system of BPF, which holds maps and programs.
	maps string
	// sockets is the control group as a mount of its own, group the same in the whole hierarchy, before where this
	// process was.
	sockets, all, group, before string
	// attached says that the client is one of the agent's endpoints.
	attached bool
}

// newAgent makes the directories of an agent below one that does not exist. Whoever has it must close it.
func newAgent(dir string) (*agent, error) {
	a := &agent{
		run: filepath.Join(dir, "run"), maps: filepath.Join(dir, "bpf"),
		sockets: filepath.Join(dir, "sockets"), all: filepath.Join(dir, "cgroup"),
	}
	for _, d := range []string{a.run, a.maps, a.sockets, a.all} {
		if err := os.MkdirAll(d, 0o700); err != nil {
			return nil, err
		}
	}
	if err := a.open(); err != nil {
		return nil, errors.Join(err, a.close())
	}
	return a, nil
}

func (a *agent) open() error {
	if err := unix.Mount("bpf", a.maps, "bpf", 0, ""); err != nil {
		return fmt.Errorf("mount a file system of BPF: %w", err)
	}
	if err := unix.Mount("cgroup2", a.all, "cgroup2", 0, ""); err != nil {
		return fmt.Errorf("mount the hierarchy of control groups: %w", err)
	}
	group, err := os.MkdirTemp(a.all, "service-proxy-")
	if err != nil {
		return err
	}
	a.group = group
	if err := unix.Mount(a.group, a.sockets, "", unix.MS_BIND, ""); err != nil {
		return fmt.Errorf("mount %s: %w", a.group, err)
	}
	if a.before, err = ownGroup(); err != nil {
		return err
	}
	return os.WriteFile(filepath.Join(a.group, "cgroup.procs"), []byte("0"), 0)
}

// ownGroup gives the control group of this process in the hierarchy of version 2.
func ownGroup() (string, error) {
	text, err := os.ReadFile("/proc/self/cgroup")
	if err != nil {
		return "", err
	}
	_, path, ok := strings.Cut("\n"+string(text), "\n0::")
	if !ok {
		return "", errors.New("/proc/self/cgroup: no hierarchy of version 2")
	}
	path, _, _ = strings.Cut(path, "\n")
	return path, nil
}

// close takes away all that the agent has left, which must have ended.
func (a *agent) close() error {
	var errs []error
	if a.before != "" {
		errs = append(errs, os.WriteFile(filepath.Join(a.all, a.before, "cgroup.procs"), []byte("0"), 0))
	}
	if a.group != "" {
		_ = unix.Unmount(a.sockets, unix.MNT_DETACH) // it may not have come so far
		errs = append(errs, os.Remove(a.group))
	}
	_ = unix.Unmount(a.all, unix.MNT_DETACH)
	_ = unix.Unmount(a.maps, unix.MNT_DETACH)
	return errors.Join(errs...)
}

// ownMounts runs a command that has a directory of its own in the place of /run, and changes no sysctl of the whole
// machine: the agent would turn timer migration off, and goes on where it cannot.
const ownMounts = `mount --bind "$0" /run
mount --bind /proc/sys/kernel /proc/sys/kernel
mount -o remount,bind,ro /proc/sys/kernel
exec "$@"`

// agentCommand gives the agent's command line. Everything is as Cilium's chart has it in a cluster with native routing
// and without Envoy and Hubble, which would cost and are nothing of a Service proxy's.
func (n *node) agentCommand(k *Kind) []string {
	a := n.agent
	args := []string{"/usr/bin/unshare", "--mount", "/bin/sh", "-ec", ownMounts, a.run, k.Binary}
	for _, option := range []struct{ name, value string }{
		{"lib-dir", k.files()},
		{"state-dir", "/run/cilium"},
		{"socket-path", "/run/cilium/cilium.sock"},
		{"bpf-root", a.maps},
		{"cgroup-root", a.sockets},
		{"k8s-kubeconfig-path", n.plane.AdminKubeconfig()},
		{"kube-proxy-replacement", "true"},
		{"bpf-lb-sock-hostns-only", fmt.Sprint(!k.sockets)},
		{"bpf-lb-map-max", fmt.Sprint(n.agentEntries())},
		{"devices", "eth0," + n.server.Name},
		{"direct-routing-device", "eth0"},
		{"routing-mode", "native"},
		{"ipv4-native-routing-cidr", podRange.String()},
		{"enable-bpf-masquerade", "true"},
		{"enable-ipv6", "false"},
		{"ipam", "kubernetes"},
		{"identity-allocation-mode", "crd"},
		{"bpf-map-dynamic-size-ratio", "0.0025"},
		{"preallocate-bpf-maps", "false"},
		{"monitor-aggregation", "medium"},
		{"enable-l7-proxy", "false"},
		{"enable-envoy-config", "false"},
		{"enable-hubble", "false"},
		{"enable-health-checking", "false"},
		{"enable-endpoint-health-checking", "false"},
	} {
		args = append(args, "--"+option.name+"="+option.value)
	}
	return args
}

// agentEntries is how many entries the maps of Services may have: the chart's 65,536, or in a larger cluster a power of
// two that has room for all endpoints, each of which is one of a Service's entries, and for changes.
func (n *node) agentEntries() int {
	entries := 1 << 16
	for entries < n.size.Services*(n.size.Endpoints+2)*3/2 {
		entries *= 2
	}
	return entries
}

// agentPods is the range from which the agent takes addresses for itself. The client has one of another range.
const agentPods = "10.254.0.0/24"

// prepareAgents makes in the API server what Cilium's operator and the cluster's controllers would have made.
func (w *world) prepareAgents(ctx context.Context, k *Kind) error {
	if w.agents {
		return nil
	}
	patch := fmt.Appendf(nil, `{"spec":{"podCIDR":%q,"podCIDRs":[%q]}}`, agentPods, agentPods)
	_, err := w.plane.Client.CoreV1().Nodes().
		Patch(ctx, nodeName, types.StrategicMergePatchType, patch, metav1.PatchOptions{})
	if err != nil {
		return err
	}
	files, err := filepath.Glob(filepath.Join(k.files(), "crds", "*.yaml"))
	if err != nil || len(files) == 0 {
		return errors.Join(err, fmt.Errorf("no definitions of resources in %s", k.files()))
	}
	for _, file := range files {
		body, err := os.ReadFile(file)
		if err != nil {
			return err
		}
		err = w.plane.Client.CoreV1().RESTClient().Post().AbsPath("/apis/apiextensions.k8s.io/v1/customresourcedefinitions").
			SetHeader("Content-Type", "application/yaml").Body(body).Do(ctx).Error()
		if err != nil {
			return fmt.Errorf("%s: %w", file, err)
		}
	}
	w.agents = true
	return nil
}

// attach makes the client one of the agent's endpoints as its CNI plugin does: from then on its programs are at the
// client's link. An agent that is started later takes the endpoint up by itself. The error is errLimit if the agent
// does not take requests in time.
func (n *node) attach(ctx context.Context, began time.Time, limit time.Duration) error {
	if n.agent == nil || n.agent.attached {
		return nil
	}
	body, err := n.endpoint()
	if err != nil {
		return err
	}
	client := n.agent.client()
	var refused error
	_, err = await(ctx, began, limit, n.ended, func() (done bool) {
		n.agent.attached, refused = createEndpoint(ctx, client, body)
		return n.agent.attached || refused != nil
	})
	if err != nil {
		return err
	}
	return refused
}

// client speaks to the agent's API.
func (a *agent) client() *http.Client {
	socket := filepath.Join(a.run, "cilium", "cilium.sock")
	dial := func(ctx context.Context, _, _ string) (net.Conn, error) {
		return new(net.Dialer).DialContext(ctx, "unix", socket)
	}
	return &http.Client{Transport: &http.Transport{DialContext: dial, DisableKeepAlives: true}}
}

// serving waits until the agent, if there is one, has restored its state and serves its API. Before that it may use no
// processor while it waits for others, and not be at rest.
func (n *node) serving(ctx context.Context, began time.Time, limit time.Duration) error {
	if n.agent == nil {
		return nil
	}
	client := n.agent.client()
	_, err := await(ctx, began, limit, n.ended, func() bool {
		response, err := client.Get("http://agent/v1/healthz")
		if err != nil {
			return false
		}
		response.Body.Close()
		return response.StatusCode == http.StatusOK
	})
	return err
}

// endpoint is the client in the words of the agent's API.
func (n *node) endpoint() ([]byte, error) {
	outside, err := n.host.Netlink().LinkByName(n.client.Name)
	if err != nil {
		return nil, err
	}
	inside, err := n.client.Netlink().LinkByName("eth0")
	if err != nil {
		return nil, err
	}
	return json.Marshal(map[string]any{
		"addressing":               map[string]string{"ipv4": clientAddr.String()},
		"container-id":             n.client.Name,
		"container-interface-name": "eth0",
		"datapath-configuration":   map[string]bool{"external-ipam": true},
		"host-mac":                 outside.Attrs().HardwareAddr.String(),
		"interface-index":          outside.Attrs().Index,
		"interface-name":           n.client.Name,
		"labels":                   []string{"any:name=" + n.client.Name},
		"mac":                      inside.Attrs().HardwareAddr.String(),
		"state":                    "waiting-for-identity",
		"sync-build-endpoint":      true,
	})
}

// createEndpoint asks the agent for an endpoint. Without an error it was not there yet, or not ready.
func createEndpoint(ctx context.Context, client *http.Client, body []byte) (created bool, err error) {
	const url = "http://agent/v1/endpoint/cni-attachment-id:client:eth0"
	request, err := http.NewRequestWithContext(ctx, http.MethodPut, url, bytes.NewReader(body))
	if err != nil {
		return false, err
	}
	request.Header.Set("Content-Type", "application/json")
	response, err := client.Do(request)
	if err != nil {
		return false, nil // it does not listen yet
	}
	defer response.Body.Close()
	switch response.StatusCode {
	case http.StatusCreated:
		return true, nil
	case http.StatusServiceUnavailable:
		return false, nil
	}
	text, _ := io.ReadAll(response.Body) // it only explains the status
	return false, fmt.Errorf("make the client an endpoint of Cilium: %s: %s", response.Status, text)
}
