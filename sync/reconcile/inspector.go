package reconcile

import (
	"context"
	"errors"
	"io"

	"github.com/verdict-proxy/verdict/sync/dataplane"
)

// ErrUnsupported is wrapped by errors of an Inspector whose backend cannot answer such a question at all. The error
// says why.
var ErrUnsupported = errors.New("not supported")

// Inspector reads what a backend has installed in the kernel. It needs no Backend and changes nothing, so it can be
// used beside a proxy in another process. An answer may or may not include what that proxy writes meanwhile. Where that
// would make an answer useless, the answer says whether somebody wrote. An Inspector works in the network namespace of
// the calling thread and is not safe for concurrent use.
//
// Parts of an answer that a backend does not have are empty. If the caller may not read, the error says which right is
// missing. It is no error if nothing is installed.
type Inspector interface {
	// Name is the backend's, as in configuration.
	Name() string
	// Present says whether this backend has installed anything of Verdict's. It takes a few milliseconds, or as long as
	// starting a program.
	Present(ctx context.Context) (bool, error)
	// Settings reads from the rules what flags have told the proxy. It costs as much as reading the rules that all
	// Services share or, if a backend writes rules for each Service, as reading all rules.
	Settings(ctx context.Context) (*dataplane.Settings, error)
	// Trace follows a packet through the rules, as the kernel would. It costs a few look-ups by key or, if a backend
	// cannot look up by key, as much as reading all rules.
	Trace(ctx context.Context, p dataplane.Packet, node dataplane.LocalNode) (*dataplane.Trace, error)
	// Differences compares everything that is installed with its own digests and, if wanted is not nil, with that
	// State. It reads everything.
	Differences(ctx context.Context, wanted *dataplane.State) (*dataplane.Differences, error)
	// Counters reads counters. With All it reads every frontend, at a cost that may grow faster than their number.
	// Otherwise it reads a few elements for each frontend.
	Counters(ctx context.Context, ask dataplane.CountersAsked) (*dataplane.Counters, error)
	// Print writes all that is installed as the backend's own tools list it. It reads everything.
	Print(ctx context.Context, w io.Writer) error
	// Close releases the sockets. What is installed stays.
	Close() error
}
