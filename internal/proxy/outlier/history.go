package outlier

import (
	"maps"
	"math"
	"net/netip"
	"time"

	"github.com/verdict-proxy/verdict/internal/system/clock"
	"github.com/verdict-proxy/verdict/sync/dataplane"
)

// A silence means something only beside those that the endpoint had while it was well: a Service with few clients is
// silent for seconds, and so is one whose clients come in bursts. The history of an endpoint covers the last
// historySlots of slotTime each, as long as the kernel remembers an answer.
const (
	slotTime     = 10 * time.Second
	historySlots = 12
	// answersFew is how many times an endpoint must have been seen to answer for its pauses to say something. One that
	// answered less often, or was first seen to answer within youngFor, is silent after fewSilence at the latest: few
	// clients miss it if it is left out for a minute.
	answersFew = 8
	youngFor   = time.Minute
	fewSilence = 2 * time.Second
	// leastSilence is the least that is taken for a silence.
	leastSilence = time.Second
	// doubtExponent bounds the chance that a silence is none: e to the minus 12th power, for each pause between clients
	// that come at random.
	doubtExponent = 12
	// sameAnswer is how far two readings of one answer may lie apart: the kernel's clock ticks every few milliseconds,
	// and a reading takes some.
	sameAnswer = 50 * time.Millisecond
)

// history holds, for each endpoint that answered within the kernel's memory, when it did so last, and how long its
// pauses were. It needs no size of its own: the kernel's set has one.
type history struct {
	of    map[netip.AddrPort]*past
	round uint32
	// at is when it was read last.
	at time.Time
}

// past is what is known of one endpoint.
type past struct {
	// first is when it was first seen to answer, last the time of the last answer, pause the longest time without one that
	// was seen since.
	first, last time.Time
	pause       time.Duration
	// frozen says that the endpoint was ejected after its last answer, so that its silence is of our making.
	frozen bool
	slots  [historySlots]slot
	round  uint32
}

// slot covers slotTime.
type slot struct {
	number int64
	// answered counts the readings before which there were new answers; longest is the longest pause that ended.
	answered int
	longest  time.Duration
}

// observe takes a reading of the kernel's set.
func (h *history) observe(now time.Time, answers []dataplane.Answer) {
	h.round, h.at = h.round+1, now
	for _, a := range answers {
		p := h.of[a.Endpoint]
		last := now.Add(-a.Ago)
		if p == nil {
			p = &past{first: last, last: last}
			h.of[a.Endpoint] = p
		}
		p.round = h.round
		if last.Sub(p.last) > sameAnswer {
			s := p.slot(now)
			s.answered, s.longest = s.answered+1, max(s.longest, p.pause)
			p.pause, p.frozen = 0, false
		}
		p.last = clock.Later(p.last, last)
		if !p.frozen {
			p.pause = max(p.pause, now.Sub(p.last))
		}
	}
	maps.DeleteFunc(h.of, func(_ netip.AddrPort, p *past) bool { return p.round != h.round })
}

func (p *past) slot(now time.Time) *slot {
	number := now.UnixNano() / int64(slotTime)
	s := &p.slots[number%historySlots]
	if s.number != number {
		*s = slot{number: number}
	}
	return s
}

// enough returns how long a silence must be to mean that the endpoint answers nobody, by the time before it.
func (p *past) enough() (silence time.Duration) {
	answered, longest := p.seen()
	if answered < answersFew {
		return fewSilence
	}
	silence = max(time.Duration(longestTimes(answered)*float64(longest)), leastSilence)
	if p.young() {
		return min(silence, fewSilence)
	}
	return silence
}

// few reports whether that may be less than the clients' pauses are.
func (p *past) few() bool {
	answered, _ := p.seen()
	return answered < answersFew || p.young()
}

func (p *past) young() bool { return p.last.Sub(p.first) < youngFor }

// seen returns how often the endpoint was seen to answer, and its longest pause.
func (p *past) seen() (answered int, longest time.Duration) {
	oldest := p.last.UnixNano()/int64(slotTime) - historySlots
	for i := range p.slots {
		if s := &p.slots[i]; s.number > oldest {
			answered, longest = answered+s.answered, max(longest, s.longest)
		}
	}
	return answered, longest
}

// longestTimes returns how many times the longest of n pauses the next one may be, but for a small chance. If the
// pauses between clients have an exponential distribution, as with clients that come at random, the next one is longer
// than k times the longest of n with the probability n! * k! / (n+k)!.
func longestTimes(n int) float64 {
	factorial := func(x float64) float64 {
		log, _ := math.Lgamma(x + 1)
		return log
	}
	k := 1.0
	for factorial(float64(n))+factorial(k)-factorial(float64(n)+k) > -doubtExponent {
		k += 0.25
	}
	return k
}

// freeze notes that an endpoint is ejected from now on.
func (h *history) freeze(e netip.AddrPort) {
	if p := h.of[e]; p != nil {
		p.frozen = true
	}
}

// forgive notes that an endpoint was silent because it could not answer: its pause says nothing about its clients.
func (h *history) forgive(e netip.AddrPort) {
	if p := h.of[e]; p != nil {
		p.pause, p.frozen = 0, true
	}
}
