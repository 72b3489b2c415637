package snapshot

import (
	"fmt"
	"slices"
	"strings"
)

// Scheduling says how a Service's connections are to be spread. It is immutable.
type Scheduling struct {
	// Scheduler is the kernel's name of one of IPVS, such as "lc"; or NFTables.
	Scheduler string
	// Port has sh and mh tell clients apart by their port, too, and Fallback has them go on to another endpoint if the one
	// that was hashed to is of no use.
	Port, Fallback bool
	// Weights are those of endpoints by the name of their node. An endpoint's own Weight goes first.
	Weights map[string]uint16
}

// AsksForIPVS says whether a Service names a scheduler of IPVS.
func (s *Service) AsksForIPVS() bool {
	return s.Scheduling != nil && s.Scheduling.Scheduler != "" && s.Scheduling.Scheduler != NFTables
}

// NFTables is the Scheduler of a Service that is not to be scheduled by IPVS, whatever the others are.
const NFTables = "nftables"

// Schedulers are those of the kernel's IPVS, by the names it has for them.
var Schedulers = []string{"rr", "wrr", "lc", "wlc", "fo", "ovf", "lblc", "lblcr", "dh", "sh", "mh", "sed", "nq", "twos"}

// ParseScheduling reads the name of a scheduler, or "nftables", with flags behind it: "mh", "sh,port,fallback".
func ParseScheduling(text string) (Scheduling, error) {
	name, flags, _ := strings.Cut(text, ",")
	s := Scheduling{Scheduler: strings.TrimSpace(name)}
	if s.Scheduler != NFTables && !slices.Contains(Schedulers, s.Scheduler) {
		return Scheduling{}, fmt.Errorf("%q is none of %s, %s", s.Scheduler, NFTables, strings.Join(Schedulers, ", "))
	}
	if flags == "" {
		return s, nil
	}
	for flag := range strings.SplitSeq(flags, ",") {
		switch flag = strings.TrimSpace(flag); {
		case s.Scheduler != "sh" && s.Scheduler != "mh":
			return Scheduling{}, fmt.Errorf("%s has no flags, only sh and mh have", s.Scheduler)
		case flag == "port":
			s.Port = true
		case flag == "fallback":
			s.Fallback = true
		default:
			return Scheduling{}, fmt.Errorf("%q is no flag of %s: write port or fallback", flag, s.Scheduler)
		}
	}
	return s, nil
}
