// Package arch holds the floors of the house apart: who may import whom.
package arch

import (
	"bytes"
	"go/parser"
	"go/token"
	"io/fs"
	"maps"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
)

const module = "github.com/verdict-proxy/verdict/"

// floors are the wings of the house from the ground up. A package may import those of its own wing and of the floors
// below. Test files may import more.
var floors = [][]string{
	{"internal/system"},   // this host, and small words: nothing there knows of Services
	{"sync"},              // from objects to decisions
	{"nft", "ipvsplugin"}, // from decisions to the kernel
	{"internal/proxy"},    // what runs on a node
	{"internal/answers"},  // what people ask
	{"internal/gateway"},  // the controller of Gateway API
	{"internal/lab"},      // where things are tried
	{"cmd", "conformance", "deploy"},
}

// narrow are packages that may import less of ours than their floor allows.
var narrow = map[string][]string{
	"sync/snapshot":              {"internal/system/ipfamily"},
	"sync/snapshot/snapshottest": {"sync/snapshot"},
	"sync/dataplane":             {"internal/system/ipfamily", "internal/system/units", "sync/snapshot"},
	"sync/watch":                 {"internal/system", "sync/snapshot"},
	"sync/reconcile":             {"internal/system/ipfamily", "sync"},
	"nft":                        {"internal/system/ipfamily", "sync/snapshot", "sync/dataplane"},
	"nft/kernel":                 {"internal/system", "nft", "sync"},
	"nft/iptshim/xtables":        {"internal/system", "nft/iptshim", "sync"},
	"ipvsplugin":                 {"internal/system", "sync"},
	"internal/system/netlink":    {},
	"internal/system/packets":    {"internal/system/ipfamily", "internal/system/iptlegacy", "internal/system/netlink"},
	"internal/proxy/config":      {"internal/system", "sync/snapshot", "sync/dataplane"},
	"internal/proxy/keeper":      {"internal/system/clock"},
	"internal/proxy/takeover":    {"internal/system"},
	"internal/answers/inspect":   {"internal/answers/records", "internal/system", "internal/proxy", "sync"},
	"internal/answers/records":   {"internal/system", "internal/proxy/flows"},
	"internal/gateway/routes":    {"internal/system", "sync/snapshot", "sync/watch"},
	"internal/lab":               {"internal/lab", "internal/system", "sync/snapshot"},
	"internal/lab/benchmark":     {"internal/lab", "internal/system", "nft", "sync"},
	"internal/lab/blackbox":      {"internal/lab", "internal/system", "internal/proxy/conntrack", "sync/snapshot"},
	"internal/lab/demo":          {"internal", "nft", "sync"},
	"nft/iptshim": {"internal/system/ipfamily", "internal/system/packets", "sync/snapshot",
		"sync/dataplane"},
	// The suite sees a proxy from outside: of ours it may use what makes hosts and control planes, and nothing that
	// decides or writes.
	"conformance": {"conformance", "internal/lab", "internal/system/ipfamily", "internal/system/packets",
		"sync/snapshot"},
	"conformance/cases":            {},
	"conformance/report":           {},
	"conformance/history":          {},
	"conformance/history/faulty":   {},
	"conformance/history/recorder": {"conformance", "internal/lab", "internal/system/ipfamily", "sync/snapshot"},
	"conformance/browser":          {},
	"conformance/cluster":          {"conformance/cluster", "conformance/testbed", "internal/lab"},
	"conformance/cmd":              {"conformance", "internal/lab", "internal/system/ipfamily", "sync/snapshot"},
	"deploy/release":               {},
	"conformance/testbed":          {"internal/lab", "internal/system/ipfamily", "sync/snapshot"},
	"conformance/run": {"conformance", "internal/lab", "internal/system/ipfamily", "internal/system/packets",
		"sync/snapshot"},
	"internal/lab/control": {"internal/lab"},
}

// owners says which packages may import a module of others; it holds for the packages below too. A node knows
// Kubernetes by sync/watch alone.
var owners = map[string][]string{
	"github.com/google/nftables": {"ipvsplugin", "nft/kernel"},
	"github.com/mdlayher":        {"internal/system/netlink"},
	"github.com/moby/ipvs":       {"internal/proxy/takeover", "internal/system/ipvshandle", "ipvsplugin"},
	"github.com/prometheus":      {"internal/proxy/metrics"},
	"github.com/sirupsen/logrus": {"internal/system/ipvshandle"},
	"github.com/spf13/pflag":     {"internal/answers/inspect", "internal/lab/demo", "internal/proxy/config"},
	"github.com/vishvananda": {"internal/answers/compare", "internal/lab", "internal/proxy/preflight",
		"internal/proxy/takeover", "sync/watch"},
	"go.yaml.in/yaml": {"internal/system/yamltree"},
	"golang.org/x/sync": {"internal/answers", "internal/gateway", "internal/lab/benchmark",
		"internal/proxy/node"},
	"golang.org/x/sys":           {"internal", "ipvsplugin", "nft/iptshim/xtables", "nft/kernel", "sync/watch"},
	"golang.org/x/term":          {"internal/system/terminal"},
	"gopkg.in/natefinch":         {"internal/proxy/flows"},
	"go.opentelemetry.io/proto":  {"internal/proxy/flows"},
	"google.golang.org/protobuf": {"internal/proxy/flows", "sync/watch"},
	"k8s.io": {"internal/answers/cluster", "internal/answers/collector", "internal/gateway",
		"internal/lab/control", "sync/watch"},
	"k8s.io/apimachinery":     {"internal/proxy/config"},
	"k8s.io/component-base":   {"internal/proxy/config"},
	"k8s.io/kube-proxy":       {"internal/proxy/config"},
	"k8s.io/utils":            {"internal/system/sloppy"},
	"sigs.k8s.io/gateway-api": {"internal/gateway"},
	"sigs.k8s.io/yaml":        {"internal/proxy/config"},
}

