package node

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"os/signal"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/spf13/pflag"

	"github.com/verdict-proxy/verdict/internal/lab/labtest"
	"github.com/verdict-proxy/verdict/internal/proxy/backends"
	"github.com/verdict-proxy/verdict/internal/proxy/config"
	"github.com/verdict-proxy/verdict/internal/system/testkit"
	"github.com/verdict-proxy/verdict/sync/dataplane"
)

// toy is a backend that programs nothing, and prints what it is to program.
type toy struct{}

func (toy) Apply(want *dataplane.State, change dataplane.Change) (dataplane.Receipt, error) {
	for _, n := range change.Services {
		text := "none"
		if svc := want.Services[n]; svc != nil {
			text = ""
			for _, p := range svc.Ports {
				text += fmt.Sprint(p.Frontends[0].Key, p.Cluster.Endpoints)
			}
		}
		fmt.Println("toy:", n, text)
	}
	return dataplane.Receipt{Added: len(change.Services)}, nil
}

func (toy) Check() ([]string, time.Duration, error) { return nil, 0, nil }

func (toy) Remove() error { return nil }

func openToy(context.Context, backends.OpenOptions) (*backends.Opened, error) {
	return &backends.Opened{Writer: toy{}, Mode: "toy", Close: func() error { return nil }}, nil
}

// beToy makes the test program a proxy that has the toy among its backends.
const beToy = "VERDICT_TEST_BE_TOY"

// runToy runs a proxy by its flags, until it is told to stop.
func runToy() error {
	backends.All = append(backends.All, backends.Backend{Name: "toy", Open: openToy})
	config.Backends = append(config.Backends, "toy")
	var flags config.Flags
	set := pflag.NewFlagSet("run", pflag.ContinueOnError)
	flags.Add(set)
	if err := set.Parse(os.Args[1:]); err != nil {
		return err
	}
	settings, problems, err := config.Load(flags.Config, &flags, nil)
	if err != nil {
		return err
	}
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM)
	defer stop()
	return Run(ctx, &flags, settings, problems, os.Stderr)
}

const toyManifest = `
apiVersion: v1
kind: Service
metadata: {name: web, namespace: shop}
spec: {clusterIP: 10.96.0.1, clusterIPs: [10.96.0.1], ports: [{name: http, port: 80, protocol: TCP}]}
---
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata: {name: web-1, namespace: shop, labels: {kubernetes.io/service-name: web}}
addressType: IPv4
ports: [{name: http, port: 8080, protocol: TCP}]
endpoints: [{addresses: ["ADDRESS"], conditions: {ready: true}}]
`

// TestToyBackend: a backend is one package and one line that registers it. A proxy runs with it, from a manifest to
// what is written, follows an edit, and answers health checks and metrics in its name.
func TestToyBackend(t *testing.T) {
	host := labtest.NewHost(t, labtest.NewNet(t), "node")
	dir := t.TempDir()
	write := func(address string) {
		t.Helper()
		draft := filepath.Join(dir, ".draft")
		text := strings.ReplaceAll(toyManifest, "ADDRESS", address)
		labtest.Check(t, os.WriteFile(draft, []byte(text), 0o644))
		labtest.Check(t, os.Rename(draft, filepath.Join(dir, "web.yaml")))
	}
	write("10.244.0.1")
	var said logBuffer
	cmd := host.Command("/proc/self/exe", "--backend=toy", "--from", dir, "--hostname-override=node", "--keeper=none",
		"--cluster-cidr=10.244.0.0/16")
	cmd.Env = append(os.Environ(), beToy+"=1")
	cmd.Stdout, cmd.Stderr = &said, &said
	labtest.Check(t, cmd.Start())
	wait := func(text string) {
		t.Helper()
		said := said.String
		testkit.Eventually(t, 30*time.Second, text, func() bool { return strings.Contains(said(), text) }, said)
	}
	wait("toy: shop/web 10.96.0.1:80/tcp [10.244.0.1:8080")
	wait("all Services are programmed")
	write("10.244.0.2")
	wait("toy: shop/web 10.96.0.1:80/tcp [10.244.0.2:8080")
	mode := labtest.Run(t, host, "", "curl", "-s", "http://127.0.0.1:10249/proxyMode")
	metrics := labtest.Run(t, host, "", "curl", "-s", "http://127.0.0.1:10249/metrics")
	if mode != "toy" || !strings.Contains(metrics, "\nverdict_services 1\n") {
		t.Errorf("mode %q; metrics\n%s", mode, metrics)
	}
	labtest.Check(t, os.Remove(filepath.Join(dir, "web.yaml")))
	wait("toy: shop/web none")
	labtest.Check(t, cmd.Process.Signal(syscall.SIGTERM))
	labtest.Check(t, cmd.Wait())
	if listing := labtest.Run(t, host, "", "nft", "list", "tables"); listing != "" {
		t.Errorf("it wrote %s", bytes.TrimSpace([]byte(listing)))
	}
}
