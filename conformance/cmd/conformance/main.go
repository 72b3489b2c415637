// Conformance holds Service proxies to what Kubernetes promises, from outside: with a real API server, network namespaces
// and packets. See docs/CONFORMANCE.md.
package main

import (
	"fmt"
	"os"

	"github.com/verdict-proxy/verdict/internal/lab"
)

func main() { os.Exit(status()) }

func status() int {
	if code, done, err := lab.Enter(); err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	} else if done {
		return code
	}
	if err := newCommand().Execute(); err != nil {
		fmt.Fprintln(os.Stderr, "conformance:", err)
		return 1
	}
	return 0
}
