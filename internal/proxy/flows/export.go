package flows

import (
	"context"
	"log/slog"
	"sync/atomic"
	"time"
)

// Bounds of exports.
const (
	// maxWaiting is how many records wait to be written, two megabytes; batchSize is how many are written at once.
	maxWaiting, batchSize = 4096, 512
	// batchEvery is how long a record waits for others.
	batchEvery = time.Second
	// lastWords is how long the last batch may take when the proxy ends.
	lastWords = 2 * time.Second
)

// writer writes records somewhere, as a file and a collector do. It is called from one goroutine.
type writer interface {
	// write writes a batch. If there is an error, lost are the records that were not written.
	write(ctx context.Context, batch []Record) (lost int, err error)
	close() error
}

// export gives records to a writer. A writer that is too slow loses some, and delays nobody.
type export struct {
	*reader
	to      string
	log     *slog.Logger
	writer  writer
	written atomic.Uint64
}

// ExportStats are what metrics show of a file or a collector.
type ExportStats struct {
	// To is "file" or "otlp".
	To string
	// Lost records could not be written, or not in time.
	Written, Lost uint64
}

func newExport(to string, log *slog.Logger, w writer) *export {
	return &export{reader: newReader(maxWaiting, query{}), to: to, log: log, writer: w}
}

// run writes until ctx is done.
func (e *export) run(ctx context.Context) {
	defer func() {
		if err := e.writer.close(); err != nil {
			e.log.Warn("failed to close the export of records", "to", e.to, "err", err)
		}
	}()
	failing, batch := false, make([]Record, 0, batchSize)
	flush := func(ctx context.Context) {
		if len(batch) == 0 {
			return
		}
		lost, err := e.writer.write(ctx, batch)
		e.lost.Add(uint64(lost))
		e.written.Add(uint64(len(batch) - lost))
		if failing != (err != nil) {
			if failing = err != nil; failing {
				e.log.Warn("failed to export records", "to", e.to, "err", err)
			} else {
				e.log.Info("records are exported again", "to", e.to, "lost", e.lost.Load())
			}
		}
		clear(batch)
		batch = batch[:0]
	}
	tick := time.NewTicker(batchEvery)
	defer tick.Stop()
	for {
		select {
		case r := <-e.records:
			if batch = append(batch, r); len(batch) == batchSize {
				flush(ctx)
			}
		case <-tick.C:
			flush(ctx)
		case <-ctx.Done():
			last, cancel := context.WithTimeout(context.WithoutCancel(ctx), lastWords)
			defer cancel()
			for len(e.records) > 0 && last.Err() == nil {
				if batch = append(batch, <-e.records); len(batch) == batchSize {
					flush(last)
				}
			}
			flush(last)
			e.lost.Add(uint64(len(e.records)))
			return
		}
	}
}
