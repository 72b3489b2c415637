package config

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"syscall"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/kube-proxy/config/v1alpha1"
	"sigs.k8s.io/yaml"

	"github.com/verdict-proxy/verdict/internal/system/clip"
	"github.com/verdict-proxy/verdict/internal/system/yamltree"
)

// Document holds a configuration as it is written.
type Document struct {
	// KubeProxy is kube-proxy's own type.
	KubeProxy v1alpha1.KubeProxyConfiguration `json:",inline"`
	// Verdict holds what kube-proxy has no fields for. It is a second document in the same file: kube-proxy reads only the
	// first one.
	Verdict VerdictConfiguration `json:"VerdictConfiguration"`
}

// VerdictConfiguration is our own section.
type VerdictConfiguration struct {
	metav1.TypeMeta `json:",inline"`
	// Manifests is the file or directory that objects are read from, instead of the Kubernetes API.
	Manifests string `json:"manifests"`
	// Backend selects what writes the rules: auto, nftables or iptables.
	Backend string `json:"backend"`
	// IPTablesDispatch selects how rules of iptables find a Service: tree or list.
	IPTablesDispatch string `json:"iptablesDispatch"`
	// IPTablesCompat keeps the chains KUBE-MARK-MASQ and KUBE-POSTROUTING beside nftables, for others that jump there.
	IPTablesCompat bool `json:"iptablesCompat"`
	// Keeper selects who holds the netlink socket while the proxy restarts: auto, process, systemd or none.
	Keeper string `json:"keeper"`
	// OwnTables prevents other processes from changing the tables, if the kernel supports that. The default is true.
	OwnTables *bool `json:"ownTables"`
	// NodeCondition writes the condition ServicesProgrammed into the status of this node's Node.
	NodeCondition bool `json:"nodeCondition"`
	// StartupTaint is the key of a taint that is removed from the Node once all Services are programmed; empty means none.
	StartupTaint string `json:"startupTaint"`
	// Takeover selects whether kube-proxy's rules are removed once Verdict's are in force: auto or never.
	Takeover string `json:"takeover"`
	// IPVS selects which Services IPVS schedules: auto, always or never. The default is always in mode ipvs, else auto.
	IPVS string `json:"ipvs"`
	// IPVSServices is the number of Services at which, with auto, IPVS begins to schedule all of them; 0 means never.
	IPVSServices *int32 `json:"ipvsServices"`
	// IPVSAddresses are the ranges of load balancer addresses at which IPVS may schedule.
	IPVSAddresses []string `json:"ipvsAddresses"`
	// Behavior selects the defaults of whatever differs from kube-proxy in what packets meet: verdict or kube-proxy.
	Behavior string `json:"behavior"`
	// SecondChance selects what happens to TCP endpoints that do not answer or refuse: off, observe or on.
	SecondChance Switch `json:"secondChance"`
	// LastResort selects whether Services without a usable endpoint use those that are not ready: off or on.
	LastResort Switch `json:"lastResort"`
	// ClientAddress selects which Services keep their clients' address: off, annotated or keep.
	ClientAddress string `json:"clientAddress"`
	// PingServices makes cluster IPs and load balancer addresses answer a ping. The default is true.
	PingServices *bool `json:"pingServices"`
	// RejectUnusedPorts rejects packets from outside to unused ports of load balancer addresses. The default is true.
	RejectUnusedPorts *bool `json:"rejectUnusedPorts"`
	// MetricsConnections selects the detail of the metrics of new connections: off, service or endpoint.
	MetricsConnections string `json:"metricsConnections"`
	// MetricsMaxSeries limits how many Service ports, and how many endpoints, have their own series.
	MetricsMaxSeries *int32 `json:"metricsMaxSeries"`
	// CounterMemoryMiB limits the memory for the counters of frontends and endpoints in the kernel, in MiB.
	CounterMemoryMiB *int32 `json:"counterMemoryMiB"`
	// Everywhere is the Lease of the collector, NAMESPACE/NAME, that answers whether all nodes have a change; empty means
	// that there is none.
	Everywhere string `json:"everywhere"`
	// EverywhereToken is the file with the token that tells the collector which node this is.
	EverywhereToken string `json:"everywhereToken"`
	// Ledger is the directory of the ledger of changes; empty means that none is kept.
	Ledger string `json:"ledger"`
	// LedgerMaxMiB limits the size of its files.
	LedgerMaxMiB *int32 `json:"ledgerMaxMiB"`
	// Records switches the records of connections on or off.
	Records Switch `json:"records"`
	// RecordsMemoryMiB limits the memory for the list of records; sums take as much again.
	RecordsMemoryMiB *int32 `json:"recordsMemoryMiB"`
	// RecordsFile is the file that records are appended to; empty means none.
	RecordsFile string `json:"recordsFile"`
	// RecordsOTLP is the URL of the collector that records are sent to; empty means none.
	RecordsOTLP string `json:"recordsOTLP"`
	// RecordsClientPrefix is how many bits records keep of the addresses of clients outside the cluster, of IPv4 and of
	// IPv6: "24,64"; empty means all.
	RecordsClientPrefix string `json:"recordsClientPrefix"`
}

