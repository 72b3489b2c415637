package snapshot

// Backends say that the endpoints of other Services serve a Service's ports, in place of its own slices. The annotation
// backends says so; docs/decisions/0036-gateway.md has its form.
type Backends struct {
	// For names what asked for them, as in "Gateway edge/db"; empty if nobody said.
	For string
	// Ports are in the order of the annotation, each Port once. A port of the Service that is not among them has no
	// endpoints.
	Ports []PortBackends
}

// For names what asked for a Service's backends; empty if it has none, for a nil Service, and if nobody said.
func (s *Service) For() string {
	if s == nil || s.Backends == nil {
		return ""
	}
	return s.Backends.For
}

// PortBackends are those of one port of a Service.
type PortBackends struct {
	// Port is the port's name; empty for the only port of a Service.
	Port string
	// Listener and Route name what led to them, as in "db" and "TCPRoute shop/db". Both may be empty, and both are only
	// for answers: they change nothing for a packet.
	Listener, Route string
	// To has at most MaxBackends.
	To []Backend
}

// Backend is a share of a port's new connections, and the Service that gets it.
type Backend struct {
	Service Name
	// Port is the number of one of that Service's ports, of the protocol of the port that refers to it.
	Port uint16
	// Weight is its share, relative to the others; at most MaxBackendWeight. With 0 it gets none.
	Weight uint32
	// Refused, if not empty, says why its share of connections is refused, and Service and Port may be zero then.
	Refused string
}

// Bounds of Backends: those of Gateway API.
const (
	MaxBackends      = 16
	MaxBackendPorts  = 64
	MaxBackendWeight = 1_000_000
)
