package packets

import (
	"bufio"
	"bytes"
	"crypto/sha256"
	"fmt"
	"io"
	"math"
	"net/netip"
	"slices"
	"strconv"
	"strings"

	"github.com/verdict-proxy/verdict/internal/system/ipfamily"
)

// Chains are rules of iptables, as iptables-save prints them: a Walker. It follows only what kube-proxy's chains do:
// other rules of the built-in chains belong to others, and are passed over.
type Chains struct {
	tables ipfamily.Per[map[string]map[string]*iptChain]
	host   *Host
	// seconds is for how long the rules that ask a list believe it.
	seconds map[string]uint32
	digest  [sha256.Size]byte
	size    Size
	// keepsText says that the rules keep their text.
	keepsText bool
}

// iptChain is a chain with its rules.
type iptChain struct {
	table, name string
	builtin     bool
	rules       []iptRule
	// index holds the rules that ask for an exact destination or port, by what they ask for; others are in rest. Nil of
	// short chains.
	index map[iptKey][]int
	rest  []int
}

// iptKey is what a rule asks for exactly. Addr is the zero Addr if it asks for a protocol and a port only, and Protocol
// and Port are 0 if it asks for an address only.
type iptKey struct {
	addr     netip.Addr
	protocol Protocol
	port     uint16
}

// iptRule is a rule. A large cluster has a million of them, so a rule keeps nothing of the text that it was read from,
// unless something in it is not known or a packet is traced.
type iptRule struct {
	source  *iptPrefix
	dest    *iptPrefix
	proto   Protocol // 0 if any
	jump    bool     // -g is no jump
	port    uint16   // 0 if any
	last    uint16   // of a range that begins with port; 0 if it is no range
	matches []iptMatch
	// chance is that of a match by statistic; the zero Chance if there is none.
	chance Chance
	// remember is the list that the client is added to; empty if none.
	remember string
	// target is the name of the target, and call the chain if it is one. value is what the target is given: an address
	// and port, a mark, or a kind of rejection.
	target, value string
	call          *iptChain
	// unknown is what is not known of the rule, and text the rule then.
	unknown, text string
}

// iptPrefix is -s or -d.
type iptPrefix struct {
	netip.Prefix
	inverted bool
}

// iptMatch is another condition.
type iptMatch struct {
	option, value string
	inverted      bool
	mark, mask    uint32
}

// kubePrefix begins the names of kube-proxy's chains.
const kubePrefix = "KUBE-"

// indexFrom is how many rules a chain must have to get an index.
const indexFrom = 8

// ParseChains reads what iptables-save and ip6tables-save print of all tables. It keeps nothing of the text.
func ParseChains(text ipfamily.Per[[]byte], host *Host) (*Chains, error) {
	c := &Chains{host: host, seconds: map[string]uint32{}}
	digest := sha256.New()
	for f, family := range ipfamily.All {
		c.tables[f] = map[string]map[string]*iptChain{}
		if err := c.parse(family, text[f], digest); err != nil {
			return nil, fmt.Errorf("iptables, %s: %w", family, err)
		}
		for _, chains := range c.tables[f] {
			for _, chain := range chains {
				chain.makeIndex()
				if strings.HasPrefix(chain.name, kubePrefix) {
					c.size.Chains++
				}
			}
		}
	}
	digest.Sum(c.digest[:0])
	return c, nil
}

// parse reads the tables of a family.
func (c *Chains) parse(f ipfamily.Family, text []byte, digest io.Writer) error {
	p := iptParser{family: f, names: map[string]string{}, options: map[string]string{}}
	lines := bufio.NewScanner(bytes.NewReader(text))
	lines.Buffer(nil, 1<<20)
	for lines.Scan() {
		line := bytes.TrimSpace(lines.Bytes())
		switch {
		case bytes.HasPrefix(line, []byte("*")):
			p.table, p.chains = string(line[1:]), map[string]*iptChain{}
			c.tables[f][p.table] = p.chains
		case bytes.HasPrefix(line, []byte(":")):
			words := strings.Fields(string(line[1:]))
			name := strings.Clone(words[0])
			p.chains[name] = &iptChain{table: p.table, name: name, builtin: len(words) > 1 && words[1] != "-"}
		case bytes.HasPrefix(line, []byte("-A ")), bytes.HasPrefix(line, []byte("[")):
			if err := c.parseRule(&p, line, digest); err != nil {
				return fmt.Errorf("table %s: %w", p.table, err)
			}
		}
	}
	return lines.Err()
}

// parseRule adds a rule to its chain. Rules of others in built-in chains are passed over.
func (c *Chains) parseRule(p *iptParser, line []byte, digest io.Writer) error {
	if end := bytes.Index(line, []byte("] ")); line[0] == '[' && end > 0 { // counters
		line = line[end+2:]
	}
	rule, chain, err := p.rule(line)
	if err != nil {
		return err
	}
	to := p.chains[chain]
	if to == nil {
		return fmt.Errorf("a rule of the unknown chain %.200q", chain)
	}
	if to.builtin && !strings.HasPrefix(rule.target, kubePrefix) {
		return nil
	}
	if c.keepsText {
		rule.text = strings.TrimPrefix(string(line), "-A "+chain+" ")
	}
	to.rules = append(to.rules, rule)
	if n, err := strconv.ParseUint(p.options["--seconds"], 10, 32); err == nil {
		c.seconds[p.name(p.options["--name"])] = uint32(n)
	}
	fmt.Fprintf(digest, "%s %s %s\n", p.family, p.table, line)
	c.size.Rules++
	return nil
}

