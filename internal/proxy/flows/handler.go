package flows

import (
	"encoding/json"
	"fmt"
	"iter"
	"net/http"
	"net/netip"
	"net/url"
	"strconv"
	"strings"
	"time"

	"github.com/verdict-proxy/verdict/internal/proxy/health"
)

// Bounds of answers.
const (
	// MaxLines is how many records or sums an answer has: some 20 MiB.
	MaxLines = 50_000
	// maxAnswers bounds the answers that are written at a time: each keeps what the list had when it began, for as long as
	// the server lets it take. Others wait.
	maxAnswers = 4
	// readerPatience is how long a reader that follows may take for a record.
	readerPatience = 30 * time.Second
	// beat is how often losses are looked at, for readers that follow.
	beat = time.Second
)

// query is what a reader asks for.
type query struct {
	service, from                     string
	since                             time.Time
	failed, follow, sums, zones, open bool
	// limit is how many lines are sent at most, the newest.
	limit int
}

// parseQuery reads the parameters of a request. Those that are not known are an error, as is a wrong value.
func parseQuery(values url.Values, now time.Time) (q query, err error) {
	q.limit = MaxLines
	flags := map[string]*bool{"failed": &q.failed, "follow": &q.follow, "sums": &q.sums, "zones": &q.zones,
		"open": &q.open}
	for name, list := range values {
		value := list[0]
		switch flag := flags[name]; {
		case name == "service":
			q.service = value
		case name == "from":
			q.from = value
		case name == "since":
			d, err := time.ParseDuration(value)
			if err != nil || d < 0 {
				return q, fmt.Errorf("since: %.50q is not a duration such as 10m", value)
			}
			q.since = now.Add(-d)
		case name == "limit":
			if q.limit, err = strconv.Atoi(value); err != nil || q.limit < 1 || q.limit > MaxLines {
				return q, fmt.Errorf("limit: %.50q is not a number from 1 to %d", value, MaxLines)
			}
		case flag == nil:
			return q, fmt.Errorf("%.50q is not one of service, from, since, limit, failed, follow, open, sums, zones",
				name)
		case value != "0" && value != "1":
			return q, fmt.Errorf("%s: %.50q is neither 0 nor 1", name, value)
		default:
			*flag = value == "1"
		}
	}
	if q.sums && q.follow {
		return q, fmt.Errorf("sums and follow exclude each other")
	}
	return q, nil
}

// wants reports whether the reader asked for a record.
func (q *query) wants(r *Record) bool {
	return (q.service == "" || q.service == r.Service) && !r.Time.Before(q.since) && (!q.failed || r.Failure()) &&
		(q.open || r.End != Open) && (q.from == "" || r.Client.is(q.from))
}

// wantsSum reports whether the reader asked for a sum.
func (q *query) wantsSum(s *Sum) bool {
	return (q.service == "" || q.service == s.Service) && (q.from == "" || q.from == s.Client) &&
		(!q.failed || s.Failures > 0)
}

// is reports whether a peer has this name, of its pod or of its workload, or this address.
func (p *Peer) is(name string) bool {
	if name == p.Pod || name == p.Workload {
		return true
	}
	if strings.Contains(name, "/") || !p.Addr.IsValid() {
		return p.Prefix.IsValid() && p.Prefix.String() == name
	}
	a, err := netip.ParseAddr(name)
	return err == nil && a == p.Addr.Addr()
}

// Off answers GET /flows on a node without records.
func Off(w http.ResponseWriter, _ *http.Request) {
	http.Error(w, "the setting records is off on this node (docs/FLOWS.md)", http.StatusNotFound)
}

