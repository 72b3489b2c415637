package main

import (
	"cmp"
	"context"
	"fmt"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/verdict-proxy/verdict/internal/ipfamily"
	"github.com/verdict-proxy/verdict/ipvsplugin"
	"github.com/verdict-proxy/verdict/nft"
	"github.com/verdict-proxy/verdict/nft/kernel"
	"github.com/verdict-proxy/verdict/sync/dataplane"
)

// Exit statuses of the commands that compare, which are those of diff(1).
const (
	exitSame = iota
	exitDiffers
	exitTrouble
)

// comparing gives a command the exit statuses of diff: whatever goes wrong is 2.
func comparing(cmd *cobra.Command, run func(ctx context.Context, cmd *cobra.Command) (same bool, err error)) *cobra.Command {
	trouble := func(err error) error {
		fmt.Fprintln(os.Stderr, "verdict:", err)
		return exitStatus(exitTrouble)
	}
	cmd.SetFlagErrorFunc(func(_ *cobra.Command, err error) error { return trouble(err) })
	cmd.Args = func(cmd *cobra.Command, args []string) error {
		if len(args) > 0 {
			return trouble(fmt.Errorf("%s takes no arguments, and was given %q", cmd.Name(), args[0]))
		}
		return nil
	}
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		switch same, err := run(cmd.Context(), cmd); {
		case err != nil:
			return trouble(err)
		case !same:
			return exitStatus(exitDiffers)
		}
		return nil
	}
	return cmd
}

// comparison is what the kernel holds beside what it should hold. Its JSON is documented in docs/ANSWERS.md.
type comparison struct {
	Same bool `json:"same"`
	// Objects says where the objects come from that the kernel is compared with; empty if it is compared with itself alone.
	Objects string      `json:"objects,omitempty"`
	Tables  []tableJSON `json:"tables"`
	// IPTables says which iptables reads the rules; empty with nftables.
	IPTables string `json:"iptables,omitempty"`
	// Wrong says in words what is not as it should be, elements and rules apart.
	Wrong []string `json:"wrong,omitempty"`
	// Contradictions are elements of the kernel that do not fit together.
	Contradictions []differenceJSON `json:"contradictions,omitempty"`
	Differences    []differenceJSON `json:"differences,omitempty"`
	Services       []serviceCount   `json:"services,omitempty"`
	Notes          []string         `json:"notes,omitempty"`

	services int
	// quiet says that nobody wrote while it was read.
	quiet bool
}

type tableJSON struct {
	Family   string `json:"family"`
	There    bool   `json:"there"`
	Owner    uint32 `json:"owner,omitempty"`
	Revision uint32 `json:"revision,omitempty"`
	// Digest is what the table says it should hold, Found what it was found to hold; empty if it changed while it was read.
	Digest   string `json:"digest,omitempty"`
	Found    string `json:"found,omitempty"`
	Elements int    `json:"elements"`
}

type differenceJSON struct {
	// Side is kernel for what only the kernel has, wanted for what only it should have.
	Side   string `json:"side"`
	Family string `json:"family"`
	Object string `json:"object"`
	Set    string `json:"set,omitempty"`
	// Port is the service port it belongs to, "namespace/name:port".
	Port string `json:"port,omitempty"`

	text, service string
	key           string
}

// serviceCount is a summary for a Service; the name is empty for what belongs to none.
type serviceCount struct {
	Service string `json:"service"`
	Missing int    `json:"missing"`
	Extra   int    `json:"extra"`
	Changed int    `json:"changed"`
}

// A difference has to last for settleTime before it is believed: a change may be on its way from the objects to the kernel. While
// the tables are written to all the time, what is read may never have been there at one moment: then it is looked at maxLooks
// times.
const (
	settleTime = 500 * time.Millisecond
	maxLooks   = 3
)

// compare looks at the kernel, and at the objects if there are any. What differs only for a moment does not count.
func (o *objectFlags) compare(ctx context.Context) (*comparison, error) {
	if err := o.check(); err != nil {
		return nil, err
	}
	once, closeReader, err := o.reader(ctx)
	if err != nil {
		return nil, err
	}
	defer closeReader()
	c, err := once(true)
	for look := 1; err == nil && !c.Same && (look == 1 || !c.quiet) && look < maxLooks; look++ {
		select {
		case <-ctx.Done():
			return nil, ctx.Err()
		case <-time.After(settleTime):
		}
		before := c
		if c, err = once(false); err == nil {
			c.keep(before)
		}
	}
	return c, err
}

