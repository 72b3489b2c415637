package run

import (
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
