package main

import (
	"encoding/json"
	"math"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/verdict-proxy/verdict/internal/answers/inspect"
	"github.com/verdict-proxy/verdict/internal/lab/labtest"
)

// explainFrom are the flags for the objects of the golden questions.
var explainFrom = map[string][]string{
	"cluster": {"--from", "../../examples/cluster.yaml", "--hostname-override", "node-1", "--cluster-cidr",
		"10.244.0.0/16,fd00:10:244::/48"},
	"odd": {"--from", "testdata/explain/odd.yaml", "--hostname-override", "node-1", "--cluster-cidr",
		"10.244.0.0/16,fd00:244::/32"},
	"canary": {"--from", "../../examples/canary.yaml", "--hostname-override", "node-1"},
	"kept": {"--from", "testdata/explain/kept.yaml", "--hostname-override", "node-1", "--cluster-cidr", "10.244.0.0/16",
		"--client-address", "annotated"},
	"kept-off": {"--from", "testdata/explain/kept.yaml", "--hostname-override", "node-1"},
	"zones":    {"--from", "testdata/render/zones.yaml", "--hostname-override", "node-1"},
}

// question is a line of testdata/explain/questions.txt.
type question struct {
	name string
	args []string
}

func questions(t testing.TB) (out []question) {
	t.Helper()
	text, err := os.ReadFile("testdata/explain/questions.txt")
	labtest.Check(t, err)
	for line := range strings.Lines(string(text)) {
		w := strings.Fields(line)
		if len(w) != 4 || strings.HasPrefix(line, "#") {
			continue
		}
		out = append(out, question{w[0], append([]string{"explain", w[1], w[2]}, explainFrom[w[3]]...)})
	}
	if len(out) < 12 {
		t.Fatalf("only %d questions", len(out))
	}
	return out
}

// TestExplain compares answers with the goldens. What a golden says, its JSON says too.
func TestExplain(t *testing.T) {
	for _, q := range questions(t) {
		t.Run(q.name, func(t *testing.T) {
			got, err := command(q.args...)
			labtest.Check(t, err)
			golden := filepath.Join("testdata/explain", q.name+".txt")
			if *update {
				labtest.Check(t, os.WriteFile(golden, []byte(got), 0o644))
			}
			want, err := os.ReadFile(golden)
			labtest.Check(t, err)
			if got != string(want) {
				t.Errorf("explain answers something else than %s (go test -update writes it anew):\n%s", golden,
					labtest.FirstDifference(got, string(want)))
			}
			checkAnswerJSON(t, q, got)
		})
	}
}

func checkAnswerJSON(t *testing.T, q question, text string) {
	t.Helper()
	got, err := command(append(q.args, "--json")...)
	labtest.Check(t, err)
	var a inspect.Answer
	d := json.NewDecoder(strings.NewReader(got))
	d.DisallowUnknownFields()
	labtest.Check(t, d.Decode(&a))
	v := a.Objects
	whole := 0.0
	for _, e := range v.Endpoints {
		whole += e.Chance
		addr := e.AddrPort()
		if !strings.Contains(text, addr.String()) {
			t.Errorf("the text lacks %s", addr)
		}
	}
	for _, n := range v.Nodes {
		whole += n.Chance
	}
	for _, b := range v.Backends {
		if b.Refused != "" {
			whole += float64(b.Weight) / float64(b.Of)
		}
	}
	if (v.Outcome == "endpoint" && math.Abs(whole-1) > 1e-9) || !strings.Contains(text, v.Why) ||
		!strings.Contains(text, a.Origin.Why) {
		t.Errorf("text and JSON differ: chances add up to %v, why %q", whole, v.Why)
	}
	decides := 0
	for _, r := range v.Rows {
		if r.Decides {
			decides++
		}
	}
	if v.Service != nil && v.Outcome != "forwarded" && decides != 1 {
		t.Errorf("%d rows decide", decides)
	}
}

