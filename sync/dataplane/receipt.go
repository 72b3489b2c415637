package dataplane

import "time"

// Receipt says what one transaction wrote. The zero Receipt says that there was nothing to write.
type Receipt struct {
	// Full says that everything was written anew.
	Full bool
	// Adopted says that the tables that were found are exactly what is asked for: nothing was written.
	Adopted bool
	// Added, Replaced and Removed count elements, or what a backend has instead of them.
	Added, Replaced, Removed int
	// Messages and Bytes are what was sent to the kernel.
	Messages, Bytes int
	// Plan, Encode and Commit are the time spent on compiling and comparing, on writing the bytes, and in the kernel.
	Plan, Encode, Commit time.Duration
}
