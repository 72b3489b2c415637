package lab

import (
	"bytes"
	"encoding/hex"
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
	const want = "8000 1388 00000000 SUM 01 00 0014 11223344 00010000 0001 0001 00000001"
	got := sctpPacket{Source: 32768, Dest: 5000, Chunk: chunkInit, InitTag: 0x11223344}.encode()
	clean, err := hex.DecodeString(string(bytes.ReplaceAll(bytes.Replace([]byte(want), []byte("SUM"), []byte("00000000"), 1), []byte(" "), nil)))
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
	f.Add([]byte{})
	f.Fuzz(func(t *testing.T, b []byte) {
		p, err := decodeSCTP(b)
		if err != nil {
			findCookie(b)
			return
		}
		if again, err := decodeSCTP(p.encode()); again != p || err != nil {
			t.Errorf("%+v became %+v, %v", p, again, err)
		}
	})
}
