package flows

import (
	"testing"
	"time"

	"github.com/verdict-proxy/verdict/internal/system/testkit"
)

// TestPackKeepsEveryField: each exported field of records and sums, and the zero values, come back as they were.
func TestPackKeepsEveryField(t *testing.T) {
	records := []Record{{}}
	testkit.EachField(func(_ string, a, b *Record) { records = append(records, *a, *b, Record{}) })
	l := newList(1 << 20)
	for i := range records {
		records[i].Time, records[i].Since = utc(records[i].Time), utc(records[i].Since)
		records[i].counted = [2]Traffic{} // which concerns sums alone
		l.add(&records[i])
	}
	n := 0
	for _, block := range l.snapshot() {
		for r := range block.each {
			if *r != records[n] {
				t.Errorf("record %d is %+v, want %+v", n, *r, records[n])
			}
			n++
		}
	}
	if n != len(records) {
		t.Errorf("%d records came back of %d", n, len(records))
	}

	all := []Sum{{}}
	testkit.EachField(func(field string, a, b *Sum) {
		if field != "Minute" {
			all = append(all, *a, *b)
		}
	})
	c := newPacker(0)
	for i := range all {
		all[i].Minute = time.Time{}
		c.sum(&all[i])
	}
	n = 0
	for s := range (sealedMinute{data: c.data, rows: len(all)}).each {
		if *s != all[n] {
			t.Errorf("sum %d is %+v, want %+v", n, *s, all[n])
		}
		n++
	}
}

func utc(t time.Time) time.Time {
	if t.IsZero() {
		return t
	}
	return t.UTC()
}
