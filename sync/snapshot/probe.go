package snapshot

import "strings"

// LastResort says whether endpoints that are not ready are used while their Service has no other. The zero value leaves
// it to the setting of the node.
type LastResort uint8

const (
	// LastResortDefault is the node's setting.
	LastResortDefault LastResort = iota
	// LastResortOn uses those that answer a probe of this node.
	LastResortOn
	// LastResortOff uses none.
	LastResortOff
)

var lastResortNames = []string{"", "on", "off"}

// String returns what ParseLastResort reads; empty for LastResortDefault.
func (l LastResort) String() string { return lastResortNames[l] }

// ParseLastResort reads "on" or "off". It is not ok for any other text.
func ParseLastResort(text string) (l LastResort, ok bool) {
	return byName[LastResort](lastResortNames, text)
}

// Probe is how this node finds out whether an endpoint works. It is comparable; the zero Probe asks for nothing.
type Probe struct {
	// Asked says that endpoints are probed while clients use them, and not only once they are under suspicion.
	Asked bool
	// Path is what a probe by HTTP asks for, such as "/healthz"; empty means that an accepted connection is enough.
	Path string
}

const probeTCP, probeHTTP = "tcp", "http:"

// maxProbePath is how long a Path may be.
const maxProbePath = 256

// ParseProbe reads "tcp" or "http:/path". It is not ok for any other text.
func ParseProbe(text string) (p Probe, ok bool) {
	path, byHTTP := strings.CutPrefix(text, probeHTTP)
	if !byHTTP {
		return Probe{Asked: text == probeTCP}, text == probeTCP
	}
	plain := strings.IndexFunc(path, func(r rune) bool { return r <= ' ' || r > '~' || r == '#' }) < 0
	if !plain || !strings.HasPrefix(path, "/") || len(path) > maxProbePath {
		return Probe{}, false
	}
	return Probe{Asked: true, Path: path}, true
}

// String returns what ParseProbe reads; empty for the zero Probe.
func (p Probe) String() string {
	switch {
	case !p.Asked:
		return ""
	case p.Path == "":
		return probeTCP
	}
	return probeHTTP + p.Path
}
