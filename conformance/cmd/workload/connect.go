package main

import (
	"bufio"
	"encoding/json"
	"fmt"
	"net"
	"net/http"
	"sync"
	"time"

	"github.com/verdict-proxy/verdict/conformance/cluster"
)

const (
	// interval is the time between two new connections to a target. A connection whose answer takes longer than the limit
	// has failed: the first packet is sent again after 1 and after 3 s.
	interval = 50 * time.Millisecond
	limit    = 5 * time.Second
	// held is how many connections to a target are held; each is used once in a holdInterval.
	held         = 3
	holdInterval = 100 * time.Millisecond
	errorsKept   = 500
)

// counters gathers the report of all targets.
type counters struct {
	mu sync.Mutex
	r  cluster.Report
}

// failed counts a connection that failed.
func (c *counters) failed(f *cluster.Failure) {
	f.At = time.Now()
	c.mu.Lock()
	defer c.mu.Unlock()
	if f.Held {
		c.r.Broken++
	} else {
		c.r.Failed++
	}
	if c.r.Noted++; len(c.r.Errors) == errorsKept {
		c.r.Errors = c.r.Errors[1:]
	}
	c.r.Errors = append(c.r.Errors, *f)
}

func (c *counters) answered() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.r.Connections++
}

func connect(address string, targets []string) error {
	c := &counters{r: cluster.Report{Started: time.Now()}}
	for _, target := range targets {
		go c.openAlways(target)
		for range held {
			go c.hold(target)
		}
	}
	http.HandleFunc("/report", func(w http.ResponseWriter, _ *http.Request) {
		c.mu.Lock()
		defer c.mu.Unlock()
		_ = json.NewEncoder(w).Encode(c.r)
	})
	return http.ListenAndServe(address, nil)
}

// openAlways opens a connection in each interval, whether former ones are answered or not.
func (c *counters) openAlways(target string) {
	for range time.Tick(interval) {
		go c.open(target)
	}
}

// open opens a connection, uses it once, and closes it.
func (c *counters) open(target string) {
	f := cluster.Failure{Target: target, Began: time.Now()}
	conn, err := net.DialTimeout("tcp", target, limit)
	if err == nil {
		connected := time.Since(f.Began)
		f.Client = conn.LocalAddr().(*net.TCPAddr).AddrPort()
		if err = ask(conn); err != nil {
			err = fmt.Errorf("connected after %v, failed after %v: %w", connected, time.Since(f.Began), err)
		}
		conn.Close()
	}
	if err == nil {
		c.answered()
		return
	}
	f.Err = err.Error()
	c.failed(&f)
}

// hold keeps one connection, and opens another when it breaks.
func (c *counters) hold(target string) {
	for ; ; time.Sleep(holdInterval) {
		f := cluster.Failure{Target: target, Began: time.Now(), Held: true}
		conn, err := net.DialTimeout("tcp", target, limit)
		if err != nil {
			continue // openAlways counts it
		}
		for err == nil {
			time.Sleep(holdInterval)
			err = ask(conn)
		}
		f.Client, f.Err = conn.LocalAddr().(*net.TCPAddr).AddrPort(), err.Error()
		conn.Close()
		c.failed(&f)
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
