package inspect

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/spf13/pflag"

	"github.com/verdict-proxy/verdict/internal/system/ipfamily"
	"github.com/verdict-proxy/verdict/internal/system/terminal"
	"github.com/verdict-proxy/verdict/sync/dataplane"
	"github.com/verdict-proxy/verdict/sync/snapshot"
	"github.com/verdict-proxy/verdict/sync/watch"
)

// ObjectFlags select the source of the objects for a read-only command, and the policy.
type ObjectFlags struct {
	Policy           Policy
	From, Kubeconfig string
	InCluster        bool
	flags            *pflag.FlagSet
}

// AddFlags defines the flags.
func (o *ObjectFlags) AddFlags(f *pflag.FlagSet) {
	f.StringVar(&o.From, "from", "",
		"take the objects from a manifest file, a directory of manifests, or - (standard input)")
	f.StringVar(&o.Kubeconfig, "kubeconfig", "", "take the objects from the API server of a kubeconfig file")
	f.BoolVar(&o.InCluster, "in-cluster", false, "take the objects from the cluster this runs in")
	o.Policy.AddFlags(f)
	o.flags = f
}

// Given reports whether the command line names objects.
func (o *ObjectFlags) Given() bool { return o.From != "" || o.Kubeconfig != "" || o.InCluster }

// Check validates the flags before anything is read.
func (o *ObjectFlags) Check() error {
	n := 0
	for _, set := range []bool{o.From != "", o.Kubeconfig != "", o.InCluster} {
		if set {
			n++
		}
	}
	if n > 1 {
		return errors.New("--from, --kubeconfig and --in-cluster exclude each other")
	}
	_, err := o.Policy.Config()
	return err
}

// Objects holds what a proxy would know, and its configuration.
type Objects struct {
	// Source names where the objects come from, in a word or two.
	Source string
	Config dataplane.Config
	Snap   *snapshot.Snapshot
	// Problems lists what is wrong with the objects, and Adopted the flags that were taken from the kernel.
	Problems []error
	Adopted  []string
}

// Load reads the objects once. Settings, if not nil, are those of the kernel's rules; they replace flags that are not
// given. Here is true if this host is the node, whatever the Node object says.
func (o *ObjectFlags) Load(ctx context.Context, settings *dataplane.Settings, here bool) (*Objects, error) {
	out := &Objects{}
	var err error
	if out.Config, err = o.Policy.Config(); err != nil {
		return nil, err
	}
	if settings != nil {
		out.Adopted = o.adopt(&out.Config, settings)
	}
	var nodes map[string][]netip.Addr
	if o.From != "" {
		out.Source = o.From
		out.Snap, nodes, out.Problems, err = watch.LoadNodes(ctx, manifestPath(o.From), out.Config.NodeName, out.asksNodes())
	} else {
		out.Source = "the API server"
		out.Config.APIServer = watch.Client{Kubeconfig: o.Kubeconfig}.Server()
		out.Snap, nodes, out.Problems, err = listKubernetes(ctx, o.Kubeconfig, out.Config.NodeName, out.asksNodes())
	}
	if err != nil {
		return nil, err
	}
	if why := MissingNode(out.Config.NodeName, out.Snap); why != nil {
		out.Problems = append(out.Problems, why)
	}
	facts, err := hostFacts(ctx)
	if err != nil && here {
		return nil, err
	}
	addrs := *cmp.Or(facts.HostAddrs, &[]netip.Addr{})
	onNode := slices.ContainsFunc(out.Snap.Node.Addresses, func(a netip.Addr) bool { return slices.Contains(addrs, a) })
	if !here && !onNode {
		addrs, facts.HostNetworks = AssumedAddrs(out.Snap.Node), nil
	}
	out.Snap.Apply(snapshot.Delta{HostAddrs: &addrs, HostNetworks: facts.HostNetworks})
	return out, out.addLink(nodes, here || onNode, settings)
}

// LoadManifests is watch.Load, where "-" is standard input.
func LoadManifests(ctx context.Context, path, node string) (*snapshot.Snapshot, []error, error) {
	return LoadOnLink(ctx, path, node, "")
}

// LoadOnLink is LoadManifests, and takes all other Nodes for neighbours by a device; by none, if that is empty.
func LoadOnLink(ctx context.Context, path, node, device string) (*snapshot.Snapshot, []error, error) {
	snap, nodes, problems, err := watch.LoadNodes(ctx, manifestPath(path), node, device != "")
	if err == nil && device != "" {
		link := AllNeighbours(device, nodes)
		snap.Apply(snapshot.Delta{Link: &link})
	}
	return snap, problems, err
}

func manifestPath(path string) string {
	if path == "-" {
		return "/dev/stdin"
	}
	return path
}

// MissingNode returns an error if the objects have no Node of this name; what depends on it is missing then.
func MissingNode(name string, snap *snapshot.Snapshot) error {
	if snap.Node.Name != "" {
		return nil
	}
	return fmt.Errorf("there is no Node %q among the objects: no endpoint is local or in its zone, and node ports have "+
		"no addresses (--hostname-override names the node)", name)
}

