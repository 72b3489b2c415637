package config

import (
	"errors"
	"fmt"
	"slices"
	"strings"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// Load reads a file, has the flags override it, and gives the settings with all there is to say about them, in the
// order of the file. Without a file, which is "", everything is at its default, and the mode is nftables. Flags may be
// nil.
//
// Last are the settings that are in force, nil at the start: a value that cannot be meant leaves that of last in force,
// or the default. An error means that there are no settings: the file cannot be read or is another one, or a flag is
// wrong, which whoever typed it should know at once.
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
	r := &reading{doc: &Document{}}
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
	c.NodePortAddresses, c.IPVS.ExcludeCIDRs = orNil(c.NodePortAddresses), orNil(c.IPVS.ExcludeCIDRs)
	notes := flags.override(r.doc)
	r.doc.setDefaults()
	r.check()
	if err := r.resolve(last); err != nil {
		return nil, nil, err
	}
	r.note()
	slices.SortStableFunc(r.found, func(a, b *Problem) int { return a.Line - b.Line })
	s := r.doc.settings()
	s.Client.Master = flags.master()
	return s, append(r.found, notes...), nil
}

// orNil makes an empty list one that nobody wrote, as kube-proxy takes it.
func orNil(list []string) []string {
	if len(list) == 0 {
		return nil
	}
	return list
}

// complaint is about a value that cannot be meant.
type complaint struct {
	// at is the field, an entry of a list in it, or a whole section.
	at path
	// entry is the index in a list, or -1.
	entry int
	text  string
	// with are fields that make sense only together with this one.
	with []string
	// decoded says that the value does not fit its field, so that it is in no Document.
	decoded bool
}

// complain adds a complaint about a field.
func (r *reading) complain(name, text string, with ...string) {
	r.complaints = append(r.complaints, complaint{at: strings.Split(name, "."), entry: -1, text: text, with: with})
}

// complainOf adds one about an entry of a list.
func (r *reading) complainOf(name string, entry int, text string) {
	r.complaints = append(r.complaints, complaint{at: strings.Split(name, "."), entry: entry, text: text})
}

// check looks at every field, then at those that depend on others.
func (r *reading) check() {
	for i := range fields {
		f := &fields[i]
		if f.check == nil || r.bad[f.name] {
			continue
		}
		v := r.doc.value(f.path())
		list, isList := v.([]string)
		if !isList {
			if text := f.check(v); text != "" {
				r.complain(f.name, text)
			}
			continue
		}
		for i, entry := range list {
			if text := f.check(entry); text != "" && !r.bad[f.path().index(i).String()] {
				r.complainOf(f.name, i, text)
			}
		}
	}
	r.checkMode()
	r.checkNodePortAddresses()
	r.checkDetectLocal()
	r.checkPeriods()
}

// checkNodePortAddresses takes ranges and keywords in any combination, but each keyword once, as kube-proxy does.
func (r *reading) checkNodePortAddresses() {
	const name = "nodePortAddresses"
	list := r.doc.KubeProxy.NodePortAddresses
	for i, entry := range list {
		switch text := aRange(entry); {
		case entry == primary, entry == localhost, entry == allAddresses:
			if slices.Contains(list[:i], entry) {
				r.complainOf(name, i, quote(entry)+" is there twice")
			}
		case text == "", r.bad[path{name}.index(i).String()]:
		case strings.Contains(entry, "/"):
			r.complainOf(name, i, text)
		default:
			r.complainOf(name, i, text+", nor one of primary, localhost, all")
		}
	}
}

// checkMode looks at what a feature gate forbids. What follows from the mode falls with it.
func (r *reading) checkMode() {
	if c := &r.doc.KubeProxy; c.Mode == modeIPVS && disabled(c.FeatureGates, gateIPVS) {
		r.complain("mode", quote(modeIPVS)+" is disabled by the feature gate "+gateIPVS, verdictKind+".ipvs")
	}
}

func (r *reading) checkDetectLocal() {
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
				r.complainOf("clusterCIDR", i, aRange(entry))
			case seen[p.Addr().Is4()]:
				r.complainOf("clusterCIDR", i, quote(entry)+" is a second range of its family")
			}
			seen[p.Addr().Is4()] = seen[p.Addr().Is4()] || ok
		}
	}
}

