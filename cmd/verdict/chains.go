package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net/netip"
	"regexp"
	"strings"

	"github.com/verdict-proxy/verdict/internal/config"
	"github.com/verdict-proxy/verdict/internal/ipfamily"
	"github.com/verdict-proxy/verdict/internal/takeover"
	"github.com/verdict-proxy/verdict/nft"
	"github.com/verdict-proxy/verdict/nft/iptshim"
	"github.com/verdict-proxy/verdict/nft/iptshim/xtables"
	"github.com/verdict-proxy/verdict/sync/dataplane"
	"github.com/verdict-proxy/verdict/sync/snapshot"
)

// findChains gives the programs by which the rules of Verdict's iptables backend on this node are read; nil if nftables carries its
// Services, or nobody does. With iptables it is an error if there are no programs.
func findChains(ctx context.Context, said config.Backend) (*xtables.Programs, error) {
	switch {
	case said == config.IPTables:
		return xtables.Find(ctx)
	case said == config.NFTables || hasTables():
		return nil, nil
	}
	p, err := xtables.Find(ctx)
	if err != nil {
		return nil, nil // without programs there are no rules of ours
	}
	for _, v := range []xtables.Variant{p.Variant, p.Variant.Other()} {
		of, ok := p.OfVariant(ctx, v)
		if !ok {
			continue
		}
		for _, f := range ipfamily.All {
			if wrote, err := of.Wrote(ctx, f); err == nil && wrote {
				return of, nil
			}
		}
	}
	return nil, p.Close()
}

// ownRules says which rules of iptables are ours on this node, for commands beside a running proxy. The error says that there are no
// rules of ours at all, so that nobody would carry the Services without kube-proxy's.
func ownRules(ctx context.Context) (takeover.Own, error) {
	if hasTables() {
		return takeover.Own{}, nil
	}
	p, err := findChains(ctx, config.Auto)
	if err != nil {
		return takeover.Own{}, err
	}
	if p == nil {
		return takeover.Own{}, errors.New("there are no rules of Verdict's here, so that nobody would carry the Services: start verdict run first")
	}
	defer p.Close()
	return takeover.Own{Variant: p.Variant.String(), Rules: true}, nil
}

// chainsFound are the rules of iptables on this node.
type chainsFound struct {
	programs *xtables.Programs
	// saved and rules, how many there are of ours, are of each family; a family that is not served has none.
	saved ipfamily.Per[*iptshim.Saved]
	rules ipfamily.Per[int]
	// structure is what the rules tell of what proxies are told by flags.
	structure ipfamily.Per[nft.Structure]
}

// readChains reads the rules of both families.
func readChains(ctx context.Context, p *xtables.Programs) (*chainsFound, error) {
	c := &chainsFound{programs: p}
	for i, f := range ipfamily.All {
		if !p.Serves(f) {
			continue
		}
		text, err := p.SaveText(ctx, f)
		if err != nil {
			return nil, err
		}
		if c.saved[i], err = iptshim.Parse(text); err != nil {
			return nil, err
		}
		c.rules[i] = bytes.Count(text, []byte("\n-A KUBE-"))
		c.structure[i] = structureOf(text)
	}
	return c, nil
}

// internalMark matches the rules that masquerade what is sent to cluster IPs.
var internalMark = regexp.MustCompile(`(?m)^-A KUBE-SV[CL]-[A-Z2-7]{16} (.*)-j KUBE-MARK-MASQ$`)

var notFromPods = regexp.MustCompile(`(?:^| )! (-s|-i) (\S+) `)

// structureOf reads from rules how pods are told from others, and whether everything is masqueraded.
func structureOf(text []byte) (s nft.Structure) {
	s.GuardLoopback = bytes.Contains(text, []byte("\n-A KUBE-FIREWALL ! -s 127.0.0.0/8 -d 127.0.0.0/8 "))
	m := internalMark.FindSubmatch(text)
	if m == nil {
		return s
	}
	not := notFromPods.FindSubmatch(m[1])
	if not == nil {
		s.MasqueradeAll = true
		return s
	}
	switch what := string(not[2]); {
	case string(not[1]) == "-s":
		if p, err := netip.ParsePrefix(what); err == nil {
			s.Pods.CIDR = p
		}
	case strings.HasSuffix(what, "+"):
		s.Pods.InterfacePrefix = strings.TrimSuffix(what, "+")
	default:
		s.Pods.Interface = what
	}
	return s
}

// compareChains compares the rules of iptables with what the objects ask for or, without objects, looks whether those are there that
// every Service needs: rules of iptables do not say themselves what they should be.
func (o *objectFlags) compareChains(ctx context.Context, p *xtables.Programs, complain bool) (*comparison, error) {
	found, err := readChains(ctx, p)
	if err != nil {
		return nil, err
	}
	c := &comparison{IPTables: p.String(), quiet: true}
	state := &dataplane.State{LocalhostNodePorts: found.structure[0].GuardLoopback}
	if o.given() {
		objects, err := o.load(ctx, &found.structure, true)
		if err != nil {
			return nil, err
		}
		if complain {
			objects.complain()
		}
		c.Objects = objects.source
		for _, flag := range objects.adopted {
			c.Notes = append(c.Notes, "taken from the rules: "+flag)
		}
		objects.config.IPVS.Mode = dataplane.IPVSNever
		state, _ = dataplane.Compute(objects.config, objects.snap)
		c.services = len(state.Services)
	} else {
		c.Notes = append(c.Notes, "rules of iptables do not say what they should be: give the objects, to have those of Services compared")
	}
	model := iptshim.New(chainOptions(o.policy.settings, liberal()))
	model.Plan(state, dataplane.Change{})
	for i, f := range ipfamily.All {
		c.Tables = append(c.Tables, tableJSON{Family: f.String(), There: found.rules[i] > 0, Elements: found.rules[i]})
		if found.saved[i] == nil {
			c.Notes = append(c.Notes, fmt.Sprintf("%s is left out: %v", f, p.Missing(f)))
			continue
		}
		for _, d := range model.Differences(f, found.saved[i]) {
			switch {
			case o.given():
				c.Differences = append(c.Differences, chainDifference(d))
			case d.Wanted:
				c.Wrong = append(c.Wrong, "it is missing: "+strings.TrimPrefix(d.String(), "+ "))
			}
		}
	}
	c.finish()
	return c, nil
}

func chainDifference(d iptshim.Difference) differenceJSON {
	j := differenceJSON{Side: "kernel", Family: d.Family.String(), Object: d.String()[2:], text: d.String()}
	if d.Service != (snapshot.Name{}) {
		j.service = d.Service.String()
		j.Port = j.service
	}
	if d.Wanted {
		j.Side = "wanted"
	}
	return j
}
