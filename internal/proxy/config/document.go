package config

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"regexp"
	"strconv"
	"strings"
	"syscall"

	yamltree "go.yaml.in/yaml/v3"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/kube-proxy/config/v1alpha1"
	"sigs.k8s.io/yaml"

	"github.com/verdict-proxy/verdict/internal/system/clip"
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
	tree  *yamltree.Node
}

// read reads all documents of a file. It returns an error if the file holds no configuration.
func read(file string, text []byte) (*loader, error) {
	r := &loader{doc: &Document{}}
	r.file, r.rejected = file, map[string]bool{}
	for _, part := range splitDocuments(string(bytes.TrimPrefix(text, []byte("\uFEFF")))) {
		if err := r.readDocument(part); err != nil {
			return nil, err
		}
	}
	if r.kubeProxy == nil && r.verdict == nil {
		return nil, &Problem{Severity: Invalid, File: file, Text: "it contains no " + kubeProxyKind}
	}
	return r, nil
}

// readDocument decodes one document.
func (r *loader) readDocument(p documentText) error {
	value, err := parseYAML(p.text)
	if err != nil {
		line, reason := splitYAMLError(err)
		return &Problem{Severity: Invalid, File: r.file, Line: p.first + line, Text: "invalid YAML: " + reason}
	}
	if value == nil { // nothing but comments
		return nil
	}
	fields, ok := value.(map[string]any)
	if !ok {
		return &Problem{
			Severity: Invalid,
			File:     r.file,
			Line:     p.first + 1,
			Text:     "this is " + describe(value) + ", not a " + kubeProxyKind,
		}
	}
	version, _ := fields["apiVersion"].(string)
	kind, _ := fields["kind"].(string)
	at := &position{p.first, parseTree(p.text)}
	r.at = at
	switch {
	case kind == kubeProxyKind && version == kubeProxyVersion && r.kubeProxy == nil:
		r.kubeProxy = at
		if r.verdict != nil {
			r.reportHere(Warning, nil,
				"kube-proxy reads only the first document of a file: this one should come before "+verdictKind)
		}
		r.decodeDocument(nil, fields, &r.doc.KubeProxy)
	case kind == verdictKind && version == verdictVersion && r.verdict == nil:
		r.verdict = at
		r.decodeDocument(path{verdictKind}, fields, &r.doc.Verdict)
	case kind == kubeProxyKind && r.kubeProxy != nil || kind == verdictKind && r.verdict != nil:
		r.reportHere(Warning, nil, "ignored: the file has another "+kind+" before this one")
	case kind == kubeProxyKind:
		return r.wrongVersion(version, kubeProxyVersion)
	case kind == verdictKind:
		return r.wrongVersion(version, verdictVersion)
	case kind == "ConfigMap":
		return &Problem{Severity: Invalid, File: r.file, Line: p.first + 1,
			Text: "this is a ConfigMap; use the file inside it (kubeadm calls it config.conf)"}
	case kind == "":
		return &Problem{Severity: Invalid, File: r.file, Line: p.first + 1, Text: fmt.Sprintf(
			"kind is missing; expected apiVersion %s and kind %s", kubeProxyVersion, kubeProxyKind)}
	default:
		r.reportHere(Warning, path{"kind"}, visible(kind)+" is ignored: it is neither "+kubeProxyKind+" nor "+verdictKind)
	}
	return nil
}

func (r *loader) wrongVersion(version, want string) error {
	p := &Problem{Severity: Invalid, File: r.file, Line: r.at.line(path{"apiVersion"}), Field: "apiVersion",
		Text: clip.Quote(version) + " is not supported, only " + want}
	if version == "" {
		p.Text = "it is missing; expected " + want
	}
	return p
}

// line returns the line of a field in the file; 0 if it is unknown.
func (r *loader) line(p path) int {
	if len(p) > 0 && p[0] == verdictKind {
		return r.verdict.line(p[1:])
	}
	return r.kubeProxy.line(p)
}

// documentText is one document of a file, and the number of lines before it.
type documentText struct {
	first int
	text  string
}

