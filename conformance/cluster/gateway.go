package cluster

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
)

// InstallGateway is InstallVerdict with the controller of Gateways and the definitions of Gateway API, of the channel
// "standard" or "experimental".
func (c *Cluster) InstallGateway(ctx context.Context, image, channel string, more ...Addition) error {
	dir, err := c.gatewayModule(ctx, "list", "-m", "-f", "{{.Dir}}", "sigs.k8s.io/gateway-api")
	if err != nil {
		return err
	}
	crds, err := filepath.Glob(filepath.Join(strings.TrimSpace(dir), "config", "crd", channel, "gateway.*.yaml"))
	if err != nil {
		return err
	}
	if _, err := c.Kubectl(ctx, "apply", "--server-side", "-f", strings.Join(crds, ",")); err != nil {
		return err
	}
	if _, err := c.Kubectl(ctx, "wait", "crd", "--all", "--for=condition=Established", "--timeout=1m"); err != nil {
		return err
	}
	return c.applyOverlay(ctx, "overlays/kubeadm", "components/gateway", image, more)
}

// LoadEcho gives the nodes the server of Gateway API's conformance suite, under the names in its manifests.
func (c *Cluster) LoadEcho(ctx context.Context) error {
	c.Log("building the server of Gateway API's suite")
	echo, err := c.from.Peers(ctx, "echo-basic")
	if err != nil {
		return err
	}
	for _, version := range []string{"v0.1.0", "v0.2.0"} {
		err := c.loadImage(ctx, "registry.k8s.io/gateway-api/conformance/echo-basic:"+version, filepath.Dir(echo[0]),
			"FROM scratch\nCOPY echo-basic /echo-basic\nENTRYPOINT [\"/echo-basic\"]\n")
		if err != nil {
			return err
		}
	}
	return nil
}

// Suite builds the module of Gateway API's suite as a program, and returns its path.
func (c *Cluster) Suite(ctx context.Context) (string, error) {
	target := c.file("gateway.test")
	_, err := c.gatewayModule(ctx, "test", "-c", "-trimpath", "-o", target, ".")
	return target, err
}

// gatewayModule runs go in the module of Gateway API's suite, which needs a newer Go than the product.
func (c *Cluster) gatewayModule(ctx context.Context, args ...string) (string, error) {
	cmd := exec.CommandContext(ctx, "go", args...)
	cmd.Dir = filepath.Join(c.from.Root, "conformance", "gateway")
	cmd.Env = append(os.Environ(), "GOTOOLCHAIN=auto", "CGO_ENABLED=0")
	var stderr strings.Builder
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	if err != nil {
		err = fmt.Errorf("go %s in conformance/gateway: %w: %s", args[0], err, strings.TrimSpace(stderr.String()))
	}
	return string(out), err
}
