package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"strings"

	"github.com/verdict-proxy/verdict/internal/backends"
	"github.com/verdict-proxy/verdict/internal/config"
	"github.com/verdict-proxy/verdict/internal/ipfamily"
	"github.com/verdict-proxy/verdict/internal/takeover"
	"github.com/verdict-proxy/verdict/ipvsplugin"
	"github.com/verdict-proxy/verdict/nft"
	"github.com/verdict-proxy/verdict/nft/iptshim/xtables"
	"github.com/verdict-proxy/verdict/nft/kernel"
	"github.com/verdict-proxy/verdict/sync/reconcile"
)

// rules is what writes this node's rules: nftables, with IPVS behind it, or iptables.
type rules struct {
	backend reconcile.Writer
	// tables and scheduler are nil with iptables, and chains with nftables.
	tables    *kernel.Backend
	scheduler *ipvsplugin.Backend
	chains    *xtables.Backend
	// compat, if not nil, keeps some chains of iptables beside nftables.
	compat *xtables.Compat

	socket  *os.File
	closers []func() error
}

// openRules opens the backend that the settings name. With auto that is nftables if the kernel can do what it needs, and iptables
// otherwise.
func openRules(ctx context.Context, live *live, s *config.Settings, socket *os.File) (r *rules, err error) {
	r = &rules{socket: socket}
	defer func() {
		if err != nil {
			err = errors.Join(err, r.close())
		}
	}()
	why := "as told"
	if s.Backend != config.IPTables {
		err := r.openTables(live, s)
		if err == nil {
			r.openCompat(ctx, s, live.log.Logger)
			return r, probeIPVS(s) // what iptables cannot do either
		}
		if final(ctx, s, err) {
			return r, err
		}
		why = "nftables cannot be used: " + err.Error()
		if err := r.close(); err != nil {
			return r, err
		}
	}
	if err := r.openChains(ctx, live, s); err != nil {
		if s.Backend == config.Auto {
			err = fmt.Errorf("%s; and iptables cannot either: %w", why, err)
		}
		return r, err
	}
	p := r.chains.Programs()
	live.log.Info("iptables writes the rules", "why", why, "programs", p.String(), "variant", p.Why)
	if err := p.Missing(ipfamily.IPv6); err != nil {
		live.log.Warn("there are no rules for IPv6", "why", err)
	}
	live.withoutIPVS(s)
	return r, nil
}

// final says of an error with nftables that iptables is not tried after it.
func final(ctx context.Context, s *config.Settings, err error) bool {
	return s.Backend == config.NFTables || errors.Is(err, kernel.ErrRights) || ctx.Err() != nil
}

// checkRules says whether openRules can open what the settings name. Nothing stays open, and nothing is changed.
func checkRules(ctx context.Context, s *config.Settings) error {
	if s.Backend != config.IPTables {
		tables, err := openBackend(kernel.Options{})
		if err == nil {
			return errors.Join(probeIPVS(s), tables.Close())
		}
		if final(ctx, s, err) {
			return err
		}
	}
	programs, err := xtables.Find(ctx)
	if err != nil {
		return err
	}
	return programs.Close()
}

// openTables opens nftables with IPVS behind it.
func (r *rules) openTables(live *live, s *config.Settings) error {
	tables, err := openWithin(kernel.Options{Socket: r.socket, Own: s.OwnTables, Crowded: crowded(live.log)}, s.CounterMemoryMiB)
	if err != nil {
		return err
	}
	r.closers = append(r.closers, tables.Close)
	scheduler, err := ipvsplugin.New(tables, ipvsplugin.Options{
		NodeAddrs: live.nodeAddrs, Adopt: (&heir{mode: takeover.Mode(s.Takeover)}).adopt,
		Timeouts: ipvsplugin.Timeouts{TCP: s.IPVSTimeouts[0], TCPFin: s.IPVSTimeouts[1], UDP: s.IPVSTimeouts[2]}})
	if err != nil {
		return err
	}
	r.closers = append(r.closers, scheduler.Close)
	r.tables, r.scheduler, r.backend = tables, scheduler, scheduler
	return nil
}

