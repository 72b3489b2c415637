package plan

import (
	"context"
	"errors"
	"fmt"

	"github.com/verdict-proxy/verdict/internal/conntrack"
	"github.com/verdict-proxy/verdict/internal/inspect"
	"github.com/verdict-proxy/verdict/nft/kernel"
	"github.com/verdict-proxy/verdict/sync/reconcile"
	"github.com/verdict-proxy/verdict/sync/watch"
)

// Question is what is to be planned.
type Question struct {
	// Objects say where the objects come from, and Files what changes of them.
	Objects *inspect.ObjectFlags
	Files   watch.ChangeFiles
	// Inspector, if not nil, reads what is installed on this node. The plan is for a proxy beside it.
	Inspector reconcile.Inspector
	// Counters is how many counters that proxy's tables may have; 0 is no limit.
	Counters int
}

// Ask reads everything once, in the network namespace of the calling thread, and makes a plan. Problems of the objects
// that are there go to standard error; those of the change are an error.
func (q *Question) Ask(ctx context.Context) (p *Plan, err error) {
	in := Input{Counters: q.Counters}
	var notes []string
	if in.Objects, notes, err = q.load(ctx); err != nil {
		return nil, err
	}
	q.Files.NodeName = in.Objects.Config.NodeName
	if in.Change, err = watch.LoadChange(q.Files, in.Objects.Snap); err != nil {
		return nil, err
	}
	present := false
	if q.Inspector != nil {
		if present, err = q.Inspector.Present(ctx); err != nil {
			return nil, err
		}
	}
	switch {
	case !present:
		notes = append(notes, "Verdict has programmed nothing here: the plan is made from the objects alone")
	case q.Inspector.Name() != "nftables":
		notes = append(notes, fmt.Sprintf("%s carries the Services: what is written is counted as elements of nftables",
			q.Inspector.Name()))
	default:
		if in.Kernel, err = kernel.OpenReader(); err != nil {
			return nil, err
		}
		defer func() { err = errors.Join(err, in.Kernel.Close()) }()
	}
	if present {
		if in.Flows, err = conntrack.Dial(0); err != nil {
			return nil, err
		}
		defer func() { err = errors.Join(err, in.Flows.Close()) }()
	}
	if p, err = Make(ctx, in); err == nil {
		p.Notes = append(notes, p.Notes...)
	}
	return p, err
}

// load reads the objects, with what the proxy on this host knows of endpoints.
func (q *Question) load(ctx context.Context) (*inspect.Objects, []string, error) {
	if q.Inspector != nil {
		w, err := q.Objects.LoadBeside(ctx, q.Inspector, true)
		if err != nil {
			return nil, nil, err
		}
		return w.Objects, w.Notes(), nil
	}
	objects, err := q.Objects.Load(ctx, nil, false)
	if err != nil {
		return nil, nil, err
	}
	objects.PrintProblems()
	return objects, nil, nil
}
