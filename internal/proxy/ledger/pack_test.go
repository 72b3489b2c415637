package ledger

import (
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"testing"
)

// TestDictionary: the dictionary is the one by which all ledgers were written.
func TestDictionary(t *testing.T) {
	sum := sha256.Sum256(dictionary)
	if got := hex.EncodeToString(sum[:]); got != "5055df09a09c2f4cc246143a952435db4c368584bca33030fd010da490cbf7cc" {
		t.Errorf("its digest is %s: older ledgers cannot be read with it", got)
	}
}

// TestPack: a batch comes back as it was, also the one that deflate makes most of; what a record says of its length is
// not believed.
func TestPack(t *testing.T) {
	var p packer
	for _, batch := range [][]byte{{7}, dictionary, make([]byte, 10<<20)} {
		r := Record{Batch: p.pack(batch), Bytes: len(batch)}
		if got, err := r.Unpack(); err != nil || !bytes.Equal(got, batch) {
			t.Errorf("%d bytes come back as %d, error %v", len(batch), len(got), err)
		}
		for _, n := range []int{-1, len(batch) + 1, 1 << 62} {
			r.Bytes = n
			if got, err := r.Unpack(); err == nil {
				t.Errorf("a batch of %d bytes is unpacked as %d", len(batch), len(got))
			}
		}
	}
}
