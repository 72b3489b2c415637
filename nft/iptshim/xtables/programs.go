// Package xtables finds the iptables programs of a host and runs them: the I/O of the iptables backend, whose rules
// package iptshim knows as values.
package xtables

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"

	"github.com/verdict-proxy/verdict/internal/system/ipfamily"
	"github.com/verdict-proxy/verdict/nft/iptshim"
)

// program is what the names of a family's programs begin with.
func program(f ipfamily.Family) string { return [...]string{"iptables", "ip6tables"}[f] }

// Variant is one of the two iptables. A kernel may have the rules of both at the same time, and every packet passes all
// of them.
type Variant uint8

// The variants.
const (
	// NFT keeps its rules in nf_tables.
	NFT Variant = iota
	// Legacy is the iptables from before nf_tables.
	Legacy
)

var variants = [...]Variant{NFT, Legacy}

var variantNames = [...]string{"nft", "legacy"}

// String gives "nft" or "legacy", as in the names of the programs.
func (v Variant) String() string { return variantNames[v] }

// Other gives the other variant.
func (v Variant) Other() Variant { return Legacy - v }

// Version is that of iptables: 1.8.9 is {1, 8, 9}.
type Version [3]int

// String gives "1.8.9".
func (v Version) String() string { return fmt.Sprintf("%d.%d.%d", v[0], v[1], v[2]) }

// minVersion is the oldest that is used. Before 1.8.4, restore of the nft variant does not hold with --noflush what it
// says.
var minVersion = Version{1, 8, 4}

func (v Version) before(o Version) bool {
	for i := range v {
		if v[i] != o[i] {
			return v[i] < o[i]
		}
	}
	return false
}

// programSet are the programs of one variant and family.
type programSet struct {
	main, save, restore string
	version             Version
}

// Programs are the iptables programs by which the rules of a network namespace are read and written. Make them with
// Find.
type Programs struct {
	// Variant is the one that is used, for both families; Why says what decided about it.
	Variant Variant
	Why     string
	// Version is that of the IPv4 programs.
	Version Version

	sets ipfamily.Per[programSet]
	// missing says of each family why it is not served; nil if it is.
	missing ipfamily.Per[error]
	runner  runner
}

// ErrNone says that this host has no iptables programs.
var ErrNone = errors.New("this host has no iptables program: install iptables 1.8.4 or later, " +
	"or run the image that contains it (docs/IPTABLES.md)")

// Find looks for the programs, decides which variant is used in the network namespace of the calling thread, and makes
// sure that it works there. It changes nothing but that the kernel may load modules and make tables that are empty.
//
// An error says why neither variant can be used for IPv4. That IPv6 cannot is no error: Missing says so.
func Find(ctx context.Context) (*Programs, error) {
	r, err := newRunner()
	if err != nil {
		return nil, err
	}
	p, err := find(ctx, r)
	if err != nil {
		return nil, errors.Join(err, r.close())
	}
	return p, nil
}

func find(ctx context.Context, r runner) (*Programs, error) {
	found, err := installed(ctx, r)
	if err != nil {
		return nil, err
	}
	first, why := chooseVariant(ctx, r, found)
	var errs []error
	for _, v := range [...]Variant{first, first.Other()} {
		if !found.has(v) {
			continue
		}
		p := found.programs(v, r)
		p.Why = why
		if err := p.probe(ctx, ipfamily.IPv4); err != nil {
			errs = append(errs, err)
			why = fmt.Sprintf("the %s variant does not work here: %v", v, err)
			continue
		}
		p.missing[ipfamily.IPv6] = p.probe(ctx, ipfamily.IPv6)
		return p, nil
	}
	return nil, errors.Join(errs...)
}

// Close forgets the network namespace. What was written stays.
func (p *Programs) Close() error { return p.runner.close() }

// Serves says whether there is a family here.
func (p *Programs) Serves(f ipfamily.Family) bool { return p.missing[f] == nil }

// Missing says why a family is not served; nil if it is.
func (p *Programs) Missing(f ipfamily.Family) error { return p.missing[f] }

// String gives "iptables 1.8.9, nft variant".
func (p *Programs) String() string {
	return fmt.Sprintf("iptables %s, %s variant", p.Version, p.Variant)
}

// OfVariant gives the programs of the same host's other variant, to look for rules there; not ok if there are none.
func (p *Programs) OfVariant(ctx context.Context, v Variant) (_ *Programs, ok bool) {
	if v == p.Variant {
		return p, true
	}
	found, err := installed(ctx, p.runner)
	if err != nil || !found.has(v) {
		return nil, false
	}
	return found.programs(v, p.runner), true
}

// installation is what a host has of programs.
type installation [len(variants)]ipfamily.Per[programSet]

// has says whether a variant is there, for IPv4 at least.
func (i *installation) has(v Variant) bool { return i[v][ipfamily.IPv4].main != "" }

// programs gives those of a variant. A family without any is missing.
func (i *installation) programs(v Variant, r runner) *Programs {
	p := &Programs{Variant: v, Version: i[v][ipfamily.IPv4].version, sets: i[v], runner: r}
	for _, f := range ipfamily.All {
		if p.sets[f].main == "" {
			p.missing[f] = fmt.Errorf("there is no %s program of the %s variant", program(f), v)
		}
	}
	return p
}

// searchPath is where the programs are looked for besides PATH, which may lack what is for root alone.
var searchPath = []string{"/usr/local/sbin", "/usr/sbin", "/sbin"}

func lookPath(name string) string {
	if path, err := exec.LookPath(name); err == nil {
		return path
	}
	for _, dir := range searchPath {
		if path, err := exec.LookPath(filepath.Join(dir, name)); err == nil {
			return path
		}
	}
	return ""
}

