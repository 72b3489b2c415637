package main

import (
	"context"
	"log/slog"
	"os"
	"path/filepath"
	"testing"

	"github.com/verdict-proxy/verdict/internal/lab/labtest"
	"github.com/verdict-proxy/verdict/internal/proxy/backends"
)

// beVerdict makes the test program the real one, for tests of what only whole processes do.
const beVerdict = "VERDICT_TEST_BE_VERDICT"

func TestMain(m *testing.M) {
	if os.Getenv(beVerdict) != "" {
		os.Exit(run())
	}
	if os.Getenv(bePython) != "" {
		panic(servePage(os.Args[1:]))
	}
	os.Setenv("XTABLES_LOCKFILE",
		filepath.Join(os.TempDir(), "verdict-test-xtables.lock")) // the hosts' rules are nobody else's
	labtest.Main(m)
}

// removeRules removes what nftables has of ours, in the network namespace of the calling thread.
func removeRules() error {
	_, err := backends.All[0].Remove(context.Background(), backends.RemoveOptions{Log: slog.New(slog.DiscardHandler)})
	return err
}
