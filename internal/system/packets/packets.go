// Package packets follows the first packet of a connection through what the kernel lists: through tables of nf_tables,
// as netlink dumps them, and through iptables rules, as iptables-save prints them. It shares no code with what writes
// rules, and knows nothing of Services.
//
// Where a rule draws lots, every lot is followed, with its chance. Whatever the package does not know is an error that
// names the rule, once a packet comes to it; a rule that no packet comes to may be anything. Only a Trace takes such a
// rule for one that does not match, and says so.
package packets

import (
	"fmt"
	"math"
	"math/big"
	"math/bits"
	"net/netip"
	"slices"
	"strings"
)

// Packet is the first packet of a connection.
type Packet struct {
	// Source and Destination are of one family.
	Source, Destination netip.AddrPort
	// Protocol is TCP, UDP or SCTP, or that of a ping, whose ports are 0. A TCP packet has the flag SYN alone.
	Protocol Protocol
	// Interface is the one the packet comes in by; empty if a process on this host sends it.
	Interface string
	// Out is the interface it leaves by, and Index and OutIndex are the indices of both; unset if they are not known.
	Out             string
	Index, OutIndex uint32
	// MAC is the link-layer address of who sends it by the Interface; if it is zero, one that no rule knows.
	MAC [6]byte
}

// Protocol is a protocol's number.
type Protocol uint8

// The protocols.
const (
	TCP  Protocol = 6
	UDP  Protocol = 17
	SCTP Protocol = 132
	// ICMP and ICMPv6 are those of pings.
	ICMP   Protocol = 1
	ICMPv6 Protocol = 58
)

// String returns the name.
func (p Protocol) String() string {
	switch p {
	case TCP:
		return "tcp"
	case UDP:
		return "udp"
	case SCTP:
		return "sctp"
	}
	return fmt.Sprint("protocol ", uint8(p))
}

// ParseProtocol is the inverse of String, and ignores case. It is not ok for another name.
func ParseProtocol(s string) (p Protocol, ok bool) {
	for _, p := range []Protocol{TCP, UDP, SCTP} {
		if strings.EqualFold(s, p.String()) {
			return p, true
		}
	}
	return 0, false
}

// Verdict is what happens to a packet in the end.
type Verdict uint8

// The verdicts.
const (
	// Untouched: it goes on to the destination that it came with.
	Untouched Verdict = iota
	// Sent: a rule chose its destination.
	Sent
	// Rejected: the sender is told that nobody is there.
	Rejected
	// Dropped: the sender is told nothing.
	Dropped
	// Forwarded: it is sent to a neighbour as it came, by the interface by which it came in.
	Forwarded
)

var verdictNames = [...]string{"untouched", "sent", "reject", "drop", "forwarded"}

func (v Verdict) String() string { return verdictNames[v] }

// Ending is something that can happen to a packet.
type Ending struct {
	Verdict Verdict
	// To is the destination that a rule chose, if the Verdict is Sent; the neighbour, with port 0, if it is Forwarded;
	// else the zero AddrPort.
	To netip.AddrPort
	// Masqueraded says that the receiver sees an address of this host.
	Masqueraded bool
	// Remembered is for how many seconds without a connection the client stays with this endpoint; 0 means that it does
	// not.
	Remembered uint32
	// Recalled says that the client's memory chose the endpoint, even if it is the only one.
	Recalled bool
	// Reject says with what a Rejected packet is answered: "icmp port-unreachable", "tcp reset".
	Reject string
}

// String describes the ending: "10.244.1.3:8080, masqueraded", "reject with icmp port-unreachable".
func (e Ending) String() string {
	text := e.Verdict.String()
	switch e.Verdict {
	case Sent:
		text = e.To.String()
	case Rejected:
		return text + " with " + e.Reject
	case Forwarded:
		return text + " to " + e.To.Addr().String()
	}
	if e.Masqueraded {
		text += ", masqueraded"
	}
	if e.Remembered > 0 {
		text += fmt.Sprintf(", remembered for %d s", e.Remembered)
	}
	if e.Recalled {
		text += ", recalled"
	}
	return text
}

// Compare orders endings.
func (e Ending) Compare(o Ending) int {
	if e.Verdict == Sent && o.Verdict == Sent {
		if c := e.To.Compare(o.To); c != 0 {
			return c
		}
	}
	return strings.Compare(e.String(), o.String())
}

// Outcome is an ending with its chance.
type Outcome struct {
	Ending
	Chance Chance
	// Memory is what a packet with this ending leaves behind for later ones; nil if it leaves nothing.
	Memory Memory
	// Last is the last rule that looked at the packet; nil if it was not traced.
	Last *Step
}

