package main

import (
	"net/netip"
	"reflect"
	"strings"
	"testing"

	"github.com/spf13/pflag"

	"github.com/verdict-proxy/verdict/sync/dataplane"
)

// TestPolicyFlags says what the flags mean, and what wrong ones are told.
func TestPolicyFlags(t *testing.T) {
	prefixes := func(texts ...string) []netip.Prefix {
		var out []netip.Prefix
		for _, s := range texts {
			out = append(out, netip.MustParsePrefix(s))
		}
		return out
	}
	for _, c := range []struct {
		flags string
		want  dataplane.Config
		err   string
	}{
		{flags: "", want: dataplane.Config{LocalhostNodePorts: true}},
		{flags: "--cluster-cidr=10.244.7.0/16,fd00::/48 --masquerade-all --localhost-nodeports=false", want: dataplane.Config{
			MasqueradeAll: true, DetectLocal: dataplane.DetectLocal{ClusterCIDRs: prefixes("10.244.0.0/16", "fd00::/48")}}},
		{flags: "--detect-local-mode=NodeCIDR", want: dataplane.Config{LocalhostNodePorts: true,
			DetectLocal: dataplane.DetectLocal{Mode: dataplane.DetectNodeCIDR}}},
		{flags: "--detect-local-mode=InterfaceNamePrefix --pod-interface-name-prefix=cali", want: dataplane.Config{LocalhostNodePorts: true,
			DetectLocal: dataplane.DetectLocal{Mode: dataplane.DetectInterfaceNamePrefix, Interface: "cali"}}},
		{flags: "--nodeport-addresses=primary", want: dataplane.Config{LocalhostNodePorts: true}},
		{flags: "--nodeport-addresses=10.0.0.0/8,fd00::/8", want: dataplane.Config{LocalhostNodePorts: true,
			NodePortAddresses: prefixes("10.0.0.0/8", "fd00::/8")}},
		{flags: "--nodeport-addresses=primary,10.0.0.0/8", err: `--nodeport-addresses: "primary" stands alone, without ranges`},
		{flags: "--cluster-cidr=10.244.0.0", err: `--cluster-cidr: "10.244.0.0" is no range of addresses such as 10.244.0.0/16`},
		{flags: "--cluster-cidr=::ffff:10.0.0.0/104", err: `--cluster-cidr: "::ffff:10.0.0.0/104" is no range`},
		{flags: "--detect-local-mode=Magic", err: `--detect-local-mode: "Magic" is none of ClusterCIDR`},
		{flags: "--detect-local-mode=BridgeInterface", err: "--pod-bridge-interface is needed in this --detect-local-mode"},
		{flags: "--detect-local-mode=BridgeInterface --pod-bridge-interface=a*", err: `--pod-bridge-interface: "a*" is no interface name`},
	} {
		var p policyFlags
		f := pflag.NewFlagSet("run", pflag.ContinueOnError)
		p.add(f)
		if err := f.Parse(append(strings.Fields(c.flags), "--node-name=n")); err != nil {
			t.Fatal(err)
		}
		got, err := p.config()
		c.want.NodeName = "n"
		switch {
		case c.err != "" && (err == nil || !strings.HasPrefix(err.Error(), c.err)):
			t.Errorf("%q: got error %v, want %s", c.flags, err, c.err)
		case c.err == "" && (err != nil || !reflect.DeepEqual(got, c.want)):
			t.Errorf("%q: got %+v, %v; want %+v", c.flags, got, err, c.want)
		}
	}
}
