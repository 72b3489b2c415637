package inspect

import (
	"encoding/json"
	"io"
	"time"

	"github.com/verdict-proxy/verdict/internal/system/terminal"
	"github.com/verdict-proxy/verdict/sync/dataplane"
)

// WriteJSON prints an answer as JSON.
func WriteJSON(w io.Writer, v any) error {
	e := json.NewEncoder(terminal.NewPrinter(w))
	e.SetIndent("", "  ")
	e.SetEscapeHTML(false)
	return e.Encode(v)
}

// SampleJSON is a Sample as JSON: docs/ANSWERS.md.
type SampleJSON struct {
	Interval float64 `json:"intervalSeconds"`
	Rate     float64 `json:"rate"`
	// PortCount is how many service ports there are; Ports may have fewer.
	PortCount int              `json:"portCount"`
	Ports     []PortSampleJSON `json:"ports"`
	Counted   string           `json:"counted,omitempty"`
}

// PortSampleJSON is a PortSample as JSON.
type PortSampleJSON struct {
	Service    string               `json:"service"`
	Port       string               `json:"port,omitempty"`
	Rate       float64              `json:"rate"`
	Total      uint64               `json:"total"`
	NotCounted bool                 `json:"notCounted,omitempty"`
	Choices    int                  `json:"endpointCount"`
	AtMost     bool                 `json:"endpointCountAtMost,omitempty"`
	Scheduled  bool                 `json:"scheduled,omitempty"`
	IPVS       *SchedulerJSON       `json:"ipvs,omitempty"`
	Frontends  []FrontendSampleJSON `json:"frontends"`
	Endpoints  []EndpointSampleJSON `json:"endpoints,omitempty"`
	Ejected    []EjectedJSON        `json:"ejected,omitempty"`
}

// EjectedJSON is an ejected endpoint as JSON.
type EjectedJSON struct {
	Address string    `json:"address"`
	Port    uint16    `json:"port"`
	Cause   string    `json:"cause"`
	Since   time.Time `json:"since"`
}

// FrontendSampleJSON is a FrontendSample as JSON.
type FrontendSampleJSON struct {
	Address  string  `json:"address"`
	Port     uint16  `json:"port"`
	Protocol string  `json:"protocol"`
	Outside  bool    `json:"outside,omitempty"`
	Rate     float64 `json:"rate"`
	Total    uint64  `json:"total"`
}

// EndpointSampleJSON is an EndpointSample as JSON.
type EndpointSampleJSON struct {
	Address string         `json:"address"`
	Port    uint16         `json:"port"`
	Rate    float64        `json:"rate"`
	Total   uint64         `json:"total"`
	IPVS    *SchedulerJSON `json:"ipvs,omitempty"`
}

// SchedulerJSON is a dataplane.SchedulerCount as JSON.
type SchedulerJSON struct {
	Active         uint64 `json:"active"`
	Inactive       uint64 `json:"inactive"`
	Weight         uint32 `json:"weight"`
	PacketsIn      uint64 `json:"packetsIn"`
	PacketsOut     uint64 `json:"packetsOut"`
	BytesIn        uint64 `json:"bytesIn"`
	BytesOut       uint64 `json:"bytesOut"`
	PacketRateIn   uint64 `json:"packetRateIn"`
	PacketRateOut  uint64 `json:"packetRateOut"`
	ByteRateIn     uint64 `json:"byteRateIn"`
	ByteRateOut    uint64 `json:"byteRateOut"`
	ConnectionRate uint64 `json:"connectionRate"`
}

// JSON gives the form that is printed, with the first shown ports at most.
func (s *Sample) JSON(shown int) *SampleJSON {
	out := &SampleJSON{Interval: s.Interval.Seconds(), Rate: s.Rate, Counted: s.Counted, PortCount: len(s.Ports),
		Ports: make([]PortSampleJSON, min(shown, len(s.Ports)))}
	for i := range out.Ports {
		out.Ports[i] = s.Ports[i].json()
	}
	return out
}

func (p *PortSample) json() PortSampleJSON {
	out := PortSampleJSON{Service: p.Name, Rate: p.Rate, Total: p.Total, Choices: p.Choices, AtMost: p.AtMost,
		Scheduled: p.Scheduled, NotCounted: p.NotCounted, IPVS: schedulerJSON(p.Scheduler)}
	if p.Port != (dataplane.PortName{}) {
		out.Service, out.Port = p.Port.Service.String(), p.Port.Port
	}
	for _, f := range p.Frontends {
		out.Frontends = append(out.Frontends, FrontendSampleJSON{f.Key.Addr.String(), f.Key.Port, f.Key.Protocol.String(),
			f.Outside,
			f.Rate, f.Total})
	}
	for _, e := range p.Endpoints {
		out.Endpoints = append(out.Endpoints, EndpointSampleJSON{e.Addr().String(), e.AddrPort.Port(), e.Rate, e.Total,
			schedulerJSON(e.Scheduler)})
	}
	for _, o := range p.Ejected {
		out.Ejected = append(out.Ejected,
			EjectedJSON{o.Endpoint.Addr().String(), o.Endpoint.Port(), o.Cause.String(), o.Since})
	}
	return out
}

func schedulerJSON(c *dataplane.SchedulerCount) *SchedulerJSON {
	if c == nil {
		return nil
	}
	return &SchedulerJSON{c.Active, c.Inactive, c.Weight, c.PacketsIn, c.PacketsOut, c.BytesIn, c.BytesOut, c.PacketRateIn,
		c.PacketRateOut, c.ByteRateIn, c.ByteRateOut, c.ConnectionRate}
}
