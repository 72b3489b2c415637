package backends

import (
	"context"
	"errors"
	"log/slog"
	"net/netip"
	"os"
	"slices"
	"sync"
	"time"

	"github.com/verdict-proxy/verdict/internal/proxy/config"
	"github.com/verdict-proxy/verdict/internal/proxy/ledger"
	"github.com/verdict-proxy/verdict/internal/proxy/metrics"
	"github.com/verdict-proxy/verdict/internal/proxy/takeover"
	"github.com/verdict-proxy/verdict/internal/system/ipfamily"
	"github.com/verdict-proxy/verdict/internal/system/sysctl"
	"github.com/verdict-proxy/verdict/ipvsplugin"
	"github.com/verdict-proxy/verdict/nft"
	"github.com/verdict-proxy/verdict/nft/iptshim/xtables"
	"github.com/verdict-proxy/verdict/nft/kernel"
	"github.com/verdict-proxy/verdict/sync/dataplane"
)

// OpenKernel opens nftables in the network namespace that the calling thread is in, and makes sure that the kernel
// is up to it.
func OpenKernel(o kernel.Options) (*kernel.Backend, error) {
	backend, err := kernel.Open(o)
	if err != nil {
		return nil, err
	}
	if err := backend.Probe(); err != nil {
		return nil, errors.Join(err, backend.Close())
	}
	return backend, nil
}

// CountersWithin returns how many counters elements may have in so many MiB; at least one.
func CountersWithin(mib int) (int, error) {
	cpus, err := sysctl.PossibleCPUs()
	if err != nil {
		return 0, err
	}
	return max(mib<<20/(nft.CounterBytes*cpus), 1), nil
}

// OpenCounting is OpenKernel with counters that take so many MiB at most.
func OpenCounting(o kernel.Options, mib int) (_ *kernel.Backend, err error) {
	if o.Counters, err = CountersWithin(mib); err != nil {
		return nil, err
	}
	return OpenKernel(o)
}

// OpenSocket opens the socket that owns tables, for OpenOptions. The caller closes it; the tables stay protected as
// long as any process holds it.
func OpenSocket() (*os.File, error) { return kernel.OpenSocket() }

// OwnsTables says whether a socket of OpenSocket owns Verdict's tables.
func OwnsTables(socket *os.File) bool { return kernel.OwnsTables(socket) }

// closers close what is open, last things first.
type closers []func() error

func (c closers) close() error {
	var errs []error
	for i := len(c) - 1; i >= 0; i-- {
		errs = append(errs, c[i]())
	}
	return errors.Join(errs...)
}

// openNFTables opens nftables with IPVS behind it.
func openNFTables(ctx context.Context, o OpenOptions) (_ *Opened, err error) {
	var open closers
	defer func() {
		if err != nil {
			err = errors.Join(err, open.close())
		}
	}()
	s := o.Settings
	tables, err := OpenCounting(kernel.Options{Socket: o.Socket, Own: s.OwnTables, Crowded: crowded(o.Log)},
		s.CounterMemoryMiB)
	if err != nil {
		return nil, final(err)
	}
	open = append(open, tables.Close)
	adopter := &ipvsAdopter{mode: takeover.Mode(s.Takeover)}
	scheduler, err := ipvsplugin.New(tables, ipvsplugin.Options{
		NodeAddrs: o.NodeAddrs, Adopt: adopter.adopt, Yield: adopter.yield,
		Timeouts: ipvsplugin.Timeouts{TimeoutTCP: s.IPVSTimeouts[0], TimeoutTCPFin: s.IPVSTimeouts[1],
			TimeoutUDP: s.IPVSTimeouts[2]}})
	if err != nil {
		return nil, err
	}
	open = append(open, scheduler.Close)
	if err := probeIPVS(s); err != nil {
		return nil, err
	}
	opened := &Opened{
		Writer: scheduler, Mode: string(config.NFTables), ProbeScheduler: ipvsplugin.Probe,
		Fill:           func() []metrics.Fill { return fill(tables) },
		AffinityShares: func() []metrics.AffinityShare { return affinityShares(tables) },
		Counters:       func() (Counters, error) { return kernel.OpenCounters() },
		Evidence:       func() (EvidenceReader, error) { return kernel.OpenEvidence() },
		IPVS:           scheduled{scheduler},
		Heard:          scheduler.Heard,
		KeepSupported:  tables.KeepSupported,
		Ledger:         ledgerSource(tables),
		OnSent:         func(sent func([]byte)) { tables.Sent = sent },
	}
	if tables.Owns() {
		opened.Owns = tables.Owned
	}
	if compat := openCompat(ctx, s, o.Log); compat != nil {
		opened.Run, opened.Named = compat.Run, takeover.Own{Variant: compat.Programs.Variant.String(), Compat: true}
		open = append(open, compat.Programs.Close)
	}
	opened.Close = open.close
	return opened, nil
}