// reader gives what looks once at the backend that carries the Services here; complain has it say what is wrong with the objects.
func (o *objectFlags) reader(ctx context.Context) (once func(complain bool) (*comparison, error), done func() error, err error) {
	p, err := findChains(ctx, o.policy.settings.Backend)
	if err != nil {
		return nil, nil, err
	}
	if p != nil {
		return func(complain bool) (*comparison, error) { return o.compareChains(ctx, p, complain) }, p.Close, nil
	}
	r, err := kernel.OpenReader()
	if err != nil {
		return nil, nil, err
	}
	return func(complain bool) (*comparison, error) { return o.compareOnce(ctx, r, complain) }, r.Close, nil
}

// keep leaves of a comparison what was there before too.
func (c *comparison) keep(before *comparison) {
	c.Wrong = slices.DeleteFunc(c.Wrong, func(s string) bool { return !slices.Contains(before.Wrong, s) })
	both := func(now, then []differenceJSON) []differenceJSON {
		seen := map[string]bool{}
		for _, d := range then {
			seen[d.text] = true
		}
		return slices.DeleteFunc(now, func(d differenceJSON) bool { return !seen[d.text] })
	}
	c.Contradictions = both(c.Contradictions, before.Contradictions)
	c.Differences = both(c.Differences, before.Differences)
	c.finish()
}

// compareOnce reads everything once.
func (o *objectFlags) compareOnce(ctx context.Context, r *kernel.Reader, complain bool) (*comparison, error) {
	c := &comparison{}
	var wanted *nft.Model
	if o.given() {
		var structure ipfamily.Per[nft.Structure]
		for i, f := range ipfamily.All {
			t, err := r.Table(f)
			if err != nil {
				return nil, err
			}
			structure[i] = t.Structure
		}
		objects, err := o.load(ctx, &structure, true)
		if err != nil {
			return nil, err
		}
		if complain {
			objects.complain()
		}
		c.Objects = objects.source
		for _, flag := range objects.adopted {
			c.Notes = append(c.Notes, "taken from the kernel's rules: "+flag)
		}
		if !ipvsplugin.Loaded() { // then nobody is scheduled by it, whatever the objects ask for
			objects.config.IPVS.Mode = dataplane.IPVSNever
		}
		st, _ := dataplane.Compute(objects.config, objects.snap)
		differs, err := ipvsplugin.Differences(st)
		if err != nil {
			return nil, err
		}
		for _, line := range differs {
			c.Wrong = append(c.Wrong, "IPVS: "+line)
		}
		c.services = len(st.Services)
		wanted = &nft.Model{}
		wanted.Load(st)
	}
	contents, err := r.Contents(wanted)
	if err != nil {
		return nil, err
	}
	c.itself(contents)
	if err := c.scheduled(contents); err != nil {
		return nil, err
	}
	if wanted != nil {
		have := ipfamily.Per[nft.Table]{contents.Tables[0].Table, contents.Tables[1].Table}
		c.Differences = differencesOf(wanted.Differences(&contents.Found, &have))
	}
	c.finish()
	return c, nil
}

// itself compares the kernel with what it says of itself.
func (c *comparison) itself(contents *kernel.Contents) {
	c.Wrong, c.quiet = append(c.Wrong, contents.Wrong...), contents.Quiet
	c.Contradictions = differencesOf(contents.Contradictions)
	if contents.Unchecked > 0 {
		c.Notes = append(c.Notes, fmt.Sprintf("%d frontends were written to whenever one looked: they could not be checked",
			contents.Unchecked))
	}
	for i, f := range ipfamily.All {
		t, found := contents.Tables[i], &contents.Found[i]
		j := tableJSON{Family: f.NFT(), There: t.There, Owner: t.Owner, Revision: found.Revision.Number}
		for set, elements := range found.Elements {
			if nft.SetID(set).IsContent() {
				j.Elements += len(elements)
			}
		}
		written, held := found.Digests.With(found.Revision.Digest), nft.DigestsOfElements(f, t.Structure, found)
		switch {
		case !t.There:
		case found.Revision == nft.Revision{}:
			c.Wrong = append(c.Wrong, fmt.Sprintf("%s %s: it has no revision: whoever wrote it was not done, or was not Verdict",
				f.NFT(), nft.TableName))
		case !contents.Quiet:
			j.Digest = written.Total().String()
			c.Notes = append(c.Notes, fmt.Sprintf("%s %s: it is written to all the time; its digest could not be checked", f.NFT(), nft.TableName))
		default:
			j.Digest, j.Found = written.Total().String(), held.Total().String()
			if held != written {
				c.Wrong = append(c.Wrong, fmt.Sprintf("%s %s: it does not hold what was last written: its digest should be %s and is %s",
					f.NFT(), nft.TableName, j.Digest, j.Found))
			}
		}
		c.Tables = append(c.Tables, j)
	}
}

