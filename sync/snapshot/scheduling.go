package snapshot

import (
	"fmt"
	"slices"
	"strings"
)

// Scheduling says how IPVS spreads a Service's connections. It is immutable.
type Scheduling struct {
	// Scheduler is the kernel's name of an IPVS scheduler, such as "lc", or NFTables.
	Scheduler string
	// Port makes sh and mh hash the client's port, too. Fallback makes them choose another endpoint if the hashed one is
	// not available.
	Port, Fallback bool
	// Weights are the weights of endpoints by the name of their node. An endpoint's own Weight takes precedence.
	Weights map[string]uint16
}

// AsksForIPVS says whether a Service names an IPVS scheduler.
func (s *Service) AsksForIPVS() bool {
	return s.Scheduling != nil && s.Scheduling.Scheduler != "" && s.Scheduling.Scheduler != NFTables
}

// NFTables is the Scheduler of a Service that IPVS must not schedule, whatever the default is.
const NFTables = "nftables"

// Schedulers are the kernel's IPVS schedulers, by the kernel's names.
var Schedulers = []string{"rr", "wrr", "lc", "wlc", "fo", "ovf", "lblc", "lblcr", "dh", "sh", "mh", "sed", "nq", "twos"}

// ParseScheduling parses the name of a scheduler, or "nftables", with optional flags after it: "mh",
// "sh,port,fallback".
func ParseScheduling(text string) (Scheduling, error) {
	name, flags, _ := strings.Cut(text, ",")
	s := Scheduling{Scheduler: strings.TrimSpace(name)}
	if s.Scheduler != NFTables && !slices.Contains(Schedulers, s.Scheduler) {
		return Scheduling{},
			fmt.Errorf("%q is unknown: write one of %s, %s", s.Scheduler, NFTables, strings.Join(Schedulers, ", "))
	}
	if flags == "" {
		return s, nil
	}
	for flag := range strings.SplitSeq(flags, ",") {
		switch flag = strings.TrimSpace(flag); {
		case s.Scheduler != "sh" && s.Scheduler != "mh":
			return Scheduling{}, fmt.Errorf("%s takes no flags; only sh and mh do", s.Scheduler)
		case flag == "port":
			s.Port = true
		case flag == "fallback":
			s.Fallback = true
		default:
			return Scheduling{}, fmt.Errorf("%q is not a flag of %s: write port or fallback", flag, s.Scheduler)
		}
	}
	return s, nil
}
