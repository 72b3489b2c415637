package ipvsplugin

import (
	"bufio"
	"fmt"
	"io"
	"net/netip"
	"strings"

	"github.com/verdict-proxy/verdict/sync/dataplane"
	"github.com/verdict-proxy/verdict/sync/snapshot"
)

// Print writes what a State asks of IPVS as `ipvsadm -Sn` lists it, and `ipvsadm -R` reads it, sorted by address.
func Print(w io.Writer, st *dataplane.State) error {
	t := newTable()
	t.replace(st)
	return print(w, t.sorted())
}

func print(w io.Writer, services []*VirtualService) error {
	out := bufio.NewWriter(w)
	for _, vs := range services {
		name := option(vs.Key.Protocol) + " " + netip.AddrPortFrom(vs.Key.Addr, vs.Key.Port).String()
		fmt.Fprintf(out, "-A %s -s %s", name, vs.Scheduler)
		if vs.Flags&Persistent != 0 {
			fmt.Fprintf(out, " -p %d", vs.Timeout)
		}
		if flags := schedFlags(vs.Scheduler, vs.Flags); flags != "" {
			fmt.Fprintf(out, " -b %s", flags)
		}
		fmt.Fprintln(out)
		for _, d := range vs.Destinations {
			fmt.Fprintf(out, "-a %s -r %s -m -w %d\n", name, d.AddrPort, d.Weight)
		}
	}
	return out.Flush()
}

func option(p snapshot.Protocol) string {
	switch p {
	case snapshot.UDP:
		return "-u"
	case snapshot.SCTP:
		return "--sctp-service"
	}
	return "-t"
}

// schedFlags gives a scheduler's flags by the names that ipvsadm has for them.
func schedFlags(scheduler string, flags uint32) string {
	var names []string
	for i, bit := range []uint32{SchedFallback, SchedPort} {
		switch {
		case flags&bit == 0:
		case scheduler == "sh" || scheduler == "mh":
			names = append(names, scheduler+[]string{"-fallback", "-port"}[i])
		default:
			names = append(names, fmt.Sprintf("flag-%d", i+1))
		}
	}
	return strings.Join(names, ",")
}
