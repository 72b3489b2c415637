package config

import (
	"errors"
	"fmt"
	"slices"
	"strings"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/verdict-proxy/verdict/internal/system/clip"
	"github.com/verdict-proxy/verdict/internal/system/yamltree"
)

// Load reads the configuration file, applies the flags, and returns the settings and all problems in the order of the
// file. An empty file name means that there is no file: then all values are the defaults, and the mode is nftables.
// Flags may be nil.
//
// Last holds the settings that are in force; nil at the start. An invalid value is replaced by that of last, or by the
// default. Load returns an error, and no settings, if the file cannot be read or is of another kind, or if a flag is
// invalid: the operator should learn of that at once.
func Load(file string, flags *Flags, last *Settings) (*Settings, []*Problem, error) {
	if file == "" {
		return load("", nil, flags, last)
	}
	text, err := readFile(file)
	if err != nil {
		return nil, nil, fileError(file, err)
	}
	return load(file, text, flags, last)
}

func load(file string, text []byte, flags *Flags, last *Settings) (*Settings, []*Problem, error) {
	r := &loader{doc: &Document{}}
	if file != "" {
		var err error
		if r, err = read(file, text); err != nil {
			return nil, nil, err
		}
	}
	if r.kubeProxy == nil {
		r.doc.KubeProxy.Mode = modeNFTables
	}
	r.flags = flags
	c := &r.doc.KubeProxy
	c.NodePortAddresses, c.IPVS.ExcludeCIDRs = emptyToNil(c.NodePortAddresses), emptyToNil(c.IPVS.ExcludeCIDRs)
	notes := flags.override(r.doc)
	named := r.doc.Verdict.IPVS == ipvsAlways
	r.doc.setDefaults(r.behavior(last))
	r.check()
	if err := r.resolve(last); err != nil {
		return nil, nil, err
	}
	r.reportIneffective()
	slices.SortStableFunc(r.problems, func(a, b *Problem) int { return a.Line - b.Line })
	s := r.doc.settings()
	s.Client.Master, s.IPVSNamed = flags.master(), named
	return s, append(r.problems, notes...), nil
}

// behavior returns the behavior that the document asks for. An invalid one is replaced as in resolve: the other fields'
// defaults depend on it.
func (r *loader) behavior(last *Settings) string {
	switch b := r.doc.Verdict.Behavior; {
	case b == behaviorVerdict, b == behaviorKubeProxy:
		return b
	case b == "" && !r.rejected[verdictKind+".behavior"]:
		return behaviorVerdict
	case last != nil:
		return last.Document.Verdict.Behavior
	}
	return cautious().Verdict.Behavior
}

// emptyToNil treats an empty list as unset, as kube-proxy does.
func emptyToNil(list []string) []string {
	if len(list) == 0 {
		return nil
	}
	return list
}

// fieldError describes an invalid value.
type fieldError struct {
	// at is the field, an entry of its list, or a whole section.
	at yamltree.Path
	// entry is the index in a list, or -1.
	entry int
	text  string
	// with names fields that make sense only together with this one.
	with []string
	// decoded is true if the value does not fit the field's type, and so is in no Document.
	decoded bool
}

// addError records that a field is invalid.
func (r *loader) addError(name, text string, with ...string) {
	r.fieldErrors = append(r.fieldErrors, fieldError{at: strings.Split(name, "."), entry: -1, text: text, with: with})
}

// addEntryError records that an entry of a list is invalid.
func (r *loader) addEntryError(name string, entry int, text string) {
	r.fieldErrors = append(r.fieldErrors, fieldError{at: strings.Split(name, "."), entry: entry, text: text})
}

// check validates each field, then the fields that depend on others.
func (r *loader) check() {
	for i := range fields {
		f := &fields[i]
		if f.check == nil || r.rejected[f.name] {
			continue
		}
		v := r.doc.value(f.path())
		list, isList := v.([]string)
		if !isList {
			if text := f.check(v); text != "" {
				r.addError(f.name, text)
			}
			continue
		}
		for i, entry := range list {
			if text := f.check(entry); text != "" && !r.rejected[f.path().Index(i).String()] {
				r.addEntryError(f.name, i, text)
			}
		}
	}
	r.checkMode()
	r.checkNodePortAddresses()
	r.checkDetectLocal()
	r.checkPeriods()
}

