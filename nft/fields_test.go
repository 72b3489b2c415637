package nft

import (
	"reflect"
	"testing"

	"github.com/verdict-proxy/verdict/internal/system/testkit"
)

// TestSame: no field is forgotten when two elements with the same key are compared.
func TestSame(t *testing.T) {
	// The set says how long data is, and which sets hold ranges.
	testkit.Compares(t, (*Element).same, "Set", "KeyLen", "DataLen", "key")
}

// TestClone: no field of a service is forgotten when it is copied, and none is shared that changes later.
func TestClone(t *testing.T) {
	s := testkit.Filled[service]()
	s.slotsUnknown = false // the slots of a copy are known
	s.byID = nil           // and its ports are found anew
	if c := s.cloneUnassigned(); !reflect.DeepEqual(c, s) {
		t.Errorf("cloned: %+v\nfrom %+v", c, s)
	}
	f := s.cloneWithoutSlots()
	for i := range f.ports[0].pools {
		f.ports[0].pools[i].slots = s.ports[0].pools[i].slots
		if s.ports[0].pools[i].slots == nil {
			t.Error("forgetting the slots of a copy took those of the original")
		}
	}
	if !reflect.DeepEqual(f, s) {
		t.Errorf("forgotten: %+v\nfrom %+v", f, s)
	}
}
