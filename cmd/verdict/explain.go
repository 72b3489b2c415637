package main

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"

	"github.com/spf13/cobra"

	"github.com/verdict-proxy/verdict/internal/ipfamily"
	"github.com/verdict-proxy/verdict/nft"
	"github.com/verdict-proxy/verdict/nft/kernel"
	"github.com/verdict-proxy/verdict/sync/dataplane"
	"github.com/verdict-proxy/verdict/sync/snapshot"
)

// explainOptions are what the command line of explain says.
type explainOptions struct {
	objectFlags
	live, json, all, trace bool
	iface                  string
}

func newExplain() *cobra.Command {
	var o explainOptions
	cmd := &cobra.Command{
		Use:   "explain SRC DST:PORT[/PROTO]",
		Short: "Say what happens to a packet, and why",
		Long: `Explain says what becomes of the first packet of a connection from SRC to DST: which Service answers there, which row of
policy decides, which endpoints it may go to with what chance, what source address they see, and why each other endpoint of
the Service is not among them.

SRC is an address, or node (this node), pod (some pod) or outside (neither). PROTO is tcp, udp or sctp; tcp if it is left out.

The answer comes from the objects: --from PATH, --kubeconfig FILE, or --in-cluster, which is what counts if nothing else is
given. With --live it comes from the kernel of this node, which is only read, by key, beside a running proxy; with --live and
objects it comes from both, and explain says where they disagree. What is sent to an address of no Service goes on as
Verdict never saw it: explain does not know what other rules of this host do.

Flags such as --cluster-cidr are those of verdict run, and have to be the same. With --live, those that are not given are
taken from the kernel's rules.`,
		Example: `  verdict explain 10.244.1.7 10.96.0.10:53/udp --from examples/cluster.yaml --hostname-override node-1
  verdict explain outside 203.0.113.20:80 --live
  verdict explain pod 10.96.0.10:53/udp --live --in-cluster --trace`,
		Args: explainArgs,
		RunE: func(cmd *cobra.Command, args []string) error {
			q, err := parseQuestion(args[0], args[1])
			if err != nil {
				return err
			}
			a, err := o.answer(cmd.Context(), q)
			if err != nil {
				return err
			}
			if o.json {
				return writeJSON(cmd.OutOrStdout(), a)
			}
			s := newShow(cmd.OutOrStdout())
			a.print(&s, &o)
			return s.broken
		},
	}
	f := cmd.Flags()
	f.BoolVar(&o.live, "live", false, "ask the kernel of this node; needs CAP_NET_ADMIN")
	f.StringVar(&o.iface, "interface", "", "the interface the packet comes in by (default: the one this host's routes lead back to SRC)")
	f.BoolVar(&o.trace, "trace", false, "with --live, show each rule that looks at the packet")
	f.BoolVar(&o.all, "all", false, "show all endpoints, however many there are")
	f.BoolVar(&o.json, "json", false, "print JSON (docs/ANSWERS.md)")
	o.add(f)
	return cmd
}

func explainArgs(_ *cobra.Command, args []string) error {
	switch len(args) {
	case 0:
		return errors.New("SRC and DST:PORT are missing: verdict explain 10.244.1.7 10.96.0.10:53/udp")
	case 1:
		return fmt.Errorf("DST:PORT is missing after SRC %q", args[0])
	case 2:
		return nil
	}
	return fmt.Errorf("%q is one argument too many: only SRC and DST:PORT[/PROTO]", args[2])
}

// answer asks whomever the flags name.
func (o *explainOptions) answer(ctx context.Context, q asked) (*answer, error) {
	if !o.live && !o.given() {
		o.inCluster = true
	}
	if err := o.check(); err != nil {
		return nil, err
	}
	if o.trace && !o.live {
		return nil, errors.New("--trace: rules are shown as the kernel has them: give --live too")
	}
	e := explaining{o: o, q: q}
	if o.live {
		done, err := e.open(ctx)
		if err != nil {
			return nil, err
		}
		defer done()
		if e.routes, err = openRoutes(); err != nil {
			return nil, err
		}
		defer e.routes.close()
	}
	if err := e.gather(ctx); err != nil {
		return nil, err
	}
	return e.answer()
}

// open opens what the rules of the backend are read by that carries the Services here.
func (e *explaining) open(ctx context.Context) (done func() error, err error) {
	p, err := findChains(ctx, e.o.policy.settings.Backend)
	if err != nil {
		return nil, err
	}
	if p != nil {
		if e.chains, err = readChains(ctx, p); err != nil {
			return nil, errors.Join(err, p.Close())
		}
		return p.Close, nil
	}
	e.reader, err = kernel.OpenReader()
	if err != nil {
		return nil, err
	}
	return e.reader.Close, nil
}

