package collector

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"strings"
	"time"

	authenticationv1 "k8s.io/api/authentication/v1"
	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/util/flowcontrol"

	"github.com/verdict-proxy/verdict/sync/snapshot"
)

// api asks the API server, in JSON. Requests are on demand: nothing is watched.
type api struct {
	http    *http.Client
	base    string
	limiter flowcontrol.RateLimiter
}

const (
	// maxReads and maxReviews bound the requests per second: a new leader has the tokens of all nodes reviewed.
	maxReads, maxReviews = 200, 200
	// requestTimeout bounds one request, and maxBody its answer.
	requestTimeout = 10 * time.Second
	maxBody        = 64 << 20
	// pageSize is how many objects of a list are read at once.
	pageSize = 500
)

// newAPI returns a client that sends so many requests per second; with 0, there is no limit.
func newAPI(config *rest.Config, perSecond int) (*api, error) {
	config = rest.CopyConfig(config)
	config.ContentType = "application/json"
	client, err := rest.HTTPClientFor(config)
	if err != nil {
		return nil, fmt.Errorf("client configuration: %w", err)
	}
	base, _, err := rest.DefaultServerUrlFor(config)
	if err != nil {
		return nil, fmt.Errorf("client configuration: %w", err)
	}
	a := &api{client, strings.TrimSuffix(base.String(), "/"), flowcontrol.NewFakeAlwaysRateLimiter()}
	if perSecond > 0 {
		a.limiter = flowcontrol.NewTokenBucketRateLimiter(float32(perSecond), 2*perSecond)
	}
	return a, nil
}

// statusError is an answer of the API server other than 2xx.
type statusError struct {
	code int
	text string
}

func (e *statusError) Error() string { return e.text }

func isStatus(err error, code int) bool {
	e, ok := err.(*statusError)
	return ok && e.code == code
}

// plain asks for objects as they are, and metadataOnly for their metadata.
const (
	plain        = "application/json"
	metadataOnly = "application/json;as=PartialObjectMetadataList;g=meta.k8s.io;v=v1"
)

// do sends a request and reads the answer into an object.
func (a *api) do(ctx context.Context, method, path, accept string, query url.Values, body, into any) error {
	if err := a.limiter.Wait(ctx); err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, requestTimeout)
	defer cancel()
	var sent io.Reader
	if body != nil {
		b, err := json.Marshal(body)
		if err != nil {
			return err
		}
		sent = bytes.NewReader(b)
	}
	where := a.base + path
	if len(query) > 0 {
		where += "?" + query.Encode()
	}
	q, err := http.NewRequestWithContext(ctx, method, where, sent)
	if err != nil {
		return err
	}
	q.Header.Set("Accept", accept)
	if body != nil {
		q.Header.Set("Content-Type", plain)
	}
	r, err := a.http.Do(q)
	if err != nil {
		return err
	}
	defer r.Body.Close()
	text, err := io.ReadAll(io.LimitReader(r.Body, maxBody))
	if err != nil {
		return fmt.Errorf("%s %s: %w", method, path, err)
	}
	if r.StatusCode/100 != 2 {
		var said metav1.Status
		_ = json.Unmarshal(text, &said) // else its code is all there is to say
		return &statusError{r.StatusCode, fmt.Sprintf("%s %s: %s: %.200s", method, path, r.Status, said.Message)}
	}
	if err := json.Unmarshal(text, into); err != nil {
		return fmt.Errorf("%s %s: %w", method, path, err)
	}
	return nil
}

// cached accepts any version that the server has at hand.
var cached = url.Values{"resourceVersion": {"0"}}

func (a *api) service(ctx context.Context, n snapshot.Name) (*corev1.Service, error) {
	var svc corev1.Service
	return &svc, a.do(ctx, http.MethodGet, "/api/v1/namespaces/"+url.PathEscape(n.Namespace)+"/services/"+
		url.PathEscape(n.Name), plain, nil, nil, &svc)
}

// slices lists the slices of a Service. The list is consistent: it is not older than the request.
func (a *api) slices(ctx context.Context, n snapshot.Name) (*discoveryv1.EndpointSliceList, error) {
	var list discoveryv1.EndpointSliceList
	q := url.Values{"labelSelector": {discoveryv1.LabelServiceName + "=" + n.Name}}
	return &list, a.do(ctx, http.MethodGet, "/apis/discovery.k8s.io/v1/namespaces/"+url.PathEscape(n.Namespace)+
		"/endpointslices", plain, q, nil, &list)
}

