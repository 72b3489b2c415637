package gateway

import (
	"context"
	"fmt"
	"hash/fnv"
	"slices"
	"time"

	"k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	gatewayv1 "sigs.k8s.io/gateway-api/apis/v1"

	"github.com/verdict-proxy/verdict/internal/gateway/routes"
)

// pass is one look at the whole world: what is to be written now. The world does not change meanwhile.
type pass struct {
	*leader
	ctx  context.Context
	plan *routes.Plan
	now  metav1.Time
	jobs []job
	// shown is each of our Gateways' condition Programmed, as its status is or will be, and whether it is so by now.
	shown map[types.NamespacedName]shown
	// unlike are Gateways of routes whose statuses are not as they would be with everything programmed; nil if nobody
	// has asked.
	unlike map[types.NamespacedName]bool
	// wake is when to look again though nothing changes.
	wake time.Duration
}

// shown is what routes say of their Gateway.
type shown struct {
	programmed metav1.Condition
	// said says that statuses may say it: nodes have programmed the Gateway, or have had time to.
	said bool
}

// ProgrammedCondition is a route's condition that says whether nodes have programmed it; the API has none.
const ProgrammedCondition = "verdict-proxy.github.io/Programmed"

// idle is how long nothing is computed if nothing changes.
const idle = time.Hour

// pass computes what follows from the world, and has it written. It returns when to look again.
func (l *leader) pass(ctx context.Context) time.Duration {
	l.world.mu.RLock()
	defer l.world.mu.RUnlock()
	view := l.world.view()
	if view == nil {
		l.writer.replace(nil)
		return idle
	}
	p := &pass{leader: l, ctx: ctx, plan: routes.Compute(view), now: metav1.Now(), wake: idle,
		shown: map[types.NamespacedName]shown{}}
	ours := map[types.NamespacedName]bool{}
	for i := range p.plan.Classes {
		p.class(&p.plan.Classes[i])
	}
	for i := range p.plan.Gateways {
		ours[p.plan.Gateways[i].Object.Key()] = true
		p.gateway(&p.plan.Gateways[i])
	}
	for i := range p.plan.Routes {
		p.route(&p.plan.Routes[i])
	}
	p.strays(ours)
	l.tracker.keep(ours)
	if wait := l.writer.replace(p.jobs); wait > 0 {
		p.sooner(wait)
	}
	return p.wake
}

func (p *pass) sooner(d time.Duration) { p.wake = min(p.wake, max(d, settle)) }

// class writes the status of a GatewayClass.
func (p *pass) class(c *routes.ClassPlan) {
	if want, differs := routes.MergeClass(&c.Object.Status, c.Status, p.now); differs {
		status(p, p.world.classes, classes, c.Object, c.Object.Status, want)
	}
}

// gateway writes a Gateway's Service, and the status that the Gateway has by now.
func (p *pass) gateway(g *routes.GatewayPlan) {
	written := p.service(g)
	now := g.Programmed
	// Without the Service it is not known yet whether there is an address, which is a reason not to wait.
	said := len(g.Needs) == 0 || written && equality.Semantic.DeepEqual(g.Programmed, g.Waiting)
	if at := p.progress(g, written && !said); !said {
		if said = at.programmed; !said {
			now, said = p.waiting(g, at)
		}
	}
	s := shown{said: said}
	if c := find(now.Conditions, string(gatewayv1.GatewayConditionProgrammed)); c != nil {
		s.programmed = *c
	}
	p.shown[g.Object.Key()] = s
	if !said {
		return
	}
	if want, differs := routes.MergeGateway(&g.Object.Status, now, p.now); differs {
		status(p, p.world.gateways, gateways, g.Object, g.Object.Status, want)
	}
}

// progress returns how far nodes are with a Gateway, which they are asked if that is of use.
func (p *pass) progress(g *routes.GatewayPlan, ask bool) progress {
	name, goal := g.Object.Key(), ""
	needs := func() []need { return nil }
	if s := p.world.services.known[g.ServiceName]; ask && s != nil {
		goal = fmt.Sprint(g.Object.UID, s.UID, s.ResourceVersion, digest(g.Needs))
		needs = func() []need { return p.needs(g) }
		if !p.tracker.known(name) && p.isAsProgrammed(g) {
			p.tracker.trust(name, goal)
		}
	}
	return p.tracker.aim(p.ctx, name, goal, needs)
}

