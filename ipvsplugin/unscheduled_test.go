package ipvsplugin

import (
	"context"
	"log/slog"
	"net/netip"
	"testing"
	"time"

	"github.com/verdict-proxy/verdict/internal/lab"
	"github.com/verdict-proxy/verdict/internal/lab/labtest"
	"github.com/verdict-proxy/verdict/internal/system/ipfamily"
	"github.com/verdict-proxy/verdict/internal/system/testkit"
	"github.com/verdict-proxy/verdict/sync/dataplane"
	"github.com/verdict-proxy/verdict/sync/reconcile"
	"github.com/verdict-proxy/verdict/sync/snapshot"
)

// TestIPVSTaken: where somebody else has the virtual services, as a kube-proxy at work has, nftables carries the
// Services, at once and by their endpoints as they change; and IPVS does once they are gone.
func TestIPVSTaken(t *testing.T) {
	w := newWorld(t, 3, 0, dataplane.IPVSAlways)
	labtest.Run(t, w.Node, "-A -t 10.96.0.1:80 -s wlc\n-a -t 10.96.0.1:80 -r 10.244.1.10:8080 -m\n", "ipvsadm", "-R")

	ctx, cancel := context.WithCancel(context.Background())
	queue := snapshot.NewQueue(1)
	loop := &reconcile.Loop{Queue: queue, Planner: w.planner, Writer: w.backend, Log: slog.New(slog.DiscardHandler)}
	ended := make(chan error, 1)
	go func() { ended <- w.Node.Do(func() error { return loop.Run(ctx) }) }()
	t.Cleanup(func() {
		cancel()
		labtest.Check(t, <-ended)
	})
	addrs, cidrs := append(w.nodeAddrs(), netip.MustParseAddr("127.0.0.1")), lab.ServiceRange
	queue.Put(snapshot.Delta{HostAddrs: &addrs, ServiceCIDRs: &cidrs, Node: &snapshot.Node{Name: "node",
		Addresses: []netip.Addr{w.Node.IP4, w.Node.IP6}, PodCIDRs: lab.NodePodRange}})
	queue.Put(w.delta(app{number: 1, here: ready(1)}))
	queue.Put(w.delta(app{number: 2, here: ready(1)}))
	queue.Synced()

	w.await("both are carried", func() bool {
		return w.reaches(w.Pods[0], 1, w.Pods[1]) && w.reaches(w.Pods[0], 2, w.Pods[1])
	})
	w.has("-A -t 10.96.0.1:80 -s wlc")
	w.has("-A -t 10.96.0.2:80 -s rr")
	if list := loop.Unscheduled(); len(list) != 1 || list[0].Name != (app{number: 1}).name() || loop.Quarantined() != nil {
		t.Errorf("without a scheduler: %v; refused: %v", list, loop.Quarantined())
	}
	queue.Put(w.delta(app{number: 1, here: ready(2)}))
	w.await("the endpoint is another", func() bool { return w.reaches(w.Pods[0], 1, w.Pods[2]) })

	labtest.Run(t, w.Node, "", "ipvsadm", "-D", "-t", "10.96.0.1:80")
	w.await("IPVS schedules it", func() bool { return loop.Unscheduled() == nil })
	w.has("-A -t 10.96.0.1:80 -s rr")
	if !w.reaches(w.Pods[0], 1, w.Pods[2]) {
		t.Error("it is not carried any more")
	}
}

// reaches says whether a Service leads to this pod alone, over IPv4 and TCP.
func (w *world) reaches(from *lab.Host, number int, pod *lab.Host) bool {
	for range 3 {
		if r := from.Dial(snapshot.TCP, vip(number, ipfamily.IPv4), lab.Options{Timeout: patience}); r.Endpoint != pod.Name {
			return false
		}
	}
	return true
}

// await polls until f is true.
func (w *world) await(what string, f func() bool) {
	w.t.Helper()
	testkit.Eventually(w.t, 2*time.Minute, what, f, w.list)
}