// TestExplainArguments: an error names the argument that is wrong, and says what would be right.
func TestExplainArguments(t *testing.T) {
	for _, test := range []struct{ args, want string }{
		{"", "SRC and DST:PORT are missing"},
		{"10.0.0.1", `DST:PORT is missing after SRC "10.0.0.1"`},
		{"10.0.0.1 10.96.0.1:80 x", `unexpected argument "x"`},
		{"10.0.0.1 10.96.0.1", "write 10.96.0.1:PORT"},
		{"10.0.0.1 fd00::1", "write [fd00::1]:PORT"},
		{"10.0.0.1 10.96.0.1:0", "ports begin at 1"},
		{"10.0.0.1 10.96.0.1:70000", `"70000" is no port (1-65535)`},
		{"10.0.0.1 10.96.0.1:http", `"http" is no port (1-65535)`},
		{"10.0.0.1 kubernetes:443", "names are not looked up"},
		{"10.0.0.1 10.96.0.1:80/gre", `"gre" is no protocol`},
		{"10.0.0.1 10.96.0.1:80/icmp", "a ping has no port, write 10.96.0.1/icmp"},
		{"10.0.0.1 what/icmp", "is not ADDRESS/icmp"},
		{"pod svc/default/web", `"svc/default/web" is a Service, and this command looks up no names`},
		{"pod web/tcp", "is not ADDRESS:PORT"},
		{"10.0.0.1 what", "is not ADDRESS:PORT"},
		{"10.0.0.1:33000 10.96.0.1:80", "the sender's port makes no difference"},
		{"web-1 10.96.0.1:80", "SRC: \"web-1\" is no address, and none of node, pod and outside"},
		{"fd00::1 10.96.0.1:80", "both have to be of one family"},
		{"fe80::1%eth0 [fd00::1]:80", "SRC"},
		{"10.0.0.1 [fe80::1%eth0]:80", "has a zone"},
		{"node [2001:db8::7]:80 --from testdata/explain/odd.yaml --hostname-override node-1",
			"no address of this node is known"},
		{"pod 10.96.1.1:80 --from testdata/explain/odd.yaml --hostname-override node-1", "--cluster-cidr is not given"},
		{"node 10.96.1.1:80 --from testdata/explain/odd.yaml --hostname-override node-1 --interface eth0",
			"--interface: what this node sends comes in by none"},
		{"192.0.2.10 10.96.1.1:80 --from testdata/explain/odd.yaml --hostname-override node-1 --interface eth0",
			"--interface: 192.0.2.10 is this node's own address"},
		{"10.0.0.1 10.96.1.1:80 --from nowhere.yaml", "nowhere.yaml"},
		{"10.0.0.1 10.96.1.1:80 --from a --kubeconfig b", "exclude each other"},
		{"10.0.0.1 10.96.1.1:80 --from testdata/explain/odd.yaml --trace",
			"--trace shows the kernel's rules: it needs --live"},
		{"10.0.0.1 10.96.1.1:80 --from testdata/explain/odd.yaml --cluster-cidr x", "--cluster-cidr"},
		{"10.0.0.1 10.96.1.1:80 --in-cluster", "give --kubeconfig FILE, or --from PATH"},
	} {
		_, err := command(append([]string{"explain"}, strings.Fields(test.args)...)...)
		if err == nil || !strings.Contains(err.Error(), test.want) {
			t.Errorf("%s: %v; want %q", test.args, err, test.want)
		}
	}
}

// TestExplainWithoutObjects: on a node, outside of a pod, the answer comes from the kernel.
func TestExplainWithoutObjects(t *testing.T) {
	out, err := command("explain", "10.0.0.1", "10.96.1.1:80", "--json")
	if err != nil || !strings.Contains(out, `"from": "the kernel"`) || strings.Contains(out, `"objects"`) {
		t.Errorf("%v: %s", err, out)
	}
	_, err = command("explain", "pod", "10.96.1.1:80")
	if err == nil || !strings.Contains(err.Error(), "(Verdict has programmed nothing on this node): give an address") {
		t.Errorf("a pod, without tables: %v", err)
	}
}

// TestExplainInterfaces: where interfaces tell pods from others, they are asked for, or guessed from the Node's ranges.
func TestExplainInterfaces(t *testing.T) {
	flags := []string{
		"--from",
		"testdata/explain/odd.yaml",
		"--hostname-override",
		"node-1",
		"--detect-local-mode",
		"BridgeInterface",
		"--pod-bridge-interface",
		"cni0",
	}
	for _, test := range []struct {
		args, why string
		pod       bool
	}{
		{"10.244.1.9 10.96.1.1:80", "in this Node's pod range 10.244.1.0/24, so it should come in by interface cni0", true},
		{"10.244.1.9 10.96.1.1:80 --interface eth0", "comes in by eth0, not by interface cni0", false},
		{"10.9.9.9 10.96.1.1:80 --interface cni0", "comes in by cni0", true},
		{"pod 10.96.1.1:80", "10.244.1.254 (example pod address) comes in by cni0", true},
		{"10.9.9.9 10.96.1.1:80", "its interface is not known", false},
	} {
		out, err := command(append(append([]string{"explain", "--json"}, strings.Fields(test.args)...), flags...)...)
		labtest.Check(t, err)
		var a inspect.Answer
		labtest.Check(t, json.Unmarshal([]byte(out), &a))
		if a.Origin.Pod != test.pod || !strings.Contains(a.Origin.Why, test.why) {
			t.Errorf("%s: %+v; want %q", test.args, a.Origin, test.why)
		}
	}
}
