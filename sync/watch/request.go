package watch

import (
	"net/http"
	"time"
)

// Request is one HTTP request to the API server.
type Request struct {
	// Method is "GET"; Host the server's address and port.
	Method, Host string
	// Code is the status of the response; 0 means that there was none.
	Code int
	// Took is the time until the response began.
	Took time.Duration
}

// requestObserver reports the requests that go through it.
type requestObserver struct {
	next      http.RoundTripper
	requested func(Request)
}

func (o requestObserver) RoundTrip(r *http.Request) (*http.Response, error) {
	start := time.Now()
	resp, err := o.next.RoundTrip(r)
	done := Request{Method: r.Method, Host: r.URL.Host, Took: time.Since(start)}
	if err == nil {
		done.Code = resp.StatusCode
	}
	o.requested(done)
	return resp, err
}

// WrappedRoundTripper lets client-go find the transport below.
func (o requestObserver) WrappedRoundTripper() http.RoundTripper { return o.next }
