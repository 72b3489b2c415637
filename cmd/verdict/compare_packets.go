package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"runtime/debug"
	"slices"
	"time"

	"github.com/spf13/cobra"

	"github.com/verdict-proxy/verdict/internal/answers/compare"
	"github.com/verdict-proxy/verdict/internal/answers/inspect"
	"github.com/verdict-proxy/verdict/internal/proxy/backends"
	"github.com/verdict-proxy/verdict/internal/system/clock"
	"github.com/verdict-proxy/verdict/internal/system/ipfamily"
	"github.com/verdict-proxy/verdict/internal/system/terminal"
	"github.com/verdict-proxy/verdict/sync/dataplane"
	"github.com/verdict-proxy/verdict/sync/snapshot"
)

// packetOptions are what the command line says of a comparison by packets.
type packetOptions struct {
	objects               inspect.ObjectFlags
	json                  bool
	certificate, previous string
	compile               bool
	// onlyVerdict leaves out what kube-proxy programmed.
	onlyVerdict bool
}

func newComparePackets() *cobra.Command {
	var o packetOptions
	cmd := &cobra.Command{
		Use:   "compare",
		Short: "Check that proxies do the same with every packet",
		Long: `Compare walks every class of packets through the rules in this node's kernel, those of kube-proxy
(modes nftables and iptables) and those of Verdict, and reports each difference with its reason. With
--from PATH, --kubeconfig FILE or --in-cluster it also compares with what these objects ask for. If
Verdict has not programmed this node, compare writes its rules for the objects into a temporary
network namespace.

A class is a destination, a kind of sender, and whether the sender is remembered: docs/COMPARE.md.
--certificate FILE records what was compared and found; --check FILE checks whether it still holds.
Compare only reads, and needs CAP_NET_ADMIN; for the temporary namespace, CAP_SYS_ADMIN too.

Exit status: 0 if every class is the same or differs for a known reason, 1 if not, 2 if something
went wrong.`,
		Example: `  verdict compare --kubeconfig /etc/kubernetes/kubelet.conf --certificate before.json
  verdict compare --from cluster.yaml --hostname-override node-1 -o json`,
	}
	f := cmd.Flags()
	addJSON(f, &o.json, "print the certificate as JSON")
	f.StringVar(&o.certificate, "certificate", "", "write a certificate to this file")
	f.StringVar(&o.previous, "check", "", "check that the certificate in this file still holds")
	f.BoolVar(&o.compile, "compile", false,
		"compare with the rules that Verdict would write for the objects, even if it has programmed this node")
	o.objects.AddFlags(f)
	return newCompareCommand(cmd, func(ctx context.Context, cmd *cobra.Command) (bool, error) {
		return o.run(ctx, cmd)
	})
}

// run compares, and tells what it found.
func (o *packetOptions) run(ctx context.Context, cmd *cobra.Command) (ok bool, err error) {
	var previous *compare.Certificate
	if o.previous != "" {
		if previous, err = compare.ReadCertificate(o.previous); err != nil {
			return false, fmt.Errorf("--check: %w", err)
		}
	}
	made, err := o.certify(ctx)
	if err != nil {
		return false, err
	}
	if o.certificate != "" {
		if err := writeFile(o.certificate, made); err != nil {
			return false, fmt.Errorf("--certificate: %w", err)
		}
	}
	ok = made.Result.OK()
	out := cmd.OutOrStdout()
	if o.json {
		err = made.Write(terminal.NewPrinter(out))
	} else {
		p := terminal.NewPrinter(out)
		p.Lines(made.Text())
		err = p.Err()
	}
	if previous != nil {
		changed := previous.Check(made)
		for _, line := range changed {
			terminal.Warn("the certificate does not hold:", line)
		}
		ok = ok && len(changed) == 0
	}
	return ok, err
}

func writeFile(path string, c *compare.Certificate) error {
	f, err := os.Create(path)
	if err != nil {
		return err
	}
	return errors.Join(c.Write(f), f.Close())
}

