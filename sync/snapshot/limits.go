package snapshot

import (
	"cmp"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strconv"
	"strings"

	"github.com/verdict-proxy/verdict/internal/system/ipfamily"
)

// Limits are those of a Service, each for every one of its ports by itself, on every node by itself. A limit without a
// rate is none. The zero value is no limit.
type Limits struct {
	// Rate is that of all clients together, Client that of each of them.
	Rate, Client RateLimit
	// Open is how many open connections all clients may have together, ClientOpen how many each of them; 0 means no
	// limit.
	Open, ClientOpen uint32
	// Drop drops what is over a limit, instead of refusing it.
	Drop bool
}

// RateLimit is how many connections there may be in a second, and how many of them at once.
type RateLimit struct{ Rate, Burst uint32 }

// MaxRate is the greatest rate and burst of a Service, and the greatest number of its open connections.
const MaxRate = 1_000_000

// Full are the ports of a Service that have as many open connections as they may have, and the clients of ports that
// do. It is immutable, and replaced as a whole.
type Full struct {
	Ports []FullPort
	// Clients are the ports with such clients, which are sorted.
	Clients map[FullPort][]netip.Addr
}

// FullPort is a port in one address family.
type FullPort struct {
	Port     string
	Protocol Protocol
	Family   ipfamily.Family
}

// Has reports whether a port is full. The Full may be nil.
func (f *Full) Has(p FullPort) bool { return f != nil && slices.Contains(f.Ports, p) }

// ClientsOf returns the clients of a port that have as many open connections as they may have. The Full may be nil.
func (f *Full) ClientsOf(p FullPort) []netip.Addr {
	if f == nil {
		return nil
	}
	return f.Clients[p]
}

// empty reports whether no port is full, and no client of one. The Full may be nil.
func (f *Full) empty() bool { return f == nil || len(f.Ports)+len(f.Clients) == 0 }

// ClientRates are the rates that a client may have, and ClientBursts how many times as many connections it may have at
// once: each pair of them is a chain, so they are few whatever is asked for.
var (
	ClientRates  = [...]uint32{1, 2, 3, 5, 10, 20, 30, 50, 100, 200, 300, 500, 1000, 2000, 3000, 5000, 10000}
	ClientBursts = [...]uint32{1, 2, 5, 10}
)

// String writes the limits as ParseLimits reads them.
func (l Limits) String() string {
	var words []string
	for _, r := range [...]struct {
		name string
		of   RateLimit
	}{{"", l.Rate}, {"client-", l.Client}} {
		if r.of.Rate > 0 {
			words = append(words, fmt.Sprintf("%srate=%d %sburst=%d", r.name, r.of.Rate, r.name, r.of.Burst))
		}
	}
	if l.Open > 0 {
		words = append(words, fmt.Sprintf("open=%d", l.Open))
	}
	if l.ClientOpen > 0 {
		words = append(words, fmt.Sprintf("client-open=%d", l.ClientOpen))
	}
	if l.Drop {
		words = append(words, "over=drop")
	}
	return strings.Join(words, " ")
}

// ParseLimits reads words such as "rate=1000 burst=200 client-rate=10 client-burst=20 open=5000 client-open=50
// over=drop". A burst that is not given is as large as its rate. The error says which word is wrong.
func ParseLimits(text string) (l Limits, err error) {
	seen := map[string]bool{}
	for word := range strings.FieldsSeq(text) {
		name, value, _ := strings.Cut(word, "=")
		if seen[name] {
			return Limits{}, fmt.Errorf("%s is there twice", name)
		}
		seen[name] = true
		switch name {
		case "rate":
			l.Rate.Rate, err = limitNumber(name, value)
		case "burst":
			l.Rate.Burst, err = limitNumber(name, value)
		case "client-rate":
			l.Client.Rate, err = limitNumber(name, value)
		case "client-burst":
			l.Client.Burst, err = limitNumber(name, value)
		case "open":
			l.Open, err = limitNumber(name, value)
		case "client-open":
			l.ClientOpen, err = limitNumber(name, value)
		case "over":
			if l.Drop = value == "drop"; !l.Drop && value != "refuse" {
				err = fmt.Errorf("over is %.20q: write refuse or drop", value)
			}
		default:
			err = fmt.Errorf("%.20q is none of rate, burst, client-rate, client-burst, open, client-open and over", name)
		}
		if err != nil {
			return Limits{}, err
		}
	}
	return l.complete()
}

// complete adds bursts that are not given.
func (l Limits) complete() (Limits, error) {
	switch r, c := l.Rate, l.Client; {
	case r.Rate == 0 && r.Burst > 0:
		return Limits{}, errors.New("burst needs a rate")
	case c.Rate == 0 && c.Burst > 0:
		return Limits{}, errors.New("client-burst needs a client-rate")
	case r.Rate == 0 && c.Rate == 0 && l.Open == 0 && l.ClientOpen == 0:
		return Limits{}, errors.New("there is no rate, client-rate, open or client-open")
	case c.Rate > 0 && !slices.Contains(ClientRates[:], c.Rate):
		return Limits{}, fmt.Errorf("client-rate is %d: write one of %s", c.Rate, numbers(ClientRates[:], 1))
	case c.Burst > 0 && (c.Burst%c.Rate != 0 || !slices.Contains(ClientBursts[:], c.Burst/c.Rate)):
		return Limits{}, fmt.Errorf("client-burst is %d: with this client-rate, write one of %s", c.Burst,
			numbers(ClientBursts[:], c.Rate))
	}
	l.Rate.Burst, l.Client.Burst = cmp.Or(l.Rate.Burst, l.Rate.Rate), cmp.Or(l.Client.Burst, l.Client.Rate)
	return l, nil
}

func limitNumber(name, text string) (uint32, error) {
	n, err := strconv.ParseUint(text, 10, 32)
	if err != nil || n == 0 || n > MaxRate {
		return 0, fmt.Errorf("%s is %.20q: write a number from 1 to %d", name, text, MaxRate)
	}
	return uint32(n), nil
}

// numbers lists multiples of a number.
func numbers(of []uint32, times uint32) string {
	words := make([]string, len(of))
	for i, n := range of {
		words[i] = fmt.Sprint(n * times)
	}
	return strings.Join(words, ", ")
}
