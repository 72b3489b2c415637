package watch

import "runtime"

// heapOf gives how much memory, in MiB, is free once something is dropped.
func heapOf(drop func()) float64 {
	var before, after runtime.MemStats
	runtime.GC()
	runtime.GC()
	runtime.ReadMemStats(&before)
	drop()
	runtime.GC()
	runtime.GC()
	runtime.ReadMemStats(&after)
	return float64(before.HeapAlloc-after.HeapAlloc) / (1 << 20)
}
