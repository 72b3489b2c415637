package kernel

import (
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"slices"

	"golang.org/x/sys/unix"

	"github.com/verdict-proxy/verdict/internal/system/netlink"
	"github.com/verdict-proxy/verdict/nft"
)

// verb is what a datagram asks the kernel for.
type verb uint8

const (
	verbBatch verb = iota
	verbGeneration
	verbTable
	verbSets
	verbChains
	verbRules
	verbElements // all of a set
	verbKeys     // some of a set
	verbSweep    // all of an affinity map
	numVerbs
)

var verbNames = [numVerbs]string{
	"batch",
	"generation",
	"table",
	"sets",
	"chains",
	"rules",
	"elements",
	"keys",
	"affinity",
}

// verbOf reads what a datagram asks for.
func verbOf(b []byte) verb {
	// after the table's name, which is 8 bytes with its zero
	const setName = headerLen + netlink.AttrLen + len(nft.TableName) + 1 + netlink.AttrLen
	typ, dump := binary.NativeEndian.Uint16(b[4:]), binary.NativeEndian.Uint16(b[6:])&unix.NLM_F_DUMP == unix.NLM_F_DUMP
	switch typ {
	case netlink.NFTables(unix.NFT_MSG_GETGEN):
		return verbGeneration
	case netlink.NFTables(unix.NFT_MSG_GETTABLE):
		return verbTable
	case netlink.NFTables(unix.NFT_MSG_GETSET):
		return verbSets
	case netlink.NFTables(unix.NFT_MSG_GETCHAIN):
		return verbChains
	case netlink.NFTables(unix.NFT_MSG_GETRULE):
		return verbRules
	case netlink.NFTables(unix.NFT_MSG_GETSETELEM):
		switch {
		case !dump:
			return verbKeys
		case unix.ByteSliceToString(b[setName:]) == nft.Affinity.String():
			return verbSweep
		}
		return verbElements
	}
	return verbBatch
}

// illness is a way in which a wire breaks.
type illness uint8

const (
	interrupted    illness = iota // EINTR, twice
	sendFails                     // nothing was sent
	closedBefore                  // the socket is gone, nothing was sent
	recvFails                     // the answer stays in the socket
	answerLost                    // ENOBUFS, and the answer is gone
	closedAfter                   // the socket is gone, with the answer
	refusedFalsely                // nothing was sent, but there is an answer: an error
	tooLong                       // EMSGSIZE, and if it was long, the wire takes less from then on
	othersFirst                   // somebody else writes right before
	numIllnesses
)

var illnessNames = [numIllnesses]string{
	"interrupted",
	"send fails",
	"closed before",
	"recv fails",
	"answer lost",
	"closed after",
	"refused falsely",
	"too long",
	"others first",
}

// trouble is an illness that strikes once.
type trouble struct {
	verb    verb
	illness illness
	errno   unix.Errno
	// skip is how many datagrams of the verb are spared; later is how many datagrams of the answer are.
	skip, later int
	// round is when it struck.
	round int
}

// structureMost is more than the structure of both tables takes, which goes out in one datagram.
const structureMost = 80 << 10

var errKilled = errors.New("this process was killed")

// faults are what is wrong with all the wires of one process.
type faults struct {
	armed []*trouble
	// most is the largest datagram that can be sent; 0 means any.
	most int
	// dials is how many dials fail.
	dials int
	// left, if not negative, is how many calls to the kernel the process still makes before it is killed.
	left int
	dead bool
	// meddle is what others do.
	meddle func()
	random *rand.Rand
	// round counts how often all wires became well.
	round int

	// harm counts what may make a call of the Backend's fail; lies are false refusals, after which it may write
	// everything anew; steps counts what may make it write in steps.
	harm, lies, steps int
	// struck counts, for good, what happened.
	struck map[string]int
	verbs  [numVerbs]int
	ills   [numIllnesses]int
}

func newFaults() *faults { return &faults{left: -1, struck: map[string]int{}} }

// disarm makes wires well again.
func (f *faults) disarm() {
	f.armed, f.most, f.dials, f.left, f.dead = nil, 0, 0, -1, false
	f.harm, f.lies, f.steps = 0, 0, 0
	f.round++
}

// risky says whether something may go wrong.
func (f *faults) risky() bool {
	return len(f.armed) > 0 || f.most > 0 || f.dials > 0 || f.left >= 0 || f.dead
}

// call counts a call to the kernel.
func (f *faults) call() error {
	switch {
	case f.dead:
		return errKilled
	case f.left == 0:
		f.dead = true
		f.harm++
		return errKilled
	case f.left > 0:
		f.left--
	}
	return nil
}

// strike gives the trouble that a datagram has.
func (f *faults) strike(v verb) *trouble {
	for i, t := range f.armed {
		if t.verb != v {
			continue
		}
		if t.skip > 0 {
			t.skip--
			continue
		}
		f.armed = slices.Delete(f.armed, i, i+1)
		t.round = f.round
		f.struck[verbNames[v]+" "+illnessNames[t.illness]]++
		f.verbs[v]++
		f.ills[t.illness]++
		f.judge(t)
		return t
	}
	return nil
}

// judge notes what may come of a trouble.
func (f *faults) judge(t *trouble) {
	again := t.errno == unix.ERESTART || t.errno == unix.EAGAIN || t.errno == unix.EINTR
	switch {
	case t.illness == interrupted:
		return
	case t.illness == refusedFalsely && t.verb == verbBatch && !again && t.errno != unix.EPERM && t.errno != unix.ENOMEM:
		f.lies++
	case t.illness == tooLong:
		f.steps++
	}
	f.harm++
}

