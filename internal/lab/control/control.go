// Package control runs a real control plane on a host of the lab: etcd, kube-apiserver and, where a case wants real
// EndpointSlices, kube-controller-manager. All are built from their Go modules, see conformance/peers.
package control

import (
	"context"
	"encoding/base64"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"time"

	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"

	"github.com/verdict-proxy/verdict/internal/lab"
)

// Plane is a control plane.
type Plane struct {
	// Client speaks to the API server as an administrator, without a limit of requests.
	Client kubernetes.Interface

	config   Config
	ca       *Authority
	url      string
	etcd     *Process
	server   *Process
	managers *Process
}

// Config says how the control plane is to be.
type Config struct {
	// Host is where it runs. Its first addresses are where it is reached.
	Host *lab.Host
	// Etcd, APIServer and ControllerManager are the programs. ControllerManager may be empty if it is never started.
	Etcd, APIServer, ControllerManager string
	// Dir is an empty directory for its files.
	Dir string
	// ServiceRanges are the ranges of cluster IPs, the first family is the primary one.
	ServiceRanges []netip.Prefix
	// RequestTimeout is how long a request may take, which large lists need; 0 means 10 s. It is also how long the server
	// takes to end while somebody watches.
	RequestTimeout time.Duration
	// Fill, if there is any, writes objects into etcd before the API server is started.
	Fill func(context.Context) error
}

const (
	adminToken = "conformance-admin"
	proxyToken = "conformance-proxy"
	securePort = 6443
	// readyLimit is for the API server on a slow machine, such as a guest on a busy one. One that ends is noticed at once.
	readyLimit = 15 * time.Minute
)

// tokens say who is who. A proxy has the rights that Kubernetes gives to kube-proxy, no more.
const tokens = adminToken + `,admin,admin,"system:masters"
` + proxyToken + `,system:kube-proxy,proxy
`

// Start starts etcd and the API server, and waits until it answers.
func Start(ctx context.Context, c Config) (*Plane, error) {
	if c.RequestTimeout == 0 {
		c.RequestTimeout = 10 * time.Second
	}
	p := &Plane{config: c, url: fmt.Sprintf("https://%s", netip.AddrPortFrom(c.Host.IP4, securePort))}
	if err := p.start(ctx); err != nil {
		return nil, errors.Join(fmt.Errorf("control plane: %w", err), p.Close())
	}
	return p, nil
}

func (p *Plane) start(ctx context.Context) error {
	if err := p.writeFiles(); err != nil {
		return err
	}
	// Each request has its own stream on one connection, so the dialer is not asked often.
	config := &rest.Config{
		Host: p.url, BearerToken: adminToken, TLSClientConfig: rest.TLSClientConfig{CAData: p.ca.PEM},
		QPS: -1, Dial: p.config.Host.DialContext, Timeout: 2 * p.config.RequestTimeout, WarningHandler: rest.NoWarnings{},
	}
	var err error
	if p.Client, err = kubernetes.NewForConfig(config); err != nil {
		return err
	}
	p.etcd = NewProcess(p.config.Host, p.file("etcd.log"), p.config.Etcd,
		"--data-dir="+p.file("etcd"), "--unsafe-no-fsync", "--log-level=error",
		"--listen-client-urls=http://127.0.0.1:2379", "--advertise-client-urls=http://127.0.0.1:2379",
		"--listen-peer-urls=http://127.0.0.1:2380")
	if err := p.etcd.Start(); err != nil {
		return err
	}
	if p.config.Fill != nil {
		if err := p.config.Fill(ctx); err != nil {
			return fmt.Errorf("fill etcd: %w; it says:\n%s", err, p.etcd.Tail())
		}
	}
	p.server = NewProcess(p.config.Host, p.file("kube-apiserver.log"), p.config.APIServer, p.serverArgs()...)
	return p.StartServer(ctx)
}

func (p *Plane) file(name string) string { return filepath.Join(p.config.Dir, name) }

func (p *Plane) writeFiles() error {
	var err error
	if p.ca, err = NewAuthority(); err != nil {
		return err
	}
	addrs := []netip.Addr{p.config.Host.IP4, netip.MustParseAddr("127.0.0.1")}
	if p.config.Host.IP6.IsValid() {
		addrs = append(addrs, p.config.Host.IP6)
	}
	for _, r := range p.config.ServiceRanges {
		addrs = append(addrs, lab.Nth(r, 1))
	}
	if err := p.ca.Serve(p.config.Dir, "server", addrs, []string{"kubernetes", "kubernetes.default.svc"}); err != nil {
		return err
	}
	return errors.Join(WriteKey(p.file("accounts.key")), os.WriteFile(p.file("ca.crt"), p.ca.PEM, 0o600),
		os.WriteFile(p.file("tokens.csv"), []byte(tokens), 0o600),
		os.WriteFile(p.AdminKubeconfig(), []byte(Kubeconfig(p.url, p.ca.PEM, adminToken)), 0o600),
		os.WriteFile(p.Kubeconfig(), []byte(Kubeconfig(p.url, p.ca.PEM, proxyToken)), 0o600))
}

