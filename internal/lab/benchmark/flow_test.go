package benchmark

import (
	"encoding/json"
	"fmt"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/verdict-proxy/verdict/internal/lab/labtest"
	"github.com/verdict-proxy/verdict/nft/kernel"
	"github.com/verdict-proxy/verdict/sync/dataplane"
)

// smallFlow are the options of a small measurement.
func smallFlow(t testing.TB, sizes ...int) *FlowOptions {
	t.Helper()
	o := &FlowOptions{Options: small(t), Sizes: sizes, Flows: 200, Rounds: 2}
	labtest.Check(t, o.Prepare())
	o.KubeProxy = "" // this machine may have one
	return o
}

// measuredFlow runs a small measurement.
func measuredFlow(t *testing.T, sizes ...int) *FlowResult {
	t.Helper()
	r, err := Flow(t.Context(), smallFlow(t, sizes...))
	labtest.Check(t, err)
	if fields := encoded(t, r); len(fields) != 4 || r.Endpoints != 3 || r.Flows != 200 || r.Rounds != 2 {
		t.Errorf("%v", fields)
	}
	for _, v := range r.Variants {
		for _, path := range flowPaths {
			if took := v.Paths[path]; took.Minimum <= 0 || took.Median < took.Minimum || took.Median > 1e6 {
				t.Errorf("%s, %s: %+v", v.Name(), path, took)
			}
		}
	}
	return r
}

func TestFlow(t *testing.T) {
	r := measuredFlow(t, 20, 0, 20)
	// Of each Service the frontend, the cluster IP and 3 slots; all endpoints are on this node, and may reach
	// themselves; the range; and the settings, in both tables.
	none := 1 + 2*len(NodeConfig.Lines())
	all := 20*(2+3) + 60 + none
	want := []struct {
		name                              string
		elements, translated, masqueraded int
	}{
		{"conntrack alone", 0, 0, 0},
		{"one dnat rule", 0, 200, 0},
		{"0 Services", none, 0, 0},
		{"20 Services", all, 200, 0},
		{"20 Services, grown", all, 200, 0},
		{"20 Services, masqueraded", all, 200, 200},
		// How clients are remembered, the pool of those who are, its members, and the address, which is more than a cluster
		// IP.
		{"20 Services, sticky", all + 20*(1+1+3+1), 200, 0},
		// A frontend in three maps, its address in two, what is masqueraded, and the pool of this node's endpoints.
		{"20 Services, external Local", all + 20*(3+2+1+3), 200, 200},
	}
	if len(r.Variants) != len(want) {
		t.Fatalf("%+v, want %d variants", r.Variants, len(want))
	}
	shown := text(t, r)
	for i, w := range want {
		v := &r.Variants[i]
		if v.Name() != w.name || v.Elements != w.elements || v.Translated != w.translated {
			t.Errorf("%s: %+v, want %+v", v.Name(), v, w)
		}
		// A random port may be the one that the packet had. The floor may lead two flows of one port to one endpoint.
		if v.Masqueraded > w.masqueraded+2 || v.Masqueraded < w.masqueraded-2 {
			t.Errorf("%s: %d flows are masqueraded, want %d", w.name, v.Masqueraded, w.masqueraded)
		}
		words := []string{w.name + " "}
		for _, path := range flowPaths {
			words = append(words, flowTime(v.Paths[path]))
		}
		for _, words := range words {
			if !strings.Contains(shown, words) {
				t.Errorf("%q is not in what is printed:\n%s", words, shown)
			}
		}
	}
	for _, words := range []string{"3 endpoints each, 200 flows in each of 2 rounds", fmt.Sprintf(" %d\n", all)} {
		if !strings.Contains(shown, words) {
			t.Errorf("%q is not in what is printed:\n%s", words, shown)
		}
	}
}

// Without nft there are no rules beside Verdict's.
func TestFlowWithoutNft(t *testing.T) {
	t.Setenv("PATH", t.TempDir())
	r := measuredFlow(t, 0)
	if len(r.Variants) != 1 || r.Variants[0].Name() != "0 Services" {
		t.Errorf("%+v", r)
	}
	if shown := text(t, r); !strings.Contains(shown, "nft, which writes the first two rows' rules, is not installed") {
		t.Error(shown)
	}
}

