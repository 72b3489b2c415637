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

	"github.com/verdict-proxy/verdict/sync/snapshot"
)

// Host is a source that watches the addresses on this host's interfaces over rtnetlink: all unicast addresses,
// including loopback, link-local and tentative ones, sorted and unique.
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
)

// Run puts the addresses into sink, and again whenever they change, until ctx is done; then it returns nil. It fails if
// they cannot be read and watched at the start; later it retries.
func (h *Host) Run(ctx context.Context, sink Sink) error {
	report := serialized(h.Report)
	var last []netip.Addr
	for synced := false; ; {
		err := h.watchAddrs(ctx, func(now []netip.Addr) {
			if !synced || !slices.Equal(now, last) {
				last = now
				sink.Put(snapshot.Delta{HostAddrs: &now})
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

// watchAddrs lists the addresses whenever they may have changed. It subscribes before it lists, so it misses nothing.
// It lists again instead of applying the messages, so it cannot drift. It only returns with an error.
func (h *Host) watchAddrs(ctx context.Context, put func([]netip.Addr)) error {
	handle, err := h.handle()
	if err != nil {
		return err
	}
	defer handle.Close()
	updates, failed, stop, err := h.subscribe()
	if err != nil {
		return err
	}
	defer stop()
	timer := time.NewTimer(0)
	pending := true
	for {
		select {
		case <-ctx.Done():
			return ctx.Err()
		case _, ok := <-updates:
			if !ok {
				select {
				case err := <-failed:
					return err
				default:
					return errSubscriptionLost
				}
			}
			if !pending {
				pending = true
				timer.Reset(addrDebounce)
			}
		case <-timer.C:
			pending = false
			now, err := addresses(handle)
			if errors.Is(err, netlink.ErrDumpInterrupted) {
				pending = true
				timer.Reset(addrDebounce)
				continue
			}
			if err != nil {
				return fmt.Errorf("list: %w", err)
			}
			put(now)
		}
	}
}

// subscribe subscribes to address changes. updates is closed when the subscription ends; lost then has the kernel's
// reason, if it gave one. stop ends the subscription and must be called.
func (h *Host) subscribe() (updates <-chan netlink.AddrUpdate, lost <-chan error, stop func(), err error) {
	done := make(chan struct{})
	changes := make(chan netlink.AddrUpdate, 64)
	failed := make(chan error, 1)
	err = netlink.AddrSubscribeWithOptions(changes, done, netlink.AddrSubscribeOptions{
		Namespace:         h.Namespace,
		ReceiveBufferSize: h.receiveBuffer,
		ErrorCallback: func(err error) {
			select {
			case failed <- err:
			default:
			}
		},
	})
	if err != nil {
		return nil, nil, nil, fmt.Errorf("subscribe: %w", err)
	}
	return changes, failed, func() {
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

// addresses lists the unicast addresses of all interfaces.
func addresses(handle *netlink.Handle) ([]netip.Addr, error) {
	list, err := handle.AddrList(nil, netlink.FAMILY_ALL)
	if err != nil {
		return nil, err
	}
	addrs := make([]netip.Addr, 0, len(list))
	for _, a := range list {
		if a.IPNet == nil {
			continue
		}
		if ip, ok := netip.AddrFromSlice(a.IP); ok && !ip.Unmap().IsMulticast() {
			addrs = append(addrs, ip.Unmap())
		}
	}
	slices.SortFunc(addrs, netip.Addr.Compare)
	return slices.Compact(addrs), nil
}
