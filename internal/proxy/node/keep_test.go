package node

import (
	"math/rand/v2"
	"net/netip"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/verdict-proxy/verdict/internal/lab"
	"github.com/verdict-proxy/verdict/internal/lab/labtest"
	"github.com/verdict-proxy/verdict/internal/system/ipfamily"
	"github.com/verdict-proxy/verdict/internal/system/testkit"
	"github.com/verdict-proxy/verdict/sync/snapshot"
)

// TestClientAddressRestarts: Verdict restarts on each node in turn, while clients open connections and hold others.
// None fails, and all that are opened afterwards keep their address.
func TestClientAddressRestarts(t *testing.T) {
	s := labtest.NewSegment(t)
	file := filepath.Join(t.TempDir(), "web.yaml")
	labtest.Check(t, os.WriteFile(file, []byte(keptManifest(s, "verdict-proxy.github.io/client-address: keep")), 0o644))
	logs := make([]logBuffer, 2*len(s.Nodes))
	start := func(node int, log *logBuffer) (stop func()) {
		return startProxy(t, s.Nodes[node], log, "--from", file, "--hostname-override="+s.Nodes[node].Name,
			"--cluster-cidr=10.244.0.0/16,fd00:244::/32", "--healthz-bind-address=127.0.0.1:10256",
			"--client-address=annotated")
	}
	stops := make([]func(), len(s.Nodes))
	for i := range s.Nodes {
		stops[i] = start(i, &logs[i])
	}
	web := func(f ipfamily.Family) netip.AddrPort { return netip.AddrPortFrom(s.VIP[f], 80) }
	kept := func() bool {
		for _, f := range ipfamily.All {
			for range 10 {
				r := s.Outside.Dial(snapshot.TCP, web(f), lab.Options{Timeout: 10 * time.Second})
				if r.Outcome != lab.Answered || r.Source != r.Client {
					return false
				}
			}
		}
		return true
	}
	testkit.Eventually(t, 20*time.Second, "the clients' addresses are kept", kept, logs[0].String)
	tr := labtest.Traffic{Patience: 10 * time.Second, HeldPatience: 10 * time.Second,
		Target: func(r *rand.Rand) (snapshot.Protocol, netip.AddrPort) {
			return []snapshot.Protocol{snapshot.TCP, snapshot.UDP}[r.IntN(2)], web(ipfamily.All[r.IntN(2)])
		}}
	for i := range 40 {
		tr.Hold(s.Outside, web(ipfamily.All[i%2]), time.Hour, 20*time.Millisecond)
	}
	tr.Open(s.Outside, 1)
	for i := range s.Nodes {
		stops[i]()
		log := &logs[len(s.Nodes)+i]
		start(i, log)
		asked := tr.Pings.Load() + 80
		testkit.Eventually(t, 20*time.Second, "held connections answer", func() bool { return tr.Pings.Load() > asked },
			log.String)
		if !kept() {
			t.Errorf("%s restarted: a client's address is not kept", s.Nodes[i].Name)
		}
	}
	tr.Stop()
	t.Log(&tr)
	tr.Check(t)
}
