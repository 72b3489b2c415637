package inspect

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"slices"
	"sync"
	"time"

	"github.com/spf13/pflag"

	"github.com/verdict-proxy/verdict/internal/ipfamily"
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
	// Outliers is what the proxy on this host said of endpoints, if it was asked.
	Outliers []Outlier
	// Problems lists what is wrong with the objects, and Adopted the flags that were taken from the kernel's rules.
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
	if o.From != "" {
		out.Source = o.From
		out.Snap, out.Problems, err = LoadManifests(o.From, out.Config.NodeName)
	} else {
		out.Source = "the API server"
		out.Snap, out.Problems, err = listKubernetes(ctx, o.Kubeconfig, out.Config.NodeName)
	}
	if err != nil {
		return nil, err
	}
	if why := MissingNode(out.Config.NodeName, out.Snap); why != nil {
		out.Problems = append(out.Problems, why)
	}
	addrs, err := HostAddrs(ctx)
	if err != nil && here {
		return nil, err
	}
	onNode := slices.ContainsFunc(out.Snap.Node.Addresses, func(a netip.Addr) bool { return slices.Contains(addrs, a) })
	if !here && !onNode {
		addrs = AssumedAddrs(out.Snap.Node)
	}
	out.Snap.Apply(snapshot.Delta{HostAddrs: &addrs})
	return out, nil
}

// LoadManifests is watch.Load, where "-" is standard input.
func LoadManifests(path, node string) (*snapshot.Snapshot, []error, error) {
	if path == "-" {
		path = "/dev/stdin"
	}
	return watch.Load(path, node)
}

// MissingNode returns an error if the objects have no Node of this name; what depends on it is missing then.
func MissingNode(name string, snap *snapshot.Snapshot) error {
	if snap.Node.Name != "" {
		return nil
	}
	return fmt.Errorf("there is no Node %q among the objects: no endpoint is local or in its zone, and node ports have "+
		"no addresses (--hostname-override names the node)", name)
}

// adopt sets flags that are not given to what the kernel's rules say, and returns their names.
func (o *ObjectFlags) adopt(c *dataplane.Config, settings *dataplane.Settings) (adopted []string) {
	four, six := settings.Pods[ipfamily.IPv4], settings.Pods[ipfamily.IPv6]
	said := func(names ...string) bool {
		return o.Policy.flags.Config != "" || slices.ContainsFunc(names, o.flags.Changed)
	}
	if pods := four; !said("cluster-cidr", "detect-local-mode") && (pods.Known() || six.Known()) {
		c.DetectLocal = dataplane.DetectLocal{}
		switch {
		case pods.Interface != "":
			c.DetectLocal.Mode, c.DetectLocal.Interface = dataplane.DetectBridgeInterface, pods.Interface
			adopted = append(adopted, "--pod-bridge-interface "+pods.Interface)
		case pods.InterfacePrefix != "":
			c.DetectLocal.Mode, c.DetectLocal.Interface = dataplane.DetectInterfaceNamePrefix, pods.InterfacePrefix
			adopted = append(adopted, "--pod-interface-name-prefix "+pods.InterfacePrefix)
		default:
			text := ""
			for _, p := range []netip.Prefix{pods.CIDR, six.CIDR} {
				if p.IsValid() {
					c.DetectLocal.ClusterCIDRs = append(c.DetectLocal.ClusterCIDRs, p)
					text += "," + p.String()
				}
			}
			adopted = append(adopted, "--cluster-cidr "+text[min(1, len(text)):])
		}
	}
	if !said("masquerade-all") && settings.MasqueradeAll != c.MasqueradeAll {
		c.MasqueradeAll = settings.MasqueradeAll
		adopted = append(adopted, fmt.Sprintf("--masquerade-all=%v", c.MasqueradeAll))
	}
	if !said("iptables-localhost-nodeports") && settings.LocalhostNodePorts != c.LocalhostNodePorts {
		c.LocalhostNodePorts = settings.LocalhostNodePorts
		adopted = append(adopted, fmt.Sprintf("--iptables-localhost-nodeports=%v", c.LocalhostNodePorts))
	}
	if mode := settings.SecondChance; !said("second-chance") && mode != snapshot.SecondChanceDefault &&
		mode != c.SecondChance {
		c.SecondChance = mode
		adopted = append(adopted, "--second-chance="+mode.String())
	}
	return adopted
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
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	c := collector{synced: cancel}
	if err := (&watch.Host{}).Run(ctx, &c); err != nil {
		return nil, err
	}
	if c.delta.HostAddrs == nil {
		return nil, errors.New("the host's addresses could not be read")
	}
	return *c.delta.HostAddrs, nil
}

const (
	// listTimeout limits how long an API server may take.
	listTimeout = 30 * time.Second
	// listGrace is how long to wait for lists after an error: the server may only lack an optional resource.
	listGrace = 2 * time.Second
)

// listKubernetes asks the API server once.
func listKubernetes(ctx context.Context, kubeconfig, nodeName string) (*snapshot.Snapshot, []error, error) {
	config, err := watch.ClientConfig(kubeconfig)
	if err != nil {
		if kubeconfig == "" {
			err = fmt.Errorf("%w (outside of a cluster give --kubeconfig FILE, or --from PATH)", err)
		}
		return nil, nil, err
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
	ended := make(chan error, 1)
	go func() { ended <- source.Run(ctx, c) }()
	if err := await(ctx, synced, failed, ended); err != nil {
		return nil, nil, err
	}
	cancel()
	c.mu.Lock()
	defer c.mu.Unlock()
	mu.Lock()
	defer mu.Unlock()
	snap := snapshot.New()
	snap.Apply(c.delta)
	return snap, problems, nil
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
			fmt.Fprintf(os.Stderr, "verdict: and %d more problems\n", len(o.Problems)-i)
			break
		}
		fmt.Fprintln(os.Stderr, "verdict:", p)
	}
}

// AssumedAddrs returns the addresses of the Node object, and the loopback address that every host has.
func AssumedAddrs(n snapshot.Node) []netip.Addr {
	addrs := append(slices.Clone(n.Addresses), netip.AddrFrom4([4]byte{127, 0, 0, 1}))
	slices.SortFunc(addrs, netip.Addr.Compare)
	return slices.Compact(addrs)
}
