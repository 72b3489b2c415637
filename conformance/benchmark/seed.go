package benchmark

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"strconv"
	"time"

	v1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"
	networking "k8s.io/api/networking/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/runtime/serializer/protobuf"
	"k8s.io/client-go/kubernetes/scheme"

	"github.com/verdict-proxy/verdict/internal/lab"
)

// The API server allocates some hundred Services a second, and takes their EndpointSlices at a thousand. So the
// objects are written where it keeps them, as it would have, through the JSON gateway of etcd, which needs no client
// of gRPC.

// store is etcd on a host.
type store struct{ client *http.Client }

func newStore(h *lab.Host) *store {
	return &store{&http.Client{Transport: &http.Transport{DialContext: h.DialContext}}}
}

func (s *store) close() { s.client.CloseIdleConnections() }

// pair is a key and what it holds.
type pair struct {
	Key   []byte `json:"key"`
	Value []byte `json:"value"`
}

type put struct {
	Put pair `json:"requestPut"`
}

// putsAtOnce is how many changes etcd takes in one transaction.
const putsAtOnce = 128

// call sends a request and gives the revision that the store has then.
func (s *store) call(ctx context.Context, path string, request any) (revision string, err error) {
	body, err := json.Marshal(request)
	if err != nil {
		return "", err
	}
	r, err := http.NewRequestWithContext(ctx, http.MethodPost, "http://127.0.0.1:2379/v3/kv/"+path, bytes.NewReader(body))
	if err != nil {
		return "", err
	}
	response, err := s.client.Do(r)
	if err != nil {
		return "", err
	}
	defer response.Body.Close()
	text, err := io.ReadAll(response.Body)
	if err != nil || response.StatusCode != http.StatusOK {
		return "", fmt.Errorf("etcd: %s: %s: %s: %w", path, response.Status, text, err)
	}
	var answer struct {
		Header struct {
			Revision string `json:"revision"`
		} `json:"header"`
	}
	return answer.Header.Revision, json.Unmarshal(text, &answer)
}

func (s *store) put(ctx context.Context, pairs []pair) error {
	for len(pairs) > 0 {
		n := min(len(pairs), putsAtOnce)
		request := struct {
			Success []put `json:"success"`
		}{}
		for _, p := range pairs[:n] {
			request.Success = append(request.Success, put{p})
		}
		if _, err := s.call(ctx, "txn", request); err != nil {
			return err
		}
		pairs = pairs[n:]
	}
	return nil
}

// compact forgets all but the newest content, which the API server does only every five minutes: until then, churn
// could fill the store.
func (s *store) compact(ctx context.Context) error {
	revision, err := s.call(ctx, "range", map[string]any{"key": []byte("/registry/health")})
	if err != nil {
		return err
	}
	if _, err := strconv.ParseInt(revision, 10, 64); err != nil {
		return fmt.Errorf("etcd: revision %q: %w", revision, err)
	}
	_, err = s.call(ctx, "compaction", map[string]any{"revision": revision})
	return err
}

var protobufSerializer = protobuf.NewSerializer(scheme.Scheme, scheme.Scheme)

// encode gives an object as the API server stores and takes it.
func encode(o runtime.Object, version schema.GroupVersion) ([]byte, error) {
	return runtime.Encode(scheme.Codecs.WithoutConversion().EncoderForVersion(protobufSerializer, version), o)
}

// encodeSlice is for requests.
func encodeSlice(s *discovery.EndpointSlice) ([]byte, error) {
	return encode(s, discovery.SchemeGroupVersion)
}

// readyLimit is how long etcd may take to answer.
const readyLimit = 30 * time.Second

// ready waits until the store answers.
func (s *store) ready(ctx context.Context) error {
	for end := time.Now().Add(readyLimit); ; {
		_, err := s.call(ctx, "range", map[string]any{"key": []byte("/registry/health")})
		if err == nil || time.Now().After(end) {
			return err
		}
		if err := sleep(ctx, 50*time.Millisecond); err != nil {
			return err
		}
	}
}

// seed writes all objects of a cluster as soon as the store answers, and says how far it is. No API server may be
// there yet: it would repair what it sees by halves.
func (s *store) seed(ctx context.Context, c *cluster, progress func(done, of int)) error {
	if err := s.ready(ctx); err != nil {
		return err
	}
	var pairs []pair
	var failed error
	add := func(key string, o runtime.Object, version schema.GroupVersion) {
		value, err := encode(o, version)
		if err != nil && failed == nil {
			failed = fmt.Errorf("encode %s: %w", key, err)
		}
		pairs = append(pairs, pair{[]byte("/registry/" + key), value})
	}
	for i := range namespaces {
		n := &v1.Namespace{ObjectMeta: c.meta(i, c.namespace(i), "dddd")}
		n.Namespace, n.Status.Phase = "", v1.NamespaceActive
		n.Labels = map[string]string{v1.LabelMetadataName: n.Name}
		add("namespaces/"+n.Name, n, v1.SchemeGroupVersion)
	}
	for i := range c.endpoints {
		place := c.namespace(i) + "/"
		add("ipaddresses/"+c.clusterIP(i).String(), c.ipAddress(i), networking.SchemeGroupVersion)
		add("services/specs/"+place+c.name(i), c.service(i), v1.SchemeGroupVersion)
		add("endpointslices/"+place+c.name(i)+"-0", c.slice(i), discovery.SchemeGroupVersion)
		if len(pairs) < putsAtOnce && i < len(c.endpoints)-1 {
			continue
		}
		if failed != nil {
			return failed
		}
		if err := s.put(ctx, pairs); err != nil {
			return err
		}
		pairs = pairs[:0]
		progress(i+1, len(c.endpoints))
	}
	return nil
}
