package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"syscall"

	"github.com/spf13/cobra"

	"github.com/verdict-proxy/verdict/conformance/cases"
	"github.com/verdict-proxy/verdict/conformance/report"
	"github.com/verdict-proxy/verdict/conformance/run"
	"github.com/verdict-proxy/verdict/conformance/testbed"
)

// errFailed ends the command with status 1.
var errFailed = errors.New("not all cases passed")

type options struct {
	proxies  []string
	run      string
	themes   []string
	list     bool
	slice    bool
	report   string
	keep     bool
	verbose  bool
	witness  bool
	parallel int
	stories  int
	slow     float64
	source   string
	programs string
}

func newCommand() *cobra.Command {
	o := &options{}
	cmd := &cobra.Command{
		Use:   "conformance",
		Short: "Hold Service proxies to what Kubernetes promises",
		Long: `Conformance starts a real control plane and two nodes in network namespaces, runs a proxy on each
node, writes Services, and judges by packets what the proxy does with them. It uses only the
Kubernetes API, network namespaces and packets, and the listings of nft for proxies whose rules are
nftables tables.

The peers are built from Go modules, which takes some minutes the first time. Conformance needs
root, changes nothing on the machine, and leaves nothing behind. The exit status is 1 if a case
failed, 2 if it could not be run.`,
		Example: `  conformance --proxy verdict --proxy kube-proxy-nftables
  conformance --proxy verdict --run 'external-traffic-policy/local/.*/udp' --v
  conformance --proxy my-proxy.yaml --report /tmp/report`,
		Args: cobra.NoArgs, SilenceUsage: true, SilenceErrors: true,
		RunE: func(cmd *cobra.Command, _ []string) error { return o.main(cmd.Context(), cmd.OutOrStdout()) },
	}
	f := cmd.Flags()
	f.StringArrayVar(
		&o.proxies,
		"proxy",
		nil,
		"a proxy: "+strings.Join(testbed.KindNames(), ", ")+", or a file that describes one; may be repeated",
	)
	f.StringVar(&o.run, "run", "", "only cases whose name holds this regular expression")
	f.StringArrayVar(&o.themes, "theme", nil, "only cases of this theme; may be repeated")
	f.BoolVar(&o.list, "list", false, "print every case on a line of its own, and end")
	f.BoolVar(&o.slice, "slice", false, "only the short run: some cases of every theme")
	f.StringVar(&o.report, "report", "", "write junit.xml, report.html and run.json into this directory")
	f.BoolVar(&o.keep, "keep", false, "keep logs and configuration of proxies and control plane, and say where")
	f.BoolVar(&o.verbose, "v", false, "tell of every failure at once")
	f.BoolVar(&o.witness, "witness", true, "hold what is listed of the proxy's rules against packets and expectation, too")
	f.IntVar(&o.parallel, "parallel", 48, "how many senders of the matrix are at work at a time")
	f.IntVar(&o.stories, "stories", 8, "how many stories are told at a time")
	f.Float64Var(&o.slow, "slow", 1, "how many times as long as on an ordinary machine a change may take")
	f.StringVar(&o.source, "source", "", "the directory of Verdict's sources; empty means that of the working directory")
	f.StringVar(
		&o.programs,
		"programs",
		"",
		"a directory with verdict, etcd, kube-apiserver, kube-controller-manager and kube-proxy; empty means that they "+
			"are built",
	)
	return cmd
}

func (o *options) main(ctx context.Context, out io.Writer) error {
	suite, err := cases.Load()
	if err != nil {
		return err
	}
	r := run.Options{
		Parallel:        o.parallel,
		ParallelStories: o.stories,
		Slow:            testbed.Slow(o.slow),
		Progress:        run.NewProgress(os.Stderr),
		Verbose:         o.verbose,
		Witness:         o.witness,
	}
	if r.Cases, r.Stories, err = o.choose(suite); err != nil {
		return err
	}
	if o.list {
		return list(out, r)
	}
	if len(o.proxies) == 0 {
		return errors.New("--proxy is needed")
	}
	for _, name := range o.proxies {
		kind, err := testbed.FindKind(name)
		if err != nil {
			return err
		}
		r.Kinds = append(r.Kinds, kind)
	}
	if r.Programs, err = o.programsOf(); err != nil {
		return err
	}
	return o.inside(ctx, out, r)
}