// deleting returns the pods on a node with certain labels that are being deleted.
func (a *api) deleting(ctx context.Context, namespace, node string, labels map[string]string) ([]types.UID, error) {
	var list metav1.PartialObjectMetadataList
	q := url.Values{"labelSelector": {metav1.FormatLabelSelector(&metav1.LabelSelector{MatchLabels: labels})},
		"fieldSelector": {"spec.nodeName=" + node}}
	err := a.do(ctx, http.MethodGet, "/api/v1/namespaces/"+url.PathEscape(namespace)+"/pods", metadataOnly, q, nil, &list)
	var uids []types.UID
	for i := range list.Items {
		if list.Items[i].DeletionTimestamp != nil {
			uids = append(uids, list.Items[i].UID)
		}
	}
	return uids, err
}

// daemonSet is what is of interest of a DaemonSet.
type daemonSet struct {
	Metadata metav1.ObjectMeta `json:"metadata"`
	Spec     struct {
		Selector metav1.LabelSelector `json:"selector"`
	} `json:"spec"`
}

func (a *api) daemonSet(ctx context.Context, n snapshot.Name) (*daemonSet, error) {
	var ds daemonSet
	return &ds, a.do(ctx, http.MethodGet, "/apis/apps/v1/namespaces/"+url.PathEscape(n.Namespace)+"/daemonsets/"+
		url.PathEscape(n.Name), plain, cached, nil, &ds)
}

// nodesOf returns the nodes that pods of a DaemonSet are bound to.
func (a *api) nodesOf(ctx context.Context, ds *daemonSet) (map[string]bool, error) {
	nodes := map[string]bool{}
	q := url.Values{"labelSelector": {metav1.FormatLabelSelector(&ds.Spec.Selector)}, "limit": {fmt.Sprint(pageSize)}}
	for {
		var page struct {
			Metadata metav1.ListMeta `json:"metadata"`
			Items    []struct {
				Metadata struct {
					OwnerReferences []metav1.OwnerReference `json:"ownerReferences"`
				} `json:"metadata"`
				Spec struct {
					NodeName string `json:"nodeName"`
				} `json:"spec"`
			} `json:"items"`
		}
		err := a.do(ctx, http.MethodGet, "/api/v1/namespaces/"+url.PathEscape(ds.Metadata.Namespace)+"/pods", plain, q, nil,
			&page)
		if err != nil {
			return nil, err
		}
		for _, p := range page.Items {
			for _, o := range p.Metadata.OwnerReferences {
				if o.UID == ds.Metadata.UID && p.Spec.NodeName != "" {
					nodes[p.Spec.NodeName] = true
				}
			}
		}
		if page.Metadata.Continue == "" {
			return nodes, nil
		}
		q.Set("continue", page.Metadata.Continue)
	}
}

const leasesPath = "/apis/coordination.k8s.io/v1/namespaces/"

// nodeLease returns the Lease by which a kubelet says that it is there.
func (a *api) nodeLease(ctx context.Context, node string) (*coordinationv1.Lease, error) {
	var l coordinationv1.Lease
	return &l, a.do(ctx, http.MethodGet, leasesPath+corev1.NamespaceNodeLease+"/leases/"+url.PathEscape(node), plain,
		cached, nil, &l)
}

// nodeLeases lists those of all nodes.
func (a *api) nodeLeases(ctx context.Context) ([]coordinationv1.Lease, error) {
	var list coordinationv1.LeaseList
	err := a.do(ctx, http.MethodGet, leasesPath+corev1.NamespaceNodeLease+"/leases", plain, cached, nil, &list)
	return list.Items, err
}

// review asks whether a token is valid for an audience.
func (a *api) review(ctx context.Context, token, audience string) (*authenticationv1.TokenReviewStatus, error) {
	sent := authenticationv1.TokenReview{
		TypeMeta: metav1.TypeMeta{APIVersion: "authentication.k8s.io/v1", Kind: "TokenReview"},
		Spec:     authenticationv1.TokenReviewSpec{Token: token, Audiences: []string{audience}}}
	var got authenticationv1.TokenReview
	err := a.do(ctx, http.MethodPost, "/apis/authentication.k8s.io/v1/tokenreviews", plain, nil, &sent, &got)
	return &got.Status, err
}

// lease reads, creates or updates a Lease.
func (a *api) lease(ctx context.Context, method string, n snapshot.Name, l *coordinationv1.Lease) (
	*coordinationv1.Lease, error) {
	path := leasesPath + url.PathEscape(n.Namespace) + "/leases"
	if method != http.MethodPost {
		path += "/" + url.PathEscape(n.Name)
	}
	var body any
	if l != nil {
		l.TypeMeta = metav1.TypeMeta{APIVersion: "coordination.k8s.io/v1", Kind: "Lease"}
		body = l
	}
	var got coordinationv1.Lease
	return &got, a.do(ctx, method, path, plain, nil, body, &got)
}
