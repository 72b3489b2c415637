package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"runtime"
	"runtime/debug"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/verdict-proxy/verdict/internal/config"
	"github.com/verdict-proxy/verdict/internal/lab"
	"github.com/verdict-proxy/verdict/nft/kernel"
	"github.com/verdict-proxy/verdict/sync/dataplane"
	"github.com/verdict-proxy/verdict/sync/snapshot"
)

// benchHost is an empty network namespace with a backend that writes into it.
type benchHost struct {
	net     *lab.Net
	host    *lab.Host
	backend *kernel.Backend
}

func newBenchHost() (*benchHost, error) {
	h := &benchHost{net: lab.New()}
	var err error
	if h.host, err = h.net.NewHost("bench"); err == nil {
		err = h.host.Do(func() (err error) {
			h.backend, err = openWithin(kernel.Options{}, config.DefaultCounterMemoryMiB)
			return err
		})
	}
	if err != nil {
		return nil, errors.Join(err, h.net.Close())
	}
	return h, nil
}

// close empties the namespace and lets it go. Tables that went only with it would be there for a while yet: the kernel takes
// its time with namespaces.
func (h *benchHost) close() error {
	return errors.Join(h.backend.Remove(), h.backend.Close(), h.net.Close())
}

// benchLine is the line from objects in memory to the kernel, step by step, as reconcile.Loop goes it.
type benchLine struct {
	*benchHost
	snapshot *snapshot.Snapshot
	planner  *dataplane.Planner
}

func newBenchLine() (*benchLine, error) {
	h, err := newBenchHost()
	if err != nil {
		return nil, err
	}
	return &benchLine{h, snapshot.New(), dataplane.NewPlanner(benchConfig)}, nil
}

// step is the way of one event. Policy is the time until it is decided what the event means; the rest is in the receipt.
func (l *benchLine) step(d snapshot.Delta) (policy time.Duration, r dataplane.Receipt, err error) {
	start := time.Now()
	change, _ := l.planner.Apply(l.snapshot, l.snapshot.Apply(d))
	policy = time.Since(start)
	r, err = l.backend.ApplyAll(l.planner.State(), change)
	return policy, r, err
}

// fill is step for bench.fill, which does not look at the time.
func (l *benchLine) fill(d snapshot.Delta) (dataplane.Receipt, error) {
	_, r, err := l.step(d)
	return r, err
}

// benchFill says what the first fill wrote, and what is held after it.
type benchFill struct {
	Services  int `json:"services"`
	Endpoints int `json:"endpoints"`
	Elements  int `json:"elements"`
	Messages  int `json:"messages"`
	Bytes     int `json:"bytes"`
	// Allocations and AllocatedBytes were made on the way from objects in memory to the acknowledgement.
	Allocations    uint64 `json:"allocations"`
	AllocatedBytes uint64 `json:"allocated_bytes"`
	// RSS is what is resident after the fill, Collected the same after a garbage collection.
	RSS       int64 `json:"rss_bytes"`
	Collected int64 `json:"rss_collected_bytes"`
	Kernel    int64 `json:"kernel_bytes"`
}

// fill has a whole cluster written into an empty kernel, and measures what that takes besides time.
func (b *bench) fill(
	ctx context.Context, c *benchCluster, write func(snapshot.Delta) (dataplane.Receipt, error),
) (f benchFill, err error) {
	all := c.all()
	empty, err := settledKernelMemory(ctx)
	if err != nil {
		return f, err
	}
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	r, err := write(all)
	if err != nil {
		return f, err
	}
	runtime.ReadMemStats(&after)
	if want := c.elements(); r.Added != want {
		return f, fmt.Errorf("%d elements were written, not %d: this measures something else", r.Added, want)
	}
	f = benchFill{
		Services: b.services, Endpoints: b.endpoints, Elements: r.Added, Messages: r.Messages, Bytes: r.Bytes,
		Allocations: after.Mallocs - before.Mallocs, AllocatedBytes: after.TotalAlloc - before.TotalAlloc,
	}
	if f.RSS, err = residentMemory(); err != nil {
		return f, err
	}
	full, err := settledKernelMemory(ctx)
	if err != nil {
		return f, err
	}
	f.Kernel = max(full-empty, 0)
	debug.FreeOSMemory()
	f.Collected, err = residentMemory()
	return f, err
}