// ledgerSource tells what the kernel holds, in the network namespace of the Backend.
func ledgerSource(tables *kernel.Backend) ledger.Source {
	return ledger.Source{
		New: func() ledger.State { return &kernel.Replay{} },
		Read: func() ([]byte, error) {
			held, err := tables.Load()
			if held == nil {
				return nil, err
			}
			return held.Batch()
		},
		Revision: tables.LoadRevision,
	}
}

// probeNFTables says whether openNFTables works.
func probeNFTables(_ context.Context, s *config.Settings) error {
	tables, err := OpenKernel(kernel.Options{})
	if err != nil {
		return final(err)
	}
	return errors.Join(probeIPVS(s), tables.Close())
}

// final marks the errors that iptables would meet, too.
func final(err error) error {
	if errors.Is(err, kernel.ErrRights) {
		return Final{err}
	}
	return err
}

// probeIPVS gives an error if the operator wants IPVS for all Services by name and this kernel has not got it: iptables
// cannot do that either. With the mode ipvs alone, as kube-proxy's configuration has it, nftables stands in.
func probeIPVS(s *config.Settings) error {
	if s.Policy.IPVS.Mode != dataplane.IPVSAlways || !s.IPVSNamed {
		return nil
	}
	if err := ipvsplugin.Probe(s.Policy.IPVS.Default.Scheduler); err != nil {
		return Final{err}
	}
	return nil
}

// ipvsSysctls are those of IPVS, where it is to be used.
func ipvsSysctls(s *config.Settings) []sysctl.Setting {
	if s.Policy.IPVS.Mode == dataplane.IPVSAlways {
		_ = ipvsplugin.Probe(s.Policy.IPVS.Default.Scheduler) // which loads it; that it is missing, run itself reports
	}
	if s.Policy.IPVS.Mode == dataplane.IPVSNever || !ipvsplugin.Loaded() {
		return nil
	}
	return ipvsplugin.Sysctls()
}

// crowded reports who fills a map of remembered clients.
func crowded(log *slog.Logger) func([]kernel.AffinityShare) {
	return func(of []kernel.AffinityShare) {
		log.Warn("session affinity: the map of clients is nearly full; once it is full, new clients get no affinity",
			"service", of[0].Service.String(), "entries", of[0].Entries,
			"ipv6", of[0].Family == ipfamily.IPv6, "size", nft.AffinitySize)
	}
}

// openCompat looks for iptables if chains of it are to be kept beside nftables. If there is none, everything else
// works.
func openCompat(ctx context.Context, s *config.Settings, log *slog.Logger) *xtables.Compat {
	if !s.IPTablesCompat {
		return nil
	}
	programs, err := xtables.Find(ctx)
	if err != nil {
		log.Error("failed to set up the compatibility chains (iptablesCompat)", "err", err)
		return nil
	}
	return &xtables.Compat{Programs: programs, Bit: s.MasqueradeBit, Log: log}
}

