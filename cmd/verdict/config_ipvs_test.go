package main

import (
	"bytes"
	"errors"
	"log/slog"
	"strings"
	"testing"

	"github.com/verdict-proxy/verdict/internal/config"
	"github.com/verdict-proxy/verdict/sync/dataplane"
	"github.com/verdict-proxy/verdict/sync/snapshot"
)

// TestMissingScheduler: a Service that asks for what this kernel has not got is left to nftables, which is said once; the others
// get what they ask for, and nobody is asked twice.
func TestMissingScheduler(t *testing.T) {
	var log bytes.Buffer
	asked := map[string]int{}
	l := &live{log: &logger{Logger: slog.New(slog.NewTextHandler(&log, nil)), level: &slog.LevelVar{}}}
	l.settings.Store(&config.Settings{Policy: dataplane.Config{IPVS: dataplane.IPVS{Mode: dataplane.IPVSAuto}}})
	l.schedulers.probe = func(names ...string) error {
		asked[names[0]]++
		if names[0] == "mh" {
			return errors.New("ip_vs_mh is missing")
		}
		return nil
	}
	name := func(n string) snapshot.Name { return snapshot.Name{Namespace: "default", Name: n} }
	services := map[snapshot.Name]*snapshot.Service{}
	for n, scheduler := range map[string]string{"a": "mh", "b": "mh", "c": "lc", "d": snapshot.NFTables, "e": ""} {
		services[name(n)] = &snapshot.Service{Name: name(n), Scheduling: &snapshot.Scheduling{Scheduler: scheduler}}
	}
	services[name("f")], services[name("gone")] = &snapshot.Service{Name: name("f")}, nil
	for range 2 {
		got := l.schedule(snapshot.Delta{Services: services})
		if len(got.Services) != len(services) {
			t.Fatalf("%d Services, want %d", len(got.Services), len(services))
		}
		for n, want := range map[string]string{"a": snapshot.NFTables, "b": snapshot.NFTables, "c": "lc", "d": snapshot.NFTables, "e": ""} {
			if s := got.Services[name(n)].Scheduling.Scheduler; s != want {
				t.Errorf("%s is scheduled by %q, want %q", n, s, want)
			}
		}
	}
	if services[name("a")].Scheduling.Scheduler != "mh" {
		t.Error("what the source holds was changed")
	}
	if asked["mh"] != 1 || asked["lc"] != 1 || len(asked) != 2 {
		t.Errorf("asked %v", asked)
	}
	if n := strings.Count(log.String(), "ip_vs_mh is missing"); n != 1 {
		t.Errorf("said %d times:\n%s", n, log.String())
	}
}
