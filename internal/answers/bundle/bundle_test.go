package bundle

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"context"
	"errors"
	"io"
	"maps"
	"net"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"github.com/verdict-proxy/verdict/internal/lab/labtest"
	"github.com/verdict-proxy/verdict/internal/proxy/status"
)

func TestMain(m *testing.M) { labtest.Main(m) }

// TestNoAddresses: each address has a name of its own, wherever it is written, and nothing else changes.
func TestNoAddresses(t *testing.T) {
	a := newAddresses()
	for _, test := range []struct{ text, want string }{
		{"10.96.0.10:53/udp, 10.96.0.10/32 and 10.96.0.1", "IPv4-1:53/udp, IPv4-1/32 and IPv4-2"},
		{"[fd00::1]:443, fd00::1. fd00:0:0::1: FD00::1/64", "[IPv6-1]:443, IPv6-1. IPv6-1: IPv6-1/64"},
		{`{"ip":"fd00::2","six":"::ffff:10.96.0.1"}`, `{"ip":"IPv6-2","six":"IPv4-2"}`},
		{"Source:10.96.0.1:80 source:fd00::2", "Source:IPv4-2:80 source:IPv6-2"},
		{"{ 10.96.0.1-10.96.0.9 : goto x, fd00:: . tcp . 80 }", "{ IPv4-2-IPv4-3 : goto x, IPv6-3 . tcp . 80 }"},
		{"ip-10-96-0-1.example, 10.96.00.1, fe80::1%eth0", "ip-IPv4-2.example, IPv4-2, IPv6-4%eth0"},
		{"2026-11-22T14:02:07.123Z 14:02:07 02:42:ac:11:00:02 1.2.3 fd00::1:2:3:4:5:6:7:8 a::b::c std::cerr", ""},
		{"digest 2331f21f49e315f7, v1.2.3, 999.1.1.1, a:b, ::", "digest 2331f21f49e315f7, v1.2.3, 999.1.1.1, a:b, IPv6-5"},
	} {
		if test.want == "" {
			test.want = test.text
		}
		if got := string(a.replace([]byte(test.text))); got != test.want {
			t.Errorf("%q becomes\n%q; want\n%q", test.text, got, test.want)
		}
	}
}

// TestNoSecrets: what looks like a token, a password or a key is left out, and its place is not.
func TestNoSecrets(t *testing.T) {
	for text, want := range map[string]string{
		"Authorization: Bearer abcdefgh.12345678":                              "Authorization: Bearer @",
		`"token": "abcdefgh", "f": "/run/token"`:                               `"token": "@", "f": "/run/token"`,
		"client-key-data: QUJDREVG\nname: x":                                   "client-key-data: @\nname: x",
		"sent eyJhbGciOiJSUzI1NiJ9.eyJpc3MiOiJrdWJl.c2lnbmF0 ok":               "sent @ ok",
		"-----BEGIN RSA PRIVATE KEY-----\nM\n-----END RSA PRIVATE KEY-----\nx": "@\nx",
		"everywhere.token: /run/x/token, password=hunter2":                     "everywhere.token: /run/x/token, password=@",
	} {
		want = strings.ReplaceAll(want, "@", hidden)
		if got := string(withoutSecrets([]byte(text))); got != want {
			t.Errorf("%q becomes\n%q; want\n%q", text, got, want)
		}
	}
}

// contents reads an archive.
func contents(t *testing.T, packed []byte) map[string]string {
	t.Helper()
	zip, err := gzip.NewReader(bytes.NewReader(packed))
	labtest.Check(t, err)
	files := map[string]string{}
	for r := tar.NewReader(zip); ; {
		h, err := r.Next()
		if errors.Is(err, io.EOF) {
			return files
		}
		labtest.Check(t, err)
		text, err := io.ReadAll(r)
		labtest.Check(t, err)
		files[h.Name] = string(text)
	}
}

func says(text string, err error) func(context.Context, io.Writer) error {
	return func(_ context.Context, w io.Writer) error {
		_, werr := io.WriteString(w, text)
		return errors.Join(werr, err)
	}
}

