package nfteval

import (
	"encoding/binary"
	"fmt"
	mathbits "math/bits"
)

// jenkins evaluates jhash of one value: hash values of clients are where nft says that they are, as long as the machine
// that runs the ruleset has its lowest byte first.
func (w *evaluation) jenkins(m map[string]any, p *packet) ([]branch, error) {
	mod, seed, offset := integer(m["mod"], 0), integer(m["seed"], 0), integer(m["offset"], 0)
	if mod < 1 || m["expr"] == nil {
		return nil, fmt.Errorf("jhash mod %v of %v is not known", m["mod"], m["expr"])
	}
	values, err := w.eval(m["expr"], nil, p)
	if err != nil {
		return nil, err
	}
	for i := range values {
		var key []byte
		for _, part := range values[i].parts {
			key = append(append(key, part...), make([]byte, (4-len(part)%4)%4)...)
		}
		slot := uint64(lookup3(key, uint32(seed))) * uint64(mod) >> 32
		values[i].parts = []value{number(slot+uint64(offset), "integer")}
	}
	return values, nil
}

// lookup3 is Bob Jenkins' hash, for whole words of four bytes.
func lookup3(key []byte, seed uint32) uint32 {
	var s [3]uint32
	for i := range s {
		s[i] = 0xdeadbeef + uint32(len(key)) + seed
	}
	// Each step subtracts one word from another, turns it by some bits, and adds the third.
	steps := func(turns ...int) {
		for i, turn := range turns {
			a, b, c := i%3, (i+1)%3, (i+2)%3
			s[a] = (s[a] - s[c]) ^ mathbits.RotateLeft32(s[c], turn)
			s[c] += s[b]
		}
	}
	for len(key) > 12 {
		for i := range s {
			s[i] += binary.LittleEndian.Uint32(key[4*i:])
		}
		steps(4, 6, 8, 16, 19, 4)
		key = key[12:]
	}
	for i := 0; 4*i < len(key); i++ {
		s[i] += binary.LittleEndian.Uint32(key[4*i:])
	}
	for i, turn := range [...]int{14, 11, 25, 16, 4, 14, 24} {
		to, from := (i+2)%3, (i+1)%3
		s[to] = (s[to] ^ s[from]) - mathbits.RotateLeft32(s[from], turn)
	}
	return s[2]
}