// Memory is what earlier packets left in dynamic sets, as one Walker returned it. It means nothing to another one.
type Memory any

// Interval is a range of source addresses that rules ask for; both ends belong to it.
type Interval struct{ First, Last netip.Addr }

// Walker follows packets. It is safe for concurrent use.
type Walker interface {
	// Walk returns all that can happen to a packet, sorted by Ending, each Ending once. The chances add up to 1. Memory
	// is that of an earlier Outcome, or nil for a client that nothing is known of. If asked is not nil, Walk adds the
	// ranges of sources that rules on the way ask for.
	Walk(p Packet, m Memory, asked *Asked) ([]Outcome, error)
}

// Asked collects ranges of sources.
type Asked struct {
	Intervals []Interval
}

func (a *Asked) add(i Interval) {
	if !slices.Contains(a.Intervals, i) {
		a.Intervals = append(a.Intervals, i)
	}
}

// Chance is a probability: Num of Den, without a common divisor. It is exact, or rounded if that takes more than 64
// bits. The zero Chance is invalid.
type Chance struct{ Num, Den uint64 }

// Certain is the chance of what always happens.
var Certain = Chance{1, 1}

// NewChance returns num of den in lowest terms. Den is not 0.
func NewChance(num, den uint64) Chance {
	g := gcd(num, den)
	return Chance{num / g, den / g}
}

func gcd(a, b uint64) uint64 {
	for b != 0 {
		a, b = b, a%b
	}
	return a
}

// Times multiplies.
func (c Chance) Times(o Chance) Chance {
	g, h := gcd(c.Num, o.Den), gcd(o.Num, c.Den)
	numHigh, num := bits.Mul64(c.Num/g, o.Num/h)
	denHigh, den := bits.Mul64(c.Den/h, o.Den/g)
	if numHigh|denHigh == 0 {
		return Chance{num, den}
	}
	return rounded(new(big.Rat).Mul(c.rat(), o.rat()))
}

// Plus adds.
func (c Chance) Plus(o Chance) Chance {
	if sum, carry := bits.Add64(c.Num, o.Num, 0); c.Den == o.Den && carry == 0 {
		return NewChance(sum, c.Den)
	}
	return rounded(new(big.Rat).Add(c.rat(), o.rat()))
}

func rounded(r *big.Rat) Chance {
	num, den := r.Num(), r.Denom()
	if more := max(num.BitLen(), den.BitLen()) - 64; more > 0 {
		num, den = num.Rsh(num, uint(more)), new(big.Int).Rsh(den, uint(more))
	}
	return NewChance(num.Uint64(), den.Uint64())
}

// Near reports whether chances differ by less than one packet in 400,000.
func (c Chance) Near(o Chance) bool { return math.Abs(c.Float()-o.Float()) < nearly }

const nearly = 1.0 / 400_000

// Short returns the first fraction, of those with ever larger terms that approximate the chance best, that is Near it.
func (c Chance) Short() (share, of int) {
	lastShare, lastOf, rest := 0, 1, c
	for share = 1; rest.Den > 0; {
		whole := int(rest.Num / rest.Den)
		share, lastShare = whole*share+lastShare, share
		of, lastOf = whole*of+lastOf, of
		if math.Abs(float64(share)/float64(of)-c.Float()) < nearly {
			break
		}
		rest = Chance{rest.Den, rest.Num % rest.Den}
	}
	return share, of
}

// Float is the chance, rounded.
func (c Chance) Float() float64 { return float64(c.Num) / float64(c.Den) }

func (c Chance) rat() *big.Rat {
	return new(big.Rat).SetFrac(new(big.Int).SetUint64(c.Num), new(big.Int).SetUint64(c.Den))
}

// String returns "1/3", or "1".
func (c Chance) String() string {
	if c.Den == 1 {
		return fmt.Sprint(c.Num)
	}
	return fmt.Sprintf("%d/%d", c.Num, c.Den)
}

// outcomes gathers what can happen to one packet.
type outcomes []Outcome

// add adds an outcome to that with the same ending. One that is traced has a way of its own.
func (l *outcomes) add(o Outcome) {
	for i := range *l {
		if have := &(*l)[i]; o.Last == nil && have.Ending == o.Ending {
			have.Chance = have.Chance.Plus(o.Chance)
			return
		}
	}
	*l = append(*l, o)
}

func (l outcomes) sorted() []Outcome {
	slices.SortFunc(l, func(a, b Outcome) int { return a.Ending.Compare(b.Ending) })
	return l
}