func digest(names []types.NamespacedName) uint64 {
	h := fnv.New64a()
	for _, n := range names {
		fmt.Fprintln(h, n.Namespace, n.Name)
	}
	return h.Sum64()
}

// needs are the Services that a Gateway needs, its own first.
func (p *pass) needs(g *routes.GatewayPlan) []need {
	needs := []need{{name: g.ServiceName}}
	for _, n := range g.Needs {
		if s := p.world.services.known[n]; s != nil && n != g.ServiceName {
			needs = append(needs, need{n, s.UID})
		}
	}
	return needs
}

// isAsProgrammed reports whether a Gateway and its routes say already what they say once nodes have programmed it. Then
// whoever led before has seen that.
func (p *pass) isAsProgrammed(g *routes.GatewayPlan) bool {
	if _, differs := routes.MergeGateway(&g.Object.Status, g.Programmed, p.now); differs {
		return false
	}
	if p.unlike == nil {
		p.unlike = map[types.NamespacedName]bool{}
		programmed := metav1.Condition{Status: metav1.ConditionTrue, Reason: string(gatewayv1.GatewayReasonProgrammed)}
		for i := range p.plan.Routes {
			r := p.plan.Routes[i] // a copy
			r.Parents = slices.Clone(r.Parents)
			for j := range r.Parents {
				mark(&r.Parents[j], programmedAs(&r.Parents[j], programmed))
			}
			always := func(*routes.RouteParent) bool { return true }
			if _, differs := routes.MergeRoute(&r, routes.ControllerName, always, p.now); differs {
				for j := range r.Parents {
					p.unlike[r.Parents[j].Gateway] = true
				}
			}
		}
	}
	return !p.unlike[g.Object.Key()]
}

// waiting returns the status of a Gateway that nodes have not programmed, and whether it is time to say so.
func (p *pass) waiting(g *routes.GatewayPlan, at progress) (now routes.GatewayStatus, said bool) {
	reason, why := "", at.why
	if err := p.writer.failureOf(ref{resource: services, name: g.ServiceName}); err != nil && isRejected(err) {
		why, said = fmt.Sprintf("the API server rejects the Service %v: %.500s", g.ServiceName, err), true
		if apierrors.IsInvalid(err) && len(g.Object.Spec.Addresses) > 0 {
			reason = string(gatewayv1.GatewayReasonAddressNotUsable)
		}
	}
	if at.asked.IsZero() && !said {
		return g.Waiting, false
	}
	if left := patience - time.Since(at.asked); left > 0 && !said {
		p.sooner(left)
		return g.Waiting, false
	}
	now = g.Waiting
	if now.Conditions = slices.Clone(now.Conditions); why != "" {
		amend(now.Conditions, reason, why)
		now.Listeners = slices.Clone(now.Listeners)
		for i := range now.Listeners {
			now.Listeners[i].Conditions = slices.Clone(now.Listeners[i].Conditions)
			amend(now.Listeners[i].Conditions, "", why)
		}
	}
	return now, true
}

// amend says in conditions of type Programmed that wait why they do.
func amend(conditions []metav1.Condition, reason, why string) {
	c := find(conditions, string(gatewayv1.GatewayConditionProgrammed))
	if c == nil || c.Reason != string(gatewayv1.GatewayReasonPending) &&
		c.Reason != string(gatewayv1.GatewayReasonAddressNotAssigned) {
		return
	}
	if c.Message = why; reason != "" {
		c.Reason = reason
	}
}

func find(conditions []metav1.Condition, kind string) *metav1.Condition {
	if i := slices.IndexFunc(conditions, func(c metav1.Condition) bool { return c.Type == kind }); i >= 0 {
		return &conditions[i]
	}
	return nil
}