// HasTables says whether the kernel holds tables of ours.
func HasTables() bool {
	r, err := kernel.OpenReader()
	if err != nil {
		return false
	}
	defer r.Close()
	revisions, err := r.Revisions()
	return err == nil && slices.ContainsFunc(revisions[:], func(r nft.Revision) bool { return r.Number != 0 })
}

// removeNFTables deletes our tables and what IPVS has of ours. Where the kernel has no nf_tables there are none.
func removeNFTables(_ context.Context, o RemoveOptions) (removed []string, err error) {
	there := HasTables()
	if o.Beside != nil && !there {
		return nil, nil
	}
	backend, err := kernel.Open(kernel.Options{Socket: o.Socket})
	if err != nil {
		return nil, err
	}
	defer backend.Close()
	var lacks *kernel.Unsupported
	if errors.As(backend.Probe(), &lacks) && !there {
		return nil, nil
	}
	adopter := &ipvsAdopter{mode: takeover.Never}
	scheduler, err := ipvsplugin.New(backend, ipvsplugin.Options{Yield: adopter.yield})
	if err != nil {
		return nil, err
	}
	defer scheduler.Close()
	if err := scheduler.Remove(); err != nil || !there {
		return nil, err
	}
	return []string{"the tables of nftables"}, nil
}

// ipvsAdopter decides which virtual services of IPVS become ours: those that a kube-proxy left, if it is not running
// any more. Those that a running kube-proxy took are its own again.
type ipvsAdopter struct {
	mode takeover.Mode

	mu    sync.Mutex
	found *takeover.Found
	at    time.Time
}

// findAgain is how long what was found holds: one transaction may ask about thousands.
const findAgain = 5 * time.Second

func (a *ipvsAdopter) adopt(vs ipvsplugin.VirtualService) bool {
	if a.mode != takeover.Auto {
		return false
	}
	proxys, running := a.ask(vs.Key)
	return proxys && !running
}

func (a *ipvsAdopter) yield(k dataplane.Key) bool {
	proxys, running := a.ask(k)
	return proxys && running
}

// ask says whether a virtual service is kube-proxy's, and whether one is running.
func (a *ipvsAdopter) ask(k dataplane.Key) (proxys, running bool) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.found == nil || time.Since(a.at) > findAgain {
		found, err := takeover.Find(context.Background(), takeover.Own{})
		if err != nil {
			return false, false
		}
		a.found, a.at = found, time.Now()
	}
	return a.found.IsProxyService(netip.AddrPortFrom(k.Addr, k.Port), uint8(k.Protocol)), len(a.found.Running()) > 0
}

// fill says how full the kernel's sets are.
func fill(b *kernel.Backend) (out []metrics.Fill) {
	tables := b.Fill()
	if tables == nil {
		return nil
	}
	for i, f := range ipfamily.All {
		for set, size := range tables[i] {
			if id := nft.SetID(set); id.IsContent() || slices.Contains(metrics.RememberingSets[:], id.String()) {
				out = append(out, metrics.Fill{Family: f, Set: id.String(), Elements: size.Elements,
					Size: size.Size})
			}
		}
	}
	return out
}

// affinityShares says who fills a map of remembered clients that is nearly full.
func affinityShares(b *kernel.Backend) (out []metrics.AffinityShare) {
	for _, s := range b.AffinityShares() {
		out = append(out, metrics.AffinityShare(s))
	}
	return out
}

// scheduled reads what IPVS counts, for the metrics.
type scheduled struct{ *ipvsplugin.Backend }

func (s scheduled) Services(do func(dataplane.Key, dataplane.SchedulerStatistics)) error {
	all, err := s.Statistics()
	for i := range all {
		do(all[i].Key, all[i].Statistics)
	}
	return err
}

func (s scheduled) Endpoints(of dataplane.Key, do func(netip.AddrPort, metrics.IPVSEndpoint)) error {
	all, err := s.DestinationStatistics(of)
	for i := range all {
		do(all[i].AddrPort, metrics.IPVSEndpoint{SchedulerStatistics: all[i].Statistics, Active: all[i].Active})
	}
	return err
}
