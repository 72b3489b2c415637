// Package demo shows the proxy at work, in network namespaces of its own.
package demo

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"text/template"
	"time"

	"github.com/spf13/pflag"

	"github.com/verdict-proxy/verdict/internal/answers/inspect"
	"github.com/verdict-proxy/verdict/internal/lab"
	"github.com/verdict-proxy/verdict/internal/proxy/backends"
	"github.com/verdict-proxy/verdict/internal/proxy/conntrack"
	"github.com/verdict-proxy/verdict/internal/proxy/node"
	"github.com/verdict-proxy/verdict/internal/system/ipfamily"
	"github.com/verdict-proxy/verdict/internal/system/terminal"
	"github.com/verdict-proxy/verdict/nft/kernel"
	"github.com/verdict-proxy/verdict/sync/dataplane"
	"github.com/verdict-proxy/verdict/sync/reconcile"
	"github.com/verdict-proxy/verdict/sync/snapshot"
	"github.com/verdict-proxy/verdict/sync/watch"
)

const (
	// demoLimit ends a demo that does not come to its end. What is waited for at that time takes demoPatience more.
	demoLimit = 25 * time.Second
	// demoPatience is how long one thing that should come is waited for. None of them takes long where it works.
	demoPatience = 3 * time.Second
	// demoSilence is how long one that should not come is waited for.
	demoSilence = 300 * time.Millisecond
)

var errDemoLimit = fmt.Errorf("it was not done after %s", demoLimit)

// ErrFailed says that something did not happen as it should, which was shown.
var ErrFailed = errors.New("the demo failed")

// Options say what is shown, and where.
type Options struct {
	// Out is where everything is shown, and Warnings where the proxy complains.
	Out, Warnings io.Writer
	// Ruleset says that the ruleset is to be printed at the end.
	Ruleset bool
	// StageTime is how long each stage of scaling takes at least.
	StageTime time.Duration
}

// Run builds a cluster of network namespaces, shows the proxy in it, and tidies up. It has to be in a process that
// lab.Enter gave its rights.
func Run(ctx context.Context, o Options) error {
	return newDemo(o).run(ctx)
}

func newDemo(o Options) *demo {
	return &demo{show: show{Printer: terminal.NewPrinter(o.Out)}, Options: o}
}

// demo is one run of the show.
type demo struct {
	show
	Options

	dir     string // of the manifests
	cluster *lab.Cluster
	// client is a pod that only asks; pods are those that answer: two on the node, the third on another.
	client *lab.Host
	pods   []*lab.Host

	web, sticky, local, dns, empty *demoService

	proxy *demoProxy
	load  *load // nil unless it is on
}

// run shows everything, tidies up, and says how it went.
func (d *demo) run(ctx context.Context) error {
	start := time.Now()
	ctx, cancel := context.WithTimeoutCause(ctx, demoLimit, errDemoLimit)
	defer cancel()
	err := d.stage(ctx)
	took := time.Since(start)
	switch {
	case errors.Is(errors.Join(d.Err(), err), syscall.EPIPE): // nobody is listening any more
		return ErrFailed
	case err == nil:
		return d.summary(took)
	case errors.Is(err, errDemoLimit):
		d.Line("")
		d.expect(false, "the demo ends in time", err.Error())
		return d.summary(took)
	case ctx.Err() != nil:
		d.Line("\n%s", d.Paint(terminal.Bold, "Interrupted. Nothing is left behind."))
		return ErrFailed
	}
	return err
}

// stage makes the cluster, has everything shown in it, and takes it down again.
func (d *demo) stage(ctx context.Context) (err error) {
	d.dir, err = os.MkdirTemp("", "verdict-demo-")
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(d.dir)) }()
	d.cluster, err = lab.NewCluster(lab.Config{LocalPods: 3, RemotePods: 1})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, d.cluster.Close()) }()
	if err := d.cast(); err != nil {
		return err
	}
	d.topology()
	if err := d.writeManifests(); err != nil {
		return err
	}
	d.proxy, err = d.startProxy(ctx)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, d.proxy.close()) }()
	for _, step := range []func(context.Context) error{
		d.showServices, d.showReach, d.showBalance, d.showAffinity, d.showLocal, d.showDatagrams, d.showNoAnswer,
		d.showScaling,
	} {
		if err := step(ctx); err != nil {
			return err
		}
		if err := d.goOn(ctx); err != nil {
			return err
		}
	}
	return d.showRuleset()
}

