package inspect

import (
	"bufio"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"slices"
	"strings"
	"time"

	"github.com/verdict-proxy/verdict/sync/snapshot"
)

const (
	// healthTimeout limits how long the proxy may take to report the health of endpoints.
	healthTimeout = 2 * time.Second
	// maxHealthBytes limits the report: about 16,384 endpoints, as many as the kernel has evidence of.
	maxHealthBytes = 8 << 20
)

// LoadHealth asks the proxy on this host what it found out about endpoints. Addr is the address of its health server;
// an unspecified IP means the loopback address of the family. It runs in the calling goroutine, whose thread may be in
// another network namespace. If the report is not complete, LoadHealth returns what there is, and an error.
func LoadHealth(ctx context.Context, addr netip.AddrPort) (map[snapshot.Name]*snapshot.Health, error) {
	if ip := addr.Addr(); ip.IsUnspecified() {
		loopback := netip.AddrFrom4([4]byte{127, 0, 0, 1})
		if ip.Is6() {
			loopback = netip.IPv6Loopback()
		}
		addr = netip.AddrPortFrom(loopback, addr.Port())
	}
	ctx, cancel := context.WithTimeout(ctx, healthTimeout)
	defer cancel()
	health, err := askHealth(ctx, addr.String())
	if err != nil {
		err = fmt.Errorf("http://%s/outliers: %w", addr, err)
	}
	return health, err
}

func askHealth(ctx context.Context, addr string) (map[snapshot.Name]*snapshot.Health, error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://"+addr+"/outliers", nil)
	if err != nil {
		return nil, err
	}
	req.Close = true
	conn, err := new(net.Dialer).DialContext(ctx, "tcp", addr)
	if err != nil {
		return nil, err
	}
	defer conn.Close()
	deadline, _ := ctx.Deadline()
	if err := conn.SetDeadline(deadline); err != nil {
		return nil, err
	}
	if err := req.Write(conn); err != nil {
		return nil, err
	}
	resp, err := http.ReadResponse(bufio.NewReader(io.LimitReader(conn, maxHealthBytes)), req)
	if err != nil {
		return nil, err
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		return nil, fmt.Errorf("status %d", resp.StatusCode)
	}
	return decodeHealth(resp.Body)
}

// outliersJSON is the part of the report that decides which endpoints are ejected.
type outliersJSON struct {
	Services []struct {
		Service   string `json:"service"`
		Endpoints []struct {
			Endpoint netip.AddrPort `json:"endpoint"`
			Cause    string         `json:"cause"`
			Since    time.Time      `json:"since"`
		} `json:"endpoints"`
	} `json:"services"`
	Truncated bool `json:"truncated"`
}

func decodeHealth(r io.Reader) (map[snapshot.Name]*snapshot.Health, error) {
	var report outliersJSON
	if err := json.NewDecoder(r).Decode(&report); err != nil {
		return nil, fmt.Errorf("the report cannot be read: %w", err)
	}
	health := map[snapshot.Name]*snapshot.Health{}
	for _, s := range report.Services {
		namespace, name, ok := strings.Cut(s.Service, "/")
		if !ok {
			return nil, fmt.Errorf("%.100q is no namespace/name", s.Service)
		}
		h := &snapshot.Health{}
		for _, e := range s.Endpoints {
			u := snapshot.Unhealthy{Endpoint: e.Endpoint, Since: e.Since}
			switch e.Cause {
			case snapshot.Unanswered.String():
			case snapshot.Refused.String():
				u.Cause = snapshot.Refused
			default:
				return nil, fmt.Errorf("%.100q is no cause", e.Cause)
			}
			h.Unhealthy = append(h.Unhealthy, u)
		}
		byEndpoint := func(a, b snapshot.Unhealthy) int { return a.Endpoint.Compare(b.Endpoint) }
		slices.SortFunc(h.Unhealthy, func(a, b snapshot.Unhealthy) int {
			return cmp.Or(byEndpoint(a, b), a.Since.Compare(b.Since))
		})
		h.Unhealthy = slices.CompactFunc(h.Unhealthy, func(a, b snapshot.Unhealthy) bool { return byEndpoint(a, b) == 0 })
		health[snapshot.Name{Namespace: namespace, Name: name}] = h
	}
	if report.Truncated {
		return health, errors.New("it names only the first endpoints of many")
	}
	return health, nil
}

// addHealth completes the objects with what the proxy on this host found out about endpoints, so that those it ejected
// are no difference. It returns a note that explains differences if the proxy does not tell; empty if it does, or if no
// endpoint can be ejected.
func (o *ObjectFlags) addHealth(ctx context.Context, objects *Objects) (note string) {
	settings := o.Policy.Settings()
	if objects.Config.SecondChance == snapshot.SecondChanceOff {
		return ""
	}
	const unknown = "which endpoints the proxy has ejected is not known: "
	if !settings.Healthz.IsValid() {
		return unknown + "it has no health server"
	}
	health, err := LoadHealth(ctx, settings.Healthz)
	objects.Snap.Apply(snapshot.Delta{Health: health})
	if err != nil {
		return unknown + err.Error()
	}
	return ""
}
