package xtables

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/verdict-proxy/verdict/internal/lab"
	"github.com/verdict-proxy/verdict/internal/lab/labtest"
	"github.com/verdict-proxy/verdict/internal/system/ipfamily"
)

// TestChoice says which variant is used on a host, by what is there before.
func TestChoice(t *testing.T) {
	const hint, canary = "*mangle\n:KUBE-IPTABLES-HINT - [0:0]\nCOMMIT\n",
		"*mangle\n:KUBE-KUBELET-CANARY - [0:0]\nCOMMIT\n"
	rules := func(n int) string { return "*filter\n" + strings.Repeat("-A INPUT -j ACCEPT\n", n) + "COMMIT\n" }
	const services = "*nat\n:KUBE-SERVICES - [0:0]\nCOMMIT\n"
	for _, row := range []struct {
		what        string
		nft, legacy []string
		six         bool
		want        Variant
		why         string
	}{
		{"nothing", nil, nil, false, NFT, "there are no rules"},
		{"a hint in nft", []string{hint}, []string{rules(3)}, false, NFT, "KUBE-IPTABLES-HINT"},
		{"a hint in legacy", []string{rules(3)}, []string{hint}, false, Legacy, "KUBE-IPTABLES-HINT"},
		{"a canary in legacy, IPv6", []string{rules(3)}, []string{canary}, true, Legacy, "KUBE-KUBELET-CANARY"},
		{"a canary in nft, IPv6", []string{canary}, []string{rules(3)}, true, NFT, "KUBE-KUBELET-CANARY"},
		{"a hint beats Services", []string{services}, []string{hint}, false, Legacy, "KUBE-IPTABLES-HINT"},
		{"Services in legacy beat rules", []string{rules(3)}, []string{services}, false, Legacy, "Service proxy"},
		{"Services in nft beat rules", []string{services}, []string{rules(3)}, false, NFT, "Service proxy"},
		{"more rules in legacy", []string{rules(2)}, []string{rules(3)}, false, Legacy, "more rules (3, the nft variant 2)"},
		{"as many rules", []string{rules(2)}, []string{rules(2)}, false, NFT, "more rules"},
	} {
		t.Run(row.what, func(t *testing.T) {
			h := newHost(t)
			load := func(v Variant, texts []string) {
				f := ipfamily.IPv4
				if row.six {
					f = ipfamily.IPv6
				}
				for _, text := range texts {
					labtest.Run(t, h, text, program(f)+"-"+v.String()+"-restore", "--noflush", "-w", "5")
				}
			}
			load(NFT, row.nft)
			load(Legacy, row.legacy)
			p := findOn(t, h)
			if p.Variant != row.want || !strings.Contains(p.Why, row.why) {
				t.Errorf("it is %s, for %q; want %s, for %q", p, p.Why, row.want, row.why)
			}
			if !p.Serves(ipfamily.IPv4) || !p.Serves(ipfamily.IPv6) || p.Version.before(minVersion) {
				t.Errorf("%v, %v, version %s", p.Missing(ipfamily.IPv4), p.Missing(ipfamily.IPv6), p.Version)
			}
		})
	}
}

// TestLookingLeavesLegacyAlone: to find the nft variant must not make tables of the legacy one, through which every
// packet would go.
func TestLookingLeavesLegacyAlone(t *testing.T) {
	h := newHost(t)
	p := findOn(t, h)
	for _, table := range []string{"nat", "filter", "mangle"} {
		if err := h.Do(func() error {
			if legacyHas(ipfamily.IPv4, table) || legacyHas(ipfamily.IPv6, table) {
				return errors.New("there is a legacy table " + table)
			}
			return nil
		}); err != nil {
			t.Error(err)
		}
	}
	if other, ok := p.OfVariant(soon(t), Legacy); !ok || other.Variant != Legacy {
		t.Errorf("the other variant: %v, %v", other, ok)
	}
}

// fakes makes a directory of programs, and has only these found. An entry is a name and what the program does, in a
// shell.
func fakes(t *testing.T, programs map[string]string) {
	t.Helper()
	dir := t.TempDir()
	for name, script := range programs {
		labtest.Check(t, os.WriteFile(filepath.Join(dir, name), []byte("#!/bin/sh\n"+script+"\n"), 0o755))
	}
	t.Setenv("PATH", dir)
	before := searchPath
	searchPath = nil
	t.Cleanup(func() { searchPath = before })
}

