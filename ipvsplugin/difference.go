package ipvsplugin

import (
	"fmt"
	"maps"
	"net/netip"
	"slices"

	"github.com/verdict-proxy/verdict/sync/dataplane"
)

// Differences says, one line each, what IPVS holds else than a State asks for. What drains is no difference. It reads
// in the network namespace of the calling thread, beside a running proxy, and does not load IPVS.
func Differences(st *dataplane.State) (lines []string, err error) {
	want, have := newTable(), newContents()
	want.replace(st)
	err = withIPVS(func(v *client) (err error) {
		have, err = readContents(v, contents{})
		return err
	})
	if err != nil {
		return nil, err
	}
	return differences(&want, have), nil
}

// differences compares sorted by key.
func differences(want *table, have contents) (lines []string) {
	all := map[dataplane.Key]bool{}
	for k := range want.services {
		all[k] = true
	}
	for k := range have.services {
		all[k] = true
	}
	for _, k := range sorted(all) {
		lines = append(lines, differenceAt(k, want.services[k], have.services[k])...)
	}
	return lines
}

func differenceAt(k dataplane.Key, want *VirtualService, have *found) (lines []string) {
	if have == nil {
		return []string{fmt.Sprintf("the virtual service %s is missing", k)}
	}
	if want != nil {
		if c := (&planner{}).config(k, have, want); c != have.Config {
			lines = append(lines, fmt.Sprintf("the virtual service %s has %s, not %s", k, have.String(), c.String()))
		}
		for _, d := range want.Destinations {
			switch is, there := have.dests[d.AddrPort]; {
			case !there:
				lines = append(lines, fmt.Sprintf("the destination %s of %s is missing", d.AddrPort, k))
			case is.Weight != d.Weight:
				lines = append(lines,
					fmt.Sprintf("the destination %s of %s has weight %d, not %d", d.AddrPort, k, is.Weight, d.Weight))
			}
		}
	}
	for _, a := range slices.SortedFunc(maps.Keys(have.dests), netip.AddrPort.Compare) {
		if d := have.dests[a]; !wants(want, a) && d.Weight > 0 {
			lines = append(lines, fmt.Sprintf("the destination %s of %s is unexpected, with weight %d", a, k, d.Weight))
		}
	}
	return lines
}
