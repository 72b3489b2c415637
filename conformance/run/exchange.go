package run

import (
	"bufio"
	"bytes"
	"context"
	"fmt"
	"io"
	"net"
	"time"

	"github.com/verdict-proxy/verdict/conformance/cases"
	"github.com/verdict-proxy/verdict/conformance/report"
)

// exchangeTimeout is how long much data may take on a busy machine.
const exchangeTimeout = 10 * time.Second

// exchange sends much to each port of a Service, which has to come back.
func (t *teller) exchange(ctx context.Context, s *cases.Step) error {
	e := s.Exchange
	all, err := t.targets(e.From, e.To, nil, nil, nil)
	if err != nil {
		return err
	}
	for _, a := range all {
		want := fmt.Sprintf("%d bytes come back", e.Bytes)
		l := report.Look{Step: s.Step, From: a.from, To: a.words(), Count: 1, Want: want, Got: want, OK: true}
		d := t.differs(s)
		if err := t.exchangeOne(ctx, a, e.Bytes); err != nil {
			l.OK, l.Got = d != nil, err.Error()
		} else {
			d = nil // not all that is sent meets the difference
		}
		t.look(l, d)
	}
	return nil
}

func (t *teller) exchangeOne(ctx context.Context, a target, n int) error {
	ctx, cancel := context.WithTimeout(ctx, exchangeTimeout)
	defer cancel()
	conn, err := t.testbed.Host(a.from).DialContext(ctx, string(a.protocol), a.to.String())
	if err != nil {
		return err
	}
	defer conn.Close()
	if err := conn.SetDeadline(time.Now().Add(exchangeTimeout)); err != nil {
		return err
	}
	sent := bytes.Repeat([]byte("0123456789abcdef"), n/16+1)[:n]
	if a.protocol == cases.UDP {
		return exchangeUDP(conn, sent)
	}
	lines := bufio.NewReader(conn)
	if _, err := lines.ReadString('\n'); err != nil { // the greeting
		return err
	}
	written := make(chan error, 1)
	go func() {
		_, err := conn.Write(sent)
		written <- err
	}()
	got := make([]byte, n)
	if _, err := io.ReadFull(lines, got); err != nil {
		return err
	}
	if !bytes.Equal(got, sent) {
		return fmt.Errorf("other bytes came back")
	}
	return <-written
}

// exchangeUDP sends one datagram, which is sent back behind a line.
func exchangeUDP(conn net.Conn, sent []byte) error {
	if _, err := conn.Write(sent); err != nil {
		return err
	}
	got := make([]byte, 1<<16)
	n, err := conn.Read(got)
	if err != nil {
		return err
	}
	if _, body, _ := bytes.Cut(got[:n], []byte("\n")); !bytes.Equal(body, sent) {
		return fmt.Errorf("%d of %d bytes came back", len(body), len(sent))
	}
	return nil
}
