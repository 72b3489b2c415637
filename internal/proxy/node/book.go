package node

import (
	"log/slog"

	"github.com/verdict-proxy/verdict/internal/proxy/config"
	"github.com/verdict-proxy/verdict/internal/proxy/flows"
)

// newBook returns what keeps the records of connections; nil if the settings ask for none.
func newBook(s *config.Settings, node string, log *slog.Logger) *flows.Book {
	r := s.Records
	if r == nil {
		return nil
	}
	return flows.NewBook(flows.Options{Node: node, Memory: r.MemoryMiB << 20, Series: s.MetricsMaxSeries,
		ClientBits: r.ClientBits, File: r.File, OTLP: r.OTLP, Log: log})
}
