package nft

import (
	"slices"

	"github.com/verdict-proxy/verdict/internal/system/ipfamily"
	"github.com/verdict-proxy/verdict/sync/dataplane"
)

// connections gives what an element has counted; nil if it does not count.
func (l *Listed) connections() *uint64 {
	if !l.Counted {
		return nil
	}
	n := l.Packets
	return &n
}

// PortName reads from an element's comment to which service port it belongs. It is not ok if there is none.
func (e *Element) PortName(proto Protocol) (dataplane.PortName, bool) {
	return dataplane.ParsePortName(e.Comment, proto)
}

// Trace gives the walk as an Inspector answers it.
func (w *Walk) Trace(f ipfamily.Family) *dataplane.Trace {
	t := &dataplane.Trace{Cause: w.Cause(), Unclear: slices.Clone(w.Unclear)}
	for i := range w.Endings {
		t.Endings = append(t.Endings, w.Endings[i].Ending)
	}
	for i := range w.Steps {
		t.Steps = append(t.Steps, w.Steps[i].trace(f))
	}
	if len(w.Endings) > 0 {
		for i := range w.Endings[0].Steps {
			step := w.Endings[0].Steps[i].trace(f)
			step.Translated = true
			t.Steps = append(t.Steps, step)
		}
	}
	if l, _, ok := w.Frontend(); ok {
		t.Port, _ = l.PortName(l.FrontendKey().Protocol)
		t.Connections = l.connections()
	}
	return t
}

func (s *Step) trace(f ipfamily.Family) dataplane.TraceStep {
	t := dataplane.TraceStep{Chain: s.Chain.Name(), Rule: s.Rule.Text(f), Matched: s.Matched}
	for i := range s.Found {
		set := SetByID(s.Found[i].Set)
		t.Found = append(t.Found, s.Found[i].Text(f, &set))
	}
	return t
}