// adopt sets flags that are not given to what is in force by the kernel, and returns them.
func (o *ObjectFlags) adopt(c *dataplane.Config, settings *dataplane.Settings) (adopted []string) {
	if o.Policy.flags.Config != "" {
		return nil
	}
	held := settings.Config
	if held == nil { // by a backend, or a version, that writes no settings: rules tell some
		held = fromRules(c, settings)
	}
	node := c.NodeName
	now := *held
	for _, given := range givenFlags {
		if slices.ContainsFunc(given.flags, o.flags.Changed) {
			given.keep(&now, c)
		}
	}
	before := c.Lines()
	*c = now
	c.NodeName = node
	for _, line := range c.Lines() {
		if slices.Contains(before, line) {
			continue
		}
		name, value, _ := strings.Cut(line, "=")
		if n := len(adopted); n > 0 && strings.HasPrefix(adopted[n-1], "--"+name+"=") { // one list
			adopted[n-1] += "," + value
		} else {
			adopted = append(adopted, "--"+line)
		}
	}
	return adopted
}

// givenFlags say what of the configuration stays if one of some flags is given.
var givenFlags = []struct {
	flags []string
	keep  func(to, from *dataplane.Config)
}{
	{[]string{"bind-address"}, func(to, from *dataplane.Config) { to.NodeIP = from.NodeIP }},
	{[]string{"cluster-cidr", "detect-local-mode", "pod-bridge-interface", "pod-interface-name-prefix"},
		func(to, from *dataplane.Config) { to.DetectLocal = from.DetectLocal }},
	{[]string{"masquerade-all"}, func(to, from *dataplane.Config) { to.MasqueradeAll = from.MasqueradeAll }},
	{[]string{"nodeport-addresses", "proxy-mode", "behavior"}, func(to, from *dataplane.Config) {
		to.NodePortAddresses, to.NodePortPrimary = from.NodePortAddresses, from.NodePortPrimary
	}},
	{[]string{"iptables-localhost-nodeports", "behavior"},
		func(to, from *dataplane.Config) { to.LocalhostNodePorts = from.LocalhostNodePorts }},
	{[]string{"feature-gates"}, func(to, from *dataplane.Config) { to.NoExternalIPs = from.NoExternalIPs }},
	{[]string{"behavior"}, func(to, from *dataplane.Config) { to.AsKubeProxy = from.AsKubeProxy }},
	{[]string{"second-chance", "behavior"}, func(to, from *dataplane.Config) { to.SecondChance = from.SecondChance }},
	{[]string{"client-address"}, func(to, from *dataplane.Config) { to.ClientAddress = from.ClientAddress }},
	{[]string{"last-resort"}, func(to, from *dataplane.Config) { to.LastResort = from.LastResort }},
	{[]string{"records"}, func(to, from *dataplane.Config) { to.Records = from.Records }},
	{[]string{"ping-services", "behavior"}, func(to, from *dataplane.Config) { to.PingServices = from.PingServices }},
	{[]string{"reject-unused-ports", "behavior"},
		func(to, from *dataplane.Config) { to.RejectUnusedPorts = from.RejectUnusedPorts }},
	{[]string{"ipvs", "proxy-mode"}, func(to, from *dataplane.Config) { to.IPVS.Mode = from.IPVS.Mode }},
	{[]string{"ipvs-scheduler"}, func(to, from *dataplane.Config) { to.IPVS.Default = from.IPVS.Default }},
	{[]string{"ipvs-addresses"}, func(to, from *dataplane.Config) { to.IPVS.Addresses = from.IPVS.Addresses }},
}

// fromRules completes the configuration with what rules tell.
func fromRules(c *dataplane.Config, settings *dataplane.Settings) *dataplane.Config {
	out := *c
	out.MasqueradeAll, out.LocalhostNodePorts = settings.MasqueradeAll, settings.LocalhostNodePorts
	four, six := settings.Pods[ipfamily.IPv4], settings.Pods[ipfamily.IPv6]
	if !four.Known() && !six.Known() {
		return &out
	}
	out.DetectLocal = dataplane.DetectLocal{}
	switch {
	case four.Interface != "":
		out.DetectLocal = dataplane.DetectLocal{Mode: dataplane.DetectBridgeInterface, Interface: four.Interface}
	case four.InterfacePrefix != "":
		out.DetectLocal = dataplane.DetectLocal{Mode: dataplane.DetectInterfaceNamePrefix, Interface: four.InterfacePrefix}
	default:
		for _, p := range []netip.Prefix{four.CIDR, six.CIDR} {
			if p.IsValid() {
				out.DetectLocal.ClusterCIDRs = append(out.DetectLocal.ClusterCIDRs, p)
			}
		}
	}
	return &out
}

// collector collects what a source reports until the source is synced.
type collector struct {
	mu     sync.Mutex
	delta  snapshot.Delta
	synced func()
}

func (c *collector) Put(d snapshot.Delta) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.delta.Merge(d)
}

func (c *collector) Synced() { c.synced() }