// installed gives the programs that there are. A host may have both variants, each under its own name, or one of them
// under the plain name alone.
func installed(ctx context.Context, r runner) (found installation, err error) {
	var errs []error
	for _, f := range ipfamily.All {
		for _, name := range []string{program(f) + "-nft", program(f) + "-legacy", program(f)} {
			s := programSet{main: lookPath(name), save: lookPath(name + "-save"), restore: lookPath(name + "-restore")}
			if s.main == "" || s.save == "" || s.restore == "" {
				continue
			}
			v, version, err := versionOf(ctx, r, s.main)
			if err == nil && version.before(minVersion) {
				err = fmt.Errorf("%s is version %s; %s or later is needed", s.main, version, minVersion)
			}
			if err != nil {
				errs = append(errs, err)
				continue
			}
			if s.version = version; found[v][f].main == "" {
				found[v][f] = s
			}
		}
	}
	if !found.has(NFT) && !found.has(Legacy) {
		if len(errs) == 0 {
			return found, ErrNone
		}
		return found, errors.Join(errs...)
	}
	return found, nil
}

// versionLine is "iptables v1.8.9 (nf_tables)". What is older than 1.8 does not tell its variant: it is the legacy one.
var versionLine = regexp.MustCompile(`^\S+ v(\d+)\.(\d+)(?:\.(\d+))?\S*(?: \((nf_tables|legacy)\))?`)

func versionOf(ctx context.Context, r runner, program string) (Variant, Version, error) {
	out, err := r.run(ctx, nil, program, "--version")
	if err != nil {
		return 0, Version{}, err
	}
	m := versionLine.FindSubmatch(out)
	if m == nil {
		return 0, Version{}, fmt.Errorf("%s --version says %q, which is not a version of iptables", program,
			bytes.TrimSpace(out))
	}
	var version Version
	for i := range version {
		version[i], _ = strconv.Atoi(string(m[i+1])) // digits, or nothing
	}
	if string(m[4]) == "nf_tables" {
		return NFT, version, nil
	}
	return Legacy, version, nil
}

// hints are the chains that a kubelet makes so that others can tell which variant the host uses.
var hints = []string{"KUBE-IPTABLES-HINT", "KUBE-KUBELET-CANARY"}

// chooseVariant says which variant is the host's, and why. It goes by what the kubelet says first, then by where a
// Service proxy has its chains already, then by which variant has more rules; if nothing tells, it is nft. Tables are
// only read for the last of these: that takes seconds where they are large.
func chooseVariant(ctx context.Context, r runner, found installation) (Variant, string) {
	for _, v := range variants {
		if found.has(v) && !found.has(v.Other()) {
			return v, "it is the only variant on this host"
		}
	}
	for _, v := range variants {
		for _, hint := range hints {
			if found.programs(v, r).hasAny(ctx, "mangle", hint) {
				return v, "the kubelet has its chain " + hint + " there"
			}
		}
	}
	for _, v := range variants {
		if found.programs(v, r).hasAny(ctx, string(iptshim.NAT), "KUBE-SERVICES") {
			return v, "there are chains of a Service proxy"
		}
	}
	var rules [len(variants)]int
	for _, v := range variants {
		for _, f := range ipfamily.All {
			if text, err := found.programs(v, r).SaveText(ctx, f); err == nil {
				rules[v] += bytes.Count(text, []byte("\n-A "))
			}
		}
	}
	switch {
	case rules[Legacy] > rules[NFT]:
		return Legacy, fmt.Sprintf("it has more rules (%d, the nft variant %d)", rules[Legacy], rules[NFT])
	case rules[NFT] > 0:
		return NFT, fmt.Sprintf("it has more rules (%d, the legacy variant %d)", rules[NFT], rules[Legacy])
	}
	return NFT, "there are no rules of either variant"
}

// hasAny says whether a family has a chain. What cannot be read has none.
func (p *Programs) hasAny(ctx context.Context, table, chain string) bool {
	for _, f := range ipfamily.All {
		if has, err := p.HasChain(ctx, f, table, chain); err == nil && has {
			return true
		}
	}
	return false
}

// legacyHas says whether the legacy variant has a table in the network namespace of the calling thread.
func legacyHas(f ipfamily.Family, table string) bool {
	names, err := os.ReadFile("/proc/thread-self/net/" + [...]string{"ip_tables_names", "ip6_tables_names"}[f])
	return err == nil && strings.Contains("\n"+string(names), "\n"+table+"\n")
}

// errNoIPv6 says that a host has no IPv6.
var errNoIPv6 = errors.New("this host has no IPv6")

// probe makes sure that the programs of a family can do what we need: without a right or a module of the kernel,
// restore says so.
func (p *Programs) probe(ctx context.Context, f ipfamily.Family) error {
	if p.missing[f] != nil {
		return p.missing[f]
	}
	if f == ipfamily.IPv6 {
		if _, err := os.Stat("/proc/net/if_inet6"); errors.Is(err, fs.ErrNotExist) {
			return errNoIPv6
		}
	}
	const text = "*filter\nCOMMIT\n*nat\nCOMMIT\n"
	var err error
	for range maxProbes {
		if _, err = p.runner.run(ctx, []byte(text), p.sets[f].restore, "--noflush", "--test", "-w", lockSeconds); err == nil {
			return nil
		}
	}
	return fmt.Errorf("%s iptables cannot be used: %w", f, err)
}

// maxProbes is how often that is tried: a host that is just starting may be busy, and what is found here holds until
// the next start.
const maxProbes = 3
