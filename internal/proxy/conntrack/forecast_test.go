package conntrack

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/verdict-proxy/verdict/internal/lab/labtest"
	"github.com/verdict-proxy/verdict/sync/dataplane"
	"github.com/verdict-proxy/verdict/sync/snapshot"
)

// TestForecastIsWhatCleanerDoes forecasts changes of a frontend among flows that differ in one field each, and has a
// Cleaner do them.
func TestForecastIsWhatCleanerDoes(t *testing.T) {
	entries, fronts := mixed()
	for _, k := range fronts {
		v6 := 0
		if k.Addr.Is6() {
			v6 = 1
		}
		one, two := endpoints[v6][0], endpoints[v6][1]
		none := fmt.Sprintf("%v", k)
		for _, change := range [][2]string{
			{none + fmt.Sprintf(">%v,%v", one, two), none + fmt.Sprintf(">%v", one)}, {none, none + fmt.Sprintf(">%v", two)},
			{none + fmt.Sprintf(">%v", one), none}, {none + fmt.Sprintf(">%v", one), ""}, {"", none + fmt.Sprintf(">%v", one)},
			{none + fmt.Sprintf(">%v", one), none + fmt.Sprintf(">%v,%v", one, two)},
		} {
			t.Run(change[0]+" "+change[1], func(t *testing.T) {
				conn := emptyHost(t)
				insert(t, conn, entries...)
				var states [2]*dataplane.State
				for i, ports := range change {
					states[i] = state()
					if ports != "" {
						states[i] = state(service("dns", ports))
					}
				}
				c := newCleaner(conn, nil)
				b := behind(c, &noBackend{})
				_, err := b.Apply(states[0], dataplane.Change{})
				labtest.Check(t, err)
				clear(c.pending)
				c.all = pendingSweep{}
				before := listAll(t, conn)
				var want []string
				f := NewForecast([]*dataplane.Service{states[0].Services[name("dns")]},
					[]*dataplane.Service{states[1].Services[name("dns")]})
				labtest.Check(t, f.Read(context.Background(), conn, func(o OpenFlow) {
					if o.Fate == Deleted {
						want = append(want, fmt.Sprintf("%v -> %v", o.Frontend, o.Endpoint))
					}
				}))
				_, err = b.Apply(states[1], dataplane.Change{Services: []snapshot.Name{name("dns")}})
				labtest.Check(t, err)
				lookNow(t, c)
				got := removed(t, before, listAll(t, conn))
				for i := range got {
					got[i], _, _ = strings.Cut(got[i], " zone")
				}
				slices.Sort(want)
				slices.Sort(got)
				if !slices.Equal(got, want) {
					t.Errorf("removed %q\nforecast %q", got, want)
				}
			})
		}
	}
}

// flowList is a table of some flows.
type flowList struct {
	flows []flow
	table
}

func (l *flowList) filters() bool { return true }

func (l *flowList) narrow() bool { return true }

func (l *flowList) list(_ query, do func([]flow) error) error {
	return errors.Join(do(l.flows), do(l.flows)) // a list that is interrupted shows flows twice
}

// TestForecastOfTCP: what becomes of TCP connections, by what their endpoint does and what the Service asks for.
func TestForecastOfTCP(t *testing.T) {
	const front, stays, goes, gone = "10.96.0.1:80/tcp", "10.0.0.1:80", "10.0.0.2:80", "10.0.0.3:80"
	drain := func(d time.Duration, s *dataplane.Service) *dataplane.Service {
		for _, sp := range s.Ports {
			sp.Drain = d
		}
		return s
	}
	web := func(ends string) *dataplane.Service { return service("web", front+">"+ends) }
	other := service("web", "10.96.0.1:81/tcp>"+stays)
	scheduled := web(stays)
	scheduled.Ports[0].Scheduling = &dataplane.Scheduling{Scheduler: "rr"}
	for _, test := range []struct {
		what          string
		before, after *dataplane.Service
		// fates are those of flows to stays, goes and gone: was and is.
		want string
	}{
		{"an endpoint leaves", web(stays + "," + goes), web(stays), "0>0 0>3 3>3"},
		{"and drains", web(stays + "," + goes), drain(time.Second, web(stays)), "0>0 0>2 3>2"},
		{"a deadline goes", drain(time.Second, web(stays)), web(stays), "0>0 2>3 2>3"},
		{"it comes back", web(stays), web(stays + "," + goes), "0>0 3>0 3>3"},
		{"the address goes", web(stays + "," + goes), other, "0>0 0>0 3>0"},
		{"the Service goes", web(stays + "," + goes), nil, "0>0 0>0 3>0"},
		{"the Service comes", nil, web(stays), "0>0 0>0 0>0"},
		{"IPVS schedules", web(stays + "," + goes), scheduled, "0>0 0>0 3>0"},
	} {
		table := &flowList{}
		for i, e := range []string{stays, goes, gone} {
			for _, answered := range []bool{true, false} {
				table.flows = append(table.flows, flow{frontend: key(front), endpoint: netip.MustParseAddrPort(e),
					answered: answered, client: clientOf(len(table.flows), false), id: []byte{byte(i), 0, 0, 0}})
			}
		}
		got := ""
		seen := 0
		err := NewForecast([]*dataplane.Service{test.before}, []*dataplane.Service{test.after}).
			read(context.Background(), table, func(o OpenFlow) {
				if seen++; seen%2 == 1 {
					got += fmt.Sprintf(" %d>%d", o.Was, o.Fate)
				}
			})
		if labtest.Check(t, err); len(got) == 0 || got[1:] != test.want || seen != len(table.flows) {
			t.Errorf("%s: %q of %d flows, want %q", test.what, got, seen, test.want)
		}
	}
}

// BenchmarkForecast forecasts a change of one Service with 250,000 flows.
func BenchmarkForecast(b *testing.B) {
	conn, k := emptyHost(b), key("10.96.0.1:53/udp")
	entries := make([]entry, 250000)
	for i := range entries {
		entries[i] = entry{client: clientOf(i, false), frontend: k, endpoint: endpoints[0][i%2]}
	}
	insert(b, conn, entries...)
	before := service("dns", fmt.Sprintf("%v>%v,%v", k, endpoints[0][0], endpoints[0][1]))
	after := service("dns", fmt.Sprintf("%v>%v", k, endpoints[0][0]))
	for b.Loop() {
		n, deleted := 0, 0
		labtest.Check(b, NewForecast([]*dataplane.Service{before}, []*dataplane.Service{after}).
			Read(context.Background(), conn, func(o OpenFlow) {
				if n++; o.Fate == Deleted {
					deleted++
				}
			}))
		b.ReportMetric(float64(n), "flows")
		b.ReportMetric(float64(deleted), "deleted")
	}
}
