package config

import (
	"encoding/json"
	"flag"
	"fmt"
	"os"
	"reflect"
	"slices"
	"strings"
	"testing"

	"github.com/verdict-proxy/verdict/internal/system/yamltree"
)

var update = flag.Bool("update", false, "write the goldens anew")

// head begins a file of kube-proxy's.
const head = "apiVersion: kubeproxy.config.k8s.io/v1alpha1\nkind: KubeProxyConfiguration\n"

const ownHead = "apiVersion: verdict/v1alpha1\nkind: VerdictConfiguration\n"

// loadText loads a text as the file "f".
func loadText(t *testing.T, text string, args ...string) (*Settings, []string) {
	t.Helper()
	s, problems, err := load("f", []byte(text), parse(t, args...), nil)
	if err != nil {
		t.Fatalf("%v\n%s", err, text)
	}
	return s, texts(problems)
}

func texts(problems []*Problem) (out []string) {
	for _, p := range problems {
		out = append(out, p.Error())
	}
	return out
}

// document writes one field: as the only one of its document.
func document(name, value string) string {
	steps := strings.Split(name, ".")
	top := head
	if steps[0] == verdictKind {
		top, steps = ownHead, steps[1:]
	}
	for i, step := range steps {
		top += strings.Repeat("  ", i) + step + ":"
		if i < len(steps)-1 {
			top += "\n"
		}
	}
	return top + " " + value + "\n"
}

const (
	noText     = `a list is not text`
	noDuration = `"soon" is not a duration such as 30s or 1h30m`
	noBool     = `"perhaps" is neither true nor false`
	isDefault  = "; the default is used, "
	isLeast    = "; what changes least is used, "
	notSet     = "; it is treated as unset"
)

