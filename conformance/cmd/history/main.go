// History records what proxies make of changing Services, and checks how stale they are. See docs/evidence/HISTORY.md.
package main

import (
	"errors"
	"fmt"
	"os"
	"slices"

	"github.com/verdict-proxy/verdict/internal/lab"
)

// The exit statuses.
const (
	statusWrong  = 1 // a history holds a violation
	statusBroken = 2
)

func main() { os.Exit(status()) }

func status() int {
	// What only reads, and what runs in a node of the testbed already, needs nothing of its own.
	plain := len(os.Args) > 1 && slices.Contains([]string{"check", "faulty"}, os.Args[1])
	if !plain {
		if code, done, err := lab.EnterAlone(); err != nil {
			fmt.Fprintln(os.Stderr, err)
			return statusBroken
		} else if done {
			return code
		}
	}
	err := newCommand().Execute()
	switch {
	case errors.Is(err, errWrong):
		return statusWrong
	case err != nil:
		fmt.Fprintln(os.Stderr, "history:", err)
		return statusBroken
	}
	return 0
}
