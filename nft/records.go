package nft

import (
	"fmt"
	"slices"

	"github.com/verdict-proxy/verdict/internal/system/ipfamily"
	"github.com/verdict-proxy/verdict/sync/snapshot"
)

// RecordsGroup is the group of nflog that rules log to while connections are recorded. RecordsSnaplen is how many bytes
// of a packet they log: its headers. RecordsRate is how many packets each rule logs in a second of those that are
// rejected or dropped.
const (
	RecordsGroup   = 8650
	RecordsSnaplen = 64
	RecordsRate    = 1000
)

// The prefixes of what rules log. Behind the other two stands the name of a chain.
const (
	LoggedReset    = "reset"
	LoggedRejected = "rejected "
	LoggedDropped  = "dropped "
)

// Log sends the beginning of a packet to RecordsGroup. If Bounded, the rule does not match beyond RecordsRate.
type Log struct {
	Prefix  string
	Bounded bool
}

func (s Log) text(ipfamily.Family) string {
	text := fmt.Sprintf("log prefix %q group %d snaplen %d", s.Prefix, RecordsGroup, RecordsSnaplen)
	if s.Bounded {
		text = fmt.Sprintf("limit rate %d/second burst %d packets ", RecordsRate, RecordsRate) + text
	}
	return text
}

// logRefusals puts before each rule that rejects or drops one that logs the same packets.
func logRefusals(chains []Chain) []Chain {
	for i := range chains {
		c := &chains[i]
		if c.ID.Kind == GuardLoopback { // which guards the host, and no Service
			continue
		}
		var rules []Rule
		for _, r := range c.Rules {
			if prefix := refusalOf(r); prefix != "" {
				rules = append(rules, append(matchesOf(r), Log{Prefix: prefix + c.ID.Name(), Bounded: true}))
			}
			rules = append(rules, r)
		}
		c.Rules = rules
	}
	return chains
}

// refusalOf returns the prefix for what a rule rejects or drops; empty if it does neither.
func refusalOf(r Rule) string {
	switch r[len(r)-1].(type) {
	case Reset, Reject:
		return LoggedRejected
	case Drop:
		return LoggedDropped
	}
	return ""
}

// matchesOf returns what a rule does before it counts, and rejects or drops. A Reset alone matches TCP.
func matchesOf(r Rule) Rule {
	if _, ok := r[0].(Reset); ok {
		return Rule{ProtocolIs{snapshot.TCP}}
	}
	return slices.DeleteFunc(slices.Clone(r[:len(r)-1]), func(s Statement) bool { _, ok := s.(Counter); return ok })
}

// recordResets returns the chains that log the resets of connections, where both sides have their own addresses. They
// come before those of evidence, which drop some.
func recordResets() []Chain {
	hook := func(name string) *Hook { return &Hook{"filter", name, prioritySrcNAT - 11} }
	reset := Rule{TCPFlags{Of: FlagRST, Are: FlagRST}, Translated{}}
	return []Chain{
		{ID: RecordResets.id(), Hook: hook("postrouting"), Comment: "who resets a connection",
			Rules: []Rule{append(slices.Clip(reset), Log{Prefix: LoggedReset})}},
		{ID: RecordResetsInput.id(), Hook: hook("input"), Comment: "the same for clients on this node",
			Rules: []Rule{append(slices.Clip(reset), OtherInterface{"lo"}, Log{Prefix: LoggedReset})}},
	}
}