// checkInterface looks at the name that a detectLocalMode needs. The mode falls with it.
func (r *reading) checkInterface(name, field, flag string) {
	if name == "" {
		mode := string(r.doc.KubeProxy.DetectLocalMode)
		r.complain("detectLocalMode", mode+" needs a name: "+field+", or "+flag, field)
	} else if text := anInterface(name); text != "" {
		r.complain(field, text, "detectLocalMode")
	}
}

// section holds the periods of the one that counts.
type section struct {
	name        string
	sync, least metav1.Duration
}

func (d *Document) periods() section {
	switch c := &d.KubeProxy; c.Mode {
	case modeIPVS:
		return section{modeIPVS, c.IPVS.SyncPeriod, c.IPVS.MinSyncPeriod}
	case modeNFTables:
		return section{modeNFTables, c.NFTables.SyncPeriod, c.NFTables.MinSyncPeriod}
	default:
		return section{modeIPTables, c.IPTables.SyncPeriod, c.IPTables.MinSyncPeriod}
	}
}

func (r *reading) checkPeriods() {
	if p := r.doc.periods(); p.least.Duration > p.sync.Duration && p.sync.Duration > 0 {
		r.complain(
			p.name+".minSyncPeriod",
			fmt.Sprintf("%s is more than the syncPeriod, %s", p.least.Duration, p.sync.Duration),
		)
	}
}

// resolve decides what is in force in place of each value that cannot be meant, and reports them. An error is about
// flags.
func (r *reading) resolve(last *Settings) error {
	var typed []error
	if kubeconfig, from := r.flags.wrote("clientConnection.kubeconfig"), r.flags.wrote(verdictKind+".manifests"); kubeconfig != "" &&
		from != "" {
		typed = append(typed, errors.New(from+" and "+kubeconfig+" exclude each other"))
	}
	defaults := &Document{}
	defaults.setDefaults()
	left := map[string][]int{} // entries to be left out
	for _, c := range r.complaints {
		if flag := r.flags.blamed(&c); flag != "" {
			typed = append(typed, &Problem{Severity: Bad, Field: flag, Text: c.text})
			continue
		}
		p := &Problem{Severity: Bad, File: r.file, Line: r.line(c.where()), Field: c.where().String(), Text: c.text}
		switch {
		case r.flags.wrote(c.at.String()) != "":
			p.Then = r.flags.wrote(c.at.String()) + " is used"
		case c.at[0] == "featureGates" && len(c.at) > 1:
			p.Then = "it is left out"
		case last != nil:
			p.Then = r.fall(c, &last.Document, "what was before stays in force", "it stays ", "it stays empty")
		case c.entry >= 0:
			left[c.at.String()] = append(left[c.at.String()], c.entry)
			p.Then = "it is left out"
		case c.at.String() == "nodePortAddresses":
			r.doc.KubeProxy.NodePortAddresses = []string{}
			p.Then = "node ports answer nowhere"
		default:
			p.Then = r.fall(c, defaults, "the defaults are used", "the default is used, ", "it counts as not set")
		}
		r.found = append(r.found, p)
	}
	for name, entries := range left {
		r.leaveOut(name, entries)
	}
	return errors.Join(typed...)
}

// where is the path with the entry in it.
func (c *complaint) where() path {
	if c.entry < 0 || c.at[0] == "clusterCIDR" { // which is one text
		return c.at
	}
	return c.at.index(c.entry)
}

// fall takes what a complaint is about from another document, and says so, depending on whether that are many values,
// one, or an empty one.
func (r *reading) fall(c complaint, from *Document, many, one, empty string) string {
	name := c.at.String()
	taken := slices.Clone(c.with)
	for i := range fields {
		f := fields[i].name
		// The field itself, or all of a section, or one of which this is only a part.
		if f == name || strings.HasPrefix(f, name+".") || strings.HasPrefix(name, f+".") || strings.HasPrefix(name, f+"[") {
			taken = append(taken, f)
		}
	}
	for _, f := range taken {
		if r.flags.wrote(f) == "" {
			r.doc.take(fieldNamed(f).path(), from)
		}
	}
	if len(taken) != 1 || taken[0] != name {
		return many
	}
	switch text := r.doc.text(c.at); text {
	case `""`, "null", "[]":
		return empty
	default:
		return one + text
	}
}

