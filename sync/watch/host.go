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

// Host is a source that follows the addresses on this host's interfaces over rtnetlink: all unicast addresses,
// loopback, link-local and tentative ones included, sorted, each once.
type Host struct {
	// Namespace is a handle of the network namespace to follow, which must stay open; nil means the one Run is called in.
	Namespace *netns.NsHandle
	// Report takes errors that are tried again; nil drops them. Calls don't overlap.
	Report func(error)

	// receiveBuffer is that of the subscription's socket in bytes; 0 means the system's default. Tests make it small.
	receiveBuffer int
}

const (
	// settle is how long changes are gathered: an interface that comes up gets several addresses.
	settle = 20 * time.Millisecond
	// retryAfter is the time between two tries to listen again.
	retryAfter = time.Second
)

// Run puts the addresses into sink, and again whenever they change, until ctx is done; then it gives nil. It fails if
// they can't be read and followed at the start; later it tries again.
func (h *Host) Run(ctx context.Context, sink Sink) error {
	report := quietly(h.Report)
	var last []netip.Addr
	for synced := false; ; {
		err := h.follow(ctx, func(now []netip.Addr) {
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
		report(fmt.Errorf("host addresses: %w; reading them again", err))
		select {
		case <-ctx.Done():
			return nil
		case <-time.After(retryAfter):
		}
	}
}

// errLost says that the kernel has dropped messages, or closed the socket.
var errLost = errors.New("the subscription was lost")

// follow lists the addresses whenever there may be a change. It listens before it lists, so that it misses nothing, and
// lists anew instead of adding up the messages, so that it can't go wrong. It ends with an error.
func (h *Host) follow(ctx context.Context, put func([]netip.Addr)) error {
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
	timer := time.NewTimer(0)
	pending := true
	for {
		select {
		case <-ctx.Done():
			return ctx.Err()
		case _, ok := <-updates:
			if !ok {
				select {
				case err := <-lost:
					return err
				default:
					return errLost
				}
			}
			if !pending {
				pending = true
				timer.Reset(settle)
			}
		case <-timer.C:
			pending = false
			now, err := addresses(handle)
			if errors.Is(err, netlink.ErrDumpInterrupted) {
				pending = true
				timer.Reset(settle)
				continue
			}
			if err != nil {
				return fmt.Errorf("list: %w", err)
			}
			put(now)
		}
	}
}

// subscribe has every change of an address sent. updates is closed when the subscription ends; lost
// says why then, if the kernel says so. stop ends it, and must be called.
func (h *Host) subscribe() (updates <-chan netlink.AddrUpdate, lost <-chan error, stop func(), err error) {
	done := make(chan struct{})
	sent := make(chan netlink.AddrUpdate, 64)
	failed := make(chan error, 1)
	err = netlink.AddrSubscribeWithOptions(sent, done, netlink.AddrSubscribeOptions{
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
	return sent, failed, func() {
		close(done)
		for range sent { // the subscription may be waiting for us to take one
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