// checkNodePortAddresses accepts ranges and keywords in any combination, but each keyword once, as kube-proxy does.
func (r *loader) checkNodePortAddresses() {
	const name = "nodePortAddresses"
	list := r.doc.KubeProxy.NodePortAddresses
	for i, entry := range list {
		switch text := checkPrefix(entry); {
		case entry == primary, entry == localhost, entry == allAddresses:
			if slices.Contains(list[:i], entry) {
				r.addEntryError(name, i, clip.Quote(entry)+" is listed twice")
			}
		case text == "", r.rejected[yamltree.Path{name}.Index(i).String()]:
		case strings.Contains(entry, "/"):
			r.addEntryError(name, i, text)
		default:
			r.addEntryError(name, i, text+", nor one of primary, localhost, all")
		}
	}
}

// checkMode rejects a mode that a feature gate disables, and the fields that depend on the mode.
func (r *loader) checkMode() {
	if c := &r.doc.KubeProxy; c.Mode == modeIPVS && disabled(c.FeatureGates, gateIPVS) {
		r.addError("mode", clip.Quote(modeIPVS)+" is disabled by the feature gate "+gateIPVS, verdictKind+".ipvs")
	}
}

func (r *loader) checkDetectLocal() {
	c := &r.doc.KubeProxy
	switch c.DetectLocalMode {
	case modeBridgeInterface:
		r.checkInterface(c.DetectLocal.BridgeInterface, "detectLocal.bridgeInterface", "--pod-bridge-interface")
	case modeInterfacePrefix:
		r.checkInterface(c.DetectLocal.InterfaceNamePrefix, "detectLocal.interfaceNamePrefix", "--pod-interface-name-prefix")
	case modeClusterCIDR:
		seen := map[bool]bool{}
		for i, entry := range clusterCIDRs(c.ClusterCIDR) {
			p, ok := parsePrefix(entry)
			switch {
			case !ok:
				r.addEntryError("clusterCIDR", i, checkPrefix(entry))
			case seen[p.Addr().Is4()]:
				r.addEntryError("clusterCIDR", i, clip.Quote(entry)+" is a second range of the same family")
			}
			seen[p.Addr().Is4()] = seen[p.Addr().Is4()] || ok
		}
	}
}

// checkInterface validates the name that a detectLocalMode needs. If the name is invalid, so is the mode.
func (r *loader) checkInterface(name, field, flag string) {
	if name == "" {
		mode := string(r.doc.KubeProxy.DetectLocalMode)
		r.addError("detectLocalMode", mode+" needs a name: "+field+", or "+flag, field)
	} else if text := checkInterfaceName(name); text != "" {
		r.addError(field, text, "detectLocalMode")
	}
}

// syncPeriods holds the periods of the section that applies in the mode.
type syncPeriods struct {
	name          string
	sync, minSync metav1.Duration
}

func (d *Document) periods() syncPeriods {
	switch c := &d.KubeProxy; c.Mode {
	case modeIPVS:
		return syncPeriods{modeIPVS, c.IPVS.SyncPeriod, c.IPVS.MinSyncPeriod}
	case modeNFTables:
		return syncPeriods{modeNFTables, c.NFTables.SyncPeriod, c.NFTables.MinSyncPeriod}
	default:
		return syncPeriods{modeIPTables, c.IPTables.SyncPeriod, c.IPTables.MinSyncPeriod}
	}
}

func (r *loader) checkPeriods() {
	if p := r.doc.periods(); p.minSync.Duration > p.sync.Duration && p.sync.Duration > 0 {
		r.addError(p.name+".minSyncPeriod",
			fmt.Sprintf("%s is more than the syncPeriod, %s", p.minSync.Duration, p.sync.Duration))
	}
}

