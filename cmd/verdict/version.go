package main

import (
	"context"

	"github.com/spf13/cobra"

	"github.com/verdict-proxy/verdict/internal/answers/inspect"
	"github.com/verdict-proxy/verdict/internal/proxy/backends"
	"github.com/verdict-proxy/verdict/internal/proxy/config"
	"github.com/verdict-proxy/verdict/internal/proxy/node"
	"github.com/verdict-proxy/verdict/internal/system/terminal"
	"github.com/verdict-proxy/verdict/ipvsplugin"
)

// versionInfo is what version prints with -o json.
type versionInfo struct {
	node.Build
	Kernel kernelInfo `json:"kernel"`
}

// kernelInfo says what can be done with this kernel, by this process.
type kernelInfo struct {
	Release  string    `json:"release"`
	NFTables abilities `json:"nftables"`
	IPTables abilities `json:"iptables"`
	IPVS     abilities `json:"ipvs"`
}

// abilities says whether something can be used, and why not.
type abilities struct {
	Usable bool   `json:"usable"`
	Why    string `json:"why,omitempty"`
}

func able(err error) abilities {
	if err != nil {
		return abilities{Why: err.Error()}
	}
	return abilities{Usable: true}
}

func (a abilities) String() string {
	if a.Usable {
		return "usable"
	}
	return "not usable: " + a.Why
}

func newVersion() *cobra.Command {
	var asJSON bool
	cmd := &cobra.Command{
		Use:   "version",
		Short: "Show the version, and what this kernel supports",
		Long: `Version prints the version, the commit and its date, and which backends this process can use with
this kernel. It changes nothing, but needs CAP_NET_ADMIN.`,
		Args: noArgs(""),
		RunE: func(cmd *cobra.Command, _ []string) error {
			v := &versionInfo{node.BuildInfo(), probeKernel(cmd.Context())}
			return inspect.Show(cmd.OutOrStdout(), asJSON, v, v.print)
		},
	}
	addJSON(cmd.Flags(), &asJSON, "print JSON")
	return cmd
}

// print prints it as text.
func (v *versionInfo) print(p *terminal.Printer) {
	p.Line("verdict   %s", v.Version)
	if v.Commit != "" {
		changed := ""
		if v.Modified {
			changed = ", with other changes"
		}
		p.Line("commit    %s of %s%s", v.Commit, v.Date, changed)
	}
	p.Line("built     with %s for %s", v.Go, v.Platform)
	p.Line("kernel    Linux %s", v.Kernel.Release)
	p.Line("nftables  %s", v.Kernel.NFTables)
	p.Line("iptables  %s", v.Kernel.IPTables)
	p.Line("IPVS      %s", v.Kernel.IPVS)
}

// probeKernel asks the kernel what can be used.
func probeKernel(ctx context.Context) kernelInfo {
	probe := func(backend config.Backend) abilities {
		s, _, err := config.Load("", nil, nil)
		if err == nil {
			s.Backend = backend
			err = backends.Probe(ctx, s)
		}
		return able(err)
	}
	return kernelInfo{
		Release:  node.KernelRelease(),
		NFTables: probe(config.NFTables),
		IPTables: probe(config.IPTables),
		IPVS:     able(ipvsplugin.Probe("rr")),
	}
}
