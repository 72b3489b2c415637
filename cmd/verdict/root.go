package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"syscall"

	"github.com/spf13/cobra"

	"github.com/verdict-proxy/verdict/internal/proxy/node"
	"github.com/verdict-proxy/verdict/internal/system/logging"
	"github.com/verdict-proxy/verdict/internal/system/terminal"
	"github.com/verdict-proxy/verdict/ipvsplugin"
	"github.com/verdict-proxy/verdict/nft/kernel"
)

// Exit statuses.
const (
	exitOK = iota
	exitError
	// exitUnsupported says that this host's kernel, or this process's rights, are not enough: trying again will not help.
	exitUnsupported
)

// run does what the command line says and gives the exit status.
func run() int {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	defer stop()
	err := rootFor(os.Args[0]).ExecuteContext(ctx)
	var status exitStatus
	switch {
	case err == nil:
		return exitOK
	case errors.As(err, &status):
		return int(status)
	}
	last := logging.NewLossy(os.Stderr, func(io.Writer, int) {}) // whoever runs may have a log that nobody reads
	fmt.Fprintln(terminal.NewPrinter(last), "verdict:", err)
	last.Close()
	return statusOf(err)
}

// statusOf returns the exit status for an error.
func statusOf(err error) int {
	var unsupported *kernel.Unsupported
	var modules *ipvsplugin.Missing
	if errors.As(err, &unsupported) || errors.As(err, &modules) || errors.Is(err, kernel.ErrRights) {
		return exitUnsupported
	}
	return exitError
}

// exitStatus is an error that has been reported already.
type exitStatus = node.ExitStatus

func newRoot() *cobra.Command {
	root := &cobra.Command{
		Use:     "verdict",
		Short:   "A Kubernetes Service proxy on nftables verdict maps",
		Version: node.BuildInfo().Version,
		Long: `Verdict programs Kubernetes Services in the Linux kernel: it watches Services and EndpointSlices,
from an API server or from manifest files, and keeps one nftables table per address family in sync
with them. The tables are called "verdict"; "nft list table ip verdict" shows one.

  verdict demo                      see it work in network namespaces, in under 30 seconds
  verdict render --from dump.yaml   print the ruleset for a dump of a cluster; needs no privileges
  verdict run --from dump.yaml      program the Services of a file or directory on this node
  verdict run --kubeconfig FILE     the same from an API server; in a cluster without --kubeconfig
  verdict explain SRC DST:PORT      show where a packet goes, and why
  verdict diff, verdict verify      compare the kernel with the objects, or with what was written
  verdict plan -f change.yaml       show what a change of objects would do on this node
  verdict top                       show the connections per second of Services, live
  verdict status                    show this node's sync status
  verdict flows                     show who connected to Services on this node, and how it ended
  verdict services                  list the Services of this node, the worst first
  verdict bundle                    write an archive for a bug report
  verdict log                       list what was written on this node, when and why
  verdict cleanup                   remove everything that Verdict wrote on this node
  verdict takeover                  remove what a kube-proxy left on this node, as run does
  verdict collect                   run the collector that answers /everywhere requests
  verdict gateway                   run the controller of Gateway API, and the collector with it
  verdict bench                     measure cold starts, changes and churn
  verdict version                   show the version, and what this kernel supports

"kubectl get svc,endpointslices,nodes -A -o yaml" prints a dump.

Pages such as docs/INSTALL.md are in /usr/share/doc/verdict, if a package has
installed this program, and at https://github.com/verdict-proxy/verdict.

Exit status: 0 success; 1 error; 2 the kernel lacks a feature, or privileges are missing. For diff,
verify, compare and plan: 0 equal, 1 different, 2 error.`,
		SilenceUsage:  true,
		SilenceErrors: true,
	}
	root.AddCommand(newDemo(), newRun(), newRender(), newExplain(), newDiff(), newPlan(), newComparePackets(), newVerify(),
		newTop(), newStatus(), newServices(), newFlows(), newBundle(), newProbe(),
		newLedgerLog(), newCleanup(), newTakeover(), newCollect(), newGateway(), newBench(), newVersion())
	setHelp(root)
	completeWords(root)
	return root
}
