package ipvsplugin

import (
	"bytes"
	"context"
	"errors"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/verdict-proxy/verdict/internal/lab"
	"github.com/verdict-proxy/verdict/internal/lab/labtest"
	"github.com/verdict-proxy/verdict/internal/system/ipfamily"
	"github.com/verdict-proxy/verdict/sync/dataplane"
)

// TestIPVSLargeDatagrams has datagrams that fit no device go to endpoints and back, in fragments. Those of the node
// itself get to IPVS before they are cut, by the MTU of lo, and it does not cut them: the sender is told at once, and
// by IPv4 only once. By IPv6 IPVS never lets them pass.
func TestIPVSLargeDatagrams(t *testing.T) {
	const mtu = 1500
	w := newWorld(t, 2, 1, dataplane.IPVSAuto)
	w.apply(w.delta(app{number: 1, scheduling: scheduler("rr"), here: ready(0), there: ready(0)}))
	for _, f := range lab.Families() {
		for _, from := range []*lab.Host{w.Node, w.Pods[1], w.Outside} {
			for _, size := range []int{1300, 1400, 1480, 1600, 20000} {
				for range 2 { // one for each endpoint
					err := w.echo(from, f, size)
					told := from == w.Node && size > mtu-48 && errors.Is(err, unix.EMSGSIZE)
					if err != nil && !told {
						t.Errorf("%s sends %d bytes by %v: %v", from.Name, size, f, err)
					}
				}
			}
		}
	}
	if err := w.echo(w.Node, ipfamily.IPv4, 20000); err != nil {
		t.Errorf("the node by IPv4, once it was told: %v", err)
	}
}

// echo sends a datagram, which comes back behind a line.
func (w *world) echo(from *lab.Host, f ipfamily.Family, size int) error {
	c, err := from.DialContext(context.Background(), "udp", vip(1, f).String())
	if err != nil {
		return err
	}
	defer c.Close()
	labtest.Check(w.t, c.SetDeadline(time.Now().Add(patience)))
	sent := bytes.Repeat([]byte("x"), size)
	if _, err := c.Write(sent); err != nil {
		return err
	}
	got := make([]byte, 1<<16)
	n, err := c.Read(got)
	if _, body, _ := bytes.Cut(got[:n], []byte("\n")); err == nil && !bytes.Equal(body, sent) {
		w.t.Errorf("%d of %d bytes came back", len(body), len(sent))
	}
	return err
}
