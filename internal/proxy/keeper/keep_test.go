package keeper

import (
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/verdict-proxy/verdict/internal/lab/labtest"
	"github.com/verdict-proxy/verdict/internal/system/testkit"
)

// keeperWithChild starts a keeper and gives its first child and the socket that is kept.
func keeperWithChild(t *testing.T, env ...string) (p *process, first life) {
	t.Helper()
	p = launch(t, "keeper", env...)
	socket := strings.Fields(p.expect("keeper "))[1]
	first = p.child()
	if "socket="+first.socket != socket || first.restarts != 0 || first.pid == p.cmd.Process.Pid {
		t.Fatalf("the first child is %+v, the keeper's %s", first, socket)
	}
	return p, first
}

func TestKilledChildIsStartedAgainWithTheSameSocket(t *testing.T) {
	p, first := keeperWithChild(t)
	for i := 1; i <= 2; i++ {
		labtest.Check(t, unix.Kill(first.pid, unix.SIGKILL))
		next := p.child()
		if next.socket != first.socket || next.pid == first.pid || next.restarts != i {
			t.Fatalf("child %d is %+v after %+v", i, next, first)
		}
		first.pid = next.pid
	}
}

func TestExitStatusIsPassedOn(t *testing.T) {
	for _, status := range []int{0, 1, 2, 3} {
		t.Run(fmt.Sprint(status), func(t *testing.T) {
			t.Parallel()
			p, _ := keeperWithChild(t)
			p.order(fmt.Sprintf("exit %d", status))
			if got := p.status(); got != status {
				t.Errorf("status %d", got)
			}
		})
	}
}

// The keeper's context ends by the same signals: the child must get them once nevertheless.
func TestSignalsArePassedOn(t *testing.T) {
	p, _ := keeperWithChild(t)
	for _, s := range []syscall.Signal{unix.SIGHUP, unix.SIGUSR1, unix.SIGUSR2, unix.SIGQUIT, unix.SIGTERM} {
		p.signal(s)
		if got := p.expect("got "); got != s.String() {
			t.Errorf("%v arrived as %s", s, got)
		}
	}
	p.signal(unix.SIGTERM)
	p.signal(unix.SIGINT)
	if got := p.expect("got "); got != unix.SIGPWR.String() {
		t.Errorf("the child was asked twice: %s", got)
	}
	if got := p.status(); got != 7 {
		t.Errorf("status %d, the child's was 7", got)
	}
}

func TestInterrupt(t *testing.T) {
	p, _ := keeperWithChild(t)
	p.signal(unix.SIGINT)
	p.expect("got ") // SIGINT, or SIGTERM for the context that ended
	p.order("exit 4")
	if got := p.status(); got != 4 {
		t.Errorf("status %d", got)
	}
}

func TestPanicIsACrash(t *testing.T) {
	for _, how := range []string{"panic", "fatal"} {
		t.Run(how, func(t *testing.T) {
			t.Parallel()
			p, first := keeperWithChild(t)
			p.order(how)
			p.expect("signal=aborted")
			if next := p.child(); next.socket != first.socket || next.restarts != 1 {
				t.Errorf("%+v after %+v", next, first)
			}
		})
	}
	t.Run("as the user wants", func(t *testing.T) {
		t.Parallel()
		p, _ := keeperWithChild(t, "GOTRACEBACK=single")
		p.order("panic")
		if got := p.status(); got != 2 {
			t.Errorf("status %d", got)
		}
	})
}

func TestChildNoticesThatItsKeeperIsKilled(t *testing.T) {
	p, _ := keeperWithChild(t)
	p.signal(unix.SIGKILL)
	p.expect("orphaned")
}

func TestChildThatDoesNotEndIsKilled(t *testing.T) {
	p, _ := keeperWithChild(t, "KEEPER_TEST_STUBBORN=1", "KEEPER_TEST_GRACE=300ms")
	p.signal(unix.SIGTERM)
	p.expect("got terminated")
	p.expect("did not stop in time: killing it")
	if got := p.status(); got != 128+9 {
		t.Errorf("status %d", got)
	}
}

func TestKeeperEndsBetweenTwoChildren(t *testing.T) {
	p, first := keeperWithChild(t)
	for _, pause := range []string{"0s", "100ms", "200ms", "400ms", "800ms", "1.6s"} {
		labtest.Check(t, unix.Kill(first.pid, unix.SIGKILL))
		if got := p.expect("socket is kept\" in="); got != pause {
			t.Fatalf("pause of %s, should be %s", got, pause)
		}
		if pause != "1.6s" {
			first = p.child()
		}
	}
	p.signal(unix.SIGHUP) // nobody is there for it
	p.signal(unix.SIGTERM)
	if got := p.status(); got != 0 {
		t.Errorf("status %d", got)
	}
}

