package backends

import (
	"context"

	"github.com/verdict-proxy/verdict/ipvsplugin"
	"github.com/verdict-proxy/verdict/nft/kernel"
	"github.com/verdict-proxy/verdict/sync/reconcile"
)

// inspectNFTables reads nftables, and IPVS behind it.
func inspectNFTables(context.Context, InspectOptions) (reconcile.Inspector, error) {
	tables, err := kernel.Inspect()
	if err != nil {
		return nil, err
	}
	return ipvsplugin.Inspect(tables), nil
}
