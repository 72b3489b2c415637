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
		from, err := netip.ParseAddrPort(r.RemoteAddr)
		local, _ := r.Context().Value(http.LocalAddrContextKey).(*net.TCPAddr)
		own := local != nil && local.AddrPort().Addr().Unmap() == from.Addr().Unmap()
		if err != nil || !own && !from.Addr().Unmap().IsLoopback() {
			http.Error(w, "only processes of this host may ask", http.StatusForbidden)
			return
		}
		next.ServeHTTP(w, r)
	})
}