func TestFloors(t *testing.T) {
	root := filepath.Join("..", "..")
	seen := map[string]bool{}
	walk(t, root, func(file, pkg string, imports []string) {
		seen[pkg] = true
		floor := floorOf(pkg)
		if floor < 0 {
			t.Errorf("%s: package %s is in no wing: see floors in internal/arch", file, pkg)
			return
		}
		for _, i := range imports {
			ours, isOurs := strings.CutPrefix(i, module)
			switch {
			case !isOurs:
				if strings.Contains(strings.SplitN(i, "/", 2)[0], ".") && !owned(i, pkg) {
					t.Errorf("%s: %s must not import %s", file, pkg, i)
				}
			case floorOf(ours) > floor:
				t.Errorf("%s: %s must not import %s, which is above it", file, pkg, ours)
			case !mayImport(pkg, ours):
				t.Errorf("%s: %s must not import %s", file, pkg, ours)
			}
		}
	})
	for pkg := range narrow {
		if !slices.ContainsFunc(slices.Collect(maps.Keys(seen)), func(s string) bool { return under(s, pkg) }) {
			t.Errorf("package %s is gone: take it out of the table", pkg)
		}
	}
}

func floorOf(pkg string) int {
	return slices.IndexFunc(floors, func(wings []string) bool { return underAny(pkg, wings) })
}

func under(pkg, parent string) bool { return pkg == parent || strings.HasPrefix(pkg, parent+"/") }

func underAny(pkg string, parents []string) bool {
	return slices.ContainsFunc(parents, func(p string) bool { return under(pkg, p) })
}

// mayImport looks for the narrowest entry.
func mayImport(pkg, ours string) bool {
	for at := pkg; at != "."; at = path.Dir(at) {
		if may, ok := narrow[at]; ok {
			return underAny(ours, may)
		}
	}
	return true
}

// owned is whether a package may import a package of others. The commands, and the modules that are no part of the
// product, choose for themselves, but for what only one package of the house may see.
func owned(i, pkg string) bool {
	free := underAny(pkg, floors[len(floors)-1])
	for m, by := range owners {
		if under(i, m) {
			if underAny(pkg, by) {
				return true
			}
			free = free && !underAny(m, []string{"github.com/google", "github.com/mdlayher", "github.com/moby"})
		}
	}
	return free
}

// walk calls do for every Go file that is no test.
func walk(t *testing.T, root string, do func(file, pkg string, imports []string)) {
	t.Helper()
	err := filepath.WalkDir(root, func(path string, d fs.DirEntry, err error) error {
		name := d.Name()
		if err != nil || d.IsDir() && (name == "testdata" || strings.HasPrefix(name, ".") && path != root) {
			return cmpErr(err, fs.SkipDir)
		}
		if d.IsDir() || !strings.HasSuffix(name, ".go") || strings.HasSuffix(name, "_test.go") {
			return nil
		}
		f, err := parser.ParseFile(token.NewFileSet(), path, nil, parser.ImportsOnly)
		if err != nil {
			return err
		}
		var imports []string
		for _, i := range f.Imports {
			p, _ := strconv.Unquote(i.Path.Value)
			imports = append(imports, p)
		}
		pkg, _ := filepath.Rel(root, filepath.Dir(path))
		do(path, filepath.ToSlash(pkg), imports)
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
}

func cmpErr(err, otherwise error) error {
	if err != nil {
		return err
	}
	return otherwise
}

// TestShape holds what DESIGN's layout says of files: sync shadows no standard package, and main is only a door.
func TestShape(t *testing.T) {
	if files, _ := filepath.Glob("../../sync/*.go"); len(files) > 0 {
		t.Errorf("sync/ holds %v: a package there would shadow the standard one", files)
	}
	main, err := os.ReadFile("../../cmd/verdict/main.go")
	if err != nil {
		t.Fatal(err)
	}
	if n := bytes.Count(main, []byte("\n")); n > 20 {
		t.Errorf("cmd/verdict/main.go has %d lines", n)
	}
}