// splitDocuments splits a file into its documents.
func splitDocuments(text string) []documentText {
	var parts []documentText
	current := documentText{}
	var b strings.Builder
	n := 0
	for line := range strings.Lines(text) {
		n++
		if !separator.MatchString(line) {
			b.WriteString(line)
			continue
		}
		current.text = b.String()
		parts = append(parts, current)
		b.Reset()
		current = documentText{first: n}
		if rest := strings.TrimLeft(line, "-. \t\r\n"); rest != "" && line[0] == '-' { // "--- {kind: X}"
			current.first = n - 1
			b.WriteString(rest)
		}
	}
	current.text = b.String()
	return append(parts, current)
}

var separator = regexp.MustCompile(`^(---|\.\.\.)(\s|$)`)

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

var yamlLine = regexp.MustCompile(`^(?:error converting YAML to JSON: )?(?:yaml: )?(?:line (\d+): )?`)

// splitYAMLError splits an error of the YAML parser into line and reason. The line may be one too low; it is 1 if the
// parser does not report one.
func splitYAMLError(err error) (line int, reason string) {
	text := err.Error()
	m := yamlLine.FindStringSubmatch(text)
	if line, err = strconv.Atoi(m[1]); err != nil {
		line = 1
	}
	return line, visible(strings.TrimSpace(text[len(m[0]):]))
}

// parseTree parses a document again to find the lines of its fields; nil if that parser fails.
func parseTree(text string) (n *yamltree.Node) {
	defer func() {
		if recover() != nil {
			n = nil
		}
	}()
	n = &yamltree.Node{}
	if err := yamltree.Unmarshal([]byte(text), n); err != nil || len(n.Content) != 1 {
		return nil
	}
	return n.Content[0]
}

// line returns the line of a field in the file, or of the nearest field around it that has one; 0 if it is unknown.
func (at *position) line(p path) int {
	if at == nil || at.tree == nil {
		return 0
	}
	n, line := at.tree, at.tree.Line
	for _, step := range p {
		for n.Kind == yamltree.AliasNode {
			n = n.Alias
		}
		next, on := child(n, step)
		if next == nil {
			break
		}
		n, line = next, on
	}
	return at.first + line
}

// child returns the node one step down, and its line. For an entry of a mapping that is the line of the key.
func child(n *yamltree.Node, step string) (*yamltree.Node, int) {
	switch n.Kind {
	case yamltree.MappingNode:
		for i := len(n.Content) - 2; i >= 0; i -= 2 { // of two equal keys the last one counts
			if n.Content[i].Value == step {
				return n.Content[i+1], n.Content[i].Line
			}
		}
	case yamltree.SequenceNode:
		if i, err := strconv.Atoi(strings.Trim(step, "[]")); err == nil && i >= 0 && i < len(n.Content) {
			return n.Content[i], n.Content[i].Line
		}
	}
	return nil, 0
}

// duplicateKeys returns the keys that a mapping has more than once, which the parser accepts.
func (at *position) duplicateKeys() (found []path) {
	if at.tree == nil {
		return nil
	}
	var walk func(n *yamltree.Node, p path)
	walk = func(n *yamltree.Node, p path) {
		switch n.Kind {
		case yamltree.MappingNode:
			seen := map[string]bool{}
			for i := 0; i+1 < len(n.Content); i += 2 {
				key := p.key(n.Content[i].Value)
				if seen[n.Content[i].Value] && n.Content[i].Value != "<<" {
					found = append(found, key)
				}
				seen[n.Content[i].Value] = true
				walk(n.Content[i+1], key)
			}
		case yamltree.SequenceNode:
			for i, c := range n.Content {
				walk(c, p.index(i))
			}
		}
	}
	walk(at.tree, nil)
	return found
}

// fileError wraps the error of reading a file; it names the file.
func fileError(file string, err error) error {
	var p *os.PathError
	if errors.As(err, &p) {
		err = p.Err
	}
	return &Problem{Severity: Invalid, File: file, Text: "it cannot be read: " + err.Error()}
}
