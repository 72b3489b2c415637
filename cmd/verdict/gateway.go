package main

import "github.com/spf13/cobra"

func newGateway() *cobra.Command {
	o := collectOptions{gateway: true}
	cmd := &cobra.Command{
		Use:   "gateway",
		Short: "Run the collector, and the controller of Gateway API with it",
		Long: `Gateway does what "verdict collect" does, in its place, with the same flags and the same Lease. The
process that leads is also the controller of Gateway API for TCP and UDP: for each Gateway of a
GatewayClass with the controller name verdict-proxy.github.io/gateway it writes a Service with the
annotation verdict-proxy.github.io/backends, and statuses of classes, Gateways and routes.

A Gateway is Programmed once all nodes have programmed its Service and its backends, which the
collector asks them. While no process leads, nodes keep what they have, and follow the endpoints.

Without the definitions of Gateway API in the cluster it watches nothing, and looks for them twice a
minute. docs/GATEWAY.md describes Gateways, statuses, and the rights that it needs.`,
		Example: "  verdict gateway --advertise-address $(POD_IP) --identity $(POD_NAME)",
		Args:    noArgs(""),
	}
	o.bind(cmd)
	return cmd
}
