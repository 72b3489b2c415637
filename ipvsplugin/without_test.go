package ipvsplugin

import (
	"errors"
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/verdict-proxy/verdict/internal/lab/labtest"
	"github.com/verdict-proxy/verdict/sync/dataplane"
	"github.com/verdict-proxy/verdict/sync/snapshot"
)

// counting is a backend that writes nothing.
type counting struct{ applied, removed int }

func (c *counting) Apply(*dataplane.State, dataplane.Change) (dataplane.Receipt, error) {
	c.applied++
	return dataplane.Receipt{Adopted: true, Added: 3}, nil
}
func (c *counting) Check() ([]string, time.Duration, error) { return []string{"x"}, time.Minute, nil }
func (c *counting) Remove() error                           { c.removed++; return nil }

// TestWithoutIPVS has a backend that nobody asks for IPVS do nothing, and one that is asked say what is missing. In a
// kernel with IPVS nothing is missing.
func TestWithoutIPVS(t *testing.T) {
	h := labtest.NewHost(t, labtest.NewNet(t), "node")
	labtest.Check(t, h.Do(func() error {
		inner := &counting{}
		b, err := New(inner, Options{})
		if err != nil {
			return err
		}
		defer b.Close()
		st := &dataplane.State{Services: map[snapshot.Name]*dataplane.Service{}}
		r, err := b.Apply(st, dataplane.Change{})
		if err != nil || !r.Adopted || r.Added != 3 || r.Messages != 0 && !Loaded() || inner.applied != 1 {
			t.Errorf("%+v, %v", r, err)
		}
		if found, again, err := b.Check(); len(found) != 1 || again != time.Minute || err != nil {
			t.Errorf("%q, %v, %v", found, again, err)
		}
		pool := &dataplane.Pool{
			Endpoints: []dataplane.Endpoint{{AddrPort: netip.MustParseAddrPort("10.244.0.1:80"), Weight: 1}},
		}
		n := snapshot.Name{Namespace: "a", Name: "b"}
		st.Services[n] = &dataplane.Service{Name: n, Ports: []*dataplane.ServicePort{{
			Name: dataplane.PortName{
				Service: n,
			}, Cluster: pool, Local: &dataplane.Pool{}, Scheduling: &dataplane.Scheduling{Scheduler: "rr"},
			Frontends: []dataplane.Frontend{{Key: dataplane.Key{Addr: netip.MustParseAddr("10.96.0.1"), Port: 80},
				Routes: []dataplane.Route{{Pool: pool}}}},
		}}}
		_, err = b.Apply(st, dataplane.Change{Services: []snapshot.Name{n}})
		refused, missing := (*dataplane.Refused)(nil), (*Missing)(nil)
		switch probed := Probe("rr"); {
		case probed == nil && (err != nil || inner.applied != 2):
			t.Errorf("%v, %d", err, inner.applied)
		case probed == nil:
		case !errors.As(probed, &missing) || !strings.Contains(probed.Error(), "ip_vs"):
			t.Error(probed)
		case !errors.As(err, &refused) || refused.Services[n] == nil || inner.applied != 1:
			t.Errorf("%v, %d", err, inner.applied)
		}
		delete(st.Services, n)
		if _, err := b.Apply(st, dataplane.Change{Services: []snapshot.Name{n}}); err != nil {
			t.Error(err)
		}
		if err := b.Remove(); err != nil || inner.removed != 1 {
			t.Error(err)
		}
		return nil
	}))
}