// Each packet of each round to Services is the first of a flow, but for those of the established one: Verdict's
// counters have them all. Clients of sticky Services go where they went before.
func TestFlowCounts(t *testing.T) {
	for _, kind := range []FlowKind{freshTables, grownTables, masqueradedFlows, stickyServices, externalLocal} {
		t.Run(string(kind), func(t *testing.T) {
			v := &flowVariant{FlowOptions: smallFlow(t, 20), FlowFigures: FlowFigures{Kind: kind, Services: 20}}
			defer func() { labtest.Check(t, v.close()) }()
			labtest.Check(t, v.open(t.Context()))
			endpoints := map[string][]string{}
			for n := range 3 {
				labtest.Check(t, v.round(n == 0))
			}
			const counted = 3 * (200 + 200 + 1)
			if packets := countedFlows(t, v); packets != counted || len(v.times[establishedPacket]) != 2 {
				t.Errorf("%d packets counted, not %d; %d rounds timed", packets, counted, len(v.times[establishedPacket]))
			}
			for range 3 {
				labtest.Check(t, v.connections.ConntrackTableFlush(netlink.ConntrackTable))
				_, err := v.walk(clientToService)
				labtest.Check(t, err)
				held, err := v.connections.ConntrackTableList(netlink.ConntrackTable, unix.AF_INET)
				labtest.Check(t, err)
				for _, f := range held {
					service := fmt.Sprint(f.Forward.DstIP)
					endpoints[service] = append(endpoints[service], fmt.Sprint(f.Reverse.SrcIP))
				}
			}
			if len(endpoints) != 20 {
				t.Errorf("%d Services used", len(endpoints))
			}
			for service, all := range endpoints {
				slices.Sort(all)
				used := len(slices.Compact(slices.Clone(all)))
				if len(all) != 3*200/20 || (used == 1) != (kind == stickyServices) {
					t.Errorf("%s: %d flows to %d endpoints", service, len(all), used)
				}
			}
		})
	}
}

// TestFlowKubeProxy: a program that is told where the API is, asks it for all Services, and writes rules for them. One
// that ends is an error.
func TestFlowKubeProxy(t *testing.T) {
	program := filepath.Join(t.TempDir(), "kube-proxy")
	v := &flowVariant{FlowOptions: smallFlow(t, 20), FlowFigures: FlowFigures{Kind: kubeProxyTables, Services: 20}}
	v.KubeProxy = program
	script := "#!/bin/sh\necho $1 > " + program + ".api\nnft -f - <<END\n" + flowRules[oneDNATRule] + "\nEND\n" +
		"exec sleep 60\n"
	labtest.Check(t, os.WriteFile(program, []byte(script), 0o700))
	defer func() { labtest.Check(t, v.close()) }()
	labtest.Check(t, v.open(t.Context()))
	labtest.Check(t, v.round(true))
	if v.Translated != v.Flows {
		t.Errorf("%+v", v.FlowFigures)
	}
	told, err := os.ReadFile(program + ".api")
	if labtest.Check(t, err); !strings.HasPrefix(string(told), "--master=http://127.0.0.1:") {
		t.Errorf("it was told %q", told)
	}
	labtest.Check(t, os.WriteFile(program, []byte("#!/bin/sh\necho no such mode >&2; exit 1\n"), 0o700))
	if err := v.fillByKubeProxy(t.Context()); err == nil || !strings.Contains(err.Error(), "exit status 1: no such mode") {
		t.Errorf("it ended, and that is %v", err)
	}
	o := smallFlow(t, 20)
	if o.KubeProxy = program + "-1"; o.Prepare() == nil {
		t.Error("a program that is not there is no error")
	}
}

