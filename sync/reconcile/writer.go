package reconcile

import (
	"time"

	"github.com/verdict-proxy/verdict/sync/dataplane"
)

// Writer programs states into the kernel. It receives whole states; a Change only says where they may differ from the
// last one.
type Writer interface {
	// Apply brings the kernel to a state in one transaction, or closer to it if one would be too large. In that case
	// Receipt.Left names the Services that are not written completely, and the caller calls Apply again, maybe with
	// another state. After an error the caller takes it that the kernel still holds what it held before: the Change of
	// the next Apply starts at the last acknowledged state. A Writer that knows that the kernel holds exactly that state
	// may rely on it. Any other must compare whatever it may have written meanwhile, although no Change names it.
	//
	// If the kernel rejects what belongs to some Services, the error wraps a *dataplane.Refused that names them.
	Apply(want *dataplane.State, change dataplane.Change) (dataplane.Receipt, error)
	// Check looks, for a few milliseconds, whether somebody else changed what is ours in the kernel. It returns one
	// line for each finding, and the next Apply repairs them, whatever its Change says. again is the delay until the
	// next call; 0 leaves it to the caller (CheckEvery).
	Check() (found []string, again time.Duration, err error)
	// Remove removes everything of ours from the kernel. It is no error if nothing is there.
	Remove() error
}
