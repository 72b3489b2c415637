package run

import (
	"maps"
	"slices"
	"testing"

	"github.com/verdict-proxy/verdict/conformance/cases"
	"github.com/verdict-proxy/verdict/conformance/testbed"
)

// A reason for a difference that names no known proxy would never count.
func TestDifferencesNameKnownProxies(t *testing.T) {
	suite, err := cases.Load()
	if err != nil {
		t.Fatal(err)
	}
	check := func(of string, proxies []string) {
		for _, name := range proxies {
			if !slices.Contains(testbed.KindNames(), name) {
				t.Errorf("%s: %s is no known proxy", of, name)
			}
		}
	}
	for _, c := range suite.Cases {
		for _, l := range c.Looks {
			for _, d := range l.Differs {
				check(c.Name, d.Proxies)
			}
		}
	}
	for _, s := range suite.Stories {
		for i := range s.Differs {
			check(s.FullName(), s.Differs[i].Proxies)
		}
	}
}

// What stays different from kube-proxy with behavior: kube-proxy is listed in docs/KUBE-PROXY.md: no case adds to it
// unseen. "takeover" differs only when connections fail, which none does.
func TestWhatStays(t *testing.T) {
	suite, err := cases.Load()
	if err != nil {
		t.Fatal(err)
	}
	stays := map[string]bool{}
	for _, s := range suite.Stories {
		for i := range s.Differs {
			if s.Differs[i].Stays == cases.Mended {
				stays[s.Theme+"/"+s.Name] = true
			}
		}
	}
	for _, c := range suite.Cases {
		for _, l := range c.Looks {
			for _, d := range l.Differs {
				if d.Stays != "" {
					t.Errorf("%s: a difference stays", c.Name)
				}
			}
		}
	}
	want := []string{"foreign-hands/flush", "node/new-address", "second-chance/lost-connection",
		"service-cidr/overlap", "takeover/from/kube-proxy-iptables", "takeover/from/kube-proxy-nftables"}
	if got := slices.Sorted(maps.Keys(stays)); !slices.Equal(got, want) {
		t.Errorf("%q stay different, want %q", got, want)
	}
}
