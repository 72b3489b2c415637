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
)

// Document is what a configuration says, in the words it is written in.
type Document struct {
	// KubeProxy is kube-proxy's own type.
	KubeProxy v1alpha1.KubeProxyConfiguration `json:",inline"`
	// Verdict is what kube-proxy has no words for. It is a document of its own in the same file, behind kube-proxy's:
	// kube-proxy reads the first document of its file and no other.
	Verdict VerdictConfiguration `json:"VerdictConfiguration"`
}

// VerdictConfiguration is our own section.
type VerdictConfiguration struct {
	metav1.TypeMeta `json:",inline"`
	// Manifests is a file or a directory to take the objects from, in place of the Kubernetes API.
	Manifests string `json:"manifests"`
	// Backend says what writes the rules: auto, nftables or iptables.
	Backend string `json:"backend"`
	// IPTablesDispatch says how rules of iptables find a Service: tree or list.
	IPTablesDispatch string `json:"iptablesDispatch"`
	// IPTablesCompat keeps the chains KUBE-MARK-MASQ and KUBE-POSTROUTING beside nftables, for others that jump there.
	IPTablesCompat bool `json:"iptablesCompat"`
	// Keeper says who holds the netlink socket while the proxy is restarted: auto, process, systemd or none.
	Keeper string `json:"keeper"`
	// OwnTables lets nobody else change the tables, where the kernel can do that; by default it does.
	OwnTables *bool `json:"ownTables"`
	// Takeover says what becomes of a kube-proxy's rules once ours are in force: auto or never.
	Takeover string `json:"takeover"`
	// IPVS says which Services it schedules: auto, always or never. By default it is always in mode ipvs, else auto.
	IPVS string `json:"ipvs"`
	// IPVSServices is the number of Services from which on, with auto, IPVS schedules all of them; 0 means never.
	IPVSServices *int32 `json:"ipvsServices"`
	// IPVSAddresses are the ranges of load balancer addresses at which IPVS may schedule.
	IPVSAddresses []string `json:"ipvsAddresses"`
	// MetricsConnections says how finely new connections are counted in the metrics: off, service or endpoint.
	MetricsConnections string `json:"metricsConnections"`
	// MetricsMaxSeries is how many Service ports, and how many endpoints, have a series of their own there.
	MetricsMaxSeries *int32 `json:"metricsMaxSeries"`
	// CounterMemoryMiB is how much memory the counters of frontends and endpoints may take in the kernel, in MiB.
	CounterMemoryMiB *int32 `json:"counterMemoryMiB"`
}

// The kinds of documents.
const (
	kubeProxyVersion = "kubeproxy.config.k8s.io/v1alpha1"
	kubeProxyKind    = "KubeProxyConfiguration"
	verdictVersion   = "verdict/v1alpha1"
	verdictKind      = "VerdictConfiguration"
)

// maxFile is how large a file may be. A ConfigMap holds 1 MiB.
const maxFile = 4 << 20

// readFile reads a whole file, which must not be endless.
func readFile(file string) ([]byte, error) {
	f, err := os.OpenFile(file, os.O_RDONLY|syscall.O_NONBLOCK, 0) // a pipe would be waited for
	if err != nil {
		return nil, err
	}
	defer f.Close()
	if info, err := f.Stat(); err != nil || !info.Mode().IsRegular() {
		// What is read once, such as a pipe, would be empty for the next process, or the next look at it.
		return nil, errors.Join(err, errors.New("it is no regular file"))
	}
	text, err := io.ReadAll(io.LimitReader(f, maxFile+1))
	if err == nil && len(text) > maxFile {
		err = fmt.Errorf("it is larger than %d MiB", maxFile>>20)
	}
	return text, err
}

// reading is a file on its way to a Document.
type reading struct {
	decoder
	doc   *Document
	flags *Flags
	// kubeProxy and verdict say that there was such a document, and where they are.
	kubeProxy, verdict *position
}

// position finds the lines of fields.
type position struct {
	// first is the line the document begins in, less one.
	first int
	tree  *yamltree.Node
}

// read reads the documents of a file. An error means that there is nothing to go by.
func read(file string, text []byte) (*reading, error) {
	r := &reading{doc: &Document{}}
	r.file, r.bad = file, map[string]bool{}
	for _, part := range split(string(bytes.TrimPrefix(text, []byte("\uFEFF")))) {
		if err := r.part(part); err != nil {
			return nil, err
		}
	}
	if r.kubeProxy == nil && r.verdict == nil {
		return nil, &Problem{Severity: Bad, File: file, Text: "there is no " + kubeProxyKind + " in it"}
	}
	return r, nil
}

