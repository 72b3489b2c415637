package lab

import (
	"encoding/binary"
	"errors"
	"hash/crc32"
)

// Many kernels have no SCTP sockets, or have not loaded them. The beginning of an association is enough to see where a
// packet goes: INIT, answered by INIT ACK or ABORT (RFC 9260 section 5.1), with the verification tags and checksums
// that conntrack looks at.

// The chunks of an SCTP packet that are used here.
const (
	chunkInit    = 1
	chunkInitAck = 2
	chunkAbort   = 6
)

const (
	sctpHeader      = 12
	initChunk       = 16 // the fixed part of INIT and INIT ACK after the chunk's header
	paramCookie     = 7  // state cookie: what an INIT ACK must carry
	cookieParamHead = 4
)

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// sctpPacket is an SCTP packet with one chunk.
type sctpPacket struct {
	// Source and Dest are ports.
	Source, Dest uint16
	// Tag is the verification tag: the Init.Tag of the receiver, 0 in an INIT.
	Tag uint32
	// Chunk is the type of the chunk.
	Chunk uint8
	// InitTag and Cookie are what INIT and INIT ACK carry; zero otherwise. An INIT has no cookie.
	InitTag uint32
	Cookie  string
}

// encode gives the packet as it follows the IP header.
func (p sctpPacket) encode() []byte {
	b := binary.BigEndian.AppendUint16(nil, p.Source)
	b = binary.BigEndian.AppendUint16(b, p.Dest)
	b = binary.BigEndian.AppendUint32(b, p.Tag)
	b = append(b, 0, 0, 0, 0) // checksum, below
	b = append(b, p.Chunk, 0, 0, 0)
	if p.Chunk == chunkInit || p.Chunk == chunkInitAck {
		b = binary.BigEndian.AppendUint32(b, p.InitTag)
		b = binary.BigEndian.AppendUint32(b, 65536) // receiver window
		b = binary.BigEndian.AppendUint16(b, 1)     // streams out
		b = binary.BigEndian.AppendUint16(b, 1)     // streams in
		b = binary.BigEndian.AppendUint32(b, 1)     // first transmission sequence number
		if p.Chunk == chunkInitAck {
			b = binary.BigEndian.AppendUint16(b, paramCookie)
			b = binary.BigEndian.AppendUint16(b, uint16(cookieParamHead+len(p.Cookie)))
			b = append(b, p.Cookie...)
		}
	}
	binary.BigEndian.PutUint16(b[sctpHeader+2:], uint16(len(b)-sctpHeader))
	for len(b)%4 != 0 { // padding that no length counts
		b = append(b, 0)
	}
	binary.LittleEndian.PutUint32(b[8:], crc32.Checksum(b, castagnoli))
	return b
}

var errNotSCTP = errors.New("lab: not an SCTP packet")

// decodeSCTP reads what follows an IP header. Of several chunks only the first is looked at.
func decodeSCTP(b []byte) (sctpPacket, error) {
	if len(b) < sctpHeader+4 {
		return sctpPacket{}, errNotSCTP
	}
	sum := crc32.Checksum(b[:8], castagnoli)
	sum = crc32.Update(sum, castagnoli, make([]byte, 4))
	if crc32.Update(sum, castagnoli, b[sctpHeader:]) != binary.LittleEndian.Uint32(b[8:]) {
		return sctpPacket{}, errors.New("lab: wrong SCTP checksum")
	}
	p := sctpPacket{
		Source: binary.BigEndian.Uint16(b),
		Dest:   binary.BigEndian.Uint16(b[2:]),
		Tag:    binary.BigEndian.Uint32(b[4:]),
		Chunk:  b[sctpHeader],
	}
	length := int(binary.BigEndian.Uint16(b[sctpHeader+2:]))
	if length < 4 || sctpHeader+length > len(b) {
		return sctpPacket{}, errNotSCTP
	}
	if p.Chunk != chunkInit && p.Chunk != chunkInitAck {
		return p, nil
	}
	body := b[sctpHeader+4 : sctpHeader+length]
	if len(body) < initChunk {
		return sctpPacket{}, errNotSCTP
	}
	p.InitTag = binary.BigEndian.Uint32(body)
	if p.Chunk == chunkInitAck {
		p.Cookie = findCookie(body[initChunk:])
	}
	return p, nil
}

// findCookie looks for the state cookie among the parameters of an INIT ACK.
func findCookie(params []byte) string {
	for len(params) >= cookieParamHead {
		kind, length := binary.BigEndian.Uint16(params), int(binary.BigEndian.Uint16(params[2:]))
		if length < cookieParamHead || length > len(params) {
			return ""
		}
		if kind == paramCookie {
			return string(params[cookieParamHead:length])
		}
		params = params[min((length+3)&^3, len(params)):]
	}
	return ""
}
