// Package cluster asks the proxies of all nodes, with the rights of whoever calls: it finds the pods of Verdict's
// DaemonSet, runs verdict in them, and compares what they answer.
package cluster

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"strconv"
	"strings"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/runtime/serializer"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
	"k8s.io/client-go/tools/remotecommand"
	utilexec "k8s.io/client-go/util/exec"
	"k8s.io/streaming/pkg/httpstream"
)

// Objects creates, reads and removes objects by their paths, such as "/api/v1/namespaces/x/pods".
type Objects interface {
	Create(ctx context.Context, path string, object any) error
	Read(ctx context.Context, path string, into any) error
	Remove(ctx context.Context, path string) error
}

// API is what is asked of the API server. An empty namespace means all, an empty selector or Service means any.
type API interface {
	Objects
	Nodes(ctx context.Context) ([]corev1.Node, error)
	Pods(ctx context.Context, namespace, selector string) ([]corev1.Pod, error)
	Pod(ctx context.Context, namespace, name string) (*corev1.Pod, error)
	Service(ctx context.Context, namespace, name string) (*corev1.Service, error)
	Slices(ctx context.Context, namespace, service string) (*discoveryv1.EndpointSliceList, error)
	// Logs returns the last lines of a container's log, or of the one before it started again.
	Logs(ctx context.Context, namespace, pod, container string, lines int, previous bool) ([]byte, error)
}

// Executor runs commands in pods.
type Executor interface {
	// Exec runs argv in a container until it ends, and returns its exit status. It returns an error if it could not run.
	// A stdin that is nil is empty.
	Exec(ctx context.Context, namespace, pod, container string, argv []string, stdin io.Reader, stdout, stderr io.Writer,
	) (int, error)
}

// client is the API and the Executor of a real cluster.
type client struct {
	config *rest.Config
	rest   *rest.RESTClient
}

// Connect returns a client for a kubeconfig file and one of its contexts, and the context's namespace. Empty names mean
// what kubectl would take.
func Connect(kubeconfig, kubeContext string) (API, Executor, string, error) {
	rules := clientcmd.NewDefaultClientConfigLoadingRules()
	rules.ExplicitPath = kubeconfig
	loader := clientcmd.NewNonInteractiveDeferredLoadingClientConfig(rules,
		&clientcmd.ConfigOverrides{CurrentContext: kubeContext})
	config, err := loader.ClientConfig()
	if err != nil {
		return nil, nil, "", fmt.Errorf("kubeconfig: %w", err)
	}
	namespace, _, err := loader.Namespace()
	if err != nil {
		return nil, nil, "", fmt.Errorf("kubeconfig: %w", err)
	}
	c, err := newClient(config)
	return c, c, namespace, err
}

func newClient(config *rest.Config) (*client, error) {
	types := runtime.NewScheme()
	metav1.AddToGroupVersion(types, schema.GroupVersion{Version: "v1"})
	config = rest.CopyConfig(config)
	config.GroupVersion, config.APIPath = &schema.GroupVersion{Version: "v1"}, "/api"
	config.NegotiatedSerializer = serializer.NewCodecFactory(types).WithoutConversion()
	config.QPS, config.Burst, config.WarningHandler = 100, 200, rest.NoWarnings{}
	r, err := rest.RESTClientFor(config)
	if err != nil {
		return nil, fmt.Errorf("kubeconfig: %w", err)
	}
	return &client{config, r}, nil
}

// get reads one object or list. What says what is asked for.
func (c *client) get(ctx context.Context, path string, into any, params map[string]string, what access) error {
	q := c.rest.Get().AbsPath(path)
	for name, value := range params {
		if value != "" {
			q.Param(name, value)
		}
	}
	result := q.Do(ctx)
	if err := result.Error(); err != nil {
		return what.explain(err)
	}
	raw, err := result.Raw()
	if err == nil {
		err = json.Unmarshal(raw, into)
	}
	if err != nil {
		return fmt.Errorf("%s: %w", path, err)
	}
	return nil
}

func inNamespace(api, namespace, resource string) string {
	if namespace == "" {
		return api + "/" + resource
	}
	return api + "/namespaces/" + namespace + "/" + resource
}

// accessTo is the right to do something at a path.
func accessTo(verb, path string) access {
	a := access{verb: verb}
	parts := strings.Split(strings.Trim(path, "/"), "/")[2:] // without /api/v1
	if len(parts) > 2 && parts[0] == "namespaces" {
		a.namespace, parts = parts[1], parts[2:]
	}
	a.resource = parts[0]
	return a
}

