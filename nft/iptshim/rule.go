package iptshim

import (
	"net/netip"
	"strconv"
	"strings"

	"github.com/verdict-proxy/verdict/sync/dataplane"
	"github.com/verdict-proxy/verdict/sync/snapshot"
)

// rule is one rule as iptables-save prints it, without "-A CHAIN". The comment stands between the two parts.
type rule struct {
	before, comment, after string
	// owner is whose it is; the zero Name says that it is nobody's.
	owner snapshot.Name
}

// append writes the rule as a line of a restore text.
func (r *rule) append(b []byte, verb, chain string, comments bool) []byte {
	b = append(append(append(append(b, verb...), ' '), chain...), r.before...)
	if r.comment != "" && comments {
		b = append(append(append(b, ` -m comment --comment "`...), r.comment...), '"')
	}
	return append(append(b, r.after...), '\n')
}

// text gives the rule as it stands after "-A CHAIN".
func (r *rule) text() string {
	return strings.TrimSuffix(string(r.append(nil, "", "", true)[1:]), "\n")
}

// chain is a chain with all that is in it.
type chain struct {
	table Table
	name  string
	rules []rule
	// owner is the Service that it belongs to; the zero Name says that it belongs to none alone.
	owner snapshot.Name
}

// commentsRedundant says whether the comments of a chain's rules say no more than its name does. They are left out in
// large clusters, and where they alone differ nothing is written. The branches of trees hold rows as KUBE-SERVICES
// does, and have names without a hash.
func commentsRedundant(t Table, name string) bool {
	if t != NAT || !isServiceChain(name) || len(name) <= hashLen {
		return false
	}
	head, tail := name[:len(name)-hashLen], name[len(name)-hashLen:]
	return strings.Trim(tail, "ABCDEFGHIJKLMNOPQRSTUVWXYZ234567") == "" && strings.HasSuffix(head, "-")
}

// maxComment is how long a comment may be.
const maxComment = 255

// comment makes a text fit to stand between quotation marks. Names of objects have nothing in them that it would
// change.
func comment(s string) string {
	s = strings.Map(func(r rune) rune {
		if r < ' ' || r > '~' || r == '"' || r == '\\' {
			return '_'
		}
		return r
	}, s)
	return s[:min(len(s), maxComment)]
}

// prefixText gives a range as iptables-save prints it.
func prefixText(p netip.Prefix) string {
	p = p.Masked()
	return p.String()
}

func addrText(a netip.Addr) string { return netip.PrefixFrom(a, a.BitLen()).String() }

// portMatch gives the two parts of a match for a protocol and a destination port.
func portMatch(p snapshot.Protocol, port uint16) (before, after string) {
	name := p.String()
	return " -p " + name, " -m " + name + " --dport " + strconv.Itoa(int(port))
}

// keyMatch matches what is sent to a key.
func keyMatch(k dataplane.Key) (before, after string) {
	before, after = portMatch(k.Protocol, k.Port)
	return " -d " + addrText(k.Addr) + before, after
}

// podsMatch matches packets from pods, or with not those of others. None says that there is no such packet.
func podsMatch(p dataplane.Pods, not bool) (match string, none bool) {
	bang := ""
	if not {
		bang = " !"
	}
	switch {
	case p.CIDR.IsValid() && p.CIDR.Bits() == 0:
		return "", not
	case p.CIDR.IsValid():
		return bang + " -s " + prefixText(p.CIDR), false
	case p.Interface != "":
		return bang + " -i " + p.Interface, false
	case p.InterfacePrefix != "":
		return bang + " -i " + p.InterfacePrefix + "+", false
	}
	return "", !not
}

const fromNode = " -m addrtype --src-type LOCAL"

// toNoEndpoint matches what was not translated, and is not addressed to this node: its own address may be in a range of
// Services, as may an endpoint's.
const toNoEndpoint = " -m conntrack ! --ctstate DNAT -m addrtype ! --dst-type LOCAL"
