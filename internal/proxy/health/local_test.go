package health

import (
	"context"
	"net"
	"net/http"
	"net/http/httptest"
	"testing"
)

// TestOnlyHost: processes of this host may ask, by its loopback address or another of its own, and nobody else.
func TestOnlyHost(t *testing.T) {
	h := OnlyHost(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusNoContent) }))
	for _, c := range []struct {
		from, to string
		want     int
	}{
		{"127.0.0.1:9", "127.0.0.1", 204}, {"[::1]:9", "::1", 204}, {"[::ffff:127.0.0.1]:9", "127.0.0.1", 204},
		{"192.0.2.10:9", "192.0.2.10", 204}, {"192.0.2.11:9", "192.0.2.10", 403}, {"10.244.0.7:9", "127.0.0.1", 403},
		{"pipe", "127.0.0.1", 403},
	} {
		r := httptest.NewRequest("GET", "/status", nil)
		r.RemoteAddr = c.from
		r = r.WithContext(context.WithValue(r.Context(), http.LocalAddrContextKey, &net.TCPAddr{IP: net.ParseIP(c.to)}))
		w := httptest.NewRecorder()
		if h.ServeHTTP(w, r); w.Code != c.want {
			t.Errorf("from %s to %s: %d; want %d", c.from, c.to, w.Code, c.want)
		}
	}
}
