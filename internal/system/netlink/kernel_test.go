package netlink

import (
	"errors"
	"os"
	"slices"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/verdict-proxy/verdict/internal/lab"
	"github.com/verdict-proxy/verdict/internal/lab/labtest"
)

func TestMain(m *testing.M) { labtest.Main(m) }

// dial opens a Conn to nf_tables in a namespace of the test's own.
func dial(t *testing.T) (*lab.Host, *Conn) {
	t.Helper()
	h := labtest.NewHost(t, labtest.NewNet(t), "host")
	var c *Conn
	labtest.Check(t, h.Do(func() (err error) {
		c, err = Dial(unix.NETLINK_NETFILTER, 0)
		return err
	}))
	t.Cleanup(func() { c.Close() })
	return h, c
}

// TestKernel: a transaction of nf_tables is in as a whole or not at all, its refusals point at what is wrong, and
// what it wrote is listed.
func TestKernel(t *testing.T) {
	_, c := dial(t)
	before, err := c.Generation()
	labtest.Check(t, err)
	var w Buffer
	table := func(name string, flags uint16) {
		m := w.Netfilter(NFTables(unix.NFT_MSG_NEWTABLE), flags, unix.NFPROTO_IPV4)
		w.Text(unix.NFTA_TABLE_NAME, name)
		w.End(m)
	}
	w.Begin()
	table("one", unix.NLM_F_CREATE)
	table("two", unix.NLM_F_CREATE)
	w.Finish()
	refused, err := c.Commit(w.Bytes())
	if err != nil || len(refused) > 0 {
		t.Fatal(refused, err)
	}
	if after, err := c.Generation(); err != nil || after != before+1 {
		t.Errorf("generation %d after %d: %v", after, before, err)
	}

	w.Reset()
	w.Begin()
	table("three", unix.NLM_F_CREATE)
	table("one", unix.NLM_F_CREATE|unix.NLM_F_EXCL)
	w.Finish()
	refused, err = c.Commit(w.Bytes())
	if err != nil || len(refused) != 1 || refused[0].Errno != unix.EEXIST || refused[0].Seq != 3 {
		t.Fatal(refused, err)
	}
	if name := HeaderLen + NetfilterLen; refused[0].Offset != name {
		t.Errorf("it points to %d, not to the name at %d", refused[0].Offset, name)
	}

	w.Reset()
	w.End(w.Netfilter(NFTables(unix.NFT_MSG_GETTABLE), unix.NLM_F_DUMP, unix.NFPROTO_IPV4))
	var names []string
	err = c.Dump(w.Bytes(), func() { names = nil }, func(b []byte) {
		names = append(names, Decode(b[NetfilterLen:])[unix.NFTA_TABLE_NAME].Text())
	})
	if !slices.Equal(names, []string{"one", "two"}) || err != nil {
		t.Errorf("got %v, %v", names, err)
	}
}

// TestNamespace: a socket belongs to the namespace it was opened in, by whichever thread.
func TestNamespace(t *testing.T) {
	h, c := dial(t)
	var w Buffer
	w.Begin()
	m := w.Netfilter(NFTables(unix.NFT_MSG_NEWTABLE), unix.NLM_F_CREATE, unix.NFPROTO_IPV4)
	w.Text(unix.NFTA_TABLE_NAME, "t")
	w.End(m)
	w.Finish()
	if refused, err := c.Commit(w.Bytes()); err != nil || len(refused) > 0 {
		t.Fatal(refused, err)
	}
	want, err := c.Generation()
	labtest.Check(t, err)
	var netns *os.File
	labtest.Check(t, h.Do(func() (err error) {
		netns, err = os.Open("/proc/thread-self/ns/net")
		return err
	}))
	defer netns.Close()
	other, err := Dial(unix.NETLINK_NETFILTER, int(netns.Fd()))
	labtest.Check(t, err)
	defer other.Close()
	if got, err := other.Generation(); got != want || err != nil {
		t.Errorf("generation %d, not %d: %v", got, want, err)
	}
	if _, err := Dial(unix.NETLINK_NETFILTER, 1<<20); err == nil {
		t.Error("a namespace that is none was entered")
	}
}

// TestInherit: a socket lives on in a copy, with its port; what its user left unread does not. No other socket is
// taken for one.
func TestInherit(t *testing.T) {
	_, c := dial(t)
	var w Buffer
	w.End(w.Netfilter(NFTables(unix.NFT_MSG_GETGEN), 0, unix.AF_UNSPEC))
	labtest.Check(t, c.Ask(w.Bytes()))
	f, err := c.Wire.(*Socket).File()
	labtest.Check(t, err)
	defer f.Close()
	port, err := c.Wire.Port()
	labtest.Check(t, err)
	labtest.Check(t, c.Close())
	heir, err := Take(f, unix.NETLINK_NETFILTER)
	labtest.Check(t, err)
	defer heir.Close()
	if got, err := heir.Wire.Port(); got != port || err != nil {
		t.Errorf("port %d, not %d: %v", got, port, err)
	}
	if _, err := heir.Wire.Recv(make([]byte, 100), false); !errors.Is(err, unix.EAGAIN) {
		t.Errorf("something is unread: %v", err)
	}
	if _, err := Take(f, unix.NETLINK_ROUTE); err == nil {
		t.Error("a socket of another protocol was taken")
	}
	file, err := os.Open(os.DevNull)
	labtest.Check(t, err)
	defer file.Close()
	if _, err := Take(file, unix.NETLINK_NETFILTER); err == nil {
		t.Error("a file was taken")
	}
}

// TestPatience: if an answer got lost, Recv does not wait for ever, and the socket is as good as before.
func TestPatience(t *testing.T) {
	_, c := dial(t)
	s := c.Wire.(*Socket)
	s.patience = 20 * time.Millisecond
	if _, err := s.Recv(make([]byte, 100), true); !errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("got %v", err)
	}
	if _, err := c.Generation(); err != nil {
		t.Error(err)
	}
}

// TestMessagesOfProcesses: no other process can put anything among the kernel's answers.
func TestMessagesOfProcesses(t *testing.T) {
	h, c := dial(t)
	port, err := c.Wire.Port()
	labtest.Check(t, err)
	labtest.Check(t, h.Do(func() error {
		fd, err := unix.Socket(unix.AF_NETLINK, unix.SOCK_RAW|unix.SOCK_CLOEXEC, unix.NETLINK_NETFILTER)
		if err != nil {
			return err
		}
		defer unix.Close(fd)
		err = unix.Sendto(fd, make([]byte, HeaderLen), 0, &unix.SockaddrNetlink{Family: unix.AF_NETLINK, Pid: port})
		if !errors.Is(err, unix.ECONNREFUSED) {
			t.Errorf("a message to the socket: %v", err)
		}
		return nil
	}))
}

// TestFamily: the controller is a family of every kernel; of one that no kernel has it is told.
func TestFamily(t *testing.T) {
	c, err := Dial(unix.NETLINK_GENERIC, 0)
	labtest.Check(t, err)
	defer c.Close()
	if id, err := c.Family("nlctrl"); id != unix.GENL_ID_CTRL || err != nil {
		t.Errorf("got %d, %v", id, err)
	}
	if _, err := c.Family("verdict-none"); !errors.Is(err, unix.ENOENT) {
		t.Errorf("got %v", err)
	}
}
