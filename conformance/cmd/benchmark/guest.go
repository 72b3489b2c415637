package main

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"

	"github.com/verdict-proxy/verdict/conformance/benchmark"
	"github.com/verdict-proxy/verdict/conformance/benchmark/results"
)

// The lines by which a run in a guest tells its results: a word, then JSON.
const (
	headWord = "bench-results "
	cellWord = "bench-cell "
)

// printCells prints the cells from the given place on, and before the first of them all that is known of the run.
func printCells(out io.Writer, r *results.Results, from int) error {
	head := *r
	head.Cells = nil
	if err := printLine(out, headWord, head); err != nil {
		return err
	}
	for _, c := range r.Cells[from:] {
		if err := printLine(out, cellWord, c); err != nil {
			return err
		}
	}
	return nil
}

func printLine(out io.Writer, word string, v any) error {
	b, err := json.Marshal(v)
	if err != nil {
		return err
	}
	_, err = fmt.Fprintf(out, "%s%s\n", word, b)
	return err
}

// readLine takes up a line that a guest printed, and says whether it was one of ours.
func readLine(line string, r *results.Results) (ours bool, err error) {
	if text, ok := strings.CutPrefix(line, cellWord); ok {
		c := &results.Cell{}
		if err := json.Unmarshal([]byte(text), c); err != nil {
			return true, fmt.Errorf("guest: %w", err)
		}
		r.Cells = append(r.Cells, c)
		return true, nil
	}
	if text, ok := strings.CutPrefix(line, headWord); ok {
		head := results.Results{}
		if err := json.Unmarshal([]byte(text), &head); err != nil {
			return true, fmt.Errorf("guest: %w", err)
		}
		head.Cells = r.Cells
		*r = head
		r.Machine.Guest = true
		return true, nil
	}
	return false, nil
}

// The guest has processors for a control plane and a proxy, and memory for all programs, twice, since its files are
// in memory.
const (
	guestCores  = "2"
	guestMemory = "4096"
)

// loadIPVS is for a guest, where nobody else would load the module.
func loadIPVS(ctx context.Context) error {
	if out, err := exec.CommandContext(ctx, "modprobe", "ip_vs").CombinedOutput(); err != nil {
		return fmt.Errorf("modprobe ip_vs: %w: %s", err, out)
	}
	return nil
}

// inGuest runs this program in a guest, with all it needs, and takes up the results as they come. It always begins
// anew.
func (o *options) inGuest(ctx context.Context, found *results.Results) (err error) {
	dir, err := os.MkdirTemp("", "bench-")
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(dir)) }()
	programs, err := benchmark.Build(ctx, o.source, dir, o.proxies)
	if err != nil {
		return err
	}
	self, err := os.Executable()
	if err != nil {
		return err
	}
	args := []string{"-g", o.guest, "-c", guestCores, "-m", guestMemory, "-t", fmt.Sprint(int(o.budget.Seconds()) + 600)}
	for _, p := range []string{"xtables-legacy-multi", "env", "ipset"} {
		args = append(args, "-p", p)
	}
	extensions, err := filepath.Glob("/usr/lib/*/xtables")
	if err != nil {
		return err
	}
	for _, dir := range extensions {
		args = append(args, "-f", dir)
	}
	for _, path := range programs {
		args = append(args, "-f", path)
	}
	found.Cells = nil
	cmd := exec.CommandContext(
		ctx,
		filepath.Join(o.source, "internal", "lab", "guest", "run"),
		append(append(args, self), o.flagsInGuest(programs)...)...)
	cmd.Stderr = os.Stderr
	out, err := cmd.StdoutPipe()
	if err != nil {
		return err
	}
	if err := cmd.Start(); err != nil {
		return err
	}
	return errors.Join(o.takeUp(out, found), cmd.Wait())
}

// flagsInGuest are the flags of this program in the guest.
func (o *options) flagsInGuest(programs benchmark.Programs) []string {
	flags := []string{"--cells", "--fresh", fmt.Sprintf("--quick=%v", o.quick), fmt.Sprintf("--giant=%v", o.giant),
		fmt.Sprintf("--paths=%v", o.paths),
		"--budget=" + o.budget.String(), fmt.Sprintf("--repeat=%d", o.repeat)}
	for name, path := range programs {
		flags = append(flags, "--program="+name+"="+path)
	}
	for _, s := range o.sizes {
		flags = append(flags, "--size="+s)
	}
	for _, p := range o.proxies {
		flags = append(flags, "--proxy="+p)
	}
	return flags
}

// takeUp reads what a guest prints. What is no result is passed on.
func (o *options) takeUp(out io.Reader, found *results.Results) error {
	lines := bufio.NewScanner(out)
	lines.Buffer(nil, 1<<26)
	var errs []error
	for lines.Scan() {
		ours, err := readLine(lines.Text(), found)
		if ours && err == nil {
			err = found.WriteFile(o.file("results.json"))
		}
		if !ours {
			fmt.Fprintln(os.Stderr, lines.Text())
		}
		errs = append(errs, err)
	}
	return errors.Join(append(errs, lines.Err())...)
}
