// Package history says what was written to the Kubernetes API and what connections saw meanwhile, and checks how stale
// a Service proxy was. It knows neither the API nor packets: a history is plain data. docs/evidence/HISTORY.md explains
// the format and the rules.
package history

import (
	"fmt"
	"time"
)

// Format is the first word of every history. Another one means another format.
const Format = "verdict-history/1"

// History is all that was recorded. All times are microseconds since it began, on one monotonic clock. Beginnings are
// rounded down and ends up, so that an interval holds what it stands for.
type History struct {
	Header Header
	Serves []Serve
	Writes []Write
	Conns  []Conn
	Faults []Fault
	// Rest is a time after which nothing was written, and the proxies had had time to take in everything; 0 if there was
	// none.
	Rest int64
}

// Header says what was recorded. Its fields are for people; the checker reads none of them.
type Header struct {
	Format   string `json:"format"`
	Proxy    string `json:"proxy"`
	Version  string `json:"version"`
	Scenario string `json:"scenario"`
	// Seed decides what is changed and after which pauses. When it happens exactly is up to the machine.
	Seed  uint64    `json:"seed"`
	Began time.Time `json:"began"`
	// Load is the load average of the machine over a minute, before the history.
	Load float64 `json:"load"`
}

// Serve says who answers at an address from a time on. Each name comes once: if an address is given to another
// Service, its server gets another name.
type Serve struct {
	At       int64  `json:"at"`
	Address  string `json:"address"` // 10.244.1.10:9400
	Endpoint string `json:"endpoint"`
	Service  string `json:"service"`
}

// Write is one write to the API server: a Service or an EndpointSlice, whole. It took effect between the two times. It
// was repeated, unchanged, until it was acknowledged; Sent is when it was first sent.
type Write struct {
	Sent    int64  `json:"sent"`
	Acked   int64  `json:"acked"`
	Service string `json:"service"`
	// Slice names an EndpointSlice; empty means that the Service itself was written.
	Slice string `json:"slice,omitempty"`
	// Gone says that the object was deleted.
	Gone bool `json:"gone,omitempty"`
	// Affinity is the timeout of a Service's session affinity in seconds, 0 if it has none.
	Affinity int `json:"affinity,omitempty"`
	// Endpoints are those of an EndpointSlice.
	Endpoints []Endpoint `json:"endpoints,omitempty"`
	// Tries is how often it was sent; 0 means once.
	Tries int `json:"tries,omitempty"`
}

// Endpoint is one endpoint of an EndpointSlice.
type Endpoint struct {
	Address string `json:"address"`
	State   State  `json:"state"`
}

// State is what an EndpointSlice says of an endpoint.
type State string

// The states. Serving is terminating, and serving still: it gets connections if no endpoint of the Service is ready.
const (
	Ready       State = "ready"
	Unready     State = "unready"
	Serving     State = "serving"
	Terminating State = "terminating"
)

// Conn is one attempt to connect to a Service.
type Conn struct {
	Begin   int64  `json:"begin"`
	End     int64  `json:"end"`
	Service string `json:"service"`
	// Client is the client's address, Node the node whose proxy decided.
	Client  string  `json:"client"`
	Node    string  `json:"node"`
	Outcome Outcome `json:"outcome"`
	// Endpoint is the name of who answered, At the address at which it was reached. They are empty if nobody did.
	Endpoint string `json:"endpoint,omitempty"`
	At       string `json:"at,omitempty"`
	// Error is what the client's kernel said if the attempt could not be made; such an attempt proves nothing.
	Error string `json:"error,omitempty"`
}

// Outcome is what became of a Conn.
type Outcome string

// The outcomes.
const (
	Answered Outcome = "answered"
	Refused  Outcome = "refused"
	TimedOut Outcome = "timed-out"
	Failed   Outcome = "failed"
)

// Fault is a time in which a proxy could hear nothing: it did not run, or the API server was gone.
type Fault struct {
	From int64 `json:"from"`
	To   int64 `json:"to"`
	// Node is whose proxy it was; empty means all.
	Node string `json:"node,omitempty"`
	What string `json:"what"`
}

// String gives a line for people.
func (s Serve) String() string {
	return fmt.Sprintf("%s  %s answers at %s for %s", clock(s.At), s.Endpoint, s.Address, s.Service)
}

// String gives a line for people.
func (w Write) String() string {
	what := fmt.Sprintf("Service, affinity %d s", w.Affinity)
	if w.Slice != "" {
		what = fmt.Sprintf("slice %s: %v", w.Slice, w.Endpoints)
	}
	if w.Gone {
		what += " deleted"
	}
	return fmt.Sprintf("%s  write %s, acknowledged %s, %s", clock(w.Sent), w.Service, clock(w.Acked), what)
}

// String gives "10.244.1.10:9400=ready".
func (e Endpoint) String() string { return e.Address + "=" + string(e.State) }

// String gives a line for people.
func (c Conn) String() string {
	out := string(c.Outcome)
	if c.Outcome == Answered {
		out = fmt.Sprintf("answered by %s at %s", c.Endpoint, c.At)
	}
	return fmt.Sprintf("%s  connection of %s on %s to %s, until %s: %s", clock(c.Begin), c.Client, c.Node, c.Service,
		clock(c.End), out)
}

// String gives a line for people.
func (f Fault) String() string {
	node := ""
	if f.Node != "" {
		node = " on " + f.Node
	}
	return fmt.Sprintf("%s  %s%s, until %s", clock(f.From), f.What, node, clock(f.To))
}

// clock prints a time of a history in seconds: "12.345678".
func clock(us int64) string { return fmt.Sprintf("%.6f", float64(us)/1e6) }

// usable gives the addresses that new connections may be sent to: the ready ones, or if there are none, those that
// terminate and still serve.
func usable(endpoints []Endpoint) map[string]bool {
	for _, state := range []State{Ready, Serving} {
		set := make(map[string]bool)
		for _, e := range endpoints {
			if e.State == state {
				set[e.Address] = true
			}
		}
		if len(set) > 0 {
			return set
		}
	}
	return nil
}