// fieldRows are fields with their default, a right value, a wrong one, and what it gets.
var fieldRows = []struct{ name, standard, good, bad, message string }{
	{"featureGates", `{}`, `{AllowServiceExternalIPs: false}`, `[A]`,
		"a list, but names with values are expected; the default is used, {}"},
	{"clientConnection.kubeconfig", `""`, `/a/b`, `[a]`, noText + notSet},
	{"clientConnection.acceptContentTypes", `""`, `application/json`, `application/cbor`,
		`"application/cbor" has neither application/vnd.kubernetes.protobuf nor application/json` + notSet},
	{"clientConnection.contentType", `application/vnd.kubernetes.protobuf`, `application/json`, `application/cbor`,
		`"application/cbor" is not one of application/vnd.kubernetes.protobuf, application/json` + isDefault +
			"application/vnd.kubernetes.protobuf"},
	{"clientConnection.qps", `5`, `2.5`, `fast`, `"fast" is not a number` + isDefault + "5"},
	{"clientConnection.burst", `10`, `20`, `-1`, `-1 is less than 0` + isDefault + "10"},
	{"logging.format", `text`, `json`, `xml`, `"xml" is not one of text, json` + isDefault + "text"},
	{"logging.flushFrequency", `5s`, `1s`, `-1s`, `-1s is not more than 0` + isDefault + "5s"},
	{"logging.verbosity", `0`, `2`, `4294967295`, `4294967295 is more than 2147483647` + isDefault + "0"},
	{"logging.vmodule", `null`, `[{filePattern: a, verbosity: 1}]`, `5`, `5 is not a list; it is treated as unset`},
	{"logging.options.text.splitStream", `false`, `true`, `perhaps`, noBool + isDefault + "false"},
	{"logging.options.text.infoBufferSize", `0`, `4Ki`, `much`, `"much" is not a size such as 512 or 10Ki` + isDefault +
		"0"},
	{"logging.options.json.splitStream", `false`, `true`, `perhaps`, noBool + isDefault + "false"},
	{"logging.options.json.infoBufferSize", `0`, `4Ki`, `much`, `"much" is not a size such as 512 or 10Ki` + isDefault +
		"0"},
	{"hostnameOverride", `""`, `" Node-1 "`, `" "`, `it is blank; it is treated as unset`},
	{"bindAddress", `0.0.0.0`, `192.0.2.1`, `192.0.2.256`, `"192.0.2.256" is not an IP address` + isDefault + "0.0.0.0"},
	{"healthzBindAddress", `0.0.0.0:10256`, `"[::]:1"`, `localhost:1`,
		`"localhost:1" is not an IP address with or without a port, such as 127.0.0.1:10249 or ::1` + isDefault +
			"0.0.0.0:10256"},
	{"metricsBindAddress", `127.0.0.1:10249`, `0.0.0.0`, `127.0.0.1:70000`,
		`"127.0.0.1:70000" is not an IP address with or without a port, such as 127.0.0.1:10249 or ::1` + isDefault +
			"127.0.0.1:10249"},
	{"bindAddressHardFail", `false`, `true`, `perhaps`, noBool + isDefault + "false"},
	{"enableProfiling", `false`, `true`, `perhaps`, noBool + isDefault + "false"},
	{"showHiddenMetricsForVersion", `""`, `"1.35"`, `new`, `"new" is not a version such as 1.35; it is treated as unset`},
	{"mode", `nftables`, `nftables`, `iptabels`, `"iptabels" is not one of iptables, ipvs, nftables; it is treated as ` +
		`unset`},
	{"iptables.masqueradeBit", `14`, `31`, `32`, `32 is not within 0 to 31` + isDefault + "14"},
	{"iptables.masqueradeAll", `false`, `true`, `perhaps`, noBool + isDefault + "false"},
	{"iptables.localhostNodePorts", `true`, `false`, `perhaps`, noBool + isDefault + "true"},
	{"iptables.syncPeriod", `30s`, `1m`, `-1s`, `-1s is not more than 0` + isDefault + "30s"},
	{"iptables.minSyncPeriod", `0s`, `1s`, `31s`, `31s is more than the syncPeriod, 30s` + isDefault + "0s"},
	{"ipvs.syncPeriod", `30s`, `1m`, `-1s`, `-1s is not more than 0` + isDefault + "30s"},
	{"ipvs.minSyncPeriod", `0s`, `1s`, `-1s`, `-1s is less than 0` + isDefault + "0s"},
	{"ipvs.scheduler", `""`, `rr`, `[rr]`, noText + notSet},
	{"ipvs.excludeCIDRs", `null`, `[10.0.0.0/8]`, `[10.0.0.0]`, ``},
	{"ipvs.strictARP", `false`, `true`, `perhaps`, noBool + isDefault + "false"},
	{"ipvs.tcpTimeout", `0s`, `1m`, `-1s`, `-1s is less than 0` + isDefault + "0s"},
	{"ipvs.tcpFinTimeout", `0s`, `1m`, `soon`, noDuration + isDefault + "0s"},
	{"ipvs.udpTimeout", `0s`, `1m`, `30`, `30 is not a duration such as 30s or 1h30m` + isDefault + "0s"},
	{"nftables.masqueradeBit", `14`, `0`, `-1`, `-1 is not within 0 to 31` + isDefault + "14"},
	{"nftables.masqueradeAll", `false`, `true`, `"true"`, `"true" is neither true nor false` + isDefault + "false"},
	{"nftables.syncPeriod", `30s`, `1m`, `-1s`, `-1s is not more than 0` + isDefault + "30s"},
	{"nftables.minSyncPeriod", `0s`, `1s`, `-1s`, `-1s is less than 0` + isDefault + "0s"},
	{"winkernel.networkName", `""`, `a`, `[a]`, noText + notSet},
	{"winkernel.sourceVip", `""`, `a`, `1`, `1 is a number: put it in quotes; it is treated as unset`},
	{"winkernel.enableDSR", `false`, `true`, `perhaps`, noBool + isDefault + "false"},
	{"winkernel.rootHnsEndpointName", `""`, `a`, `[a]`, noText + notSet},
	{"winkernel.forwardHealthCheckVip", `false`, `true`, `perhaps`, noBool + isDefault + "false"},
	{"detectLocalMode", `ClusterCIDR`, `NodeCIDR`, `Magic`,
		`"Magic" is not one of ClusterCIDR, NodeCIDR, BridgeInterface, InterfaceNamePrefix` + isDefault + "ClusterCIDR"},
	{"detectLocal.bridgeInterface", `""`, `cni0`, `[a]`, noText + notSet},
	{"detectLocal.interfaceNamePrefix", `""`, `cali`, `[a]`, noText + notSet},
	{"clusterCIDR", `""`, `10.244.0.0/16,fd00::/48`, `10.244.0.0`,
		`"10.244.0.0" is not an address range such as 10.244.0.0/16; it is ignored`},
	{"nodePortAddresses", `null`, `[10.0.0.0/8, "fd00::/8"]`, `10.0.0.0/8`,
		`"10.0.0.0/8" is not a list; node ports answer nowhere`},
	{"oomScoreAdj", `-999`, `0`, `-1001`, `-1001 is not within -1000 to 1000` + isDefault + "-999"},
	{"conntrack.maxPerCore", `32768`, `0`, `-1`, `-1 is less than 0` + isDefault + "32768"},
	{"conntrack.min", `131072`, `0`, `3000000000`,
		`3000000000 is out of range: -2147483648 to 2147483647` + isDefault + "131072"},
	{"conntrack.tcpEstablishedTimeout", `24h0m0s`, `0s`, `-1s`, `-1s is less than 0` + isDefault + "24h0m0s"},
	{"conntrack.tcpCloseWaitTimeout", `1h0m0s`, `0s`, `10ms`, `10ms is less than a second` + isDefault + "1h0m0s"},
	{"conntrack.tcpBeLiberal", `false`, `true`, `1`, `1 is neither true nor false` + isDefault + "false"},
	{"conntrack.udpTimeout", `0s`, `30s`, `1000000h`, `1000000h0m0s is more than the kernel accepts` + isDefault + "0s"},
	{"conntrack.udpStreamTimeout", `0s`, `3m`, `soon`, noDuration + isDefault + "0s"},
	{"configSyncPeriod", `15m0s`, `1h`, `-1s`, `-1s is not more than 0` + isDefault + "15m0s"},
	{"portRange", `""`, `1-2`, `[a]`, noText + notSet},
	{"windowsRunAsService", `false`, `true`, `perhaps`, noBool + isDefault + "false"},
	{"VerdictConfiguration.manifests", `""`, `/etc/verdict`, `[a]`, noText + notSet},
	{"VerdictConfiguration.backend", `auto`, `iptables`, `nft`,
		`"nft" is not one of auto, nftables, iptables` + isDefault + "auto"},
	{"VerdictConfiguration.iptablesDispatch", `tree`, `list`, `ring`, `"ring" is not one of tree, list` + isDefault +
		"tree"},
	{"VerdictConfiguration.iptablesCompat", `false`, `true`, `perhaps`, noBool + isDefault + "false"},
	{"VerdictConfiguration.keeper", `auto`, `none`, `dog`,
		`"dog" is not one of auto, process, systemd, none` + isDefault + "auto"},
	{"VerdictConfiguration.ownTables", `true`, `false`, `perhaps`, noBool + isDefault + "true"},
	{"VerdictConfiguration.nodeCondition", `false`, `true`, `perhaps`, noBool + isDefault + "false"},
	{"VerdictConfiguration.startupTaint", `""`, `example.com/not-programmed`, `a/b/c`,
		`"a/b/c" is not the key of a taint such as example.com/not-programmed` + notSet},
	{"VerdictConfiguration.takeover", `auto`, `never`, `later`, `"later" is not one of auto, never` + isLeast + "never"},
	{"VerdictConfiguration.ipvs", `auto`, `never`, `often`, `"often" is not one of auto, always, never` + isLeast +
		"never"},
	{"VerdictConfiguration.ipvsServices", `0`, `50000`, `-1`, `-1 is less than 0` + isDefault + "0"},
	{"VerdictConfiguration.ipvsAddresses", `null`, `[203.0.113.0/24, "2001:db8::/64"]`, `203.0.113.0/24`,
		`"203.0.113.0/24" is not a list; it is treated as unset`},
	{"VerdictConfiguration.behavior", `verdict`, `kube-proxy`, `cilium`, `"cilium" is not one of verdict, kube-proxy` +
		isLeast + "kube-proxy"},
	{"VerdictConfiguration.secondChance", `on`, `observe`, `perhaps`,
		`"perhaps" is not one of off, observe, on` + isLeast + `off`},
	{"VerdictConfiguration.lastResort", `off`, `on`, `perhaps`, `"perhaps" is not one of off, on` + isDefault + "off"},
	{"VerdictConfiguration.clientAddress", `off`, `keep`, `local`,
		`"local" is not one of off, annotated, keep` + isDefault + "off"},
	{"VerdictConfiguration.pingServices", `true`, `false`, `perhaps`, noBool + isLeast + "false"},
	{"VerdictConfiguration.rejectUnusedPorts", `true`, `false`, `perhaps`, noBool + isLeast + "false"},
	{"VerdictConfiguration.metricsConnections", `service`, `endpoint`, `all`,
		`"all" is not one of off, service, endpoint` + isDefault + "service"},
	{"VerdictConfiguration.metricsMaxSeries", `5000`, `10`, `0`, `0 is less than 1` + isDefault + "5000"},
	{"VerdictConfiguration.counterMemoryMiB", `16`, `0`, `-1`, `-1 is less than 0` + isDefault + "16"},
	{"VerdictConfiguration.everywhere", `""`, `kube-system/verdict-collector`, `verdict-collector`,
		`"verdict-collector" is not NAMESPACE/NAME, such as kube-system/verdict-collector` + notSet},
	{"VerdictConfiguration.everywhereToken", `/var/run/secrets/verdict-collector/token`, `/token`, `[a]`,
		noText + isDefault + "/var/run/secrets/verdict-collector/token"},
	{"VerdictConfiguration.ledger", `""`, `/var/lib/verdict/ledger`, `ledger`,
		`"ledger" is not an absolute path` + notSet},
	{"VerdictConfiguration.ledgerMaxMiB", `64`, `1`, `0`, `0 is not within 1 to 1048576` + isDefault + "64"},
	{"VerdictConfiguration.records", `off`, `on`, `maybe`, `"maybe" is not one of off, on` + isDefault + "off"},
	{"VerdictConfiguration.recordsMemoryMiB", `32`, `1`, `0`, `0 is not within 1 to 4096` + isDefault + "32"},
	{"VerdictConfiguration.recordsFile", `""`, `/var/log/flows.jsonl`, `flows`,
		`"flows" is not an absolute path` + notSet},
	{"VerdictConfiguration.recordsOTLP", `""`, `https://collector:4318`, `collector:4318`,
		`"collector:4318" is not a URL such as http://otel-collector.monitoring:4318` + notSet},
	{"VerdictConfiguration.recordsClientPrefix", `""`, `24,64`, `24,0`,
		`"24,0" is not two numbers of bits such as 24,64` + notSet},
}

