// Package backends lists what can write a node's rules. A new backend is a package of its own, and a line here.
package backends

import (
	"context"
	"errors"
	"fmt"
	"strings"

	"github.com/verdict-proxy/verdict/internal/proxy/config"
	"github.com/verdict-proxy/verdict/internal/system/sysctl"
	"github.com/verdict-proxy/verdict/sync/reconcile"
)

// Backend is one of them.
type Backend struct {
	// Name is its name in configuration.
	Name string
	// Inspect opens what reads its rules on this node, in the network namespace of the calling thread; nil if nothing can.
	Inspect func(ctx context.Context, o InspectOptions) (reconcile.Inspector, error)
	// Open opens what writes its rules, in the network namespace of the calling thread. It makes sure that it can be used
	// there, and writes nothing yet.
	Open func(ctx context.Context, o OpenOptions) (*Opened, error)
	// Probe says whether Open could open it. Nothing stays open and nothing is changed. Nil means that it always can.
	Probe func(ctx context.Context, s *config.Settings) error
	// Remove removes what any process has written with this backend, and names it; nil if that is gone with its process.
	Remove func(ctx context.Context, o RemoveOptions) (removed []string, err error)
	// Sysctls are parameters that it needs and that --init-only is to set; nil if there are none.
	Sysctls func(s *config.Settings) []sysctl.Setting
}

// InspectOptions are what an Inspector may have to know.
type InspectOptions struct {
	// Settings are what the proxy is told; nil stands for the defaults.
	Settings *config.Settings
}

// All are the backends, those first that are to be preferred: those that config.Backends names.
var All = []Backend{
	{Name: string(config.NFTables), Inspect: inspectNFTables, Open: openNFTables, Probe: probeNFTables,
		Remove: removeNFTables, Sysctls: ipvsSysctls},
	{Name: string(config.IPTables), Inspect: inspectIPTables, Open: openIPTables, Probe: probeIPTables,
		Remove: removeIPTables},
}

// Inspect opens the Inspector of the backend that the settings name. With auto, or without settings, it is the
// first one that finds rules of Verdict on this node; where there are none, the first that can be opened.
func Inspect(ctx context.Context, o InspectOptions) (reconcile.Inspector, error) {
	name := config.Auto
	if o.Settings != nil {
		name = o.Settings.Backend
	}
	if name == config.Auto || name == "" {
		return find(ctx, o)
	}
	var names []string
	for _, b := range All {
		if b.Name == string(name) {
			return b.Inspect(ctx, o)
		}
		names = append(names, b.Name)
	}
	return nil, fmt.Errorf("%q is no backend: there are %s", name, strings.Join(names, ", "))
}

// find looks which backend has rules on this node.
func find(ctx context.Context, o InspectOptions) (first reconcile.Inspector, err error) {
	var failed []error
	for _, b := range All {
		if b.Inspect == nil {
			continue
		}
		i, err := b.Inspect(ctx, o)
		if err != nil {
			failed = append(failed, err)
			continue
		}
		present, err := i.Present(ctx)
		switch {
		case err == nil && present:
			if first != nil {
				err = first.Close()
			}
			return i, err
		case first == nil: // what it cannot read, it says when it is asked
			first = i
		default:
			if err := i.Close(); err != nil {
				return nil, errors.Join(err, first.Close())
			}
		}
	}
	if first == nil {
		return nil, errors.Join(failed...)
	}
	return first, nil
}
