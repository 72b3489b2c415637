// Package arch holds the layers of the house apart: who may import whom.
package arch

import (
	"bytes"
	"go/parser"
	"go/token"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
)

const module = "github.com/verdict-proxy/verdict/"

// everywhere is the package of ours that every other may import.
const everywhere = "internal/ipfamily"

// layers says what each package may import besides the standard library: packages of ours, and modules of others. Test
// files may import more.
var layers = map[string]struct{ ours, others []string }{
	"internal/ipfamily": {},
	"sync/snapshot":     {},
	"sync/dataplane":    {ours: []string{"internal/units", "sync/snapshot"}},
	"sync/watch":        {ours: []string{"internal/nearest", "internal/sloppy", "sync/snapshot"}, others: []string{"*"}},
	"sync/reconcile":    {ours: []string{"sync/snapshot", "sync/dataplane"}},
	"nft":               {ours: []string{"sync/snapshot", "sync/dataplane"}},
	"nft/kernel": {
		ours:   []string{"internal/netlink", "nft", "sync/snapshot", "sync/dataplane", "sync/reconcile"},
		others: []string{"github.com/google/nftables", "golang.org/x/sys"},
	},
	"nft/iptshim": {ours: []string{"nft", "sync/snapshot", "sync/dataplane"}},
	"nft/iptshim/xtables": {
		ours:   []string{"internal/netlink", "nft/iptshim", "sync/snapshot", "sync/dataplane", "sync/reconcile"},
		others: []string{"golang.org/x/sys"},
	},
	"ipvsplugin": {
		ours: []string{"internal/ipvshandle", "internal/netlink", "internal/sysctl", "sync/snapshot", "sync/dataplane",
			"sync/reconcile"},
		others: []string{"github.com/google/nftables", "github.com/moby/ipvs", "golang.org/x/sys"},
	},
	"internal/benchmark": {
		ours:   []string{"internal/lab", "internal/units", "nft/kernel", "sync/snapshot", "sync/dataplane", "sync/reconcile"},
		others: []string{"github.com/vishvananda/netlink", "golang.org/x/sync", "golang.org/x/sys"},
	},
	"internal/demo": {
		ours: []string{
			"internal/backends",
			"internal/conntrack",
			"internal/inspect",
			"internal/lab",
			"internal/node",
			"internal/terminal",
			"internal/units",
			"nft",
			"nft/kernel",
			"sync/dataplane",
			"sync/reconcile",
			"sync/snapshot",
			"sync/watch",
		},
		others: []string{"github.com/spf13/pflag"},
	},
	"internal/preflight": {
		ours: []string{"internal/ipfamily", "internal/netlink", "internal/packets", "internal/status", "nft",
			"sync/dataplane", "sync/snapshot"},
		others: []string{"github.com/vishvananda/netlink", "golang.org/x/sys"},
	},
	"internal/inspect": {
		ours: []string{
			"internal/config",
			"internal/packets",
			"internal/preflight",
			"internal/status",
			"internal/terminal",
			"internal/units",
			"sync/dataplane",
			"sync/reconcile",
			"sync/snapshot",
			"sync/watch",
		},
		others: []string{"github.com/spf13/pflag", "github.com/vishvananda/netlink", "golang.org/x/sys"},
	},
	// What follows packets through the kernel's lists shares nothing with what writes rules or explains them.
	"internal/packets": {ours: []string{"internal/ipfamily", "internal/netlink"}, others: []string{"golang.org/x/sys"}},
	"internal/compare": {
		ours: []string{
			"internal/ipfamily",
			"internal/packets",
			"nft",
			"nft/iptshim/xtables",
			"nft/kernel",
			"sync/dataplane",
			"sync/snapshot",
		},
		others: []string{"golang.org/x/sys"},
	},
	"internal/plan": {
		ours: []string{
			"internal/conntrack",
			"internal/inspect",
			"internal/status",
			"internal/terminal",
			"internal/units",
			"nft",
			"nft/kernel",
			"sync/dataplane",
			"sync/reconcile",
			"sync/snapshot",
			"sync/watch",
		},
	},
	"internal/terminal": {others: []string{"golang.org/x/term"}},
	"internal/units":    {},
	"internal/backends": {
		ours: []string{
			"internal/config",
			"internal/ledger",
			"internal/metrics",
			"internal/netlink",
			"internal/sysctl",
			"internal/takeover",
			"ipvsplugin",
			"nft",
			"nft/iptshim",
			"nft/iptshim/xtables",
			"nft/kernel",
			"sync/dataplane",
			"sync/reconcile",
		},
	},
	"internal/cgroup":  {},
	"internal/nearest": {},
	"internal/sloppy":  {others: []string{"k8s.io/utils"}},
	"internal/cluster": {
		ours: []string{"internal/status", "internal/terminal", "sync/snapshot", "sync/watch"},
		others: []string{"golang.org/x/sync", "k8s.io/api", "k8s.io/apimachinery", "k8s.io/client-go",
			"k8s.io/streaming"},
	},
	"internal/cluster/clustertest": {
		ours:   []string{"internal/cluster", "internal/status"},
		others: []string{"k8s.io/api", "k8s.io/apimachinery"},
	},
	"internal/dashboard": {
		ours: []string{"internal/cluster", "internal/status"},
	},
	"internal/collector": {
		ours:   []string{"internal/cluster", "internal/everywhere", "internal/status", "sync/snapshot"},
		others: []string{"golang.org/x/sync", "k8s.io/api", "k8s.io/apimachinery", "k8s.io/client-go"},
	},
	"internal/everywhere": {ours: []string{"internal/health", "internal/status", "sync/reconcile", "sync/snapshot"}},
	"internal/config": {
		ours: []string{"internal/nearest", "internal/sloppy", "internal/sysctl", "sync/snapshot", "sync/dataplane"},
		others: []string{
			"k8s.io/kube-proxy",
			"k8s.io/component-base",
			"k8s.io/apimachinery",
			"sigs.k8s.io/yaml",
			"go.yaml.in/yaml/v3",
			"github.com/spf13/pflag",
		},
	},
	"internal/conntrack": {
		ours:   []string{"internal/netlink", "sync/snapshot", "sync/dataplane", "sync/reconcile"},
		others: []string{"golang.org/x/sys"},
	},
	"internal/health":  {ours: []string{"sync/snapshot", "sync/dataplane", "sync/reconcile"}},
	"internal/ledger":  {ours: []string{"internal/terminal", "sync/snapshot", "sync/dataplane", "sync/reconcile"}},
	"internal/logging": {},
	"internal/outlier": {
		ours:   []string{"internal/conntrack", "sync/snapshot", "sync/dataplane", "sync/reconcile"},
		others: []string{"golang.org/x/sys"},
	},
	"internal/netlink": {
		others: []string{"github.com/mdlayher/netlink", "github.com/mdlayher/socket", "golang.org/x/sys"},
	},
	"internal/ipvshandle": {
		ours:   []string{"internal/netlink"},
		others: []string{"github.com/moby/ipvs", "github.com/sirupsen/logrus", "golang.org/x/sys"},
	},
	"internal/keeper": {others: []string{"golang.org/x/sys"}},
	"internal/metrics": {
		ours:   []string{"sync/snapshot", "sync/dataplane", "sync/reconcile"},
		others: []string{"github.com/prometheus/client_golang"},
	},
	"internal/status":  {ours: []string{"sync/snapshot", "sync/reconcile"}},
	"internal/sysctl":  {},
	"internal/testkit": {},
	"internal/lab": {
		ours:   []string{"sync/snapshot"},
		others: []string{"github.com/vishvananda/netlink", "github.com/vishvananda/netns", "golang.org/x/sys"},
	},
	"internal/lab/control": {ours: []string{"internal/lab"}, others: []string{"k8s.io/client-go"}},
	"internal/takeover": {
		ours:   []string{"internal/ipvshandle", "internal/netlink"},
		others: []string{"github.com/moby/ipvs", "github.com/vishvananda/netlink", "golang.org/x/sys"},
	},
	"internal/lab/tableowner": {ours: []string{"internal/netlink"}, others: []string{"golang.org/x/sys"}},
	"internal/lab/labtest":    {ours: []string{"internal/lab"}},

	// A running proxy knows no backend but by internal/backends; of nft/kernel it has the socket that owns the tables.
	"internal/node": {
		ours: []string{
			"internal/backends", "internal/cgroup", "internal/config", "internal/conntrack",
			"internal/everywhere", "internal/health",
			"internal/keeper", "internal/ledger", "internal/logging", "internal/metrics", "internal/preflight",
			"internal/outlier", "internal/status",
			"internal/sysctl", "internal/takeover", "nft/kernel",
			"sync/dataplane", "sync/reconcile", "sync/snapshot", "sync/watch"},
		others: []string{"golang.org/x/sync"}},
	"sync/reconcile/reconciletest": {ours: []string{"sync/snapshot", "sync/dataplane", "sync/reconcile"}},

	// conformance is a module of its own, and held to the same table. It sees a proxy from outside only: of ours it may
	// use what makes hosts and control planes, and nothing that decides or writes.
	"conformance/testbed": {
		ours:   []string{"internal/lab", "internal/lab/control", "sync/snapshot"},
		others: []string{"*"},
	},
	"conformance/cases": {others: []string{"*"}},
	"conformance/cmd/benchmark": {
		ours:   []string{"conformance/testbed", "conformance/benchmark/results", "conformance/benchmark", "internal/lab"},
		others: []string{"*"},
	},
	"conformance/cmd/conformance": {
		ours:   []string{"conformance/testbed", "conformance/cases", "conformance/report", "conformance/run", "internal/lab"},
		others: []string{"*"},
	},
	"conformance/cluster": {
		ours:   []string{"conformance/testbed", "internal/lab", "internal/lab/tableowner", "internal/lab/control"},
		others: []string{"*"},
	},
	"conformance/cluster/stories": {ours: []string{"conformance/cluster"}, others: []string{"*"}},
	"conformance/cmd/cluster": {
		ours:   []string{"conformance/testbed", "conformance/cluster", "conformance/cluster/stories"},
		others: []string{"*"},
	},
	"conformance/cmd/mutate":        {},
	"conformance/cmd/workload":      {ours: []string{"conformance/cluster"}},
	"conformance/benchmark/results": {others: []string{"gonum.org/v1/plot"}},
	"conformance/report":            {},
	"conformance/run": {
		ours: []string{
			"conformance/testbed",
			"conformance/cases",
			"conformance/report",
			"conformance/nfteval",
			"internal/lab",
			"sync/snapshot",
		},
		others: []string{"*"},
	},
	"conformance/benchmark": {
		ours: []string{
			"conformance/testbed",
			"conformance/benchmark/results",
			"internal/lab",
			"internal/lab/control",
			"sync/snapshot",
		},
		others: []string{"*"},
	},
	"conformance/browser":        {},
	"conformance/nfteval":        {},
	"conformance/history":        {},
	"conformance/history/faulty": {others: []string{"*"}},
	"conformance/history/recorder": {
		ours: []string{
			"conformance/testbed",
			"conformance/benchmark",
			"conformance/benchmark/results",
			"conformance/history",
			"internal/lab",
			"sync/snapshot",
		},
		others: []string{"*"},
	},
	"conformance/cmd/history": {
		ours: []string{
			"conformance/testbed",
			"conformance/benchmark/results",
			"conformance/history",
			"conformance/history/faulty",
			"conformance/history/recorder",
			"internal/lab",
		},
		others: []string{"*"},
	},
	"deploy/release":             {others: []string{"*"}},
	"cmd/verdict":                {ours: []string{"*"}, others: []string{"*"}},
	"sync/snapshot/snapshottest": {ours: []string{"sync/snapshot"}},
}

