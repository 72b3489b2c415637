package packets

import (
	"bufio"
	"bytes"
	"crypto/sha256"
	"fmt"
	"math"
	"net/netip"
	"slices"
	"strconv"
	"strings"

	"github.com/verdict-proxy/verdict/internal/ipfamily"
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

// iptRule is a rule.
type iptRule struct {
	text    string
	source  *iptPrefix
	dest    *iptPrefix
	proto   Protocol // 0 if any
	port    uint16   // 0 if any
	matches []iptMatch
	// chance is that of a match by statistic; the zero Chance if there is none.
	chance Chance
	// remember is the list that the client is added to; empty if none.
	remember string
	target   string
	jump     bool // -g is no jump
	args     map[string]string
	unknown  string
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

// ParseChains reads what iptables-save and ip6tables-save print of all tables.
func ParseChains(text ipfamily.Per[[]byte], host *Host) (*Chains, error) {
	c := &Chains{host: host, seconds: map[string]uint32{}}
	digest := sha256.New()
	for f, family := range ipfamily.All {
		c.tables[f] = map[string]map[string]*iptChain{}
		table := ""
		lines := bufio.NewScanner(bytes.NewReader(text[f]))
		lines.Buffer(nil, 1<<20)
		for lines.Scan() {
			line := strings.TrimSpace(lines.Text())
			switch {
			case strings.HasPrefix(line, "*"):
				table = line[1:]
				c.tables[f][table] = map[string]*iptChain{}
			case strings.HasPrefix(line, ":"):
				words := strings.Fields(line[1:])
				builtin := len(words) > 1 && words[1] != "-"
				c.tables[f][table][words[0]] = &iptChain{table: table, name: words[0], builtin: builtin}
			case strings.HasPrefix(line, "-A "), strings.HasPrefix(line, "["):
				rule, chain, err := parseRule(family, line)
				if err != nil {
					return nil, fmt.Errorf("iptables, table %s: %w", table, err)
				}
				to := c.tables[f][table][chain]
				if to == nil {
					return nil, fmt.Errorf("iptables, table %s: a rule of the unknown chain %q", table, chain)
				}
				if to.builtin && !strings.HasPrefix(rule.target, kubePrefix) {
					continue
				}
				to.rules = append(to.rules, rule)
				if n, err := strconv.ParseUint(rule.args["--seconds"], 10, 32); err == nil {
					c.seconds[rule.args["--name"]] = uint32(n)
				}
				fmt.Fprintf(digest, "%s %s %s\n", family, table, rule.text)
				c.size.Rules++
			}
		}
		if err := lines.Err(); err != nil {
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

// Size says how much there is.
func (c *Chains) Size() Size { return c.size }

// Digest identifies the rules that are followed, without their counters.
func (c *Chains) Digest() [sha256.Size]byte { return c.digest }

// makeIndex sorts the rules of a long chain by what they ask for.
func (c *iptChain) makeIndex() {
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
	if r.proto == 0 || r.port == 0 {
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

// words splits a line as a shell does, but for backslashes outside of quotes.
func words(line string) (list []string, err error) {
	var word strings.Builder
	inWord, quoted := false, false
	for i := 0; i < len(line); i++ {
		ch := line[i]
		switch {
		case quoted && ch == '\\' && i+1 < len(line):
			i++
			word.WriteByte(line[i])
		case ch == '"':
			quoted, inWord = !quoted, true
		case ch == ' ' && !quoted:
			if inWord {
				list = append(list, word.String())
				word.Reset()
			}
			inWord = false
		default:
			word.WriteByte(ch)
			inWord = true
		}
	}
	if inWord {
		list = append(list, word.String())
	}
	if quoted {
		return nil, fmt.Errorf("a quote is not closed: %.200q", line)
	}
	return list, nil
}

// options that have no value.
var iptFlags = map[string]bool{"--rcheck": true, "--set": true, "--update": true, "--reap": true, "--rsource": true,
	"--random-fully": true, "--random": true, "--persistent": true}

// parseRule reads a line that appends a rule.
func parseRule(f ipfamily.Family, line string) (r iptRule, chain string, err error) {
	if end := strings.Index(line, "] "); strings.HasPrefix(line, "[") && end > 0 { // counters
		line = line[end+2:]
	}
	r.text = line
	list, err := words(line)
	if err != nil || len(list) < 2 || list[0] != "-A" {
		return r, "", fmt.Errorf("no rule: %.200q (%w)", line, err)
	}
	chain = list[1]
	r.args = map[string]string{}
	inverted := false
	for i := 2; i < len(list); i++ {
		option := list[i]
		if option == "!" {
			inverted = true
			continue
		}
		value := ""
		if !iptFlags[option] {
			if i++; i >= len(list) {
				return r, "", fmt.Errorf("%s has no value: %.200q", option, line)
			}
			value = list[i]
		}
		if err := r.option(f, option, value, inverted); err != nil {
			return r, "", fmt.Errorf("%s: %w: %.200q", option, err, line)
		}
		inverted = false
	}
	r.finish()
	return r, chain, nil
}

// option reads one option with its value.
func (r *iptRule) option(f ipfamily.Family, option, value string, inverted bool) (err error) {
	switch option {
	case "-m", "--comment", "--nfacct-name":
	case "-s":
		r.source, err = parsePrefix(f, value, inverted)
	case "-d":
		r.dest, err = parsePrefix(f, value, inverted)
	case "-p":
		p, ok := ParseProtocol(value)
		if r.proto = p; !ok || inverted {
			r.proto = 255 // no packet that is followed has it
			if inverted {
				r.unknown = "! -p " + value
			}
		}
	case "--dport":
		port, perr := strconv.ParseUint(value, 10, 16)
		if r.port = uint16(port); perr != nil || port == 0 || inverted {
			r.unknown = "--dport " + value
		}
	case "-j", "-g":
		r.target, r.jump = value, option == "-j"
	case "--mark":
		m := iptMatch{option: option, inverted: inverted}
		m.mark, m.mask, err = parseMark(value)
		r.matches = append(r.matches, m)
	case "--ctstate", "--dst-type", "--src-type", "-i":
		r.matches = append(r.matches, iptMatch{option: option, value: value, inverted: inverted})
	case "--probability":
		r.chance, err = parseProbability(value)
	case "--rcheck", "--update", "--set":
		r.args[option] = strconv.FormatBool(!inverted)
	case "--mode", "--seconds", "--reap", "--mask", "--rsource", "--name", "--to-destination", "--set-xmark",
		"--reject-with", "--random-fully", "--every", "--packet":
		r.args[option] = value
	default:
		r.unknown = option
	}
	return err
}

// finish judges options that belong together.
func (r *iptRule) finish() {
	switch mode, every := r.args["--mode"], r.args["--every"]; {
	case mode == "nth":
		n, err := strconv.ParseUint(every, 10, 32)
		if r.chance = NewChance(1, max(n, 1)); err != nil || n == 0 {
			r.unknown = "--every " + every
		}
	case mode == "random" && r.chance.Den == 0, mode != "" && mode != "random":
		r.unknown = "--mode " + mode
	}
	name := r.args["--name"]
	switch {
	case r.args["--set"] == "true":
		r.remember = name
	case r.args["--rcheck"] != "" || r.args["--update"] != "":
		if r.args["--update"] != "" {
			r.remember = name
		}
		r.matches = append(r.matches, iptMatch{option: "--rcheck", value: name,
			inverted: r.args["--rcheck"] == "false" || r.args["--update"] == "false"})
	case r.args["--set"] == "false":
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
	for _, tables := range c.tables {
		if tables[table][chain] != nil {
			return true
		}
	}
	return false
}