// family gives the programs that a family of a variant consists of, under a name.
func family(name, version string) map[string]string {
	plain, _, _ := strings.Cut(name, "-")
	real := "/usr/sbin/" + plain + "-nft"
	return map[string]string{
		name:              fmt.Sprintf(`[ "$1" = --version ] && { echo "%s"; exit; }; exec %s "$@"`, version, real),
		name + "-save":    "exec " + real + `-save "$@"`,
		name + "-restore": "exec " + real + `-restore "$@"`,
	}
}

func merge(all ...map[string]string) map[string]string {
	out := map[string]string{}
	for _, m := range all {
		for k, v := range m {
			out[k] = v
		}
	}
	return out
}

// TestPrograms says what is made of the programs that a host has.
func TestPrograms(t *testing.T) {
	h := newHost(t)
	broken := map[string]string{"iptables-legacy-restore": "echo 'iptables-restore v1.8.9 (legacy): " +
		"iptables-restore: unable to initialize table' >&2; exit 1"}
	for _, row := range []struct {
		what     string
		programs map[string]string
		want     string
		// why is what decided; err what is wrong with all, no6 with IPv6.
		why, err, no6 string
	}{
		{what: "none", err: "this host has no iptables program"},
		{what: "one variant under the plain name", programs: merge(family("iptables", "iptables v1.8.7 (nf_tables)"),
			family("ip6tables", "ip6tables v1.8.7 (nf_tables)")),
			want: "iptables 1.8.7, nft variant", why: "the only variant"},
		{what: "the legacy one alone", programs: merge(family("iptables", "iptables v1.8.11 (legacy)"),
			family("ip6tables", "ip6tables v1.8.11 (legacy)")),
			want: "iptables 1.8.11, legacy variant", why: "the only variant"},
		{what: "too old", programs: family("iptables", "iptables v1.6.1"),
			err: "iptables is version 1.6.1; 1.8.4 or later is needed"},
		{what: "just too old", programs: family("iptables-nft", "iptables v1.8.3 (nf_tables)"),
			err: "iptables-nft is version 1.8.3; 1.8.4 or later is needed"},
		{what: "no version", programs: family("iptables", "hello"), err: `says "hello", which is not a version of iptables`},
		{what: "without IPv6", programs: family("iptables", "iptables v1.8.4 (nf_tables)"),
			want: "iptables 1.8.4, nft variant", no6: "there is no ip6tables program of the nft variant"},
		{what: "without restore", programs: map[string]string{"iptables": "echo 'iptables v1.8.9 (nf_tables)'"},
			err: "this host has no iptables program"},
		{what: "one variant does not work", programs: merge(family("iptables-nft", "iptables v1.8.9 (nf_tables)"),
			family("iptables-legacy", "iptables v1.8.9 (legacy)"),
			map[string]string{"iptables-nft-restore": "echo 'iptables-nft-restore: " +
				"Could not fetch rule set generation id: Protocol not supported' >&2; exit 4"}),
			want: "iptables 1.8.9, legacy variant", no6: "no ip6tables program",
			why: "the nft variant does not work here: IPv4 iptables cannot be used: "},
		{what: "none works", programs: merge(family("iptables-legacy", "iptables v1.8.9 (legacy)"), broken),
			err: "unable to initialize table"},
	} {
		t.Run(row.what, func(t *testing.T) {
			fakes(t, row.programs)
			err := h.Do(func() error {
				p, err := Find(soon(t))
				if err != nil {
					return err
				}
				defer p.Close()
				if p.String() != row.want || !strings.Contains(p.Why, row.why) {
					t.Errorf("it is %s, for %q; want %s, for %q", p, p.Why, row.want, row.why)
				}
				if err := p.Missing(ipfamily.IPv6); (err != nil) != (row.no6 != "") || err != nil && !strings.Contains(err.Error(),
					row.no6) {
					t.Errorf("IPv6: %v; want %q", err, row.no6)
				}
				return nil
			})
			if (err != nil) != (row.err != "") || err != nil && !strings.Contains(err.Error(), row.err) {
				t.Errorf("it says %v; want %q", err, row.err)
			}
		})
	}
}

