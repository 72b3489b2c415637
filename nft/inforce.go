package nft

import (
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/verdict-proxy/verdict/internal/system/ipfamily"
	"github.com/verdict-proxy/verdict/sync/dataplane"
	"github.com/verdict-proxy/verdict/sync/snapshot"
)

// What is in force and rules do not tell is in two sets that no rule looks up: the settings, and which endpoints are
// unhealthy. They are content as all else, so that whoever reads the tables at a revision knows both.

// unhealthy is an endpoint of a pool that does not answer, or refuses.
type unhealthy struct {
	snapshot.Unhealthy
	ejected bool
}

// unhealthyOf returns those of a pool, sorted.
func unhealthyOf(p *dataplane.Pool) []unhealthy {
	if p == nil || len(p.Ejected)+len(p.Kept) == 0 {
		return nil
	}
	var out []unhealthy
	for _, u := range p.Ejected {
		out = append(out, unhealthy{u, true})
	}
	for _, u := range p.Kept {
		out = append(out, unhealthy{u, false})
	}
	slices.SortFunc(out, func(a, b unhealthy) int { return a.Endpoint.Compare(b.Endpoint) })
	return out
}

// unhealthy plans the change of what is said of a pool's endpoints.
func (p *planner) unhealthy(f ipfamily.Family, old, want *port, i poolIndex) {
	had, has := old.pools[i].unhealthy, want.pools[i].unhealthy
	for len(had)+len(has) > 0 {
		was := len(has) == 0 || len(had) > 0 && had[0].Endpoint.Compare(has[0].Endpoint) <= 0
		is := len(had) == 0 || len(has) > 0 && has[0].Endpoint.Compare(had[0].Endpoint) <= 0
		p.element(f, was, is, func() Element { return old.unhealthyElement(i, &had[0]) },
			func() Element { return want.unhealthyElement(i, &has[0]) })
		if was {
			had = had[1:]
		}
		if is {
			has = has[1:]
		}
	}
}

// The words of a comment: "shop/web:http, ejected, unanswered since 2026-11-26T12:03:04Z".
const (
	wordEjected, wordKept, wordDoubted = "ejected", "kept", "doubted"
	wordSince                          = " since "
)

// unhealthyElement returns the element of an unhealthy endpoint. A name that leaves no room for the rest gives way to
// its bucket: the pool's slots have the name.
func (p *port) unhealthyElement(i poolIndex, u *unhealthy) Element {
	word := wordKept
	switch {
	case u.ejected:
		word = wordEjected
	case u.Doubtful:
		word = wordDoubted
	}
	rest := ", " + word + ", " + u.Cause.String() + wordSince + u.Since.UTC().Format(time.RFC3339)
	owner := p.comment
	if len(owner)+len(rest) >= maxComment {
		owner = bucketMark + strconv.Itoa(bucketFor(p.id.name.Service.String()))
	}
	e := memberElement(UnhealthyEndpoints, p.pools[i].id, u.Endpoint)
	e.Comment = owner + rest
	return e
}

// bucketMark precedes the bucket of a Service in place of its name. No name begins with it.
const bucketMark = "#"

// bucket returns the bucket in whose digest an element is.
func (e *Element) bucket() int {
	if e.Set.IsShared() {
		return sharedBucket
	}
	service := serviceOf(e.Comment)
	if digits, ok := strings.CutPrefix(service, bucketMark); ok {
		if n, err := strconv.ParseUint(digits, 10, 16); err == nil && n < numBuckets {
			return int(n)
		}
	}
	return bucketFor(service)
}

// NamesBucket reports whether the comment of an element of UnhealthyEndpoints has no room for its service port. The
// pool's slots have its name.
func (e *Element) NamesBucket() bool { return strings.HasPrefix(e.Comment, bucketMark) }

// FirstSlots returns the keys of a pool's first slot, for each map of slots.
func FirstSlots(pool uint32) (keys [len(slotSets)][]Element) {
	for i, set := range slotSets {
		for _, proto := range protocols {
			keys[i] = append(keys[i], slotElement(set, pool, proto, 0, netip.AddrPort{}))
		}
	}
	return keys
}

// Health reads an element of UnhealthyEndpoints. Slot is one of its pool's, and is needed if the element NamesBucket.
// It is not ok if Verdict writes no such element.
func (e *Element) Health(slot *Element) (h dataplane.EndpointHealth, ok bool) {
	parts := strings.Split(e.Comment, ", ")
	if len(parts) != 3 {
		return h, false
	}
	cause, since, _ := strings.Cut(parts[2], wordSince)
	h.Pool, h.Endpoint, h.Ejected = e.ID(), e.Member(), parts[1] == wordEjected
	h.Doubtful = parts[1] == wordDoubted
	switch cause {
	case snapshot.Unanswered.String():
	case snapshot.Refused.String():
		h.Cause = snapshot.Refused
	case snapshot.Resort.String():
		h.Cause = snapshot.Resort
	default:
		return h, false
	}
	name := parts[0]
	if slot != nil {
		name = slot.Comment
	}
	var err error
	h.Port, ok = dataplane.ParsePortName(name, snapshot.TCP)
	h.Since, err = time.Parse(time.RFC3339, since)
	return h, ok && err == nil && (h.Ejected || h.Doubtful || parts[1] == wordKept)
}

// settingElements returns the elements of the settings, by their places in the list.
func settingElements(settings []string) (out []Element) {
	for i, s := range settings {
		e := idElement(SettingsSet, uint32(i))
		e.Comment = commentOf(s)
		out = append(out, e)
	}
	return out
}

// SettingsOf reads elements of SettingsSet; nil if there are none.
func SettingsOf(elements []Listed) (settings []string) {
	slices.SortFunc(elements, func(a, b Listed) int { return int(a.ID()) - int(b.ID()) })
	for i := range elements {
		settings = append(settings, elements[i].Comment)
	}
	return settings
}

// settings takes over the settings.
func (p *planner) settings(now []string) {
	p.bucket = sharedBucket
	had, has := settingElements(p.m.settings), settingElements(now)
	for _, f := range ipfamily.All {
		for i := range max(len(had), len(has)) {
			p.element(f, i < len(had), i < len(has), func() Element { return had[i] }, func() Element { return has[i] })
		}
	}
	p.m.settings = now
}
