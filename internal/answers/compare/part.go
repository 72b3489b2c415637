package compare

import (
	"hash"

	"github.com/verdict-proxy/verdict/internal/system/packets"
)

// part is what was found about some of the destinations.
type part struct {
	*comparison
	Result
	groups map[groupKey]*Group
	digest hash.Hash
	buffer [][]packets.Outcome
}
