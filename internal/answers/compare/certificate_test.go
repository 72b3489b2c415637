package compare_test

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/verdict-proxy/verdict/internal/answers/compare"
	"github.com/verdict-proxy/verdict/internal/lab/labtest"
)

// TestCertificate compares, changes one element in the kernel, and checks the certificate against what is there now.
func TestCertificate(t *testing.T) {
	m := load(t, "../../../examples/cluster.yaml", "--hostname-override", "node-1", "--cluster-cidr",
		"10.244.0.0/16,fd00:10:244::/48")
	h := write(t, m.state)
	certify := func() *compare.Certificate {
		in := compare.Input{Host: m.host, Pods: podsOf(m.state), State: m.state,
			Sides: []compare.Side{compare.NewSide(compare.Verdict, read(t, h, "verdict", m.host))}}
		r, err := compare.Compare(in)
		labtest.Check(t, err)
		return compare.NewCertificate(in, r, "node-1", "a file", "(devel)", time.Second)
	}
	file := filepath.Join(t.TempDir(), "certificate.json")
	f, err := os.Create(file)
	labtest.Check(t, err)
	labtest.Check(t, certify().Write(f))
	labtest.Check(t, f.Close())
	then, err := compare.ReadCertificate(file)
	labtest.Check(t, err)
	if changed := then.Check(certify()); len(changed) != 0 || !then.Result.OK() {
		t.Errorf("nothing has changed, and Check says %q", changed)
	}
	_, err = h.Run("nft", "delete", "element", "ip", "verdict", "hairpin", "{ 10.244.1.2 . 10.244.1.2 }")
	labtest.Check(t, err)
	now := certify()
	changed := strings.Join(then.Check(now), "\n")
	if !strings.Contains(changed, "verdict has changed") || !strings.Contains(changed, "packets meet another fate") {
		t.Errorf("a hairpin is not masqueraded any more, and Check says %q", changed)
	}
	if now.Result.OK() || !strings.Contains(now.Text(), "NO KNOWN REASON") || !strings.Contains(now.Text(), "kube-dns") {
		t.Errorf("the text is:\n%s", now.Text())
	}
}

// TestCompiled has the rules written into a namespace of their own, and finds nothing of them here.
func TestCompiled(t *testing.T) {
	m := load(t, "../../../examples/cluster.yaml", "--hostname-override", "node-1", "--cluster-cidr",
		"10.244.0.0/16,fd00:10:244::/48")
	side, err := compare.Compile(m.state, m.host)
	labtest.Check(t, err)
	r, err := compare.Compare(compare.Input{Host: m.host, Pods: podsOf(m.state), State: m.state,
		Sides: []compare.Side{side}})
	labtest.Check(t, err)
	if r.Same != r.Classes || r.Classes < 1000 {
		t.Errorf("%d of %d classes are the same", r.Same, r.Classes)
	}
	h := labtest.NewHost(t, labtest.NewNet(t), "node")
	if rules := read(t, h, "verdict", m.host); rules.Size().Tables != 0 {
		t.Errorf("another namespace has %+v", rules.Size())
	}
}
