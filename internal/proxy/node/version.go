package node

import (
	"cmp"
	"os"
	"runtime"
	"runtime/debug"
	"strings"
)

// Build says from what this program was built. Its fields are a JSON object; what is unknown is empty.
type Build struct {
	// Version is the module's version: a tag such as v0.2.0, or one that the go command made up from the commit.
	Version string `json:"version"`
	// Commit is the hash of the commit, and Date its time (RFC 3339). Modified means that the tree had other changes.
	Commit   string `json:"commit,omitempty"`
	Date     string `json:"date,omitempty"`
	Modified bool   `json:"modified,omitempty"`
	Go       string `json:"go"`
	Platform string `json:"platform"`
}

// release is the version that "make release" was told, by the linker's -X. Empty, the go command's version counts.
var release string

// BuildInfo returns from what this program was built.
func BuildInfo() Build {
	b := Build{
		Version: cmp.Or(release, "(unknown version)"), Go: runtime.Version(), Platform: runtime.GOOS + "/" + runtime.GOARCH,
	}
	info, ok := debug.ReadBuildInfo()
	if !ok {
		return b
	}
	b.Version = cmp.Or(release, info.Main.Version)
	for _, s := range info.Settings {
		switch s.Key {
		case "vcs.revision":
			b.Commit = s.Value
		case "vcs.time":
			b.Date = s.Value
		case "vcs.modified":
			b.Modified = s.Value == "true"
		}
	}
	return b
}

// Version returns this program's name and version, and the version of Go.
func Version() string {
	b := BuildInfo()
	return strings.Join([]string{"verdict", b.Version, b.Go}, " ")
}

// KernelRelease returns the release of the running kernel, such as 6.12.5; "unknown" if it does not say.
func KernelRelease() string {
	release, err := os.ReadFile("/proc/sys/kernel/osrelease")
	if err != nil {
		return "unknown"
	}
	return strings.TrimSpace(string(release))
}
