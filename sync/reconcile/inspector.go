package reconcile

import (
	"context"
	"errors"

	"github.com/verdict-proxy/verdict/sync/dataplane"
)

// ErrUnsupported is wrapped by an Inspector's error that says that its backend cannot answer such a question at all,
// and why.
var ErrUnsupported = errors.New("not supported")

// Inspector reads what a backend has installed in the kernel: the half of the contract that answers questions. It needs
// no Backend, and changes nothing, so that it may be used beside a proxy that runs in another process; what that writes
// meanwhile may show in an answer or not, and where an answer is of use only if nobody wrote, it says whether somebody
// did. It works in the network namespace of the thread that calls it, and is not safe for concurrent use.
//
// What a backend does not have, it leaves empty in its answer. Whoever may not read gets an error that says what is
// missing. That nothing is installed is no error.
type Inspector interface {
	// Name is the backend's, as in configuration.
	Name() string
	// Present says whether anything of Verdict's is installed by this backend. It takes some milliseconds at most, or
	// what it takes to start a program.
	Present(ctx context.Context) (bool, error)
	// Settings reads what the rules tell of what proxies are told by flags. It costs as much as reading the rules that
	// are the same for all Services or, where a backend writes rules for each, as reading all.
	Settings(ctx context.Context) (*dataplane.Settings, error)
	// Trace follows a packet through what is installed, as the kernel would. It costs a few look-ups by key or, where a
	// backend has no such thing, as much as reading all rules.
	Trace(ctx context.Context, p dataplane.Packet, node dataplane.LocalNode) (*dataplane.Trace, error)
	// Differences compares all that is installed with what it says of itself and, if that is not nil, with a wanted
	// State. It reads everything.
	Differences(ctx context.Context, wanted *dataplane.State) (*dataplane.Differences, error)
	// Counters reads counters. With All it reads everything that frontends have, at a cost that may grow faster than
	// their number; otherwise some elements for each frontend.
	Counters(ctx context.Context, ask dataplane.CountersAsked) (*dataplane.Counters, error)
	// Close gives up what it holds. What is installed stays.
	Close() error
}