// Size says how much there is.
func (c *Chains) Size() Size { return c.size }

// Digest identifies the rules that are followed, without their counters.
func (c *Chains) Digest() [sha256.Size]byte { return c.digest }

// makeIndex sorts the rules of a long chain by what they ask for.
func (c *iptChain) makeIndex() {
	c.rules = slices.Clone(c.rules) // which takes no more room than it needs
	if len(c.rules) < indexFrom {
		return
	}
	c.index = map[iptKey][]int{}
	for i := range c.rules {
		if k, ok := c.rules[i].key(); ok {
			c.index[k] = append(c.index[k], i)
		} else {
			c.rest = append(c.rest, i)
		}
	}
}

func (r *iptRule) key() (k iptKey, ok bool) {
	if r.proto == 0 || r.port == 0 || r.last != 0 {
		if r.dest != nil && r.dest.IsSingleIP() && !r.dest.inverted {
			return iptKey{addr: r.dest.Addr()}, true
		}
		return k, false
	}
	k = iptKey{protocol: r.proto, port: r.port}
	if r.dest == nil || !r.dest.IsSingleIP() {
		return k, true // which has to be compared all the same
	}
	if r.dest.inverted {
		return k, false
	}
	k.addr = r.dest.Addr()
	return k, true
}

// candidates returns the places of the rules that may match a packet, in their order.
func (c *iptChain) candidates(to netip.AddrPort, p Protocol) []int {
	exact := c.index[iptKey{to.Addr(), p, to.Port()}]
	ports := c.index[iptKey{protocol: p, port: to.Port()}]
	addrs := c.index[iptKey{addr: to.Addr()}]
	if len(ports) == 0 && len(exact) == 0 && len(addrs) == 0 {
		return c.rest
	}
	list := slices.Concat(exact, ports, addrs, c.rest)
	slices.Sort(list)
	return list
}

// words splits a line as a shell does, but for backslashes outside of quotes, and adds the words to a list.
func words(list []string, line string) ([]string, error) {
	for line = strings.TrimLeft(line, " "); line != ""; line = strings.TrimLeft(line, " ") {
		if end := strings.IndexAny(line, ` "`); end != 0 && (end < 0 || line[end] == ' ') { // nothing is quoted
			if end < 0 {
				end = len(line)
			}
			list, line = append(list, line[:end]), line[end:]
			continue
		}
		word, rest, err := quotedWord(line)
		if err != nil {
			return nil, err
		}
		list, line = append(list, word), rest
	}
	return list, nil
}

// quotedWord reads a word of which some is in quotes.
func quotedWord(line string) (word, rest string, err error) {
	var b strings.Builder
	quoted := false
	for i := 0; i < len(line); i++ {
		ch := line[i]
		switch {
		case quoted && ch == '\\' && i+1 < len(line):
			i++
			b.WriteByte(line[i])
		case ch == '"':
			quoted = !quoted
		case ch == ' ' && !quoted:
			return b.String(), line[i:], nil
		default:
			b.WriteByte(ch)
		}
	}
	if quoted {
		return "", "", fmt.Errorf("a quote is not closed: %.200q", line)
	}
	return b.String(), "", nil
}

// options that have no value.
var iptFlags = map[string]bool{"--rcheck": true, "--set": true, "--update": true, "--reap": true, "--rsource": true,
	"--random-fully": true, "--random": true, "--persistent": true}

// iptParser reads rules of a family.
type iptParser struct {
	family ipfamily.Family
	table  string
	chains map[string]*iptChain // of that table
	// names has each name once that rules have in common.
	names map[string]string
	// words and options are those of the rule that is being read, and share its text.
	words   []string
	options map[string]string
}

// name returns a name that may be kept.
func (p *iptParser) name(s string) string {
	if chain := p.chains[s]; chain != nil {
		return chain.name
	}
	kept, ok := p.names[s]
	if !ok {
		kept = strings.Clone(s)
		p.names[kept] = kept
	}
	return kept
}

// rule reads a line that appends a rule.
func (p *iptParser) rule(text []byte) (r iptRule, chain string, err error) {
	line := string(text)
	p.words, err = words(p.words[:0], line)
	if err != nil || len(p.words) < 2 || p.words[0] != "-A" {
		return r, "", fmt.Errorf("no rule: %.200q (%w)", line, err)
	}
	clear(p.options)
	inverted := false
	for i := 2; i < len(p.words); i++ {
		option := p.words[i]
		if option == "!" {
			inverted = true
			continue
		}
		value := ""
		if !iptFlags[option] {
			if i++; i >= len(p.words) {
				return r, "", fmt.Errorf("%s has no value: %.200q", option, line)
			}
			value = p.words[i]
		}
		if err := p.option(&r, option, value, inverted); err != nil {
			return r, "", fmt.Errorf("%s: %w: %.200q", option, err, line)
		}
		inverted = false
	}
	p.finish(&r)
	if r.unknown != "" {
		r.unknown, r.text = strings.Clone(r.unknown), line
	}
	return r, p.words[1], nil
}

