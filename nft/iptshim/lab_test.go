package iptshim

import (
	"bytes"
	"os/exec"
	"strings"
	"testing"
)

// variants are the two programs that write the same rules in different ways.
var variants = []string{"legacy", "nft"}

// netns is a network namespace that a test has for itself.
type netns struct {
	t    testing.TB
	name string
}

func newNetns(t testing.TB) *netns {
	t.Helper()
	n := &netns{t, "ipt-" + strings.ToLower(hash(t.Name()))}
	_ = exec.Command("ip", "netns", "del", n.name).Run()
	if out, err := exec.Command("ip", "netns", "add", n.name).CombinedOutput(); err != nil {
		t.Fatalf("ip netns add: %v: %s", err, out)
	}
	t.Cleanup(func() { _ = exec.Command("ip", "netns", "del", n.name).Run() })
	return n
}

// program gives the name of one of iptables' programs.
func program(f Family, variant, what string) string {
	return map[Family]string{IPv4: "iptables-", IPv6: "ip6tables-"}[f] + variant + "-" + what
}

// run runs a program in the namespace.
func (n *netns) run(input []byte, name string, args ...string) (string, error) {
	c := exec.Command("nsenter", append([]string{"--net=/run/netns/" + n.name, name}, args...)...)
	c.Stdin = bytes.NewReader(input)
	out, err := c.CombinedOutput()
	return string(out), err
}

// restore writes a text.
func (n *netns) restore(f Family, variant string, text []byte) {
	n.t.Helper()
	if len(text) == 0 {
		return
	}
	if out, err := n.run(text, program(f, variant, "restore"), "--noflush", "-w", "5"); err != nil {
		n.t.Fatalf("%s: %v: %s\n%s", program(f, variant, "restore"), err, out, text)
	}
}

// save reads all tables of ours.
func (n *netns) save(f Family, variant string) *Saved {
	n.t.Helper()
	var all []byte
	for _, t := range Tables {
		out, err := n.run(nil, program(f, variant, "save"), "-t", string(t))
		if err != nil {
			n.t.Fatalf("%s -t %s: %v: %s", program(f, variant, "save"), t, err, out)
		}
		all = append(all, out...)
	}
	saved, err := Parse(all)
	if err != nil {
		n.t.Fatal(err)
	}
	return saved
}
