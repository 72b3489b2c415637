package inspect

import (
	"github.com/verdict-proxy/verdict/internal/system/terminal"
	"github.com/verdict-proxy/verdict/internal/system/units"
	"github.com/verdict-proxy/verdict/sync/dataplane"
	"github.com/verdict-proxy/verdict/sync/snapshot"
)

// settingsOf returns what the Service that answers asks for by its annotations. How it wants its endpoints to be chosen
// is said with the choice.
func settingsOf(x *dataplane.Explanation) (list []Setting) {
	svc := x.Object
	add := func(asked bool, name, value, without string) {
		if asked {
			list = append(list, Setting{name, value, without})
		}
	}
	addOfTCP(x, add)
	failover := ""
	switch {
	case !svc.ExternalLocal:
		failover = "externalTrafficPolicy is Cluster"
	case x.Frontend.Kind == dataplane.ClusterIP:
		failover = "not at cluster IPs"
	}
	add(svc.ExternalFailover != snapshot.FailoverDrop, "external-failover", svc.ExternalFailover.String(), failover)
	local := ""
	if !x.LocalCounts {
		local = "older Services name it, as many as may"
	}
	add(svc.Local != "", "local", svc.Local, local)
	chooser := ""
	if x.Port.Scheduled(x.Frontend) != nil {
		chooser = "IPVS chooses the endpoint"
	}
	add(svc.Limits != snapshot.Limits{}, "limits", svc.Limits.String(), chooser)
	add(svc.ClientAddress != snapshot.ClientAddressDefault, "client-address", svc.ClientAddress.String(), unkept(x))
	add(svc.SlowStart > 0, "slow-start", units.Span(svc.SlowStart), "")
	add(svc.Counters == snapshot.CountersFirst, "counters", "true", "")
	add(svc.Counters == snapshot.CountersNever, "counters", "false", "")
	add(svc.NoRecords, "records", "off", "")
	return list
}

// addOfTCP adds what concerns TCP alone.
func addOfTCP(x *dataplane.Explanation, add func(asked bool, name, value, without string)) {
	svc := x.Object
	overTCP := ""
	if x.Port.Name.Protocol != snapshot.TCP {
		overTCP = "only for tcp"
	}
	chance := overTCP
	if chance == "" && x.Port.SecondChance != svc.SecondChance {
		chance = "off for the whole node"
	}
	add(svc.SecondChance != snapshot.SecondChanceDefault, "second-chance", svc.SecondChance.String(), chance)
	add(svc.LastResort != snapshot.LastResortDefault, "last-resort", svc.LastResort.String(), "")
	probe := overTCP
	if probe == "" && svc.Probe != x.Port.Probe {
		probe = "second chance is off"
	}
	add(svc.Probe.Asked, "probe", svc.Probe.String(), probe)
	add(svc.Drain > 0, "drain", units.Span(svc.Drain), overTCP)
	still := overTCP
	if still == "" && x.Port.RebalancePool() == nil {
		still = "clients keep their endpoints, or traffic policies differ"
	}
	add(svc.Rebalance > 0, "rebalance", units.Span(svc.Rebalance), still)
}

// printSettings prints a line for each setting.
func printSettings(s *terminal.Printer, list []Setting) {
	for i, set := range list {
		text := set.Name + " " + set.Value
		if set.Without != "" {
			text += " (no effect: " + set.Without + ")"
		}
		labelled(s, first(i, "Settings"), "%s", text)
	}
}
