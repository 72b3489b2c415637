package inspect

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"strings"
	"syscall"
	"time"

	"github.com/verdict-proxy/verdict/sync/dataplane"
	"github.com/verdict-proxy/verdict/sync/snapshot"
)

// maxHealthBytes limits the report: about 16,384 endpoints, as many as the kernel has evidence of.
const maxHealthBytes = 8 << 20

// healthTimeout limits how long the proxy may take to report the health of endpoints.
var healthTimeout = 2 * time.Second

// AskProxy asks the health server of the proxy on this host. An unspecified IP means the loopback address of the
// family. It runs in the calling goroutine, whose thread may be in another network namespace.
func AskProxy(ctx context.Context, addr netip.AddrPort, path string, decode func(io.Reader) error) error {
	if ip := addr.Addr(); ip.IsUnspecified() {
		loopback := netip.AddrFrom4([4]byte{127, 0, 0, 1})
		if ip.Is6() {
			loopback = netip.IPv6Loopback()
		}
		addr = netip.AddrPortFrom(loopback, addr.Port())
	}
	ctx, cancel := context.WithTimeout(ctx, healthTimeout)
	defer cancel()
	err := get(ctx, addr.String(), path, decode)
	if errors.Is(err, syscall.ECONNREFUSED) {
		return fmt.Errorf("no proxy answers at %s (%w)", addr, syscall.ECONNREFUSED)
	}
	if err != nil {
		page, _, _ := strings.Cut(path, "?")
		return fmt.Errorf("http://%s%s: %w", addr, page, err)
	}
	return nil
}

func get(ctx context.Context, addr, path string, decode func(io.Reader) error) error {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://"+addr+path, nil)
	if err != nil {
		return err
	}
	req.Close = true
	conn, err := new(net.Dialer).DialContext(ctx, "tcp", addr)
	if err != nil {
		return err
	}
	defer conn.Close()
	deadline, _ := ctx.Deadline()
	if err := conn.SetDeadline(deadline); err != nil {
		return err
	}
	if err := req.Write(conn); err != nil {
		return err
	}
	resp, err := http.ReadResponse(bufio.NewReader(io.LimitReader(conn, maxHealthBytes)), req)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		return fmt.Errorf("status %d", resp.StatusCode)
	}
	return decode(resp.Body)
}

// takeHealth completes the objects with what the kernel's rules say of endpoints: those that are ejected are no
// difference.
func (o *Objects) takeHealth(list []dataplane.EndpointHealth) {
	health := dataplane.HealthOf(list)
	for n := range o.Snap.Health { // what was known before is no longer so
		if health[n] == nil {
			health[n] = nil
		}
	}
	o.Snap.Apply(snapshot.Delta{Health: health})
}

// healthNotes says which endpoints are ejected, or are a last resort, each of a Service once.
func healthNotes(list []dataplane.EndpointHealth) (notes []string) {
	said := map[string]bool{}
	for i := range list {
		e := &list[i]
		state := stateOf(e)
		note := fmt.Sprintf("%s: %s of %s, %s, by this node", state, e.Endpoint, e.Port.Service, unhealthyText(&e.Unhealthy))
		if state == "" || said[note] {
			continue
		}
		if said[note] = true; len(said) > MaxShown {
			return append(notes, "and more endpoints are "+state+": verdict top and the metrics count them")
		}
		notes = append(notes, note)
	}
	return notes
}

// stateOf says what an unhealthy endpoint is to its pool; empty if it is as any other.
func stateOf(e *dataplane.EndpointHealth) string {
	switch {
	case e.Ejected:
		return "ejected"
	case e.Cause == snapshot.Resort:
		return "not ready"
	}
	return ""
}
