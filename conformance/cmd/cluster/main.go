// Cluster runs a real cluster of three nodes on this machine, and stories on it. See docs/dev/TESTING.md.
package main

import (
	"context"
	"fmt"
	"os"
	"os/signal"
	"syscall"

	"github.com/verdict-proxy/verdict/conformance/cluster"
)

func main() { os.Exit(status()) }

func status() int {
	if len(os.Args) == 3 && os.Args[1] == cluster.FirstProcess {
		fmt.Fprintln(os.Stderr, cluster.RunFirst(os.Args[2]))
		return 1
	}
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	if err := newCommand().ExecuteContext(ctx); err != nil {
		fmt.Fprintln(os.Stderr, "cluster:", err)
		return 1
	}
	return 0
}
