package xtables

import (
	"errors"
	"math"
	"net/netip"
	"os"
	"regexp"
	"strconv"
	"strings"
	"time"
)

var errClock = errors.New("failed to read the kernel's clock")

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

// jiffies gives the kernel's clock, and how many times a second it ticks. The clock begins five minutes before it
// reaches 2^32.
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
		return 0, 0, errClock
	}
	now, err = strconv.ParseUint(string(m[1]), 10, 64)
	const begins = 5 * 60
	for _, hz := range []int{100, 250, 300, 1000} {
		began := float64(now) - (1<<32 - begins*float64(hz))
		if math.Abs(began/float64(hz)-seconds) < max(10, seconds/100) {
			return now, hz, err
		}
	}
	return 0, 0, errClock
}
