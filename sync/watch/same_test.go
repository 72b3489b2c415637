package watch

import (
	"testing"

	"github.com/verdict-proxy/verdict/internal/system/testkit"
)

// TestSame: no field of an object is forgotten when two of its versions are compared.
func TestSame(t *testing.T) {
	testkit.Compares(t, sameService, "Version")
	testkit.Compares(t, sameScheduling)
	testkit.Compares(t, sameSlice, "Triggered", "Version")
	testkit.Compares(t, sameNode)
}
