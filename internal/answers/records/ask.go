// Package records reads what a node recorded of connections, and shows it.
package records

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"net/http"
	"net/netip"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/verdict-proxy/verdict/internal/proxy/flows"
)

// maxLine bounds a line of an answer.
const maxLine = 64 << 10

// Question says what is asked of a node. The zero value asks for all that it holds, up to flows.MaxLines.
type Question struct {
	// Service is "namespace/name", and From the pod, workload or address of clients; empty means all.
	Service, From string
	// Since is how far back; 0 means all.
	Since time.Duration
	// Failed asks only for failures, Open also for connections that begin, with Follow, which waits for more.
	Failed, Follow, Open bool
	// Sums asks for sums, and not for records; Zones for sums by Service and pair of zones.
	Sums, Zones bool
	// Limit is how many lines are wanted at most, the newest.
	Limit int
}

// parameters are what a node's /flows and "verdict flows" call alike.
func (q *Question) parameters() url.Values {
	v := url.Values{}
	set := func(name string, asked bool, value string) {
		if asked {
			v.Set(name, value)
		}
	}
	set("from", q.From != "", q.From)
	set("since", q.Since > 0, q.Since.String())
	set("limit", q.Limit > 0, strconv.Itoa(q.Limit))
	set("failed", q.Failed, "1")
	set("follow", q.Follow, "1")
	set("open", q.Open, "1")
	set("zones", q.Zones, "1")
	return v
}

// query is the question as /flows reads it.
func (q *Question) query() url.Values {
	v := q.parameters()
	v.Set("service", q.Service)
	if q.Sums || q.Zones {
		v.Set("sums", "1")
	}
	return v
}

// Args are the question as "verdict flows" reads it.
func (q *Question) Args() (args []string) {
	v := q.parameters()
	for _, name := range slices.Sorted(maps.Keys(v)) {
		args = append(args, "--"+name+"="+v.Get(name))
	}
	if q.Service != "" {
		args = append(args, "--", q.Service)
	}
	return args
}

// Ask asks the proxy whose metrics server is at an address, and hands on each line of its answer: with Follow until ctx
// ends, which then is no error.
func Ask(ctx context.Context, addr netip.AddrPort, q *Question, each func(line []byte) error) error {
	if ip := addr.Addr(); ip.IsUnspecified() {
		loopback := netip.MustParseAddr("127.0.0.1")
		if ip.Is6() {
			loopback = netip.IPv6Loopback()
		}
		addr = netip.AddrPortFrom(loopback, addr.Port())
	}
	page := "http://" + addr.String() + "/flows"
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, page+"?"+q.query().Encode(), nil)
	if err != nil {
		return err
	}
	resp, err := (&http.Transport{DisableKeepAlives: true}).RoundTrip(req) // without a proxy that the environment names
	if err != nil && q.Follow && ctx.Err() != nil {
		return nil
	}
	if err != nil {
		return fmt.Errorf("%s: %w", page, err)
	}
	defer resp.Body.Close()
	switch resp.StatusCode {
	case http.StatusOK:
	case http.StatusNotFound:
		return ErrOff
	default:
		text, _ := io.ReadAll(io.LimitReader(resp.Body, 300))
		return errors.New(strings.TrimSpace(string(text)))
	}
	lines := bufio.NewScanner(resp.Body)
	for lines.Buffer(nil, maxLine); lines.Scan(); {
		if err := each(lines.Bytes()); err != nil {
			return err
		}
	}
	if ctx.Err() != nil && q.Follow {
		return nil
	}
	return lines.Err()
}

// ErrOff is the error of a node without records.
var ErrOff = errors.New("the setting records is off on this node (docs/FLOWS.md)")

// Read asks for what is of one type, for records or for sums, without Follow, and hands on each.
func Read[T any](ctx context.Context, addr netip.AddrPort, q *Question, each func(*T)) (a flows.Answer, err error) {
	err = Ask(ctx, addr, q, func(line []byte) error {
		if a.Started.IsZero() {
			return json.Unmarshal(line, &a)
		}
		var one T
		err := json.Unmarshal(line, &one)
		if err == nil {
			each(&one)
		}
		return err
	})
	return a, err
}

// Line is a line of an answer. One of its fields is set.
type Line struct {
	Answer *flows.Answer
	Record *flows.Record
	Sum    *flows.Sum
}

// Parse reads a line.
func Parse(text []byte) (l Line, err error) {
	var kind struct {
		Started, Minute time.Time
		End             flows.End
	}
	if err := json.Unmarshal(text, &kind); err != nil {
		return l, err
	}
	switch {
	case kind.End != "":
		err = json.Unmarshal(text, &l.Record)
	case !kind.Minute.IsZero():
		err = json.Unmarshal(text, &l.Sum)
	case !kind.Started.IsZero():
		err = json.Unmarshal(text, &l.Answer)
	default:
		err = fmt.Errorf("the line is neither an answer nor a record: %.100q", text)
	}
	return l, err
}
