package main

import (
	"errors"
	"fmt"
	"math"
	"net/netip"
	"os"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/verdict-proxy/verdict/internal/ipfamily"
	"github.com/verdict-proxy/verdict/nft"
	"github.com/verdict-proxy/verdict/nft/iptshim"
	"github.com/verdict-proxy/verdict/sync/dataplane"
)

// askChains follows the packet through the rules of iptables.
func (e *explaining) askChains(a *answer, s sender) error {
	f := ipfamily.All[e.index()]
	saved := e.chains.saved[f]
	if saved == nil {
		return fmt.Errorf("the rules of iptables for %s cannot be read: %w", f, e.chains.programs.Missing(f))
	}
	var left time.Duration // for which the sender is remembered
	w, err := saved.Walk(e.packet(s), iptshim.Host{
		Here: func(a netip.Addr) bool { return slices.Contains(e.here, a) },
		Recent: func(list string, sender netip.Addr, within time.Duration) bool {
			ago, ok := seenAgo(list, sender)
			if ok = ok && ago < within; ok {
				left = within - ago
			}
			return ok
		}})
	if err != nil {
		return err
	}
	if e.chains.rules[f] == 0 {
		a.Notes = append(a.Notes, fmt.Sprintf("there are no rules of Verdict for %s: nobody carries Services on this node", f))
	}
	a.walkedChains(w, left, e)
	return nil
}

// walkedChains fills in what the rules of iptables do.
func (a *answer) walkedChains(w *iptshim.Walk, left time.Duration, e *explaining) {
	a.walk = asTables(w, left)
	cause := causeOf(w)
	v := &viewJSON{From: "the kernel", Outcome: a.walk.Trace(a.family).Outcome(), Cause: cause.String(), Unclear: w.Unclear}
	a.Kernel = v
	for _, s := range w.Steps {
		if s.Matched && (len(v.Way) == 0 || v.Way[len(v.Way)-1] != s.Chain) {
			v.Way = append(v.Way, s.Chain)
		}
		if e.o.trace {
			v.Trace = append(v.Trace, traceJSON{Chain: s.Chain, Rule: s.Rule, Matched: s.Matched})
		}
	}
	if name := portOf(w); name != "" {
		service, port, _ := strings.Cut(name, ":")
		v.Service = &serviceJSON{Name: service, Port: port}
	}
	a.landed(v, a.walk)
	v.Why = a.whyKernel(v, cause)
}

// asTables gives a walk in the form of one through tables of nftables, which objects can be compared with.
func asTables(w *iptshim.Walk, left time.Duration) *nft.Walk {
	out := &nft.Walk{Unclear: w.Unclear}
	for _, end := range w.Endings {
		to := nft.Ending{Ending: end.Ending}
		to.Left = left
		out.Endings = append(out.Endings, to)
	}
	return out
}

// causeOf says why something becomes of a packet, by the chain of the rule that decided.
func causeOf(w *iptshim.Walk) dataplane.Cause {
	for _, end := range w.Endings {
		chain, rejected := end.Rule.Chain, end.Outcome == dataplane.Rejected
		switch {
		case end.Outcome == dataplane.Sent:
			return dataplane.FrontendFound
		case end.Outcome == dataplane.Untouched:
		case chain == "KUBE-FIREWALL":
			return dataplane.FromOutsideToLoopback
		case chain == "KUBE-PROXY-FIREWALL", strings.Contains(end.Rule.Rule, "is not open to everybody"):
			return dataplane.SourceRefused
		case chain == "KUBE-CLUSTER-IPS" && !rejected:
			return dataplane.Unallocated
		case chain == "KUBE-CLUSTER-IPS", strings.HasPrefix(chain, "KUBE-CIP-"):
			return dataplane.UnusedPort
		case rejected:
			return dataplane.NoEndpoints
		default:
			return dataplane.NoLocalEndpoints
		}
	}
	return dataplane.NotService
}

// portComment begins the comment of a rule that belongs to a service port.
var portComment = regexp.MustCompile(`--comment "([^ "/]+/[^ "]+?)(?: [^"]*)?"`)

// portOf finds the service port by the comments of the rules that a packet met; empty if there is none.
func portOf(w *iptshim.Walk) string {
	for _, s := range w.Steps {
		if m := portComment.FindStringSubmatch(s.Rule); s.Matched && m != nil && !strings.Contains(s.Rule, "has no such port") {
			return m[1]
		}
	}
	return ""
}

// seenAgo gives how long ago xt_recent has seen a sender in a list; not ok if it does not remember it.
func seenAgo(list string, sender netip.Addr) (time.Duration, bool) {
	text, err := os.ReadFile("/proc/thread-self/net/xt_recent/" + list)
	if err != nil {
		return 0, false
	}
	for line := range strings.Lines(string(text)) {
		// "src=10.244.1.7 ttl: 64 last_seen: 4296012345 oldest_pkt: 1 4296012345"
		fields := strings.Fields(line)
		if len(fields) < 5 || fields[0] == "" {
			continue
		}
		a, err := netip.ParseAddr(strings.TrimPrefix(fields[0], "src="))
		last, nerr := strconv.ParseUint(fields[4], 10, 64)
		if err != nil || nerr != nil || a != sender {
			continue
		}
		now, hz, err := jiffies()
		if err != nil || now < last {
			return 0, true // when is not known
		}
		return time.Duration(now-last) * time.Second / time.Duration(hz), true
	}
	return 0, false
}

var jiffiesLine = regexp.MustCompile(`(?m)^jiffies: (\d+)$`)

// jiffies gives the kernel's clock, and how many times a second it ticks. The clock begins five minutes before it reaches 2^32.
func jiffies() (now uint64, hz int, err error) {
	text, err := os.ReadFile("/proc/timer_list")
	if err != nil {
		return 0, 0, err
	}
	uptime, err := os.ReadFile("/proc/uptime")
	if err != nil {
		return 0, 0, err
	}
	m := jiffiesLine.FindSubmatch(text)
	word, _, _ := strings.Cut(string(uptime), " ")
	seconds, err := strconv.ParseFloat(word, 64)
	if m == nil || err != nil {
		return 0, 0, errors.New("the kernel's clock cannot be read")
	}
	now, err = strconv.ParseUint(string(m[1]), 10, 64)
	const begins = 5 * 60
	for _, hz := range []int{100, 250, 300, 1000} {
		began := float64(now) - (1<<32 - begins*float64(hz))
		if math.Abs(began/float64(hz)-seconds) < max(10, seconds/100) {
			return now, hz, err
		}
	}
	return 0, 0, errors.New("the kernel's clock ticks as none that is known")
}
