package main

import (
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"syscall"
	"testing"

	"github.com/verdict-proxy/verdict/internal/lab"
	"github.com/verdict-proxy/verdict/internal/lab/labtest"
	"github.com/verdict-proxy/verdict/internal/system/ipfamily"
	"github.com/verdict-proxy/verdict/internal/system/testkit"
	"github.com/verdict-proxy/verdict/sync/snapshot"
)

// ejecting is a node with a proxy, of whose Service shop/web one of two endpoints refuses.
type ejecting struct {
	*lab.Cluster
	t        *testing.T
	dir, log string
	flags    []string
	proxy    *lab.Cmd
}

const ejectingObjects = `apiVersion: v1
kind: Service
metadata: {name: web, namespace: shop}
spec:
  clusterIP: %[1]v
  clusterIPs: ["%[1]v"]
  ipFamilies: [IPv4]
  ports: [{name: http, port: 80, protocol: TCP}]
---
apiVersion: v1
kind: Node
metadata: {name: node}
status: {addresses: [{type: InternalIP, address: %[4]v}]}
---
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata: {name: web, namespace: shop, labels: {kubernetes.io/service-name: web}}
addressType: IPv4
ports: [{name: http, port: 8080, protocol: TCP}]
endpoints:
- {addresses: ["%[2]v"], conditions: {ready: true}}
- {addresses: ["%[3]v"], conditions: {ready: true}}
`

// newEjecting starts the proxy and waits until the endpoint is ejected.
func newEjecting(t *testing.T, flags ...string) *ejecting {
	t.Helper()
	e := &ejecting{t: t, Cluster: labtest.NewCluster(t, lab.Config{LocalPods: 1, RemotePods: 2}), dir: t.TempDir(),
		flags: flags}
	var servers []*lab.Server
	for _, pod := range e.RemotePods {
		s, err := pod.Serve(snapshot.TCP, 8080)
		labtest.Check(t, err)
		servers = append(servers, s)
	}
	const four = ipfamily.IPv4
	text := fmt.Sprintf(ejectingObjects, e.frontend().Addr(), e.dead(), e.RemotePods[1].IP(four), e.Node.IP(four))
	labtest.Check(t, os.WriteFile(filepath.Join(e.dir, "web.yaml"), []byte(text), 0o644))
	e.start()
	dial := func(times int) {
		for range times {
			e.Pods[0].Dial(snapshot.TCP, e.frontend(), lab.Options{Timeout: patience})
		}
	}
	dial(32) // both have accepted the client
	labtest.Check(t, servers[0].Close())
	testkit.Eventually(t, patience, "the ejection", func() bool {
		dial(8)
		return strings.Contains(e.said(), "ejected an endpoint")
	}, e.said)
	return e
}

func (e *ejecting) frontend() netip.AddrPort {
	return netip.AddrPortFrom(lab.Nth(lab.ServiceRange[ipfamily.IPv4], 1), 80)
}

// dead is the endpoint that refuses.
func (e *ejecting) dead() netip.Addr { return e.RemotePods[0].IP(ipfamily.IPv4) }

func (e *ejecting) start() {
	e.t.Helper()
	e.log = filepath.Join(e.t.TempDir(), "log")
	log, err := os.Create(e.log)
	labtest.Check(e.t, err)
	defer log.Close()
	e.proxy = e.Node.Command("/proc/self/exe", append([]string{"run", "--backend=nftables", "--from", e.dir,
		"--hostname-override=node", "--keeper=none", "--cluster-cidr=10.244.0.0/16"}, e.flags...)...)
	e.proxy.Env = append(os.Environ(), beVerdict+"=1")
	e.proxy.Stdout, e.proxy.Stderr = log, log
	labtest.Check(e.t, e.proxy.Start())
	running := e.proxy
	e.t.Cleanup(func() {
		_ = running.Process.Kill() // it may have ended
		_ = running.Wait()
	})
	testkit.Eventually(e.t, patience, "the proxy's start", func() bool {
		return strings.Contains(e.said(), "all Services are programmed")
	}, e.said)
}

func (e *ejecting) said() string {
	text, err := os.ReadFile(e.log)
	labtest.Check(e.t, err)
	return string(text)
}

// verdict runs a command on the node and gives its exit status.
func (e *ejecting) verdict(args ...string) (out string, status int) {
	e.t.Helper()
	labtest.Check(e.t, e.Node.Do(func() error {
		var err error
		out, err = command(args...)
		var s exitStatus
		if errors.As(err, &s) {
			status, err = int(s), nil
		}
		return err
	}))
	return out, status
}

// TestEjectionIsTold: explain, diff, verify, plan, top and the log say the same of an ejection, whether the proxy has a
// health server or not. Only two endpoints are there: then no pool has two left, and no rule tells the setting.
func TestEjectionIsTold(t *testing.T) {
	for _, flags := range [][]string{nil, {"--healthz-bind-address="}} {
		t.Run(fmt.Sprint(flags), func(t *testing.T) {
			e := newEjecting(t, flags...)
			from := []string{"--from", e.dir, "--hostname-override=node"}
			ejected := fmt.Sprintf(`%s:8080 of shop/web, refused since \S+, by this node`, e.dead())
			packet := []string{"explain", e.Pods[0].IP(ipfamily.IPv4).String(), e.frontend().String() + "/tcp", "--live"}
			for _, c := range []struct {
				args []string
				says []string
			}{
				{append(packet, from...), []string{"does the same", `refused since \S+, ejected on this node`, ejected}},
				{packet, []string{fmt.Sprintf(`%s:8080 +refused since \S+, ejected on this node`, e.dead())}},
				{append([]string{"diff"}, from...), []string{"(?m)^same: ", "# ejected: " + ejected}},
				{append([]string{"verify"}, from...), []string{"right: ", "# ejected: " + ejected}},
				{[]string{"verify"}, []string{"right: "}},
				{[]string{"top", "--once", "--interval=100ms"},
					[]string{"1 ejected", fmt.Sprintf(`%s:8080  refused since \S+, ejected`, e.dead())}},
			} {
				out, status := e.verdict(c.args...)
				for _, want := range c.says {
					if !regexp.MustCompile(want).MatchString(out) {
						t.Errorf("%v does not say %q:\n%s", c.args, want, out)
					}
				}
				for _, lie := range []string{"observe", "something else", "taken from the kernel's rules"} {
					if strings.Contains(out, lie) {
						t.Errorf("%v says %q:\n%s", c.args, lie, out)
					}
				}
				if status != 0 {
					t.Errorf("%v: status %d\n%s", c.args, status, out)
				}
			}
			e.checkStatus(flags == nil)
			if t.Failed() {
				t.Log(e.said())
			}
		})
	}
}

