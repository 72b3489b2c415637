package kernel

import (
	"encoding/binary"
	"errors"
	"fmt"
	"time"

	"golang.org/x/sys/unix"

	"github.com/verdict-proxy/verdict/nft"
)

// Elements reads all elements of one of our sets, in the kernel's order. A table or set that is not there gives none.
func (c *Conn) Elements(f nft.Family, set nft.SetID) ([]nft.Listed, error) {
	var w buffer
	w.reset()
	m := w.message(subsystem|unix.NFT_MSG_GETSETELEM, unix.NLM_F_REQUEST|unix.NLM_F_DUMP, f)
	w.text(unix.NFTA_SET_ELEM_LIST_TABLE, nft.TableName)
	w.text(unix.NFTA_SET_ELEM_LIST_SET, set.String())
	w.end(m)
	var out []nft.Listed
	err := c.dump(w.b, func(attrs []byte) {
		eachAttr(attrs, func(typ uint16, list []byte) {
			if typ != unix.NFTA_SET_ELEM_LIST_ELEMENTS {
				return
			}
			eachAttr(list, func(_ uint16, elem []byte) {
				if l, ok := parseElement(f, set, elem); ok {
					out = append(out, l)
				}
			})
		})
	})
	if err != nil && !errors.Is(err, unix.ENOENT) {
		return nil, fmt.Errorf("nft: list %s %s %s: %w", f, nft.TableName, set, err)
	}
	return out, nil
}

// parseElement reads one element; those that only end a range are none.
func parseElement(f nft.Family, set nft.SetID, elem []byte) (l nft.Listed, ok bool) {
	var key, keyEnd, data []byte
	var chain, comment string
	end := false
	eachAttr(elem, func(typ uint16, v []byte) {
		switch typ {
		case unix.NFTA_SET_ELEM_KEY:
			key = dataValue(v)
		case nftaSetElemKeyEnd:
			keyEnd = dataValue(v)
		case unix.NFTA_SET_ELEM_DATA:
			data, chain = dataValue(v), verdictChain(v)
		case unix.NFTA_SET_ELEM_FLAGS:
			end = len(v) == 4 && binary.BigEndian.Uint32(v)&intervalEnd != 0
		case unix.NFTA_SET_ELEM_USERDATA:
			if len(v) > 2 && v[0] == udataComment {
				comment = unix.ByteSliceToString(v[2:])
			}
		case unix.NFTA_SET_ELEM_TIMEOUT:
			l.Timeout = milliseconds(v)
		case unix.NFTA_SET_ELEM_EXPIRATION:
			l.Expires = milliseconds(v)
		case unix.NFTA_SET_ELEM_EXPR:
			l.Counted, l.Packets, l.Bytes = counter(v)
		}
	})
	if end {
		return l, false
	}
	l.Element, ok = nft.ElementFrom(f, set, key, keyEnd, data, chain, comment)
	return l, ok
}

// dataValue gives the bytes of a nested data attribute; nil if it holds a verdict.
func dataValue(nested []byte) (value []byte) {
	eachAttr(nested, func(typ uint16, v []byte) {
		if typ == unix.NFTA_DATA_VALUE {
			value = v
		}
	})
	return value
}

// verdictChain gives the chain a verdict leads to; empty if there is none.
func verdictChain(nested []byte) (chain string) {
	eachAttr(nested, func(typ uint16, v []byte) {
		if typ != unix.NFTA_DATA_VERDICT {
			return
		}
		eachAttr(v, func(typ uint16, v []byte) {
			if typ == unix.NFTA_VERDICT_CHAIN {
				chain = unix.ByteSliceToString(v)
			}
		})
	})
	return chain
}

func counter(expression []byte) (ok bool, packets, bytes uint64) {
	eachAttr(expression, func(typ uint16, v []byte) {
		if typ != unix.NFTA_EXPR_DATA {
			return
		}
		eachAttr(v, func(typ uint16, v []byte) {
			switch {
			case typ == unix.NFTA_COUNTER_PACKETS && len(v) == 8:
				ok, packets = true, binary.BigEndian.Uint64(v)
			case typ == unix.NFTA_COUNTER_BYTES && len(v) == 8:
				bytes = binary.BigEndian.Uint64(v)
			}
		})
	})
	return ok, packets, bytes
}

func milliseconds(v []byte) time.Duration {
	if len(v) != 8 {
		return 0
	}
	return time.Duration(binary.BigEndian.Uint64(v)) * time.Millisecond
}
