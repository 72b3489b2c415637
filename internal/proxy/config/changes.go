package config

import (
	"fmt"
	"io"

	"k8s.io/kube-proxy/config/v1alpha1"
	"sigs.k8s.io/yaml"
)

// Change is a field in which two Settings differ.
type Change struct {
	Field       string
	Before, Now string
	Effect      Effect
}

// String gives "clusterCIDR: 10.244.0.0/16, was 10.0.0.0/8".
func (c Change) String() string { return fmt.Sprintf("%s: %s, was %s", c.Field, c.Now, c.Before) }

// Changes returns the fields in which these settings differ from the earlier ones, in kube-proxy's order. A field of a
// section that does not apply in the mode has no effect.
func (s *Settings) Changes(before *Settings) (changes []Change) {
	for i := range fields {
		f := &fields[i]
		if s.Document.equal(f.path(), &before.Document) {
			continue
		}
		c := Change{f.name, before.Document.text(f.path()), s.Document.text(f.path()), f.effect}
		if !f.appliesIn(s.Document.KubeProxy.Mode) {
			c.Effect = Never
		}
		changes = append(changes, c)
	}
	return changes
}

// KubeProxy returns the configuration in kube-proxy's type, as its /configz shows it. Callers must not change it.
func (s *Settings) KubeProxy() *v1alpha1.KubeProxyConfiguration {
	c := s.Document.KubeProxy
	for _, address := range []*string{&c.HealthzBindAddress, &c.MetricsBindAddress} {
		if *address == off {
			*address = ""
		}
	}
	return &c
}

// Write writes the settings as a configuration file: kube-proxy's document, then ours. kube-proxy reads the first one.
func (s *Settings) Write(w io.Writer) error {
	theirs, err := yaml.Marshal(s.KubeProxy())
	if err != nil {
		return err
	}
	ours, err := yaml.Marshal(s.Document.Verdict)
	if err != nil {
		return err
	}
	_, err = fmt.Fprintf(w, "%s---\n%s", theirs, ours)
	return err
}