// part reads one document.
func (r *reading) part(p part) error {
	value, err := generic(p.text)
	if err != nil {
		line, reason := yamlReason(err)
		return &Problem{Severity: Bad, File: r.file, Line: p.first + line, Text: "this is no YAML: " + reason}
	}
	if value == nil { // nothing but comments
		return nil
	}
	fields, ok := value.(map[string]any)
	if !ok {
		return &Problem{
			Severity: Bad,
			File:     r.file,
			Line:     p.first + 1,
			Text:     "this is no " + kubeProxyKind + ", but " + show(value),
		}
	}
	version, _ := fields["apiVersion"].(string)
	kind, _ := fields["kind"].(string)
	at := &position{p.first, lines(p.text)}
	r.at = at
	switch {
	case kind == kubeProxyKind && version == kubeProxyVersion && r.kubeProxy == nil:
		r.kubeProxy = at
		if r.verdict != nil {
			r.say(Warning, nil, "kube-proxy reads only the first document of a file: this one should come before "+verdictKind)
		}
		r.fill(nil, fields, &r.doc.KubeProxy)
	case kind == verdictKind && version == verdictVersion && r.verdict == nil:
		r.verdict = at
		r.fill(path{verdictKind}, fields, &r.doc.Verdict)
	case kind == kubeProxyKind && r.kubeProxy != nil || kind == verdictKind && r.verdict != nil:
		r.say(Warning, nil, "there is a "+kind+" before this one, which counts")
	case kind == kubeProxyKind:
		return r.wrongVersion(version, kubeProxyVersion)
	case kind == verdictKind:
		return r.wrongVersion(version, verdictVersion)
	case kind == "ConfigMap":
		return &Problem{Severity: Bad, File: r.file, Line: p.first + 1,
			Text: "this is a ConfigMap; give the file that is in it (kubeadm calls it config.conf)"}
	case kind == "":
		return &Problem{Severity: Bad, File: r.file, Line: p.first + 1, Text: fmt.Sprintf(
			"there is no kind; expected are apiVersion %s and kind %s", kubeProxyVersion, kubeProxyKind)}
	default:
		r.say(Warning, path{"kind"}, clip(kind)+" is passed over: it is neither "+kubeProxyKind+" nor "+verdictKind)
	}
	return nil
}

func (r *reading) wrongVersion(version, want string) error {
	p := &Problem{Severity: Bad, File: r.file, Line: r.at.line(path{"apiVersion"}), Field: "apiVersion",
		Text: quote(version) + " is not known, only " + want}
	if version == "" {
		p.Text = "it is missing; it should be " + want
	}
	return p
}

// line gives the line of a field in the file.
func (r *reading) line(p path) int {
	if len(p) > 0 && p[0] == verdictKind {
		return r.verdict.line(p[1:])
	}
	return r.kubeProxy.line(p)
}

// part is one document of a file.
type part struct {
	first int
	text  string
}

// split splits a file into its documents.
func split(text string) []part {
	var parts []part
	current := part{}
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
		current = part{first: n}
		if rest := strings.TrimLeft(line, "-. \t\r\n"); rest != "" && line[0] == '-' { // "--- {kind: X}"
			current.first = n - 1
			b.WriteString(rest)
		}
	}
	current.text = b.String()
	return append(parts, current)
}

var separator = regexp.MustCompile(`^(---|\.\.\.)(\s|$)`)

// generic gives a document as encoding/json would, with numbers as json.Number, by the same way kube-proxy takes: so
// that what is a boolean there is one here.
func generic(text string) (value any, err error) {
	defer func() {
		if r := recover(); r != nil { // YAML's parsers have had crashes of their own (CVE-2022-28948)
			value, err = nil, fmt.Errorf("the parser gave up: %v", r)
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

// yamlReason takes an error of the YAML parser apart; its line may be one too low or, for want of one, 1.
func yamlReason(err error) (line int, reason string) {
	text := err.Error()
	m := yamlLine.FindStringSubmatch(text)
	if line, err = strconv.Atoi(m[1]); err != nil {
		line = 1
	}
	return line, clip(strings.TrimSpace(text[len(m[0]):]))
}

// lines parses a document once more, for the lines of its fields; nil if that parser cannot.
func lines(text string) (n *yamltree.Node) {
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

// line gives the line of a field in the file, or of the nearest part around it that has one; 0 if that is not known.
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

// child goes one step down. A mapping's key has the better line.
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

// repeated gives the keys that a mapping has more than once, which the parser lets pass.
func (at *position) repeated() (found []path) {
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

// fileError is an error that a file could not be read with; it names the file.
func fileError(file string, err error) error {
	var p *os.PathError
	if errors.As(err, &p) {
		err = p.Err
	}
	return &Problem{Severity: Bad, File: file, Text: "it cannot be read: " + err.Error()}
}
