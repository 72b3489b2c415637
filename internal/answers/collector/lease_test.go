package collector

import (
	"bytes"
	"context"
	"errors"
	"io"
	"log/slog"
	"net/http"
	"testing"
	"testing/synctest"
	"time"

	"k8s.io/client-go/util/flowcontrol"

	"github.com/verdict-proxy/verdict/sync/snapshot"
)

// lateLease is a server with one Lease that nobody holds at first. The answer to the second write comes after a delay,
// and there is none to later ones.
type lateLease struct {
	delay  time.Duration
	writes int
}

func (l *lateLease) RoundTrip(q *http.Request) (*http.Response, error) {
	text := []byte(`{"metadata": {"namespace": "kube-system", "name": "collector"}, "spec": {}}`)
	if q.Method == http.MethodPut {
		switch l.writes++; l.writes {
		case 1:
		case 2:
			time.Sleep(l.delay)
		default:
			return nil, errors.New("nobody answers")
		}
		var err error
		if text, err = io.ReadAll(q.Body); err != nil {
			return nil, err
		}
	}
	return &http.Response{StatusCode: http.StatusOK, Body: io.NopCloser(bytes.NewReader(text)), Request: q}, nil
}

// TestLateAnswer: a process that is stopped while its Lease is renewed leads no longer than others wait since the
// server has written that.
func TestLateAnswer(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		e := &elector{lease: snapshot.Name{Namespace: "kube-system", Name: "collector"}, identity: "first",
			log: slog.New(slog.DiscardHandler), api: &api{http: &http.Client{Transport: &lateLease{delay: 9 * time.Second}},
				base: "http://server", limiter: flowcontrol.NewFakeAlwaysRateLimiter()}}
		ctx, stop := context.WithCancel(t.Context())
		defer stop()
		var led time.Duration
		e.run(ctx, func(leading context.Context) {
			begin := time.Now()
			<-leading.Done()
			led = time.Since(begin)
			stop()
		})
		if led < renewEvery || led >= renewEvery+leaseTerm {
			t.Errorf("led for %v, though its Lease was written after %v and others wait %v", led, renewEvery, leaseTerm)
		}
	})
}
