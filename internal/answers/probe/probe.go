// Package probe is what runs in the pods of "kubectl verdict test": a server that answers with its name, and a client
// that dials what it is told to.
package probe

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"strings"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sync/errgroup"
)

// Dial is something to dial.
type Dial struct {
	// Network is tcp or udp, and Address an address and port.
	Network string `json:"network"`
	Address string `json:"address"`
	// Times is how often, one after another, each with a connection of its own.
	Times int `json:"times"`
}

// Answer is what came of a Dial, each time: the name of who answered, or why nobody did.
type Answer struct {
	Names  []string `json:"names,omitempty"`
	Errors []string `json:"errors,omitempty"`
	// Refused counts the Errors that say that a connection is refused.
	Refused int `json:"refused,omitempty"`
}

// Serve answers with a name on a port of all addresses, to TCP connections and UDP datagrams, until the context ends.
func Serve(ctx context.Context, name string, port uint16) error {
	at := fmt.Sprintf(":%d", port)
	l, err := net.Listen("tcp", at)
	if err != nil {
		return err
	}
	u, err := net.ListenPacket("udp", at)
	if err != nil {
		return errors.Join(err, l.Close())
	}
	defer context.AfterFunc(ctx, func() { l.Close(); u.Close() })()
	group, ctx := errgroup.WithContext(ctx)
	group.Go(func() error {
		for {
			c, err := l.Accept()
			if err != nil {
				return until(ctx, err)
			}
			_ = c.SetDeadline(time.Now().Add(time.Second)) // whoever connects only reads
			_, _ = io.WriteString(c, name+"\n")
			_ = c.Close()
		}
	})
	group.Go(func() error {
		buf := make([]byte, 64)
		for {
			_, from, err := u.ReadFrom(buf)
			if err == nil {
				_, _ = u.WriteTo([]byte(name+"\n"), from)
			} else if ctx.Err() != nil || errors.Is(err, net.ErrClosed) {
				return until(ctx, err)
			}
		}
	})
	return group.Wait()
}

// until returns nil if an error comes of the end of the context.
func until(ctx context.Context, err error) error {
	if ctx.Err() != nil || errors.Is(err, net.ErrClosed) {
		return nil
	}
	return err
}

// parallel is how many addresses are dialed at a time.
const parallel = 16

// All dials everything, and returns the answers in the same order. Each time takes as long as timeout at most.
func All(ctx context.Context, dials []Dial, timeout time.Duration) []Answer {
	out := make([]Answer, len(dials))
	slots := make(chan struct{}, parallel)
	var wait sync.WaitGroup
	for i := range dials {
		slots <- struct{}{}
		wait.Go(func() {
			for range dials[i].Times {
				name, err := once(ctx, &dials[i], timeout)
				switch {
				case err == nil:
					out[i].Names = append(out[i].Names, name)
				case refused(err):
					out[i].Refused++
					fallthrough
				default:
					out[i].Errors = append(out[i].Errors, plain(err, timeout))
				}
			}
			<-slots
		})
	}
	wait.Wait()
	return out
}

// refused reports whether an error says that a connection is refused. A datagram that this very host rejects is not
// permitted.
func refused(err error) bool {
	return errors.Is(err, syscall.ECONNREFUSED) || errors.Is(err, syscall.EPERM)
}

// plain says what an error means; that of a deadline says nothing of how long it was.
func plain(err error, timeout time.Duration) string {
	if late, ok := errors.AsType[net.Error](err); ok && late.Timeout() {
		return fmt.Sprintf("no answer within %v", timeout)
	}
	if op, ok := errors.AsType[*net.OpError](err); ok {
		return op.Err.Error()
	}
	return err.Error()
}

// resend is after what time a datagram is sent again: one that is lost is no failure.
const resend = time.Second

// once dials once.
func once(ctx context.Context, d *Dial, timeout time.Duration) (name string, err error) {
	ctx, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	c, err := new(net.Dialer).DialContext(ctx, d.Network, d.Address)
	if err != nil {
		return "", err
	}
	defer c.Close()
	deadline, _ := ctx.Deadline()
	for {
		end := deadline
		if d.Network == "udp" {
			if _, err := c.Write([]byte("?")); err != nil {
				return "", err
			}
			if next := time.Now().Add(resend); next.Before(end) {
				end = next
			}
		}
		if err := c.SetDeadline(end); err != nil {
			return "", err
		}
		name, err = bufio.NewReader(io.LimitReader(c, 1024)).ReadString('\n')
		var late net.Error
		if err == nil || !errors.As(err, &late) || !late.Timeout() || !time.Now().Before(deadline) {
			return strings.TrimSuffix(name, "\n"), err
		}
	}
}
