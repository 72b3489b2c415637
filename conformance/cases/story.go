package cases

import (
	"time"

	"go.yaml.in/yaml/v3"
	v1 "k8s.io/api/core/v1"
)

// Story is a case that is a row of steps. It has a namespace of its own, which is empty at its beginning.
type Story struct {
	Name      string   `yaml:"name"`
	Title     string   `yaml:"title"`
	Source    string   `yaml:"source"`
	StandsFor []string `yaml:"standsFor"`
	// Each makes a story for every combination of values: $(KEY) in any text stands for the value, $(number) for the
	// number of the combination, from 1.
	Each map[string][]string `yaml:"each"`
	// Slice says that it belongs to the short run.
	Slice   bool         `yaml:"slice"`
	Differs []Difference `yaml:"differs"`
	Steps   []Step       `yaml:"steps"`

	// Theme is the file's.
	Theme string `yaml:"-"`
}

// FullName is the name of the case.
func (s *Story) FullName() string { return s.Theme + "/" + s.Name }

// Alone says that the story changes what all stories share: a proxy, a node, the API server.
func (s *Story) Alone() bool {
	for i := range s.Steps {
		t := &s.Steps[i]
		// A proxy may take the addresses of nodes for its own, which cuts nodes off from each other.
		ofNodes := t.Service != nil && t.Service.BalancerOf != nil
		if ofNodes || t.Proxy != nil || t.API != "" || t.Node != nil || t.ServiceCIDR != nil || t.Run != nil {
			return true
		}
	}
	return false
}

// Step is one step of a story: exactly one of its fields is set besides Step.
type Step struct {
	// Step is its name, for reports and for Differs.
	Step string `yaml:"step"`

	Service     *ServiceStep   `yaml:"service"`
	Endpoints   *EndpointsStep `yaml:"endpoints"`
	Delete      *DeleteStep    `yaml:"delete"`
	Pods        *PodsStep      `yaml:"pods"`
	Mirrored    *MirroredStep  `yaml:"mirrored"`
	Node        *NodeStep      `yaml:"node"`
	ServiceCIDR *CIDRStep      `yaml:"serviceCIDR"`
	Serve       *ServeStep     `yaml:"serve"`
	Close       *ServeStep     `yaml:"close"`
	// Blackhole has hosts lose all packets for a port without an answer, until the story ends or Heal.
	Blackhole *PortStep  `yaml:"blackhole"`
	Heal      *PortStep  `yaml:"heal"`
	Proxy     *ProxyStep `yaml:"proxy"`
	// API is what becomes of the API server: stop, kill or start.
	API    string      `yaml:"api"`
	Run    *RunStep    `yaml:"run"`
	Expect *ExpectStep `yaml:"expect"`
	// Connect opens many connections at the same time, and says how long all of them may take.
	Connect *ConnectStep `yaml:"connect"`
	// Stray sends a segment of a TCP connection that nobody knows.
	Stray *StrayStep `yaml:"stray"`
	// Echo pings addresses of a Service.
	Echo *EchoStep `yaml:"echo"`
	// Shares counts how many connections each endpoint gets.
	Shares *SharesStep `yaml:"shares"`
	// Route has the router lead what nodes, or a client, send to a Service's address to a node, until the story ends.
	Route *RouteStep `yaml:"route"`
	Open  *OpenStep  `yaml:"open"`
	Ping  *PingStep  `yaml:"ping"`
	// Traffic begins to dial, again and again, until Stop.
	Traffic *TrafficStep `yaml:"traffic"`
	Stop    *StopStep    `yaml:"stop"`
	HTTP    *HTTPStep    `yaml:"http"`
	// Exchange sends much, and all of it has to come back.
	Exchange *ExchangeStep `yaml:"exchange"`
	// Wait lets time pass, where time itself is what a story is about: the timeout of an affinity.
	Wait Duration `yaml:"wait"`

	// Line is where the step is in its file.
	Line int `yaml:"-"`
}

// ServiceStep creates a Service, or gives it another specification.
type ServiceStep struct {
	Name        string            `yaml:"name"`
	Labels      map[string]string `yaml:"labels"`
	Annotations map[string]string `yaml:"annotations"`
	// Spec is that of Kubernetes. Without ipFamilyPolicy, the Service has both families.
	Spec yaml.Node `yaml:"spec"`
	// Balancer gives it addresses of a load balancer, External external IPs. BalancerOf gives it, in place of a load
	// balancer's addresses, those of hosts.
	Balancer   bool     `yaml:"balancer"`
	BalancerOf []string `yaml:"balancerOf"`
	External   bool     `yaml:"external"`

	// Rejected are words with which the API server has to refuse it; empty if it takes it.
	Rejected string `yaml:"rejected"`

	// Parsed is Spec.
	Parsed v1.ServiceSpec `yaml:"-"`
}

