// Package cases holds what the conformance suite expects of a proxy, as data: a file for each theme, readable by an
// operator.
//
// There are two kinds of cases. A matrix names options, states of endpoints, frontends and senders, and every
// combination of them is a case; what is to happen follows from the rules of Kubernetes, which Expect knows. A story
// is a row of steps, each of which changes something or says what is to be seen.
package cases

import (
	"fmt"
	"slices"
	"strings"
)

// Frontend is a kind of address that a Service is reached at.
type Frontend string

// The frontends. Those of node ports name the node that is addressed.
const (
	ClusterIP    Frontend = "cluster-ip"
	LoadBalancer Frontend = "load-balancer"
	ExternalIP   Frontend = "external-ip"
	NodePortA    Frontend = "node-port@node-a"
	NodePortB    Frontend = "node-port@node-b"
	// SecondNodePortA is node-a's other address, which its Node object does not name.
	SecondNodePortA Frontend = "node-port@second-address"
	// Localhost is the node port at the loopback address of the sender, which is a node.
	Localhost Frontend = "node-port@localhost"
	// UnusedPort is a port of the cluster IP that the Service does not have.
	UnusedPort Frontend = "unused-port"
	// UnusedBalancerPort and UnusedExternalPort are the same of the load balancer's address and of the external IP. Only
	// stories know them: Kubernetes promises nothing there.
	UnusedBalancerPort Frontend = "unused-port@load-balancer"
	UnusedExternalPort Frontend = "unused-port@external-ip"
)

var frontends = []Frontend{
	ClusterIP,
	LoadBalancer,
	ExternalIP,
	NodePortA,
	NodePortB,
	SecondNodePortA,
	Localhost,
	UnusedPort,
}

// storyFrontends are those that stories may name.
var storyFrontends = slices.Concat(frontends, []Frontend{UnusedBalancerPort, UnusedExternalPort})

// Protocol is "tcp", "udp" or "sctp".
type Protocol string

// Family is "ipv4" or "ipv6".
type Family string

// The protocols and families.
const (
	TCP  Protocol = "tcp"
	UDP  Protocol = "udp"
	SCTP Protocol = "sctp"
	IPv4 Family   = "ipv4"
	IPv6 Family   = "ipv6"
)

// Protocols and Families are all of them.
var (
	Protocols = []Protocol{TCP, UDP, SCTP}
	Families  = []Family{IPv4, IPv6}
)

// Senders are all hosts that may ask: pods, nodes, and clients outside, of which client-a is led to node-a.
var senders = []string{
	"pod-a", "pod-b", "node-a", "node-b", "client-a", "client-b", "a1", "a2", "a3", "b1", "b2", "b3",
}

// endpoints are all hosts that may answer for a Service: pods, and the nodes for pods in the host's network.
var endpointHosts = []string{"a1", "a2", "a3", "b1", "b2", "b3", "node-a", "node-b"}

// Options are the fields of a Service that matter in a matrix. The zero value is a Service of type LoadBalancer with
// the defaults of Kubernetes, a node port, an address of a load balancer and an external IP.
type Options struct {
	// InternalTrafficPolicy and ExternalTrafficPolicy are Cluster, the default, or Local.
	InternalTrafficPolicy string `yaml:"internalTrafficPolicy"`
	ExternalTrafficPolicy string `yaml:"externalTrafficPolicy"`
	// SessionAffinity is None, the default, or ClientIP.
	SessionAffinity string `yaml:"sessionAffinity"`
	// SourceRanges are whom the load balancer's address is for: hosts by name, pods, nodes, or everybody. None means no
	// restriction.
	SourceRanges []string `yaml:"sourceRanges"`
	// IPMode is VIP, the default, or Proxy: then the load balancer itself answers at its address.
	IPMode string `yaml:"ipMode"`
}

// over gives o with the fields that p has.
func (o Options) over(p Options) Options {
	set := func(to *string, from string) {
		if from != "" {
			*to = from
		}
	}
	set(&o.InternalTrafficPolicy, p.InternalTrafficPolicy)
	set(&o.ExternalTrafficPolicy, p.ExternalTrafficPolicy)
	set(&o.SessionAffinity, p.SessionAffinity)
	set(&o.IPMode, p.IPMode)
	if p.SourceRanges != nil {
		o.SourceRanges = p.SourceRanges
	}
	return o
}

// Condition is the state of an endpoint.
type Condition string

// The conditions. An endpoint that is Serving is terminating, but still serves.
const (
	Ready       Condition = "ready"
	Serving     Condition = "serving"
	Terminating Condition = "terminating"
	NotReady    Condition = "unready"
)

// Endpoint is an endpoint in a state: in YAML "ready", or "ready for zone-a", with the zones or nodes that its hints
// name.
type Endpoint struct {
	Condition Condition
	Zones     []string
	Nodes     []string
}

// State is the endpoints of a Service by the names of their hosts.
type State struct {
	Title     string              `yaml:"title"`
	Endpoints map[string]Endpoint `yaml:"endpoints"`
}

// Outcome is how a look ends.
type Outcome string

// The outcomes. Unanswered is Refused or Dropped, where that does not matter.
const (
	Answered   Outcome = "answered"
	Refused    Outcome = "refused"
	Dropped    Outcome = "dropped"
	Unanswered Outcome = "unanswered"
)

// Kept is the source that an endpoint sees if nobody translated it.
const Kept = "kept"

// Want is what is to be seen when a sender asks some times.
type Want struct {
	Outcome Outcome
	// Endpoints are those that may answer, each of which does sooner or later, sorted.
	Endpoints []string
	// Sources says for each endpoint which source it sees: Kept, or the name of the node whose address it is. Nil means
	// that any will do.
	Sources map[string]string
	// Sticky says that it is always the same endpoint.
	Sticky bool
	// Some says that not every endpoint has to be seen.
	Some bool
}

