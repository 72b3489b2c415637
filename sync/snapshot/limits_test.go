package snapshot

import (
	"strings"
	"testing"
)

func TestParseLimits(t *testing.T) {
	for text, want := range map[string]Limits{
		"rate=1":                   {Rate: RateLimit{1, 1}},
		"burst=5  rate=1000000":    {Rate: RateLimit{1_000_000, 5}},
		"open=5000 over=refuse":    {Open: 5000},
		"client-open=7 open=1":     {Open: 1, ClientOpen: 7},
		"client-rate=20 over=drop": {Client: RateLimit{20, 20}, Drop: true},
		"rate=7 burst=8 client-rate=5 client-burst=50 over=refuse": {Rate: RateLimit{7, 8}, Client: RateLimit{5, 50}},
	} {
		got, err := ParseLimits(text)
		if again, e := ParseLimits(got.String()); err != nil || got != want || e != nil || again != got {
			t.Errorf("%q: %+v, %v; written %q", text, got, err, got)
		}
	}
	for text, want := range map[string]string{
		"": "there is no", "over=drop": "there is no",
		"open=0": "from 1 to", "client-open=1000001": "from 1 to",
		"burst=5": "needs a rate", "rate=1 client-burst=2": "needs a client-rate",
		"rate=0": "from 1 to", "rate=1000001": "from 1 to", "rate=1.5": "from 1 to", "rate": "from 1 to",
		"rate=1 rate=2": "twice", "rat=1": "none of", "rate=1 over=x": "refuse or drop", "rate=+1": "from 1 to",
		"client-rate=7": "one of 1, 2, 3, 5", "client-rate=20 client-burst=30": "one of 20, 40, 100, 200",
		"rate=" + strings.Repeat("9", 100): "from 1 to",
	} {
		if got, err := ParseLimits(text); err == nil || !strings.Contains(err.Error(), want) || len(err.Error()) > 200 {
			t.Errorf("%q: %+v, %v, want %s", text, got, err, want)
		}
	}
}
