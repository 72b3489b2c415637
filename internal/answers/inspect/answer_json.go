package inspect

import (
	"time"

	"github.com/verdict-proxy/verdict/internal/proxy/status"
	"github.com/verdict-proxy/verdict/sync/dataplane"
)

// AnswerJSON is an Answer as JSON: docs/ANSWERS.md.
type AnswerJSON struct {
	Packet        PacketJSON       `json:"packet"`
	Origin        OriginJSON       `json:"origin"`
	Objects       *ViewJSON        `json:"objects,omitempty"`
	Kernel        *ViewJSON        `json:"kernel,omitempty"`
	Agree         *bool            `json:"agree,omitempty"`
	Disagreements []string         `json:"disagreements,omitempty"`
	Preflight     []status.Finding `json:"preflight,omitempty"`
	Notes         []string         `json:"notes,omitempty"`
}

// PacketJSON is an AskedPacket as JSON.
type PacketJSON struct {
	Source      string `json:"source"`
	StandsFor   string `json:"standsFor,omitempty"`
	Destination string `json:"destination"`
	Port        uint16 `json:"port"`
	Protocol    string `json:"protocol"`
	Interface   string `json:"interface,omitempty"`
}

// OriginJSON is an Origin as JSON.
type OriginJSON struct {
	Pod  bool   `json:"pod"`
	Node bool   `json:"node"`
	Why  string `json:"why"`
}

// ViewJSON is a View as JSON.
type ViewJSON struct {
	From      string         `json:"from"`
	Revision  uint32         `json:"revision,omitempty"`
	Outcome   string         `json:"outcome"`
	Cause     string         `json:"cause"`
	Why       string         `json:"why"`
	Service   *ServiceJSON   `json:"service,omitempty"`
	Scheduler string         `json:"scheduler,omitempty"`
	Ranges    *RangesJSON    `json:"sourceRanges,omitempty"`
	Rows      []RowJSON      `json:"rows,omitempty"`
	Endpoints []EndpointJSON `json:"endpoints,omitempty"`
	LeftOut   []LeftOutJSON  `json:"leftOut,omitempty"`
	Affinity  *AffinityJSON  `json:"affinity,omitempty"`
	Near      []NearJSON     `json:"near,omitempty"`
	Way       []string       `json:"way,omitempty"`
	Trace     []StepJSON     `json:"trace,omitempty"`
	Unclear   []string       `json:"unclear,omitempty"`
}

// ServiceJSON is a Service as JSON.
type ServiceJSON struct {
	Name        string        `json:"name"`
	Port        string        `json:"port,omitempty"`
	Kind        string        `json:"kind,omitempty"`
	Claims      []string      `json:"alsoClaimedBy,omitempty"`
	Settings    []SettingJSON `json:"settings,omitempty"`
	Connections *uint64       `json:"connections,omitempty"`
}

// SettingJSON is a Setting as JSON.
type SettingJSON struct {
	Name    string `json:"name"`
	Value   string `json:"value"`
	Without string `json:"without,omitempty"`
}

// RangesJSON are Ranges as JSON.
type RangesJSON struct {
	Ranges []string `json:"ranges,omitempty"`
	Holds  string   `json:"holds,omitempty"`
}

// RowJSON is a Row as JSON.
type RowJSON struct {
	From       string `json:"from"`
	Endpoints  string `json:"endpoints"`
	Masquerade bool   `json:"masquerade"`
	Decides    bool   `json:"decides"`
}

// EndpointJSON is an Endpoint as JSON.
type EndpointJSON struct {
	Address     string  `json:"address"`
	Port        uint16  `json:"port"`
	Node        string  `json:"node,omitempty"`
	Zone        string  `json:"zone,omitempty"`
	Chance      float64 `json:"chance"`
	Weight      int     `json:"weight,omitempty"`
	Sees        string  `json:"sees,omitempty"`
	Source      string  `json:"source,omitempty"`
	Draining    bool    `json:"draining,omitempty"`
	Unhealthy   string  `json:"unhealthy,omitempty"`
	Starting    string  `json:"starting,omitempty"`
	Trouble     string  `json:"trouble,omitempty"`
	Connections *uint64 `json:"connections,omitempty"`
}

// LeftOutJSON is an ExcludedEndpoint as JSON.
type LeftOutJSON struct {
	Address string `json:"address,omitempty"`
	Port    uint16 `json:"port,omitempty"`
	Node    string `json:"node,omitempty"`
	Zone    string `json:"zone,omitempty"`
	Slice   string `json:"slice,omitempty"`
	Reason  string `json:"reason"`
	Why     string `json:"why"`
}

