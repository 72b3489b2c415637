package backends

import (
	"slices"
	"testing"

	"github.com/verdict-proxy/verdict/internal/proxy/config"
)

// TestConfigNamesAll: a backend that the configuration does not name could not be asked for, and one that is not there
// would be refused late.
func TestConfigNamesAll(t *testing.T) {
	var names []config.Backend
	for _, b := range All {
		names = append(names, config.Backend(b.Name))
	}
	if !slices.Equal(names, config.Backends) {
		t.Errorf("the backends are %v, and the configuration names %v", names, config.Backends)
	}
}
