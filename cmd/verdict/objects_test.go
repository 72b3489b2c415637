package main

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/spf13/pflag"

	"github.com/verdict-proxy/verdict/internal/answers/inspect"
	"github.com/verdict-proxy/verdict/internal/lab/labtest"
)

// kubeconfigOf writes a kubeconfig for a server.
func kubeconfigOf(t *testing.T, url string) string {
	t.Helper()
	file := filepath.Join(t.TempDir(), "kubeconfig")
	labtest.Check(t, os.WriteFile(file, fmt.Appendf(nil, `{"apiVersion": "v1", "kind": "Config", "current-context": "c",
		"clusters": [{"name": "c", "cluster": {"server": %q}}], "users": [{"name": "u"}],
		"contexts": [{"name": "c", "context": {"cluster": "c", "user": "u"}}]}`, url), 0o600))
	return file
}

// lists is an API server of an age at which lists are not streamed: it answers each list with objects, and no watch.
type lists map[string]string

func (l lists) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	w.Header().Set("Content-Type", "application/json")
	resource := r.URL.Path[strings.LastIndex(r.URL.Path, "/")+1:]
	status := func(code int, reason string) {
		w.WriteHeader(code)
		json.NewEncoder(w).
			Encode(map[string]any{"kind": "Status", "apiVersion": "v1", "status": "Failure", "code": code, "reason": reason,
				"message": resource + " " + reason})
	}
	switch body, ok := l[resource]; {
	case r.URL.Query().Has("sendInitialEvents"):
		status(http.StatusUnprocessableEntity, "Invalid")
	case r.URL.Query().Has("watch"):
		<-r.Context().Done()
	case !ok:
		status(http.StatusForbidden, "Forbidden")
	default:
		fmt.Fprint(w, body)
	}
}

// apiLists are a Service with an endpoint, and a Service that is wrong. ServiceCIDRs are left out: they are forbidden.
var apiLists = lists{
	"services": `{"kind": "ServiceList", "apiVersion": "v1", "metadata": {"resourceVersion": "1"}, "items": [
		{"metadata": {"name": "web", "namespace": "default"}, "spec": {"clusterIP": "10.96.0.1", "clusterIPs": ["10.96.0.1"],
			"ports": [{"port": 80, "protocol": "TCP"}]}},
		{"metadata": {"name": "odd", "namespace": "default"},
			"spec": {"clusterIP": "10.96.0.2", "clusterIPs": ["10.96.0.2", "x"],
			"ports": [{"port": 80, "protocol": "TCP"}]}}]}`,
	"endpointslices": `{"kind": "EndpointSliceList", "apiVersion": "discovery.k8s.io/v1",
		"metadata": {"resourceVersion": "1"}, "items": [
		{"metadata": {"name": "web-1", "namespace": "default", "labels": {"kubernetes.io/service-name": "web"}},
			"addressType": "IPv4",
			"ports": [{"name": "", "port": 8080, "protocol": "TCP"}],
			"endpoints": [{"addresses": ["10.244.1.1"], "nodeName": "n"}]}]}`,
	"nodes": `{"kind": "NodeList", "apiVersion": "v1", "metadata": {"resourceVersion": "1"}, "items": [
		{"metadata": {"name": "n"}, "status": {"addresses": [{"type": "InternalIP", "address": "192.0.2.77"}]}}]}`,
}

// TestExplainFromAPI asks an API server once. One that forbids what is needed, or is not there, is an error at once.
func TestExplainFromAPI(t *testing.T) {
	server := httptest.NewServer(apiLists)
	defer server.Close()
	ask := func(url string) (string, error) {
		return command("explain", "10.244.3.3", "10.96.0.1:80", "--kubeconfig", kubeconfigOf(t, url), "--hostname-override",
			"n", "--json")
	}
	out, err := ask(server.URL)
	labtest.Check(t, err)
	var a inspect.Answer
	labtest.Check(t, json.Unmarshal([]byte(out), &a))
	if v := a.Objects; v.From != "the API server" || len(v.Endpoints) != 1 ||
		v.Endpoints[0].Address.String() != "10.244.1.1" || v.Service.Name != "default/web" {
		t.Errorf("%s", out)
	}
	forbidden := httptest.NewServer(lists{"services": apiLists["services"]})
	defer forbidden.Close()
	gone := httptest.NewServer(nil)
	gone.Close()
	for url, want := range map[string]string{forbidden.URL: "Forbidden", gone.URL: "connection refused"} {
		start := time.Now()
		if out, err := ask(url); err == nil || !strings.Contains(err.Error(), want) || time.Since(start) >= 30*time.Second {
			t.Errorf("%v after %s\n%s", err, time.Since(start), out)
		}
	}
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	var o inspect.ObjectFlags
	f := pflag.NewFlagSet("", pflag.ContinueOnError)
	o.AddFlags(f)
	labtest.Check(t, f.Parse([]string{"--kubeconfig", kubeconfigOf(t, server.URL), "--hostname-override", "n"}))
	if _, err := o.Load(ctx, nil, false); err == nil {
		t.Error("nobody waits any more, and there was an answer")
	}
}
