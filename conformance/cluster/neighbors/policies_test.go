package neighbors

import (
	"strings"
	"testing"
)

// TestQueueRules: only packets of pods that policies choose are decided in user space, each family's by rules of its
// own.
func TestQueueRules(t *testing.T) {
	ips := []string{"10.244.1.2", "fd00:10:244:1::2"}
	for i := range ips {
		rules := queueRules(ips, i == 1)
		if strings.Count(rules, "-j NFQUEUE") != 2 || !strings.Contains(rules, "-s "+ips[i]+" ") ||
			!strings.Contains(rules, "-d "+ips[i]+" ") || strings.Contains(rules, ips[1-i]) {
			t.Errorf("the rules for %s are:\n%s", ips[i], rules)
		}
		if none := queueRules(nil, i == 1); strings.Contains(none, "NFQUEUE") {
			t.Errorf("without pods, the rules are:\n%s", none)
		}
	}
}
