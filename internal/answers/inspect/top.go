package inspect

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/signal"
	"time"

	"golang.org/x/sys/unix"

	"github.com/verdict-proxy/verdict/internal/system/terminal"
)

// Top shows the connection rates of Services.
type Top struct {
	Sampler *Sampler
	// Service, if not empty, is the only Service, or Service port, that is shown.
	Service string
	// Node is the name of the node, for the heading.
	Node string
	// Order is one of Orders, and Interval the time between two samples.
	Order    string
	Interval time.Duration
}

// Once takes one sample over the Interval. It has the frontends of the first ports, at most so many as are shown, and
// if a Service was named its endpoints.
func (t *Top) Once(ctx context.Context, most int) (sample *Sample, shown int, err error) {
	s := t.Sampler
	s.Only = t.Service
	if err := s.Sample(ctx, nil, nil, t.Interval, true); err != nil {
		return nil, 0, err
	}
	if !s.Installed() {
		return nil, 0, errors.New("this node has no tables of Verdict: no Services are programmed")
	}
	var expanded []string
	if t.Service != "" {
		if expanded = s.Names(); len(expanded) == 0 {
			return nil, 0, fmt.Errorf("--service: the kernel has no frontend of %s", t.Service)
		}
		if err := s.Sample(ctx, nil, expanded, t.Interval, true); err != nil {
			return nil, 0, err
		}
	}
	select {
	case <-ctx.Done():
		return nil, 0, ctx.Err()
	case <-time.After(t.Interval):
	}
	if err := s.Sample(ctx, nil, expanded, t.Interval, true); err != nil {
		return nil, 0, err
	}
	sample = s.Result(t.Order, t.Interval)
	shown = min(len(sample.Ports), most)
	for i := range sample.Ports[:shown] {
		s.Details(&sample.Ports[i], t.Order)
	}
	return sample, shown, nil
}

// Live shows samples in a terminal until it is told to stop.
func (t *Top) Live(ctx context.Context, in, out *os.File) (err error) {
	s := t.Sampler
	s.Only = t.Service
	v := NewTopView(t.Node, t.Order, t.Interval)
	screen, err := terminal.OpenScreen(in, out)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, screen.Close()) }()
	resized := make(chan os.Signal, 1)
	signal.Notify(resized, unix.SIGWINCH)
	defer signal.Stop(resized)
	printer := terminal.NewPrinter(out)
	keys := screen.Keys()
	read := func() {
		ports, expanded := v.Visible()
		err := s.Sample(ctx, ports, expanded, t.Interval, false)
		sample := s.Detailed(v.order, v.interval, v.expanded)
		v.Show(sample, err)
	}
	read()
	tick := time.NewTicker(t.Interval)
	defer tick.Stop()
	for {
		v.Width, v.Height = screen.Size()
		if err := screen.Draw(v.Render(printer)); err != nil {
			return err
		}
		select {
		case <-ctx.Done():
			return nil
		case k, ok := <-keys:
			if !ok || v.Key(k) {
				return nil
			}
			if k == "enter" || k == "s" {
				read()
			}
		case <-resized:
		case <-tick.C:
			read()
		}
	}
}
