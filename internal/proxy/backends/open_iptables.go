package backends

import (
	"context"
	"errors"

	"github.com/verdict-proxy/verdict/internal/proxy/config"
	"github.com/verdict-proxy/verdict/internal/proxy/takeover"
	"github.com/verdict-proxy/verdict/internal/system/ipfamily"
	"github.com/verdict-proxy/verdict/internal/system/sysctl"
	"github.com/verdict-proxy/verdict/nft/iptshim/xtables"
)

// openIPTables opens iptables.
func openIPTables(ctx context.Context, o OpenOptions) (*Opened, error) {
	programs, err := xtables.Find(ctx)
	if err != nil {
		return nil, err
	}
	model := IPTablesOptions(o.Settings)
	model.KeepInvalid = xtables.Liberal() || makesLiberal(o.Host, o.Settings)
	chains, err := xtables.Open(programs, xtables.Options{Model: model, Log: o.Log})
	if err != nil {
		return nil, errors.Join(err, programs.Close())
	}
	o.Log.Info("using iptables", "programs", programs.String(), "variant", programs.Why)
	if err := programs.Missing(ipfamily.IPv6); err != nil {
		o.Log.Warn("IPv6 is not programmed", "why", err)
	}
	return &Opened{
		Writer: chains, Mode: string(config.IPTables), Close: chains.Close,
		Named: takeover.Own{Variant: programs.Variant.String(), Rules: true},
	}, nil
}

// probeIPTables says whether the programs are there.
func probeIPTables(ctx context.Context, _ *config.Settings) error {
	programs, err := xtables.Find(ctx)
	if err != nil {
		return err
	}
	return programs.Close()
}

// removeIPTables removes our rules, and the chains beside nftables unless those are kept.
func removeIPTables(ctx context.Context, o RemoveOptions) ([]string, error) {
	if o.Beside == nil {
		if found, err := takeover.Find(ctx, takeover.Own{}); err == nil && len(found.Running()) > 0 {
			// The chains have kube-proxy's names: it may have made them its own.
			o.Log.Warn("kube-proxy is running on this node; leaving the compatibility chains (iptablesCompat) to it",
				"process", found.Running()[0])
			return nil, nil
		}
	}
	return xtables.RemoveOwn(ctx, o.Beside != nil && o.Beside.Named.Compat, o.Log)
}

// makesLiberal says whether the settings will have the kernel take TCP packets outside of the window for valid.
func makesLiberal(host sysctl.Host, s *config.Settings) bool {
	if !s.Document.KubeProxy.Conntrack.TCPBeLiberal {
		return false
	}
	only := []sysctl.Setting{{Path: "proc/sys/net/netfilter/nf_conntrack_tcp_be_liberal", Value: 1}}
	return len(host.Check(only)) == 0
}