func (c *client) Create(ctx context.Context, path string, object any) error {
	body, err := json.Marshal(object)
	if err != nil {
		return err
	}
	result := c.rest.Post().AbsPath(path).SetHeader("Content-Type", "application/json").Body(body).Do(ctx)
	return accessTo("create", path).explain(result.Error())
}

func (c *client) Read(ctx context.Context, path string, into any) error {
	return c.get(ctx, path, into, nil, accessTo("get", path))
}

func (c *client) Remove(ctx context.Context, path string) error {
	return accessTo("delete", path).explain(c.rest.Delete().AbsPath(path).Do(ctx).Error())
}

func (c *client) Nodes(ctx context.Context) ([]corev1.Node, error) {
	var list corev1.NodeList
	err := c.get(ctx, "/api/v1/nodes", &list, nil, access{"list", "nodes", ""})
	return list.Items, err
}

func (c *client) Pods(ctx context.Context, namespace, selector string) ([]corev1.Pod, error) {
	var list corev1.PodList
	err := c.get(ctx, inNamespace("/api/v1", namespace, "pods"), &list, map[string]string{"labelSelector": selector},
		access{"list", "pods", namespace})
	return list.Items, err
}

func (c *client) Pod(ctx context.Context, namespace, name string) (*corev1.Pod, error) {
	var pod corev1.Pod
	err := c.get(ctx, inNamespace("/api/v1", namespace, "pods")+"/"+name, &pod, nil, access{"get", "pods", namespace})
	return &pod, err
}

func (c *client) Service(ctx context.Context, namespace, name string) (*corev1.Service, error) {
	var svc corev1.Service
	err := c.get(ctx, inNamespace("/api/v1", namespace, "services")+"/"+name, &svc, nil,
		access{"get", "services", namespace})
	return &svc, err
}

func (c *client) Slices(ctx context.Context, namespace, service string) (*discoveryv1.EndpointSliceList, error) {
	var list discoveryv1.EndpointSliceList
	selector := ""
	if service != "" {
		selector = discoveryv1.LabelServiceName + "=" + service
	}
	err := c.get(ctx, inNamespace("/apis/discovery.k8s.io/v1", namespace, "endpointslices"), &list,
		map[string]string{"labelSelector": selector}, access{"list", "endpointslices.discovery.k8s.io", namespace})
	return &list, err
}

func (c *client) Logs(ctx context.Context, namespace, pod, container string, lines int, previous bool) ([]byte, error) {
	text, err := c.rest.Get().AbsPath(inNamespace("/api/v1", namespace, "pods"), pod, "log").
		Param("container", container).Param("tailLines", strconv.Itoa(lines)).
		Param("limitBytes", strconv.Itoa(maxLog)).Param("previous", strconv.FormatBool(previous)).DoRaw(ctx)
	return text, access{"get", "pods/log", namespace}.explain(err)
}

// Exec implements Executor, by WebSockets if the server can, else by SPDY.
func (c *client) Exec(ctx context.Context, namespace, pod, container string, argv []string, stdin io.Reader,
	stdout, stderr io.Writer) (int, error) {
	q := c.rest.Post().AbsPath(inNamespace("/api/v1", namespace, "pods"), pod, "exec").Param("container", container).
		Param("stdout", "true").Param("stderr", "true")
	if stdin != nil {
		q.Param("stdin", "true")
	}
	for _, a := range argv {
		q.Param("command", a)
	}
	old, err := remotecommand.NewSPDYExecutor(c.config, "POST", q.URL())
	if err != nil {
		return 0, err
	}
	sockets, err := remotecommand.NewWebSocketExecutor(c.config, "GET", q.URL().String())
	if err != nil {
		return 0, err
	}
	either, err := remotecommand.NewFallbackExecutor(sockets, old, func(err error) bool {
		return httpstream.IsUpgradeFailure(err) || httpstream.IsHTTPSProxyError(err)
	})
	if err != nil {
		return 0, err
	}
	err = either.StreamWithContext(ctx, remotecommand.StreamOptions{Stdin: stdin, Stdout: stdout, Stderr: stderr})
	var ended utilexec.ExitError
	if errors.As(err, &ended) {
		return ended.ExitStatus(), nil
	}
	return 0, access{"create", "pods/exec", namespace}.explain(err)
}

// access is a right that a request needs.
type access struct{ verb, resource, namespace string }

// explain names the right, if an error says that it is missing.
func (a access) explain(err error) error {
	if err == nil || !apierrors.IsForbidden(err) && !strings.Contains(err.Error(), "is forbidden") {
		return err // the executors give only the text of what the server says
	}
	where := "in the whole cluster"
	if a.namespace != "" {
		where = "in namespace " + a.namespace
	}
	return fmt.Errorf("you lack the right to %s %s %s (docs/CLUSTER.md): %w", a.verb, a.resource, where, err)
}
