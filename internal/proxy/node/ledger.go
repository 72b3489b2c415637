package node

import (
	"log/slog"
	"path/filepath"

	"github.com/verdict-proxy/verdict/internal/proxy/backends"
	"github.com/verdict-proxy/verdict/internal/proxy/config"
	"github.com/verdict-proxy/verdict/internal/proxy/ledger"
	"github.com/verdict-proxy/verdict/internal/proxy/status"
)

// newLedger returns the ledger that the settings ask for; nil if they ask for none.
func newLedger(s *config.Settings, opened *backends.Opened, log *slog.Logger) *ledger.Writer {
	if s.Ledger == "" {
		return nil
	}
	dir := s.Ledger
	if abs, err := filepath.Abs(dir); err == nil { // others read it from other places
		dir = abs
	}
	return ledger.New(ledger.Options{Dir: dir, MaxBytes: int64(s.LedgerMaxMiB) << 20, Source: opened.Ledger,
		Version: BuildInfo().Version, Backend: opened.Name, Log: log})
}

// ledgerEnd returns what asks a ledger where it ends; nil if there is none.
func ledgerEnd(w *ledger.Writer) func() status.Ledger {
	if w == nil {
		return nil
	}
	return func() status.Ledger {
		s := w.Stats()
		return status.Ledger{Record: s.Number, Digest: s.Sum, Missing: s.Missing, Error: s.Error, Dir: s.Dir}
	}
}
