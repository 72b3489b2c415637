package takeover

import (
	"errors"
	"fmt"

	"github.com/moby/ipvs"
	"golang.org/x/sys/unix"

	"github.com/verdict-proxy/verdict/internal/system/ipvshandle"
)

// openIPVS gives nil if IPVS is not in this kernel: to ask for it would load it.
func openIPVS() (*ipvshandle.Handle, error) {
	if !ipvshandle.Loaded() {
		return nil, nil
	}
	h, err := ipvshandle.Open()
	if errors.Is(err, ipvshandle.ErrMissing) {
		return nil, nil
	}
	return h, err
}

// readDestinations reads the destinations of a virtual service. It is no error if it is gone.
func readDestinations(h *ipvshandle.Handle, s *service) error {
	list, err := h.Destinations(s.Service)
	if err != nil {
		return err
	}
	s.connections, s.foreignDest = 0, false
	for _, d := range list {
		s.connections += d.ActiveConnections + d.InactiveConnections
		masquerades := d.ConnectionFlags&ipvs.ConnectionFlagFwdMask == ipvs.ConnectionFlagMasq
		s.foreignDest = s.foreignDest || !masquerades || d.Weight > 1
	}
	return nil
}

// removeService deletes a virtual service. It is no error if it is gone. One that has other flags by now is somebody
// else's: Verdict adopts virtual services with their connections while this program works through its list.
func removeService(h *ipvshandle.Handle, s *service) error {
	now, err := h.Service(s.Service)
	if err != nil || now == nil || now.Flags&^proxyFlags != 0 {
		return err
	}
	err = h.Do(func(h *ipvs.Handle) error { return h.DelService(s.Service) })
	if err != nil && !errors.Is(err, unix.ESRCH) {
		return fmt.Errorf("ipvs: delete service %s: %w", ipvshandle.Name(s.Service), err)
	}
	return nil
}
