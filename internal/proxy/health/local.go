package health

import (
	"net"
	"net/http"
	"net/netip"
)

// OnlyHost lets only processes of this host ask, those in pods with its network included. Others may not know the names
// of Services.
func OnlyHost(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if !FromHost(r) {
			http.Error(w, "only processes of this host may ask", http.StatusForbidden)
			return
		}
		next.ServeHTTP(w, r)
	})
}

// FromHost reports whether a process of this host asks.
func FromHost(r *http.Request) bool {
	from, err := netip.ParseAddrPort(r.RemoteAddr)
	if err != nil {
		return false
	}
	local, _ := r.Context().Value(http.LocalAddrContextKey).(*net.TCPAddr)
	own := local != nil && local.AddrPort().Addr().Unmap() == from.Addr().Unmap()
	return own || from.Addr().Unmap().IsLoopback()
}
