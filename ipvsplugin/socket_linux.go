package ipvsplugin

import (
	"net/netip"

	"golang.org/x/sys/unix"

	"github.com/verdict-proxy/verdict/internal/system/ipfamily"
	"github.com/verdict-proxy/verdict/internal/system/netlink"
)

// socket is a netlink socket in the network namespace of the thread that opened it, with the messages it sends next.
// It is for one goroutine at a time.
type socket struct {
	*netlink.Conn
	out netlink.Buffer
	// messages and bytes count what was committed.
	messages, bytes int
	// heard, if not nil, is called with each answer of the kernel.
	heard func()
}

// hear says that the kernel has answered.
func (s *socket) hear() {
	if s.heard != nil {
		s.heard()
	}
}

// receiveBuffer has room for what the kernel answers to maxBatch messages, of which each takes less than a kilobyte,
// several times.
const receiveBuffer = 4 << 20

func openSocket(protocol int) (*socket, error) {
	s, err := netlink.Open(protocol, 0)
	if err != nil {
		return nil, err
	}
	_ = s.SetReadBuffer(receiveBuffer) // without the right to it the default will do for maxBatch answers
	return &socket{Conn: netlink.New(s, false)}, nil
}

func (s *socket) close() error {
	if s == nil {
		return nil
	}
	return s.Close()
}

// maxBatch bounds the messages of one datagram, so that the answers fit into a receive buffer of default size even if
// all of them are refused.
const maxBatch = 200

// refused is what the kernel says against one message of a batch, by its place.
type refused map[int]unix.Errno

// commit sends the messages in the buffer. The kernel works them off one by one, whatever becomes of those before.
func (s *socket) commit() (refused, error) {
	list, err := s.Commit(s.out.Bytes())
	if err != nil {
		return nil, err
	}
	s.hear()
	s.messages += s.out.Count()
	s.bytes += s.out.Len()
	r := refused{}
	for _, e := range list {
		r[int(e.Seq)-1] = e.Errno
	}
	return r, nil
}

// number is the kernel's number of an address's family.
func number(a netip.Addr) uint16 { return uint16(ipfamily.Of(a).NFProto()) }

// addrOf returns an address of a family's number; invalid if there is none. IPVS has 16 bytes for every address.
func addrOf(number uint16, v netlink.Value) netip.Addr {
	f, ok := ipfamily.OfNFProto(uint8(number))
	if !ok || len(v) < f.AddrLen() {
		return netip.Addr{}
	}
	a, _ := netip.AddrFromSlice(v[:f.AddrLen()])
	return a
}