// TestFlowObjects: the lists have what kube-proxy asks for, in the words of the API.
func TestFlowObjects(t *testing.T) {
	v := &flowVariant{FlowOptions: smallFlow(t, 20), FlowFigures: FlowFigures{Kind: kubeProxyTables, Services: 20}}
	api := httptest.NewServer(v.objects())
	defer api.Close()
	get := func(path string) (code int, list struct {
		Kind  string
		Items []map[string]any
	}) {
		r, err := http.Get(api.URL + path)
		labtest.Check(t, err)
		defer r.Body.Close()
		labtest.Check(t, json.NewDecoder(r.Body).Decode(&list))
		return r.StatusCode, list
	}
	for path, kind := range map[string]string{"/api/v1/services?limit=500": "ServiceList",
		"/apis/discovery.k8s.io/v1/endpointslices": "EndpointSliceList"} {
		code, list := get(path)
		if code != http.StatusOK || list.Kind != kind || len(list.Items) != 20 {
			t.Errorf("%s: %d, %d %s", path, code, len(list.Items), list.Kind)
		}
	}
	if _, list := get("/apis/discovery.k8s.io/v1/endpointslices"); len(list.Items[0]["endpoints"].([]any)) != 3 {
		t.Errorf("%v", list.Items[0])
	}
	if code, _ := get("/api/v1/services?watch=1&sendInitialEvents=true"); code != http.StatusUnprocessableEntity {
		t.Errorf("a streamed list is answered with %d", code)
	}
	if code, _ := get("/api/v1/secrets"); code != http.StatusNotFound {
		t.Errorf("what is not there is answered with %d", code)
	}
}

// countedFlows is how many packets were counted at all Services.
func countedFlows(t *testing.T, v *flowVariant) (packets uint64) {
	t.Helper()
	var counters *kernel.Counters
	labtest.Check(t, v.node.host.Do(func() (err error) { counters, err = kernel.OpenCounters(); return err }))
	defer counters.Close()
	labtest.Check(t, counters.AllFrontends(func(c dataplane.FrontendCount) { packets += c.Packets }))
	return packets
}

// All packets of a round are flows of their own, whatever the number of Services, and use them evenly.
func TestFlowPlan(t *testing.T) {
	for services, flows := range map[int]int{0: 1000, 1: 64, 20: 1280, 63: 4000, 64: 4096, 1000: 8000} {
		v := &flowVariant{FlowOptions: &FlowOptions{Flows: flows}, FlowFigures: FlowFigures{Services: services}}
		v.plan()
		seen, uses := map[string]bool{}, map[[4]byte]int{}
		for _, s := range v.sends {
			seen[fmt.Sprint(s.socket, s.to)] = true
			uses[s.to.Addr]++
			if a := netip.AddrFrom4(s.to.Addr); services > 0 && !netip.MustParsePrefix("10.0.0.0/10").Contains(a) {
				t.Errorf("%v is no Service", a)
			}
		}
		if len(seen) != flows || len(uses) != min(flows, max(services, flows*(1-min(services, 1)))) {
			t.Errorf("%d Services: %d flows of %d, to %d addresses", services, len(seen), flows, len(uses))
		}
	}
}

func TestFlowSteps(t *testing.T) {
	for services, want := range map[int][]int{
		20:     {10, 11, 11, 12, 13, 14, 15, 16, 17, 19, 20},
		100000: {10, 25, 63, 158, 398, 1000, 2512, 6310, 15849, 39811, 100000},
	} {
		v := &flowVariant{FlowFigures: FlowFigures{Kind: grownTables, Services: services}}
		if got := v.steps(); !slices.Equal(got, want) {
			t.Errorf("%v, want %v", got, want)
		}
	}
}

// The kinds of Services are measured at 10,000, or what is next to it.
func TestFlowVariants(t *testing.T) {
	for sizes, want := range map[string]int{
		"0,1000,10000,100000": 10000, "0,20": 20, "100,5000,50000": 5000, "20000,30000": 20000, "0": 0,
	} {
		b := &FlowOptions{Options: small(t), Rounds: 1, Flows: 1}
		labtest.Check(t, json.Unmarshal([]byte("["+sizes+"]"), &b.Sizes))
		labtest.Check(t, b.Prepare())
		got := 0
		for _, v := range b.variants() {
			if v.Kind == stickyServices {
				got = v.Services
			}
		}
		if got != want {
			t.Errorf("--sizes %s: kinds of Services are measured at %d, want %d", sizes, got, want)
		}
	}
}
