package xtables

import (
	"testing"

	"github.com/verdict-proxy/verdict/internal/lab/labtest"
	"github.com/verdict-proxy/verdict/internal/system/ipfamily"
)

// TestWatch: whatever others do with iptables is seen, and nothing if nobody does anything.
func TestWatch(t *testing.T) {
	for _, v := range variants {
		t.Run(v.String(), func(t *testing.T) {
			h := newHost(t)
			programsOf(t, h, v)
			var w *watch
			labtest.Check(t, h.Do(func() (err error) {
				w, err = openWatch(v)
				return err
			}))
			defer w.close()
			look := func() fingerprint {
				f, err := w.fingerprint([...]bool{true, true})
				labtest.Check(t, err)
				return f
			}
			before := look()
			if look() != before {
				t.Error("to look makes a difference")
			}
			for _, f := range ipfamily.All {
				for _, harm := range [][]string{{"-N", "A"}, {"-A", "A", "-j", "ACCEPT"}, {"-I", "OUTPUT", "-j", "A"}, {"-F"},
					{"-X"}} {
					labtest.Run(t, h, "", program(f)+"-"+v.String(), append([]string{"-w", "5", "-t", "nat"}, harm...)...)
					now := look()
					if now == before {
						t.Errorf("%s: %v is not seen", f, harm)
					}
					before = now
				}
			}
		})
	}
}