// String gives it in words: "one of a1, b1; source kept".
func (w Want) String() string {
	if w.Outcome != Answered {
		return string(w.Outcome)
	}
	var b strings.Builder
	switch {
	case len(w.Endpoints) == 0:
		b.WriteString("answered")
	case len(w.Endpoints) == 1:
		b.WriteString(w.Endpoints[0])
	case w.Sticky:
		fmt.Fprintf(&b, "always the same of %s", strings.Join(w.Endpoints, ", "))
	default:
		fmt.Fprintf(&b, "one of %s", strings.Join(w.Endpoints, ", "))
	}
	by := make(map[string][]string)
	var sources []string
	for _, e := range w.Endpoints {
		s, ok := w.Sources[e]
		if !ok {
			continue
		}
		if by[s] == nil {
			sources = append(sources, s)
		}
		by[s] = append(by[s], e)
	}
	for _, s := range sources {
		if len(sources) == 1 {
			fmt.Fprintf(&b, "; source %s", s)
			break
		}
		fmt.Fprintf(&b, "; source %s for %s", s, strings.Join(by[s], ", "))
	}
	return b.String()
}

// Flow is a kind of packet: who sends it to which frontend.
type Flow struct {
	From     string
	Frontend Frontend
	Protocol Protocol
	Family   Family
}

// Look is a flow with what is to become of it.
type Look struct {
	Flow
	Want Want
	// Differs are what is to be seen instead of some proxies.
	Differs []*Difference
}

// Case is one case of a matrix.
type Case struct {
	Name, Theme, Title, Source string
	StandsFor                  []string
	// Service names the Service, which other cases may look at, too, and State the state of its endpoints.
	Service string
	Options Options
	State   *State
	Looks   []Look
	// Slice says that the case belongs to the short run.
	Slice bool
}

// Difference says of some proxies that they are to behave otherwise, or may.
type Difference struct {
	// Proxies are names of proxies.
	Proxies []string `yaml:"proxies"`
	// When narrows it down, in a matrix; Step names the step, in a story. Each narrows a story down that stands for
	// several: to those with one of these values of each key.
	When When                `yaml:"when"`
	Step string              `yaml:"step"`
	Each map[string][]string `yaml:"each"`
	// Want is what is seen instead: refused, dropped, unanswered, or endpoints.
	Want Answer `yaml:"want"`
	// Source is the source that the endpoints see instead, empty for any.
	Sources string `yaml:"sees"`
	// Right is whose behaviour is right: the name of a proxy, or either.
	Right string `yaml:"right"`
	Why   string `yaml:"why"`
	// Source is where that is said.
	Source string `yaml:"source"`
	// Stays says why Verdict does not do as kube-proxy here, although it is told to: Asked or Mended. Empty means that it
	// does.
	Stays Stays `yaml:"stays"`

	// expected says that a proxy is to behave so, and same that it is to behave as others and differs all the same.
	expected, same bool
}

// Stays is why a difference from kube-proxy is there also when Verdict behaves as kube-proxy.
type Stays string

// The reasons. With Asked, a Service asks for it by an annotation that kube-proxy does not read; with Mended, it is a
// fault of kube-proxy, or nothing that packets meet by default.
const (
	Asked  Stays = "asked"
	Mended Stays = "mended"
)

// As gives what a difference of kube-proxy's means for a proxy that is to behave as it: that very behavior is expected
// then, unless it Stays. It is nil if the proxy is to do what others do, and no difference from kube-proxy is meant.
func (d *Difference) As() *Difference {
	out := *d
	switch d.Stays {
	case Asked:
		return nil
	case Mended:
		out.same = true
	default:
		out.expected = true
	}
	return &out
}

// Counts reports whether what is seen counts as a difference that has a reason.
func (d *Difference) Counts() bool { return d != nil && !d.expected }

// Wants gives what is expected of a proxy that differs.
func (d *Difference) Wants(otherwise Want) Want {
	if d.same {
		return otherwise
	}
	w := d.Want.want()
	w.Some = true
	if w.Outcome == Answered && len(w.Endpoints) == 0 {
		w.Endpoints, w.Sticky = otherwise.Endpoints, otherwise.Sticky
	}
	if d.Sources != "" && w.Outcome == Answered {
		w.Sources = uniform(w.Endpoints, d.Sources)
	}
	return w
}

func uniform(endpoints []string, source string) map[string]string {
	sources := make(map[string]string)
	for _, e := range endpoints {
		sources[e] = source
	}
	return sources
}

// When is a condition on a flow of a matrix. An empty list means any.
type When struct {
	Frontends  []Frontend `yaml:"frontends"`
	Senders    []string   `yaml:"senders"`
	Protocols  []Protocol `yaml:"protocols"`
	Families   []Family   `yaml:"families"`
	States     []string   `yaml:"states"`
	Variations []string   `yaml:"variations"`
	// Outcomes are what is expected of others.
	Outcomes []Outcome `yaml:"outcomes"`
}

func (w *When) holds(f Flow, state, variation string, outcome Outcome) bool {
	return in(w.Frontends, f.Frontend) && in(w.Senders, f.From) && in(w.Protocols, f.Protocol) &&
		in(w.Families, f.Family) &&
		in(w.States, state) && in(w.Variations, variation) &&
		in(w.Outcomes, outcome)
}

func in[T comparable](all []T, one T) bool { return len(all) == 0 || slices.Contains(all, one) }

// Answer is refused, dropped, unanswered, answered, or the endpoints that answer.
type Answer struct {
	Outcome   Outcome
	Endpoints []string
}

func (a Answer) want() Want { return Want{Outcome: a.Outcome, Endpoints: a.Endpoints} }
