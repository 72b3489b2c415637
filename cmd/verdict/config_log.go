package main

import (
	"io"
	"log/slog"

	"github.com/verdict-proxy/verdict/internal/config"
)

// logger is a log whose level may change.
type logger struct {
	*slog.Logger
	level *slog.LevelVar
}

func newLogger(w io.Writer, c config.Log) *logger {
	level := &slog.LevelVar{}
	level.Set(c.Level)
	o := &slog.HandlerOptions{Level: level}
	if c.JSON {
		return &logger{slog.New(slog.NewJSONHandler(w, o)), level}
	}
	return &logger{slog.New(slog.NewTextHandler(w, o)), level}
}

// problem logs one thing there is to say about the configuration.
func (l *logger) problem(p *config.Problem) {
	switch p.Severity {
	case config.Note:
		l.Info(p.Error())
	case config.Warning:
		l.Warn(p.Error())
	default:
		l.Error(p.Error())
	}
}
