package status

import (
	"maps"
	"slices"

	"github.com/verdict-proxy/verdict/sync/dataplane"
	"github.com/verdict-proxy/verdict/sync/snapshot"
)

// ClientAddresses are the Services that are to keep their clients' addresses with externalTrafficPolicy Cluster.
type ClientAddresses struct {
	// Kept counts those that do on this node, and Masqueraded those of which some clients are masqueraded nevertheless.
	Kept        int `json:"kept"`
	Masqueraded int `json:"masqueraded"`
	// Services are the first maxNamed of those that are masqueraded, by name.
	Services []MasqueradedService `json:"services,omitempty"`
}

// MasqueradedService is one of them. Reason is a word, and Why says it in a clause.
type MasqueradedService struct {
	Service string `json:"service"`
	Reason  string `json:"reason"`
	Why     string `json:"why"`
}

// noteClients takes over whether a Service that was programmed keeps its clients' addresses. The caller has locked mu.
func (t *Tracker) noteClients(n snapshot.Name, is *dataplane.Service) {
	if why := is.NotKept(); why != dataplane.KeptOrNotAsked || is.Keeps() {
		t.keeping[n] = why
	} else {
		delete(t.keeping, n)
	}
}

// ClientAddresses counts the Services that are to keep their clients' addresses: those that do, and those that do not.
func (t *Tracker) ClientAddresses() (kept, masqueraded int) {
	t.mu.Lock()
	defer t.mu.Unlock()
	for why := range maps.Values(t.keeping) {
		if why == dataplane.KeptOrNotAsked {
			kept++
		}
	}
	return kept, len(t.keeping) - kept
}

// clients returns what the status says of them; nil if there are none. The caller has locked mu.
func (t *Tracker) clients() *ClientAddresses {
	if len(t.keeping) == 0 {
		return nil
	}
	out := &ClientAddresses{}
	for _, n := range slices.SortedFunc(maps.Keys(t.keeping), snapshot.Name.Compare) {
		why := t.keeping[n]
		if why == dataplane.KeptOrNotAsked {
			out.Kept++
			continue
		}
		if out.Masqueraded++; len(out.Services) < maxNamed {
			out.Services = append(out.Services, MasqueradedService{n.String(), why.String(), why.Text()})
		}
	}
	return out
}
