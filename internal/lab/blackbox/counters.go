package blackbox

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"os"
	"strconv"
	"strings"
)

// counter is one of the kernel's that says why it drops packets.
type counter uint8

const (
	listenOverflows counter = iota
	listenDrops
	requestQueueFull
	conntrackDrop
	conntrackEarlyDrop
	conntrackInsertFailed
	noRoutes
	numCounters
	// packetsLost and eventsLost are what this recorder had no room for.
	packetsLost
	eventsLost
)

// counterNames are the kernel's names. Those of conntrack are in a file of their own.
var counterNames = [numCounters]string{"ListenOverflows", "ListenDrops", "TCPReqQFullDrop", "drop", "early_drop",
	"insert_failed", "InNoRoutes"}

func (c counter) String() string {
	switch c {
	case packetsLost:
		return "packets that were not recorded"
	case eventsLost:
		return "events that were not recorded"
	}
	return counterNames[c]
}

// count is by how much a counter rose between two samples.
type count struct {
	since, at int64
	counter   counter
	by        uint64
}

func (c *count) String() string {
	return fmt.Sprintf("%s rose by %d since %s", c.counter, c.by, instant(c.since))
}

// countersLen holds what a file of counters does.
const countersLen = 32 << 10

// counters samples the counters of a namespace from files that were opened in it.
type counters struct {
	files []*os.File
	last  [numCounters]uint64
	at    int64
	text  []byte
}

// openCounters opens the counters of the namespace whose /proc/net is at path.
func openCounters(path string) (*counters, error) {
	c := &counters{text: make([]byte, countersLen)}
	for _, name := range []string{"netstat", "stat/nf_conntrack"} {
		f, err := os.Open(path + "/" + name)
		if os.IsNotExist(err) {
			continue // this kernel has none
		}
		if err != nil {
			return nil, errors.Join(err, c.Close())
		}
		c.files = append(c.files, f)
	}
	return c, nil
}

// Close closes the files.
func (c *counters) Close() (err error) {
	for _, f := range c.files {
		err = errors.Join(err, f.Close())
	}
	return err
}

// sample calls do with each counter that rose since the last sample.
func (c *counters) sample(now int64, do func(*count)) {
	var values [numCounters]uint64
	for _, f := range c.files {
		n, _ := f.ReadAt(c.text, 0)
		readCounters(c.text[:n], &values)
	}
	for i, v := range values {
		if c.at != 0 && v > c.last[i] {
			do(&count{c.at, now, counter(i), v - c.last[i]})
		}
	}
	c.last, c.at = values, now
}

// readCounters reads lines of names that lines of numbers follow: those of netstat are decimal and begin with a word
// that ends in a colon; those of conntrack are hexadecimal, one line a processor.
func readCounters(text []byte, values *[numCounters]uint64) {
	var names []string
	for lines := bufio.NewScanner(bytes.NewReader(text)); lines.Scan(); {
		fields := strings.Fields(lines.Text())
		if len(fields) < 2 {
			continue
		}
		if _, err := strconv.ParseUint(fields[1], 16, 64); err != nil || names == nil {
			names = fields
			continue
		}
		base := 16
		if strings.HasSuffix(fields[0], ":") {
			base = 10
		}
		for i, name := range names {
			for c := range numCounters {
				if counterNames[c] == name && i < len(fields) {
					n, _ := strconv.ParseUint(fields[i], base, 64)
					values[c] += n
				}
			}
		}
	}
}
