package main

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/verdict-proxy/verdict/internal/lab/labtest"
	"github.com/verdict-proxy/verdict/internal/proxy/config"
)

// TestOtherThanRun: --write-config-to, --version and --cleanup do not run, and wrong values are not written as if
// nothing were.
func TestOtherThanRun(t *testing.T) {
	path := filepath.Join(t.TempDir(), "written.conf")
	_, err := command("run", "--write-config-to", path, "--cluster-cidr=10.244.0.0/16", "--keeper=none")
	labtest.Check(t, err)
	s, problems, err := config.Load(path, nil, nil)
	labtest.Check(t, err)
	if len(problems) > 0 || len(s.Policy.DetectLocal.ClusterCIDRs) != 1 || s.Keeper != "none" {
		t.Errorf("%+v, %v", s, problems)
	}
	_, err = command("run", "--config", labtest.ConfigFile(t, "nodePortAddresses: [10.0.0.0/33]\noomScoreAdj: 9999\n"),
		"--write-config-to", path+"2")
	if err == nil || strings.Count(err.Error(), "\n") != 2 {
		t.Errorf("it does not name each value that is wrong: %v", err)
	}
	if _, err := os.Stat(path + "2"); err == nil {
		t.Error("it is written all the same")
	}
	out, err := command("run", "--version")
	if labtest.Check(t, err); !strings.HasPrefix(out, "verdict ") {
		t.Errorf("--version: %q", out)
	}
	if _, err := command("run", "more"); err == nil {
		t.Error("arguments are taken")
	}
}