// ServeHTTP answers GET /flows?service=NAMESPACE/NAME&from=NAMESPACE/POD&since=10m&limit=1000&failed=1&follow=1&open=1
// with JSON lines: an Answer, then Records; with sums=1 Sums; with sums=1&zones=1 Sums by Service and pair of zones
// alone, of all minutes that were asked for. Only processes of this host may ask (health.OnlyHost).
func (b *Book) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	q, err := parseQuery(r.URL.Query(), b.o.Now())
	if err != nil {
		http.Error(w, err.Error(), http.StatusBadRequest)
		return
	}
	l := &lines{to: w, control: http.NewResponseController(w), answer: Answer{Node: b.o.Node, Started: b.started}}
	l.json = json.NewEncoder(w)
	w.Header().Set("Content-Type", "application/jsonl")
	w.Header().Set("X-Content-Type-Options", "nosniff")
	switch {
	case q.follow:
		b.follow(r, l, q)
	case q.sums:
		defer b.begin(r)()
		b.mu.Lock()
		minutes := b.sums.snapshot(b.o.Now())
		b.mu.Unlock()
		for minutes[0].at.Add(time.Minute).Before(q.since) { // the one that runs ends later
			minutes = minutes[1:]
		}
		all := wanted(minutes, q.wantsSum)
		if q.zones {
			all = zonesOf(minutes, &q, b.o.Series)
		}
		sendAll(l, b.losses(), q.limit, all)
	default:
		defer b.begin(r)()
		b.mu.Lock()
		blocks := b.list.snapshot()
		b.mu.Unlock()
		sendAll(l, b.losses(), q.limit, wanted(blocks, q.wants))
	}
}

// begin waits until there is room for an answer, or nobody asks any more. The caller calls end behind it.
func (b *Book) begin(r *http.Request) (end func()) {
	select {
	case b.answers <- struct{}{}:
		return func() { <-b.answers }
	case <-r.Context().Done():
		return func() {}
	}
}

// wanted returns what a reader wants of what blocks hold.
func wanted[T any, B interface{ each(func(*T) bool) }](blocks []B, wants func(*T) bool) iter.Seq[*T] {
	return func(yield func(*T) bool) {
		for _, block := range blocks {
			for v := range block.each {
				if wants(v) && !yield(v) {
					return
				}
			}
		}
	}
}

// zonesOf returns the sums that a reader wants by Service and pair of zones. Their minute is that of the first.
func zonesOf(minutes []sealedMinute, q *query, series int) iter.Seq[*Sum] {
	return func(yield func(*Sum) bool) {
		by := newSpill(series, "")
		for r := range by.fold(wanted(minutes, q.wantsSum)) {
			if s := r.sum(minutes[0].at); !yield(&s) {
				return
			}
		}
	}
}

// lines is an answer that is written.
type lines struct {
	to      http.ResponseWriter
	control *http.ResponseController
	json    *json.Encoder
	answer  Answer
}

// sendAnswer sends the Answer, with losses.
func (l *lines) sendAnswer(losses Losses) error {
	l.answer.Losses = losses
	return l.send(&l.answer)
}

func (l *lines) send(line any) error { return l.json.Encode(line) }

// sendAll sends the Answer and the last lines that fit.
func sendAll[T any](l *lines, losses Losses, limit int, all iter.Seq[*T]) {
	n := 0
	for range all {
		n++
	}
	l.answer.Left = uint64(max(0, n-limit))
	if l.sendAnswer(losses) != nil {
		return
	}
	for line := range all {
		if n--; n < limit && l.send(line) != nil {
			return
		}
	}
}

// follow sends what there is, and then each new record, until the reader goes away or the book ends.
func (b *Book) follow(req *http.Request, l *lines, q query) {
	end := b.begin(req)
	reader, before := b.join(q)
	if reader == nil {
		end()
		http.Error(l.to, fmt.Sprintf("%d readers follow already", maxReaders), http.StatusServiceUnavailable)
		return
	}
	defer b.leave(reader)
	defer health.Hold(req)()
	said := b.losses()
	sendAll(l, said, q.limit, wanted(before, q.wants))
	end()
	l.answer.Left = 0
	tick := time.NewTicker(beat)
	defer tick.Stop()
	for {
		// The server's timeouts are for answers that end.
		_ = l.control.SetWriteDeadline(time.Now().Add(readerPatience))
		if len(reader.records) == 0 && l.control.Flush() != nil {
			return
		}
		var err error
		select {
		case r := <-reader.records:
			err = l.send(&r)
		case <-tick.C:
			now := b.losses()
			if now.Unread = reader.lost.Load(); now != said {
				said = now
				err = l.sendAnswer(now)
			}
		case <-req.Context().Done():
			return
		case <-b.done:
			return
		}
		if err != nil {
			return
		}
	}
}