// walkWire is a wire that breaks as its faults say.
type walkWire struct {
	netlink.Wire
	f *faults
	// ill strikes while the answer is read; again is an interrupted call that is made once more. Answers are made up and
	// come before the kernel's.
	ill, again *trouble
	answers    [][]byte
}

func (w *walkWire) Send(b []byte) error {
	if err := w.f.call(); err != nil {
		return err
	}
	if w.ill, w.again = w.again, nil; w.ill != nil {
		return w.sendWell(b)
	}
	t := w.f.strike(verbOf(b))
	if t == nil {
		return w.sendWell(b)
	}
	switch t.illness {
	case interrupted:
		w.again = t
		return unix.EINTR
	case sendFails:
		return t.errno
	case closedBefore:
		return errors.Join(os.ErrClosed, w.Wire.Close())
	case recvFails, answerLost, closedAfter:
		w.ill = t
	case refusedFalsely:
		w.answers = append(w.answers, falseRefusal(b, t.errno, w.f.random))
		return nil
	case tooLong:
		if len(b) > structureMost {
			w.f.most = len(b) - 1
		}
		return unix.EMSGSIZE
	case othersFirst:
		w.f.meddle()
	}
	return w.sendWell(b)
}

func (w *walkWire) sendWell(b []byte) error {
	if w.f.most > 0 && len(b) > w.f.most {
		return unix.EMSGSIZE
	}
	return w.Wire.Send(b)
}

func (w *walkWire) Recv(b []byte, wait bool) (int, error) {
	if err := w.f.call(); err != nil {
		return 0, err
	}
	if len(w.answers) > 0 {
		n := copy(b, w.answers[0])
		w.answers = w.answers[1:]
		return n, nil
	}
	t := w.ill
	if t == nil || t.round != w.f.round {
		return w.Wire.Recv(b, wait)
	}
	if t.later > 0 {
		t.later--
		return w.Wire.Recv(b, wait)
	}
	w.ill = nil
	switch t.illness {
	case interrupted:
		return 0, unix.EINTR
	case answerLost:
		_, _ = w.Wire.Recv(b, false)
		return 0, unix.ENOBUFS
	case closedAfter:
		return 0, errors.Join(os.ErrClosed, w.Wire.Close())
	}
	return 0, t.errno
}

func (w *walkWire) Room(n int) (int, error) {
	if w.f.most > 0 {
		return (w.f.most + netlink.SendMargin) / 2, nil
	}
	return w.Wire.Room(n)
}

// falseRefusal makes an answer that refuses one of the messages in a datagram.
func falseRefusal(b []byte, errno unix.Errno, r *rand.Rand) []byte {
	var seqs []uint32
	for m := range netlink.Messages(b) {
		seqs = append(seqs, m.Seq)
	}
	const n = unix.NLMSG_HDRLEN + 4 + unix.NLMSG_HDRLEN
	var m []byte
	m = binary.NativeEndian.AppendUint32(m, n)
	m = binary.NativeEndian.AppendUint16(m, unix.NLMSG_ERROR)
	m = binary.NativeEndian.AppendUint16(m, unix.NLM_F_CAPPED)
	m = append(m, make([]byte, 8)...)
	m = binary.NativeEndian.AppendUint32(m, uint32(-int32(errno)))
	m = append(m, b[:unix.NLMSG_HDRLEN]...)
	binary.NativeEndian.PutUint32(m[n-8:], seqs[r.IntN(len(seqs))])
	binary.NativeEndian.PutUint32(m[8:], binary.NativeEndian.Uint32(m[n-8:]))
	return m
}

// arm lets a trouble strike one of the next datagrams, and says which.
func (f *faults) arm(r *rand.Rand, owned bool) string {
	t := &trouble{
		verb:    oneOf(r, verbBatch, verb(r.IntN(int(numVerbs))), verb(r.IntN(int(numVerbs)))),
		illness: illness(r.IntN(int(numIllnesses))),
	}
	switch t.illness {
	case sendFails:
		t.errno = oneOf(r, unix.ENOBUFS, unix.ENOMEM)
	case recvFails:
		t.errno = oneOf(r, unix.ENOBUFS, unix.ENOMEM)
		t.later = r.IntN(2)
	case answerLost:
		t.later = r.IntN(2)
	case refusedFalsely:
		t.errno = oneOf(r, unix.ERESTART, unix.EAGAIN, unix.EINTR, unix.EPERM, unix.ENOMEM, unix.EBUSY)
		if t.verb == verbBatch {
			t.errno = oneOf(r, t.errno, t.errno, unix.ENOENT, unix.EEXIST, unix.ENFILE, unix.EOPNOTSUPP, unix.EINVAL)
		}
	case tooLong:
		t.verb = verbBatch
	case othersFirst:
		if owned { // they can't
			t.illness, t.errno = sendFails, unix.ENOMEM
		}
	}
	if r.IntN(2) == 0 {
		t.skip = r.IntN(4)
	}
	f.armed = append(f.armed, t)
	return fmt.Sprintf("%s %s (%v) after %d and %d", verbNames[t.verb], illnessNames[t.illness], t.errno, t.skip, t.later)
}

// askForRoom has a connection forget how much it could send at once, so that it asks its wire again.
func askForRoom(c *Conn) { c.Conn = netlink.New(c.Wire, true) }
