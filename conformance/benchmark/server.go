package benchmark

import (
	"errors"
	"fmt"
	"io"
	"net"
	"time"
)

// serve answers at a port of the server's host, one connection after the other, until the host is closed: the host's
// namespace goes with the listener.
func (n *node) serve(port int, answer func(net.Conn)) error {
	l, err := n.server.Listen("tcp4", fmt.Sprintf(":%d", port))
	if err != nil {
		return err
	}
	n.listeners = append(n.listeners, l)
	go func() {
		for {
			c, err := l.Accept()
			if errors.Is(err, net.ErrClosed) {
				return
			}
			if err != nil { // out of descriptors, for instance
				time.Sleep(time.Millisecond)
				continue
			}
			answer(c)
		}
	}()
	return nil
}

// greet says in lab's words who asked and who was reached.
func greet(c net.Conn) {
	fmt.Fprintf(c, "server %s %s\n", c.RemoteAddr(), c.LocalAddr())
	c.Close()
}

// swallow takes all that comes, beside other connections.
func swallow(c net.Conn) {
	go func() {
		_, _ = io.CopyBuffer(writerOnly{io.Discard}, c, make([]byte, 1<<18))
		c.Close()
	}()
}

// writerOnly hides that io.Discard would rather read by itself, in small pieces.
type writerOnly struct{ io.Writer }
