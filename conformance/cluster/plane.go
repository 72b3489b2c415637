package cluster

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"net/http"
	"net/netip"
	"os"
	"os/exec"
	"strings"
	"time"

	"github.com/verdict-proxy/verdict/internal/lab"
	"github.com/verdict-proxy/verdict/internal/lab/control"
)

const (
	adminToken = "cluster-admin"
	server     = "https://" + gateway4 + ":6443"
)

// programs builds what is missing of Kubernetes and etcd, and returns paths by name.
func (c *Cluster) programs(ctx context.Context) (map[string]string, error) {
	names := []string{"etcd", "kube-apiserver", "kube-controller-manager", "kube-scheduler", "kubelet", "kubectl",
		"kube-proxy"}
	paths, err := c.from.Peers(ctx, names...)
	if err != nil {
		return nil, err
	}
	programs := map[string]string{}
	for i, name := range names {
		programs[name] = paths[i]
	}
	return programs, nil
}

func (c *Cluster) startPlane(ctx context.Context, programs map[string]string) error {
	authority, err := c.writeFiles()
	if err != nil {
		return err
	}
	etcd := []string{"--data-dir=" + c.file("plane", "etcd"), "--unsafe-no-fsync", "--log-level=error",
		"--listen-client-urls=http://127.0.0.1:2379", "--advertise-client-urls=http://127.0.0.1:2379",
		"--listen-peer-urls=http://127.0.0.1:2380"}
	if err := c.startOutside(programs["etcd"], "etcd", etcd...); err != nil {
		return err
	}
	if err := c.startServer(ctx, programs["kube-apiserver"], authority); err != nil {
		return err
	}
	kubeconfig := "--kubeconfig=" + c.Kubeconfig()
	return errors.Join(
		c.startOutside(programs["kube-controller-manager"], "kube-controller-manager", kubeconfig, "--leader-elect=false",
			"--service-account-private-key-file="+c.file("plane", "accounts.key"), "--root-ca-file="+c.file("plane", "ca.crt"),
			"--cluster-cidr="+podRanges, "--allocate-node-cidrs=false"),
		c.startOutside(programs["kube-scheduler"], "kube-scheduler", kubeconfig, "--leader-elect=false"),
	)
}

// startOutside starts a program of the control plane.
func (c *Cluster) startOutside(program, name string, args ...string) error {
	return c.start(name, exec.Command("nsenter", append([]string{"--net=" + netnsPath(outside), program}, args...)...))
}

// writeFiles writes certificates, keys, tokens and the administrator's kubeconfig, and returns the authority's
// certificate.
func (c *Cluster) writeFiles() ([]byte, error) {
	dir := c.file("plane")
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, err
	}
	authority, err := control.NewAuthority()
	if err != nil {
		return nil, err
	}
	addrs := []netip.Addr{netip.MustParseAddr(gateway4), netip.MustParseAddr(gateway6), netip.MustParseAddr("127.0.0.1"),
		lab.Nth(services4, 1), lab.Nth(services6, 1)}
	return authority.PEM, errors.Join(
		authority.Serve(dir, "server", addrs, []string{"kubernetes", "kubernetes.default.svc"}),
		control.WriteKey(c.file("plane", "accounts.key")),
		os.WriteFile(c.file("plane", "ca.crt"), authority.PEM, 0o600),
		os.WriteFile(c.file("plane", "tokens.csv"), []byte(adminToken+`,admin,admin,"system:masters"`+"\n"), 0o600),
		os.WriteFile(c.Kubeconfig(), []byte(control.Kubeconfig(server, authority.PEM, adminToken)), 0o600),
	)
}

func (c *Cluster) startServer(ctx context.Context, program string, authority []byte) error {
	plane := func(name string) string { return c.file("plane", name) }
	err := c.startOutside(program, "kube-apiserver",
		"--etcd-servers=http://127.0.0.1:2379", "--secure-port=6443", "--bind-address=0.0.0.0",
		"--advertise-address="+gateway4,
		"--service-cluster-ip-range="+services4.String()+","+services6.String(),
		"--tls-cert-file="+plane("server.crt"), "--tls-private-key-file="+plane("server.key"),
		"--client-ca-file="+plane("ca.crt"),
		"--token-auth-file="+plane("tokens.csv"), "--authorization-mode=Node,RBAC", "--allow-privileged=true",
		"--service-account-issuer=https://kubernetes.default.svc", "--service-account-key-file="+plane("accounts.key"),
		"--service-account-signing-key-file="+plane("accounts.key"), "--cert-dir="+plane("certificates"),
		"--kubelet-preferred-address-types=InternalIP", "--v=1")
	if err != nil {
		return err
	}
	return c.serverReady(ctx, authority)
}

// StopServer stops the API server. Watches end.
func (c *Cluster) StopServer() error { return c.stop("kube-apiserver") }

// StartServer starts the API server again.
func (c *Cluster) StartServer(ctx context.Context) error {
	program, err := c.from.Peers(ctx, "kube-apiserver")
	if err != nil {
		return err
	}
	authority, err := os.ReadFile(c.file("plane", "ca.crt"))
	if err != nil {
		return err
	}
	return c.startServer(ctx, program[0], authority)
}

func (c *Cluster) serverReady(ctx context.Context, authority []byte) error {
	pool := x509.NewCertPool()
	pool.AppendCertsFromPEM(authority)
	client := &http.Client{Timeout: 10 * time.Second, Transport: &http.Transport{
		DialContext: DialFrom(outside), TLSClientConfig: &tls.Config{RootCAs: pool}, DisableKeepAlives: true}}
	return Wait(ctx, 3*time.Minute, "the API server is ready", func() error {
		for _, name := range []string{"etcd", "kube-apiserver"} {
			if !c.running(name) {
				return fmt.Errorf("%s has ended: see %s", name, c.logFile(name))
			}
		}
		request, err := http.NewRequestWithContext(ctx, http.MethodGet, server+"/readyz", strings.NewReader(""))
		if err != nil {
			return err
		}
		request.Header.Set("Authorization", "Bearer "+adminToken)
		answer, err := client.Do(request)
		if err != nil {
			return err
		}
		answer.Body.Close()
		if answer.StatusCode != http.StatusOK {
			return fmt.Errorf("/readyz answers %d", answer.StatusCode)
		}
		return nil
	})
}
