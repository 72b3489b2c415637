// Package sysctl sets kernel parameters that are files: those under /proc/sys, and those of modules under /sys.
package sysctl

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
)

// Setting is the wanted value of a parameter.
type Setting struct {
	// Path is the path of its file, without the leading slash: "proc/sys/net/ipv4/ip_forward".
	Path string
	// Value is the wanted value.
	Value int
	// AtLeast keeps a higher value.
	AtLeast bool
}

// Name returns the parameter's name as in sysctl(8), or its path.
func (s Setting) Name() string {
	if name, ok := strings.CutPrefix(s.Path, "proc/sys/"); ok {
		return strings.ReplaceAll(name, "/", ".")
	}
	return "/" + s.Path
}

// Written is a parameter that was changed.
type Written struct {
	Name        string
	Before, Now int
}

// Host is a directory that stands for the root of the file system. Tests use one of their own.
type Host struct{ Root string }

// Apply sets parameters and returns those that it changed. It continues after an error. Each error names the parameter,
// and wraps fs.ErrNotExist if the kernel does not have it yet: most parameters come with a module.
func (h Host) Apply(settings []Setting) (changed []Written, errs []error) {
	for _, s := range settings {
		before, err := h.read(s.Path)
		switch {
		case err != nil:
			errs = append(errs, fmt.Errorf("%s cannot be read: %w", s.Name(), pathless(err)))
			continue
		case before == s.Value || s.AtLeast && before > s.Value:
			continue
		}
		if err := h.write(s.Path, s.Value); err != nil {
			errs = append(errs,
				fmt.Errorf("%s stays %d; %d is wanted, but it cannot be written: %w", s.Name(), before, s.Value, pathless(err)))
			continue
		}
		changed = append(changed, Written{s.Name(), before, s.Value})
	}
	return changed, errs
}

// Check returns the errors that Apply would return, and changes nothing.
func (h Host) Check(settings []Setting) (errs []error) {
	for _, s := range settings {
		is, err := h.read(s.Path)
		if err != nil {
			errs = append(errs, fmt.Errorf("%s cannot be read: %w", s.Name(), pathless(err)))
			continue
		}
		if is == s.Value || s.AtLeast && is > s.Value {
			continue
		}
		f, err := os.OpenFile(h.file(s.Path), os.O_WRONLY, 0)
		if err != nil {
			errs = append(errs,
				fmt.Errorf("%s is %d; %d is wanted, and it cannot be written: %w", s.Name(), is, s.Value, pathless(err)))
			continue
		}
		f.Close()
	}
	return errs
}

func (h Host) file(path string) string { return filepath.Join("/", h.Root, path) }

func (h Host) read(path string) (int, error) {
	text, err := os.ReadFile(h.file(path))
	if err != nil {
		return 0, err
	}
	return strconv.Atoi(strings.TrimSpace(string(text)))
}

// write creates no file. The kernel applies the value with the first write, so there must be only one.
func (h Host) write(path string, value int) error {
	f, err := os.OpenFile(h.file(path), os.O_WRONLY|os.O_TRUNC, 0)
	if err != nil {
		return err
	}
	_, err = f.WriteString(strconv.Itoa(value))
	return errors.Join(err, f.Close())
}

func pathless(err error) error {
	if p := (*fs.PathError)(nil); errors.As(err, &p) {
		return p.Err
	}
	return err
}

// CPUs returns how many CPUs the host has online. A container may be confined to fewer, which is what Go counts; the
// conntrack table is the host's.
func (h Host) CPUs() int {
	text, err := os.ReadFile(h.file("sys/devices/system/cpu/online"))
	if err == nil {
		if n := countList(strings.TrimSpace(string(text))); n > 0 {
			return n
		}
	}
	return runtime.NumCPU()
}

// countList counts the items of a list such as 0-3,7 (Documentation/admin-guide/cputopology.rst); 0 if the list is
// invalid.
func countList(list string) int {
	n := 0
	for item := range strings.SplitSeq(list, ",") {
		first, last, span := strings.Cut(item, "-")
		if !span {
			last = first
		}
		a, err := strconv.Atoi(first)
		b, err2 := strconv.Atoi(last)
		if err != nil || err2 != nil || b < a {
			return 0
		}
		n += b - a + 1
	}
	return n
}

// PossibleCPUs returns how many processors this kernel is prepared for, present or not: it keeps a counter for each of
// them.
func PossibleCPUs() (int, error) {
	const path = "/sys/devices/system/cpu/possible"
	text, err := os.ReadFile(path)
	if err != nil {
		return 0, err
	}
	n := 0
	for part := range strings.SplitSeq(strings.TrimSpace(string(text)), ",") {
		var first, last int
		switch fields, _ := fmt.Sscanf(part, "%d-%d", &first, &last); fields {
		case 2:
			n += last - first + 1
		case 1:
			n++
		default:
			return 0, fmt.Errorf("%s: %q is no list of processors", path, text)
		}
	}
	return n, nil
}