// goOn says what keeps the demo from going on; nil means nothing.
func (d *demo) goOn(ctx context.Context) error { return errors.Join(context.Cause(ctx), d.Err()) }

// cast gives the hosts and Services their parts.
func (d *demo) cast() error {
	c := d.cluster
	d.client = c.Pods[2]
	d.pods = []*lab.Host{c.Pods[0], c.Pods[1], c.RemotePods[0]}
	d.client.Name, d.pods[2].Name = "client", "pod-3"
	for _, pod := range d.pods {
		if _, err := pod.Serve(snapshot.TCP, 8080); err != nil {
			return err
		}
		if _, err := pod.Serve(snapshot.UDP, 5353); err != nil {
			return err
		}
	}
	d.web = &demoService{Name: "web", number: 10, NodePort: 30010, LoadBalancer: true, pods: d.pods[:2]}
	d.sticky = &demoService{Name: "sticky", number: 20, NodePort: 30020, Sticky: true, pods: d.pods}
	d.local = &demoService{Name: "local", number: 30, NodePort: 30030, LoadBalancer: true, ExternalLocal: true,
		pods: []*lab.Host{d.pods[0], d.pods[2]}}
	d.dns = &demoService{Name: "dns", number: 53, UDP: true, pods: d.pods[:2]}
	d.empty = &demoService{Name: "empty", number: 99}
	return nil
}

func (d *demo) services() []*demoService {
	return []*demoService{d.web, d.sticky, d.local, d.dns, d.empty}
}

// demoService is what a Service and its EndpointSlices say. The exported fields are for the template.
type demoService struct {
	Name string
	// number is that of its addresses in their ranges.
	number                                   int
	NodePort                                 uint16 // 0 means none
	LoadBalancer, ExternalLocal, Sticky, UDP bool

	pods []*lab.Host
	// draining is the one of the pods that is terminating, if any.
	draining *lab.Host
}

func (s *demoService) Port() uint16 {
	if s.UDP {
		return 53
	}
	return 80
}

// addr gives the Service's address in a range, lab.ServiceRange or lab.ExternalRange.
func (s *demoService) addr(ranges []netip.Prefix, f ipfamily.Family) netip.Addr {
	if f == ipfamily.IPv6 {
		return lab.Nth(ranges[1], s.number)
	}
	return lab.Nth(ranges[0], s.number)
}

func (s *demoService) clusterIP(f ipfamily.Family) netip.AddrPort {
	return netip.AddrPortFrom(s.addr(lab.ServiceRange, f), s.Port())
}

func (s *demoService) loadBalancer(f ipfamily.Family) netip.AddrPort {
	return netip.AddrPortFrom(s.addr(lab.ExternalRange, f), s.Port())
}

func (s *demoService) nodePort(d *demo, f ipfamily.Family) netip.AddrPort {
	return netip.AddrPortFrom(d.cluster.Node.IP(f), s.NodePort)
}

// names are those of the pods that take new connections, with a space between.
func (s *demoService) names() string {
	var names []string
	for _, pod := range s.pods {
		if pod != s.draining {
			names = append(names, pod.Name)
		}
	}
	return strings.Join(names, " ")
}

func (s *demoService) ClusterIPs() (ips []netip.Addr) {
	for _, f := range lab.Families() {
		ips = append(ips, s.addr(lab.ServiceRange, f))
	}
	return ips
}

func (s *demoService) Ingress() (ips []netip.Addr) {
	for _, f := range lab.Families() {
		if s.LoadBalancer {
			ips = append(ips, s.addr(lab.ExternalRange, f))
		}
	}
	return ips
}

// demoSlice and demoEndpoint are an EndpointSlice of a demoService and its endpoints.
type (
	demoSlice struct {
		Family    ipfamily.Family
		Endpoints []demoEndpoint
	}
	demoEndpoint struct {
		Addr               netip.Addr
		Node               string
		Ready, Terminating bool
	}
)

func (s *demoService) Slices() (slices []demoSlice) {
	for _, f := range lab.Families() {
		sl := demoSlice{Family: f}
		for _, pod := range s.pods {
			e := demoEndpoint{Addr: pod.IP(f), Node: "node", Ready: pod != s.draining, Terminating: pod == s.draining}
			if lab.Node2PodRange[0].Contains(pod.IP4) {
				e.Node = "node2"
			}
			sl.Endpoints = append(sl.Endpoints, e)
		}
		slices = append(slices, sl)
	}
	return slices
}

