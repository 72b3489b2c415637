package inspect

import (
	"fmt"
	"slices"
	"strings"

	"github.com/verdict-proxy/verdict/sync/dataplane"
)

// zonesShown is how many zones a text names.
const zonesShown = 4

// zonesText says how this node divides connections between zones.
func zonesText(p *dataplane.ZonePlan) string {
	switch {
	case p.ByWeight:
		return fmt.Sprintf("near: no demand of its own is assumed in %s, so the endpoints of all zones are chosen by weight",
			zoneText(p.Zone))
	case p.Near == 1:
		return fmt.Sprintf("near: %s carries all of its demand", zoneText(p.Zone))
	}
	var others []dataplane.ZoneShare
	for _, z := range p.Zones {
		if z.Zone != p.Zone && z.Share > 0 {
			others = append(others, z)
		}
	}
	slices.SortStableFunc(others, func(a, b dataplane.ZoneShare) int {
		if a.Share > b.Share {
			return -1
		}
		return 1
	})
	var to []string
	for _, z := range others[:min(zonesShown, len(others))] {
		to = append(to, fmt.Sprintf("%s (%s)", zoneText(z.Zone), percent(z.Share)))
	}
	if n := len(others) - zonesShown; n > 0 {
		to = append(to, fmt.Sprintf("%d more", n))
	}
	return fmt.Sprintf("near: %s carries %s of its demand, and the rest goes to %s", zoneText(p.Zone), percent(p.Near),
		strings.Join(to, ", "))
}

// otherZoneText says why an endpoint of a zone gets no connection of this node.
func otherZoneText(p *dataplane.ZonePlan, zone string) string {
	i := slices.IndexFunc(p.Zones, func(z dataplane.ZoneShare) bool { return z.Zone == zone })
	switch {
	case i >= 0 && p.Zones[i].Share > 0:
		return "few connections of this node go to " + zoneText(zone) + ", and other endpoints there get them"
	case p.Near == 1:
		return zoneText(p.Zone) + " carries all of its demand"
	}
	return zoneText(zone) + " has no capacity to spare"
}

func zoneText(zone string) string {
	switch {
	case zone == "":
		return "an unknown zone"
	case strings.HasPrefix(zone, "zone"):
		return zone
	}
	return "zone " + zone
}

// placeText names an endpoint's node and zone, as far as they are known.
func placeText(node, zone string) string {
	if zone == "" {
		return node
	}
	return strings.TrimSpace(node + " (" + zone + ")")
}
