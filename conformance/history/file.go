package history

import (
	"bufio"
	"bytes"
	"compress/gzip"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
)

// The limits of a file. A history that is longer is an error, both to the writer and to the reader.
const (
	maxRecords = 4_000_000
	maxLine    = 256 << 10
	maxBytes   = 1 << 30 // without compression
	maxName    = 300     // of a name, an address or an error
)

// ErrTooLong says that a history has reached a limit.
var ErrTooLong = errors.New("history: too long")

// line is one line of a file: exactly one of these.
type line struct {
	Header *Header `json:"header,omitempty"`
	Serve  *Serve  `json:"serve,omitempty"`
	Write  *Write  `json:"write,omitempty"`
	Conn   *Conn   `json:"conn,omitempty"`
	Fault  *Fault  `json:"fault,omitempty"`
	Rest   *int64  `json:"rest,omitempty"`
	// Complete is the last line, and says how many lines are before it: a file without it was cut.
	Complete *int `json:"complete,omitempty"`
}

// lines calls do for each line of a history, in the order of a file.
func (h *History) lines(do func(line) error) error {
	if err := do(line{Header: &h.Header}); err != nil {
		return err
	}
	var err error
	for i := 0; i < len(h.Serves) && err == nil; i++ {
		err = do(line{Serve: &h.Serves[i]})
	}
	for i := 0; i < len(h.Writes) && err == nil; i++ {
		err = do(line{Write: &h.Writes[i]})
	}
	for i := 0; i < len(h.Conns) && err == nil; i++ {
		err = do(line{Conn: &h.Conns[i]})
	}
	for i := 0; i < len(h.Faults) && err == nil; i++ {
		err = do(line{Fault: &h.Faults[i]})
	}
	if h.Rest != 0 && err == nil {
		err = do(line{Rest: &h.Rest})
	}
	return err
}

// WriteTo writes lines of JSON, compressed by gzip.
func (h *History) WriteTo(w io.Writer) (int64, error) {
	counter := &counter{w: w}
	z, err := gzip.NewWriterLevel(counter, gzip.BestCompression)
	if err != nil {
		return 0, err
	}
	lines, size := 0, 0
	put := func(l line) error {
		b, err := json.Marshal(l)
		if err != nil {
			return err
		}
		lines++
		if size += len(b) + 1; lines > maxRecords || size > maxBytes || len(b) > maxLine {
			return ErrTooLong
		}
		_, err = z.Write(append(b, '\n'))
		return err
	}
	err = h.lines(put)
	if err == nil {
		err = put(line{Complete: &lines})
	}
	return counter.n, errors.Join(err, z.Close())
}

// counter counts what it passes on.
type counter struct {
	w io.Writer
	n int64
}

func (c *counter) Write(b []byte) (int, error) {
	n, err := c.w.Write(b)
	c.n += int64(n)
	return n, err
}

// WriteFile puts the history in the place of a file.
func (h *History) WriteFile(path string) error {
	var b bytes.Buffer
	if _, err := h.WriteTo(&b); err != nil {
		return fmt.Errorf("%s: %w", path, err)
	}
	return os.WriteFile(path, b.Bytes(), 0o644)
}

// ReadFile reads a file that WriteFile wrote.
func ReadFile(path string) (*History, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	h, err := Read(f)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", path, err)
	}
	return h, nil
}

// Read reads what WriteTo wrote. Unknown fields, a file that was cut, and one beyond the limits are errors, which name
// the line.
func Read(r io.Reader) (*History, error) {
	z, err := gzip.NewReader(r)
	if err != nil {
		return nil, err
	}
	scanner := bufio.NewScanner(io.LimitReader(z, maxBytes+1))
	scanner.Buffer(make([]byte, 0, 64<<10), maxLine+1)
	h := &History{}
	n, complete := 0, false
	for scanner.Scan() {
		n++
		if n > maxRecords {
			return nil, ErrTooLong
		}
		if complete {
			return nil, fmt.Errorf("line %d: it follows the last one", n)
		}
		if complete, err = h.readLine(scanner.Bytes(), n); err != nil {
			return nil, fmt.Errorf("line %d: %w", n, err)
		}
	}
	if err := scanner.Err(); err != nil {
		return nil, fmt.Errorf("line %d: %w", n+1, err)
	}
	if !complete {
		return nil, fmt.Errorf("line %d: the history was cut, or is longer than %d bytes", n, int64(maxBytes))
	}
	return h, nil
}

// readLine adds a line, and says whether it is the last one.
func (h *History) readLine(text []byte, n int) (last bool, err error) {
	d := json.NewDecoder(bytes.NewReader(text))
	d.DisallowUnknownFields()
	var l line
	if err := d.Decode(&l); err != nil {
		return false, err
	}
	switch {
	case (l.Header != nil) != (n == 1):
		return false, errors.New("a header is the first line, and only that")
	case l.Header != nil:
		h.Header = *l.Header
		if l.Header.Format != Format {
			return false, fmt.Errorf("format %.40q is not %s", l.Header.Format, Format)
		}
	case l.Serve != nil:
		h.Serves = append(h.Serves, *l.Serve)
		return false, names(l.Serve.Address, l.Serve.Endpoint, l.Serve.Service)
	case l.Write != nil:
		h.Writes = append(h.Writes, *l.Write)
		return false, l.Write.valid()
	case l.Conn != nil:
		h.Conns = append(h.Conns, *l.Conn)
		return false, l.Conn.valid()
	case l.Fault != nil:
		h.Faults = append(h.Faults, *l.Fault)
	case l.Rest != nil:
		h.Rest = *l.Rest
	case l.Complete != nil:
		if *l.Complete != n-1 {
			return false, fmt.Errorf("it says that %d lines are before it", *l.Complete)
		}
		return true, nil
	default:
		return false, errors.New("it says nothing")
	}
	return false, nil
}

func names(all ...string) error {
	for _, name := range all {
		if name == "" || len(name) > maxName {
			return fmt.Errorf("a name or an address is missing, or longer than %d bytes", maxName)
		}
	}
	return nil
}

func (w *Write) valid() error {
	for _, e := range w.Endpoints {
		switch e.State {
		case Ready, Unready, Serving, Terminating:
		default:
			return fmt.Errorf("unknown state %.40q", e.State)
		}
		if err := names(e.Address); err != nil {
			return err
		}
	}
	return names(w.Service)
}

func (c *Conn) valid() error {
	switch c.Outcome {
	case Answered:
		return names(c.Service, c.Client, c.Node, c.Endpoint, c.At)
	case Refused, TimedOut, Failed:
		return names(c.Service, c.Client, c.Node)
	}
	return fmt.Errorf("unknown outcome %.40q", c.Outcome)
}
