package xtables

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"time"

	"github.com/verdict-proxy/verdict/internal/system/ipfamily"
)

// Compat maintains, beside nftables, the two chains of kube-proxy to which other programs jump: KUBE-MARK-MASQ marks a
// packet, and KUBE-POSTROUTING masquerades marked packets.
type Compat struct {
	Programs *Programs
	// Bit is the bit of the mark, 0 to 31.
	Bit int
	Log *slog.Logger

	// lastErrors is what was said last of each family.
	lastErrors ipfamily.Per[string]
}

// The chains.
const (
	markChain        = "KUBE-MARK-MASQ"
	postroutingChain = "KUBE-POSTROUTING"
)

// compatEvery is how often Run checks the chains.
const compatEvery = 5 * time.Second

// Run writes the chains, and repairs them when somebody else changes or removes them, until the context ends. The
// chains stay.
func (c *Compat) Run(ctx context.Context) {
	tick := time.NewTicker(compatEvery)
	defer tick.Stop()
	for first := true; ; first = false {
		for _, f := range ipfamily.All {
			if c.Programs.Serves(f) {
				c.repairAndLog(ctx, f, first)
			}
		}
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
	}
}

// repairAndLog keeps the chains of a family once, and logs what is new.
func (c *Compat) repairAndLog(ctx context.Context, f ipfamily.Family, first bool) {
	changed, err := c.Keep(ctx, f)
	text := ""
	switch {
	case ctx.Err() != nil:
		return
	case err != nil:
		text = err.Error()
		if text != c.lastErrors[f] {
			c.Log.Warn("failed to apply the compatibility chains (iptablesCompat); retrying", "family", f.String(), "err",
				err)
		}
	case changed && first:
		c.Log.Info("the compatibility chains (iptablesCompat) are programmed", "family", f.String(), "programs",
			c.Programs.String())
	case changed:
		c.Log.Warn("another program changed the compatibility chains (iptablesCompat); repaired", "family",
			f.String())
	}
	c.lastErrors[f] = text
}

// Keep repairs the chains of a family, and returns whether that was necessary.
func (c *Compat) Keep(ctx context.Context, f ipfamily.Family) (changed bool, err error) {
	saved, err := c.Programs.Save(ctx, f, "nat", false)
	if err != nil {
		return false, err
	}
	want := compatRules(c.Bit)
	is := rulesOf(string(saved))
	jump := slices.Contains(is["POSTROUTING"], compatJump)
	if jump && compatible(is, want) {
		return false, nil
	}
	return true, c.Programs.Restore(ctx, f, []byte(compatText(want, jump)))
}

// Remove removes the chains of both families if Verdict wrote them. While other rules jump to them they stay, which is
// not an error.
func (c *Compat) Remove(ctx context.Context) error {
	var errs []error
	for _, f := range ipfamily.All {
		if c.Programs.Serves(f) {
			errs = append(errs, c.remove(ctx, f))
		}
	}
	return errors.Join(errs...)
}

func (c *Compat) remove(ctx context.Context, f ipfamily.Family) error {
	saved, err := c.Programs.Save(ctx, f, "nat", false)
	if err != nil {
		return err
	}
	is := rulesOf(string(saved))
	if !slices.ContainsFunc(is[markChain], func(rule string) bool { return strings.Contains(rule, compatComment) }) {
		return nil // there are none, or somebody else made them
	}
	for chain, rules := range is {
		for _, rule := range rules {
			if chain != markChain && leadsTo(rule, markChain) {
				c.Log.Info("the compatibility chains (iptablesCompat) stay: other rules jump to them",
					"family", f.String(), "chain", chain)
				return nil
			}
		}
	}
	var b strings.Builder
	b.WriteString("*nat\n")
	for range slices.DeleteFunc(slices.Clone(is["POSTROUTING"]), func(rule string) bool { return rule != compatJump }) {
		b.WriteString("-D POSTROUTING " + compatJump + "\n")
	}
	for _, chain := range []string{postroutingChain, markChain} {
		fmt.Fprintf(&b, ":%s - [0:0]\n-X %s\n", chain, chain)
	}
	b.WriteString("COMMIT\n")
	return c.Programs.Restore(ctx, f, []byte(b.String()))
}

// compatComment tells our chains from those of a kubelet before Kubernetes 1.28, which are the same.
const compatComment = "kept by verdict for others that jump here"

const compatJump = `-m comment --comment "kubernetes postrouting rules" -j KUBE-POSTROUTING`

// compatRules gives the rules of both chains as iptables-save prints them.
func compatRules(bit int) map[string][]string {
	mark := uint32(1) << bit
	return map[string][]string{
		markChain: {fmt.Sprintf(`-m comment --comment "%s" -j MARK --set-xmark %#x/%#x`, compatComment, mark, mark)},
		postroutingChain: {
			fmt.Sprintf("-m mark ! --mark %#x/%#x -j RETURN", mark, mark),
			fmt.Sprintf("-j MARK --set-xmark %#x/0x0", mark),
			`-m comment --comment "kubernetes service traffic requiring SNAT" -j MASQUERADE --random-fully`,
		},
	}
}

func compatText(want map[string][]string, jump bool) string {
	var b strings.Builder
	b.WriteString("*nat\n")
	for _, chain := range []string{markChain, postroutingChain} {
		fmt.Fprintf(&b, ":%s - [0:0]\n", chain)
	}
	for _, chain := range []string{markChain, postroutingChain} {
		for _, rule := range want[chain] {
			fmt.Fprintf(&b, "-A %s %s\n", chain, rule)
		}
	}
	if !jump {
		b.WriteString("-I POSTROUTING " + compatJump + "\n")
	}
	b.WriteString("COMMIT\n")
	return b.String()
}

// rulesOf gives the rules of each chain of a saved table, without the chain's name.
func rulesOf(saved string) map[string][]string {
	rules := map[string][]string{}
	for line := range strings.Lines(saved) {
		line = strings.TrimSpace(line)
		if rest, ok := strings.CutPrefix(line, "-A "); ok {
			chain, rule, _ := strings.Cut(rest, " ")
			rules[chain] = append(rules[chain], rule)
		}
	}
	return rules
}

// compatible says whether the chains do what is wanted, whoever made them. Versions of iptables quote differently; a
// kubelet beside us may have added its own rule, which does the same once more.
func compatible(is, want map[string][]string) bool {
	plain := func(rules []string) (out []string) {
		for _, r := range rules {
			r = strings.ReplaceAll(r, `"`, "")
			out = append(out, strings.TrimPrefix(r, "-m comment --comment "+compatComment+" "))
		}
		return slices.Compact(out)
	}
	for chain := range want {
		if !slices.Equal(plain(is[chain]), plain(want[chain])) {
			return false
		}
	}
	return true
}

// leadsTo says whether a rule jumps to a chain.
func leadsTo(rule, chain string) bool {
	return strings.HasSuffix(rule, "-j "+chain) || strings.HasSuffix(rule, "-g "+chain)
}