// AdminKubeconfig is the file for who may do everything.
func (p *Plane) AdminKubeconfig() string { return p.file("admin.kubeconfig") }

// Kubeconfig is the file for a proxy.
func (p *Plane) Kubeconfig() string { return p.file("proxy.kubeconfig") }

// Kubeconfig returns the file for a client with a token.
func Kubeconfig(url string, authority []byte, token string) string {
	return fmt.Sprintf(`apiVersion: v1
kind: Config
current-context: conformance
contexts: [{name: conformance, context: {cluster: conformance, user: conformance}}]
clusters: [{name: conformance, cluster: {server: %q, certificate-authority-data: %s}}]
users: [{name: conformance, user: {token: %s}}]
`, url, base64.StdEncoding.EncodeToString(authority), token)
}

func (p *Plane) serverArgs() []string {
	var ranges []string
	for _, r := range p.config.ServiceRanges {
		ranges = append(ranges, r.String())
	}
	ip := p.config.Host.IP4.String()
	return []string{
		"--etcd-servers=http://127.0.0.1:2379", fmt.Sprintf("--secure-port=%d", securePort), "--bind-address=0.0.0.0",
		"--advertise-address=" + ip, "--service-cluster-ip-range=" + strings.Join(ranges, ","),
		"--tls-cert-file=" + p.file("server.crt"), "--tls-private-key-file=" + p.file("server.key"), "--client-ca-file=" +
			p.file("ca.crt"),
		"--token-auth-file=" + p.file("tokens.csv"), "--authorization-mode=RBAC",
		"--service-account-issuer=" + p.url, "--service-account-key-file=" + p.file("accounts.key"),
		"--service-account-signing-key-file=" + p.file("accounts.key"), "--cert-dir=" + p.file("certificates"),
		// Pods here have no tokens, and stories write many objects at once.
		"--disable-admission-plugins=ServiceAccount", "--max-requests-inflight=0", "--max-mutating-requests-inflight=0",
		"--enable-priority-and-fairness=false", "--shutdown-delay-duration=0s", "--v=1",
		"--request-timeout=" + p.config.RequestTimeout.String(),
	}
}

// StartServer starts the API server, which must not run, and waits until it is ready. Controllers are started again:
// they would wait half a minute before they look for it.
func (p *Plane) StartServer(ctx context.Context) error {
	if err := p.server.Start(); err != nil {
		return err
	}
	if err := p.ready(ctx); err != nil || p.managers == nil {
		return err
	}
	if err := p.managers.Kill(); err != nil {
		return err
	}
	return p.managers.Start()
}

// StopServer stops the API server in the ordinary way; KillServer kills it.
func (p *Plane) StopServer(ctx context.Context) error { return p.server.Stop(ctx) }

// KillServer kills the API server.
func (p *Plane) KillServer() error { return p.server.Kill() }

// StartControllers starts the controllers that make EndpointSlices for Services with selectors and for Endpoints
// objects. Started already, it does nothing.
func (p *Plane) StartControllers() error {
	if p.managers != nil {
		return nil
	}
	p.managers = NewProcess(p.config.Host, p.file("kube-controller-manager.log"), p.config.ControllerManager,
		"--kubeconfig="+p.AdminKubeconfig(), "--leader-elect=false", "--kube-api-qps=200", "--kube-api-burst=400",
		"--controllers=endpointslice-controller,endpointslice-mirroring-controller,service-cidr-controller",
		"--concurrent-service-endpoint-syncs=10", "--v=1")
	return p.managers.Start()
}

func (p *Plane) ready(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, readyLimit)
	defer cancel()
	var last error
	for ctx.Err() == nil {
		if p.server.Ended() {
			return fmt.Errorf("kube-apiserver ended: %s", p.server.Tail())
		}
		if p.etcd.Ended() {
			return fmt.Errorf("etcd ended: %s", p.etcd.Tail())
		}
		try, done := context.WithTimeout(ctx, 10*time.Second)
		_, last = p.Client.Discovery().RESTClient().Get().AbsPath("/readyz").DoRaw(try)
		done()
		if last == nil {
			return nil
		}
		select {
		case <-ctx.Done():
		case <-time.After(50 * time.Millisecond):
		}
	}
	return fmt.Errorf("kube-apiserver is not ready: %w: %s", last, p.server.Tail())
}

// Close ends everything.
func (p *Plane) Close() error {
	var errs []error
	for _, process := range []*Process{p.managers, p.server, p.etcd} {
		if process != nil {
			errs = append(errs, process.Kill())
		}
	}
	return errors.Join(errs...)
}
