// Package status describes the sync status of a node's proxy: which versions of the API's objects are programmed, what
// waits, and a digest of every Service that is the same on all nodes that have programmed the same. The proxy answers
// GET /status with it; whoever compares nodes reads the same types.
package status

import (
	"time"

	"github.com/verdict-proxy/verdict/sync/snapshot"
)

// Schema is the version of the JSON and of the digests. Digests of different schemas cannot be compared. Fields may be
// added without a new schema.
const Schema = 1

// Status is the answer of a node. Times are of the node's clock.
type Status struct {
	Schema  int       `json:"schema"`
	Time    time.Time `json:"time"`
	Version string    `json:"version"`
	Backend string    `json:"backend"`
	Node    string    `json:"node"`
	// Started is when the proxy started, and First when all Services were programmed first; nil until then.
	Started time.Time  `json:"started"`
	First   *time.Time `json:"firstProgrammed,omitempty"`
	// Received are the versions up to which the node has read the API, Programmed those up to which everything that it
	// read is in force or named in Quarantined.
	Received   Versions `json:"received"`
	Programmed Versions `json:"programmed"`
	Pending    Pending  `json:"pending"`
	// Failing says why transactions fail; nil if the last one did not.
	Failing *Failing `json:"failing,omitempty"`
	// Services is the number of Services that the node knows, and Digest the one of all of them.
	Services int    `json:"services"`
	Digest   Digest `json:"digest"`
	// Quarantined are the Services that the kernel rejects, the first maxNamed by name, and Ejected the endpoints that do
	// not answer this node.
	Quarantined Quarantined `json:"quarantined"`
	Ejected     Ejected     `json:"ejected"`
	Drift       Drift       `json:"drift"`
	// ClientAddresses is nil if no Service is to keep its clients' addresses.
	ClientAddresses *ClientAddresses `json:"clientAddresses,omitempty"`
	// Preflight is what on this host stops packets of Services although the rules are right, as it was found last.
	Preflight []Finding `json:"preflight,omitempty"`
	// Unread are the first maxNamed manifests that cannot be read; what they said before stays in force.
	Unread []Unread `json:"unread,omitempty"`
	// Ledger is where the ledger ends; nil if the node keeps none.
	Ledger *Ledger `json:"ledger,omitempty"`
	// Recent are the last maxRecent transactions that the kernel acknowledged, the newest first.
	Recent []Change `json:"recent,omitempty"`
	// Digests are those of single Services, if they were asked for, sorted by name. If Next is not empty there are more:
	// ask for those after that name.
	Digests []ServiceDigest `json:"digests,omitempty"`
	Next    string          `json:"next,omitempty"`
}

// Versions are resourceVersions; empty while unknown, and always where objects come from files.
type Versions struct {
	Services       snapshot.Version `json:"services,omitempty"`
	EndpointSlices snapshot.Version `json:"endpointSlices,omitempty"`
}

func versionsOf(v snapshot.Versions) Versions { return Versions{v.Services, v.Slices} }

// Reached reports whether both versions are those of o or newer.
func (v Versions) Reached(o Versions) bool {
	return v.Services.Reached(o.Services) && v.EndpointSlices.Reached(o.EndpointSlices)
}

// Goal is what a node has to reach: what the API had of one Service at some moment.
type Goal struct {
	Service snapshot.Name
	// Versions are those of the Service, and of the list of its slices: also that a slice is gone has one.
	Versions Versions
	// Digest is the one of a node that has programmed exactly this; 0 if it cannot be compared.
	Digest Digest
}

// Reached reports whether a node has programmed the goal, or something newer. The digest is that of the Service on the
// node, 0 if it has none, and rejected says that its kernel rejects the Service. A node at rest learns of the list's
// version only by a bookmark, within about a minute; its digest says so at once.
func (g *Goal) Reached(programmed Versions, digest Digest, rejected bool) bool {
	return programmed.Reached(g.Versions) && !rejected || digest == g.Digest && digest != 0
}