// AffinityJSON is an Affinity as JSON.
type AffinityJSON struct {
	Seconds   int    `json:"timeoutSeconds"`
	Endpoint  string `json:"endpoint,omitempty"`
	Remaining int    `json:"remainingSeconds,omitempty"`
}

// NearJSON is a NearMiss as JSON.
type NearJSON struct {
	Address  string `json:"address"`
	Port     uint16 `json:"port"`
	Protocol string `json:"protocol"`
	Service  string `json:"service"`
	Kind     string `json:"kind,omitempty"`
}

// StepJSON is a dataplane.TraceStep as JSON.
type StepJSON struct {
	Chain   string   `json:"chain"`
	Rule    string   `json:"rule"`
	Matched bool     `json:"matched"`
	Found   []string `json:"found,omitempty"`
}

// JSON converts the answer for printing, with or without the trace.
func (a *Answer) JSON(trace bool) *AnswerJSON {
	p := &a.Packet
	out := &AnswerJSON{
		Packet: PacketJSON{p.Source.String(), p.StandsFor, p.Destination.String(), p.Port, p.Protocol.String(), p.Interface},
		Origin: OriginJSON{a.Origin.Pod, a.Origin.Node, a.Origin.Why}, Disagreements: a.Disagreements,
		Preflight: a.Preflight, Notes: a.Notes,
		Objects: a.Objects.json(false), Kernel: a.Kernel.json(trace)}
	if a.Compared() {
		agree := a.Agree()
		out.Agree = &agree
	}
	return out
}

func (v *View) json(trace bool) *ViewJSON {
	if v == nil {
		return nil
	}
	out := &ViewJSON{From: v.From, Revision: v.Revision, Outcome: v.Outcome, Cause: v.Cause.String(), Why: v.Why,
		Scheduler: v.Scheduler, Way: v.Chains, Unclear: v.Unclear}
	if s := v.Service; s != nil {
		out.Service = &ServiceJSON{Name: s.Port.Service.String(), Port: s.Port.Port, Kind: s.Kind, Claims: s.Claims,
			Connections: s.Connections}
		for _, set := range s.Settings {
			out.Service.Settings = append(out.Service.Settings, SettingJSON(set))
		}
	}
	if r := v.Ranges; r != nil {
		out.Ranges = &RangesJSON{Holds: validText(r.Holds)}
		for _, p := range r.Ranges {
			out.Ranges.Ranges = append(out.Ranges.Ranges, p.String())
		}
	}
	for _, r := range v.Rows {
		out.Rows = append(out.Rows, RowJSON{r.From.String(), r.endpoints(), r.Masquerade, r.Decides})
	}
	out.addEndpoints(v)
	if f := v.Affinity; f != nil {
		out.Affinity = &AffinityJSON{int(f.Timeout / time.Second), validText(f.Endpoint), int(f.Left / time.Second)}
	}
	for _, n := range v.NearMisses {
		out.Near = append(out.Near, NearJSON{n.Key.Addr.String(), n.Key.Port, n.Key.Protocol.String(), n.name(), n.Kind})
	}
	if trace {
		for _, s := range v.Steps {
			out.Trace = append(out.Trace, StepJSON{s.Chain, s.Rule, s.Matched, s.Found})
		}
	}
	return out
}

func (out *ViewJSON) addEndpoints(v *View) {
	for _, e := range v.Endpoints {
		j := EndpointJSON{Address: e.Addr().String(), Port: e.Port(), Node: e.Node, Zone: e.Zone, Chance: e.Chance,
			Weight: e.Weight, Source: validText(e.Source), Draining: e.Draining, Unhealthy: e.Kept,
			Starting: e.Starting, Trouble: e.Trouble, Connections: e.Connections}
		if e.SourceSeen != nil {
			j.Sees = e.SourceSeen.String()
		}
		out.Endpoints = append(out.Endpoints, j)
	}
	for _, l := range v.Excluded {
		j := LeftOutJSON{Node: l.Node, Zone: l.Zone, Slice: l.Slice, Reason: l.Reason, Why: l.Why}
		if l.IsValid() {
			j.Address, j.Port = l.Addr().String(), l.Port()
		}
		out.LeftOut = append(out.LeftOut, j)
	}
}

// endpoints returns a word for the endpoints that a row leads to.
func (r *Row) endpoints() string {
	if r.Local {
		return "local"
	}
	return "cluster"
}

// name is that of the service port; empty if it is not known.
func (n *NearMiss) name() string {
	if n.Port == (dataplane.PortName{}) {
		return ""
	}
	return n.Port.String()
}

// validText formats an address, a range or an endpoint; an invalid one becomes "".
func validText(a interface {
	IsValid() bool
	String() string
}) string {
	if !a.IsValid() {
		return ""
	}
	return a.String()
}
