package inspect

import (
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/netip"
	"net/url"
	"slices"
	"strconv"
	"strings"

	"github.com/verdict-proxy/verdict/internal/answers/records"
	"github.com/verdict-proxy/verdict/internal/proxy/status"
	"github.com/verdict-proxy/verdict/internal/system/terminal"
)

// ServicesAsked says which Services are asked for; empty fields mean any.
type ServicesAsked struct {
	Namespace, Name string
	// Trouble leaves out those that are in order, and For those that nothing asked for backends of.
	Trouble, For bool
}

// LoadServices asks the proxy on this host for its Services, the worst first. Addr is as for LoadStatus.
func LoadServices(ctx context.Context, addr netip.AddrPort, asked ServicesAsked) (*status.Services, error) {
	query := url.Values{"namespace": {asked.Namespace}, "name": {asked.Name},
		"trouble": {strconv.FormatBool(asked.Trouble)}, "for": {strconv.FormatBool(asked.For)}}
	all := &status.Services{Services: []status.Service{}}
	for {
		var page status.Services
		err := AskProxy(ctx, addr, "/services?"+query.Encode(), func(r io.Reader) error {
			return json.NewDecoder(r).Decode(&page)
		})
		if err != nil {
			return nil, err
		}
		all.Status, all.Services = page.Status, append(all.Services, page.Services...)
		if page.Next == "" {
			SortServices(all.Services)
			return all, nil
		}
		query.Set("after", page.Next)
	}
}

// SortServices sorts the worst first, then by name.
func SortServices(list []status.Service) {
	slices.SortStableFunc(list, func(a, b status.Service) int {
		return cmp.Or(cmp.Compare(a.State.Rank(), b.State.Rank()), strings.Compare(a.Service, b.Service))
	})
}

// PrintServices prints what a node says of its Services.
func PrintServices(p *terminal.Printer, s *status.Services, wide bool) {
	if len(s.Services) == 0 {
		p.Line("no Service is as asked for")
	} else {
		rows := [][]string{ServiceHeading(wide)}
		for i := range s.Services {
			rows = append(rows, ServiceRow(&s.Services[i], wide))
		}
		p.Table(rows)
	}
	if why := s.Status.Unsynced(); why != "" {
		p.Line("%s", p.Paint(terminal.Red, "not synced: "+why))
	}
}

// ServiceHeading is the heading above ServiceRow.
func ServiceHeading(wide bool) []string {
	row := []string{"SERVICE", "TYPE", "ADDRESSES", "PORTS", "ENDPOINTS"}
	if wide {
		row = append(row, "LOCAL", "CHOSEN BY", "CLIENTS")
	}
	return append(row, "STATE")
}

// Without wide, a row has at most so many addresses and ports, and as much of the text of a state.
const rowItems, rowText = 3, 60

// ServiceRow is a row of a table of Services.
func ServiceRow(s *status.Service, wide bool) []string {
	most, text := rowItems, rowText
	if wide {
		most, text = 1000, 1000
	}
	var addresses, ports, local, by []string
	for _, a := range slices.Concat(s.ClusterIPs, s.ExternalIPs, s.LoadBalancerIPs) {
		addresses = append(addresses, a.String())
	}
	for _, port := range s.Ports {
		number := strconv.Itoa(int(port.Port))
		if port.NodePort != 0 {
			number += fmt.Sprintf(":%d", port.NodePort)
		}
		ports = append(ports, number+"/"+port.Protocol)
		local = append(local, strconv.Itoa(port.Local))
		by = append(by, port.By)
	}
	state := string(s.State)
	if s.Why != "" {
		state += ": " + clip(s.Why, text)
	}
	row := []string{records.Named(s.Service, s.For), s.Type, some(addresses, most), some(ports, most),
		fmt.Sprintf("%d/%d", s.Usable, s.Endpoints)}
	if wide {
		row = append(row, some(slices.Compact(local), most), some(slices.Compact(by), most), cmp.Or(s.ClientAddress, "-"))
	}
	return append(row, state)
}

// some joins the first items of a list.
func some(items []string, most int) string {
	if len(items) == 0 {
		return "-"
	}
	text := strings.Join(items[:min(len(items), most)], ",")
	if more := len(items) - most; more > 0 {
		text += fmt.Sprintf(",+%d", more)
	}
	return text
}