// Switch is a word that may be on or off. YAML reads these two as truth values unless they are in quotes.
type Switch string

// UnmarshalJSON reads a text, or a truth value.
func (s *Switch) UnmarshalJSON(text []byte) error {
	switch string(text) {
	case "true":
		*s = "on"
		return nil
	case "false":
		*s = "off"
		return nil
	}
	return json.Unmarshal(text, (*string)(s))
}

// The kinds of documents.
const (
	kubeProxyVersion = "kubeproxy.config.k8s.io/v1alpha1"
	kubeProxyKind    = "KubeProxyConfiguration"
	verdictVersion   = "verdict/v1alpha1"
	verdictKind      = "VerdictConfiguration"
)

// maxFile is the size limit of a file in bytes. A ConfigMap holds 1 MiB.
const maxFile = 4 << 20

// readFile reads a whole regular file of at most maxFile bytes.
func readFile(file string) ([]byte, error) {
	f, err := os.OpenFile(file, os.O_RDONLY|syscall.O_NONBLOCK, 0) // a pipe would be waited for
	if err != nil {
		return nil, err
	}
	defer f.Close()
	if info, err := f.Stat(); err != nil || !info.Mode().IsRegular() {
		// A pipe can be read only once: it would be empty for the next process, and when the file is read again.
		return nil, errors.Join(err, errors.New("it is not a regular file"))
	}
	text, err := io.ReadAll(io.LimitReader(f, maxFile+1))
	if err == nil && len(text) > maxFile {
		err = fmt.Errorf("it is larger than %d MiB", maxFile>>20)
	}
	return text, err
}

// loader reads a file into a Document.
type loader struct {
	decoder
	doc   *Document
	flags *Flags
	// kubeProxy and verdict are the positions of the two documents; nil if a document is missing.
	kubeProxy, verdict *position
}

// position finds the lines of fields.
type position struct {
	// first is the number of lines before the document.
	first int
	// tree is nil if it cannot be told.
	tree *yamltree.Tree
}

// read reads all documents of a file. It returns an error if the file holds no configuration.
func read(file string, text []byte) (*loader, error) {
	r := &loader{doc: &Document{}}
	r.file, r.rejected = file, map[string]bool{}
	for _, part := range yamltree.Documents(string(text)) {
		if err := r.readDocument(&part); err != nil {
			return nil, err
		}
	}
	if r.kubeProxy == nil && r.verdict == nil {
		return nil, &Problem{Severity: Invalid, File: file, Text: "it contains no " + kubeProxyKind}
	}
	return r, nil
}

