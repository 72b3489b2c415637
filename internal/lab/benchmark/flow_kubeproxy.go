package benchmark

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"time"

	"github.com/vishvananda/netlink"

	"github.com/verdict-proxy/verdict/sync/snapshot"
)

// kubeProxyMost is how long kube-proxy may take to write its rules; it is asked for them every kubeProxyLook.
const (
	kubeProxyMost = 5 * time.Minute
	kubeProxyLook = 200 * time.Millisecond
)

// fillByKubeProxy has kube-proxy write its tables in mode nftables, and ends it. Its rules stay.
func (v *flowVariant) fillByKubeProxy(ctx context.Context) (err error) {
	listener, err := v.node.host.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return err
	}
	api := http.Server{Handler: v.objects(), ReadHeaderTimeout: time.Minute}
	go func() { _ = api.Serve(listener) }()
	defer func() { err = errors.Join(err, api.Close()) }()
	cmd := v.node.host.Command(v.KubeProxy, "--master=http://"+listener.Addr().String(),
		"--kube-api-content-type=application/json", "--hostname-override="+NodeConfig.NodeName, "--proxy-mode=nftables",
		"--cluster-cidr="+NodeConfig.DetectLocal.ClusterCIDRs[0].String(), "--conntrack-max-per-core=0",
		"--conntrack-min=0", "--conntrack-tcp-timeout-established=0", "--conntrack-tcp-timeout-close-wait=0")
	var said bytes.Buffer
	cmd.Stdout, cmd.Stderr = &said, &said
	if err := cmd.StartTied(); err != nil {
		return err
	}
	ended := make(chan error, 1)
	go func() { ended <- cmd.Wait() }()
	ctx, cancel := context.WithTimeoutCause(ctx, kubeProxyMost, errors.New("kube-proxy has not written its rules in time"))
	defer cancel()
	for {
		select {
		case err := <-ended:
			return fmt.Errorf("%s ended: %w: %s", v.KubeProxy, err, lastLines(said.String()))
		case <-ctx.Done():
			return errors.Join(context.Cause(ctx), cmd.Process.Kill(), <-ended)
		case <-time.After(kubeProxyLook):
		}
		if v.wrote() {
			err := cmd.Process.Kill()
			<-ended // killed, as it should be
			return err
		}
	}
}

// wrote says whether all Services are in the kernel.
func (v *flowVariant) wrote() bool {
	if v.connections.ConntrackTableFlush(netlink.ConntrackTable) != nil {
		return false
	}
	_, err := send(v.node.host, v.sends)
	return err == nil && v.look(nodeToService) == nil
}

// lastLines gives the end of what a program said.
func lastLines(said string) string { return said[max(0, len(said)-1000):] }

// objects is the API of a cluster in which nothing changes: each list by the last word of its path, and no changes.
type objects map[string][]byte

// objects gives the variant's Services, their EndpointSlices and the node, as the API has them.
func (v *flowVariant) objects() objects {
	cluster := NewCluster(v.Services, v.Endpoints)
	delta := v.services(cluster, 0, v.Services)
	node := apiObject(snapshot.Name{Name: NodeConfig.NodeName})
	node["status"] = map[string]any{"addresses": []any{map[string]any{"type": "InternalIP",
		"address": addr(flowNode).String()}}}
	var services, endpointSlices []any
	for _, svc := range delta.Services {
		o := apiObject(svc.Name)
		ip, p := svc.ClusterIPs[0].String(), svc.Ports[0]
		o["spec"] = map[string]any{"clusterIP": ip, "clusterIPs": []any{ip}, "ipFamilies": []any{"IPv4"},
			"type": "ClusterIP", "ports": []any{map[string]any{"name": p.Name, "protocol": p.Protocol.String(), "port": p.Port}}}
		services = append(services, o)
	}
	for _, s := range delta.Slices {
		o, p := apiObject(s.Name), s.Ports[0]
		o["metadata"].(map[string]any)["labels"] = map[string]any{"kubernetes.io/service-name": s.Service}
		o["addressType"] = "IPv4"
		o["ports"] = []any{map[string]any{"name": p.Name, "protocol": p.Protocol.String(), "port": p.Port}}
		var endpoints []any
		for _, e := range s.Endpoints {
			endpoints = append(endpoints, map[string]any{"addresses": []any{e.Addr.String()}, "nodeName": e.Node,
				"conditions": map[string]any{"ready": e.Ready, "serving": e.Serving}})
		}
		o["endpoints"] = endpoints
		endpointSlices = append(endpointSlices, o)
	}
	return objects{
		"nodes": list("v1", "Node", []any{node}), "services": list("v1", "Service", services),
		"endpointslices":    list("discovery.k8s.io/v1", "EndpointSlice", endpointSlices),
		"servicecidrs":      list("networking.k8s.io/v1", "ServiceCIDR", nil),
		NodeConfig.NodeName: encodedObject("v1", "Node", node),
	}
}

func apiObject(n snapshot.Name) map[string]any {
	return map[string]any{"metadata": map[string]any{"name": n.Name, "namespace": n.Namespace, "uid": n.String(),
		"resourceVersion": "1"}}
}

func list(version, kind string, items []any) []byte {
	return encodedObject(version, kind+"List", map[string]any{"metadata": map[string]any{"resourceVersion": "1"},
		"items": slices.Concat([]any{}, items)})
}

func encodedObject(version, kind string, o map[string]any) []byte {
	o["apiVersion"], o["kind"] = version, kind
	text, err := json.Marshal(o)
	if err != nil {
		panic(err) // it holds strings, numbers and booleans
	}
	return text
}

// ServeHTTP answers as an API server that does not stream lists.
func (o objects) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	w.Header().Set("Content-Type", "application/json")
	text, known := o[r.URL.Path[strings.LastIndex(r.URL.Path, "/")+1:]]
	status := func(code int, reason string) {
		w.WriteHeader(code)
		fmt.Fprintf(w, `{"apiVersion":"v1","kind":"Status","status":"Failure","reason":%q,"code":%d}`, reason, code)
	}
	switch q := r.URL.Query(); {
	case !known || r.Method != http.MethodGet:
		status(http.StatusNotFound, "NotFound")
	case q.Has("sendInitialEvents"):
		status(http.StatusUnprocessableEntity, "Invalid")
	case q.Has("watch"):
		_ = http.NewResponseController(w).Flush()
		<-r.Context().Done()
	default:
		_, _ = w.Write(text)
	}
}
