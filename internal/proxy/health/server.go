package health

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"syscall"
	"time"

	"github.com/verdict-proxy/verdict/internal/system/clock"
)

// Server answers HTTP requests at an address. An address that cannot be listened at yet, such as that of a proxy which
// is just about to be replaced by this one, is tried again.
type Server struct {
	// Name is for messages: "health checks".
	Name string
	// Addr is where to listen, as in "0.0.0.0:10256"; empty means nowhere.
	Addr    string
	Handler http.Handler
	// HardFail makes it an error that the address cannot be listened at: kube-proxy's bindAddressHardFail.
	HardFail bool
	// InUse is for the log, if another process has the address: what that means as long as it does; empty for nothing.
	InUse string
	Log   *slog.Logger
	// Failed, if not nil, is told what the log is told of errors.
	Failed func(error)
	// Listen, if not nil, is used instead of net.Listen.
	Listen func(network, addr string) (net.Listener, error)

	// bound is what Bind listens with, until Run serves there.
	bound net.Listener
}

// Listening is tried again after listenFirst, then after twice as long each time up to listenMost, which is
// kube-proxy's time.
const (
	listenFirst = 100 * time.Millisecond
	listenMost  = 5 * time.Second
)

func newHTTPServer(h http.Handler) *http.Server {
	return &http.Server{
		Handler: h, ReadHeaderTimeout: headerPatience, ReadTimeout: readPatience, WriteTimeout: writeTimeout,
		IdleTimeout: idlePatience, MaxHeaderBytes: maxHeader, ConnState: recordState,
		ConnContext: withConn,
		ErrorLog:    slog.NewLogLogger(slog.DiscardHandler, slog.LevelDebug), // what clients do wrong is no news
	}
}

// Bind listens already, so that a server with HardFail fails before anything else is done. Run, which has to follow,
// serves whoever has come. Without HardFail, Bind does nothing.
func (s *Server) Bind() (err error) {
	if s.Addr == "" || !s.HardFail {
		return nil
	}
	if s.bound, err = s.listen(); err != nil {
		s.failed(err)
	}
	return err
}

// listen gives what Bind has left, or listens.
func (s *Server) listen() (net.Listener, error) {
	if l := s.bound; l != nil {
		s.bound = nil
		return l, nil
	}
	listen := s.Listen
	if listen == nil {
		listen = net.Listen
	}
	l, err := listen("tcp", s.Addr)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", s.Name, err)
	}
	return l, nil
}

// Run serves until ctx is done, and then returns nil. It fails only with HardFail.
func (s *Server) Run(ctx context.Context) error {
	if s.Addr == "" {
		return nil
	}
	for wait, told := listenFirst, ""; ; wait = min(2*wait, listenMost) {
		begin := time.Now()
		err := s.serve(ctx, told != "")
		switch {
		case ctx.Err() != nil:
			return nil
		case s.HardFail:
			s.failed(err)
			return err
		case time.Since(begin) > listenMost: // it was served for a while
			wait, told = listenFirst, ""
		}
		if err.Error() != told {
			told = err.Error()
			args := []any{"server", s.Name, "err", err}
			if s.InUse != "" && errors.Is(err, syscall.EADDRINUSE) {
				args = append(args, "until_then", s.InUse)
			}
			s.Log.Error("failed to listen; retrying", args...)
			s.failed(err)
		}
		if clock.Pause(ctx, wait); ctx.Err() != nil {
			return nil
		}
	}
}

func (s *Server) failed(err error) {
	if s.Failed != nil {
		s.Failed(err)
	}
}

// serve serves until ctx is done or something fails.
func (s *Server) serve(ctx context.Context, late bool) error {
	l, err := s.listen()
	if err != nil {
		return err
	}
	if late {
		s.Log.Info("now listening", "server", s.Name, "address", l.Addr().String())
	} else {
		s.Log.Debug("listening", "server", s.Name, "address", l.Addr().String())
	}
	srv := newHTTPServer(s.Handler)
	ended := make(chan struct{})
	defer func() { <-ended }()
	stop := context.AfterFunc(ctx, func() {
		defer close(ended)
		ctx, cancel := context.WithTimeout(context.Background(), shutdownTimeout)
		defer cancel()
		if srv.Shutdown(ctx) != nil {
			srv.Close()
		}
	})
	err = srv.Serve(newConnLimit(DefaultLimits().Connections).listen(l))
	if stop() {
		close(ended)
		srv.Close()
	}
	if errors.Is(err, http.ErrServerClosed) && ctx.Err() == nil {
		err = errors.New("closed")
	}
	return fmt.Errorf("%s at %s: %w", s.Name, s.Addr, err)
}
