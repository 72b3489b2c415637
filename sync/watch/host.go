package watch

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"time"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"

	"github.com/verdict-proxy/verdict/internal/system/clock"
	"github.com/verdict-proxy/verdict/internal/system/wake"
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

	// receiveBuffer is the size of the sockets' buffers in bytes; 0 means the system's default. Tests make it small.
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
		if clock.Pause(ctx, resubscribeDelay); ctx.Err() != nil {
			return nil
		}
	}
}

// errSubscriptionLost says that no further message can be received.
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
	changed, stop, err := h.subscribe(unix.RTNLGRP_IPV4_IFADDR, unix.RTNLGRP_IPV6_IFADDR)
	if err != nil {
		return fmt.Errorf("subscribe: %w", err)
	}
	defer stop()
	routesChanged, stopRoutes, err := h.subscribe(unix.RTNLGRP_IPV4_ROUTE, unix.RTNLGRP_IPV6_ROUTE)
	if err != nil {
		return fmt.Errorf("subscribe to routes: %w", err)
	}
	defer stopRoutes()
	routes := &routeWatch{stale: true}
	alarm := newAlarm()
	for {
		select {
		case <-ctx.Done():
			return ctx.Err()
		case _, ok := <-changed:
			if !ok {
				return errSubscriptionLost
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
		case _, ok := <-routesChanged:
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

// subscribe subscribes to groups of messages. Changed says that there were some; it is closed when the subscription
// ends. What they say is not asked, so those that the kernel had to drop are as good as others.
func (h *Host) subscribe(groups ...uint) (changed <-chan struct{}, stop func(), err error) {
	namespace := netns.None()
	if h.Namespace != nil {
		namespace = *h.Namespace
	}
	socket, err := nl.SubscribeAt(namespace, netns.None(), unix.NETLINK_ROUTE, groups...)
	if err == nil && h.receiveBuffer > 0 {
		err = socket.SetReceiveBufferSize(h.receiveBuffer, false)
	}
	if err != nil {
		return nil, nil, err
	}
	came := make(chan struct{}, 1)
	go func() {
		defer close(came)
		for {
			if _, _, err := socket.Receive(); err != nil && !errors.Is(err, unix.ENOBUFS) {
				return
			}
			wake.Up(came)
		}
	}()
	return came, socket.Close, nil
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
