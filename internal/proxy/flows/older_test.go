package flows

import (
	"testing"
	"time"

	"github.com/verdict-proxy/verdict/internal/lab"
	"github.com/verdict-proxy/verdict/internal/lab/labtest"
	"github.com/verdict-proxy/verdict/internal/proxy/conntrack"
	"github.com/verdict-proxy/verdict/internal/system/ipfamily"
	"github.com/verdict-proxy/verdict/internal/system/testkit"
	"github.com/verdict-proxy/verdict/sync/snapshot"
)

// sums returns the bytes that clients sent, by the book's sums, and how many connections are open.
func (r *rig) sums() (sent, open uint64) {
	_, all := ask[Sum](r.t, r.book, "sums=1")
	for _, s := range all {
		if sent += s.Sent.Bytes; s.Minute.Equal(all[len(all)-1].Minute) {
			open += s.Open
		}
	}
	return sent, open
}

// TestOlderConnections: connections from before the recorder have one record each, which says since when they are
// known, whether the kernel tells of their end or not. Sums have the bytes of open ones, once.
func TestOlderConnections(t *testing.T) {
	for _, events := range []string{"events=1", "events=2"} {
		t.Run(events, func(t *testing.T) {
			r := newRig(t, append([]string{events}, shortTimeouts...)...)
			r.stop()
			var old []*lab.Conn
			for _, f := range lab.Families() {
				old = append(old, r.dial(r.Pods[0], snapshot.TCP, web(f, echoPort)))
			}
			r.snap = snapshot.New()
			r.open()
			r.apply(r.services(true))
			testkit.Eventually(t, 10*time.Second, "a first look", func() bool {
				r.recorder.mu.Lock()
				defer r.recorder.mu.Unlock()
				return r.recorder.older.looks > 0
			})
			began := time.Now()
			young := r.dial(r.Pods[0], snapshot.TCP, web(ipfamily.IPv4, echoPort))
			all := append(old, young)
			labtest.Check(t, r.recorder.look(t.Context(), time.Now()))
			before, open := r.sums()
			if open != uint64(len(all)) || before == 0 {
				t.Errorf("the sums have %d open connections with %d bytes", open, before)
			}
			for _, c := range all {
				labtest.Check(t, c.Close())
			}
			labtest.Check(t, r.recorder.look(t.Context(), time.Now()))
			testkit.Eventually(t, 10*time.Second, "an empty table", func() bool {
				left := 0
				labtest.Check(t, r.walker.Look(t.Context(), func(f *conntrack.Flow) {
					if f.Translated() {
						left++
					}
				}))
				return left == 0
			})
			for range 2 {
				labtest.Check(t, r.recorder.look(t.Context(), time.Now()))
			}
			sent := uint64(0)
			for _, c := range all {
				got := r.expect(c.Local(), snapshot.TCP, "closed")
				if is := c != young; is == got.Since.IsZero() || got.Since.After(began) || is && got.Endpoint.Pod == "" {
					t.Errorf("%+v", got)
				}
				sent += got.Sent.Bytes
			}
			if bytes, _ := r.sums(); bytes != sent || sent <= before {
				t.Errorf("the records have %d bytes, the sums %d, of which %d were sent before the end", sent, bytes, before)
			}
			if len(r.records) > 0 {
				t.Errorf("more records: %+v", r.records)
			}
		})
	}
}