// scheduled looks whether IPVS has what the tables leave to it.
func (c *comparison) scheduled(contents *kernel.Contents) error {
	there := map[dataplane.Key]bool{}
	read := false
	for i := range ipfamily.All {
		for _, e := range contents.Found[i].Elements[nft.Scheduled] {
			if !read {
				services, err := ipvsplugin.ReadStatistics()
				if err != nil {
					return err
				}
				for _, s := range services {
					there[s.Key] = true
				}
				read = true
			}
			if k := e.FrontendKey(); !there[k] {
				c.Wrong = append(c.Wrong, fmt.Sprintf("IPVS has no virtual service at %s, which is left to it: clients are rejected", k))
			}
		}
	}
	return nil
}

func differencesOf(list []nft.Difference) (out []differenceJSON) {
	for i := range list {
		d := &list[i]
		j := differenceJSON{Side: "kernel", Family: d.Family.NFT(), Object: d.Text, Port: d.Port, text: d.String(), service: d.Service()}
		if d.Wanted {
			j.Side = "wanted"
		}
		if d.Set != nft.NumSets {
			j.Set = d.Set.String()
			j.key = j.Family + " " + j.Set + " " + string(d.Element.Key())
		}
		out = append(out, j)
	}
	return out
}

// finish counts by Service, and says whether all is the same.
func (c *comparison) finish() {
	c.Same = len(c.Wrong)+len(c.Contradictions)+len(c.Differences) == 0
	sides := map[string]int{}
	for _, d := range c.Differences {
		if d.key != "" {
			sides[d.key]++
		}
	}
	counts := map[string]*serviceCount{}
	of := func(name string) *serviceCount {
		if counts[name] == nil {
			counts[name] = &serviceCount{Service: name}
		}
		return counts[name]
	}
	for _, d := range c.Differences {
		switch n := of(d.service); {
		case sides[d.key] == 2 && d.Side == "wanted":
			n.Changed++
		case sides[d.key] == 2:
		case d.Side == "wanted":
			n.Missing++
		default:
			n.Extra++
		}
	}
	c.Services = nil
	for _, n := range counts {
		c.Services = append(c.Services, *n)
	}
	slices.SortFunc(c.Services, func(a, b serviceCount) int {
		return cmp.Or(cmp.Compare(b.Missing+b.Extra+b.Changed, a.Missing+a.Extra+a.Changed), strings.Compare(a.Service, b.Service))
	})
}

// describe says what was compared: "ip verdict revision 12, 143 elements; ip6 verdict revision 12, 96 elements".
func (c *comparison) describe() string {
	var parts []string
	if c.IPTables != "" {
		for _, t := range c.Tables {
			parts = append(parts, fmt.Sprintf("%s %d rules", t.Family, t.Elements))
		}
		return c.IPTables + ": " + strings.Join(parts, "; ")
	}
	for _, t := range c.Tables {
		if t.There {
			parts = append(parts, fmt.Sprintf("%s %s revision %d, %d elements", t.Family, nft.TableName, t.Revision, t.Elements))
		}
	}
	if parts == nil {
		return "there are no tables of Verdict"
	}
	return strings.Join(parts, "; ")
}

// bounded prints lines up to a number, and how many more there are.
func bounded(s *show, lines []string, most int, all bool) {
	for i, l := range lines {
		if i == most && !all {
			s.line("%s", s.paint(dim, fmt.Sprintf("  and %d more (--all)", len(lines)-i)))
			return
		}
		s.line("%s", l)
	}
}

// wrongLines are what is wrong in words.
func (c *comparison) wrongLines(s *show) (lines []string) {
	for _, w := range c.Wrong {
		lines = append(lines, s.paint(red, "! "+w))
	}
	return lines
}

// summary says how many elements of each Service differ.
func (c *comparison) summary(s *show) (lines []string) {
	width := 0
	for _, n := range c.Services {
		width = max(width, len(n.Service))
	}
	for _, n := range c.Services {
		name := n.Service
		if name == "" {
			name = "(no Service's)"
		}
		var parts []string
		for _, p := range []struct {
			n    int
			text string
		}{{n.Missing, "missing"}, {n.Extra, "too many"}, {n.Changed, "other"}} {
			if p.n > 0 {
				parts = append(parts, fmt.Sprintf("%d %s", p.n, p.text))
			}
		}
		lines = append(lines, "  "+columns{max(width, 14) + 2, 1}.row(name, strings.Join(parts, ", ")))
	}
	return lines
}