// resolve replaces each invalid value and reports it. The error is about flags.
func (r *loader) resolve(last *Settings) error {
	var flagErrors []error
	kubeconfig := r.flags.flagFor("clientConnection.kubeconfig")
	from := r.flags.flagFor(verdictKind + ".manifests")
	if kubeconfig != "" && from != "" {
		flagErrors = append(flagErrors, errors.New(from+" and "+kubeconfig+" exclude each other"))
	}
	defaults, careful := &Document{}, cautious()
	defaults.setDefaults(behaviorVerdict)
	dropped := map[string][]int{} // entries to be left out
	for _, c := range r.fieldErrors {
		if flag := r.flags.flagAtFault(&c); flag != "" {
			flagErrors = append(flagErrors, &Problem{Severity: Invalid, Field: flag, Text: c.text})
			continue
		}
		p := &Problem{Severity: Invalid, File: r.file, Line: r.line(c.where()), Field: c.where().String(), Text: c.text}
		switch {
		case r.flags.flagFor(c.at.String()) != "":
			p.Then = r.flags.flagFor(c.at.String()) + " is used"
		case c.at[0] == "featureGates" && len(c.at) > 1:
			p.Then = "it is ignored"
		case last != nil:
			p.Then = r.fallBack(c, &last.Document, "the previous values stay in force", "it stays ", "it stays empty")
		case c.entry >= 0:
			dropped[c.at.String()] = append(dropped[c.at.String()], c.entry)
			p.Then = "it is ignored"
		case c.at.String() == "nodePortAddresses":
			r.doc.KubeProxy.NodePortAddresses = []string{}
			p.Then = "node ports answer nowhere"
		default:
			from, one := defaults, "the default is used, "
			if len(c.with) == 0 && !careful.equal(c.at, defaults) {
				from, one = careful, "what changes least is used, "
			}
			p.Then = r.fallBack(c, from, "the defaults are used", one, "it is treated as unset")
		}
		r.problems = append(r.problems, p)
	}
	for name, entries := range dropped {
		r.dropEntries(name, entries)
	}
	return errors.Join(flagErrors...)
}

// where returns the path, including the entry.
func (c *fieldError) where() yamltree.Path {
	if c.entry < 0 || c.at[0] == "clusterCIDR" { // which is one text
		return c.at
	}
	return c.at.Index(c.entry)
}

// fallBack copies the invalid field, and those that depend on it, from another document. It returns one of three texts:
// many if it copied several fields, one if it copied one, empty if that one is empty.
func (r *loader) fallBack(c fieldError, from *Document, many, one, empty string) string {
	name := c.at.String()
	replaced := slices.Clone(c.with)
	for i := range fields {
		f := fields[i].name
		// The field itself, all fields of a section, or the field that this is a part of.
		if f == name || strings.HasPrefix(f, name+".") || strings.HasPrefix(name, f+".") || strings.HasPrefix(name, f+"[") {
			replaced = append(replaced, f)
		}
	}
	for _, f := range replaced {
		if r.flags.flagFor(f) == "" {
			r.doc.copyField(fieldNamed(f).path(), from)
		}
	}
	if len(replaced) != 1 || replaced[0] != name {
		return many
	}
	switch text := r.doc.text(c.at); text {
	case `""`, "null", "[]":
		return empty
	default:
		return one + text
	}
}

// dropEntries removes entries from a list. A list that loses all entries is empty, which differs from an unset list.
func (r *loader) dropEntries(name string, entries []int) {
	c := &r.doc.KubeProxy
	keep := func(list []string) []string {
		kept := []string{}
		for i, entry := range list {
			if !slices.Contains(entries, i) {
				kept = append(kept, entry)
			}
		}
		return kept
	}
	switch name {
	case "nodePortAddresses":
		c.NodePortAddresses = keep(c.NodePortAddresses)
		if len(c.NodePortAddresses) == 0 {
			r.report(Invalid, yamltree.Path{name}, "no valid entry is left: node ports answer nowhere")
		}
	case "ipvs.excludeCIDRs":
		c.IPVS.ExcludeCIDRs = keep(c.IPVS.ExcludeCIDRs)
	case verdictKind + ".ipvsAddresses":
		r.doc.Verdict.IPVSAddresses = keep(r.doc.Verdict.IPVSAddresses)
	case "clusterCIDR":
		c.ClusterCIDR = strings.Join(keep(clusterCIDRs(c.ClusterCIDR)), ",")
	}
}

