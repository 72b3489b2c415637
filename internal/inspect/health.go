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

// maxHealthBytes limits the report: about 16,384 endpoints, as many as the kernel has evidence of.
const maxHealthBytes = 8 << 20

// healthTimeout limits how long the proxy may take to report the health of endpoints.
var healthTimeout = 2 * time.Second

// Outlier is an endpoint of a Service that does not answer this node, or refuses connections.
type Outlier struct {
	Service snapshot.Name
	snapshot.Unhealthy
	// Ejected says that new connections to the Service do not reach the endpoint from this node.
	Ejected bool
	// NextProbe is when the proxy tries the endpoint next; zero if that is unknown.
	NextProbe time.Time
}

// LoadOutliers asks the proxy on this host what it found out about endpoints. Addr is the address of its health server;
// an unspecified IP means the loopback address of the family. It runs in the calling goroutine, whose thread may be in
// another network namespace. If the report is not complete, LoadOutliers returns what there is, and an error.
func LoadOutliers(ctx context.Context, addr netip.AddrPort) ([]Outlier, error) {
	var outliers []Outlier
	err := askProxy(ctx, addr, "/outliers", func(r io.Reader) (err error) {
		outliers, err = decodeOutliers(r)
		return err
	})
	return outliers, err
}

// healthOf groups outliers by Service, each endpoint once. It returns nil if there are none.
func healthOf(outliers []Outlier) map[snapshot.Name]*snapshot.Health {
	var health map[snapshot.Name]*snapshot.Health
	for _, o := range outliers {
		h := health[o.Service]
		if h == nil {
			if health == nil {
				health = map[snapshot.Name]*snapshot.Health{}
			}
			h = &snapshot.Health{}
			health[o.Service] = h
		}
		h.Unhealthy = append(h.Unhealthy, o.Unhealthy)
	}
	byEndpoint := func(a, b snapshot.Unhealthy) int { return a.Endpoint.Compare(b.Endpoint) }
	for _, h := range health {
		slices.SortFunc(h.Unhealthy, func(a, b snapshot.Unhealthy) int {
			return cmp.Or(byEndpoint(a, b), a.Since.Compare(b.Since))
		})
		h.Unhealthy = slices.CompactFunc(h.Unhealthy, func(a, b snapshot.Unhealthy) bool { return byEndpoint(a, b) == 0 })
	}
	return health
}

// askProxy asks the health server of the proxy on this host. An unspecified IP means the loopback address of the
// family. It runs in the calling goroutine, whose thread may be in another network namespace.
func askProxy(ctx context.Context, addr netip.AddrPort, path string, decode func(io.Reader) error) error {
	if ip := addr.Addr(); ip.IsUnspecified() {
		loopback := netip.AddrFrom4([4]byte{127, 0, 0, 1})
		if ip.Is6() {
			loopback = netip.IPv6Loopback()
		}
		addr = netip.AddrPortFrom(loopback, addr.Port())
	}
	ctx, cancel := context.WithTimeout(ctx, healthTimeout)
	defer cancel()
	if err := get(ctx, addr.String(), path, decode); err != nil {
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

// outliersJSON is the report.
type outliersJSON struct {
	Services []struct {
		Service   string `json:"service"`
		Endpoints []struct {
			Endpoint  netip.AddrPort `json:"endpoint"`
			Cause     string         `json:"cause"`
			Since     time.Time      `json:"since"`
			Ejected   bool           `json:"ejected"`
			NextProbe time.Time      `json:"nextProbe"`
		} `json:"endpoints"`
	} `json:"services"`
	Truncated bool `json:"truncated"`
}

func decodeOutliers(r io.Reader) (outliers []Outlier, err error) {
	var report outliersJSON
	if err := json.NewDecoder(r).Decode(&report); err != nil {
		return nil, fmt.Errorf("the report cannot be read: %w", err)
	}
	for _, s := range report.Services {
		namespace, name, ok := strings.Cut(s.Service, "/")
		if !ok {
			return nil, fmt.Errorf("%.100q is no namespace/name", s.Service)
		}
		for _, e := range s.Endpoints {
			o := Outlier{Service: snapshot.Name{Namespace: namespace, Name: name}, Ejected: e.Ejected, NextProbe: e.NextProbe}
			o.Endpoint, o.Since = e.Endpoint, e.Since
			switch e.Cause {
			case snapshot.Unanswered.String():
			case snapshot.Refused.String():
				o.Cause = snapshot.Refused
			default:
				return nil, fmt.Errorf("%.100q is no cause", e.Cause)
			}
			outliers = append(outliers, o)
		}
	}
	if report.Truncated {
		return outliers, errors.New("it names only the first endpoints of many")
	}
	return outliers, nil
}

// addHealth completes the objects with what the proxy on this host found out about endpoints, so that those it ejected
// and those that start slowly are no difference. It returns a note that explains differences if the proxy does not
// tell; empty if it does, or if no endpoint can be ejected or start slowly.
func (o *ObjectFlags) addHealth(ctx context.Context, objects *Objects) (note string) {
	return cmp.Or(o.addOutliers(ctx, objects), o.addSlowStarts(ctx, objects))
}

// addOutliers does so for endpoints that are ejected.
func (o *ObjectFlags) addOutliers(ctx context.Context, objects *Objects) (note string) {
	settings := o.Policy.Settings()
	if objects.Config.SecondChance == snapshot.SecondChanceOff {
		return ""
	}
	const unknown = "which endpoints the proxy has ejected is not known: "
	if !settings.Healthz.IsValid() {
		return unknown + "it has no health server"
	}
	outliers, err := LoadOutliers(ctx, settings.Healthz)
	objects.Outliers = outliers
	objects.Snap.Apply(snapshot.Delta{Health: healthOf(outliers)})
	if err != nil {
		return unknown + err.Error()
	}
	return ""
}
