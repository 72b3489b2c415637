package netlink_test

import (
	"bytes"
	"encoding/binary"
	"encoding/hex"
	"fmt"
	"slices"
	"testing"

	mdlayher "github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"

	"github.com/verdict-proxy/verdict/internal/system/netlink"
)

// A request that lists the chains of a table has a header, the table's name, and nothing else.
func ExampleBuffer() {
	var w netlink.Buffer
	m := w.Netfilter(netlink.NFTables(unix.NFT_MSG_GETCHAIN), unix.NLM_F_DUMP, unix.NFPROTO_IPV4)
	w.Text(unix.NFTA_CHAIN_TABLE, "verdict")
	w.End(m)
	for m, err := range netlink.Messages(w.Bytes()) {
		fmt.Println("message", m.Seq, "type", m.Type>>8, m.Type&0xff, err)
		fmt.Print(hex.Dump(m.Body))
		fmt.Println(netlink.Find(m.Body[netlink.NetfilterLen:], unix.NFTA_CHAIN_TABLE).Text())
	}
	// Output:
	// message 1 type 10 4 <nil>
	// 00000000  02 00 00 00 0c 00 01 00  76 65 72 64 69 63 74 00  |........verdict.|
	// verdict
}

// Attributes nest; numbers are in the order that each subsystem wants.
func ExampleEach() {
	var w netlink.Buffer
	outer := w.Nest(1)
	w.Big16(2, 8080)
	w.Native32(3, 5)
	w.Close(outer)
	w.Big64(4, 1<<40)
	for typ, v := range netlink.Each(w.Bytes()) {
		if typ == 1 {
			in := netlink.Decode(v)
			fmt.Println(in[2].Big16(), in[3].Native32(), in[9].Big32())
			continue
		}
		fmt.Println(typ, v.Big64())
	}
	// Output:
	// 8080 5 0
	// 4 1099511627776
}

// TestRoundTrip: what the Buffer writes, the library's decoder and ours read.
func TestRoundTrip(t *testing.T) {
	var w netlink.Buffer
	w.Attr(1, 7)
	w.Attr(2)
	w.Text(3, "four")
	w.Native16(4, 0x1234)
	w.Native32(5, 0x12345678)
	w.Big16(6, 0x1234)
	w.Big32(7, 0x12345678)
	w.Big64(8, 0x123456789abcdef0)
	outer := w.Nest(9)
	inner := w.Nest(10)
	w.Attr(11, 1, 2, 3)
	w.Close(inner)
	w.Close(outer)
	parts := w.Open(12)
	w.Append(1, 2)
	w.AppendText("ab")
	w.Close(parts)
	if w.Len()%4 != 0 {
		t.Errorf("%d bytes: not padded", w.Len())
	}
	theirs, err := mdlayher.UnmarshalAttributes(w.Bytes())
	if err != nil {
		t.Fatal(err)
	}
	if len(theirs) != 10 || theirs[8].Type != 9|unix.NLA_F_NESTED {
		t.Errorf("the library reads %+v", theirs)
	}
	a := netlink.Decode(w.Bytes())
	if a[1].Uint8() != 7 || a[2] == nil || len(a[2]) != 0 || a[3].Text() != "four" || a[4].Native16() != 0x1234 ||
		a[5].Native32() != 0x12345678 || a[6].Big16() != 0x1234 || a[7].Big32() != 0x12345678 ||
		a[8].Big64() != 0x123456789abcdef0 || !bytes.Equal(a.Nested(9).Nested(10)[11], []byte{1, 2, 3}) ||
		!bytes.Equal(a[12], []byte{1, 2, 'a', 'b', 0}) {
		t.Errorf("got %v", a)
	}
	if v := (netlink.Value{1}); v.Native16()|v.Big16() != 0 || v.Native32()|v.Big32() != 0 ||
		v.Native64()|v.Big64() != 0 || netlink.Value(nil).Uint8() != 0 {
		t.Error("a value that is too short is not 0")
	}
}

