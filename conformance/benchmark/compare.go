package benchmark

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"github.com/verdict-proxy/verdict/conformance/benchmark/results"
)

// ComparePlan says in which clusters "verdict compare" is to look at which proxies.
type ComparePlan struct {
	Sizes []results.Size
	Kinds []*Kind
	// Limit is how long a proxy may take to program all Services.
	Limit time.Duration
	// Programs are those of the control plane and verdict, Dir an empty directory for all files.
	Programs Programs
	Dir      string
	// Say tells of a comparison that is done, Progress of what is under way; each is one line.
	Say, Progress func(string)
}

// Run compares each proxy in each cluster. It gives what it has even if there is an error.
func (p *ComparePlan) Run(ctx context.Context) (all []*results.Comparison, err error) {
	for _, size := range p.Sizes {
		some, err := p.size(ctx, size)
		all = append(all, some...)
		if err != nil {
			return all, fmt.Errorf("%s: %w", size, err)
		}
	}
	return all, nil
}

func (p *ComparePlan) size(ctx context.Context, size results.Size) (all []*results.Comparison, err error) {
	dir := filepath.Join(p.Dir, size.String())
	if err := os.Mkdir(dir, 0o700); err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(dir)) }()
	c := newCluster(size)
	c.varied = true
	w, err := newWorld(ctx, c, p.Programs, dir, func(text string) { p.Progress(size.String() + ": " + text) })
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, w.close()) }()
	for _, k := range p.Kinds {
		p.Progress(fmt.Sprintf("%s, %s", size, k.Name))
		r, err := p.one(ctx, w, k)
		if err != nil {
			return all, fmt.Errorf("%s: %w", k.Name, err)
		}
		all = append(all, r)
		p.Say(r.String())
	}
	return all, nil
}

// one has a proxy program a node of its own, and compares the node's kernel with the objects.
func (p *ComparePlan) one(ctx context.Context, w *world, k *Kind) (r *results.Comparison, err error) {
	n, err := w.newNode(k)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, n.close()) }()
	r = &results.Comparison{Size: w.size, Proxy: k.Name, Load: Load()}
	start, err := n.first(ctx, p.Limit)
	if err != nil {
		return nil, err
	}
	if r.Start = *start; start.Limit {
		return r, nil
	}
	if _, err := n.calm(ctx, time.Now(), p.Limit); err != nil {
		return nil, err
	}
	return r, n.compare(p.Programs[verdict], r)
}

// compare runs "verdict compare" on the node, as an operator would: with the proxy's own configuration file.
func (n *node) compare(program string, r *results.Comparison) error {
	cmd := n.host.Command(program, "compare", "--config", n.config(), "--kubeconfig", n.plane.Kubeconfig(),
		"--hostname-override", nodeName, "-o", "json")
	var certificate, said bytes.Buffer
	cmd.Stdout, cmd.Stderr = &certificate, &said
	began := time.Now()
	if err := cmd.Start(); err != nil {
		return err
	}
	ended := make(chan struct{})
	peak := make(chan int64)
	go func() { peak <- peakOf(cmd.Process.Pid, ended) }()
	err := cmd.Wait()
	r.Seconds = time.Since(began).Seconds()
	close(ended)
	r.Memory = <-peak
	// Status 1 says that something differs, which the certificate tells.
	if cmd.ProcessState == nil || cmd.ProcessState.ExitCode() > 1 || certificate.Len() == 0 {
		return fmt.Errorf("verdict compare: %w: %s", err, said.String())
	}
	r.Processor = (cmd.ProcessState.UserTime() + cmd.ProcessState.SystemTime()).Seconds()
	r.Certificate = &results.Certificate{}
	return json.Unmarshal(certificate.Bytes(), r.Certificate)
}

// peakOf gives the most that a process has had resident, as far as it was seen until it had ended. What the kernel says
// of a process that has ended includes the one that started it.
func peakOf(pid int, ended <-chan struct{}) (peak int64) {
	for {
		text, _ := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
		for line := range strings.Lines(string(text)) {
			if value, ok := strings.CutPrefix(line, "VmHWM:"); ok {
				kib, _ := strconv.ParseInt(strings.TrimSpace(strings.TrimSuffix(strings.TrimSpace(value), "kB")), 10, 64)
				peak = max(peak, kib<<10)
			}
		}
		select {
		case <-ended:
			return peak
		case <-time.After(20 * time.Millisecond):
		}
	}
}
