// Benchmark measures Service proxies in large clusters beside each other, with a real API server and real packets. See
// docs/evidence/BENCHMARKS.md.
package main

import (
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
	if err := newCommand().Execute(); err != nil {
		fmt.Fprintln(os.Stderr, "benchmark:", err)
		return 1
	}
	return 0
}
