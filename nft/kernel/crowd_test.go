package kernel

import (
	"encoding/binary"
	"fmt"
	"net/netip"
	"testing"
	"time"

	"github.com/verdict-proxy/verdict/internal/lab/labtest"
	"github.com/verdict-proxy/verdict/internal/system/ipfamily"
	"github.com/verdict-proxy/verdict/nft"
	"github.com/verdict-proxy/verdict/sync/dataplane"
	"github.com/verdict-proxy/verdict/sync/snapshot"
)

// TestAffinityShares has the clients of one Service, with 200 ports, fill most of the map of remembered clients. The
// Service is named, once, and no longer when the clients are forgotten.
func TestAffinityShares(t *testing.T) {
	h, _ := host(t)
	var told [][]AffinityShare
	b := open(t, h, Options{Crowded: func(s []AffinityShare) { told = append(told, s) }})
	greedy := apply200Ports(t, b)
	check := func(entries, news int) {
		t.Helper()
		b.affinityFill.due = time.Time{} // as if half a minute had passed
		for deadline := time.Now().Add(3 * time.Minute); ; {
			_, again, err := b.Check()
			labtest.Check(t, err)
			if again == 0 && !b.sweep.running {
				break
			}
			if time.Now().After(deadline) {
				t.Fatal("Check has no end")
			}
		}
		got := b.AffinityShares()
		// A list of a map that grows has a few twice, or not at all.
		named := len(got) > 0 && got[0].Service == greedy && got[0].Family == ipfamily.IPv4 &&
			max(got[0].Entries-entries, entries-got[0].Entries) < 1000
		if named != (entries > 0) || len(told) != news {
			t.Errorf("%d entries: %v hold most; told %d times, want %d", entries, got, len(told), news)
		}
	}
	check(0, 0)
	theirs := netip.MustParseAddrPort("10.128.0.0:8080")
	var web uint32
	var ports []uint32
	for of, id := range b.model.PoolIDs(ipfamily.IPv4) {
		switch {
		case of.Outside:
		case of.Key.Addr == netip.MustParseAddr("10.96.0.0"):
			ports = append(ports, id)
		default:
			web = id
		}
	}
	remember(t, b, web, netip.MustParseAddrPort("10.128.0.1:8080"), nft.AffinityBuckets)
	for _, id := range ports[:len(ports)/2] {
		remember(t, b, id, theirs, nft.AffinityBuckets)
	}
	check(0, 0)
	for _, id := range ports[len(ports)/2:] {
		remember(t, b, id, theirs, nft.AffinityBuckets)
	}
	check(200*nft.AffinityBuckets, 1)
	check(200*nft.AffinityBuckets, 1)
	_, err := h.Run("nft", "flush", "map", "ip", "verdict", "affinity")
	labtest.Check(t, err)
	check(0, 1)
}

// apply200Ports writes two Services with session affinity: one has 200 ports and is given by name, the other has one.
func apply200Ports(t *testing.T, b *Backend) snapshot.Name {
	delta := large(2, 1)
	greedy := snapshot.Name{Namespace: "default", Name: "service-0"}
	for _, svc := range delta.Services {
		svc.Affinity = time.Hour
	}
	svc, slice := delta.Services[greedy], delta.Slices[greedy]
	svc.Ports, slice.Ports = nil, nil
	for i := range 200 {
		name := fmt.Sprintf("p%d", i)
		svc.Ports = append(svc.Ports, snapshot.Port{Name: name, Protocol: snapshot.TCP, Port: uint16(1000 + i)})
		slice.Ports = append(slice.Ports, snapshot.SlicePort{Name: name, Protocol: snapshot.TCP, Port: 8080})
	}
	snap, planner := snapshot.New(), dataplane.NewPlanner(configs["cluster CIDR"])
	change, _ := planner.Apply(snap, snap.Apply(delta))
	_, err := b.ApplyAll(planner.State(), change)
	labtest.Check(t, err)
	return greedy
}

// remember writes n entries of a pool, as its clients would by connections.
func remember(t *testing.T, b *Backend, pool uint32, endpoint netip.AddrPort, n int) {
	t.Helper()
	var target [8]byte // address, port, and what fills the word
	copy(target[:], endpoint.Addr().AsSlice())
	binary.BigEndian.PutUint16(target[4:], endpoint.Port())
	there := map[string]bool{}
	var entries []nft.Listed
	for client := netip.MustParseAddr("172.16.0.1"); len(entries) < n; client = client.Next() {
		e := nft.AffinityElement(pool, client)
		if there[string(e.Key())] {
			continue
		}
		there[string(e.Key())] = true
		if !e.SetData(ipfamily.IPv4, target[:]) {
			t.Fatal("an IPv4 endpoint has another length")
		}
		entries = append(entries, nft.Listed{Element: e, Timeout: time.Hour, Expires: time.Hour})
	}
	b.batch.Reset()
	b.batch.Begin()
	b.batch.affinity(ipfamily.IPv4, entries)
	b.batch.Finish()
	refused, err := b.conn.Commit(b.batch.Bytes())
	if err != nil || len(refused) > 0 {
		t.Fatalf("%v, refused %v", err, refused)
	}
	b.generation = nextGeneration(b.generation)
}