// procField reads a line such as "VmRSS:  1234 kB" of a file, in bytes.
func procField(text, name string) (int64, bool) {
	for line := range strings.Lines(text) {
		if value, ok := strings.CutPrefix(line, name+":"); ok {
			kib, err := strconv.ParseInt(strings.TrimSuffix(strings.TrimSpace(value), " kB"), 10, 64)
			return kib << 10, err == nil
		}
	}
	return 0, false
}

// residentMemory is what this process has resident.
func residentMemory() (int64, error) {
	status, err := os.ReadFile("/proc/self/status")
	if err != nil {
		return 0, err
	}
	n, ok := procField(string(status), "VmRSS")
	if !ok {
		return 0, errors.New("/proc/self/status has no VmRSS")
	}
	return n, nil
}

// kernelMemory is what the kernel holds, on the whole machine, of the kinds that nf_tables takes: elements are slab objects,
// hash tables are slab or vmalloc by their size, and counters are per CPU. A kernel that does not tell one of them is taken
// to hold none.
func kernelMemory() (int64, error) {
	info, err := os.ReadFile("/proc/meminfo")
	if err != nil {
		return 0, err
	}
	sum := int64(0)
	for _, name := range []string{"SUnreclaim", "VmallocUsed", "Percpu"} {
		n, _ := procField(string(info), name)
		sum += n
	}
	return sum, nil
}

const (
	settleStep = 20 * time.Millisecond
	// settleCalm is how many steps in a row must bring nothing new; settleMost how many there are at most.
	settleCalm = 10
	settleMost = 250
)

// settle waits until the kernel has freed what it frees later: work queues take namespaces and transactions down.
func settle(ctx context.Context) error {
	_, err := settledKernelMemory(ctx)
	return err
}

// settledKernelMemory is kernelMemory after that.
func settledKernelMemory(ctx context.Context) (int64, error) {
	last, err := kernelMemory()
	for calm, n := 0, 0; err == nil && calm < settleCalm && n < settleMost; n++ {
		select {
		case <-ctx.Done():
			return 0, ctx.Err()
		case <-time.After(settleStep):
		}
		var now int64
		now, err = kernelMemory()
		if calm++; max(now-last, last-now) > last/500 {
			calm = 0
		}
		last = now
	}
	return last, err
}

// percentile gives the smallest of sorted samples that p percent of them do not exceed.
func percentile(sorted []time.Duration, p int) time.Duration {
	return sorted[max((len(sorted)*p+99)/100, 1)-1]
}

// sorted gives the samples in order.
func sorted(samples []time.Duration) []time.Duration {
	out := slices.Clone(samples)
	slices.Sort(out)
	return out
}

func microseconds(d time.Duration) float64 { return float64(d.Nanoseconds()) / 1e3 }
func milliseconds(d time.Duration) float64 { return float64(d.Nanoseconds()) / 1e6 }

// print shows what a fill wrote and what is held after it.
func (f *benchFill) print(s *show) {
	s.line("  written     %s elements, %s in %s messages", thousands(f.Elements), size(int64(f.Bytes)), thousands(f.Messages))
	s.line("  allocated   %s objects, %s", thousands(int(f.Allocations)), size(int64(f.AllocatedBytes)))
	s.line("  resident    %s, after a collection %s", size(f.RSS), size(f.Collected))
	s.line("  kernel      %s, %d bytes an element", size(f.Kernel), f.Kernel/int64(f.Elements))
}

// thousands writes a number with commas: 1,100,000.
func thousands(n int) string {
	text := strconv.Itoa(n)
	for i := len(text) - 3; i > 0; i -= 3 {
		text = text[:i] + "," + text[i:]
	}
	return text
}

// size writes a number of bytes: 12.3 MB, or kB where that is too coarse.
func size(n int64) string {
	if n < 1e6 {
		return fmt.Sprintf("%.1f kB", float64(n)/1e3)
	}
	return fmt.Sprintf("%.1f MB", float64(n)/1e6)
}
