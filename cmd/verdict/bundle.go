package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/netip"
	"os"
	"os/exec"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/verdict-proxy/verdict/internal/answers/bundle"
	"github.com/verdict-proxy/verdict/internal/answers/cluster"
	"github.com/verdict-proxy/verdict/internal/answers/inspect"
	"github.com/verdict-proxy/verdict/internal/proxy/backends"
	"github.com/verdict-proxy/verdict/internal/proxy/config"
	"github.com/verdict-proxy/verdict/internal/proxy/node"
	"github.com/verdict-proxy/verdict/internal/proxy/status"
	"github.com/verdict-proxy/verdict/internal/system/terminal"
)

// bundleOptions are what the command line of bundle says, on a node and for all.
type bundleOptions struct {
	out         string
	noAddresses bool
}

func (o *bundleOptions) addFlags(cmd *cobra.Command) {
	cmd.Flags().StringVarP(&o.out, "output", "o", "", "the archive to write, - for standard output (default: "+
		"verdict-bundle-TIME.tar.gz)")
	cmd.Flags().BoolVar(&o.noAddresses, "no-addresses", false,
		"replace each IP address by a name of its own, such as IPv4-17")
}

// write writes an archive that a function fills, and says where it is and what it lacks.
func (o *bundleOptions) write(cmd *cobra.Command, fill func(a *bundle.Archive) error) (err error) {
	out, name := cmd.OutOrStdout(), o.out
	if name == "" {
		name = time.Now().Format("verdict-bundle-20060102-150405.tar.gz")
	}
	if name != "-" {
		f, err := os.OpenFile(name, os.O_CREATE|os.O_WRONLY|os.O_TRUNC, 0o600)
		if err != nil {
			return err
		}
		defer func() { err = errors.Join(err, f.Close()) }()
		out = f
	}
	a := bundle.New(out, o.noAddresses)
	if err := errors.Join(fill(a), a.Close()); err != nil {
		return err
	}
	said := terminal.NewPrinter(cmd.ErrOrStderr())
	for _, what := range a.Missing() {
		said.Line("not in it: %s", what)
	}
	if name != "-" {
		said.Line("wrote %s", name)
	}
	return said.Err()
}

func newBundle() *cobra.Command {
	var o bundleOptions
	var proxy statusOptions
	cmd := &cobra.Command{
		Use:   "bundle",
		Short: "Write an archive about this node for a bug report",
		Long: `Bundle writes an archive with the configuration, the status, Services, metrics, tables, flow counts,
ledger and log of this node (docs/CLUSTER.md lists its files). What looks like a secret is left out.
It reads beside a running proxy, and needs CAP_NET_ADMIN; what cannot be read is named in missing.txt.
"kubectl verdict bundle" writes one archive about all nodes.`,
		Example: `  verdict bundle --no-addresses
  verdict bundle -o - | tar tz`,
		Args: noArgs(""),
		RunE: func(cmd *cobra.Command, _ []string) error {
			settings, _, err := config.Load(proxy.config, nil, nil)
			if err != nil {
				return err
			}
			addr := settings.Healthz
			if proxy.healthz != "" {
				if addr, err = proxy.address(); err != nil {
					return err
				}
			}
			return o.write(cmd, func(a *bundle.Archive) error {
				return a.AddParts(cmd.Context(), "", append(partsOfProxy(addr, settings), partsOfHost(proxy.config, addr)...))
			})
		},
	}
	o.addFlags(cmd)
	proxy.addProxy(cmd.Flags())
	return cmd
}

// partsOfProxy are what the proxy says whose health server is at an address.
func partsOfProxy(addr netip.AddrPort, settings *config.Settings) []bundle.Part {
	page := func(name string, at netip.AddrPort, path string) bundle.Part {
		return bundle.Part{Name: name, Write: func(ctx context.Context, w io.Writer) error {
			if !at.IsValid() {
				return errors.New("the proxy has no such server")
			}
			return inspect.AskProxy(ctx, at, path, func(r io.Reader) error {
				_, err := io.Copy(w, r)
				return err
			})
		}}
	}
	return []bundle.Part{
		page("config.json", settings.Metrics, "/configz"),
		page("status.json", addr, "/status?digests=all"),
		{Name: "services.json", Write: func(ctx context.Context, w io.Writer) error {
			s, err := inspect.LoadServices(ctx, addr, inspect.ServicesAsked{})
			if err != nil {
				return err
			}
			return inspect.Show(w, true, s, nil)
		}},
		page("outliers.json", addr, "/outliers"),
		page("slow-starts.json", addr, "/slow-starts"),
		page("metrics.txt", settings.Metrics, "/metrics"),
	}
}

