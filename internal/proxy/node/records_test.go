package node

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/verdict-proxy/verdict/internal/lab"
	"github.com/verdict-proxy/verdict/internal/lab/labtest"
	"github.com/verdict-proxy/verdict/internal/system/ipfamily"
	"github.com/verdict-proxy/verdict/internal/system/testkit"
	"github.com/verdict-proxy/verdict/sync/snapshot"
)

// recording runs proxies one after the other in a node.
type recording struct {
	*lab.Cluster
	t   *testing.T
	dir string
}

// start starts a proxy. End ends it by a signal.
func (n *recording) start(args ...string) (log *logBuffer, end func(syscall.Signal)) {
	n.t.Helper()
	log = &logBuffer{}
	cmd := n.Node.Command("/proc/self/exe", append([]string{"--backend=nftables", "--from", n.dir, "--keeper=none",
		"--hostname-override=node", "-v=2"}, args...)...)
	cmd.Env = append(os.Environ(), beToy+"=1")
	cmd.Stdout, cmd.Stderr = log, log
	labtest.Check(n.t, cmd.Start())
	ended := false
	end = func(s syscall.Signal) {
		if !ended {
			ended = true
			if err := errors.Join(cmd.Process.Signal(s), cmd.Wait()); err != nil && s != syscall.SIGKILL {
				n.t.Errorf("%v\n%s", err, log.String())
			}
		}
	}
	n.t.Cleanup(func() { end(syscall.SIGKILL) })
	testkit.Eventually(n.t, 30*time.Second, "the proxy's start", func() bool {
		return strings.Contains(log.String(), "all Services are programmed")
	}, log.String)
	return log, end
}

// sysctls waits for the sysctls of records: acct, timestamp and events.
func (n *recording) sysctls(when string, want string) {
	n.t.Helper()
	var got string
	testkit.Eventually(n.t, 10*time.Second, when+": acct, timestamp and events "+want, func() bool {
		got = ""
		labtest.Check(n.t, n.Node.Do(func() error {
			for _, s := range recordSysctls {
				text, err := os.ReadFile("/" + s.Path)
				if err != nil {
					return err
				}
				got += strings.TrimSpace(string(text)) + " "
			}
			return nil
		}))
		return got == want+" "
	}, func() string { return got })
}

// TestRecords: a proxy records if it is told to. The sysctls that it has set for that are put back when it ends, and
// after a crash by the next one without records, or by cleanup.
func TestRecords(t *testing.T) {
	n := &recording{Cluster: labtest.NewCluster(t, lab.Config{LocalPods: 1, RemotePods: 1}), t: t, dir: t.TempDir()}
	text := webManifest
	for _, f := range lab.Families() {
		text += fmt.Sprintf(sliceManifest, fmt.Sprint("IPv", f.Version()))
		text += fmt.Sprintf("  - {addresses: [\"%v\"], conditions: {ready: true}}\n", n.RemotePods[0].IP(f))
	}
	labtest.Check(t, os.WriteFile(filepath.Join(n.dir, "web.yaml"), []byte(text), 0o644))
	for name, value := range map[string]string{"acct": "0", "timestamp": "0", "events": "0"} {
		labtest.Check(t, n.Node.Sysctl("net/netfilter/nf_conntrack_"+name, value))
	}
	_, end := n.start()
	n.sysctls("without records", "0 0 0")
	end(syscall.SIGTERM)

	file := filepath.Join(n.dir, "flows.jsonl")
	_, end = n.start("--records=on", "--records-file="+file)
	n.sysctls("with records", "1 1 1")
	kept := func() string {
		text, err := os.ReadFile(file)
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			t.Fatal(err)
		}
		return string(text)
	}
	shop := &shopNode{}
	for _, f := range []ipfamily.Family{ipfamily.IPv4, ipfamily.IPv6} {
		if r := n.Pods[0].Dial(snapshot.TCP, shop.web(f), lab.Options{}); r.Outcome != lab.Refused {
			t.Error(r)
		}
		testkit.Eventually(t, 20*time.Second, "a record", func() bool {
			for line := range strings.Lines(kept()) {
				if strings.Contains(line, "refused by endpoint") && strings.Contains(line, n.Pods[0].IP(f).String()) {
					return true
				}
			}
			return false
		}, kept)
	}
	end(syscall.SIGTERM)
	n.sysctls("after the end", "0 0 0")

	_, end = n.start("--records=on")
	n.sysctls("with records once more", "1 1 1")
	end(syscall.SIGKILL)
	n.sysctls("after a crash", "1 1 1")
	_, end = n.start("--records=on")
	end(syscall.SIGKILL)
	_, end = n.start()
	n.sysctls("after a crash, and a start without records", "0 0 0")
	end(syscall.SIGTERM)

	_, end = n.start("--records=on")
	n.sysctls("with records again", "1 1 1")
	end(syscall.SIGKILL)
	labtest.Check(t, n.Node.Do(func() error {
		changed, err := RestoreSysctls()
		if len(changed) != len(recordSysctls) {
			t.Errorf("cleanup changes %+v", changed)
		}
		return err
	}))
	n.sysctls("after a crash, and cleanup", "0 0 0")
}