// explaining is an answer on its way.
type explaining struct {
	o      *explainOptions
	q      asked
	reader *kernel.Reader
	// chains are the rules of iptables, if those carry the Services; then reader is nil.
	chains  *chainsFound
	routes  *routes
	tables  ipfamily.Per[*kernel.TableFound]
	objects *objects
	here    []netip.Addr
}

// gather reads what the answer needs.
func (e *explaining) gather(ctx context.Context) (err error) {
	var structure *ipfamily.Per[nft.Structure]
	if e.o.live {
		if structure, err = e.structure(); err != nil {
			return err
		}
		if e.here, err = hostAddrs(ctx); err != nil {
			return err
		}
	}
	if e.o.given() {
		if e.objects, err = e.o.load(ctx, structure, e.o.live); err != nil {
			return err
		}
		e.objects.complain()
		e.here = e.objects.snap.HostAddrs
	}
	return nil
}

// structure reads what the kernel's rules tell of what proxies are told by flags.
func (e *explaining) structure() (*ipfamily.Per[nft.Structure], error) {
	if e.chains != nil {
		return &e.chains.structure, nil
	}
	out := &ipfamily.Per[nft.Structure]{}
	for i, f := range ipfamily.All {
		var err error
		if e.tables[i], err = e.reader.Table(f); err != nil {
			return nil, err
		}
		out[i] = e.tables[i].Structure
	}
	return out, nil
}

// index numbers the question's family.
func (e *explaining) index() int {
	if e.q.key.Addr.Is6() {
		return 1
	}
	return 0
}

// pods says how pods are told from others, as the objects' flags or the kernel's rules have it.
func (e *explaining) pods() dataplane.Pods {
	if e.objects == nil && e.chains != nil {
		return e.chains.structure[e.index()].Pods
	}
	if e.objects == nil {
		return e.tables[e.index()].Structure.Pods
	}
	p := dataplane.PodsOf(e.objects.config, e.objects.snap)
	return p[e.index()]
}

func (e *explaining) answer() (*answer, error) {
	var snap *snapshot.Snapshot
	if e.objects != nil {
		snap = e.objects.snap
	}
	pods := e.pods()
	s, err := e.q.place(pods, snap, e.here, e.routes, e.o.iface)
	if err != nil {
		return nil, err
	}
	a := &answer{family: ipfamily.All[e.index()], here: e.here, routes: e.routes, sender: s}
	a.Packet = packetJSON{Source: s.addr.String(), StandsFor: s.standsFor, Destination: e.q.key.Addr.String(), Port: e.q.key.Port,
		Protocol: e.q.key.Protocol.String(), Interface: s.iface}
	if e.objects != nil {
		x := dataplane.Explain(e.objects.config, snap, dataplane.Question{Source: s.addr, Interface: s.iface, Key: e.q.key})
		a.adopted = e.objects.adopted
		a.explain(x, e.objects, &e.o.policy)
	}
	if e.o.live {
		ask := e.ask
		if e.chains != nil {
			ask = e.askChains
		}
		if err := ask(a, s); err != nil {
			return nil, err
		}
	}
	if a.explanation == nil {
		a.Origin = originOf(s, pods, slices.Contains(e.here, s.addr) || s.addr.IsLoopback(), "the kernel's rules")
	}
	a.compare()
	return a, nil
}

// askTries is how often the kernel is asked, in the hope that nobody writes meanwhile.
const askTries = 3

// ask follows the packet through the kernel's rules.
func (e *explaining) ask(a *answer, s sender) error {
	p := e.packet(s)
	for try := range askTries {
		before, err := e.reader.Revisions()
		if err != nil {
			return err
		}
		if try > 0 { // its rules may be others now
			if e.tables[e.index()], err = e.reader.Table(ipfamily.All[e.index()]); err != nil {
				return err
			}
		}
		table := e.tables[e.index()]
		w, err := nft.WalkTable(&table.Table, e.reader, p, e.host())
		if err != nil {
			return err
		}
		after, err := e.reader.Revisions()
		if err != nil {
			return err
		}
		if before == after || try == askTries-1 {
			return a.walked(w, table, before[e.index()], e)
		}
	}
	return nil
}

// host says of this node what the packet's way depends on.
func (e *explaining) host() nft.Host {
	return nft.Host{Local: func(a netip.Addr) bool { return slices.Contains(e.here, a) }, Bridged: e.routes.bridged}
}

// packet gives the first packet of the connection.
func (e *explaining) packet(s sender) nft.Packet {
	p := nft.Packet{Source: s.addr, Destination: e.q.key.Addr, Protocol: e.q.key.Protocol, Port: e.q.key.Port, Interface: s.iface}
	if local := slices.Contains(e.here, s.addr) || s.addr.IsLoopback(); p.Interface == "" && !local {
		p.Interface = unknownInterface
	}
	return p
}

// unknownInterface stands for one whose name is not known. It is no name an interface can have.
const unknownInterface = "?/"
