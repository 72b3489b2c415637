package cluster

import (
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"github.com/gorilla/websocket"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/client-go/rest"
)

// newServer is an API server that has one pod, forbids nodes, and lets "echo" and "false" be run in the pod, as servers
// since 1.30 do: by WebSockets.
func newServer(t *testing.T) *client {
	mux := http.NewServeMux()
	mux.HandleFunc("GET /api/v1/nodes", func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "application/json")
		w.WriteHeader(http.StatusForbidden)
		fmt.Fprint(w, `{"kind":"Status","apiVersion":"v1","status":"Failure","reason":"Forbidden","code":403,
			"message":"nodes is forbidden"}`)
	})
	mux.HandleFunc("GET /api/v1/namespaces/kube-system/pods", func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Content-Type", "application/json")
		fmt.Fprintf(w, `{"items":[{"metadata":{"name":"p","labels":{"asked":%q}}}]}`, r.URL.Query().Get("labelSelector"))
	})
	mux.HandleFunc("GET /api/v1/namespaces/kube-system/pods/p/exec", func(w http.ResponseWriter, r *http.Request) {
		up := websocket.Upgrader{Subprotocols: []string{"v5.channel.k8s.io"}}
		c, err := up.Upgrade(w, r, nil)
		if err != nil {
			t.Error(err)
			return
		}
		defer c.Close()
		argv, ended := r.URL.Query()["command"], `{"status":"Success"}`
		if argv[0] == "false" {
			ended = `{"status":"Failure","reason":"NonZeroExitCode","details":{"causes":[{"reason":"ExitCode","message":"1"}]}}`
		}
		said := strings.Join(argv[1:], " ")
		if r.URL.Query().Get("stdin") == "true" {
			said += readInput(c)
		}
		for _, message := range []string{"\x01" + said + " in " + r.URL.Query().Get("container"),
			"\x02to stderr", "\x03" + ended} {
			if err := c.WriteMessage(websocket.BinaryMessage, []byte(message)); err != nil {
				t.Error(err)
			}
		}
		_ = c.WriteMessage(websocket.CloseMessage, websocket.FormatCloseMessage(websocket.CloseNormalClosure, ""))
		_, _, _ = c.ReadMessage() // until the client closes
	})
	mux.HandleFunc("POST /api/v1/namespaces", func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Content-Type", "application/json")
		w.WriteHeader(http.StatusCreated)
		_, _ = io.Copy(w, r.Body)
	})
	mux.HandleFunc("GET /api/v1/namespaces/x", func(w http.ResponseWriter, _ *http.Request) {
		fmt.Fprint(w, `{"metadata":{"name":"x"}}`)
	})
	mux.HandleFunc("DELETE /api/v1/namespaces/x/services/y", func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "application/json")
		w.WriteHeader(http.StatusForbidden)
		fmt.Fprint(w, `{"kind":"Status","apiVersion":"v1","status":"Failure","reason":"Forbidden","code":403,
			"message":"services is forbidden"}`)
	})
	mux.HandleFunc("GET /api/v1/namespaces/kube-system/pods/p/log", func(w http.ResponseWriter, r *http.Request) {
		fmt.Fprint(w, r.URL.RawQuery)
	})
	mux.HandleFunc("/api/v1/namespaces/kube-system/pods/secret/exec", func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "application/json")
		w.WriteHeader(http.StatusForbidden)
		fmt.Fprint(w, `{"kind":"Status","apiVersion":"v1","status":"Failure","reason":"Forbidden","code":403,
			"message":"pods \"secret\" is forbidden"}`)
	})
	server := httptest.NewServer(mux)
	t.Cleanup(server.Close)
	c, err := newClient(&rest.Config{Host: server.URL})
	if err != nil {
		t.Fatal(err)
	}
	return c
}

// readInput reads standard input to its end, as the protocol tells it.
func readInput(c *websocket.Conn) (input string) {
	for {
		_, message, err := c.ReadMessage()
		if err != nil || string(message) == "\xff\x00" {
			return input
		}
		if message[0] == 0 {
			input += string(message[1:])
		}
	}
}

// TestClient: requests arrive at a server, and what it forbids becomes the name of the right that is missing.
func TestClient(t *testing.T) {
	c := newServer(t)
	pods, err := c.Pods(t.Context(), "kube-system", "a=b")
	if err != nil || len(pods) != 1 || pods[0].Labels["asked"] != "a=b" {
		t.Errorf("%+v %v", pods, err)
	}
	_, err = c.Nodes(t.Context())
	if want := "you lack the right to list nodes in the whole cluster"; err == nil ||
		!strings.Contains(err.Error(), want) {
		t.Errorf("%v; want %q", err, want)
	}
	for argv, code := range map[string]int{"echo some words": 0, "false some words": 1} {
		var out, errs strings.Builder
		got, err := c.Exec(t.Context(), "kube-system", "p", "verdict", strings.Fields(argv), nil, &out, &errs)
		if err != nil || got != code || out.String() != "some words in verdict" || errs.String() != "to stderr" {
			t.Errorf("%s: %d %v, %q and %q", argv, got, err, out.String(), errs.String())
		}
	}
	var n corev1.Namespace
	err = errors.Join(c.Create(t.Context(), "/api/v1/namespaces", &n), c.Read(t.Context(), "/api/v1/namespaces/x", &n))
	if err != nil || n.Name != "x" {
		t.Errorf("namespace %q: %v", n.Name, err)
	}
	err = c.Remove(t.Context(), "/api/v1/namespaces/x/services/y")
	if want := "you lack the right to delete services in namespace x"; err == nil ||
		!strings.Contains(err.Error(), want) {
		t.Errorf("%v; want %q", err, want)
	}
	log, err := c.Logs(t.Context(), "kube-system", "p", "verdict", 7, true)
	if err != nil || string(log) != "container=verdict&limitBytes=8388608&previous=true&tailLines=7" {
		t.Errorf("log: %v %q", err, log)
	}
	var out strings.Builder
	input := strings.Repeat("x", 100000)
	got, err := c.Exec(t.Context(), "kube-system", "p", "verdict", []string{"cat"}, strings.NewReader(input), &out, nil)
	if err != nil || got != 0 || !strings.HasPrefix(out.String(), input+" in verdict") {
		t.Errorf("with standard input: %d %v, %d bytes", got, err, out.Len())
	}
	_, err = c.Exec(t.Context(), "kube-system", "secret", "verdict", []string{"x"}, nil, nil, nil)
	if want := "you lack the right to create pods/exec in namespace kube-system"; err == nil ||
		!strings.Contains(err.Error(), want) {
		t.Errorf("%v; want %q", err, want)
	}
}
