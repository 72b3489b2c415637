package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/verdict-proxy/verdict/internal/answers/inspect"
	"github.com/verdict-proxy/verdict/internal/proxy/backends"
	"github.com/verdict-proxy/verdict/internal/proxy/ledger"
	"github.com/verdict-proxy/verdict/internal/system/terminal"
	"github.com/verdict-proxy/verdict/sync/watch"
)

// explainOptions are what the command line of explain says.
type explainOptions struct {
	objects                          inspect.ObjectFlags
	live, json, all, trace, exitCode bool
	iface                            string
	// at is a time in the past, of which the ledger tells.
	at     string
	ledger ledgerPlace
	// to is a pod of which is asked which Services lead to it.
	to string
}

func newExplain() *cobra.Command {
	var o explainOptions
	cmd := &cobra.Command{
		Use:   "explain SRC DST:PORT[/PROTO]",
		Short: "Show where a packet goes, and why",
		Long: `Explain shows where the first packet of a connection from SRC to DST goes: which Service
answers there, which row of policy decides, which endpoints it may be sent to and how likely, what
source address they see, and why the Service's other endpoints are excluded.

SRC is an address, or node (this node), pod (some pod) or outside (neither). PROTO is tcp, udp or
sctp; the default is tcp. DST/icmp asks about a ping.

Explain takes the answer from the objects (--from PATH, --kubeconfig FILE or --in-cluster), which is
the default in a pod, or from the kernel of this node (--live), which is the default elsewhere. With
--live and objects it uses both, and shows where they disagree. It only reads the kernel, by key,
beside a running proxy.

Verdict does not touch packets to addresses without a Service, and explain does not follow the rules
of other programs for them. With --live it shows what else on this host stops a packet to a Service:
a missing route, disabled forwarding, chains of other programs. While records are on, it names the
last connections to the Service that failed (docs/FLOWS.md).

With --at, explain answers from what the kernel held at a time in the past, as far as this node's
ledger goes back (docs/LEDGER.md). It uses this host's present addresses, routes and interfaces.

With --to, and without SRC and DST, explain lists the Services that lead to a pod, from the objects
or, without objects, from the kernel of this node.

Give flags such as --cluster-cidr the same values as for verdict run. With --live, explain takes
missing ones from the settings in the kernel.`,
		Example: `  verdict explain node 10.96.0.10:53/udp --from cluster.yaml --hostname-override node-1
  verdict explain outside 203.0.113.20:80 --live
  verdict explain outside 203.0.113.20/icmp
  verdict explain pod 10.96.0.10:53/udp --live --in-cluster --trace
  verdict explain pod 10.96.0.10:53/udp --at 14:03:07
  verdict explain --to 10.244.1.7`,
		Args:              o.checkArgs,
		ValidArgsFunction: o.complete,
		RunE:              o.run,
	}
	o.addFlags(cmd.Flags())
	return cmd
}

func (o *explainOptions) addFlags(f *pflag.FlagSet) {
	f.BoolVar(&o.live, "live", false, "ask the kernel of this node; needs CAP_NET_ADMIN")
	f.StringVar(&o.iface, "interface", "",
		"the interface the packet comes in by (default: the one this host's routes lead back to SRC)")
	f.StringVar(&o.at, "at", "", "ask the ledger for this time: 14:03:07, 2006-01-02 14:03:07 or RFC 3339")
	o.ledger.addFlags(f)
	f.StringVar(&o.to, "to", "", "say which Services lead to this pod: its address or, of an API server, NAMESPACE/NAME")
	f.BoolVar(&o.trace, "trace", false, "with --live or --at, show each rule that looks at the packet")
	f.BoolVar(&o.exitCode, "exit-code", false, "exit with status 1 if the kernel and the objects disagree")
	f.BoolVar(&o.all, "all", false, "show all endpoints, however many there are")
	addJSON(f, &o.json, "print JSON (docs/ANSWERS.md)")
	o.objects.AddFlags(f)
}

func (o *explainOptions) run(cmd *cobra.Command, args []string) error {
	if o.to != "" {
		return o.leadingTo(cmd.Context(), cmd.OutOrStdout())
	}
	q, err := inspect.ParseQuestion(args[0], args[1])
	if err != nil {
		return err
	}
	a, err := o.answer(cmd.Context(), q)
	if err != nil {
		return err
	}
	if err := o.print(cmd.OutOrStdout(), a); err != nil || !o.exitCode || a.Agree() {
		return err
	}
	return exitStatus(exitDiffers)
}

