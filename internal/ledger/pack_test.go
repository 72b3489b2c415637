package ledger

import (
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
