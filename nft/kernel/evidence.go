package kernel

import (
	"errors"
	"fmt"
	"net/netip"

	"golang.org/x/sys/unix"

	"github.com/verdict-proxy/verdict/internal/ipfamily"
	"github.com/verdict-proxy/verdict/nft"
	"github.com/verdict-proxy/verdict/sync/dataplane"
)

// EvidenceReader reads what the kernel saw of endpoints that do not answer or refuse. It has its own socket, so it
// delays nobody. It is not safe for concurrent use.
type EvidenceReader struct{ ownSocket }

// OpenEvidence opens it in the network namespace of the calling thread.
func OpenEvidence() (*EvidenceReader, error) {
	s, err := openSocket()
	if err != nil {
		return nil, err
	}
	return &EvidenceReader{s}, nil
}

// Read returns the evidence of both families, in no order: at most twice nft.EvidenceSize endpoints of each. It returns
// none if no evidence is gathered. While the kernel moves elements, an endpoint may be missing until the next Read.
func (r *EvidenceReader) Read() ([]dataplane.Evidence, error) {
	if err := r.ready(); err != nil {
		return nil, err
	}
	var out []dataplane.Evidence
	for _, f := range ipfamily.All {
		at := map[netip.AddrPort]int{}
		for _, set := range [...]nft.SetID{nft.Unanswered, nft.Refused} {
			some, err := r.holdsSome(f, set)
			if err != nil {
				return nil, err
			}
			if !some {
				continue
			}
			err = r.list(f, set, func(l nft.Listed) { out = addEvidence(out, at, &l) })
			if err != nil {
				return nil, err
			}
		}
	}
	return out, nil
}

// holdsSome reports whether a set may hold elements. It asks for the number, since a list looks into each of the
// set's many buckets; before Linux 6.16 the kernel does not tell.
func (r *EvidenceReader) holdsSome(f ipfamily.Family, set nft.SetID) (bool, error) {
	n, told, err := r.conn.setCount(f, set)
	switch {
	case errors.Is(err, unix.ENOENT):
		return false, nil
	case err != nil:
		return false, fmt.Errorf("nft: count %s %s %s: %w", f.NFT(), nft.TableName, set, err)
	}
	return !told || n > 0, nil
}

// addEvidence adds what an element counts to that of its endpoint, which at finds. The kernel may list an element
// twice.
func addEvidence(out []dataplane.Evidence, at map[netip.AddrPort]int, l *nft.Listed) []dataplane.Evidence {
	ep := l.Endpoint()
	i, ok := at[ep]
	if !ok {
		i = len(out)
		at[ep] = i
		out = append(out, dataplane.Evidence{Endpoint: ep})
	}
	if l.Set == nft.Refused {
		out[i].Refused = l.Packets
	} else {
		out[i].Unanswered = l.Packets
	}
	return out
}
