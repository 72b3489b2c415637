package health

import (
	"encoding/json"
	"net/http"
	"time"
)

// Probe is one of the questions that the health server answers.
type Probe uint8

// The probes.
const (
	// Healthz: are the rules in and fresh, and may clients be sent to this node? For load balancers, which ask kube-proxy
	// the same.
	Healthz Probe = iota
	// Livez: is there no reason to start the proxy again?
	Livez
	// Readyz: are the rules in and fresh, whatever becomes of the node? For the pod's own readiness.
	Readyz
)

var probeNames = [...]string{"healthz", "livez", "readyz"}

func (p Probe) String() string { return probeNames[p] }

// answer is the body, with kube-proxy's fields first.
type answer struct {
	LastUpdated  time.Time               `json:"lastUpdated"`
	CurrentTime  time.Time               `json:"currentTime"`
	NodeEligible *bool                   `json:"nodeEligible,omitempty"`
	Healthy      bool                    `json:"healthy"`
	Status       map[string]familyAnswer `json:"status,omitempty"`
	// Missing describes why the status is not 200. Error texts contain names and addresses, so they are only in the log:
	// anybody who reaches the node can read this.
	Missing     []string `json:"missing,omitempty"`
	Quarantined int      `json:"quarantined,omitempty"`
	Unread      int      `json:"unread,omitempty"`
}

type familyAnswer struct {
	LastUpdated time.Time `json:"lastUpdated"`
	Healthy     bool      `json:"healthy"`
}

// Handler answers /healthz, /livez and /readyz. After each answer it calls answered, which may be nil.
func (p *Proxy) Handler(answered func(probe Probe, code int)) http.Handler {
	mux := http.NewServeMux()
	for _, probe := range []Probe{Healthz, Livez, Readyz} {
		mux.HandleFunc("/"+probe.String(), func(w http.ResponseWriter, _ *http.Request) {
			status := p.Status()
			code, body := status.answer(probe)
			if answered != nil {
				answered(probe, code)
			}
			text, _ := json.Marshal(body) // of such types it cannot fail
			writeJSON(w, code, text)
		})
	}
	return mux
}

// AnswerJSON answers a request with a value as a line of JSON.
func AnswerJSON(w http.ResponseWriter, code int, v any) {
	text, _ := json.Marshal(v) // of types that are made for it, it cannot fail
	writeJSON(w, code, append(text, '\n'))
}

func writeJSON(w http.ResponseWriter, code int, body []byte) {
	w.Header().Set("Content-Type", "application/json")
	w.Header().Set("X-Content-Type-Options", "nosniff")
	w.WriteHeader(code)
	_, _ = w.Write(body) // whoever asked may have left
}

// answer returns the response to a probe. As in kube-proxy, lastUpdated is the current time while all is well, and
// healthy does not depend on the node. Both families are written in the same transactions, so they have the same
// values.
func (s *Status) answer(probe Probe) (code int, a answer) {
	a = answer{
		LastUpdated: s.Updated,
		CurrentTime: s.Now,
		Healthy:     s.Healthy(),
		Missing:     s.Missing,
		Quarantined: s.Quarantined,
		Unread:      s.Unread,
	}
	if !s.Updated.IsZero() {
		family := familyAnswer{s.Updated, s.Healthy()}
		a.Status = map[string]familyAnswer{"IPv4": family, "IPv6": family}
	}
	ok := a.Healthy
	switch probe {
	case Healthz:
		a.NodeEligible, ok = &s.Eligible, ok && s.Eligible
		if !s.Eligible {
			a.Missing = append(a.Missing, s.Leaving)
		}
	case Livez:
		ok = s.Alive()
		a.Healthy = ok
	}
	if !ok {
		return http.StatusServiceUnavailable, a
	}
	if a.Healthy && !s.Updated.IsZero() {
		a.LastUpdated = s.Now
	}
	return http.StatusOK, a
}
