package compare

import (
	"encoding/json"
	"fmt"
	"io"
	"net/netip"
	"os"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/verdict-proxy/verdict/internal/system/packets"
	"github.com/verdict-proxy/verdict/internal/system/units"
)

// CertificateFormat is the version of a certificate's fields.
const CertificateFormat = 1

// Certificate says what was compared, and what was found. With the same input, another comparison finds the same.
type Certificate struct {
	Format  int       `json:"format"`
	Made    time.Time `json:"made"`
	Verdict string    `json:"verdict"`
	Kernel  string    `json:"kernel"`
	Node    string    `json:"node"`
	// Addresses are the node's.
	Addresses []netip.Addr `json:"addresses"`
	// Objects names the source of the objects; empty if there were none.
	Objects string            `json:"objects,omitempty"`
	Sides   []CertificateSide `json:"sides"`
	// Seconds is how long the walks took.
	Seconds float64 `json:"seconds"`
	Result  *Result `json:"result"`
}

// CertificateSide identifies what one side consisted of.
type CertificateSide struct {
	Name   string       `json:"name"`
	Digest string       `json:"digest"`
	Size   packets.Size `json:"size"`
}

// NewCertificate describes a comparison.
func NewCertificate(in Input, r *Result, node, objects, version string, took time.Duration) *Certificate {
	c := &Certificate{Format: CertificateFormat, Made: time.Now().UTC().Truncate(time.Second), Verdict: version,
		Kernel: kernelRelease(), Node: node, Addresses: in.Host, Objects: objects, Seconds: took.Seconds(), Result: r}
	sides := in.Sides
	if in.State != nil {
		sides = append([]Side{{Name: ObjectSide, Digest: newObjects(in.State, in.Host).digest()}}, sides...)
	}
	for _, s := range sides {
		c.Sides = append(c.Sides, CertificateSide{s.Name, fmt.Sprintf("%x", s.Digest), s.Size})
	}
	return c
}

func kernelRelease() string {
	var u unix.Utsname
	if err := unix.Uname(&u); err != nil {
		return ""
	}
	return unix.ByteSliceToString(u.Release[:])
}

// Write writes a certificate as JSON.
func (c *Certificate) Write(w io.Writer) error {
	e := json.NewEncoder(w)
	e.SetIndent("", "  ")
	return e.Encode(c)
}

// ReadCertificate reads a certificate from a file.
func ReadCertificate(path string) (*Certificate, error) {
	text, err := os.ReadFile(path)
	if err != nil {
		return nil, err
	}
	c := &Certificate{}
	if err := json.Unmarshal(text, c); err != nil {
		return nil, fmt.Errorf("%s: %w", path, err)
	}
	if c.Format != CertificateFormat || c.Result == nil {
		return nil, fmt.Errorf("%s: format %d is not known, or the result is missing", path, c.Format)
	}
	return c, nil
}

// Check compares a certificate with one that was made now, and returns what does not hold any more; none if all does.
func (c *Certificate) Check(now *Certificate) (changed []string) {
	say := func(format string, args ...any) { changed = append(changed, fmt.Sprintf(format, args...)) }
	if c.Node != now.Node {
		say("it is the certificate of node %s, and this is %s", c.Node, now.Node)
	}
	if c.Kernel != now.Kernel {
		say("the kernel was %s, and is %s", c.Kernel, now.Kernel)
	}
	if a, b := fmt.Sprint(c.Addresses), fmt.Sprint(now.Addresses); a != b {
		say("the node's addresses have changed")
	}
	then := map[string]CertificateSide{}
	for _, s := range c.Sides {
		then[s.Name] = s
	}
	for _, s := range now.Sides {
		old, there := then[s.Name]
		switch delete(then, s.Name); {
		case !there:
			say("%s was not compared then", s.Name)
		case old.Digest != s.Digest:
			say("%s has changed: %.12s, and was %.12s", s.Name, s.Digest, old.Digest)
		}
	}
	for name := range then {
		say("%s is gone", name)
	}
	if c.Result.Digest != now.Result.Digest {
		say("packets meet another fate: %.12s, and was %.12s", now.Result.Digest, c.Result.Digest)
	}
	return changed
}

// OK reports whether every class is the same on all sides, or differs for a reason that is known.
func (r *Result) OK() bool { return r.Unexplained == 0 && r.Unknown == 0 }

// Text describes the result, in a bounded number of lines.
func (c *Certificate) Text() string {
	var b strings.Builder
	r := c.Result
	names := make([]string, len(c.Sides))
	for i, s := range c.Sides {
		names[i] = fmt.Sprintf("%s (%s)", s.Name, sizeText(s))
	}
	fmt.Fprintf(&b, "%s: %s\n", c.Node, strings.Join(names, ", "))
	fmt.Fprintf(&b, "%s classes of packets to %s destinations, %s the same, %s differ\n", units.Thousands(r.Classes),
		units.Thousands(r.Destinations), units.Thousands(r.Same), units.Thousands(r.Explained+r.Unexplained))
	if r.Explained > 0 {
		fmt.Fprintf(&b, "%s of the differences have a known reason, %s have none\n", units.Thousands(r.Explained),
			units.Thousands(r.Unexplained))
	}
	if r.Scheduled > 0 {
		fmt.Fprintf(&b, "%s more are left to IPVS, which chooses the endpoint\n", units.Thousands(r.Scheduled))
	}
	if r.Unknown > 0 {
		fmt.Fprintf(&b, "%s more could not be followed:\n", units.Thousands(r.Unknown))
		for _, e := range r.Errors {
			fmt.Fprintf(&b, "  %.300s\n", e)
		}
	}
	for i := range r.Groups {
		if i == maxTextGroups {
			fmt.Fprintf(&b, "\nand %d more groups: -o json\n", len(r.Groups)-i)
			break
		}
		r.Groups[i].write(&b)
	}
	return b.String()
}

// maxTextGroups bounds the groups of a text.
const maxTextGroups = 30

func sizeText(s CertificateSide) string {
	if s.Size == (packets.Size{}) {
		return fmt.Sprintf("%.12s", s.Digest)
	}
	return fmt.Sprintf("%s rules, %s elements, %.12s", units.Thousands(s.Size.Rules), units.Thousands(s.Size.Elements),
		s.Digest)
}

func (g *Group) write(b *strings.Builder) {
	reason := "NO KNOWN REASON"
	for _, r := range Reasons {
		if r.Name == g.Reason {
			reason = r.Name + ": " + r.Text
		}
	}
	fmt.Fprintf(b, "\n%s: %s, from %s. %s\n", units.Thousands(g.Count), g.Kind, g.Sender, reason)
	for _, d := range g.Examples {
		service, remembered := "", ""
		if d.Service != "" {
			service = " (" + d.Service + ")"
		}
		if d.Remembered != "" {
			remembered = ", remembered with " + d.Remembered
		}
		fmt.Fprintf(b, "  %s to %s%s%s\n    %s: %s\n    %s: %s\n", d.Source, d.Destination, service, remembered,
			d.Sides[0], d.Outcomes[0], d.Sides[1], d.Outcomes[1])
		if g.Reason != "" {
			break // one example is enough of what is known
		}
	}
}
