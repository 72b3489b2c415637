package backends

import (
	"context"

	"github.com/verdict-proxy/verdict/internal/proxy/config"
	"github.com/verdict-proxy/verdict/nft/iptshim"
	"github.com/verdict-proxy/verdict/nft/iptshim/xtables"
	"github.com/verdict-proxy/verdict/sync/reconcile"
)

// inspectIPTables reads the rules of iptables.
func inspectIPTables(ctx context.Context, o InspectOptions) (reconcile.Inspector, error) {
	options := iptshim.Options{}
	if o.Settings != nil {
		options = IPTablesOptions(o.Settings)
	}
	i, err := xtables.Inspect(ctx, options)
	if err != nil {
		return nil, err
	}
	return i, nil
}

// IPTablesOptions says how rules of iptables are written.
func IPTablesOptions(s *config.Settings) iptshim.Options {
	o := iptshim.Options{MasqueradeMark: 1 << s.MasqueradeBit}
	if s.IPTablesList {
		o.Dispatch = iptshim.List
	}
	return o
}
