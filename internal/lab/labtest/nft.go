package labtest

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/verdict-proxy/verdict/internal/lab"
)

// Nft is an nft program.
type Nft struct {
	Path string
	// Major and Minor are of its version.
	Major, Minor int
}

// Nfts gives the system's nft and those in the directory VERDICT_NFT_DIR, where `make test` puts other versions. That
// the system has none, or the directory, is a failure.
func Nfts(t testing.TB) []Nft {
	t.Helper()
	system, err := exec.LookPath("nft")
	if err != nil {
		t.Fatal("the tests of the ruleset need nft: install the package nftables, or run make test, which does")
	}
	paths := []string{system}
	if dir := os.Getenv("VERDICT_NFT_DIR"); dir != "" {
		more, _ := filepath.Glob(filepath.Join(dir, "nft-*"))
		if len(more) == 0 {
			t.Fatalf("VERDICT_NFT_DIR=%s holds no nft-* program", dir)
		}
		paths = append(paths, more...)
	}
	list := make([]Nft, len(paths))
	for i, p := range paths {
		out, err := exec.Command(p, "--version").Output()
		Check(t, err)
		list[i].Path = p
		if _, err := fmt.Sscanf(string(out), "nftables v%d.%d", &list[i].Major, &list[i].Minor); err != nil {
			t.Fatalf("%s --version: %q", p, out)
		}
	}
	return list
}

// NewNft gives an nft of 1.1 or later, which loads IPv6 session affinity, and on any kernel a set with ranges. Where
// make tools has fetched others, in VERDICT_NFT_DIR, one must be among them; without, a machine whose own is older
// skips the test.
func NewNft(t testing.TB) Nft {
	t.Helper()
	list := Nfts(t)
	if i := slices.IndexFunc(list, Nft.LoadsWideUpdates); i >= 0 {
		return list[i]
	}
	if dir := os.Getenv("VERDICT_NFT_DIR"); dir != "" {
		t.Fatalf("VERDICT_NFT_DIR=%s holds no nft from 1.1 on, as it does after make tools", dir)
	}
	t.Skip("the only nft here is older than 1.1; make tools fetches newer ones")
	return Nft{}
}

// LoadsWideUpdates says whether this nft loads an update of a map whose key or data is longer than 16 bytes, as session
// affinity has it in IPv6. 1.0.6 aborts on it; 1.1.3 is the first known to load it.
func (n Nft) LoadsWideUpdates() bool { return n.Major > 1 || n.Minor >= 1 }

// LoadsRanges says whether this nft loads, on this kernel, a rule that looks for a protocol in a set with ranges, as
// the source ranges of load balancers are. nft 1.0.6 puts a change of byte order before it, of one byte in steps of
// two: Linux 6.18 takes that and does nothing, 7.2 refuses it. That any other nft is refused, or for another reason, is
// a failure.
func (n Nft) LoadsRanges(t testing.TB, h *lab.Host) bool {
	t.Helper()
	const ranges = `table ip x {
		set ranges { typeof meta l4proto . ip saddr; flags interval; }
		chain c { meta l4proto . ip saddr @ranges accept; }
	}`
	out, err := h.RunInput(ranges, n.Path, "--check", "-f", "-")
	if err != nil && (n.Major > 1 || n.Minor >= 1 || !strings.Contains(out, "Operation not supported")) {
		t.Fatal(err)
	}
	return err == nil
}

var counterValues = regexp.MustCompile(`counter packets \d+ bytes \d+`)

// maxLists bounds how often a ruleset is listed until two listings in a row are the same.
const maxLists = 10

// List gives the host's ruleset as this nft lists it, without the counters' values. The elements of sets that nft lists
// in the order in which they came are sorted.
//
// The kernel gives a set that has grown more buckets a moment after the transaction. If that happens between two parts
// of a list, some elements come twice and others not at all, and nothing tells nft. So it lists until it sees the same
// twice; what expires is never the same.
func (n Nft) List(t testing.TB, h *lab.Host) string {
	t.Helper()
	text := n.list(t, h)
	for range maxLists {
		before := text
		if text = n.list(t, h); text == before {
			break
		}
	}
	return text
}

func (n Nft) list(t testing.TB, h *lab.Host) string {
	t.Helper()
	blocks := strings.Split(counterValues.ReplaceAllString(Run(t, h, "", n.Path, "list", "ruleset"), "counter"), "\n\n")
	for i, block := range blocks {
		head, elements, ok := strings.Cut(block, "elements = {")
		if !ok || !strings.Contains(head, "flags interval") {
			continue
		}
		list := strings.Split(strings.Trim(elements, "}\n\t "), ",")
		for k := range list {
			list[k] = strings.TrimSpace(list[k])
		}
		slices.Sort(list)
		blocks[i] = head + strings.Join(list, "\n")
	}
	return strings.Join(blocks, "\n\n")
}

// FirstDifference tells where two texts part.
func FirstDifference(got, want string) string {
	g, w := strings.Split(got, "\n"), strings.Split(want, "\n")
	for i := range min(len(g), len(w)) {
		if g[i] != w[i] {
			return fmt.Sprintf("line %d\ngot:  %s\nwant: %s", i+1, g[i], w[i])
		}
	}
	return fmt.Sprintf("got %d lines, want %d", len(g), len(w))
}
