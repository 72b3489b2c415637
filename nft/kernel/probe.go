package kernel

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/verdict-proxy/verdict/internal/system/ipfamily"
	"github.com/verdict-proxy/verdict/internal/system/netlink"
	"github.com/verdict-proxy/verdict/nft"
	"github.com/verdict-proxy/verdict/sync/dataplane"
)

// Unsupported says that this kernel lacks a feature that every ruleset needs.
type Unsupported struct {
	// Missing lists the features, each with the Linux version that brought it and its build option.
	Missing []string
}

func (e *Unsupported) Error() string {
	return "this kernel lacks what the nftables backend needs: " + strings.Join(e.Missing, "; ")
}

// ErrRights says that the process may not write the network namespace's nf_tables.
var ErrRights = errors.New("no right to change nf_tables: run as root, or with CAP_NET_ADMIN")

// Probe asks the kernel whether it takes our ruleset, without leaving anything: a batch that is never finished is
// checked message by message and then thrown away. It returns nil, ErrRights, an *Unsupported, or another error.
func (c *Conn) Probe() error {
	b := batch{tableName: probeName}
	b.restart()
	for _, f := range ipfamily.All {
		b.table(f, probeTable(f))
	}
	refused, err := c.Commit(b.Bytes())
	if err != nil {
		return fmt.Errorf("nft: probe: %w", err)
	}
	var release unix.Utsname
	if err := unix.Uname(&release); err != nil {
		return fmt.Errorf("nft: uname: %w", err)
	}
	return b.probeResult(refused, unix.ByteSliceToString(release.Release[:]))
}

// probeName is not the name of our tables, which may belong to another process.
const probeName = nft.TableName + "-probe"

// ownership says whether this kernel lets a table belong to a socket and stay when that is closed. Without the latter
// (Linux 5.12 to 6.8) a table would vanish with the last process that holds the socket, and all Services with it.
func (c *Conn) ownership() (bool, error) {
	b := batch{tableName: probeName}
	b.restart()
	b.claimTable(ipfamily.IPv4, tableOwner|tablePersist)
	refused, err := c.Commit(b.Bytes())
	if err != nil {
		return false, fmt.Errorf("nft: probe: %w", err)
	}
	return len(refused) == 0, nil
}

// pingProbe are addresses that are never used.
var pingProbe = ipfamily.Per[netip.Addr]{netip.MustParseAddr("192.0.2.1"), netip.MustParseAddr("2001:db8::1")}

// probeTable returns a table with one of everything that a state may need.
func probeTable(f ipfamily.Family) *nft.TableTxn {
	pods := dataplane.Pods{InterfacePrefix: "p"}
	t := nft.ProbeTable(f, nft.Structure{Pods: pods, GuardLoopback: f == ipfamily.IPv4, Evidence: true,
		Ping: pingProbe[f]})
	return &nft.TableTxn{Create: &t}
}

// probeResult turns the kernel's rejections of the probe into an error. Old kernels ignore some features silently;
// those are detected by the kernel's version.
func (b *batch) probeResult(refused []netlink.Error, release string) error {
	var missing []string
	add := func(s string) {
		if !slices.Contains(missing, s) {
			missing = append(missing, s)
		}
	}
	if major, minor, ok := version(release); ok && (major < 5 || major == 5 && minor < 7) {
		add("counters in elements of maps (Linux 5.7; this is " + release + ")")
	}
	var refusedObjects []string
	for _, r := range refused {
		what := b.describe(r.Seq, r.Offset)
		if dependsOn(what, refusedObjects) {
			continue
		}
		if _, object, ok := strings.Cut(what, ": add "); ok && !strings.HasPrefix(object, "rule ") {
			refusedObjects = append(refusedObjects, object)
		}
		switch r.Errno {
		case unix.EPERM:
			return ErrRights
		case unix.EOPNOTSUPP, unix.ENOENT, unix.EINVAL, unix.EPROTONOSUPPORT, unix.EAFNOSUPPORT:
			add(b.feature(r))
		default:
			return fmt.Errorf("probe: %w", b.refusalError(r))
		}
	}
	if missing != nil {
		return &Unsupported{Missing: missing}
	}
	return nil
}

// dependsOn says whether an object was refused only because another was: a rule whose chain or set is not there, or
// anything in a table that is not there. Objects are "table", "chain NAME" or "set NAME".
func dependsOn(what string, refused []string) bool {
	for _, object := range refused {
		kind, name, _ := strings.Cut(object, " ")
		switch {
		case kind == "table",
			kind == "set" && strings.Contains(what+" ", "@"+name+" "),
			kind == "chain" && strings.Contains(what+" ", " "+name+" "):
			return true
		}
	}
	return false
}

// version reads "6.1.0-13-amd64".
func version(release string) (major, minor int, ok bool) {
	n, _ := fmt.Sscanf(release, "%d.%d", &major, &minor)
	return major, minor, n == 2
}

// features are what may be missing, found by a word of the nft line that was refused. The first that fits names it.
var features = []struct{ in, feature string }{
	{"transaction", "nf_tables (Linux 3.13, CONFIG_NF_TABLES)"},
	{"add table", "nf_tables (Linux 3.13, CONFIG_NF_TABLES; CONFIG_NF_TABLES_IPV4, CONFIG_NF_TABLES_IPV6)"},
	{"numgen", "random numbers as keys, numgen (Linux 4.9, CONFIG_NFT_NUMGEN)"},
	{"dnat", "destination NAT to what a map gives (Linux 3.13, CONFIG_NFT_NAT)"},
	{"fib daddr", "routing lookups in rules, fib (Linux 4.10, CONFIG_NFT_FIB_IPV4, CONFIG_NFT_FIB_IPV6)"},
	{"jhash", "hashes as keys, jhash (Linux 4.9, CONFIG_NFT_HASH)"},
	{"update @", "sets and maps written by rules, dynset (Linux 4.1)"},
	{"ct original ip", "addresses of a connection as parts of a key (Linux 4.17, CONFIG_NFT_CT)"},
	{"ct status", "connection tracking state in rules (Linux 3.13, CONFIG_NFT_CT)"},
	{"masquerade fully-random", "masquerading (Linux 3.18, CONFIG_NFT_MASQ)"},
	{"reject", "reject in nat chains at prerouting (Linux 5.9, CONFIG_NFT_REJECT)"},
	{"counter", "counters (Linux 3.13, CONFIG_NFT_COUNTER before 5.17)"},
	{"add set source-ranges", "ranges inside concatenated keys (Linux 5.6)"},
	{"add set affinity", "maps with timeouts (Linux 4.1)"},
	{"add set", "sets with concatenated keys and counters (Linux 5.7)"},
	{"add chain", "nat chains in nf_tables (Linux 4.18, CONFIG_NF_NAT)"},
}

func (b *batch) feature(r netlink.Error) string {
	what := b.describe(r.Seq, r.Offset)
	for _, f := range features {
		if strings.Contains(what, f.in) {
			return f.feature
		}
	}
	return what + ": " + r.Errno.Error()
}

// refusalError names the object that was refused.
func (b *batch) refusalError(r netlink.Error) error {
	what := b.describe(r.Seq, r.Offset)
	if r.Text != "" {
		what += ": " + r.Text
	}
	return fmt.Errorf("nft: %s: %w", what, r.Errno)
}
