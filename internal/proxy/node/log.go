package node

import (
	"io"
	"log/slog"

	"github.com/verdict-proxy/verdict/internal/proxy/config"
	"github.com/verdict-proxy/verdict/internal/system/logging"
)

// logger is a rate-limited log whose level can change.
type logger struct {
	*slog.Logger
	level *slog.LevelVar
	limit *logging.Limit
}

func newLogger(w io.Writer, c config.Log) *logger {
	level := &slog.LevelVar{}
	level.Set(c.Level)
	o := &slog.HandlerOptions{Level: level}
	var handler slog.Handler = slog.NewTextHandler(w, o)
	if c.JSON {
		handler = slog.NewJSONHandler(w, o)
	}
	limit := logging.NewLimit(handler)
	return &logger{slog.New(limit), level, limit}
}

// NewLog returns a rate-limited log, as a proxy has it.
func NewLog(w io.Writer, c config.Log) *slog.Logger { return newLogger(w, c).Logger }

// LogFailure logs the error that ends a proxy, in the format that the settings ask for.
func LogFailure(w io.Writer, c config.Log, err error) { newLogger(w, c).Error("failed", "err", err) }

// report logs one problem of the configuration.
func (l *logger) report(p *config.Problem) {
	switch p.Severity {
	case config.Note:
		l.Info(p.Error())
	case config.Warning:
		l.Warn(p.Error())
	default:
		l.Error(p.Error())
	}
}
