package main

import (
	"bufio"
	"encoding/json"
	"fmt"
	"net"
	"net/http"
	"net/netip"
	"strconv"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/verdict-proxy/verdict/conformance/cluster"
	"github.com/verdict-proxy/verdict/internal/lab/blackbox"
)

const (
	// interval is the time between two new connections to a target. A connection whose answer takes longer than the limit
	// has failed: the first packet is sent again after 1 and after 3 s.
	interval = 50 * time.Millisecond
	limit    = 5 * time.Second
	// held is how many connections to a target are held; each is used once in a holdInterval.
	held         = 3
	holdInterval = 100 * time.Millisecond
	// failuresKept is how many failures are kept: those of minutes in which every connection fails.
	failuresKept = 10_000
)

// counters gathers the report of all targets.
type counters struct {
	mu sync.Mutex
	r  cluster.Report
}

// opened counts one connection that was answered.
func (c *counters) opened() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.r.Connections++
}

// failed counts a connection that was not answered, or one that was held and broke.
func (c *counters) failed(f blackbox.Failure, err error) {
	f.Failed, f.Err = time.Now(), err.Error()
	c.mu.Lock()
	defer c.mu.Unlock()
	if f.Held {
		c.r.Broken++
	} else {
		c.r.Failed++
	}
	if c.r.Noted++; len(c.r.Failures) == failuresKept {
		c.r.Failures = c.r.Failures[1:]
	}
	c.r.Failures = append(c.r.Failures, f)
}

// dial connects, and says where from and where to, whether it succeeds or not.
func dial(target string) (conn net.Conn, f blackbox.Failure, err error) {
	f = blackbox.Failure{From: target, Began: time.Now()}
	socket := -1
	d := net.Dialer{Timeout: limit, Control: func(_, address string, c syscall.RawConn) error {
		f.Server, _ = netip.ParseAddrPort(address)
		return c.Control(func(fd uintptr) { socket, _ = unix.FcntlInt(fd, unix.F_DUPFD_CLOEXEC, 0) })
	}}
	conn, err = d.Dial("tcp", target)
	switch a, _ := unix.Getsockname(socket); a := a.(type) {
	case *unix.SockaddrInet4:
		f.Client = netip.AddrPortFrom(netip.AddrFrom4(a.Addr), uint16(a.Port))
	case *unix.SockaddrInet6:
		f.Client = netip.AddrPortFrom(netip.AddrFrom16(a.Addr).Unmap(), uint16(a.Port))
	}
	_ = unix.Close(socket)
	return conn, f, err
}

func connect(address string, targets []string) error {
	c := &counters{r: cluster.Report{Started: time.Now()}}
	for _, target := range targets {
		go c.openAlways(target)
		for range held {
			go c.hold(target)
		}
	}
	http.HandleFunc("/report", func(w http.ResponseWriter, r *http.Request) {
		after, _ := strconv.Atoi(r.FormValue("after"))
		_ = json.NewEncoder(w).Encode(c.report(after))
	})
	return http.ListenAndServe(address, nil)
}

// report returns what there was, with the failures that were noted after so many others.
func (c *counters) report(after int) cluster.Report {
	c.mu.Lock()
	defer c.mu.Unlock()
	r := c.r
	r.Failures = r.Failures[min(max(0, after-(r.Noted-len(r.Failures))), len(r.Failures)):]
	return r
}

// openAlways opens a connection in each interval, whether former ones are answered or not.
func (c *counters) openAlways(target string) {
	for range time.Tick(interval) {
		go func() {
			conn, f, err := dial(target)
			if err == nil {
				connected := time.Since(f.Began)
				if err = ask(conn); err != nil {
					err = fmt.Errorf("connected after %v, failed after %v: %w", connected, time.Since(f.Began), err)
				}
				defer conn.Close()
			}
			if err != nil {
				c.failed(f, err)
				return
			}
			c.opened()
		}()
	}
}

// hold keeps one connection, and opens another when it breaks.
func (c *counters) hold(target string) {
	for ; ; time.Sleep(holdInterval) {
		conn, f, err := dial(target)
		if err != nil {
			continue // openAlways counts it
		}
		for err == nil {
			time.Sleep(holdInterval)
			err = ask(conn)
		}
		conn.Close()
		f.Held = true
		c.failed(f, err)
	}
}

// ask sends a line and waits for the answer.
func ask(conn net.Conn) error {
	if err := conn.SetDeadline(time.Now().Add(limit)); err != nil {
		return err
	}
	if _, err := conn.Write([]byte("who\n")); err != nil {
		return err
	}
	_, err := bufio.NewReader(conn).ReadString('\n')
	return err
}