// demoManifest is a Service with its EndpointSlices as kubectl would print them, without what no proxy looks at.
var demoManifest = template.Must(template.New("manifest").Parse(`apiVersion: v1
kind: Service
metadata:
  name: {{.Name}}
  namespace: demo
spec:
  type: {{if .LoadBalancer}}LoadBalancer{{else if .NodePort}}NodePort{{else}}ClusterIP{{end}}
  clusterIPs: [{{range $n, $ip := .ClusterIPs}}{{if $n}}, {{end}}"{{$ip}}"{{end}}]
{{- if .ExternalLocal}}
  externalTrafficPolicy: Local
{{- end}}
{{- if .Sticky}}
  sessionAffinity: ClientIP
{{- end}}
  ports:
  - protocol: {{if .UDP}}UDP{{else}}TCP{{end}}
    port: {{.Port}}
{{- if .NodePort}}
    nodePort: {{.NodePort}}
{{- end}}
status:
  loadBalancer:
    ingress: [{{range $n, $ip := .Ingress}}{{if $n}}, {{end}}ip: "{{$ip}}"{{end}}]
{{- range .Slices}}
---
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata:
  name: {{$.Name}}-{{.Family}}
  namespace: demo
  labels:
    kubernetes.io/service-name: {{$.Name}}
addressType: {{.Family}}
ports:
- name: ""
  protocol: {{if $.UDP}}UDP{{else}}TCP{{end}}
  port: {{if $.UDP}}5353{{else}}8080{{end}}
endpoints:
{{- range .Endpoints}}
- addresses: ["{{.Addr}}"]
  nodeName: {{.Node}}
  conditions:
    ready: {{.Ready}}
    serving: true
    terminating: {{.Terminating}}
{{- end}}
{{- end}}
`))

// demoNode is what the cluster knows of the node and its ranges.
var demoNode = template.Must(template.New("node").Parse(`apiVersion: v1
kind: Node
metadata:
  name: node
spec:
  podCIDRs: [{{range $n, $r := .PodCIDRs}}{{if $n}}, {{end}}"{{$r}}"{{end}}]
status:
  addresses:
{{- range .Addresses}}
  - type: InternalIP
    address: "{{.}}"
{{- end}}
---
apiVersion: networking.k8s.io/v1
kind: ServiceCIDR
metadata:
  name: kubernetes
spec:
  cidrs: [{{range $n, $r := .ServiceCIDRs}}{{if $n}}, {{end}}"{{$r}}"{{end}}]
`))

func (d *demo) writeManifests() error {
	facts := struct {
		PodCIDRs, ServiceCIDRs []netip.Prefix
		Addresses              []netip.Addr
	}{PodCIDRs: lab.NodePodRange, ServiceCIDRs: lab.ServiceRange}
	for _, f := range lab.Families() {
		facts.Addresses = append(facts.Addresses, d.cluster.Node.IP(f))
	}
	if err := d.write("node", demoNode, facts); err != nil {
		return err
	}
	for _, s := range d.services() {
		if err := d.write(s.Name, demoManifest, s); err != nil {
			return err
		}
	}
	return nil
}

// write puts a manifest into the directory in one step, so that nobody reads half of it.
func (d *demo) write(name string, t *template.Template, data any) error {
	var text strings.Builder
	if err := t.Execute(&text, data); err != nil {
		return err
	}
	draft := filepath.Join(d.dir, "."+name)
	if err := os.WriteFile(draft, []byte(text.String()), 0o644); err != nil {
		return err
	}
	return os.Rename(draft, filepath.Join(d.dir, name+".yaml"))
}

// demoProxy is the real proxy, at work in the node's namespace.
type demoProxy struct {
	backend *kernel.Backend
	// reader is another connection, to look at counters while the proxy uses its own.
	reader *kernel.Conn
	flows  *conntrack.Conn
	// transactions are told of as they happen.
	transactions chan reconcile.Transaction
	cancel       context.CancelFunc
	// done is closed when it has ended, for the reason err.
	done chan struct{}
	err  error
}

// demoPolicy is what the flags of "verdict run" say.
func demoPolicy() (dataplane.Config, error) {
	var policy inspect.Policy
	f := pflag.NewFlagSet("run", pflag.ContinueOnError)
	policy.AddFlags(f)
	if err := f.Parse([]string{"--hostname-override=node", fmt.Sprintf("--cluster-cidr=%s,%s", lab.PodRange[0],
		lab.PodRange[1])}); err != nil {
		return dataplane.Config{}, err
	}
	return policy.Config()
}

