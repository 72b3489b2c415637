package main

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/netip"
	"time"

	"github.com/spf13/cobra"

	"github.com/verdict-proxy/verdict/internal/answers/dashboard"
)

func newClusterDashboard(o *clusterOptions) *cobra.Command {
	var listen string
	var interval time.Duration
	cmd := &cobra.Command{
		Use:   "dashboard",
		Short: "Show all nodes in a browser, live",
		Long: `Dashboard serves one page to a browser on this host, until you stop it: the nodes and their lag,
connections per second by Service and endpoint, ejected endpoints and quarantined Services, the last
changes with their durations, and a field for explain. Open the address that it prints; the page
needs the token in it.

Dashboard asks the nodes with your own rights, as status and top do, and only while a window is open.`,
		Args: noArgs(""),
	}
	cmd.Flags().StringVar(&listen, "listen", "127.0.0.1:0", "address and port of this host; port 0: any that is free")
	cmd.Flags().DurationVar(&interval, "interval", 2*time.Second, "time between two refreshes, at least 500ms")
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		at, err := netip.ParseAddrPort(listen)
		switch {
		case err != nil:
			return fmt.Errorf("--listen: %q is not an address and port such as 127.0.0.1:8080", listen)
		case !at.Addr().IsLoopback():
			return fmt.Errorf("--listen: %s is not a loopback address; to look from elsewhere, forward the port (ssh -L)",
				at.Addr())
		case interval < 500*time.Millisecond:
			return fmt.Errorf("--interval: %s is less than 500ms", interval)
		}
		c, namespace, err := o.open(cmd)
		if err != nil {
			return err
		}
		c.Progress = nil
		return serveDashboard(cmd, dashboard.New(c, namespace, interval), listen)
	}
	return cmd
}

// serveDashboard serves until the command is told to end.
func serveDashboard(cmd *cobra.Command, s *dashboard.Server, listen string) error {
	l, err := net.Listen("tcp", listen)
	if err != nil {
		return err
	}
	fmt.Fprintln(cmd.OutOrStdout(), s.URL(l.Addr()))
	server := &http.Server{Handler: s.Handler(), ReadHeaderTimeout: 10 * time.Second}
	stop := context.AfterFunc(cmd.Context(), func() { _ = server.Close() })
	defer stop()
	if err := server.Serve(l); !errors.Is(err, http.ErrServerClosed) {
		return err
	}
	return nil
}
