package benchmark

import (
	"context"
	"errors"
	"fmt"
	"os"
	"runtime"
	"runtime/debug"
	"strconv"
	"strings"
	"time"

	"github.com/verdict-proxy/verdict/internal/lab"
	"github.com/verdict-proxy/verdict/internal/system/clock"
	"github.com/verdict-proxy/verdict/nft/kernel"
	"github.com/verdict-proxy/verdict/sync/dataplane"
	"github.com/verdict-proxy/verdict/sync/snapshot"
)

// host is an empty network namespace with a backend that writes into it.
type host struct {
	net     *lab.Net
	host    *lab.Host
	open    func() (*kernel.Backend, error)
	backend *kernel.Backend
}

func newHost(o Options) (*host, error) {
	h := &host{net: lab.New(), open: o.Open}
	var err error
	if h.host, err = h.net.NewHost("bench"); err == nil {
		err = h.reopen()
	}
	if err != nil {
		return nil, errors.Join(err, h.net.Close())
	}
	return h, nil
}

// reopen replaces the backend by a new one, which knows nothing yet.
func (h *host) reopen() error {
	old := h.backend
	err := h.host.Do(func() (err error) {
		h.backend, err = h.open()
		return err
	})
	if old != nil {
		err = errors.Join(err, old.Close())
	}
	return err
}

// close empties the namespace and lets it go. Tables that went only with it would be there for a while yet: the
// kernel takes its time with namespaces.
func (h *host) close() error {
	return errors.Join(h.backend.Remove(), h.backend.Close(), h.net.Close())
}

// line is the line from objects in memory to the kernel, step by step, as reconcile.Loop goes it.
type line struct {
	*host
	snapshot *snapshot.Snapshot
	planner  *dataplane.Planner
}

func newLine(o Options) (*line, error) {
	h, err := newHost(o)
	if err != nil {
		return nil, err
	}
	return &line{h, snapshot.New(), dataplane.NewPlanner(NodeConfig)}, nil
}

// step is the way of one event. Policy is the time until it is decided what the event means; the rest is in the
// receipt.
func (l *line) step(d snapshot.Delta) (policy time.Duration, r dataplane.Receipt, err error) {
	start := time.Now()
	change, _ := l.planner.Apply(l.snapshot, l.snapshot.Apply(d))
	policy = time.Since(start)
	r, err = l.backend.ApplyAll(l.planner.State(), change)
	return policy, r, err
}

// fill is step for Options.fill, which does not look at the time.
func (l *line) fill(d snapshot.Delta) (dataplane.Receipt, error) {
	_, r, err := l.step(d)
	return r, err
}

// Fill says what the first fill wrote, and what is held after it.
type Fill struct {
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
func (o Options) fill(
	ctx context.Context, c *Cluster, write func(snapshot.Delta) (dataplane.Receipt, error),
) (f Fill, err error) {
	all := c.All()
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
	f = Fill{
		Services: o.Services, Endpoints: o.Endpoints, Elements: r.Added, Messages: r.Messages, Bytes: r.Bytes,
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

// kernelMemory is what the kernel holds, on the whole machine, of the kinds that nf_tables takes: elements are slab
// objects, hash tables are slab or vmalloc by their size, and counters are per CPU. A kernel that does not tell one
// of them is taken to hold none.
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
		if clock.Pause(ctx, settleStep); ctx.Err() != nil {
			return 0, ctx.Err()
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