func TestBackoff(t *testing.T) {
	var b backoff
	want := []time.Duration{0, 100, 200, 400, 800, 1600, 3200, 6400, 12800, 25600, 30000, 30000}
	for i, w := range want {
		if got := b.next(time.Second); got != w*time.Millisecond {
			t.Errorf("pause %d is %v", i, got)
		}
	}
	if got := b.next(time.Minute); got != 0 {
		t.Errorf("after a long life it is %v", got)
	}
	if got := b.next(time.Second); got != firstPause {
		t.Errorf("and then %v", got)
	}
}

func TestFirstStartThatFails(t *testing.T) {
	p := launch(t, "keeper", "KEEPER_TEST_PATH=/nowhere/verdict")
	if got := p.expect("error "); !strings.Contains(got, "start /nowhere/verdict: no such file") {
		t.Error(got)
	}
	if _, err := Keep(t.Context(), Options{}); err == nil {
		t.Error("kept nothing")
	}
}

func TestAnotherSocketIsKept(t *testing.T) {
	for _, order := range []string{"keep", "keep-and-die"} {
		t.Run(order, func(t *testing.T) {
			t.Parallel()
			p, first := keeperWithChild(t)
			p.order(order)
			var socket, err string
			if _, e := fmt.Sscanf(p.expect("kept "), "socket=%s err=%s", &socket, &err); e != nil || err != "<nil>" {
				t.Fatal(e, err)
			}
			if order == "keep" {
				labtest.Check(t, unix.Kill(first.pid, unix.SIGKILL))
			}
			if next := p.child(); next.socket != socket || next.socket == first.socket {
				t.Errorf("%+v, should have %s", next, socket)
			}
			ino, _, _ := strings.Cut(first.socket, "/")
			fds := fmt.Sprintf("/proc/%d/fd", p.cmd.Process.Pid)
			list, e := os.ReadDir(fds)
			labtest.Check(t, e)
			for _, d := range list {
				if to, _ := os.Readlink(fds + "/" + d.Name()); to == "socket:["+ino+"]" {
					t.Error("the keeper still holds the first socket")
				}
			}
		})
	}
}

func TestGrandchildrenSeeNothing(t *testing.T) {
	p, _ := keeperWithChild(t)
	p.order("look")
	if got, want := p.expect("grandchild "), look(); got != want {
		t.Errorf("descriptors and number of variables: %s, without a keeper %s", got, want)
	}
}

// childrenOf lists the children of a process, zombies included.
func childrenOf(t *testing.T, parent int) (pids []int) {
	t.Helper()
	list, err := os.ReadDir("/proc")
	labtest.Check(t, err)
	for _, d := range list {
		pid, err := strconv.Atoi(d.Name())
		if err != nil {
			continue
		}
		stat, err := os.ReadFile("/proc/" + d.Name() + "/stat")
		if err != nil {
			continue // it has ended meanwhile
		}
		if f := strings.Fields(string(stat[strings.LastIndexByte(string(stat), ')')+1:])); f[1] == strconv.Itoa(parent) {
			pids = append(pids, pid)
		}
	}
	return pids
}

// As the first process of a container, the keeper gets all orphans.
func TestFirstProcessReapsOrphans(t *testing.T) {
	cmd := prepare("keeper")
	cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: unix.CLONE_NEWPID}
	p := begin(t, cmd, cmd.Start)
	if got := p.expect("keeper "); !strings.HasPrefix(got, "pid=1 ") {
		t.Fatal(got)
	}
	first := p.child()
	child := childrenOf(t, cmd.Process.Pid)
	if len(child) != 1 {
		t.Fatal(child)
	}
	for range 3 {
		p.order("orphan")
		p.expect("orphan ")
		testkit.Eventually(t, deadline, "the orphan is the keeper's",
			func() bool { return len(childrenOf(t, cmd.Process.Pid)) == 2 })
		for _, pid := range childrenOf(t, cmd.Process.Pid) {
			if pid != child[0] {
				labtest.Check(t, unix.Kill(pid, unix.SIGKILL))
			}
		}
		testkit.Eventually(t, deadline, "the orphan is reaped",
			func() bool { return len(childrenOf(t, cmd.Process.Pid)) == 1 })
	}
	p.order("panic")
	if next := p.child(); next.socket != first.socket {
		t.Errorf("%+v after %+v", next, first)
	}
	p.signal(unix.SIGTERM)
	if got := p.status(); got != 7 {
		t.Errorf("status %d", got)
	}
}

// Flags of tables, and messages, that x/sys does not have.
const (
	tableOwner   = 2
	tablePersist = 4
)