// EndpointsStep writes EndpointSlices of a Service, one of each family.
type EndpointsStep struct {
	Of string `yaml:"of"`
	// Slice tells several apart; empty means the first.
	Slice string `yaml:"slice"`
	// Set is the endpoints by the names of their hosts.
	Set map[string]Endpoint `yaml:"set"`
	// Ports are targets by the names of ports. A port that is not named has the number of its targetPort, or 8080. If
	// Only is set, the slices have no other ports.
	Ports map[string]int32 `yaml:"ports"`
	Only  bool             `yaml:"only"`
	// Labels are set on the slices, besides the name of the Service, and Annotations.
	Labels      map[string]string `yaml:"labels"`
	Annotations map[string]string `yaml:"annotations"`
	// Families are those that slices are written of; none means both.
	Families []Family `yaml:"families"`
}

// DeleteStep deletes a Service or the EndpointSlices of one.
type DeleteStep struct {
	Service   string `yaml:"service"`
	Endpoints string `yaml:"endpoints"`
	Slice     string `yaml:"slice"`
}

// PodsStep makes Pod objects of hosts, or changes them, and has the EndpointSlice controller look after Services.
type PodsStep struct {
	// Set says of hosts whether their pods are ready, unready, or deleted.
	Set    map[string]string `yaml:"set"`
	Labels map[string]string `yaml:"labels"`
	// Ports are named ports of the containers.
	Ports map[string]int32 `yaml:"ports"`
}

// MirroredStep makes an Endpoints object, of which a controller makes EndpointSlices. No endpoints delete it.
type MirroredStep struct {
	Of    string   `yaml:"of"`
	Hosts []string `yaml:"hosts"`
	Port  int32    `yaml:"port"`
}

// NodeStep changes a Node object: until the story ends.
type NodeStep struct {
	Name string `yaml:"name"`
	// Zone is the label; empty leaves it as it is.
	Zone string `yaml:"zone"`
	// Taints are keys of taints, which take the place of those before.
	Taints []string `yaml:"taints"`
}

// CIDRStep creates a ServiceCIDR of the second range, until the story ends.
type CIDRStep struct {
	Name string `yaml:"name"`
}

// ServeStep has hosts answer at one more port, or answer there no longer.
type ServeStep struct {
	On   []string `yaml:"on"`
	Port uint16   `yaml:"port"`
	// Late is how long clients of TCP wait for an answer, on connections that are accepted at once.
	Late Duration `yaml:"late"`
}

// PortStep names a port of hosts.
type PortStep struct {
	On   []string `yaml:"on"`
	Port uint16   `yaml:"port"`
}

// ProxyStep ends or starts the proxies.
type ProxyStep struct {
	// Do is restart, stop, kill or start.
	Do string `yaml:"do"`
	// On are nodes; none means all.
	On []string `yaml:"on"`
	// As names another proxy that is meant instead of the one under test. It ends with the story at the latest.
	As string `yaml:"as"`
	// With are fields of kube-proxy's configuration, until the story ends.
	With map[string]any `yaml:"with"`
	// Own are fields of Verdict's own document in the same file, likewise. kube-proxy does not read it.
	Own map[string]any `yaml:"own"`
}

// RunStep runs a program on a host, which must succeed, and whose output must hold Says.
type RunStep struct {
	On   string   `yaml:"on"`
	Args []string `yaml:"args"`
	Says string   `yaml:"says"`
	// Reads is a file that "make neighbors" has made, for the program to read; empty means none.
	Reads string `yaml:"reads"`
	// Undo are lines of a shell that take it back when the story ends; empty if nothing does.
	Undo string `yaml:"undo"`
}

// ExpectStep looks at what becomes of packets.
type ExpectStep struct {
	From []string `yaml:"from"`
	// To is a Service; Ports are names of its ports, none means all. Frontends are the kinds of its addresses; none
	// means the cluster IP. Families none means both.
	To        string     `yaml:"to"`
	Ports     []string   `yaml:"ports"`
	Frontends []Frontend `yaml:"frontends"`
	Families  []Family   `yaml:"families"`
	// Address and Protocol are asked in place of a Service: 10.96.255.250:80.
	Address  string   `yaml:"address"`
	Protocol Protocol `yaml:"protocol"`
	// Answer is what is to happen.
	Answer Answer `yaml:"answer"`
	// Sees is the source that the endpoints see: kept, or a node. Empty means any.
	Sees string `yaml:"sees"`
	// At is the port that endpoints are reached at; 0 means any.
	At uint16 `yaml:"at"`
	// Sticky says that one client is always answered by the same endpoint; Some that not each endpoint has to be seen.
	Sticky bool `yaml:"sticky"`
	Some   bool `yaml:"some"`
	// Apart says that not all of the clients are answered by the same endpoint.
	Apart bool `yaml:"apart"`
	// Same says that a sender is answered by the same endpoint at all frontends, in a family.
	Same bool `yaml:"same"`
	// FromPort is the senders' own port; 0 means another one each time.
	FromPort uint16 `yaml:"fromPort"`
	// Within is how long it may take until it is so: what Kubernetes promises no order for. 0 means at once.
	Within Duration `yaml:"within"`
}