// readDocument decodes one document.
func (r *loader) readDocument(p *yamltree.Chunk) error {
	tree, bad := p.Parse(true)
	at := &position{p.Line - 1, tree}
	value, err := parseYAML(p.Text)
	switch {
	case err != nil && bad != nil:
		return &Problem{Severity: Invalid, File: r.file, Line: at.first + bad.Line, Text: bad.Err.Error()}
	case err != nil:
		return &Problem{Severity: Invalid, File: r.file, Line: p.Line, Text: visible(err.Error())}
	case value == nil: // nothing but comments
		return nil
	}
	invalid := func(format string, args ...any) error {
		return &Problem{Severity: Invalid, File: r.file, Line: at.line(nil), Text: fmt.Sprintf(format, args...)}
	}
	fields, ok := value.(map[string]any)
	if !ok {
		return invalid("this is %s, not a %s", describe(value), kubeProxyKind)
	}
	version, _ := fields["apiVersion"].(string)
	kind, _ := fields["kind"].(string)
	r.at = at
	switch {
	case kind == kubeProxyKind && version == kubeProxyVersion && r.kubeProxy == nil:
		r.kubeProxy = at
		if r.verdict != nil {
			r.reportHere(nil,
				"kube-proxy reads only the first document of a file: this one should come before "+verdictKind)
		}
		r.decodeDocument(nil, fields, &r.doc.KubeProxy)
	case kind == verdictKind && version == verdictVersion && r.verdict == nil:
		r.verdict = at
		r.decodeDocument(yamltree.Path{verdictKind}, fields, &r.doc.Verdict)
	case kind == kubeProxyKind && r.kubeProxy != nil || kind == verdictKind && r.verdict != nil:
		r.reportHere(nil, "ignored: the file has another "+kind+" before this one")
	case kind == kubeProxyKind:
		return r.wrongVersion(version, kubeProxyVersion)
	case kind == verdictKind:
		return r.wrongVersion(version, verdictVersion)
	case kind == "ConfigMap":
		return invalid("this is a ConfigMap; use the file inside it (kubeadm calls it config.conf)")
	case kind == "":
		return invalid("kind is missing; expected apiVersion %s and kind %s", kubeProxyVersion, kubeProxyKind)
	default:
		r.reportHere(yamltree.Path{"kind"},
			visible(kind)+" is ignored: it is neither "+kubeProxyKind+" nor "+verdictKind)
	}
	return nil
}

func (r *loader) wrongVersion(version, want string) error {
	p := &Problem{Severity: Invalid, File: r.file, Line: r.at.line(yamltree.Path{"apiVersion"}), Field: "apiVersion",
		Text: clip.Quote(version) + " is not supported, only " + want}
	if version == "" {
		p.Text = "it is missing; expected " + want
	}
	return p
}

// line returns the line of a field in the file; 0 if it is unknown.
func (r *loader) line(p yamltree.Path) int {
	if len(p) > 0 && p[0] == verdictKind {
		return r.verdict.line(p[1:])
	}
	return r.kubeProxy.line(p)
}

// parseYAML decodes a document as encoding/json would, with numbers as json.Number. It converts YAML as kube-proxy
// does, so that a value is a boolean here exactly if it is one there.
func parseYAML(text string) (value any, err error) {
	defer func() {
		if r := recover(); r != nil { // YAML's parsers have had crashes of their own (CVE-2022-28948)
			value, err = nil, fmt.Errorf("the parser panicked: %v", r)
		}
	}()
	converted, err := yaml.YAMLToJSON([]byte(text))
	if err != nil {
		return nil, err
	}
	d := json.NewDecoder(bytes.NewReader(converted))
	d.UseNumber()
	return value, d.Decode(&value)
}

// line returns the line of a field in the file, or of the nearest field around it that has one; 0 if it is unknown.
func (at *position) line(p yamltree.Path) int {
	if at == nil || at.tree == nil {
		return 0
	}
	return at.first + at.tree.LineOf(p)
}

// duplicateKeys returns the keys that a mapping at p, or one in it, has more than once.
func duplicateKeys(t *yamltree.Tree, p yamltree.Path) (found []yamltree.Path) {
	switch t.Kind {
	case yamltree.Mapping:
		seen := map[string]bool{}
		for i := 0; i+1 < len(t.Parts); i += 2 {
			key := p.Key(t.Parts[i].Text)
			if seen[t.Parts[i].Text] {
				found = append(found, key)
			}
			seen[t.Parts[i].Text] = true
			found = append(found, duplicateKeys(&t.Parts[i+1], key)...)
		}
	case yamltree.List:
		for i := range t.Parts {
			found = append(found, duplicateKeys(&t.Parts[i], p.Index(i))...)
		}
	}
	return found
}

// fileError wraps the error of reading a file; it names the file.
func fileError(file string, err error) error {
	if p, ok := errors.AsType[*os.PathError](err); ok {
		err = p.Err
	}
	return &Problem{Severity: Invalid, File: file, Text: "it cannot be read: " + err.Error()}
}
