package main

import (
	"fmt"
	"net/netip"

	"github.com/verdict-proxy/verdict/internal/units"
	"github.com/verdict-proxy/verdict/ipvsplugin"
)

// topIPVS is what IPVS says of a service port or of an endpoint of one. Rates are those of the kernel, a second each, which follow some
// seconds behind.
type topIPVS struct {
	// Active and Inactive are connections now, and Weight the endpoint's; 0 of a port, and of an endpoint that drains.
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

func (t *topIPVS) add(s *ipvsplugin.Statistics) {
	t.PacketsIn += s.PacketsIn
	t.PacketsOut += s.PacketsOut
	t.BytesIn += s.BytesIn
	t.BytesOut += s.BytesOut
	t.PacketRateIn += s.PacketRateIn
	t.PacketRateOut += s.PacketRateOut
	t.ByteRateIn += s.ByteRateIn
	t.ByteRateOut += s.ByteRateOut
	t.ConnectionRate += s.ConnectionRate
}

// text is what stands behind the name.
func (t *topIPVS) text() string {
	return fmt.Sprintf("%s open, in %s/s, out %s/s", units.Thousands(int(t.Active)), bytesText(t.ByteRateIn), bytesText(t.ByteRateOut))
}

// bytesText writes a number of bytes.
func bytesText(n uint64) string {
	value, units := float64(n), []string{"B", "kB", "MB", "GB", "TB"}
	i := 0
	for ; value >= 1000 && i < len(units)-1; i++ {
		value /= 1000
	}
	if i == 0 {
		return fmt.Sprintf("%d B", n)
	}
	return fmt.Sprintf("%.1f %s", value, units[i])
}

// scheduled reads what IPVS has counted of a frontend and its endpoints.
func (s *sampler) scheduled(p *portMeter, m *frontendMeter, at func(netip.AddrPort) *endpointMeter) error {
	k := m.element.FrontendKey()
	vs, there, err := s.ipvs(k)
	if err != nil || !there {
		return err
	}
	if p.ipvs == nil {
		p.ipvs = &topIPVS{}
	}
	p.ipvs.add(&vs.Statistics)
	for i := range vs.Destinations {
		d := &vs.Destinations[i]
		key, reading := "ipvs "+k.String(), &meter{}
		if before := p.endpoints[d.AddrPort]; before != nil && before.elements[key] != nil {
			reading = before.elements[key]
		}
		reading.read(d.Connections, s.now())
		ep := at(d.AddrPort)
		ep.elements[key] = reading
		if ep.ipvs == nil {
			ep.ipvs = &topIPVS{}
		}
		ep.ipvs.add(&d.Statistics)
		ep.ipvs.Weight = d.Weight
		ep.ipvs.Active += uint64(d.Active)
		ep.ipvs.Inactive += uint64(d.Inactive)
		p.ipvs.Active += uint64(d.Active)
		p.ipvs.Inactive += uint64(d.Inactive)
	}
	s.read += len(vs.Destinations)
	return nil
}
