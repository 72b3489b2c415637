package node

import (
	"bytes"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"testing"

	"github.com/verdict-proxy/verdict/internal/system/ipfamily"
	"github.com/verdict-proxy/verdict/nft/iptshim"
	"github.com/verdict-proxy/verdict/sync/dataplane"
)

// TestMissingForAll: where IPVS is to schedule all Services and cannot, nftables does. That is said once, and the
// kernel is asked once.
func TestMissingForAll(t *testing.T) {
	var log bytes.Buffer
	asked := 0
	var noted []string
	l := &ipvsChoice{log: slog.New(slog.NewTextHandler(&log, nil)),
		missing: func(note string) { noted = append(noted, note) }}
	said := dataplane.IPVS{Mode: dataplane.IPVSAlways, Default: dataplane.Scheduling{Scheduler: "mh"}}
	l.probe = func(...string) error {
		asked++
		return errors.New("ip_vs_mh is missing")
	}
	for range 2 {
		if got := l.effective(said).Mode; got != dataplane.IPVSAuto {
			t.Errorf("mode %d", got)
		}
	}
	if n := strings.Count(log.String(), "ip_vs_mh is missing"); n != 1 || asked != 1 ||
		!strings.Contains(log.String(), "level=WARN") {
		t.Errorf("said %d times, asked %d times:\n%s", n, asked, log.String())
	}
	const note = "nftables chooses the endpoints of all Services until the next start: ip_vs_mh is missing"
	if len(noted) != 1 || noted[0] != note {
		t.Errorf("events: %q", noted)
	}
	said.Default.Scheduler = "rr"
	l.probe = func(...string) error { return nil }
	if got := l.effective(said).Mode; got != dataplane.IPVSAlways {
		t.Errorf("mode %d", got)
	}
}

// TestRefusedNote: a namespace's events say what its own objects ask for too much of, and nothing in the words of a
// program.
func TestRefusedNote(t *testing.T) {
	large := fmt.Errorf("iptables: %w", &iptshim.TooManyRules{Family: ipfamily.IPv6, Rules: 70000, Most: iptshim.MaxRules})
	note := quarantineNote(large)
	if note != "the Service would have about 70000 rules of iptables in IPv6: 65536 at most; "+
		"divide it into several Services, or run nodes with nftables" {
		t.Error(note)
	}
	if note := quarantineNote(errors.New("line 7: other/secret")); strings.Contains(note, "secret") || note == "" {
		t.Error(note)
	}
}