// Pending is what the node has received and not programmed.
type Pending struct {
	Services       int `json:"services"`
	EndpointSlices int `json:"endpointSlices"`
	// LagSeconds is the age of the oldest of these changes; 0 if there is none.
	LagSeconds float64 `json:"lagSeconds"`
}

// Failing is a series of failed transactions.
type Failing struct {
	Since time.Time `json:"since"`
	Error string    `json:"error"`
}

// Quarantined names Services that are not programmed as they ask for.
type Quarantined struct {
	Count    int                  `json:"count"`
	Services []QuarantinedService `json:"services,omitempty"`
}

// QuarantinedService is one of them. What the kernel accepted of it before stays programmed.
type QuarantinedService struct {
	Service string    `json:"service"`
	Since   time.Time `json:"since"`
	Error   string    `json:"error"`
}

// Ejected names endpoints that get no new connections from this node.
type Ejected struct {
	Count     int               `json:"count"`
	Endpoints []EjectedEndpoint `json:"endpoints,omitempty"`
}

// EjectedEndpoint is one of them, of one Service.
type EjectedEndpoint struct {
	Service  string    `json:"service"`
	Endpoint string    `json:"endpoint"`
	Cause    string    `json:"cause"`
	Since    time.Time `json:"since"`
}

// Finding is something about a host, and what to do about it.
type Finding struct {
	// Check is the name of the check that found it.
	Check  string `json:"check"`
	What   string `json:"what"`
	Advice string `json:"advice"`
}

// Unread is a file of objects that cannot be read, or the directory of all.
type Unread struct {
	File  string    `json:"file"`
	Since time.Time `json:"since"`
	Error string    `json:"error"`
}

// Drift is what the checks for changes by other programs found.
type Drift struct {
	// Checked is when the last check ended, and Error why it failed.
	Checked *time.Time `json:"checked,omitempty"`
	Error   string     `json:"error,omitempty"`
	// Found is the number of changes found since the start. FoundAt is when the last ones were found, Last describes the
	// first of those, and Repaired is when they were repaired.
	Found    int        `json:"found"`
	FoundAt  *time.Time `json:"foundAt,omitempty"`
	Last     []string   `json:"last,omitempty"`
	Repaired *time.Time `json:"repaired,omitempty"`
}

// Open reports whether a change that was found is not repaired yet.
func (d *Drift) Open() bool {
	return d.FoundAt != nil && (d.Repaired == nil || d.Repaired.Before(*d.FoundAt))
}

// Ledger is where a ledger ends, by what the process that writes it remembers, and not by its files.
type Ledger struct {
	// Record is the number of the last record, 0 if none was written yet, and Digest its digest, which stands for all
	// before it, too. Missing is how many records the files lack that this process has, or should have, written. Error
	// says why they cannot be written now.
	Record  uint64 `json:"record"`
	Digest  string `json:"digest,omitempty"`
	Missing uint64 `json:"missing,omitempty"`
	Error   string `json:"error,omitempty"`
	// Dir is where they are.
	Dir string `json:"dir"`
}

// Change is one transaction.
type Change struct {
	At time.Time `json:"at"`
	// Services are the first maxChanged of those that it changed, and Count says how many it changed.
	Services []string `json:"services,omitempty"`
	Count    int      `json:"count"`
	// Added, Replaced and Removed count elements.
	Added    int `json:"added"`
	Replaced int `json:"replaced"`
	Removed  int `json:"removed"`
	// Seconds is how long it took from planning it to the kernel's acknowledgement.
	Seconds float64 `json:"seconds"`
}

// ServiceDigest is the digest of one Service, and since when it is that.
type ServiceDigest struct {
	Service string    `json:"service"`
	Digest  Digest    `json:"digest"`
	Since   time.Time `json:"since"`
}

// SlowStarts lists the endpoints that start slowly, by Service, sorted.
type SlowStarts struct {
	Services []StartingService `json:"services"`
	// Truncated says that there are more.
	Truncated bool `json:"truncated,omitempty"`
}

// StartingService is a Service of which some endpoints start slowly.
type StartingService struct {
	Service   string                      `json:"service"`
	Endpoints []snapshot.StartingEndpoint `json:"endpoints"`
}