// A difference counts only if it lasts, because a change may be on its way to the kernel.
const (
	packetLooks = 3
	packetPause = 500 * time.Millisecond
)

// certify compares until nothing is unexplained, a few times at most.
func (o *packetOptions) certify(ctx context.Context) (c *compare.Certificate, err error) {
	for look := range packetLooks {
		if c, err = o.certifyOnce(ctx, look == 0); err != nil || c.Result.OK() {
			break
		}
		if clock.Pause(ctx, packetPause); ctx.Err() != nil {
			return nil, ctx.Err()
		}
	}
	return c, err
}

// certifyOnce reads everything once, and compares.
func (o *packetOptions) certifyOnce(ctx context.Context, first bool) (_ *compare.Certificate, err error) {
	in := compare.Input{}
	if in.Host, err = inspect.HostAddrs(ctx); err != nil {
		return nil, err
	}
	source, node, notes, err := o.load(ctx, &in, first)
	if err != nil {
		return nil, err
	}
	sides, more, err := compare.ReadSides(ctx, in.Host)
	if err != nil {
		return nil, err
	}
	in.Sides = slices.DeleteFunc(sides, func(s compare.Side) bool {
		return o.onlyVerdict && s.Name != compare.Verdict || o.compile && s.Name == compare.Verdict
	})
	if !o.onlyVerdict && in.State != nil && !slices.ContainsFunc(in.Sides, isVerdict) {
		side, err := compare.Compile(in.State, in.Host)
		if err != nil {
			return nil, fmt.Errorf("compile Verdict's rules: %w", err)
		}
		in.Sides = append(in.Sides, side)
		notes = append(notes, "Verdict's rules were written into a network namespace of their own")
	}
	if o.onlyVerdict && len(in.Sides) == 0 {
		return nil, errors.New("this node has no rules of Verdict")
	}
	for _, n := range append(notes, more...) {
		if first {
			terminal.Warn(n)
		}
	}
	begin := time.Now()
	result, err := compare.Compare(in)
	if err != nil {
		return nil, err
	}
	return compare.NewCertificate(in, result, node, source, buildVersion(), time.Since(begin)), nil
}

func isVerdict(s compare.Side) bool { return s.Name == compare.Verdict }

// load loads the objects, if there are any, and how pods are recognized.
func (o *packetOptions) load(ctx context.Context, in *compare.Input, first bool) (source, node string, notes []string,
	err error) {
	if err := o.objects.Check(); err != nil {
		return "", "", nil, err
	}
	config, err := o.objects.Policy.Config()
	if err != nil {
		return "", "", nil, err
	}
	i, err := backends.Inspect(ctx, backends.InspectOptions{Settings: o.objects.Policy.Settings()})
	if err != nil {
		return "", "", nil, err
	}
	defer func() { err = errors.Join(err, i.Close()) }()
	if !o.objects.Given() {
		in.Pods = dataplane.PodsOf(config, snapshot.New())
		return "", config.NodeName, nil, nil
	}
	wanted, err := o.objects.Wanted(ctx, i, first)
	if err != nil {
		return "", "", nil, err
	}
	in.State = wanted.State
	in.Pods = ipfamily.Per[dataplane.Pods]{wanted.State.Pods4, wanted.State.Pods6}
	if addrs := wanted.Objects.Snap.HostAddrs; len(addrs) > 0 {
		in.Host = slices.Clone(addrs)
	}
	in.Host = slices.DeleteFunc(in.Host, func(a netip.Addr) bool { return a.Is6() && a.IsLinkLocalUnicast() })
	return wanted.Objects.Source, config.NodeName, wanted.Notes(), nil
}

// buildVersion is the version of this program.
func buildVersion() string {
	info, ok := debug.ReadBuildInfo()
	if !ok {
		return ""
	}
	return cmp.Or(info.Main.Version, "(devel)")
}
