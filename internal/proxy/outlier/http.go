package outlier

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"time"

	"golang.org/x/sys/unix"
)

const (
	// getTimeout is how long an endpoint has for its answer, and maxHead how much of it is read.
	getTimeout = 2 * time.Second
	maxHead    = 16 << 10
)

// get asks an endpoint for a path, as the kubelet does: every status from 200 to 399 is accepted. It follows nothing
// and reads no body.
func get(ctx context.Context, from netip.AddrPort, path string) Outcome {
	ctx, cancel := context.WithTimeout(ctx, getTimeout)
	defer cancel()
	conn, err := new(net.Dialer).DialContext(ctx, "tcp", from.String())
	if err != nil {
		return dialOutcome(err)
	}
	defer conn.Close()
	if tcp, ok := conn.(*net.TCPConn); ok {
		_ = tcp.SetLinger(0) // so that nothing is left behind
	}
	deadline, _ := ctx.Deadline()
	if err := conn.SetDeadline(deadline); err != nil {
		return Failed
	}
	if _, err := fmt.Fprintf(conn, "GET %s HTTP/1.1\r\nHost: %s\r\nUser-Agent: verdict-probe\r\nAccept: */*\r\n"+
		"Connection: close\r\n\r\n", path, from); err != nil {
		return Silent
	}
	resp, err := http.ReadResponse(bufio.NewReader(io.LimitReader(conn, maxHead)), nil)
	if err != nil {
		return Silent
	}
	defer resp.Body.Close()
	if resp.StatusCode < 200 || resp.StatusCode >= 400 {
		return Rejected
	}
	return Accepted
}

// dialOutcome returns what an error of a dial means. No errno means that its time was over.
func dialOutcome(err error) Outcome {
	if errno, ok := errors.AsType[unix.Errno](err); ok {
		return errnoOutcome(errno)
	}
	return Silent
}
