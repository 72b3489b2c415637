package units

import (
	"testing"
	"time"
)

func TestUnits(t *testing.T) {
	for got, want := range map[string]string{
		Thousands(0): "0", Thousands(999): "999", Thousands(1000): "1,000", Thousands(1100000): "1,100,000",
		Thousands(-100): "-100",
		Bytes(1500):     "1.5 kB", Bytes(12300000): "12.3 MB",
		Brief(143 * time.Microsecond): "143 µs", Brief(2400 * time.Microsecond): "2.4 ms",
		Brief(6100 * time.Millisecond): "6.1 s",
		Span(0):                        "0s", Span(10 * time.Second): "10s",
		Span(90 * time.Second): "1m30s", Span(30 * time.Minute): "30m",
		Span(10 * time.Hour): "10h", Span(time.Hour + 20*time.Minute): "1h20m",
		Span(time.Hour + 5*time.Second): "1h0m5s",
	} {
		if got != want {
			t.Errorf("%q, want %q", got, want)
		}
	}
}