// reserved are modules that only these packages may see. Of Kubernetes, internal/config sees kube-proxy's
// configuration only.
var reserved = map[string][]string{
	"k8s.io/": {
		"sync/watch",
		"internal/cluster",
		"internal/cluster/clustertest",
		"internal/collector",
		"internal/config",
		"internal/sloppy",
		"conformance/testbed",
		"conformance/cases",
		"conformance/run",
		"conformance/benchmark",
		"conformance/cluster",
		"conformance/cluster/stories",
		"conformance/history/faulty",
		"conformance/history/recorder",
		"internal/lab/control",
	},
	"github.com/google/nftables": {"ipvsplugin", "nft/kernel"},
	"github.com/mdlayher/":       {"internal/netlink"},
	"github.com/moby/ipvs":       {"internal/ipvshandle", "internal/takeover", "ipvsplugin"},
	"github.com/sirupsen/logrus": {"internal/ipvshandle"},
}

func TestLayers(t *testing.T) {
	root := filepath.Join("..", "..")
	seen := map[string]bool{}
	walk(t, root, func(file, pkg string, imports []string) {
		seen[pkg] = true
		rules, ok := layers[pkg]
		if !ok {
			t.Errorf("%s: package %s has no place in the house: give it one in internal/arch", file, pkg)
			return
		}
		for _, i := range imports {
			ours, isOurs := strings.CutPrefix(i, module)
			external := strings.Contains(strings.SplitN(i, "/", 2)[0], ".")
			switch {
			case isOurs && ours != everywhere && !slices.Contains(rules.ours, ours) && !slices.Contains(rules.ours, "*"):
				t.Errorf("%s: %s must not import %s", file, pkg, ours)
			case !isOurs && external && !allowed(rules.others, i):
				t.Errorf("%s: %s must not import %s", file, pkg, i)
			}
			for module, owners := range reserved {
				if strings.HasPrefix(i, module) && !slices.Contains(owners, pkg) {
					t.Errorf("%s: only %s may import %s", file, strings.Join(owners, " and "), i)
				}
			}
		}
	})
	for pkg := range layers {
		if !seen[pkg] {
			t.Errorf("package %s is gone: take it out of the table", pkg)
		}
	}
}

func allowed(modules []string, path string) bool {
	return slices.ContainsFunc(modules, func(m string) bool {
		return m == "*" || path == m || strings.HasPrefix(path, m+"/")
	})
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
