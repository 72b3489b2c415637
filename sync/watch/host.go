package watch

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"time"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"

	"github.com/verdict-proxy/verdict/internal/system/clock"
	"github.com/verdict-proxy/verdict/sync/snapshot"
)

// Host is a source that watches the addresses on this host's interfaces over rtnetlink: all unicast addresses,
// including loopback, link-local and tentative ones, sorted and unique. It also follows the networks of these
// addresses, and the routes of the main table.
type Host struct {
	// Namespace is a handle of the network namespace to watch, which must stay open; nil means the one Run is called in.
	Namespace *netns.NsHandle
	// Report gets errors that are retried; nil drops them. Calls do not overlap.
	Report func(error)

	// receiveBuffer is the size of the subscription's socket buffer in bytes; 0 means the system's default. Tests make it
	// small.
	receiveBuffer int
}

const (
	// addrDebounce is how long changes are collected: an interface that comes up gets several addresses.
	addrDebounce = 20 * time.Millisecond
	// resubscribeDelay is the delay before the next attempt to subscribe.
	resubscribeDelay = time.Second
	// routePause is the least time between two lists of the routes, which a CNI plugin may change for every pod. Each
	// takes at most one part in routeShare of the time.
	routePause = 2 * time.Second
	routeShare = 100
	// maxRoutes is how many routes are looked at. A router may have a million.
	maxRoutes = 16384
)

// Run puts the addresses into sink, and again whenever they change, until ctx is done; then it returns nil. It fails if
// they cannot be read and watched at the start; later it retries.
func (h *Host) Run(ctx context.Context, sink Sink) error {
	report := serialized(h.Report)
	var last hostFacts
	for synced := false; ; {
		err := h.watchAddrs(ctx, func(now hostFacts) {
			var delta snapshot.Delta
			if !synced || !slices.Equal(now.addrs, last.addrs) {
				delta.HostAddrs = &now.addrs
			}
			if !synced || !now.networks.Equal(last.networks) {
				delta.HostNetworks = &now.networks
			}
			if last = now; !delta.Empty() {
				sink.Put(delta)
			}
			if !synced {
				synced = true
				sink.Synced()
			}
		})
		switch {
		case ctx.Err() != nil:
			return nil
		case !synced:
			return fmt.Errorf("host addresses: %w", err)
		}
		report(fmt.Errorf("host addresses: %w; retrying", err))
		select {
		case <-ctx.Done():
			return nil
		case <-time.After(resubscribeDelay):
		}
	}
}

// errSubscriptionLost says that the kernel dropped messages, or closed the socket.
var errSubscriptionLost = errors.New("the subscription was lost")

// hostFacts are what the source knows.
type hostFacts struct {
	addrs    []netip.Addr
	networks snapshot.HostNetworks
}

// watchAddrs lists the addresses and the routes whenever they may have changed. It subscribes before it lists, so it
// misses nothing. It lists again instead of applying the messages, so it cannot drift. It only returns with an error.
func (h *Host) watchAddrs(ctx context.Context, put func(hostFacts)) error {
	handle, err := h.handle()
	if err != nil {
		return err
	}
	defer handle.Close()
	updates, lost, stop, err := h.subscribe()
	if err != nil {
		return err
	}
	defer stop()
	routes, err := h.watchRoutes()
	if err != nil {
		return err
	}
	defer routes.socket.Close()
	alarm := newAlarm()
	for {
		select {
		case <-ctx.Done():
			return ctx.Err()
		case _, ok := <-updates:
			if !ok {
				return lost()
			}
			alarm.by(time.Now().Add(addrDebounce))
		case <-alarm.C:
			alarm.due = time.Time{}
			now, err := h.list(handle, routes)
			if errors.Is(err, netlink.ErrDumpInterrupted) {
				alarm.by(time.Now().Add(addrDebounce))
				continue
			}
			if err != nil {
				return fmt.Errorf("list: %w", err)
			}
			put(now)
			if routes.stale {
				alarm.by(routes.due)
			}
		case _, ok := <-routes.changed:
			if !ok {
				return errSubscriptionLost
			}
			routes.stale = true
			alarm.by(clock.Later(time.Now().Add(addrDebounce), routes.due))
		}
	}
}

// alarm is a timer that only ever gets earlier.
type alarm struct {
	*time.Timer
	// due is when it goes off; zero if it is not set.
	due time.Time
}

// newAlarm returns one that goes off at once.
func newAlarm() *alarm { return &alarm{time.NewTimer(0), time.Now()} }

// by has it go off at some time at the latest.
func (a *alarm) by(at time.Time) {
	if a.due.IsZero() || at.Before(a.due) {
		a.due = at
		a.Reset(time.Until(at))
	}
}

// list lists what may have changed.
func (h *Host) list(handle *netlink.Handle, routes *routeWatch) (out hostFacts, err error) {
	if out.addrs, out.networks.Own, err = addresses(handle); err != nil {
		return out, err
	}
	if routes.stale && !time.Now().Before(routes.due) {
		if err := routes.list(handle); err != nil {
			return out, err
		}
	}
	out.networks.Routes, out.networks.TooMany = routes.to, routes.tooMany
	return out, nil
}

// subscribe subscribes to address changes. updates is closed when the subscription ends; lost then returns the reason.
// stop ends the subscription and must be called.
func (h *Host) subscribe() (updates <-chan netlink.AddrUpdate, lost func() error, stop func(), err error) {
	done := make(chan struct{})
	changes := make(chan netlink.AddrUpdate, 64)
	reason := errSubscriptionLost
	err = netlink.AddrSubscribeWithOptions(changes, done, netlink.AddrSubscribeOptions{
		Namespace:         h.Namespace,
		ReceiveBufferSize: h.receiveBuffer,
		ErrorCallback:     func(err error) { reason = err }, // before the channel is closed
	})
	if err != nil {
		return nil, nil, nil, fmt.Errorf("subscribe: %w", err)
	}
	return changes, func() error { return reason }, func() {
		close(done)
		for range changes { // the subscription may be waiting for us to take one
		}
	}, nil
}

func (h *Host) handle() (*netlink.Handle, error) {
	if h.Namespace == nil {
		return netlink.NewHandle(unix.NETLINK_ROUTE)
	}
	return netlink.NewHandleAt(*h.Namespace, unix.NETLINK_ROUTE)
}

// addresses lists the unicast addresses of all interfaces, and their networks, but for those of a single address.
func addresses(handle *netlink.Handle) (addrs []netip.Addr, networks []netip.Prefix, err error) {
	list, err := handle.AddrList(nil, netlink.FAMILY_ALL)
	if err != nil {
		return nil, nil, err
	}
	addrs = make([]netip.Addr, 0, len(list))
	for _, a := range list {
		if a.IPNet == nil {
			continue
		}
		ip, ok := netip.AddrFromSlice(a.IP)
		if ip = ip.Unmap(); !ok || ip.IsMulticast() {
			continue
		}
		addrs = append(addrs, ip)
		if p, ok := prefixFrom(a.IPNet); ok && !p.IsSingleIP() {
			networks = append(networks, p)
		}
	}
	slices.SortFunc(addrs, netip.Addr.Compare)
	slices.SortFunc(networks, netip.Prefix.Compare)
	return slices.Compact(addrs), slices.Compact(networks), nil
}
