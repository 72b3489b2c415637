// Package faulty makes a wrong proxy of a right one: it stands between a proxy and the API server, and passes changes
// of EndpointSlices on late, or not at all. The checker of histories must catch such a proxy.
package faulty

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/http/httputil"
	"net/url"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
	clientapi "k8s.io/client-go/tools/clientcmd/api"
)

// Options say what is wrong.
type Options struct {
	// Delay is how late changes of EndpointSlices arrive.
	Delay time.Duration
	// Lose is the suffix of the names of EndpointSlices whose changes do not arrive any more after the first few; empty
	// means none.
	Lose string
	// Kubeconfig is how the API server is reached.
	Kubeconfig string
	// Command is the proxy. In its arguments @kubeconfig stands for a file by which it reaches this program.
	Command []string
}

// before is how many changes of an EndpointSlice arrive before the others are lost.
const before = 3

// Run runs the proxy until it ends, and passes SIGTERM on to it.
func Run(ctx context.Context, o Options) error {
	config, err := clientcmd.BuildConfigFromFlags("", o.Kubeconfig)
	if err != nil {
		return err
	}
	l, err := net.Listen("tcp4", "127.0.0.1:0")
	if err != nil {
		return err
	}
	defer l.Close()
	handler, err := o.handler(config)
	if err != nil {
		return err
	}
	server := &http.Server{Handler: handler, ReadHeaderTimeout: 10 * time.Second}
	go func() { _ = server.Serve(l) }()
	defer server.Close()
	dir, err := os.MkdirTemp("", "faulty-")
	if err != nil {
		return err
	}
	defer os.RemoveAll(dir)
	file := filepath.Join(dir, "kubeconfig")
	if err := writeKubeconfig(file, "http://"+l.Addr().String()); err != nil {
		return err
	}
	ctx, stop := signal.NotifyContext(ctx, syscall.SIGTERM)
	defer stop()
	var args []string
	for _, a := range o.Command[1:] {
		args = append(args, strings.ReplaceAll(a, "@kubeconfig", file))
	}
	cmd := exec.CommandContext(ctx, o.Command[0], args...)
	cmd.Cancel = func() error { return cmd.Process.Signal(syscall.SIGTERM) }
	cmd.Stdout, cmd.Stderr = os.Stdout, os.Stderr
	if err := cmd.Run(); err != nil && ctx.Err() == nil {
		return err
	}
	return nil
}

func writeKubeconfig(path, server string) error {
	c := clientapi.NewConfig()
	c.Clusters["faulty"] = &clientapi.Cluster{Server: server}
	c.AuthInfos["faulty"] = &clientapi.AuthInfo{}
	c.Contexts["faulty"] = &clientapi.Context{Cluster: "faulty", AuthInfo: "faulty"}
	c.CurrentContext = "faulty"
	return clientcmd.WriteToFile(*c, path)
}

// handler passes requests on to the API server, with the rights of the kubeconfig.
func (o Options) handler(config *rest.Config) (http.Handler, error) {
	transport, err := rest.TransportFor(config)
	if err != nil {
		return nil, err
	}
	to, err := url.Parse(config.Host)
	if err != nil {
		return nil, err
	}
	return &httputil.ReverseProxy{
		Rewrite: func(r *httputil.ProxyRequest) {
			r.SetURL(to)
			// Changes are read on the way, so they have to be JSON, and not compressed.
			r.Out.Header.Set("Accept", "application/json")
			r.Out.Header.Del("Accept-Encoding")
		},
		Transport: transport, FlushInterval: -1,
		ModifyResponse: func(r *http.Response) error {
			watch := r.Request.URL.Query().Get("watch")
			if strings.HasSuffix(r.Request.URL.Path, "/endpointslices") && (watch == "true" || watch == "1") {
				r.Body = o.spoil(r.Body)
			}
			return nil
		},
		ErrorHandler: func(w http.ResponseWriter, _ *http.Request, err error) {
			slog.Warn("request failed", "error", err)
			w.WriteHeader(http.StatusBadGateway)
		},
	}, nil
}

// event is what is read of a change.
type event struct {
	Type   string `json:"type"`
	Object struct {
		Metadata struct {
			Name      string `json:"name"`
			Namespace string `json:"namespace"`
		} `json:"metadata"`
	} `json:"object"`
}

// waiting is a line that is due at a time.
type waiting struct {
	at   time.Time
	line []byte
}

// waitingLines is how many changes may wait. When there are more, the API server has to.
const waitingLines = 10000

// spoil gives a stream of changes that is late, and lacks some.
func (o Options) spoil(body io.ReadCloser) io.ReadCloser {
	out, in := io.Pipe()
	queue := make(chan waiting, waitingLines)
	go func() {
		defer close(queue)
		lines, seen := bufio.NewReader(body), make(map[string]int)
		for {
			line, err := lines.ReadBytes('\n')
			if len(line) > 0 && !o.loses(line, seen) {
				queue <- waiting{time.Now().Add(o.Delay), line}
			}
			if err != nil {
				return
			}
		}
	}()
	go func() {
		for w := range queue {
			time.Sleep(time.Until(w.at))
			if _, err := in.Write(w.line); err != nil { // nobody listens any more
				_ = body.Close()
			}
		}
		_ = in.Close()
	}()
	return spoiled{out, body}
}

// spoiled closes both ends.
type spoiled struct {
	io.Reader
	body io.Closer
}

func (s spoiled) Close() error {
	err := s.body.Close()
	if p, ok := s.Reader.(io.Closer); ok {
		err = errors.Join(err, p.Close())
	}
	return err
}

// loses says whether a change is one that does not arrive. seen counts those of each object.
func (o Options) loses(line []byte, seen map[string]int) bool {
	if o.Lose == "" {
		return false
	}
	var e event
	if err := json.Unmarshal(line, &e); err != nil || e.Type != "MODIFIED" {
		return false
	}
	m := e.Object.Metadata
	if !strings.HasSuffix(m.Name, o.Lose) {
		return false
	}
	key := m.Namespace + "/" + m.Name
	if seen[key]++; seen[key] == before+1 {
		slog.Warn(fmt.Sprintf("changes of %s do not arrive any more", key))
	}
	return seen[key] > before
}
