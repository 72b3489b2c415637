// Command tailscale sets up what Tailscale's router does on a node for a tailnet, by its own code, and without a
// tailnet: the chains, the rules of routing and the routes of an exit node that advertises subnets.
//
//	tailscale nftables|iptables
//
// It needs a device tailscale0. What it has written stays when it ends.
package main

import (
	"fmt"
	"log"
	"net/netip"
	"os"

	"github.com/tailscale/wireguard-go/tun"
	"tailscale.com/health"
	"tailscale.com/types/preftype"
	"tailscale.com/util/eventbus"
	"tailscale.com/wgengine/router"
	_ "tailscale.com/wgengine/router/osrouter"
)

func main() {
	if len(os.Args) != 2 {
		log.Fatal("usage: tailscale nftables|iptables")
	}
	if err := set(os.Args[1]); err != nil {
		log.Fatal(err)
	}
}

// set sets the router up with a kind of netfilter rules. The router is not closed: that would remove them.
func set(kind string) error {
	bus := eventbus.New()
	r, err := router.New(log.Printf, device{}, nil, health.NewTracker(bus), bus)
	if err != nil {
		return err
	}
	if err := r.Up(); err != nil {
		return fmt.Errorf("up: %w", err)
	}
	return r.Set(&router.Config{
		LocalAddrs:       prefixes("100.100.0.1/32", "fd7a:115c:a1e0::1/128"),
		Routes:           prefixes("100.100.0.2/32", "100.100.100.100/32", "fd7a:115c:a1e0::2/128"),
		SubnetRoutes:     prefixes("10.96.0.0/16", "0.0.0.0/0", "::/0"),
		SNATSubnetRoutes: true,
		NetfilterMode:    preftype.NetfilterOn,
		NetfilterKind:    kind,
	})
}

func prefixes(texts ...string) (out []netip.Prefix) {
	for _, t := range texts {
		out = append(out, netip.MustParsePrefix(t))
	}
	return out
}

// device stands for the tunnel, of which the router asks only the name.
type device struct{ tun.Device }

func (device) Name() (string, error) { return "tailscale0", nil }