// writeTable makes or updates the table "ip kept" by a batch of its own, with the owner and persist flags.
func writeTable(socket *os.File) error {
	message := func(typ, flags uint16, seq uint32, family byte, res uint16, attrs []byte) []byte {
		b := binary.NativeEndian.AppendUint32(nil, uint32(unix.NLMSG_HDRLEN+4+len(attrs)))
		b = binary.NativeEndian.AppendUint16(b, typ)
		b = binary.NativeEndian.AppendUint16(b, flags)
		b = binary.NativeEndian.AppendUint32(b, seq)
		b = binary.NativeEndian.AppendUint32(b, 0)
		b = append(b, family, 0)
		return append(binary.BigEndian.AppendUint16(b, res), attrs...)
	}
	attr := func(typ uint16, value []byte) []byte {
		b := binary.NativeEndian.AppendUint16(nil, uint16(4+len(value)))
		b = append(binary.NativeEndian.AppendUint16(b, typ), value...)
		return append(b, make([]byte, (4-len(b)%4)%4)...)
	}
	flags := binary.BigEndian.AppendUint32(nil, tableOwner|tablePersist)
	table := append(attr(unix.NFTA_TABLE_NAME, []byte("kept\x00")), attr(unix.NFTA_TABLE_FLAGS, flags)...)
	batch := message(unix.NFNL_MSG_BATCH_BEGIN, unix.NLM_F_REQUEST, 1, 0, unix.NFNL_SUBSYS_NFTABLES, nil)
	batch = append(batch, message(unix.NFNL_SUBSYS_NFTABLES<<8|unix.NFT_MSG_NEWTABLE,
		unix.NLM_F_REQUEST|unix.NLM_F_CREATE|unix.NLM_F_ACK, 2, unix.AF_INET, 0, table)...)
	batch = append(batch, message(unix.NFNL_MSG_BATCH_END, unix.NLM_F_REQUEST, 3, 0, unix.NFNL_SUBSYS_NFTABLES, nil)...)
	return withDescriptors([]syscall.Conn{socket}, nil, func(fds []int) error {
		if err := unix.Sendto(fds[0], batch, 0, &unix.SockaddrNetlink{Family: unix.AF_NETLINK}); err != nil {
			return err
		}
		b := make([]byte, 4096)
		n, _, err := unix.Recvfrom(fds[0], b, unix.MSG_DONTWAIT) // nf_tables has answered before sendto returns
		if err != nil {
			return err
		}
		if n < unix.NLMSG_HDRLEN+4 || binary.NativeEndian.Uint16(b[4:]) != unix.NLMSG_ERROR {
			return errors.New("no answer")
		}
		if errno := -int32(binary.NativeEndian.Uint32(b[unix.NLMSG_HDRLEN:])); errno != 0 {
			return unix.Errno(errno)
		}
		return nil
	})
}

// What all this is for: nobody else changes the table while the proxy is dead, and the next one can.
func TestTableStaysOwned(t *testing.T) {
	h := labtest.NewHost(t, labtest.NewNet(t), "node")
	cmd := h.Command("/proc/self/exe")
	cmd.Cmd.Env = prepare("keeper").Env
	p := begin(t, cmd.Cmd, cmd.Start)
	first := p.child()
	p.order("table")
	switch got := p.expect("table "); got {
	case "<nil>":
	case unix.EOPNOTSUPP.Error(), unix.EINVAL.Error():
		var u unix.Utsname
		labtest.Check(t, unix.Uname(&u))
		var major, minor int
		release := unix.ByteSliceToString(u.Release[:])
		if _, err := fmt.Sscanf(release, "%d.%d", &major, &minor); err != nil || major > 6 || major == 6 && minor >= 9 {
			t.Fatalf("Linux %s has tables that persist with their owner, and says %s", release, got)
		}
		t.Skipf("Linux %s has no tables that persist with their owner: %s", release, got)
	default:
		t.Fatal(got)
	}
	nobodyElse := func() {
		t.Helper()
		labtest.Run(t, h, "", "nft", "flush", "ruleset")
		out, err := h.Run("nft", "delete", "table", "ip", "kept")
		if err == nil || !strings.Contains(out, "Operation not permitted") {
			t.Errorf("nft delete table: %v", err)
		}
		if out := labtest.Run(t, h, "", "nft", "list", "tables"); !strings.Contains(out, "kept") {
			t.Error("the table is gone")
		}
	}
	nobodyElse()
	for range 4 { // so often that there is a pause
		labtest.Check(t, unix.Kill(first.pid, unix.SIGKILL))
		p.expect("socket is kept")
		nobodyElse()
		first = p.child()
		p.order("table")
		if got := p.expect("table "); got != "<nil>" {
			t.Errorf("the next child cannot write: %s", got)
		}
	}
	p.signal(unix.SIGKILL)
	p.expect("orphaned")
	testkit.Eventually(t, deadline, "the table persists, for anybody to delete", func() bool {
		_, err := h.Run("nft", "delete", "table", "ip", "kept")
		return err == nil
	})
}