// TestFields: each field has kube-proxy's default, takes what is right, and says exactly what is wrong otherwise. The
// message is what comes behind file, line and field.
func TestFields(t *testing.T) {
	defaults, _, err := Load("", nil, nil)
	if err != nil {
		t.Fatal(err)
	}
	for i, row := range fieldRows {
		if i >= len(fields) || fields[i].name != row.name {
			t.Fatalf("row %d is about %s; it should be about the fields in their order", i, row.name)
		}
		if got := defaults.Document.text(fields[i].path()); got != row.standard {
			t.Errorf("%s: the default is %s; want %s", row.name, got, row.standard)
		}
		s, problems, err := load("f", []byte(document(row.name, row.good)), nil, nil)
		if err != nil {
			t.Errorf("%s: %s: %v", row.name, row.good, err)
			continue
		}
		for _, p := range problems {
			if p.Severity != Note {
				t.Errorf("%s: %s: %v", row.name, row.good, p)
			}
		}
		if row.good != row.standard && s.Document.text(fields[i].path()) == row.standard {
			t.Errorf("%s: %s: it is not taken", row.name, row.good)
		}
		if row.message == "" {
			continue
		}
		_, said := loadText(t, document(row.name, row.bad))
		line := strings.Count(document(row.name, ""), "\n")
		if want := fmt.Sprintf("f:%d: %s: %s", line, row.name, row.message); !slices.Contains(said, want) {
			t.Errorf("%s: %s: it says\n%s\nwant\n%s", row.name, row.bad, strings.Join(said, "\n"), want)
		}
	}
	if len(fieldRows) != len(fields) {
		t.Errorf("%d rows for %d fields", len(fieldRows), len(fields))
	}
}

