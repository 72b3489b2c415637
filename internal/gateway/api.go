package gateway

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"reflect"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/runtime/serializer"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/util/flowcontrol"
	"k8s.io/klog/v2"
	gatewayv1 "sigs.k8s.io/gateway-api/apis/v1"

	"github.com/verdict-proxy/verdict/internal/gateway/routes"
)

// newCodecs returns what knows the only types that are decoded; a proxy on a node has none. Objects have the same form
// in all versions that a kind is watched in.
func newCodecs() serializer.CodecFactory {
	s := runtime.NewScheme()
	s.AddKnownTypes(corev1.SchemeGroupVersion, &corev1.Service{}, &corev1.ServiceList{}, &corev1.Namespace{},
		&corev1.NamespaceList{}, &corev1.ConfigMap{})
	best := schema.GroupVersion{Group: gatewayv1.GroupName, Version: versions[0]}
	s.AddKnownTypes(best, &gatewayv1.GatewayClass{}, &gatewayv1.GatewayClassList{},
		&routes.Gateway{}, &routes.GatewayList{})
	for _, version := range versions {
		gv := schema.GroupVersion{Group: gatewayv1.GroupName, Version: version}
		s.AddKnownTypes(gv, &gatewayv1.TCPRoute{}, &gatewayv1.TCPRouteList{}, &gatewayv1.UDPRoute{},
			&gatewayv1.UDPRouteList{}, &gatewayv1.ReferenceGrant{}, &gatewayv1.ReferenceGrantList{})
		metav1.AddToGroupVersion(s, gv)
	}
	metav1.AddToGroupVersion(s, corev1.SchemeGroupVersion)
	metav1.AddToGroupVersion(s, schema.GroupVersion{Version: "v1"})
	return serializer.NewCodecFactory(s)
}

// versions are those of Gateway API that a kind may be watched in, the best one first.
var versions = []string{"v1", "v1beta1", "v1alpha2"}

// api has a client for each group and version.
type api struct {
	core    *rest.RESTClient
	gateway map[string]*rest.RESTClient
	// limiter bounds the writes.
	limiter flowcontrol.RateLimiter
}

// writesPerSecond bounds the writes per second, of which writeBurst may be at once.
const writesPerSecond, writeBurst = 200, 200

func newAPI(config *rest.Config) (*api, error) {
	klog.SetLogger(klog.Logger{}) // client-go would log what we log anyway
	a := &api{gateway: map[string]*rest.RESTClient{},
		limiter: flowcontrol.NewTokenBucketRateLimiter(writesPerSecond, writeBurst)}
	config = rest.CopyConfig(config)
	config.NegotiatedSerializer = newCodecs().WithoutConversion()
	var err error
	if a.core, err = newClient(config, corev1.SchemeGroupVersion); err != nil {
		return nil, err
	}
	for _, v := range versions {
		gv := schema.GroupVersion{Group: gatewayv1.GroupName, Version: v}
		if a.gateway[v], err = newClient(config, gv); err != nil {
			return nil, err
		}
	}
	return a, nil
}

func newClient(config *rest.Config, gv schema.GroupVersion) (*rest.RESTClient, error) {
	c := rest.CopyConfig(config)
	c.GroupVersion, c.APIPath, c.QPS = &gv, "/apis", -1
	c.ContentType, c.AcceptContentTypes = runtime.ContentTypeJSON, runtime.ContentTypeJSON
	if gv.Group == "" {
		c.APIPath, c.AcceptContentTypes = "/api", runtime.ContentTypeProtobuf+","+runtime.ContentTypeJSON
	}
	c.WarningHandler = rest.NoWarnings{}
	if c.UserAgent == "" {
		c.UserAgent = rest.DefaultKubernetesUserAgent()
	}
	client, err := rest.RESTClientFor(c)
	if err != nil {
		return nil, fmt.Errorf("client configuration: %w", err)
	}
	return client, nil
}

// serves returns the resources of Gateway API that the server has, each with its best version.
func (a *api) serves(ctx context.Context) (map[string]string, error) {
	served := map[string]string{}
	for _, v := range versions {
		raw, err := a.gateway[v].Get().AbsPath("/apis", gatewayv1.GroupName, v).DoRaw(ctx)
		if apierrors.IsNotFound(err) {
			continue
		}
		if err != nil {
			return nil, err
		}
		var list metav1.APIResourceList
		if err := json.Unmarshal(raw, &list); err != nil {
			return nil, err
		}
		for _, r := range list.APIResources {
			if served[r.Name] == "" {
				served[r.Name] = v
			}
		}
	}
	return served, nil
}

// bundle returns of which release of Gateway API the definition of a resource is.
func (a *api) bundle(ctx context.Context, resource string) (b routes.Bundle, err error) {
	raw, err := a.core.Get().AbsPath("/apis/apiextensions.k8s.io/v1/customresourcedefinitions",
		resource+"."+gatewayv1.GroupName).SetHeader("Accept",
		"application/json;as=PartialObjectMetadata;g=meta.k8s.io;v=v1").DoRaw(ctx)
	if err != nil {
		return b, err
	}
	var o metav1.PartialObjectMetadata
	err = json.Unmarshal(raw, &o)
	return routes.Bundle{Version: o.Annotations["gateway.networking.k8s.io/bundle-version"],
		Channel: o.Annotations["gateway.networking.k8s.io/channel"]}, err
}

// patch is a JSON merge patch from one value to another; nil if they are the same. It has the version of the object, so
// that it fails if that is another one meanwhile.
func patch(version string, from, to any) ([]byte, error) {
	a, err := plain(from)
	if err != nil {
		return nil, err
	}
	b, err := plain(to)
	if err != nil {
		return nil, err
	}
	changes := mergePatch(a, b)
	if len(changes) == 0 {
		return nil, nil
	}
	meta, _ := changes["metadata"].(map[string]any)
	if meta == nil {
		meta = map[string]any{}
		changes["metadata"] = meta
	}
	meta["resourceVersion"] = version
	return json.Marshal(changes)
}

// plain returns a value as JSON has it.
func plain(v any) (map[string]any, error) {
	text, err := json.Marshal(v)
	if err != nil {
		return nil, err
	}
	d := json.NewDecoder(bytes.NewReader(text))
	d.UseNumber()
	var m map[string]any
	return m, d.Decode(&m)
}

// mergePatch returns what differs, as RFC 7386 writes it: null removes a field.
func mergePatch(from, to map[string]any) map[string]any {
	changes := map[string]any{}
	for k := range from {
		if _, ok := to[k]; !ok {
			changes[k] = nil
		}
	}
	for k, now := range to {
		was, ok := from[k]
		a, both := was.(map[string]any)
		b, isMap := now.(map[string]any)
		switch {
		case both && isMap:
			if inner := mergePatch(a, b); len(inner) > 0 {
				changes[k] = inner
			}
		case !ok || !reflect.DeepEqual(was, now):
			changes[k] = now
		}
	}
	return changes
}

// send sends a merge patch for an object, or for its subresource if one is named, and reads the object into into.
func (a *api) send(ctx context.Context, c *rest.RESTClient, resource string, n types.NamespacedName, sub string,
	body []byte, into runtime.Object) error {
	q := c.Patch(types.MergePatchType).NamespaceIfScoped(n.Namespace, n.Namespace != "").Resource(resource).Name(n.Name)
	if sub != "" {
		q = q.SubResource(sub)
	}
	return q.Body(body).Do(ctx).Into(into)
}
