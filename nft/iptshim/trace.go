package iptshim

import (
	"net/netip"
	"regexp"
	"slices"
	"strings"
	"time"

	"github.com/verdict-proxy/verdict/internal/system/packets"
	"github.com/verdict-proxy/verdict/sync/dataplane"
	"github.com/verdict-proxy/verdict/sync/snapshot"
)

// Trace gives the way of a packet through rules as an Inspector answers it. Recent is that of packets.Chains.
func Trace(c *packets.Chains, p dataplane.Packet, recent func(list string, seconds uint32) bool) (*dataplane.Trace,
	error) {
	x, err := c.Trace(packets.Packet{Source: netip.AddrPortFrom(p.Source, 0), Interface: p.Interface,
		Destination: netip.AddrPortFrom(p.Destination, p.Port), Protocol: packets.Protocol(p.Protocol)}, recent)
	if err != nil {
		return nil, err
	}
	t := &dataplane.Trace{Cause: causeOf(x.Outcomes), Unclear: x.Unclear, Port: portOf(x.Steps, p.Protocol)}
	for i := range x.Outcomes {
		t.Endings = append(t.Endings, endingOf(&x.Outcomes[i], p.Source))
	}
	for i, s := range slices.Concat(x.Steps, x.Later) {
		t.Steps = append(t.Steps, dataplane.TraceStep{Chain: s.Chain, Rule: s.Text, Matched: s.Matched,
			Translated: i >= len(x.Steps)})
	}
	return t, nil
}

// outcomes are what verdicts are called.
var outcomes = [...]dataplane.Outcome{packets.Untouched: dataplane.Untouched, packets.Sent: dataplane.Sent,
	packets.Rejected: dataplane.Rejected, packets.Dropped: dataplane.Dropped}

func endingOf(o *packets.Outcome, source netip.Addr) dataplane.Ending {
	e := dataplane.Ending{Outcome: outcomes[o.Verdict], Endpoint: o.To, Masquerade: o.Masqueraded, Remembered: o.Recalled,
		Hairpin: o.Masqueraded && source == o.To.Addr(), Remember: time.Duration(o.Remembered) * time.Second}
	e.Share, e.Of = o.Chance.Short()
	return e
}

// portComment begins the comment of a rule that belongs to a service port.
var portComment = regexp.MustCompile(`--comment "([^ "/]+/[^ "]+?)(?: [^"]*)?"`)

// portOf finds the service port by the comments of the rules that the packet met; it has no name if there is none.
func portOf(steps []*packets.Step, protocol snapshot.Protocol) (n dataplane.PortName) {
	for _, s := range steps {
		if !s.Matched || strings.Contains(s.Text, noSuchPort) {
			continue
		}
		if m := portComment.FindStringSubmatch(s.Text); m != nil {
			if n, ok := dataplane.ParsePortName(m[1], protocol); ok {
				return n
			}
		}
	}
	return n
}

// causeOf says why, as far as the rules tell.
func causeOf(list []packets.Outcome) dataplane.Cause {
	if slices.ContainsFunc(list, func(o packets.Outcome) bool { return o.Verdict == packets.Sent }) {
		return dataplane.FrontendFound
	}
	for _, o := range list {
		switch by := o.Last.Decided(); {
		case o.Verdict == packets.Untouched:
			continue
		case by.Chain == loopbackChain:
			return dataplane.FromOutsideToLoopback
		case by.Chain == firewallChain || strings.Contains(by.Text, notOpen):
			return dataplane.SourceRefused
		case by.Chain == clusterIPsChain && o.Verdict == packets.Dropped:
			return dataplane.Unallocated
		case by.Chain == clusterIPsChain || strings.HasPrefix(by.Chain, clusterIPsPrefix):
			return dataplane.UnusedPort
		case o.Verdict == packets.Dropped:
			return dataplane.NoLocalEndpoints
		default:
			return dataplane.NoEndpoints
		}
	}
	return dataplane.NotService
}
