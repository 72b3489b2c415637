// Workload is what runs in pods of the cluster that conformance/cluster starts:
//
//	workload                             the process that holds a pod's namespaces
//	workload serve ADDRESS               answers each line with its host's name and the client's address
//	workload get URL                     asks it, for hooks
//	workload connect ADDRESS TARGET...   connects to each target all the time, holds connections, and reports at /report
//	workload probe FROM N TARGET...      opens N connections to each target at once, and says what came of them
package main

import (
	"fmt"
	"os"
	"os/signal"
	"syscall"
)

func main() {
	var err error
	switch args := os.Args[1:]; {
	case len(args) == 0:
		pause()
	case len(args) == 2 && args[0] == "serve":
		err = serve(args[1])
	case len(args) == 2 && args[0] == "get":
		err = get(args[1])
	case len(args) > 2 && args[0] == "connect":
		err = connect(args[1], args[2:])
	case len(args) > 3 && args[0] == "probe":
		err = probe(args[1], args[2], args[3:])
	default:
		err = fmt.Errorf("usage: workload [serve ADDRESS | get URL | connect ADDRESS TARGET... | probe FROM N TARGET...]")
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "workload:", err)
		os.Exit(1)
	}
}

// pause waits for a signal, and for the children of processes that have ended.
func pause() {
	signals := make(chan os.Signal, 16)
	signal.Notify(signals, syscall.SIGTERM, syscall.SIGINT, syscall.SIGCHLD)
	for s := range signals {
		if s != syscall.SIGCHLD {
			return
		}
		for {
			if pid, err := syscall.Wait4(-1, nil, syscall.WNOHANG, nil); pid <= 0 || err != nil {
				break
			}
		}
	}
}
