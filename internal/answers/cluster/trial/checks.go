package trial

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sync/errgroup"
	corev1 "k8s.io/api/core/v1"

	"github.com/verdict-proxy/verdict/internal/answers/cluster"
	"github.com/verdict-proxy/verdict/internal/answers/probe"
	"github.com/verdict-proxy/verdict/internal/system/ipfamily"
)

// direct is the case without a Service.
const direct = "pod"

// maxDirect bounds how many pods another pod dials directly.
const maxDirect = 16

// check is one address to dial from one pod, and who may answer.
type check struct {
	name string
	dial probe.Dial
	// only is the server that must answer; empty means any. Same says that it must be the same each time, and refused
	// that nobody may, and that the connection must be refused.
	only          string
	same, refused bool
}

// checks lists what is dialed from a pod of a place.
func (t *trial) checks(i int, from string) (list []check) {
	p := t.places[i]
	for _, own := range p.pods[from].Status.PodIPs {
		f, ok := familyOf(own.IP)
		if !ok {
			continue
		}
		list = append(list, t.directly(i, f)...)
		add := func(kind string, times int, to []string, port func(*corev1.ServicePort) int32, set func(*check)) {
			for _, addr := range to {
				if g, ok := familyOf(addr); !ok || g != f || t.services[kind] == nil {
					continue
				}
				for n := range t.services[kind].Spec.Ports {
					sp := &t.services[kind].Spec.Ports[n]
					c := check{name: kind, dial: probe.Dial{Network: strings.ToLower(string(sp.Protocol)),
						Address: net.JoinHostPort(addr, strconv.Itoa(int(port(sp)))), Times: times}}
					set(&c)
					list = append(list, c)
				}
			}
		}
		any, port := func(*check) {}, func(sp *corev1.ServicePort) int32 { return sp.Port }
		add(clusterIP, 4, t.addresses(clusterIP), port, any)
		add(externalIP, 2, t.addresses(externalIP), port, any)
		add(loadBalancer, 2, t.addresses(loadBalancer), port, any)
		add(internal, 2, t.addresses(internal), port, func(c *check) { c.only = p.name })
		add(affinity, 6, t.addresses(affinity), port, func(c *check) { c.same = true })
		add(empty, 1, t.addresses(empty), port, func(c *check) { c.refused = true })
		node := func(sp *corev1.ServicePort) int32 { return sp.NodePort }
		add(nodePort, 2, texts(p.addresses), node, any)
		add(localNode, 2, texts(p.addresses), node, any)
		next := t.places[(i+1)%len(t.places)]
		if next == p {
			continue
		}
		add(nodePort, 2, texts(next.addresses), node, any)
		// The next node sends what comes from a pod to any server, and does not masquerade it: unless this node does, the
		// answer of a third one is nobody's.
		if from == onNode {
			add(localNode, 2, texts(next.addresses), node, func(c *check) { c.only = next.name })
		}
	}
	return list
}

// directly lists pods that are dialed without a Service.
func (t *trial) directly(i int, f ipfamily.Family) (list []check) {
	for k := range min(len(t.places), maxDirect) {
		to := t.places[(i+k)%len(t.places)]
		for _, ip := range to.pods[server].Status.PodIPs {
			if g, ok := familyOf(ip.IP); ok && g == f {
				list = append(list, check{name: direct, only: to.name, dial: probe.Dial{Network: "tcp", Times: 1,
					Address: net.JoinHostPort(ip.IP, strconv.Itoa(serverPort))}})
			}
		}
	}
	return list
}

// addresses returns where one of the Services answers, besides nodes.
func (t *trial) addresses(kind string) (list []string) {
	svc := t.services[kind]
	switch {
	case svc == nil:
	case kind == externalIP:
		return svc.Spec.ExternalIPs
	case kind == loadBalancer:
		for _, in := range svc.Status.LoadBalancer.Ingress {
			if in.IP != "" {
				list = append(list, in.IP)
			}
		}
	default:
		return svc.Spec.ClusterIPs
	}
	return list
}

func texts(list []netip.Addr) (out []string) {
	for _, a := range list {
		out = append(out, a.String())
	}
	return out
}

func familyOf(ip string) (ipfamily.Family, bool) {
	a, err := netip.ParseAddr(ip)
	return ipfamily.Of(a), err == nil
}

// judge says how many connections went wrong, and how.
func (c *check) judge(a *probe.Answer) (failed int, why string) {
	note := func(text string) {
		if failed++; why == "" {
			why = text
		}
	}
	for i, text := range a.Errors {
		if !c.refused || i >= a.Refused {
			note(text)
		}
	}
	for _, name := range a.Names {
		switch {
		case c.refused:
			note("the server of node " + name + " answers, though the Service has no endpoint")
		case c.only != "" && name != c.only:
			note(fmt.Sprintf("the server of node %s answers, not that of node %s", name, c.only))
		case c.same && name != a.Names[0]:
			note(fmt.Sprintf("the server of node %s answers after that of node %s", name, a.Names[0]))
		}
	}
	return failed, why
}

