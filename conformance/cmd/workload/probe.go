package main

import (
	"bufio"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/verdict-proxy/verdict/conformance/cluster"
)

// probe opens connections to each target, such as udp://10.96.0.1:80 or http://10.96.0.1, all at once, and prints a
// cluster.Probe for each target as a line of JSON. The connections begin at an address of this host, unless it is
// empty.
func probe(from, connections string, targets []string) error {
	count, err := strconv.Atoi(connections)
	if err != nil {
		return err
	}
	probes := make([]cluster.Probe, len(targets))
	var wait sync.WaitGroup
	for i, target := range targets {
		wait.Go(func() { probes[i] = probeTarget(from, target, count) })
	}
	wait.Wait()
	out := json.NewEncoder(os.Stdout)
	for i := range probes {
		if err := out.Encode(&probes[i]); err != nil {
			return err
		}
	}
	return nil
}

func probeTarget(from, target string, count int) cluster.Probe {
	p := cluster.Probe{Target: target, Asked: count, Answers: map[string]int{}}
	var mu sync.Mutex
	var wait sync.WaitGroup
	for range count {
		wait.Go(func() {
			answer, err := askOnce(from, target)
			mu.Lock()
			defer mu.Unlock()
			if err != nil {
				p.Failed, p.Err = p.Failed+1, err.Error()
				return
			}
			p.Answers[answer]++
		})
	}
	wait.Wait()
	return p
}

// askOnce opens a connection, sends a line, and returns the answer. A datagram is sent once.
func askOnce(from, target string) (string, error) {
	network, address, ok := strings.Cut(target, "://")
	if !ok {
		return "", fmt.Errorf("%q has no protocol", target)
	}
	d := net.Dialer{Timeout: limit}
	if ip := net.ParseIP(from); ip != nil && network == "udp" {
		d.LocalAddr = &net.UDPAddr{IP: ip}
	} else if ip != nil {
		d.LocalAddr = &net.TCPAddr{IP: ip}
	}
	if network == "http" {
		return request(&d, target)
	}
	deadline := time.Now().Add(limit)
	conn, err := d.Dial(network, address)
	if err != nil {
		return "", err
	}
	defer conn.Close()
	if err := conn.SetDeadline(deadline); err != nil {
		return "", err
	}
	if _, err := conn.Write([]byte("who\n")); err != nil {
		return "", err
	}
	line, err := bufio.NewReader(conn).ReadString('\n')
	return strings.TrimSpace(line), err
}

// request sends a request of HTTP, and returns the answer's body.
func request(d *net.Dialer, url string) (string, error) {
	client := http.Client{Timeout: limit, Transport: &http.Transport{DialContext: d.DialContext, DisableKeepAlives: true}}
	answer, err := client.Get(url)
	if err != nil {
		return "", err
	}
	defer answer.Body.Close()
	body, err := io.ReadAll(answer.Body)
	if err == nil && answer.StatusCode != http.StatusOK {
		err = fmt.Errorf("%s: %s", answer.Status, body)
	}
	return string(body), err
}
