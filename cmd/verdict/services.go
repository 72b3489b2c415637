package main

import (
	"fmt"
	"strings"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/verdict-proxy/verdict/internal/answers/inspect"
	"github.com/verdict-proxy/verdict/internal/system/terminal"
)

// servicesOptions are what the command line of services says.
type servicesOptions struct {
	asked      inspect.ServicesAsked
	json, wide bool
}

func (o *servicesOptions) addFlags(f *pflag.FlagSet) {
	f.BoolVar(&o.asked.Trouble, "trouble", false, "only Services that are not in order")
	addJSON(f, &o.json, "print JSON (docs/CLUSTER.md)")
	f.Lookup("output").Value = outputFormat{&o.json, &o.wide}
	f.Lookup("output").Usage = "text, json or wide, which shows all addresses and ports"
}

// take reads [NAMESPACE/]NAME, if it is given.
func (o *servicesOptions) take(args []string) error {
	if len(args) == 0 {
		return nil
	}
	namespace, name, qualified := strings.Cut(args[0], "/")
	switch {
	case !qualified:
		o.asked.Name = args[0]
	case o.asked.Namespace != "" && namespace != o.asked.Namespace || name == "" || strings.Contains(name, "/"):
		return fmt.Errorf("%.100q is not [NAMESPACE/]NAME, or --namespace is another", args[0])
	default:
		o.asked.Namespace, o.asked.Name = namespace, name
	}
	return nil
}

// servicesText is what both commands say of the table.
const servicesText = `The worst come first:

  rejected     the kernel rejects it; what it accepted before stays programmed
  waiting      a change is not programmed yet
  unaddressed  other Services have its addresses
  refuses      a port, or a backend of it, has no endpoint: connections are refused
  drops        a port has no endpoint on this node, which its policy asks for
  ejects       an endpoint does not answer this node, or refuses
  unscheduled  it asks for IPVS, and nftables chooses
  masquerades  it asks to keep its clients' addresses, and this node cannot
  programmed   in order

ENDPOINTS says how many endpoints this node sends new connections to, and how many there are. TYPE is
LoadBalancer once there is an address of one.`

func newServices() *cobra.Command {
	var o servicesOptions
	var proxy statusOptions
	cmd := &cobra.Command{
		Use:   "services [[NAMESPACE/]NAME]",
		Short: "List the Services of this node, the worst first",
		Long: `Services asks the proxy on this node for its Services and how they fare. It needs no privileges, and
finds the proxy as status does. "kubectl verdict services" asks all nodes.

` + servicesText,
		Example: `  verdict services --trouble
  verdict services -n shop -o wide`,
		Args: cobra.MaximumNArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			if err := o.take(args); err != nil {
				return err
			}
			addr, err := proxy.address()
			if err != nil {
				return err
			}
			s, err := inspect.LoadServices(cmd.Context(), addr, o.asked)
			if err != nil {
				return unansweredHint(err)
			}
			return inspect.Show(cmd.OutOrStdout(), o.json, s, func(p *terminal.Printer) {
				inspect.PrintServices(p, s, o.wide)
			})
		},
	}
	cmd.Flags().StringVarP(&o.asked.Namespace, "namespace", "n", "", "only Services of this namespace")
	o.addFlags(cmd.Flags())
	proxy.addProxy(cmd.Flags())
	return cmd
}

func newClusterServices(o *clusterOptions) *cobra.Command {
	var s servicesOptions
	cmd := &cobra.Command{
		Use:   "services [[NAMESPACE/]NAME]",
		Short: "List the Services of all nodes, the worst first",
		Long: `Services asks every node for the Services that are not in order there, and one node for all. A Service
is shown as it is on the node where it fares worst, with how many nodes have it so. Without -n, it
lists all namespaces.

` + servicesText,
		Example: `  kubectl verdict services --trouble
  kubectl verdict services shop/cart -o wide`,
		Args: cobra.MaximumNArgs(1),
	}
	o.completeArgs(cmd, serviceNames)
	s.addFlags(cmd.Flags())
	return diffStatus(cmd, func(cmd *cobra.Command, args []string) (int, error) {
		s.asked.Namespace = o.namespace
		if err := s.take(args); err != nil {
			return 0, err
		}
		c, _, err := o.open(cmd)
		if err != nil {
			return 0, err
		}
		found, err := c.Services(cmd.Context(), s.asked)
		if err != nil {
			return 0, err
		}
		return found.Code(), inspect.Show(cmd.OutOrStdout(), s.json, found, func(p *terminal.Printer) {
			found.Print(p, s.wide)
		})
	})
}