// HostAddrs reads this host's addresses. It runs in the calling goroutine, whose thread may be in another network
// namespace.
func HostAddrs(ctx context.Context) ([]netip.Addr, error) {
	facts, err := hostFacts(ctx)
	if err != nil {
		return nil, err
	}
	return *facts.HostAddrs, nil
}

// hostFacts reads this host's addresses and networks, as HostAddrs does.
func hostFacts(ctx context.Context) (facts snapshot.Delta, err error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	c := collector{synced: cancel}
	if err := (&watch.Host{}).Run(ctx, &c); err != nil {
		return facts, err
	}
	if c.delta.HostAddrs == nil {
		return facts, errors.New("the host's addresses could not be read")
	}
	return c.delta, nil
}

const (
	// listTimeout limits how long an API server may take.
	listTimeout = 30 * time.Second
	// listGrace is how long to wait for lists after an error: the server may only lack an optional resource.
	listGrace = 2 * time.Second
)

// listKubernetes asks the API server once; with all, also for the addresses of the other Nodes.
func listKubernetes(ctx context.Context, kubeconfig, nodeName string, all bool) (*snapshot.Snapshot,
	map[string][]netip.Addr, []error, error) {
	config, err := watch.ClientConfig(kubeconfig)
	if err != nil {
		if kubeconfig == "" {
			err = fmt.Errorf("%w (outside of a cluster give --kubeconfig FILE, or --from PATH)", err)
		}
		return nil, nil, nil, err
	}
	config.QPS, config.Burst = 50, 50
	ctx, cancel := context.WithTimeout(ctx, listTimeout)
	defer cancel()
	synced := make(chan struct{})
	c := &collector{synced: func() { close(synced) }}
	var mu sync.Mutex
	var problems []error
	failed := make(chan error, 1)
	source := &watch.Kubernetes{Config: config, NodeName: nodeName, Report: func(err error) {
		if p := (*watch.Problem)(nil); errors.As(err, &p) {
			mu.Lock()
			defer mu.Unlock()
			problems = append(problems, err)
			return
		}
		select {
		case failed <- err:
		default:
		}
	}}
	others := wantNodes(source, all)
	ended := make(chan error, 1)
	go func() { ended <- source.Run(ctx, c) }()
	if err := await(ctx, synced, failed, ended); err != nil {
		return nil, nil, nil, err
	}
	nodes, err := awaitNodes(others)
	cancel()
	c.mu.Lock()
	defer c.mu.Unlock()
	mu.Lock()
	defer mu.Unlock()
	if err != nil {
		problems = append(problems, err)
	}
	snap := snapshot.New()
	snap.Apply(c.delta)
	return snap, nodes, problems, nil
}

// wantNodes has a source list the other Nodes, too, and returns where their addresses come.
func wantNodes(source *watch.Kubernetes, wants bool) <-chan map[string][]netip.Addr {
	if !wants {
		return nil
	}
	others, wanted := make(chan map[string][]netip.Addr, 1), make(chan struct{})
	close(wanted)
	source.NodesWanted = wanted
	source.Nodes = func(m map[string][]netip.Addr) {
		select {
		case others <- m:
		default: // the first list is enough
		}
	}
	return others
}

// awaitNodes waits for the addresses of the other Nodes, which not everybody may list. Without a channel, it has none.
func awaitNodes(others <-chan map[string][]netip.Addr) (map[string][]netip.Addr, error) {
	if others == nil {
		return nil, nil
	}
	select {
	case m := <-others:
		return m, nil
	case <-time.After(listGrace):
		return nil, errors.New("the other Nodes cannot be listed: whether clients keep their addresses is not known")
	}
}

// await waits until everything is listed. It returns an error only if no list follows within listGrace.
func await(ctx context.Context, synced <-chan struct{}, failed, ended <-chan error) error {
	var last error
	var grace <-chan time.Time
	for {
		select {
		case <-synced:
			return nil
		case last = <-failed:
			if grace == nil {
				grace = time.After(listGrace)
			}
		case <-grace:
			return fmt.Errorf("API server: %w", last)
		case err := <-ended:
			return errors.Join(err, last, ctx.Err())
		case <-ctx.Done():
			if errors.Is(ctx.Err(), context.DeadlineExceeded) {
				return errors.Join(fmt.Errorf("the API server did not answer within %s", listTimeout), last)
			}
			return ctx.Err()
		}
	}
}

// PrintProblems writes what is wrong with the objects to standard error, as render does.
func (o *Objects) PrintProblems() {
	const most = 20
	for i, p := range o.Problems {
		if i == most {
			terminal.Warn("and", len(o.Problems)-i, "more problems")
			break
		}
		terminal.Warn(p)
	}
}

// AssumedAddrs returns the addresses of the Node object, and the loopback address that every host has.
func AssumedAddrs(n snapshot.Node) []netip.Addr {
	addrs := append(slices.Clone(n.Addresses), netip.AddrFrom4([4]byte{127, 0, 0, 1}))
	slices.SortFunc(addrs, netip.Addr.Compare)
	return slices.Compact(addrs)
}