// TestMessages: messages are numbered from 1 on, by each Reset anew, and to grow loses none.
func TestMessages(t *testing.T) {
	var w netlink.Buffer
	for range 2 {
		w.Reset()
		w.Begin()
		m := w.Netfilter(netlink.NFTables(unix.NFT_MSG_NEWTABLE), unix.NLM_F_CREATE, unix.NFPROTO_IPV6)
		w.Text(unix.NFTA_TABLE_NAME, "t")
		w.End(m)
		w.Finish()
	}
	var types []uint16
	var seqs []uint32
	for m, err := range netlink.Messages(w.Bytes()) {
		if err != nil || m.Flags&unix.NLM_F_REQUEST == 0 {
			t.Errorf("%+v: %v", m, err)
		}
		types, seqs = append(types, m.Type), append(seqs, m.Seq)
	}
	want := []uint16{unix.NFNL_MSG_BATCH_BEGIN, netlink.NFTables(unix.NFT_MSG_NEWTABLE), unix.NFNL_MSG_BATCH_END}
	if !slices.Equal(types, want) || !slices.Equal(seqs, []uint32{1, 2, 3}) || w.Count() != 3 {
		t.Errorf("got types %v, numbers %v, count %d", types, seqs, w.Count())
	}
	w.Grow(1 << 16)
	if cap(w.Bytes()) < 1<<16 || w.Len() == 0 {
		t.Errorf("%d bytes of %d are left", w.Len(), cap(w.Bytes()))
	}
}

// TestMalformed: a walk ends at what is malformed, and says so of messages.
func TestMalformed(t *testing.T) {
	var w netlink.Buffer
	w.Attr(1, 1, 2, 3, 4)
	w.Attr(2, 5, 6, 7, 8)
	good := w.Bytes()
	for n := range len(good) {
		count := 0
		for typ := range netlink.Each(good[:n]) {
			if count++; int(typ) != count {
				t.Errorf("%d bytes: attribute %d", n, typ)
			}
		}
		if count != n/8 {
			t.Errorf("%d bytes hold %d attributes", n, count)
		}
	}
	for _, length := range []uint32{0, 15, 17, 1 << 31} {
		b := make([]byte, 16)
		binary.NativeEndian.PutUint32(b, length)
		failed := false
		for _, err := range netlink.Messages(b) {
			failed = err != nil
		}
		if !failed {
			t.Errorf("a message of %d bytes in 16 is taken", length)
		}
	}
}

// FuzzAttributes: no input makes a walk panic or leave its bytes, and what the library takes is read as it reads it.
func FuzzAttributes(f *testing.F) {
	var w netlink.Buffer
	n := w.Nest(1)
	w.Text(2, "text")
	w.Close(n)
	f.Add(w.Bytes())
	f.Add([]byte{4, 0, 1, 0})
	f.Add([]byte{0, 0, 0, 0, 8, 0, 1, 0, 1, 2, 3, 4})
	f.Fuzz(func(t *testing.T, b []byte) {
		var ours []mdlayher.Attribute
		used := 0
		for typ, v := range netlink.EachFlagged(b) {
			ours = append(ours, mdlayher.Attribute{Type: typ, Data: v})
			used += 4 + len(v)
			for range netlink.Each(v) { // whatever it holds
				used += 0
			}
		}
		if used > len(b) {
			t.Errorf("%d bytes of attributes in %d", used, len(b))
		}
		netlink.Decode(b)
		theirs, err := mdlayher.UnmarshalAttributes(b)
		if err != nil || len(ours) > len(theirs) { // the library passes over attributes of length 0
			return
		}
		for i := range ours {
			if ours[i].Type != theirs[i].Type || !bytes.Equal(ours[i].Data, theirs[i].Data) {
				t.Errorf("attribute %d: %+v, by the library %+v", i, ours[i], theirs[i])
			}
		}
	})
}

// FuzzMessages: no datagram makes the walk or the reading of a refusal panic.
func FuzzMessages(f *testing.F) {
	f.Add([]byte{16, 0, 0, 0, 3, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0})
	f.Add(refusal(3, -2, 0, nil))
	f.Add(refusal(3, -2, unix.NLM_F_CAPPED, []byte{8, 0, 2, 0, 40, 0, 0, 0}))
	f.Fuzz(func(t *testing.T, b []byte) {
		c := netlink.New(&script{answers: [][]byte{b}}, false)
		refused, err := c.Commit(make([]byte, netlink.HeaderLen))
		for _, e := range refused {
			if e.Errno == 0 || e.Error() == "" {
				t.Errorf("%+v", e)
			}
		}
		if err == nil && len(b) > 0 && len(b) < netlink.HeaderLen && refused != nil {
			t.Errorf("%d bytes are a message", len(b))
		}
	})
}
