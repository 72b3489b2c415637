package flows

import (
	"bytes"
	"context"
	"encoding/json"

	"gopkg.in/natefinch/lumberjack.v2"
)

// fileMiB is the size at which a file is renamed and a new one begun, and keptFiles how many are kept besides.
const fileMiB, keptFiles = 64, 3

// file is a file of JSON lines, which is rotated.
type file struct{ to *lumberjack.Logger }

// newFile returns the file of a name, which is opened when something is written, and the size at which it is renamed.
func newFile(name string, mib int) file {
	return file{&lumberjack.Logger{Filename: name, MaxSize: mib, MaxBackups: keptFiles}}
}

func (f file) write(_ context.Context, batch []Record) (lost int, err error) {
	var lines bytes.Buffer
	encoder := json.NewEncoder(&lines)
	for i := range batch {
		if err := encoder.Encode(&batch[i]); err != nil {
			return len(batch), err
		}
	}
	if _, err := f.to.Write(lines.Bytes()); err != nil {
		return len(batch), err
	}
	return 0, nil
}

func (f file) close() error { return f.to.Close() }
