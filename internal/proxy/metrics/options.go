package metrics

import (
	"fmt"
	"net/netip"
	"time"

	"github.com/verdict-proxy/verdict/internal/proxy/conntrack"
	"github.com/verdict-proxy/verdict/internal/proxy/everywhere"
	"github.com/verdict-proxy/verdict/internal/proxy/flows"
	ledgerfiles "github.com/verdict-proxy/verdict/internal/proxy/ledger"
	"github.com/verdict-proxy/verdict/internal/proxy/outlier"
	"github.com/verdict-proxy/verdict/internal/system/ipfamily"
	"github.com/verdict-proxy/verdict/sync/dataplane"
	"github.com/verdict-proxy/verdict/sync/reconcile"
	"github.com/verdict-proxy/verdict/sync/snapshot"
)

// Detail says how finely new connections are shown.
type Detail uint8

// The details. PerService is the default.
const (
	PerService Detail = iota
	PerEndpoint
	// Off shows none, and spares reading the kernel's counters but those of a few rules.
	Off
)

var detailNames = [...]string{"service", "endpoint", "off"}

func (d Detail) String() string { return detailNames[d] }

// Set reads a flag's value.
func (d *Detail) Set(text string) error {
	for i, name := range detailNames {
		if text == name {
			*d = Detail(i)
			return nil
		}
	}
	return fmt.Errorf("%q is not one of off, service, endpoint", text)
}

// Type names the kind of value for a flag.
func (d *Detail) Type() string { return "detail" }

// DefaultMaxSeries is how many Service ports, and how many endpoints, have a series of their own.
const DefaultMaxSeries = 5000

// Options say what is shown. What is nil is left out.
type Options struct {
	// Detail says how finely connections are shown, and MaxSeries how many series that may take, of Service ports and of
	// endpoints; 0 means DefaultMaxSeries. Only what has counted something has a series. Service ports that find no room
	// are added up under the name "_others"; endpoints that find none are left out.
	Detail    Detail
	MaxSeries int
	// Version is that of this program.
	Version string

	// Waiting tells what is not written yet, as snapshot.Queue does.
	Waiting func() snapshot.Waiting
	// Progress tells up to which versions everything is written, as snapshot.Queue does.
	Progress func() snapshot.Progress
	// Quarantined gives the Services that the kernel refuses, as reconcile.Loop does.
	Quarantined func() []reconcile.Quarantined
	// Unscheduled gives those that it carries without their scheduler, as reconcile.Loop does.
	Unscheduled func() []reconcile.Quarantined
	// Ready says whether the rules are in and fresh.
	Ready func() bool
	// NodePorts counts the sockets of health check node ports that are open, and those that cannot be opened.
	NodePorts func() (open, failing int)
	// Fill tells how full the kernel's sets are, but for what the RememberingSets hold.
	Fill func() []Fill
	// AffinityShares names the Services that hold most of a set of remembered clients that is nearly full.
	AffinityShares func() []AffinityShare
	// Owns says whether nobody else can change the tables; nil if that cannot be prevented.
	Owns func() bool
	// HoldsLease says whether this proxy has the place of the one proxy, so that another can take over.
	HoldsLease func() bool
	// Conntrack tells how many connections the kernel tracks, and how many it can.
	Conntrack func() (entries, most int, err error)
	// Pressure tells who fills that table; zero if nobody looks.
	Pressure func() conntrack.Pressure
	// LogDropped counts the lines that the log left out because there were too many.
	LogDropped func() uint64
	// Outliers tells of endpoints that do not answer or refuse.
	Outliers func() outlier.Stats
	// Everywhere tells of the connection to the collector.
	Everywhere func() everywhere.Stats
	// Ledger tells of the ledger of changes.
	Ledger func() ledgerfiles.Stats
	// OverRate, if not nil, is told of each Service port when a reading first finds connections that were refused, and
	// the Service limits rates. It must not wait.
	OverRate func(dataplane.PortName)
	// LimitsLeftOut counts the clients over a limit of open connections that are not refused, since too many are.
	LimitsLeftOut func() int
	// Flows tells of the records of connections.
	Flows func() flows.Stats
	// ClientAddresses counts the Services that are to keep their clients' addresses: those that do, and those that do not.
	ClientAddresses func() (kept, masqueraded int)
	// SlowStarting counts the endpoints that start slowly now.
	SlowStarting func() int
	// Counters reads what the kernel counts.
	Counters Counters
	// IPVS reads what IPVS counts of the Services that it schedules.
	IPVS IPVS
	// Report is told, once for each cause, that counters cannot be read.
	Report func(error)
}

// Fill says how full a set of the kernel is.
type Fill struct {
	Family ipfamily.Family
	Set    string
	// Size is how many elements it takes, 0 if there is no limit.
	Elements, Size int
}

// AffinityShare is how many entries of a family's set of remembered clients are a Service's.
type AffinityShare struct {
	Service snapshot.Name
	Family  ipfamily.Family
	Entries int
}

// RememberingSets are those in which rules remember clients, and the nodes of flows. How many they hold, only
// Counters.Remembered knows.
var RememberingSets = [...]string{"affinity", "kept-flows"}

// Counters reads what the kernel counts. Its methods are called one at a time.
type Counters interface {
	// AllFrontends reads the counts of all frontends at once, which for many is slow. One may be missing, or be there
	// twice.
	AllFrontends(do func(dataplane.FrontendCount)) error
	// Frontends reads those of some.
	Frontends(at []dataplane.Counted, do func(dataplane.FrontendCount)) error
	// Endpoints reads those of the endpoints of some frontends, as they were read before. Members gives the endpoints that
	// one with session affinity may have.
	Endpoints(
		of []dataplane.FrontendCount,
		members func(dataplane.Counted) []netip.AddrPort,
		do func(dataplane.EndpointCount),
	) error
	// Refused reads how many packets were turned away by no frontend.
	Refused() ([]dataplane.RefusedCount, error)
	// Limited reads what was over the limits of pools: all that have limits.
	Limited() ([]dataplane.LimitCount, error)
	// Remembered counts what one of the RememberingSets holds, IPv4 and IPv6; -1 if that takes longer than the patience
	// given, or if there is no such set.
	Remembered(set string, patience time.Duration) (ipfamily.Per[int], error)
}