// ConnectStep opens connections of TCP at the same time, each of which waits so long for an answer.
type ConnectStep struct {
	From      []string   `yaml:"from"`
	To        string     `yaml:"to"`
	Ports     []string   `yaml:"ports"`
	Frontends []Frontend `yaml:"frontends"`
	Families  []Family   `yaml:"families"`
	// Times is how many each sender opens.
	Times int `yaml:"times"`
	// Answer says who answers: all of them do, and nobody else. Refused and dropped mean that at least one connection
	// ends so, while others may be answered.
	Answer Answer   `yaml:"answer"`
	Within Duration `yaml:"within"`
	// Eventually is for how long they are opened anew, all of them, until all end as wanted. Zero means once.
	Eventually Duration `yaml:"eventually"`
}

// StrayStep sends an acknowledgement to each port of a Service, as on a connection that was lost on the way.
type StrayStep struct {
	From      []string   `yaml:"from"`
	To        string     `yaml:"to"`
	Frontends []Frontend `yaml:"frontends"`
	// Answer is refused, which means a reset, since an ICMP error would not end the connection; or dropped.
	Answer Answer `yaml:"answer"`
}

// EchoStep sends ICMP or ICMPv6 echo requests to addresses of a Service.
type EchoStep struct {
	From      []string   `yaml:"from"`
	To        string     `yaml:"to"`
	Frontends []Frontend `yaml:"frontends"`
	Families  []Family   `yaml:"families"`
	// Answer is answered, refused, which means an ICMP error, dropped or unanswered.
	Answer Answer `yaml:"answer"`
}

// SharesStep opens connections to each port of a Service, one after the other, and counts who answers.
type SharesStep struct {
	From      []string   `yaml:"from"`
	To        string     `yaml:"to"`
	Frontends []Frontend `yaml:"frontends"`
	Families  []Family   `yaml:"families"`
	// Times is how many each sender opens.
	Times int `yaml:"times"`
	// Of are the weights of all endpoints. Each endpoint's share of the connections must be that of its weight, but for
	// what chance explains; with 0 it must get none. A proxy that differs gives all endpoints that it is said to want
	// the same share.
	Of map[string]int `yaml:"of"`
}

// RouteStep names where packets for a Service's load balancer addresses go: those of From, a client, or if it is empty,
// of nodes.
type RouteStep struct {
	To   string `yaml:"to"`
	Via  string `yaml:"via"`
	From string `yaml:"from"`
}

// OpenStep opens a connection that is kept, or for UDP and SCTP begins a flow from one port.
type OpenStep struct {
	As       string   `yaml:"as"`
	From     string   `yaml:"from"`
	To       string   `yaml:"to"`
	Port     string   `yaml:"port"`
	Frontend Frontend `yaml:"frontend"`
	Family   Family   `yaml:"family"`
	Answer   Answer   `yaml:"answer"`
}

// PingStep asks on what OpenStep opened.
type PingStep struct {
	As     string   `yaml:"as"`
	Answer Answer   `yaml:"answer"`
	At     uint16   `yaml:"at"`
	Within Duration `yaml:"within"`
}

// TrafficStep opens one connection after the other in the background.
type TrafficStep struct {
	As        string     `yaml:"as"`
	From      []string   `yaml:"from"`
	To        string     `yaml:"to"`
	Ports     []string   `yaml:"ports"`
	Frontends []Frontend `yaml:"frontends"`
	Families  []Family   `yaml:"families"`
}

// StopStep ends background traffic, none of which may have failed, and which only these endpoints answered.
type StopStep struct {
	As   string   `yaml:"as"`
	Only []string `yaml:"only"`
}

// ExchangeStep sends so many bytes to each port of a Service: over TCP, or as one datagram of UDP. The endpoints send
// them back.
type ExchangeStep struct {
	From  []string `yaml:"from"`
	To    string   `yaml:"to"`
	Bytes int      `yaml:"bytes"`
}

// HTTPStep asks a node's health checks.
type HTTPStep struct {
	From string `yaml:"from"`
	Node string `yaml:"node"`
	// Port is a number, or the health check node port of the Service that Of names.
	Port   uint16   `yaml:"port"`
	Of     string   `yaml:"of"`
	Path   string   `yaml:"path"`
	Status int      `yaml:"status"` // 0: nobody listens
	Says   []string `yaml:"says"`
	Header string   `yaml:"header"` // "X-Load-Balancing-Endpoint-Weight: 1"
	Within Duration `yaml:"within"`
}

// Duration is a time.Duration, in YAML "3s".
type Duration time.Duration
