package node

import (
	"maps"
	"net/netip"
	"slices"
	"time"

	"github.com/verdict-proxy/verdict/sync/snapshot"
)

// slowStartReport lists the endpoints that start slowly, by Service, sorted.
type slowStartReport struct {
	Services []startingService `json:"services"`
	// Truncated says that there are more.
	Truncated bool `json:"truncated,omitempty"`
}

type startingService struct {
	Service   string             `json:"service"`
	Endpoints []startingEndpoint `json:"endpoints"`
}

// startingEndpoint has port 0 if it stands for all ports of the address.
type startingEndpoint struct {
	Endpoint netip.AddrPort `json:"endpoint"`
	// Tenths of its share are what it gets.
	Tenths uint8     `json:"tenths"`
	Full   time.Time `json:"full"`
}

// maxStartingReported bounds the endpoints of a report.
const maxStartingReported = 16384

func reportSlowStarts(starting map[snapshot.Name]*snapshot.Starting) slowStartReport {
	r, left := slowStartReport{Services: []startingService{}}, maxStartingReported
	for _, name := range slices.SortedFunc(maps.Keys(starting), snapshot.Name.Compare) {
		s := startingService{Service: name.String()}
		for _, e := range starting[name].Endpoints[:min(left, len(starting[name].Endpoints))] {
			s.Endpoints = append(s.Endpoints, startingEndpoint{e.Endpoint, e.Tenths, e.Full.UTC()})
		}
		left -= len(s.Endpoints)
		r.Truncated = r.Truncated || len(s.Endpoints) < len(starting[name].Endpoints)
		if len(s.Endpoints) > 0 {
			r.Services = append(r.Services, s)
		}
	}
	return r
}

func countStarting(starting map[snapshot.Name]*snapshot.Starting) (n int) {
	for _, s := range starting {
		n += len(s.Endpoints)
	}
	return n
}
