package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/netip"
	"slices"
	"strings"

	"github.com/verdict-proxy/verdict/internal/answers/cluster"
	"github.com/verdict-proxy/verdict/internal/answers/inspect"
	"github.com/verdict-proxy/verdict/internal/proxy/backends"
	"github.com/verdict-proxy/verdict/internal/system/ipfamily"
	"github.com/verdict-proxy/verdict/internal/system/terminal"
	"github.com/verdict-proxy/verdict/sync/dataplane"
)

// leadingTo says which Services lead to a pod, by its address or, of an API server, its name.
func (o *explainOptions) leadingTo(ctx context.Context, w io.Writer) error {
	if o.live || o.trace || o.exitCode || o.at != "" {
		return errors.New("--to cannot be combined with --live, --trace, --exit-code or --at")
	}
	if err := o.objects.Check(); err != nil {
		return err
	}
	led, err := o.led(ctx)
	if err != nil {
		return err
	}
	return inspect.Show(w, o.json, led, func(p *terminal.Printer) {
		cluster.PrintLed(p, "no Service leads to "+o.to, led)
	})
}

func (o *explainOptions) led(ctx context.Context) ([]cluster.Led, error) {
	a, err := netip.ParseAddr(o.to)
	switch {
	case err != nil && o.objects.From == "" && o.objects.Given():
		pod, port, err := cluster.ParseRef(o.to, "default", "pod", "pods", "po")
		if err != nil || port != "" {
			return nil, errors.Join(err, portless(o.to, port))
		}
		api, _, _, err := cluster.Connect(o.objects.Kubeconfig, "")
		if err != nil {
			return nil, err
		}
		return (&cluster.Cluster{API: api}).LeadingTo(ctx, pod)
	case err != nil:
		return nil, fmt.Errorf("--to: %.100q is no address; names of pods need --kubeconfig or --in-cluster", o.to)
	case !o.objects.Given():
		return ledByKernel(ctx, a.Unmap())
	}
	objects, err := o.objects.Load(ctx, nil, false)
	if err != nil {
		return nil, err
	}
	objects.PrintProblems()
	return ledByObjects(objects, a.Unmap()), nil
}

// ledByObjects returns the Services whose slices have an endpoint of an address.
func ledByObjects(o *inspect.Objects, a netip.Addr) (led []cluster.Led) {
	for service := range o.Snap.Services {
		for _, sl := range o.Snap.SlicesOf(service) {
			for i := range sl.Endpoints {
				e := &sl.Endpoints[i]
				if e.Addr != a {
					continue
				}
				l := cluster.Led{Service: service.String(), Slice: sl.Name.Name, Address: a.String(),
					State: cluster.StateOf(e.Ready, e.Serving, e.Terminating)}
				for _, p := range sl.Ports {
					l.Ports = append(l.Ports, strings.TrimPrefix(fmt.Sprintf("%s:%d", p.Name, p.Port), ":"))
				}
				led = append(led, l)
			}
		}
	}
	return sortedLed(led)
}

// ledByKernel returns the Services whose frontends lead to an address, by what the kernel holds.
func ledByKernel(ctx context.Context, a netip.Addr) ([]cluster.Led, error) {
	i, err := backends.Inspect(ctx, backends.InspectOptions{})
	if err != nil {
		return nil, err
	}
	defer i.Close()
	all, err := i.Counters(ctx, dataplane.CountersAsked{All: true})
	if err != nil {
		return nil, err
	}
	ask := dataplane.CountersAsked{Whole: true}
	type pool struct {
		family ipfamily.Family
		id     uint32
	}
	pools, names := map[pool]dataplane.PortName{}, map[dataplane.Key]dataplane.PortName{}
	for _, f := range all.Frontends {
		ask.Endpoints = append(ask.Endpoints, f.FrontendCount)
		pools[pool{ipfamily.Of(f.Key.Addr), f.Pool}], names[f.Key] = f.Port, f.Port
	}
	counters, err := i.Counters(ctx, ask)
	if err != nil {
		return nil, err
	}
	var led []cluster.Led
	add := func(name dataplane.PortName, at netip.AddrPort) {
		if at.Addr() == a {
			led = append(led, cluster.Led{Service: name.Service.String(), Address: a.String(), State: "in the kernel",
				Ports: []string{strings.TrimPrefix(fmt.Sprintf("%s:%d", name.Port, at.Port()), ":")}})
		}
	}
	for _, e := range counters.Endpoints {
		add(pools[pool{ipfamily.Of(a), e.Place.Pool}], e.Endpoint)
	}
	for _, s := range counters.Scheduled {
		add(names[s.Frontend], s.Endpoint)
	}
	return sortedLed(led), nil
}

func sortedLed(led []cluster.Led) []cluster.Led {
	key := func(l cluster.Led) string { return strings.Join(append([]string{l.Service, l.Slice}, l.Ports...), " ") }
	slices.SortFunc(led, func(a, b cluster.Led) int { return strings.Compare(key(a), key(b)) })
	return slices.CompactFunc(led, func(a, b cluster.Led) bool { return key(a) == key(b) })
}