// print writes the answer as text or JSON.
func (o *explainOptions) print(w io.Writer, a *inspect.Answer) error {
	if !o.trace && a.Kernel != nil {
		a.Kernel.Steps = nil
	}
	return inspect.Show(w, o.json, a, func(p *terminal.Printer) {
		a.Print(p, inspect.TextOptions{All: o.all, Trace: o.trace})
	})
}

func (o *explainOptions) checkArgs(cmd *cobra.Command, args []string) error {
	if o.to != "" {
		return noArgs(" (--to takes the pod)")(cmd, args)
	}
	switch len(args) {
	case 0:
		return errors.New("SRC and DST:PORT are missing: verdict explain 10.244.1.7 10.96.0.10:53/udp")
	case 1:
		return fmt.Errorf("DST:PORT is missing after SRC %q", args[0])
	case 2:
		return nil
	}
	return fmt.Errorf("unexpected argument %q: explain takes SRC and DST:PORT[/PROTO]", args[2])
}

// answer asks whomever the flags name.
func (o *explainOptions) answer(ctx context.Context, q inspect.Question) (a *inspect.Answer, err error) {
	if o.at != "" {
		return o.answerPast(ctx, q)
	}
	if !o.live && !o.objects.Given() {
		o.objects.InCluster = watch.InCluster()
		o.live = !o.objects.InCluster
	}
	if err := o.objects.Check(); err != nil {
		return nil, err
	}
	if o.exitCode && !(o.live && o.objects.Given()) {
		return nil, errors.New("--exit-code compares the kernel with the objects: it needs --live, and --from, " +
			"--kubeconfig or --in-cluster")
	}
	if o.trace && !o.live {
		return nil, errors.New("--trace shows the kernel's rules: it needs --live")
	}
	x := inspect.Explainer{Objects: &o.objects, Interface: o.iface}
	if o.live {
		x.Records, _ = metricsAddress("", o.objects.Policy.File()) // without it, no failed connections are named
		x.Inspector, err = backends.Inspect(ctx, backends.InspectOptions{Settings: o.objects.Policy.Settings()})
		if err != nil {
			return nil, err
		}
		defer func() { err = errors.Join(err, x.Inspector.Close()) }()
	}
	return x.Explain(ctx, q)
}

// answerPast asks the ledger.
func (o *explainOptions) answerPast(ctx context.Context, q inspect.Question) (*inspect.Answer, error) {
	if o.live || o.exitCode || o.objects.Given() {
		return nil, errors.New("--at asks the ledger alone: it cannot be combined with --live, --exit-code, --from, " +
			"--kubeconfig or --in-cluster")
	}
	at, err := parseMoment(o.at, time.Now())
	if err != nil {
		return nil, fmt.Errorf("--at: %w", err)
	}
	o.ledger.config = o.objects.Policy.File()
	dir, err := o.ledger.path(ctx)
	if err != nil {
		return nil, err
	}
	past, err := backends.OpenPast(dir, at)
	if err != nil {
		return nil, err
	}
	x := inspect.Explainer{Objects: &o.objects, Interface: o.iface, Inspector: past, At: at}
	a, err := x.Explain(ctx, q)
	if err != nil {
		return nil, err
	}
	return a, o.addRecords(a, dir, past)
}

// addRecords notes which records the answer follows from, and which changed the Service before and after it.
func (o *explainOptions) addRecords(a *inspect.Answer, dir string, past *backends.Past) error {
	note := func(format string, args ...any) { a.Notes = append(a.Notes, fmt.Sprintf(format, args...)) }
	note("after record %d of the ledger, of %s", past.Last.Number, past.Last.At.Local().Format(ledger.TimeLayout))
	if past.Next == nil {
		note("that is its last record")
	}
	if a.Kernel.Service == nil {
		return nil
	}
	service := a.Kernel.Service.Name
	before, after, err := ledger.Around(dir, past.Last.Number, service, backends.ServicesIn)
	if err != nil {
		return err
	}
	if before != nil {
		note("%s was written before by record %d of %s: %s", service, before.Number,
			before.At.Local().Format(ledger.TimeLayout), before.Cause())
	}
	if after != nil {
		note("%s was written next by record %d of %s: %s", service, after.Number,
			after.At.Local().Format(ledger.TimeLayout), after.Cause())
	}
	return nil
}