// crowded reports who fills a map of remembered clients.
func crowded(log *logger) func([]kernel.AffinityShare) {
	return func(of []kernel.AffinityShare) {
		log.Warn("session affinity: the map of clients is nearly full; when it is, new clients are not remembered",
			"service", of[0].Service.String(), "entries", of[0].Entries, "ipv6", of[0].IPv6, "size", nft.AffinitySize)
	}
}

// openChains opens iptables.
func (r *rules) openChains(ctx context.Context, live *live, s *config.Settings) error {
	programs, err := xtables.Find(ctx)
	if err != nil {
		return err
	}
	options := backends.IPTablesOptions(s)
	options.KeepInvalid = xtables.Liberal() || makesLiberal(live.host, s)
	chains, err := xtables.Open(programs, xtables.Options{Model: options, Log: live.log.Logger})
	if err != nil {
		return errors.Join(err, programs.Close())
	}
	r.closers = append(r.closers, chains.Close)
	r.chains, r.backend = chains, chains
	return nil
}

// openCompat looks for iptables if chains of it are to be kept beside nftables. That there is none keeps nothing else from working.
func (r *rules) openCompat(ctx context.Context, s *config.Settings, log *slog.Logger) {
	if !s.IPTablesCompat {
		return
	}
	programs, err := xtables.Find(ctx)
	if err != nil {
		log.Error("the chains for others that jump to kube-proxy's cannot be kept", "err", err)
		return
	}
	r.closers = append(r.closers, programs.Close)
	r.compat = &xtables.Compat{Programs: programs, Bit: s.MasqueradeBit, Log: log}
}

// close closes what is open, last things first. What was written stays.
func (r *rules) close() error {
	var errs []error
	for i := len(r.closers) - 1; i >= 0; i-- {
		errs = append(errs, r.closers[i]())
	}
	r.closers = nil
	return errors.Join(errs...)
}

// mode is kube-proxy's word for it.
func (r *rules) mode() string {
	if r.tables == nil {
		return string(config.IPTables)
	}
	return string(config.NFTables)
}

// owns says whether nobody else can change the rules.
func (r *rules) owns() bool { return r.tables != nil && r.tables.Owns() }

// own says which of what has kube-proxy's names is ours.
func (r *rules) own() takeover.Own {
	switch {
	case r.chains != nil:
		return takeover.Own{Variant: r.chains.Programs().Variant.String(), Rules: true}
	case r.compat != nil:
		return takeover.Own{Variant: r.compat.Programs.Variant.String(), Compat: true}
	}
	return takeover.Own{}
}

// leaveOther removes what the other backend wrote on this node, before it was started with this one. It is called once the Services
// are carried. What removed says was there; it is empty if there was nothing.
func (r *rules) leaveOther(ctx context.Context, log *slog.Logger) error {
	if r.tables != nil {
		removed, err := xtables.RemoveOwn(ctx, r.compat != nil, log)
		if len(removed) > 0 {
			log.Info("removed the rules of iptables that Verdict had written before nftables", "what", strings.Join(removed, "; "))
		}
		return err
	}
	if !hasTables() {
		return nil
	}
	if err := removeTables(r.socket); err != nil {
		return err
	}
	log.Info("removed the tables of nftables that Verdict had written before iptables")
	return nil
}

// hasTables says whether the kernel holds tables of ours.
func hasTables() bool {
	r, err := kernel.OpenReader()
	if err != nil {
		return false
	}
	defer r.Close()
	revisions, err := r.Revisions()
	if err != nil {
		return false
	}
	for _, revision := range revisions {
		if revision.Number != 0 {
			return true
		}
	}
	return false
}