// tryAll dials everything from all pods, some at a time.
func (t *trial) tryAll(ctx context.Context) {
	results := make([][]Result, 2*len(t.places))
	problems := make([]error, len(results))
	var group errgroup.Group
	group.SetLimit(max(t.Parallel, 1))
	for i := range results {
		group.Go(func() error {
			results[i], problems[i] = t.try(ctx, i/2, []string{inPod, onNode}[i%2])
			return nil
		})
	}
	_ = group.Wait() // none returns an error
	for i := range results {
		if problems[i] != nil {
			t.fails("node %s: %v", t.places[i/2].name, problems[i])
		}
		for n := range results[i] {
			r := &results[i][n]
			if r.Case != externalIP || !strings.HasSuffix(r.Why, syscall.ENETUNREACH.Error()) {
				t.report.Results = append(t.report.Results, *r)
				continue
			}
			why := fmt.Sprintf("%s in %s: a pod or node has no route to it, so its packets do not get as far as Verdict",
				externalIP, r.Family)
			if !slices.Contains(t.report.Skipped, why) {
				t.report.Skipped = append(t.report.Skipped, why)
			}
		}
	}
}

// try dials everything from one pod.
func (t *trial) try(ctx context.Context, i int, from string) (results []Result, err error) {
	list, p := t.checks(i, from), t.places[i]
	var dials []probe.Dial
	longest := t.Timeout
	for _, c := range list {
		dials = append(dials, c.dial)
		longest += t.o.Dial * time.Duration(c.dial.Times) // if nobody answers, and nothing is dialed beside
	}
	text, err := json.Marshal(dials)
	if err != nil {
		return nil, err
	}
	limited, cancel := context.WithTimeout(ctx, longest)
	defer cancel()
	var out, errs bytes.Buffer
	code, err := t.Exec.Exec(limited, t.o.Namespace, p.pods[from].Name, containerOf, []string{"verdict", "probe", "dial",
		"--timeout=" + t.o.Dial.String()}, bytes.NewReader(text), &out, &errs)
	if err == nil && code != 0 {
		err = fmt.Errorf("probe: exit status %d: %.300s", code, errs.String())
	}
	var answers []probe.Answer
	if err == nil {
		err = json.Unmarshal(out.Bytes(), &answers)
	}
	if err == nil && len(answers) != len(list) {
		err = fmt.Errorf("probe: %d answers to %d questions", len(answers), len(list))
	}
	if err != nil {
		return nil, err
	}
	for n := range list {
		c := &list[n]
		at, _ := netip.ParseAddrPort(c.dial.Address)
		r := Result{Case: c.name, Network: c.dial.Network, Family: ipfamily.Of(at.Addr()).String(), From: from,
			Node: p.name, To: c.dial.Address, Tries: c.dial.Times}
		r.Failed, r.Why = c.judge(&answers[n])
		results = append(results, r)
	}
	return results, nil
}

// maxExplained bounds how many failures are explained.
const maxExplained = 10

// explain asks the nodes for the causes of the first failures, one of each case and pod.
func (t *trial) explain(ctx context.Context) {
	asked := map[string]bool{}
	for i := range t.report.Results {
		r := &t.report.Results[i]
		key := strings.Join([]string{r.Case, r.Network, r.Family, r.From, r.Node}, " ")
		if r.Failed == 0 || r.Case == direct || asked[key] || len(asked) == maxExplained {
			continue
		}
		asked[key] = true
		r.Cause = "verdict explain on node " + r.Node + ": " + t.cause(ctx, r)
		if slices.ContainsFunc(t.report.Results, func(d Result) bool {
			return d.Case == direct && d.Failed > 0 && d.Node == r.Node && d.From == r.From && d.Family == r.Family
		}) {
			r.Cause += "; from there pods do not answer without a Service either: look at the pod network first"
		}
	}
}

// cause asks a node what happens to a connection.
func (t *trial) cause(ctx context.Context, r *Result) string {
	source := "node"
	if r.From == inPod {
		p := t.places[slices.IndexFunc(t.places, func(p *place) bool { return p.name == r.Node })]
		for _, ip := range p.pods[inPod].Status.PodIPs {
			if f, ok := familyOf(ip.IP); ok && f.String() == r.Family {
				source = ip.IP
			}
		}
	}
	result, err := t.Explain(ctx, &cluster.Asked{Node: r.Node, Source: source, Destination: r.To + "/" + r.Network}, true,
		"-o", "json")
	if err != nil {
		return err.Error()
	}
	var said struct {
		Kernel    struct{ Outcome, Why string }
		Preflight []struct{ What, Advice string }
	}
	if err := json.Unmarshal(result.Stdout, &said); err != nil || said.Kernel.Outcome == "" {
		return fmt.Sprintf("no answer: exit status %d, %.300s", result.Code, result.Stderr)
	}
	text := said.Kernel.Why
	for _, f := range said.Preflight {
		text += "; " + f.What + " (" + f.Advice + ")"
	}
	return text
}
