package plan

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"github.com/verdict-proxy/verdict/internal/answers/inspect"
	"github.com/verdict-proxy/verdict/internal/proxy/conntrack"
	"github.com/verdict-proxy/verdict/internal/proxy/status"
	"github.com/verdict-proxy/verdict/internal/system/terminal"
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
	if in.Change, err = watch.LoadChange(ctx, q.Files, in.Objects.Snap); err != nil {
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
	if p, err = Make(ctx, in); err != nil {
		return nil, err
	}
	if present {
		notes = append(notes, q.quarantineNotes(ctx, p)...)
	}
	p.Notes = append(notes, p.Notes...)
	return p, nil
}

// quarantineNotes asks the proxy on this host which of the Services that change the kernel rejects.
func (q *Question) quarantineNotes(ctx context.Context, p *Plan) []string {
	addr := q.Objects.Policy.Settings().Healthz
	if !addr.IsValid() {
		return nil // the notes say already that there is no health server
	}
	st, err := inspect.LoadStatus(ctx, addr, nil, false)
	if err != nil {
		return []string{"which Services are quarantined is not known: " + err.Error()}
	}
	return p.quarantined(st.Quarantined)
}

// quarantined says of each Service of the plan that is quarantined what that means for the plan.
func (p *Plan) quarantined(q status.Quarantined) (notes []string) {
	for _, s := range p.Services {
		i := slices.IndexFunc(q.Services, func(other status.QuarantinedService) bool { return other.Service == s.Name })
		if i >= 0 {
			notes = append(notes, fmt.Sprintf("%s is quarantined: the kernel rejects it, and has what it accepted before. "+
				"Its plan comes true once the kernel accepts it: %.200s", s.Name, q.Services[i].Error))
		}
	}
	if more := q.Count - len(q.Services); more > 0 && len(p.Services) > 0 {
		notes = append(notes, terminal.Plural(more, "more Service")+" quarantined, which the proxy does not name")
	}
	return notes
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
