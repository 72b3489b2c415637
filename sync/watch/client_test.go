package watch

import (
	"os"
	"path/filepath"
	"testing"
)

// TestClient: clientConnection and --master mean what they mean to kube-proxy.
func TestClient(t *testing.T) {
	const protobuf, json = "application/vnd.kubernetes.protobuf", "application/json"
	path := filepath.Join(t.TempDir(), "kubeconfig")
	text := `{apiVersion: v1, kind: Config, clusters: [{name: c, cluster: {server: "https://192.0.2.1:6443"}}],
contexts: [{name: x, context: {cluster: c}}], current-context: x}`
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	for _, row := range []struct {
		client                  Client
		host, content, accepted string
	}{
		{Client{Kubeconfig: path}, "https://192.0.2.1:6443", protobuf, protobuf + "," + json},
		{Client{Kubeconfig: path, Master: "https://192.0.2.2"}, "https://192.0.2.2", protobuf, protobuf + "," + json},
		{Client{Master: "http://192.0.2.3:8080", ContentType: json, QPS: 7, Burst: 9}, "http://192.0.2.3:8080", json, ""},
		{Client{Kubeconfig: path, AcceptContentTypes: json}, "https://192.0.2.1:6443", protobuf, json},
	} {
		c, err := row.client.Config()
		if err != nil {
			t.Errorf("%+v: %v", row.client, err)
			continue
		}
		if c.Host != row.host || c.ContentType != row.content || c.AcceptContentTypes != row.accepted ||
			c.QPS != row.client.QPS || c.Burst != row.client.Burst {
			t.Errorf("%+v: %+v", row.client, c)
		}
	}
}
