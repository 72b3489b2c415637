package node

import (
	"maps"
	"slices"

	"github.com/verdict-proxy/verdict/internal/proxy/status"
	"github.com/verdict-proxy/verdict/sync/snapshot"
)

// maxStartingReported bounds the endpoints of a report.
const maxStartingReported = 16384

func reportSlowStarts(starting map[snapshot.Name]*snapshot.Starting) status.SlowStarts {
	r, left := status.SlowStarts{Services: []status.StartingService{}}, maxStartingReported
	for _, name := range slices.SortedFunc(maps.Keys(starting), snapshot.Name.Compare) {
		s := status.StartingService{Service: name.String()}
		for _, e := range starting[name].Endpoints[:min(left, len(starting[name].Endpoints))] {
			e.Full = e.Full.UTC()
			s.Endpoints = append(s.Endpoints, e)
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
