// Conformance holds Service proxies to what Kubernetes promises, from outside: with a real API server, network
// namespaces and packets. See docs/dev/CONFORMANCE.md.
package main

import (
	"errors"
	"fmt"
	"os"

	"github.com/verdict-proxy/verdict/internal/lab"
)

func main() { os.Exit(status()) }

func status() int {
	if code, done, err := lab.EnterAlone(); err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	} else if done {
		return code
	}
	err := newCommand().Execute()
	switch {
	case err == nil:
		return 0
	case errors.Is(err, errFailed):
		return 1 // the table has said it
	}
	fmt.Fprintln(os.Stderr, "conformance:", err)
	return 2
}
