package snapshot

import (
	"fmt"
	"slices"
	"strings"
)

// Scheduling says how a Service wants an endpoint to be chosen for each connection. It is immutable.
type Scheduling struct {
	// Scheduler is the kernel's name of an IPVS scheduler, such as "lc", or one of Random, Hash and NFTables; empty for
	// the node's default.
	Scheduler string
	// Port makes hash, sh and mh hash the client's port, too. Fallback makes sh and mh choose another endpoint if the
	// hashed one is not available.
	Port, Fallback bool
	// Weights are the weights of endpoints by the name of their node; 0 drains them. An endpoint's own Weight takes
	// precedence.
	Weights map[string]uint16
	// PreferNear keeps connections in the node's zone, as far as the endpoints there can carry their share.
	PreferNear bool
	// ZoneDemand is how much of the demand each zone has, relative to the others. A zone that it does not name has 1 if
	// there are endpoints in it, and otherwise none. It means nothing without PreferNear.
	ZoneDemand map[string]uint16
}

// AsksForIPVS says whether a Service names an IPVS scheduler.
func (s *Service) AsksForIPVS() bool {
	return s.Scheduling != nil && slices.Contains(Schedulers, s.Scheduling.Scheduler)
}

// The schedulers that are not IPVS's: the backend chooses, whatever the default is.
const (
	// Random chooses at random, in proportion to the weights.
	Random = "random"
	// Hash chooses by a consistent hash of the client's address.
	Hash = "hash"
	// NFTables is an older name of Random.
	NFTables = "nftables"
)

// Weight is an endpoint's share of new connections relative to that of other endpoints. The zero value says that none
// is given, which counts as DefaultParts.
type Weight struct {
	Given bool
	// Parts is the share in hundredths of that of an endpoint without a weight; 0 means no new connections.
	Parts uint32
}

// DefaultParts are the Parts of an endpoint without a weight: the weight 1.
const DefaultParts = 100

// PartsOf returns the Parts of a weight in Verdict's annotations.
func PartsOf(n uint16) uint32 { return uint32(n) * DefaultParts }

// Schedulers are the kernel's IPVS schedulers, by the kernel's names.
var Schedulers = []string{"rr", "wrr", "lc", "wlc", "fo", "ovf", "lblc", "lblcr", "dh", "sh", "mh", "sed", "nq", "twos"}

// ParseScheduling parses the name of a scheduler with optional flags after it: "hash,port", "mh", "sh,port,fallback".
func ParseScheduling(text string) (Scheduling, error) {
	name, flags, _ := strings.Cut(text, ",")
	s := Scheduling{Scheduler: strings.TrimSpace(name)}
	own := []string{Random, Hash, NFTables}
	if !slices.Contains(own, s.Scheduler) && !slices.Contains(Schedulers, s.Scheduler) {
		return Scheduling{}, fmt.Errorf("%q is unknown: write one of %s, %s", s.Scheduler, strings.Join(own, ", "),
			strings.Join(Schedulers, ", "))
	}
	if flags == "" {
		return s, nil
	}
	for flag := range strings.SplitSeq(flags, ",") {
		flag = strings.TrimSpace(flag)
		known := []string{"port", "fallback"}
		switch s.Scheduler {
		case Hash:
			known = known[:1]
		case "sh", "mh":
		default:
			return Scheduling{}, fmt.Errorf("%s takes no flags; only hash, sh and mh do", s.Scheduler)
		}
		if !slices.Contains(known, flag) {
			return Scheduling{}, fmt.Errorf("%q is not a flag of %s: write %s", flag, s.Scheduler, strings.Join(known, " or "))
		}
		s.Port, s.Fallback = s.Port || flag == "port", s.Fallback || flag == "fallback"
	}
	return s, nil
}