// option reads one option with its value.
func (p *iptParser) option(r *iptRule, option, value string, inverted bool) (err error) {
	switch option {
	case "-m", "--comment", "--nfacct-name":
	case "-s":
		r.source, err = parsePrefix(p.family, value, inverted)
	case "-d":
		r.dest, err = parsePrefix(p.family, value, inverted)
	case "-p":
		proto, ok := ParseProtocol(value)
		if r.proto = proto; !ok || inverted {
			r.proto = 255 // no packet that is followed has it
			if inverted {
				r.unknown = "! -p " + value
			}
		}
	case "--dport":
		low, high, isRange := strings.Cut(value, ":")
		port, perr := strconv.ParseUint(low, 10, 16)
		if isRange && perr == nil {
			var last uint64
			last, perr = strconv.ParseUint(high, 10, 16)
			r.last, port = uint16(last), max(port, 1) // a packet with a port has none that is 0
		}
		if r.port = uint16(port); perr != nil || port == 0 || inverted {
			r.unknown = "--dport " + value
		}
	case "-j", "-g":
		r.target, r.call, r.jump = p.name(value), p.chains[value], option == "-j"
	case "--mark":
		m := iptMatch{option: option, inverted: inverted}
		m.mark, m.mask, err = parseMark(value)
		r.matches = append(r.matches, m)
	case "--ctstate", "--dst-type", "--src-type", "-i":
		r.matches = append(r.matches, iptMatch{option: p.name(option), value: p.name(value), inverted: inverted})
	case "--probability":
		r.chance, err = parseProbability(value)
	case "--to-destination", "--set-xmark", "--reject-with":
		r.value = strings.Clone(value)
	case "--rcheck", "--update", "--set":
		p.options[option] = strconv.FormatBool(!inverted)
	case "--mode", "--seconds", "--reap", "--mask", "--rsource", "--name", "--random-fully", "--every", "--packet":
		p.options[option] = value
	default:
		r.unknown = option
	}
	return err
}

// finish judges options that belong together.
func (p *iptParser) finish(r *iptRule) {
	switch mode, every := p.options["--mode"], p.options["--every"]; {
	case mode == "nth":
		n, err := strconv.ParseUint(every, 10, 32)
		if r.chance = NewChance(1, max(n, 1)); err != nil || n == 0 {
			r.unknown = "--every " + every
		}
	case mode == "random" && r.chance.Den == 0, mode != "" && mode != "random":
		r.unknown = "--mode " + mode
	}
	set, rcheck, update := p.options["--set"], p.options["--rcheck"], p.options["--update"]
	switch {
	case set == "true":
		r.remember = p.name(p.options["--name"])
	case rcheck != "" || update != "":
		name := p.name(p.options["--name"])
		if update != "" {
			r.remember = name
		}
		r.matches = append(r.matches, iptMatch{option: "--rcheck", value: name,
			inverted: rcheck == "false" || update == "false"})
	case set == "false":
		r.unknown = "! --set"
	}
}

func parsePrefix(f ipfamily.Family, s string, inverted bool) (*iptPrefix, error) {
	if !strings.Contains(s, "/") {
		s += "/" + strconv.Itoa(f.Bits())
	}
	p, err := netip.ParsePrefix(s)
	if err != nil {
		return nil, err
	}
	return &iptPrefix{p, inverted}, nil
}

// parseMark reads a value with its mask.
func parseMark(s string) (mark, mask uint32, err error) {
	value, rest, masked := strings.Cut(s, "/")
	n, err := strconv.ParseUint(value, 0, 32)
	if err != nil {
		return 0, 0, err
	}
	m := uint64(math.MaxUint32)
	if masked {
		m, err = strconv.ParseUint(rest, 0, 32)
	}
	return uint32(n), uint32(m), err
}

// parseProbability reads a probability. The kernel has 31 bits for it, so that 1/3 is only as near as these allow: what
// is nearest to one of a whole number is taken for it.
func parseProbability(s string) (Chance, error) {
	p, err := strconv.ParseFloat(s, 64)
	if err != nil || p < 0 || p > 1 {
		return Chance{}, fmt.Errorf("%q is no probability", s)
	}
	const whole = 1 << 31
	nth := uint64(math.Round(p * whole))
	if nth == 0 {
		return Chance{0, 1}, nil
	}
	if n := uint64(math.Round(float64(whole) / float64(nth))); math.Abs(float64(whole)/float64(n)-float64(nth)) < 1 {
		return Chance{1, n}, nil
	}
	return NewChance(nth, whole), nil
}

// Has reports whether there is a chain, in one family at least.
func (c *Chains) Has(table, chain string) bool {
	return c.tables[0][table][chain] != nil || c.tables[1][table][chain] != nil
}