// TestArchive: the archives of nodes become directories of one, in which an address has one name; what is missing is
// named, and files are bounded.
func TestArchive(t *testing.T) {
	var one, two, all bytes.Buffer
	a := New(&one, false)
	a.most = 1 << 16
	labtest.Check(t, a.AddParts(t.Context(), "", []Part{{"status.json", says("at 10.0.0.2 and 10.0.0.1", nil)},
		{"none.txt", says("", nil)}, {"half.txt", says("half", errors.New("no more of 10.0.0.1"))},
		{"large.txt", func(_ context.Context, w io.Writer) error {
			for {
				if _, err := w.Write(bytes.Repeat([]byte("x"), 1<<12)); err != nil {
					return err
				}
			}
		}}}))
	labtest.Check(t, a.Close())
	b := New(&two, false)
	labtest.Check(t, b.Add("../../status.json", []byte("at 10.0.0.1")))
	labtest.Check(t, b.Close())
	c := New(&all, true)
	labtest.Check(t, c.AddArchive("node-10-0-0-1", one.Bytes()))
	labtest.Check(t, c.AddArchive("b", two.Bytes()))
	if err := c.AddArchive("c", []byte("no archive")); err == nil {
		t.Error("what is no archive is one")
	}
	c.Lacks("c", errors.New("no answer"))
	labtest.Check(t, c.Close())
	files := contents(t, all.Bytes())
	want := map[string]string{"node-IPv4-2/status.json": "at IPv4-1 and IPv4-2", "node-IPv4-2/half.txt": "half",
		"node-IPv4-2/missing.txt": "half.txt: no more of IPv4-2\n", "b/status.json": "at IPv4-2",
		"missing.txt": "c: no answer\n"}
	large := files["node-IPv4-2/large.txt"]
	delete(files, "node-IPv4-2/large.txt")
	if !maps.Equal(files, want) {
		t.Errorf("it has %.2000q", files)
	}
	if len(large) < a.most || len(large) > a.most+100 || !strings.Contains(large, "[cut after 64 KiB]") {
		t.Errorf("a file of %d bytes", len(large))
	}
}

// TestCountFlows: flows are counted by Service, protocol and state, and none is listed.
func TestCountFlows(t *testing.T) {
	h := labtest.NewHost(t, labtest.NewNet(t), "node")
	labtest.Run(t, h, "table inet t { chain c { type filter hook output priority 0; ct state new counter; }; }",
		"nft", "-f", "-")
	var text strings.Builder
	labtest.Check(t, h.Do(func() error {
		l, err := net.Listen("tcp", "127.0.0.1:8080")
		if err != nil {
			return err
		}
		defer l.Close()
		for range 2 {
			c, err := net.Dial("tcp", "127.0.0.1:8080")
			if err != nil {
				return err
			}
			defer c.Close()
		}
		u, err := net.Dial("udp", "127.0.0.2:5353")
		if err != nil {
			return err
		}
		defer u.Close()
		if _, err = u.Write([]byte("x")); err != nil {
			return err
		}
		if u, err = net.Dial("udp", "[::1]:30053"); err == nil {
			_, err = u.Write([]byte("x"))
			defer u.Close()
		}
		services := []status.Service{{Service: "shop/web", ClusterIPs: []netip.Addr{netip.MustParseAddr("127.0.0.1")},
			Ports: []status.PortOfState{{Protocol: "tcp", Port: 8080}}},
			{Service: "shop/dns", Ports: []status.PortOfState{{Protocol: "udp", Port: 53, NodePort: 30053}}}}
		return errors.Join(err, CountFlows(t.Context(), &text, services))
	}))
	var lines []string
	for line := range strings.Lines(text.String()) {
		lines = append(lines, strings.Join(strings.Fields(line), " "))
	}
	for _, want := range []string{"2 tcp ESTABLISHED shop/web", "1 udp unanswered -", "1 udp unanswered shop/dns"} {
		if !slices.Contains(lines, want) {
			t.Errorf("there is no line %q:\n%s", want, text.String())
		}
	}
}
