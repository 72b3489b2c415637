package compare

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"runtime"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/verdict-proxy/verdict/internal/system/ipfamily"
	"github.com/verdict-proxy/verdict/internal/system/packets"
	"github.com/verdict-proxy/verdict/nft"
	"github.com/verdict-proxy/verdict/nft/iptshim/xtables"
	"github.com/verdict-proxy/verdict/nft/kernel"
	"github.com/verdict-proxy/verdict/sync/dataplane"
)

// proxyTable is kube-proxy's table in nftables mode.
const proxyTable = "kube-proxy"

// ReadSides reads what proxies have programmed in the network namespace of the calling thread: Verdict, and kube-proxy
// in its modes nftables and iptables. Notes say what could not be looked for.
func ReadSides(ctx context.Context, host []netip.Addr) (sides []Side, notes []string, err error) {
	h := &packets.Host{Addrs: host}
	for _, read := range []func(*packets.Host) (Side, error){readKubeProxy, ReadVerdict} {
		side, err := read(h)
		if err != nil {
			return nil, nil, err
		}
		if side.Size.Tables > 0 {
			sides = append(sides, side)
		}
	}
	found, err := xtables.Find(ctx)
	if err != nil {
		return sides, []string{"iptables rules were not read: " + err.Error()}, nil
	}
	defer found.Close()
	for _, v := range []xtables.Variant{found.Variant, found.Variant.Other()} {
		programs, ok := found.OfVariant(ctx, v)
		if !ok {
			continue
		}
		side, there, err := readChains(ctx, programs, h)
		if err != nil {
			return nil, nil, fmt.Errorf("%s: %w", programs, err)
		}
		if there {
			sides = append(sides, side)
		}
	}
	return sides, nil, nil
}

func readKubeProxy(h *packets.Host) (Side, error) {
	rules, err := packets.ReadNFTables(proxyTable, h)
	if err != nil {
		return Side{}, err
	}
	return NewSide(NFTables, rules), nil
}

// ReadVerdict reads Verdict's tables in the network namespace of the calling thread, also those at the ingress of a
// device.
func ReadVerdict(h *packets.Host) (Side, error) {
	rules, err := packets.ReadNFTables(nft.TableName, h, nft.IngressTable(ipfamily.IPv4), nft.IngressTable(ipfamily.IPv6))
	if err != nil {
		return Side{}, err
	}
	return NewSide(Verdict, rules), nil
}

// readChains reads the chains of one variant of iptables.
func readChains(ctx context.Context, p *xtables.Programs, h *packets.Host) (side Side, there bool, err error) {
	var text ipfamily.Per[[]byte]
	name := IPTables
	for i, f := range ipfamily.All {
		if !p.Serves(f) {
			continue
		}
		if text[i], err = p.SaveText(ctx, f); err != nil {
			return side, false, err
		}
		if ours, err := p.Wrote(ctx, f); err == nil && ours {
			name = Verdict
		}
	}
	chains, err := packets.ParseChains(text, h)
	if err != nil || !chains.Has("nat", "KUBE-SERVICES") {
		return side, false, err
	}
	return NewSide(name, chains), true, nil
}

// Compile has Verdict write a State into a network namespace of its own, which vanishes afterwards, and reads what the
// kernel lists of it. It takes CAP_SYS_ADMIN.
func Compile(state *dataplane.State, host []netip.Addr) (side Side, err error) {
	type result struct {
		Side
		error
	}
	done := make(chan result)
	go func() {
		runtime.LockOSThread() // and never unlocked: the thread ends with the goroutine, and the namespace with it
		side, err := compileHere(state, host)
		done <- result{side, err}
	}()
	r := <-done
	return r.Side, r.error
}

func compileHere(state *dataplane.State, host []netip.Addr) (side Side, err error) {
	if err := unix.Unshare(unix.CLONE_NEWNET); err != nil {
		return side, fmt.Errorf("a network namespace of its own: %w", err)
	}
	if state.Device != "" {
		pair := &netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: state.Device}, PeerName: "verdict-peer"}
		if err := netlink.LinkAdd(pair); err != nil {
			return side, fmt.Errorf("a device %s in a network namespace of its own: %w", state.Device, err)
		}
	}
	backend, err := kernel.Open(kernel.Options{})
	if err != nil {
		return side, err
	}
	defer func() { err = errors.Join(err, backend.Close()) }()
	for change := (dataplane.Change{}); ; {
		receipt, err := backend.Apply(state, change)
		if err != nil {
			return side, err
		}
		if len(receipt.Left) == 0 {
			break
		}
		change = dataplane.Change{Services: receipt.Left}
	}
	return ReadVerdict(&packets.Host{Addrs: host})
}
