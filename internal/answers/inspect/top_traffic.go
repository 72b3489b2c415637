package inspect

import (
	"context"
	"net/netip"
	"time"

	"github.com/verdict-proxy/verdict/internal/answers/records"
	"github.com/verdict-proxy/verdict/internal/proxy/flows"
)

// Traffic is what the clients of a port sent and received, in bytes per second.
type Traffic struct {
	Sent     float64 `json:"sentBytesPerSecond"`
	Received float64 `json:"receivedBytesPerSecond"`
}

// trafficMeter holds what records say of the last whole minute that was asked about: sums have no finer grain.
type trafficMeter struct {
	minute time.Time
	ports  map[[2]string]Traffic // by Service and port; nil if nothing was recorded
}

// read asks for the last whole minute, if it is another one than before, at the address of the metrics server. What is
// not whole, as the minute in which records were switched on, is not shown.
func (t *trafficMeter) read(ctx context.Context, addr netip.AddrPort, now time.Time) {
	minute := now.Truncate(time.Minute).Add(-time.Minute)
	if minute.Equal(t.minute) {
		return
	}
	ports := map[[2]string]Traffic{}
	ctx, cancel := context.WithTimeout(ctx, recordsTimeout)
	defer cancel()
	q := records.Question{Sums: true, Since: time.Minute}
	a, err := records.Read(ctx, addr, &q, func(s *flows.Sum) {
		if s.Minute.Equal(minute) {
			key := [2]string{s.Service, s.Port}
			of := ports[key]
			of.Sent += float64(s.Sent.Bytes) / 60
			of.Received += float64(s.Received.Bytes) / 60
			ports[key] = of
		}
	})
	if t.minute, t.ports = minute, ports; err != nil || a.Left > 0 || a.Started.After(minute) {
		t.ports = nil
	}
}

// readBy asks what asked for Services' backends, once a minute.
func (s *Sampler) readBy(ctx context.Context) {
	if !s.Health.IsValid() || s.now().Sub(s.byRead) < time.Minute {
		return
	}
	s.byRead = s.now()
	if all, err := LoadServices(ctx, s.Health, ServicesAsked{For: true}); err == nil { // else top says what it knew
		s.by = map[string]string{}
		for i := range all.Services {
			s.by[all.Services[i].Service] = all.Services[i].For
		}
	}
}

// of returns the traffic of a port; nil if nothing was recorded.
func (t *trafficMeter) of(service, port string) *Traffic {
	if t.ports == nil {
		return nil
	}
	of := t.ports[[2]string{service, port}]
	return &Traffic{rounded(of.Sent), rounded(of.Received)}
}

// heads is the line of the names of columns.
func (s *Sample) heads(width int) string {
	var traffic []string
	if s != nil && !s.TrafficMinute.IsZero() {
		traffic = []string{"SENT/S", "RECV/S"}
	}
	return topLine(width, "CONN/S", "TOTAL", "ENDPOINTS", traffic, "SERVICE")
}

// blank are the cells of lines that have no traffic beside those that have.
func (t *Traffic) blank() []string { return make([]string, len(t.texts())) }

// texts are the cells of traffic; none if it is not known.
func (t *Traffic) texts() []string {
	if t == nil {
		return nil
	}
	return []string{bytesText(uint64(t.Sent)), bytesText(uint64(t.Received))}
}
