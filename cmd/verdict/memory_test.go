package main

import (
	"bytes"
	"fmt"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	networkingv1 "k8s.io/api/networking/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/runtime/serializer/protobuf"

	"github.com/verdict-proxy/verdict/internal/lab"
	"github.com/verdict-proxy/verdict/internal/lab/labtest"
	"github.com/verdict-proxy/verdict/internal/system/ipfamily"
)

// crowd is an API server with many Services, as large in memory as those of a cluster, that never change.
type crowd map[string][]byte

// newCrowd gives one whose Services have so many endpoints each, but for the first, which has one.
func newCrowd(t *testing.T, services, endpoints int, first netip.Addr) crowd {
	t.Helper()
	scheme := runtime.NewScheme()
	encode := func(o runtime.Object, kind schema.GroupVersionKind) []byte {
		var out bytes.Buffer
		o.GetObjectKind().SetGroupVersionKind(kind)
		labtest.Check(t, protobuf.NewSerializer(scheme, scheme).Encode(o, &out))
		return out.Bytes()
	}
	version := metav1.ListMeta{ResourceVersion: "1"}
	all, slices := &corev1.ServiceList{ListMeta: version}, &discoveryv1.EndpointSliceList{ListMeta: version}
	const uid = "6f9d3c1e-0000-4000-8000-000000000000"
	ready, node, name, port, protocol := true, "node", "", int32(8080), corev1.ProtocolTCP
	for i := range services {
		meta := metav1.ObjectMeta{Namespace: "default", Name: fmt.Sprintf("web-%d", i), ResourceVersion: "1", UID: uid}
		ip := lab.Nth(lab.ServiceRange[0], i+1).String()
		spec := corev1.ServiceSpec{ClusterIP: ip, ClusterIPs: []string{ip}, Selector: map[string]string{"app": meta.Name},
			Ports: []corev1.ServicePort{{Port: 80, Protocol: protocol}}}
		all.Items = append(all.Items, corev1.Service{ObjectMeta: meta, Spec: spec})
		meta.Labels = map[string]string{discoveryv1.LabelServiceName: meta.Name}
		slice := discoveryv1.EndpointSlice{ObjectMeta: meta, AddressType: discoveryv1.AddressTypeIPv4,
			Ports: []discoveryv1.EndpointPort{{Name: &name, Port: &port, Protocol: &protocol}}}
		for e := range endpoints {
			at := lab.Nth(lab.PodRange[0], (i*endpoints+e)%60000+10)
			if i == 0 && e > 0 {
				break
			} else if i == 0 {
				at = first
			}
			slice.Endpoints = append(slice.Endpoints, discoveryv1.Endpoint{Addresses: []string{at.String()},
				NodeName: &node, Conditions: discoveryv1.EndpointConditions{Ready: &ready, Serving: &ready},
				TargetRef: &corev1.ObjectReference{
					Kind:      "Pod",
					Namespace: "default",
					Name:      fmt.Sprintf("web-%d-%d", i, e),
					UID:       uid,
				}})
		}
		slices.Items = append(slices.Items, slice)
	}
	return crowd{
		"services":       encode(all, corev1.SchemeGroupVersion.WithKind("ServiceList")),
		"endpointslices": encode(slices, discoveryv1.SchemeGroupVersion.WithKind("EndpointSliceList")),
		"nodes": encode(
			&corev1.NodeList{ListMeta: version, Items: []corev1.Node{{ObjectMeta: metav1.ObjectMeta{Name: node}}}},
			corev1.SchemeGroupVersion.WithKind("NodeList"),
		),
		"servicecidrs": encode(&networkingv1.ServiceCIDRList{ListMeta: version},
			networkingv1.SchemeGroupVersion.WithKind("ServiceCIDRList")),
	}
}

func (c crowd) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	body, ok := c[r.URL.Path[strings.LastIndex(r.URL.Path, "/")+1:]]
	switch {
	case !ok: // an event
		w.WriteHeader(http.StatusCreated)
	case r.URL.Query().Has("sendInitialEvents"):
		w.Header().Set("Content-Type", "application/json")
		w.WriteHeader(http.StatusUnprocessableEntity)
		fmt.Fprint(w, `{"kind": "Status", "apiVersion": "v1", "status": "Failure", "reason": "Invalid", "code": 422}`)
	case r.URL.Query().Has("watch"):
		w.Header().Set("Content-Type", runtime.ContentTypeProtobuf+";stream=watch")
		w.(http.Flusher).Flush()
		<-r.Context().Done()
	default:
		w.Header().Set("Content-Type", runtime.ContentTypeProtobuf)
		_, _ = w.Write(body)
	}
}

func (c crowd) serve(t *testing.T, host *lab.Host) string {
	t.Helper()
	server := httptest.NewUnstartedServer(c)
	server.Listener.Close()
	var err error
	server.Listener, err = host.Listen("tcp", netip.AddrPortFrom(host.IP(ipfamily.IPv4), 6443).String())
	labtest.Check(t, err)
	server.Start()
	t.Cleanup(func() {
		server.CloseClientConnections()
		server.Close()
	})
	return server.URL
}

// TestMemoryLimit gives the proxy less memory than its Services take. The kernel kills it again and again, and the
// log says why; Services stay as they were; and once there is enough, all is well without any other help.
func TestMemoryLimit(t *testing.T) {
	const services, endpoints = 5000, 20
	group, err := labtest.NewMemory(t)
	if err != nil {
		t.Skipf("without a control group nothing has a limit: %v", err)
	}
	s := newShown(t, newLog(t))
	s.group = group
	pod := s.cluster.Pods[0]
	s.start()
	s.wait("all Services are programmed", 1)
	least := s.group.Used(t) // as good as nothing is needed for one Service
	s.ends()
	url := newCrowd(t, services, endpoints, pod.IP(ipfamily.IPv4)).serve(t, s.cluster.Outside)
	flags := []string{"--kubeconfig", kubeconfigOf(t, url)}
	s.startWith(flags...)
	s.wait("all Services are programmed", 2)
	s.sends(pod)
	much := s.group.Used(t)
	s.ends()

	t.Logf("one Service: %d MiB, all: %d MiB", least>>20, much>>20)
	s.group.Limit(t, least+(much-least)/4)
	s.startWith(flags...)
	s.wait("the kernel has killed processes of this container", 2)
	s.sends(pod)
	if strings.Count(s.said(), "all Services are programmed") > 2 || s.group.Killed(t) == 0 {
		t.Fatalf("there was enough memory:\n%s", s.said())
	}
	s.group.Limit(t, 4*much)
	s.wait("all Services are programmed", 3)
	s.sends(pod)
	s.ends()
	said := s.said()
	if last := said[strings.LastIndex(said, "starting verdict"):]; !strings.Contains(last, "nothing was written") {
		t.Errorf("it wrote again what was there:\n%s", last)
	}
}