// report adds a problem after all documents are read; reportHere adds one while a document is read.
func (r *loader) report(s Severity, p yamltree.Path, text string) {
	problem := &Problem{Severity: s, File: r.file, Line: r.line(p), Field: visible(p.String()), Text: text}
	if flag := r.flags.flagFor(p.String()); flag != "" {
		problem.File, problem.Line, problem.Field = "", 0, flag
	}
	r.problems = append(r.problems, problem)
}

// reportIneffective reports the fields that have no effect, or another effect than in kube-proxy.
func (r *loader) reportIneffective() {
	c := &r.doc.KubeProxy
	defaults := &Document{}
	defaults.setDefaults(behaviorVerdict)
	if r.kubeProxy != nil {
		r.reportMode()
	}
	for i := range fields {
		f := &fields[i]
		switch {
		case r.doc.equal(f.path(), defaults):
		case r.flags.flagFor(f.name) != "" && f.effect == Live: // the flag is of several modes
		case !f.appliesIn(c.Mode) && f.effect == Live:
			r.report(Note, f.path(), "it has no effect in mode "+modeName(string(c.Mode)))
		case f.effect == Never && f.appliesIn(c.Mode):
			r.report(Note, f.path(), "it has no effect: "+f.does)
		}
	}
	r.reportUnusedMark()
	if slices.Contains(c.NodePortAddresses, localhost) && !*c.IPTables.LocalhostNodePorts {
		r.report(Note, yamltree.Path{"nodePortAddresses"},
			clip.Quote(localhost)+" has no effect: iptables.localhostNodePorts is false")
	}
	if idle := ignoredGates(c.FeatureGates); len(idle) > 0 {
		r.report(Note, yamltree.Path{"featureGates"}, "these have no effect: "+strings.Join(idle, ", "))
	}
}

// reportUnusedMark reports a configured bit of a mark that no rule sets.
func (r *loader) reportUnusedMark() {
	v := &r.doc.Verdict
	if Backend(v.Backend) == IPTables || v.IPTablesCompat {
		return
	}
	for _, name := range []string{"iptables.masqueradeBit", "nftables.masqueradeBit"} {
		if f := fieldNamed(name); r.doc.value(f.path()) != any(int32(defaultMasqueradeBit)) &&
			f.appliesIn(r.doc.KubeProxy.Mode) {
			r.report(Note, f.path(), "it has no effect with nftables, which masquerades without a mark")
		}
	}
}

// reportMode reports what a mode other than nftables means here, and which defaults follow from it.
func (r *loader) reportMode() {
	mode := string(r.doc.KubeProxy.Mode)
	if text := modeEffect(mode, Backend(r.doc.Verdict.Backend)); text != "" {
		r.report(Note, yamltree.Path{"mode"}, text)
	}
	if mode == modeNFTables {
		return
	}
	rejected := slices.ContainsFunc(r.fieldErrors, func(c fieldError) bool { return c.at.String() == "mode" })
	if mode == "" && !rejected {
		r.report(Note, yamltree.Path{"mode"},
			"it is not set, which means iptables; from kube-proxy 1.40 on it means nftables")
	}
	if r.doc.KubeProxy.NodePortAddresses == nil {
		r.report(Note, yamltree.Path{"nodePortAddresses"}, "it is not set, which in mode "+modeName(mode)+
			" means that node ports answer at all addresses of this host; [primary] would be those of its Node")
	}
}

// modeEffect describes what a configured mode means if the backend is another one; "" if there is nothing to report.
func modeEffect(mode string, backend Backend) string {
	switch {
	case mode == "", mode == string(backend), mode == modeNFTables && backend == Auto:
		return ""
	case backend == Auto:
		return mode + " is accepted, but nftables is used if the kernel supports it: " + verdictKind + ".backend decides"
	}
	return mode + " is accepted, but " + string(backend) + " is used"
}

func modeName(mode string) string {
	if mode == "" {
		return modeIPTables + " (the mode is not set)"
	}
	return mode
}

// ignoredGates returns the feature gates that have no effect. kube-proxy knows all of Kubernetes' gates.
func ignoredGates(gates map[string]bool) (idle []string) {
	for name := range gates {
		if name != gateExternalIPs && name != gateIPVS {
			idle = append(idle, visible(name))
		}
	}
	slices.Sort(idle)
	return idle
}
