// Package ledger keeps a history of what a node's proxy wrote to the kernel: a record of each transaction with its
// cause, the batch that was sent, and how long it took. Records are lines of JSON in files of bounded size. Each record
// names the digest of the one before it, so that a line that was changed or taken out is found. Checkpoints among them
// hold all that the kernel holds, so that the kernel's content at any moment since can be computed.
package ledger

import (
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"time"
)

// Kind says what a record is about.
type Kind string

// The kinds of records.
const (
	// Change is a transaction that the kernel acknowledged, and Failed one that failed.
	Change Kind = "change"
	Failed Kind = "failed"
	// Found are changes by other programs, which the next Change repairs.
	Found Kind = "found"
	// Start and Stop are those of a process that writes the ledger.
	Start Kind = "start"
	Stop  Kind = "stop"
	// Checkpoint holds everything that the kernel held.
	Checkpoint Kind = "checkpoint"
	// Lost says how many records are missing in its place.
	Lost Kind = "lost"
)

// Words of Record.Why.
const (
	whyFirst    = "first state"
	whyAdopted  = "adopted at start"
	whyRewrite  = "rewritten as a whole"
	whyRest     = "rest of a large change"
	whyRetry    = "retry"
	whyRepair   = "repair"
	whyTrial    = "rejected before"
	whyNode     = "node"
	whyHost     = "host addresses"
	whyRanges   = "service ranges"
	whyConfig   = "configuration"
	whyCounters = "what is counted"
)

// Record is one line of a ledger. Fields that are zero are left out.
type Record struct {
	// Number counts records from 1.
	Number uint64 `json:"n"`
	// At is when the kernel had acknowledged the transaction, by the clock of the node.
	At   time.Time `json:"at"`
	Kind Kind      `json:"kind"`
	// Why names causes that are no objects; Objects are the objects that changed, some of them if there are many.
	Why         []string `json:"why,omitempty"`
	Objects     []Object `json:"objects,omitempty"`
	MoreObjects int      `json:"moreObjects,omitempty"`
	// Services are those that the transaction programmed, NAMESPACE/NAME, some of them if there are many.
	Services     []string `json:"services,omitempty"`
	MoreServices int      `json:"moreServices,omitempty"`
	// Added, Replaced and Removed count elements; Left counts the Services that are not complete yet.
	Added    int `json:"added,omitempty"`
	Replaced int `json:"replaced,omitempty"`
	Removed  int `json:"removed,omitempty"`
	Left     int `json:"left,omitempty"`
	// Took says how long it took; nil if nothing was to be written.
	Took *Took `json:"took,omitempty"`
	// Error is why a transaction failed, or why there is no batch. Findings are what others changed.
	Error    string   `json:"error,omitempty"`
	Findings []string `json:"findings,omitempty"`
	// Missing is how many records are missing in the place of a Lost one.
	Missing uint64 `json:"missing,omitempty"`
	// Continues says of a Start that the kernel held what the records before it add up to.
	Continues bool `json:"continues,omitempty"`
	// Version and Backend are those of a process that starts.
	Version string `json:"version,omitempty"`
	Backend string `json:"backend,omitempty"`
	// Bytes is the length of the batch that was sent, and Batch the batch, compressed: see Unpack.
	Bytes int    `json:"bytes,omitempty"`
	Batch []byte `json:"batch,omitempty"`
	// Prev is the digest of the record before this one; Sum that of this one. It covers the whole line.
	Prev string `json:"prev"`
	Sum  string `json:"sum,omitempty"`
}

// Object is an object that changed.
type Object struct {
	// Kind is Service, EndpointSlice, Health (what this node found out about a Service's endpoints) or SlowStart.
	Kind string `json:"kind"`
	// Name is NAMESPACE/NAME, for Health and SlowStart the Service's. Service is the one that a slice belongs to.
	Name    string `json:"name"`
	Service string `json:"service,omitempty"`
	// Version is the object's resourceVersion; empty if unknown, and for an object that is Gone.
	Version string `json:"version,omitempty"`
	Gone    bool   `json:"gone,omitempty"`
}

// Took is how long a transaction took, in microseconds.
type Took struct {
	// Wait is how long the oldest change waited until the proxy took it. Plan is the time for deciding, comparing and
	// encoding; Kernel until the kernel had acknowledged.
	Wait   int64 `json:"wait"`
	Plan   int64 `json:"plan"`
	Kernel int64 `json:"kernel"`
}

// sumLen is the length of a digest in hexadecimal digits.
const sumLen = 32

const sumField = `,"sum":"`

// line encodes a record as a line, and fills in its Sum.
func (r *Record) line() ([]byte, error) {
	r.Sum = ""
	text, err := json.Marshal(r)
	if err != nil {
		return nil, fmt.Errorf("ledger: %w", err)
	}
	text = text[:len(text)-1]
	r.Sum = digest(text)
	text = append(append(text, sumField...), r.Sum...)
	return append(text, "\"}\n"...), nil
}

// digest returns the digest of a line up to its sum. Prev is part of it, so it stands for all lines before it, too.
func digest(text []byte) string {
	sum := sha256.Sum256(text)
	return hex.EncodeToString(sum[:sumLen/2])
}

var errChanged = errors.New("the line was changed: its sum is another")

// parseLine decodes a line without its newline. The error is errChanged if the sum is wrong; then the record holds
// what the line says.
func parseLine(text []byte) (*Record, error) {
	r := &Record{}
	if err := json.Unmarshal(text, r); err != nil {
		return nil, fmt.Errorf("no record: %w", err)
	}
	end := len(text) - len(sumField) - sumLen - len(`"}`)
	if end < 0 || !bytes.HasPrefix(text[end:], []byte(sumField)) || digest(text[:end]) != r.Sum {
		return r, errChanged
	}
	return r, nil
}
