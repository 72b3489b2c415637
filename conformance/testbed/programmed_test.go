package testbed

import (
	"context"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
)

func TestReadProgrammed(t *testing.T) {
	for _, test := range []struct {
		name   string
		code   int
		body   string
		want   versions
		silent bool
		err    string
	}{
		{
			name: "both versions", code: 200,
			body: `{"received":{"services":"9","endpointSlices":"10"},"programmed":{"services":"7","endpointSlices":"8"}}`,
			want: versions{Services: "7", EndpointSlices: "8"},
		},
		{name: "nothing is programmed yet", code: 200, body: `{"received":{"services":"9"}}`},
		{name: "an older version", code: 404, body: "404 page not found", silent: true},
		{name: "it is forbidden", code: 403, err: "403 Forbidden"},
		{name: "no JSON", code: 200, body: "ok", err: statusURL},
	} {
		t.Run(test.name, func(t *testing.T) {
			server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
				w.WriteHeader(test.code)
				_, _ = w.Write([]byte(test.body))
			}))
			defer server.Close()
			got, err := readProgrammed(t.Context(), clientOf(server))
			if test.err != "" {
				if err == nil || !strings.Contains(err.Error(), test.err) {
					t.Fatalf("error %v, want %q", err, test.err)
				}
				return
			}
			if err != nil {
				t.Fatal(err)
			}
			if (got == nil) != test.silent || got != nil && *got != test.want {
				t.Errorf("got %+v, want %+v", got, test.want)
			}
		})
	}
}

// clientOf returns a client whose every connection goes to a server.
func clientOf(server *httptest.Server) *http.Client {
	return &http.Client{Transport: &http.Transport{
		DisableKeepAlives: true,
		DialContext: func(ctx context.Context, network, _ string) (net.Conn, error) {
			return new(net.Dialer).DialContext(ctx, network, server.Listener.Addr().String())
		},
	}}
}
