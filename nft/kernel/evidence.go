package kernel

import (
	"errors"
	"fmt"
	"net/netip"

	"golang.org/x/sys/unix"

	"github.com/verdict-proxy/verdict/internal/system/ipfamily"
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

// seen is what an element of evidence is about.
type seen struct {
	frontend dataplane.Key
	endpoint netip.AddrPort
}

// Read returns the evidence of both families, in no order: at most twice nft.EvidenceSize elements of each. It returns
// none if no evidence is gathered. While the kernel moves elements, one may be missing until the next Read.
func (r *EvidenceReader) Read() (out []dataplane.Evidence, err error) {
	at := map[seen]int{}
	err = r.each(func(l *nft.Listed) {
		var s seen
		s.frontend, s.endpoint = l.Seen()
		i, ok := at[s] // the kernel may list an element twice
		if !ok {
			i = len(out)
			at[s] = i
			out = append(out, dataplane.Evidence{Frontend: s.frontend, Endpoint: s.endpoint})
		}
		if l.Set == nft.Refused {
			out[i].Refused = l.Packets
		} else {
			out[i].Unanswered = l.Packets
		}
	}, nft.Unanswered, nft.Refused)
	return out, err
}

// Answers returns the endpoints that accepted a connection within nft.AnswerMemory, in no order, perhaps one of them
// twice.
func (r *EvidenceReader) Answers() (out []dataplane.Answer, err error) {
	err = r.each(func(l *nft.Listed) {
		out = append(out, dataplane.Answer{Endpoint: l.Sender(), Ago: max(l.Timeout-l.Expires, 0)})
	}, nft.AnsweredBy)
	return out, err
}

// Forsaken returns the pairs whose client the endpoint does not accept any more, with the time since it last did not.
// Accepted returns those whose client the endpoint accepted within nft.AnswerMemory. Both are in no order, and may have
// a pair twice.
func (r *EvidenceReader) Forsaken() ([]dataplane.Pair, error) { return r.pairs(nft.Forsaken) }

// Accepted is described with Forsaken.
func (r *EvidenceReader) Accepted() ([]dataplane.Pair, error) { return r.pairs(nft.Accepted) }

func (r *EvidenceReader) pairs(set nft.SetID) (out []dataplane.Pair, err error) {
	err = r.each(func(l *nft.Listed) {
		p := dataplane.Pair{Ago: max(l.Timeout-l.Expires, 0)}
		p.Client, p.Endpoint = l.Pair()
		out = append(out, p)
	}, set)
	return out, err
}

// each lists some sets of both families.
func (r *EvidenceReader) each(do func(*nft.Listed), sets ...nft.SetID) error {
	if err := r.ready(); err != nil {
		return err
	}
	for _, f := range ipfamily.All {
		for _, set := range sets {
			some, err := r.holdsSome(f, set)
			if err == nil && some {
				err = r.list(f, set, func(l nft.Listed) { do(&l) })
			}
			if err != nil {
				return err
			}
		}
	}
	return nil
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
