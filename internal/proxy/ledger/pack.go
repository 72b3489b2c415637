package ledger

import (
	"bytes"
	"compress/flate"
	_ "embed"
	"fmt"
	"io"
	"sync"
)

// dictionary is what batches have in common: one that was sent for a change of one endpoint. Ledgers that exist can
// be read with this one alone, so it must never change.
//
//go:embed dictionary
var dictionary []byte

// packer compresses batches. The zero packer is ready.
type packer struct {
	w   *flate.Writer
	out bytes.Buffer
}

// keepPacked is how much room is kept for the next batch.
const keepPacked = 1 << 20

// pack compresses a batch. The result is valid until the next call.
func (p *packer) pack(batch []byte) []byte {
	if p.out.Reset(); p.out.Cap() > keepPacked {
		*p = packer{}
	}
	if p.w == nil {
		p.w, _ = flate.NewWriterDict(&p.out, flate.DefaultCompression, dictionary) // the level is a valid one
	} else {
		p.w.Reset(&p.out) // which keeps the dictionary
	}
	_, _ = p.w.Write(batch) // a bytes.Buffer takes everything
	_ = p.w.Close()
	return p.out.Bytes()
}

// unpackers are decompressors of batches, which take much more than most batches.
var unpackers = sync.Pool{New: func() any { return flate.NewReaderDict(nil, dictionary) }}

// mostOfOne is how many bytes deflate can make of one: 258 of two bits.
const mostOfOne = 1032

// Unpack returns the batch of a record as it was sent: netlink messages. It is empty if the record has none.
func (r *Record) Unpack() ([]byte, error) {
	if len(r.Batch) == 0 {
		return nil, nil
	}
	if r.Bytes < 0 || r.Bytes/mostOfOne > len(r.Batch) {
		return nil, fmt.Errorf("ledger: record %d: batch: %d bytes cannot be of %d", r.Number, r.Bytes, len(r.Batch))
	}
	in := unpackers.Get().(io.ReadCloser)
	defer unpackers.Put(in)
	if err := in.(flate.Resetter).Reset(bytes.NewReader(r.Batch), dictionary); err != nil {
		return nil, fmt.Errorf("ledger: record %d: batch: %w", r.Number, err)
	}
	batch := make([]byte, r.Bytes)
	if _, err := io.ReadFull(in, batch); err != nil {
		return nil, fmt.Errorf("ledger: record %d: batch: %w", r.Number, err)
	}
	return batch, nil
}