// startProxy puts a node together as "verdict run" does.
func (d *demo) startProxy(ctx context.Context) (*demoProxy, error) {
	config, err := demoPolicy()
	if err != nil {
		return nil, err
	}
	p := &demoProxy{transactions: make(chan reconcile.Transaction, 16), done: make(chan struct{})}
	err = d.cluster.Node.Do(func() (err error) {
		if p.backend, err = backends.OpenKernel(kernel.Options{}); err != nil {
			return err
		}
		if p.reader, err = kernel.Dial(0); err != nil {
			return errors.Join(err, p.backend.Close())
		}
		if p.flows, err = conntrack.Dial(0); err != nil {
			return errors.Join(err, p.backend.Close(), p.reader.Close())
		}
		return nil
	})
	if err != nil {
		return nil, err
	}
	ctx, p.cancel = context.WithCancel(ctx)
	log := slog.New(slog.NewTextHandler(d.Warnings, &slog.HandlerOptions{Level: slog.LevelWarn}))
	report := func(err error) { log.Warn(err.Error()) }
	proxy := node.Node{
		Config: config,
		Sources: []node.Source{
			&watch.Files{Path: d.dir, NodeName: config.NodeName, Report: report},
			inHost{d.cluster.Node, &watch.Host{Report: report}},
		},
		Backend: &backends.Opened{Writer: p.backend},
		Flows:   p.flows,
		Log:     log,
		Listeners: []reconcile.Listener{{Written: func(t reconcile.Transaction) {
			select {
			case p.transactions <- t:
			case <-ctx.Done():
			}
		}}},
		RouteLocalnet: func() error { return d.cluster.Node.Do(node.RouteLocalnet) },
	}
	go func() {
		defer close(p.done)
		p.err = proxy.Run(ctx)
	}()
	return p, nil
}

// stop ends the proxy; what it wrote stays in the kernel. It may be called again.
func (p *demoProxy) stop() error {
	p.cancel()
	<-p.done
	return p.err
}

func (p *demoProxy) close() error {
	return errors.Join(p.stop(), p.backend.Close(), p.reader.Close(), p.flows.Close())
}

// inHost is a source that works inside a host.
type inHost struct {
	host *lab.Host
	node.Source
}

func (s inHost) Run(ctx context.Context, sink watch.Sink) error {
	return s.host.Do(func() error { return s.Source.Run(ctx, sink) })
}

// await waits for the next transaction, and goes on counting what the load does.
func (d *demo) await(ctx context.Context) error {
	var attempts <-chan attempt
	if d.load != nil {
		attempts = d.load.attempts
	}
	for patience := time.After(2 * demoPatience); ; {
		select {
		case t := <-d.proxy.transactions:
			d.transaction(t)
			return nil
		case a := <-attempts:
			d.load.count(a)
		case <-d.proxy.done:
			return errors.Join(errors.New("the proxy has ended"), d.proxy.err, context.Cause(ctx))
		case <-patience:
			return fmt.Errorf("the proxy wrote nothing within %s", 2*demoPatience)
		}
	}
}

// edit rewrites a Service's manifest and waits until the kernel does as it says.
func (d *demo) edit(ctx context.Context, s *demoService) error {
	for len(d.proxy.transactions) > 0 { // there should be none: they would be taken for the answer to this edit
		d.transaction(<-d.proxy.transactions)
	}
	if err := d.write(s.Name, demoManifest, s); err != nil {
		return err
	}
	return d.await(ctx)
}

// nodeAddrs are the addresses that packets have which the node has masqueraded.
func (d *demo) nodeAddrs() []netip.Addr {
	out := []netip.Addr{d.cluster.Node.IP4, d.cluster.Node.IP6}
	for _, r := range lab.NodePodRange {
		out = append(out, lab.Nth(r, 1))
	}
	return out
}

// saw tells who an endpoint took the client for.
func (d *demo) saw(from *lab.Host, r lab.Result) string {
	switch a := r.Source.Addr(); {
	case from != d.cluster.Node && (a == from.IP4 || a == from.IP6):
		return "itself"
	case slices.Contains(d.nodeAddrs(), a):
		return "the node"
	default:
		return a.String()
	}
}
