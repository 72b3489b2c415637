package flows

import (
	"time"

	"github.com/verdict-proxy/verdict/internal/proxy/conntrack"
	"github.com/verdict-proxy/verdict/sync/snapshot"
)

// endOf says how a flow ended, from what the kernel knows of it alone. A Reset is by a side that is not known here.
func endOf(f *conntrack.Flow) End {
	switch f.Frontend.Protocol {
	case snapshot.TCP:
		return endOfTCP(f)
	case snapshot.SCTP:
		switch {
		case !f.Answered:
			return Unanswered
		case f.State == conntrack.SCTPEstablished:
			return TimedOut
		}
		return Closed
	}
	if !f.Answered {
		return Unanswered
	}
	return Expired
}

// endOfTCP says how a connection ended. The kernel forgets one that its endpoint answers with a reset at once, before
// it takes that for an answer.
func endOfTCP(f *conntrack.Flow) End {
	switch {
	case f.State == conntrack.TCPClose && !f.Answered && (f.Received.Packets > 0 || !f.Counted):
		return Refused
	case !f.Answered:
		return Unanswered
	case f.State == conntrack.TCPClose:
		return Reset
	case f.State == conntrack.TCPEstablished || f.State == conntrack.TCPSynReceived:
		return TimedOut
	}
	return Closed
}

// timeouts are how long the kernel keeps an entry after its last packet, by the names of sysctls.
type timeouts map[string]time.Duration

// statesTCP and statesSCTP are the ends of those names by the states, in the kernel's order.
var (
	statesTCP = [...]string{"", "syn_sent", "syn_recv", "established", "fin_wait", "close_wait", "last_ack", "time_wait",
		"close", "syn_sent"}
	statesSCTP = [...]string{"", "closed", "cookie_wait", "cookie_echoed", "established", "shutdown_sent", "shutdown_recd",
		"shutdown_ack_sent", "heartbeat_sent"}
)

// readTimeouts reads all of them. What cannot be read is missing.
func readTimeouts(sysctl func(name string) (int, error)) timeouts {
	t := timeouts{}
	read := func(name string) {
		if seconds, err := sysctl("nf_conntrack_" + name); err == nil {
			t[name] = time.Duration(seconds) * time.Second
		}
	}
	for _, state := range statesTCP[1:] {
		read("tcp_timeout_" + state)
	}
	for _, state := range statesSCTP[1:] {
		read("sctp_timeout_" + state)
	}
	read("tcp_timeout_unacknowledged")
	read("udp_timeout")
	read("udp_timeout_stream")
	return t
}

// waited returns how long there was no packet before an entry ended. It is a guess if others than sysctls set the
// timeouts, or if the entry's last packet did not renew it.
func (t timeouts) waited(f *conntrack.Flow) time.Duration {
	name := "udp_timeout"
	switch p, state := f.Frontend.Protocol, int(f.State); {
	case p == snapshot.TCP && state < len(statesTCP):
		name = "tcp_timeout_" + statesTCP[state]
	case p == snapshot.SCTP && state < len(statesSCTP):
		name = "sctp_timeout_" + statesSCTP[state]
	case f.Assured:
		name += "_stream"
	}
	return max(t[name]-f.Left, 0)
}

// lived returns when an entry had its last packet, and how long that was after the first; 0 if that is not known.
func (t timeouts) lived(f *conntrack.Flow, now time.Time) (last time.Time, seconds float64) {
	if f.Stop.IsZero() {
		return now.Add(-t.waited(f)), 0
	}
	last = f.Stop.Add(-t.waited(f))
	if f.Start.IsZero() {
		return last, 0
	}
	if last.Before(f.Start) { // data was not acknowledged, for which the kernel waits less long
		last = f.Stop.Add(-t["tcp_timeout_unacknowledged"])
	}
	if last.Before(f.Start) {
		last = f.Start
	}
	return last, last.Sub(f.Start).Seconds()
}