// leaveOut drops entries of a list. One that loses all of them is empty, which is not the same as one that nobody
// wrote.
func (r *reading) leaveOut(name string, entries []int) {
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
			r.tell(Bad, path{name}, "no entry is left, so that node ports answer nowhere")
		}
	case "ipvs.excludeCIDRs":
		c.IPVS.ExcludeCIDRs = keep(c.IPVS.ExcludeCIDRs)
	case verdictKind + ".ipvsAddresses":
		r.doc.Verdict.IPVSAddresses = keep(r.doc.Verdict.IPVSAddresses)
	case "clusterCIDR":
		c.ClusterCIDR = strings.Join(keep(clusterCIDRs(c.ClusterCIDR)), ",")
	}
}

// tell is say for when all documents are read.
func (r *reading) tell(s Severity, p path, text string) {
	problem := &Problem{Severity: s, File: r.file, Line: r.line(p), Field: p.String(), Text: text}
	if flag := r.flags.wrote(p.String()); flag != "" {
		problem.File, problem.Line, problem.Field = "", 0, flag
	}
	r.found = append(r.found, problem)
}

// note says which fields have another effect than in kube-proxy, or none.
func (r *reading) note() {
	c := &r.doc.KubeProxy
	defaults := &Document{}
	defaults.setDefaults()
	if r.kubeProxy != nil {
		r.noteMode()
	}
	for i := range fields {
		f := &fields[i]
		switch {
		case r.doc.same(f.path(), defaults):
		case r.flags.wrote(f.name) != "" && f.effect == Live: // the flag is of several modes
		case !f.counts(c.Mode) && f.effect == Live:
			r.tell(Note, f.path(), "it has no effect in mode "+modeName(string(c.Mode)))
		case f.effect == Never && f.counts(c.Mode):
			r.tell(Note, f.path(), "it has no effect: "+f.does)
		}
	}
	r.noteMark()
	if slices.Contains(c.NodePortAddresses, localhost) && !*c.IPTables.LocalhostNodePorts {
		r.tell(Note, path{"nodePortAddresses"}, quote(localhost)+" has no effect: iptables.localhostNodePorts is false")
	}
	if idle := idleGates(c.FeatureGates); len(idle) > 0 {
		r.tell(Note, path{"featureGates"}, "these have no effect: "+strings.Join(idle, ", "))
	}
}

// noteMark says so if somebody chose a bit for a mark that nobody sets.
func (r *reading) noteMark() {
	v := &r.doc.Verdict
	if Backend(v.Backend) == IPTables || v.IPTablesCompat {
		return
	}
	for _, name := range []string{"iptables.masqueradeBit", "nftables.masqueradeBit"} {
		if f := fieldNamed(name); r.doc.value(f.path()) != any(int32(defaultMasqueradeBit)) &&
			f.counts(r.doc.KubeProxy.Mode) {
			r.tell(Note, f.path(), "it has no effect with nftables, which masquerades without a mark")
		}
	}
}

// noteMode says what becomes of a mode that is not ours, and of what follows from it.
func (r *reading) noteMode() {
	mode := string(r.doc.KubeProxy.Mode)
	if text := taken(mode, Backend(r.doc.Verdict.Backend)); text != "" {
		r.tell(Note, path{"mode"}, text)
	}
	if mode == modeNFTables {
		return
	}
	rejected := slices.ContainsFunc(r.complaints, func(c complaint) bool { return c.at.String() == "mode" })
	if mode == "" && !rejected {
		r.tell(Note, path{"mode"}, "it is not set, which means iptables; from kube-proxy 1.40 on it will mean nftables")
	}
	if r.doc.KubeProxy.NodePortAddresses == nil {
		r.tell(Note, path{"nodePortAddresses"}, "it is not set, which in mode "+modeName(mode)+
			" means that node ports answer at all addresses of this host; [primary] would be those of its Node")
	}
}

// taken says what becomes of a mode that somebody wrote, if that is another backend.
func taken(mode string, backend Backend) string {
	switch {
	case mode == "", mode == string(backend), mode == modeNFTables && backend == Auto:
		return ""
	case backend == Auto:
		return mode + " is taken, and nftables is used where the kernel can: " + verdictKind + ".backend decides"
	}
	return mode + " is taken, and " + string(backend) + " is used"
}

func modeName(mode string) string {
	if mode == "" {
		return modeIPTables + " (the mode is not set)"
	}
	return mode
}

// idleGates gives the feature gates that decide nothing here. kube-proxy knows all of Kubernetes' gates.
func idleGates(gates map[string]bool) (idle []string) {
	for name := range gates {
		if name != gateExternalIPs && name != gateIPVS {
			idle = append(idle, clip(name))
		}
	}
	slices.Sort(idle)
	return idle
}
