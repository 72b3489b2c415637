package lab

import (
	"bytes"
	"encoding/binary"
	"encoding/hex"
	"hash/crc32"
	"strings"
	"testing"
)

func TestSCTPPacket(t *testing.T) {
	for _, p := range []sctpPacket{
		{Source: 32768, Dest: 5000, Chunk: chunkInit, InitTag: 0x11223344},
		{Source: 5000, Dest: 32768, Tag: 0x11223344, Chunk: chunkInitAck, InitTag: 7, Cookie: "pod-1 10.0.0.1:1 10.0.0.2:2"},
		{Source: 1, Dest: 65535, Tag: 9, Chunk: chunkAbort},
	} {
		b := p.encode()
		if len(b)%4 != 0 {
			t.Errorf("%+v: %d bytes", p, len(b))
		}
		got, err := decodeSCTP(b)
		if got != p || err != nil {
			t.Errorf("%+v became %+v, %v", p, got, err)
		}
		b[0] ^= 1
		if _, err := decodeSCTP(b); err == nil {
			t.Errorf("%+v: a wrong checksum passed", p)
		}
	}
}

// The bytes of an INIT, put together by hand from RFC 9260 sections 3.1 and 3.3.2.
func TestSCTPBytes(t *testing.T) {
	const want = "8000 1388 00000000 00000000 01 00 0014 11223344 00010000 0001 0001 00000001" // without the checksum
	got := sctpPacket{Source: 32768, Dest: 5000, Chunk: chunkInit, InitTag: 0x11223344}.encode()
	clean, err := hex.DecodeString(strings.ReplaceAll(want, " ", ""))
	if err != nil {
		t.Fatal(err)
	}
	copy(clean[8:12], got[8:12])
	if !bytes.Equal(got, clean) {
		t.Errorf("got %x, want %x", got, clean)
	}
}

func FuzzDecodeSCTP(f *testing.F) {
	f.Add(sctpPacket{Source: 1, Dest: 2, Chunk: chunkInitAck, InitTag: 7, Cookie: "x"}.encode())
	f.Add(sctpPacket{Source: 1, Dest: 2, Chunk: chunkInit, InitTag: 7}.encode())
	f.Add([]byte{})
	f.Fuzz(func(t *testing.T, b []byte) {
		if len(b) >= sctpHeader { // nobody guesses a checksum
			copy(b[8:], make([]byte, 4))
			binary.LittleEndian.PutUint32(b[8:], crc32.Checksum(b, castagnoli))
		}
		p, err := decodeSCTP(b)
		if err != nil {
			return
		}
		if again, err := decodeSCTP(p.encode()); again != p || err != nil {
			t.Errorf("%+v became %+v, %v", p, again, err)
		}
	})
}