// inside runs with a directory for its files, until the end or a signal. Unless they are to be kept, it is in memory.
func (o *options) inside(ctx context.Context, out io.Writer, r run.Options) error {
	ctx, stop := signal.NotifyContext(ctx, os.Interrupt, syscall.SIGTERM, syscall.SIGHUP)
	defer stop()
	in := testbed.InMemory
	if o.keep {
		in = testbed.OnDisk
	}
	return in("conformance-", func(dir string) error {
		r.Dir = dir
		found, err := run.Run(ctx, r)
		if found == nil {
			return err
		}
		failed := o.show(out, found)
		if err != nil { // it says more than that cases failed
			return err
		}
		return failed
	})
}

// show prints and writes what was found. Failures are an error.
func (o *options) show(out io.Writer, found *report.Run) error {
	write := report.WriteTable
	if f, ok := out.(*os.File); ok && run.IsTerminal(f) {
		write = report.WriteColourTable
	}
	if err := write(out, found); err != nil {
		return err
	}
	if o.report != "" {
		if err := writeReports(o.report, found); err != nil {
			return err
		}
	}
	for _, p := range found.Proxies {
		if c := found.Count(p.Name); c.Fail+c.Broken > 0 {
			return errFailed
		}
	}
	return nil
}

func writeReports(dir string, found *report.Run) error {
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return err
	}
	var errs []error
	for name, write := range map[string]func(io.Writer, *report.Run) error{
		"junit.xml": report.WriteJUnit, "report.html": report.WriteHTML, "run.json": report.WriteJSON,
	} {
		var text bytes.Buffer
		err := write(&text, found)
		if err == nil {
			err = os.WriteFile(filepath.Join(dir, name), text.Bytes(), 0o644)
		}
		errs = append(errs, err)
	}
	return errors.Join(errs...)
}

// choose gives the cases that were asked for.
func (o *options) choose(s *cases.Suite) (matrix []*cases.Case, stories []*cases.Story, err error) {
	pattern, err := regexp.Compile(o.run)
	if err != nil {
		return nil, nil, fmt.Errorf("--run: %w", err)
	}
	var themes []string
	for _, t := range s.Themes {
		themes = append(themes, t.Theme)
	}
	for _, t := range o.themes {
		if !slices.Contains(themes, t) {
			return nil, nil, fmt.Errorf("--theme %s: it is none of %s", t, strings.Join(themes, ", "))
		}
	}
	wanted := func(theme, name string, slice bool) bool {
		return (len(o.themes) == 0 || slices.Contains(o.themes, theme)) && pattern.MatchString(name) && (slice || !o.slice)
	}
	for _, c := range s.Cases {
		if wanted(c.Theme, c.Name, c.Slice) {
			matrix = append(matrix, c)
		}
	}
	for _, story := range s.Stories {
		if wanted(story.Theme, story.FullName(), story.Slice) {
			stories = append(stories, story)
		}
	}
	if len(matrix)+len(stories) == 0 {
		return nil, nil, errors.New("there is no such case; --list prints all")
	}
	return matrix, stories, nil
}

func list(out io.Writer, r run.Options) error {
	var b bytes.Buffer
	for _, c := range r.Cases {
		fmt.Fprintln(&b, c.Name)
	}
	for _, s := range r.Stories {
		fmt.Fprintln(&b, s.FullName())
	}
	_, err := out.Write(b.Bytes())
	return err
}

// programsOf says where programs come from.
func (o *options) programsOf() (p testbed.Programs, err error) {
	if o.programs == "" {
		p.Root, err = testbed.Sources(o.source)
		return p, err
	}
	p.Ready, err = filepath.Abs(o.programs)
	return p, err
}