// partsOfHost are what this host has, whether the proxy answers or not.
func partsOfHost(configFile string, addr netip.AddrPort) []bundle.Part {
	return []bundle.Part{
		{Name: "version.json", Write: func(ctx context.Context, w io.Writer) error {
			return inspect.Show(w, true, &versionInfo{node.BuildInfo(), probeKernel(ctx)}, nil)
		}},
		{Name: "programs.txt", Write: writePrograms},
		{Name: "in-force.txt", Write: printInForce},
		{Name: "verify.json", Write: writeVerify},
		{Name: "tables.txt", Write: func(ctx context.Context, w io.Writer) error {
			i, err := backends.Inspect(ctx, backends.InspectOptions{})
			if err != nil {
				return err
			}
			return errors.Join(i.Print(ctx, w), i.Close())
		}},
		{Name: "flows.txt", Write: func(ctx context.Context, w io.Writer) error {
			s, err := inspect.LoadServices(ctx, addr, inspect.ServicesAsked{})
			if err != nil { // then flows are to no Service that is known
				s = &status.Services{}
			}
			return bundle.CountFlows(ctx, w, s.Services)
		}},
		{Name: "ledger.jsonl", Write: func(ctx context.Context, w io.Writer) error {
			o := logOptions{json: true, since: "1h", place: ledgerPlace{config: configFile}}
			dir, err := o.place.path(ctx)
			if err != nil {
				return err
			}
			return o.list(ctx, dir, w)
		}},
		{Name: "journal.txt", Write: func(ctx context.Context, w io.Writer) error {
			return runProgram(ctx, w, "journalctl", "--unit=verdict", "--lines=2000", "--no-pager", "--output=short-iso")
		}},
	}
}

// writeVerify writes what verify says, with each difference.
func writeVerify(ctx context.Context, w io.Writer) error {
	var o inspect.ObjectFlags
	o.AddFlags(pflag.NewFlagSet("", pflag.ContinueOnError))
	c, err := compareTables(ctx, &o)
	if err != nil {
		return err
	}
	return inspect.Show(w, true, c.JSON(true), nil)
}

// writePrograms writes the versions of the kernel and of programs that this host has.
func writePrograms(ctx context.Context, w io.Writer) error {
	kernel, err := os.ReadFile("/proc/version")
	if err == nil {
		_, err = w.Write(kernel)
	}
	for _, name := range []string{"nft", "iptables", "ip6tables", "ipvsadm"} {
		err = errors.Join(err, runProgram(ctx, w, name, "--version"))
	}
	return err
}

// runProgram writes what a program says. That this host does not have it is no error.
func runProgram(ctx context.Context, w io.Writer, name string, args ...string) error {
	path, err := exec.LookPath(name)
	if err != nil {
		return nil
	}
	cmd := exec.CommandContext(ctx, path, args...)
	cmd.Stdout, cmd.Stderr = w, w
	if err := cmd.Run(); err != nil {
		return fmt.Errorf("%s: %w", name, err)
	}
	return nil
}

func newClusterBundle(o *clusterOptions) *cobra.Command {
	var b bundleOptions
	var asked cluster.Bundled
	cmd := &cobra.Command{
		Use:   "bundle",
		Short: "Write an archive about all nodes for a bug report",
		Long: `Bundle runs "verdict bundle" on every node, and writes one archive with a directory for each node: its
configuration, status, Services, metrics, tables, flow counts, ledger and logs (docs/CLUSTER.md lists
the files). What looks like a secret is left out; look at the archive before you publish it.
--no-addresses replaces each IP address, on all nodes by the same name. Nodes that do not answer are
named in missing.txt and by the command, which exits with 2 then. A node may take a minute.`,
		Example: `  kubectl verdict bundle --no-addresses
  kubectl verdict bundle --node node-1 -o bug.tar.gz`,
		Args: noArgs(""),
	}
	b.addFlags(cmd)
	cmd.Flags().StringSliceVar(&asked.Nodes, "node", nil, "only this node; may be repeated")
	cmd.Flags().IntVar(&asked.Lines, "lines", 2000, "how many lines of each log")
	_ = cmd.RegisterFlagCompletionFunc("node", func(cmd *cobra.Command, _ []string, begun string) ([]string,
		cobra.ShellCompDirective) {
		return beginning(nodeNames(cmd.Context(), "", o, cmd), begun), cobra.ShellCompDirectiveNoFileComp
	})
	return diffStatus(cmd, func(cmd *cobra.Command, _ []string) (int, error) {
		if !cmd.Flags().Changed("node-timeout") {
			o.timeout = time.Minute
		}
		c, _, err := o.open(cmd)
		if err != nil {
			return 0, err
		}
		var failed []cluster.NodeAnswer
		err = b.write(cmd, func(a *bundle.Archive) (err error) {
			failed, err = c.Bundle(cmd.Context(), a, asked)
			return err
		})
		if err == nil && len(failed) > 0 {
			err = fmt.Errorf("%s without an answer: %s", terminal.Plural(len(failed), "node"), namesOf(failed))
		}
		return exitSame, err
	})
}

func namesOf(nodes []cluster.NodeAnswer) string {
	var names []string
	for _, n := range nodes {
		names = append(names, n.Node)
	}
	return cluster.Named(names)
}
