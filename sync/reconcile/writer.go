package reconcile

import (
	"time"

	"github.com/verdict-proxy/verdict/sync/dataplane"
)

// Writer programs states into the kernel. It is told states, not chores; a Change only says where to look.
type Writer interface {
	// Apply takes the kernel from what it holds to a state, as one transaction, or if that would be too large a part of
	// the way: then Receipt.Left names the Services that are not wholly written, and Apply is called again for them,
	// maybe with another state. After an error the kernel still holds what it held before, and the next Apply must look
	// at the whole state, whatever its Change says. That Change is from the last state that was acknowledged: a Writer
	// that knows that the kernel holds just that may as well go by it.
	//
	// If the kernel refuses what belongs to some Services, the error wraps a *dataplane.Refused that names them.
	Apply(want *dataplane.State, change dataplane.Change) (dataplane.Receipt, error)
	// Check looks, for a few milliseconds, whether somebody else changed what is ours in the kernel. It gives what it
	// found in words, one line each; after it found something the next Apply repairs it, whatever its Change says. again
	// is in how long it wants to be called next; 0 leaves it to the caller (CheckEvery).
	Check() (found []string, again time.Duration, err error)
	// Remove takes everything of ours out of the kernel. That nothing is there is no error.
	Remove() error
}
