package results

import (
	"fmt"
	"io"
	"os"
	"path/filepath"
)

// Publication is what a command has found, and where it goes.
type Publication struct {
	// Tables are Markdown. They go to File in the directory Dir, and Said names all that is there.
	Tables, Dir, File, Said string
	// Plot writes pictures into Dir.
	Plot func() error
	// Document, unless it is nil, puts tables and pictures where the documentation has them.
	Document func() error
}

// Write writes tables and pictures, and prints the tables.
func (p Publication) Write(out io.Writer) error {
	if err := os.MkdirAll(p.Dir, 0o755); err != nil {
		return err
	}
	if err := os.WriteFile(filepath.Join(p.Dir, p.File), []byte(p.Tables), 0o644); err != nil {
		return err
	}
	if err := p.Plot(); err != nil {
		return err
	}
	if p.Document != nil {
		if err := p.Document(); err != nil {
			return err
		}
	}
	_, err := fmt.Fprintf(out, "\n%s\n%s are in %s\n", p.Tables, p.Said, p.Dir)
	return err
}
