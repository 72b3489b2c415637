package outlier

import (
	"testing"
	"time"
)

// TestWork: time that passes without work does not count; time at work does.
func TestWork(t *testing.T) {
	if waited := work(func() { time.Sleep(100 * time.Millisecond) }); waited > 50*time.Millisecond {
		t.Errorf("waiting for 100 ms is %v of work", waited)
	}
	began := threadTime()
	if took := work(func() {
		for threadTime()-began < 20*time.Millisecond { // whatever else the machine does
		}
	}); took < 10*time.Millisecond {
		t.Errorf("20 ms at work are %v", took)
	}
}