// TestEveryField: the table of fields has all that the types have, in their order, and no other.
func TestEveryField(t *testing.T) {
	var want, got []string
	var walk func(v reflect.Type, p yamltree.Path)
	walk = func(v reflect.Type, p yamltree.Path) {
		for f := range v.Fields() {
			tag, options, _ := strings.Cut(f.Tag.Get("json"), ",")
			at := p.Key(tag)
			switch leaf := reflect.New(f.Type).Interface(); {
			case f.Name == "TypeMeta":
			case options == "inline" || f.Anonymous && tag == "":
				walk(f.Type, p)
			case f.Type.Kind() == reflect.Struct && !isUnmarshaler(leaf):
				walk(f.Type, at)
			default:
				want = append(want, at.String())
			}
		}
	}
	walk(reflect.TypeFor[Document](), nil)
	for _, f := range fields {
		got = append(got, f.name)
	}
	if !slices.Equal(slices.Sorted(slices.Values(got)), slices.Sorted(slices.Values(want))) {
		t.Errorf("the table has %v;\nthe types have %v", got, want)
	}
}

func isUnmarshaler(v any) bool {
	_, ok := v.(json.Unmarshaler)
	return ok
}

// TestDocumentation compares the tables in docs/CONFIGURATION.md with ours.
func TestDocumentation(t *testing.T) {
	const file = "../../../docs/CONFIGURATION.md"
	b, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	text := string(b)
	for name, table := range map[string]string{"fields": fieldTable(false), "own": fieldTable(true),
		"flags": flagTable()} {
		begin, end := "<!-- "+name+" -->\n", "<!-- end of "+name+" -->\n"
		before, rest, ok := strings.Cut(text, begin)
		was, after, ok2 := strings.Cut(rest, end)
		if !ok || !ok2 {
			t.Fatalf("%s has no place for the table of %s", file, name)
		}
		if was != table && !*update {
			t.Errorf("%s has another table of %s (go test -update writes it anew)", file, name)
		}
		text = before + begin + table + end + after
	}
	if *update {
		if err := os.WriteFile(file, []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
}

func fieldTable(own bool) string {
	defaults := &Document{}
	defaults.setDefaults(behaviorVerdict)
	var b strings.Builder
	b.WriteString("| field | default | what Verdict does | a change takes effect |\n|---|---|---|---|\n")
	for _, f := range fields {
		name, ours := strings.CutPrefix(f.name, verdictKind+".")
		if ours != own {
			continue
		}
		text := "`" + defaults.text(f.path()) + "`"
		if text == "`\"\"`" || text == "`null`" || text == "`{}`" {
			text = "–"
		}
		does, when := f.does, [...]string{"at once", "at restart", "–"}[f.effect]
		if f.effect == Never {
			does = "nothing: " + does
		}
		fmt.Fprintf(&b, "| `%s` | %s | %s | %s |\n", name, text, does, when)
	}
	return b.String()
}

func flagTable() string {
	var b strings.Builder
	b.WriteString("| flag | field | |\n|---|---|---|\n")
	for i := range flags {
		f := &flags[i]
		names := make([]string, len(f.fields))
		for j, field := range f.fields {
			names[j] = "`" + field + "`"
		}
		field, what := strings.Join(names, ", "), f.note
		if field == "" {
			field = "–"
		}
		fmt.Fprintf(&b, "| `--%s` | %s | %s |\n", f.name, field, what)
	}
	return b.String()
}