// TestRestoreErrors says what an error tells of what each variant says.
func TestRestoreErrors(t *testing.T) {
	for _, v := range variants {
		t.Run(v.String(), func(t *testing.T) {
			p := programsOf(t, newHost(t), v)
			for _, row := range []struct {
				text  string
				lines []int
				says  string
			}{
				{"*nat\n:KUBE-A - [0:0]\n-A KUBE-A --nonsense\nCOMMIT\n", []int{3}, "--nonsense"},
				{"*nat\n:KUBE-A - [0:0]\n-A KUBE-A -d 10.0.0.0.1 -j ACCEPT\nCOMMIT\n", []int{3}, "10.0.0.0.1"},
				{"*nat\n-X KUBE-NONE\nCOMMIT\n", []int{2}, "line"},
			} {
				err := p.Restore(soon(t), ipfamily.IPv4, []byte(row.text))
				var failed *RestoreError
				if !errors.As(err, &failed) {
					t.Errorf("%q: %v", row.text, err)
					continue
				}
				if !slices.Equal(failed.Lines, row.lines) || !strings.Contains(failed.Text, row.says) ||
					strings.Contains(failed.Text, "\n") {
					t.Errorf("%q: lines %d, it says %q", row.text, failed.Lines, failed.Text)
				}
			}
			labtest.Check(t, p.Restore(soon(t), ipfamily.IPv6, []byte("*nat\n:KUBE-A - [0:0]\nCOMMIT\n")))
			saved, err := p.Save(soon(t), ipfamily.IPv6, "nat", false)
			if labtest.Check(t, err); !strings.Contains(string(saved), "\n:KUBE-A - ") {
				t.Errorf("saved:\n%s", saved)
			}
			for chain, want := range map[string]bool{"KUBE-A": true, "KUBE-B": false} {
				if there, err := p.HasChain(soon(t), ipfamily.IPv6, "nat", chain); err != nil || there != want {
					t.Errorf("%s: %v, %v", chain, there, err)
				}
			}
		})
	}
}

// TestLock: another program that keeps the lock is waited for, and named when that takes too long.
func TestLock(t *testing.T) {
	path := filepath.Join(t.TempDir(), "xtables.lock")
	t.Setenv("XTABLES_LOCKFILE", path)
	h := newHost(t)
	p := programsOf(t, h, Legacy)
	lock, err := os.Create(path)
	labtest.Check(t, err)
	labtest.Check(t, unix.Flock(int(lock.Fd()), unix.LOCK_EX))
	err = p.Restore(soon(t), ipfamily.IPv4, []byte("*nat\n:KUBE-A - [0:0]\nCOMMIT\n"))
	var locked *LockedError
	if !errors.As(err, &locked) || locked.Waited != lockTimeout || !strings.Contains(err.Error(), "has held "+path) ||
		locked.Holder != os.Getpid() {
		t.Errorf("it says %v", err)
	}
	for chain, want := range map[string]bool{"KUBE-IPTABLES-HINT": true, "KUBE-IPTABLES": false} {
		if there, err := p.HasChain(soon(t), ipfamily.IPv4, "mangle", chain); err != nil || there != want {
			t.Errorf("while it is locked, %s: %v, %v", chain, there, err)
		}
	}
	labtest.Check(t, lock.Close())
	labtest.Check(t, p.Restore(soon(t), ipfamily.IPv4, []byte("*nat\n:KUBE-A - [0:0]\nCOMMIT\n")))
}

// TestUnreadable: where nft put rules that iptables has not, the nft variant prints nothing. In a table of ours that is
// an error, and not an empty table; in others it does not matter.
func TestUnreadable(t *testing.T) {
	h := newHost(t)
	p := programsOf(t, h, NFT)
	labtest.Check(t, p.Restore(soon(t), ipfamily.IPv4,
		[]byte("*raw\n:OTHERS - [0:0]\nCOMMIT\n*nat\n:KUBE-A - [0:0]\nCOMMIT\n")))
	labtest.Run(t, h, "", "nft", "add rule ip raw OTHERS ct state new accept")
	text, err := p.SaveText(soon(t), ipfamily.IPv4)
	if labtest.Check(t, err); !strings.Contains(string(text), "\n:KUBE-A ") {
		t.Errorf("with others' rules in table raw it reads\n%s", text)
	}
	labtest.Run(t, h, "", "nft", "add rule ip nat KUBE-A ct state new accept")
	for _, table := range []string{"nat", "filter", "raw"} {
		_, err := p.Save(soon(t), ipfamily.IPv4, table, false)
		if want := table != "filter"; (err != nil) != want {
			t.Errorf("table %s: %v", table, err)
		}
	}
	if _, err := p.SaveAll(soon(t), ipfamily.IPv4); err == nil || !strings.Contains(err.Error(),
		"cannot read table nat: ") {
		t.Errorf("with others' rules in table nat: %v", err)
	}
}

// compatOn gives a Compat of a host whose log goes to the test.
func compatOn(t *testing.T, h *lab.Host, v Variant) *Compat {
	return &Compat{Programs: programsOf(t, h, v), Bit: 14, Log: testLog(t)}
}