// TestLastResortIsTold: explain, diff, verify and the kernel say the same of a last resort.
func TestLastResortIsTold(t *testing.T) {
	e := &ejecting{t: t, Cluster: labtest.NewCluster(t, lab.Config{LocalPods: 1, RemotePods: 2}), dir: t.TempDir(),
		flags: []string{"--last-resort=on", "--healthz-bind-address="}}
	_, err := e.RemotePods[1].Serve(snapshot.TCP, 8080)
	labtest.Check(t, err)
	const four = ipfamily.IPv4
	answers := e.RemotePods[1].IP(four)
	text := fmt.Sprintf(ejectingObjects, e.frontend().Addr(), e.dead(), answers, e.Node.IP(four))
	text = strings.ReplaceAll(text, "ready: true", "ready: false")
	labtest.Check(t, os.WriteFile(filepath.Join(e.dir, "web.yaml"), []byte(text), 0o644))
	e.start()
	testkit.Eventually(t, patience, "the last resort", func() bool {
		return strings.Contains(e.said(), "a last resort is used")
	}, e.said)
	from := []string{"--from", e.dir, "--hostname-override=node"}
	told := fmt.Sprintf(`%s:8080 of shop/web, last-resort since \S+, by this node`, answers)
	packet := []string{"explain", e.Pods[0].IP(four).String(), e.frontend().String() + "/tcp", "--live"}
	for _, c := range []struct {
		args []string
		says []string
	}{
		{append(packet, from...), []string{"does the same", `last-resort since \S+: not ready, but it accepts probes`,
			fmt.Sprintf(`%s:8080 .*not known to accept a probe`, e.dead()), told}},
		{packet, []string{`last-resort since \S+: not ready, but it accepts probes`}},
		{append([]string{"diff"}, from...), []string{"(?m)^same: ", "# not ready: " + told}},
		{append([]string{"verify"}, from...), []string{"right: ", "# not ready: " + told}},
	} {
		out, status := e.verdict(c.args...)
		for _, want := range c.says {
			if !regexp.MustCompile(want).MatchString(out) {
				t.Errorf("%v does not say %q:\n%s", c.args, want, out)
			}
		}
		if status != 0 {
			t.Errorf("%v: status %d\n%s", c.args, status, out)
		}
	}
	labtest.Check(t, e.Node.Do(func() error {
		out, _ := command("status") // an error, as no server is there
		want := fmt.Sprintf(`not ready +%s:8080 of shop/web:http, last-resort since `, answers)
		if !regexp.MustCompile(want).MatchString(out) {
			t.Errorf("status:\n%s", out)
		}
		return nil
	}))
}

// checkStatus: status tells of the ejection by the proxy's answer or, if there is none, by the kernel; the log has it,
// too.
func (e *ejecting) checkStatus(answers bool) {
	e.t.Helper()
	labtest.Check(e.t, e.Node.Do(func() error {
		out, err := command("status")
		want := fmt.Sprintf(`ejected +1 endpoint\n +%s:8080 of shop/web for .*: refused`, e.dead())
		if !answers {
			want = fmt.Sprintf(`(?s)--second-chance=on\n.*ejected +%s:8080 of shop/web:http, refused since `, e.dead())
		}
		if answers != (err == nil) || !regexp.MustCompile(want).MatchString(out) {
			e.t.Errorf("status: %v; it does not say %q:\n%s", err, want, out)
		}
		return nil
	}))
	want := fmt.Sprintf(`msg="ejected an endpoint: refused" service=shop/web endpoint=%s:8080 `, e.dead())
	if !strings.Contains(e.said(), want) {
		e.t.Errorf("the log does not say %q", want)
	}
}

// TestEjectionEndsWithItsProcess: health is not kept. What a process that was killed has said of endpoints, its
// successor takes back with its first write, and both endpoints are in use again.
func TestEjectionEndsWithItsProcess(t *testing.T) {
	e := newEjecting(t, "--healthz-bind-address=")
	held := func() string {
		return labtest.Run(t, e.Node, "", "nft", "list", "set", "ip", "verdict", "unhealthy-endpoints")
	}
	if text := held(); !strings.Contains(text, `comment "shop/web:http, ejected, refused since `) {
		t.Errorf("the kernel holds\n%s", text)
	}
	labtest.Check(t, e.proxy.Process.Signal(syscall.SIGKILL))
	_ = e.proxy.Wait() // an error, as it was killed
	e.start()
	if text := held(); strings.Contains(text, "elements") {
		t.Errorf("after a restart the kernel holds\n%s", text)
	}
	out, status := e.verdict("diff", "--from", e.dir, "--hostname-override=node")
	if status != 0 || strings.Contains(out, "ejected") {
		t.Errorf("diff after a restart: %d\n%s", status, out)
	}
}
