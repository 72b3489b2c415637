package keeper

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"runtime/debug"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

var (
	// ErrHandedOver is the cause why the context of a proxy ends that another one takes over from.
	ErrHandedOver = errors.New("keeper: another proxy takes over")
	// ErrEvicted is the cause why the context of a proxy ends that has to make room for good, and what Seat.Run returns
	// then.
	ErrEvicted = errors.New("keeper: told to make room and end")
	// ErrNoHolder is what Holder says if the place is free.
	ErrNoHolder = errors.New("keeper: nobody holds the place")

	// errSeated is the cause why a proxy without the place is told to end: another one has it.
	errSeated = errors.New("keeper: another proxy has the place")
	// errReplaced is the cause why a proxy is called again: a standby brought the socket that counts.
	errReplaced = errors.New("keeper: another socket owns the tables")
	// errMoved says that the place may have another holder now, or none: look again.
	errMoved = errors.New("keeper: the holder has left")
)

// Seat is the place of the one proxy of a network namespace: a listening unix socket with an abstract name. Such names
// belong to a network namespace, as its tables do, whatever containers the proxies are in; and the kernel takes the
// name back when its holder dies, however it dies.
//
// What happens:
//
//   - The place is free: Run takes it and calls the proxy.
//   - Another proxy holds it, and this one is a Newcomer: it asks the holder to hand over. The holder's proxy is told to end
//     by ErrHandedOver; then it sends the place itself, which is its listening socket, together with the netlink socket. So
//     the place is not free for a moment, and nobody else can come in between. The former holder stands by.
//   - The holder does not hand over within Patience: Run returns an error with the holder's pid. If the holder's proxy ends
//     later than that, nobody is there to take the place, and it is called anew.
//   - Another proxy holds it, and this one is no Newcomer: it stands by until the holder is gone, and then takes the place. A
//     former holder that stands by never asks for the place, so that two proxies do not take it from each other in turn. If
//     some stand by, the first one to come gets it, and the others stand by behind that one.
//   - The one that stands by brings its own socket to the holder. If that owns the tables, and the holder's does not (see
//     Owner), the holder works with it from then on: its proxy ends and is called anew. This is for the case that a holder
//     crashed, and somebody who knew nothing of the socket was first to take the place.
//   - Somebody evicts the holder (Evict): its proxy is told to end by ErrEvicted, it hands over, and Run returns ErrEvicted. The
//     same happens to all that stand by. Who does that wants nobody to write any more.
//   - The holder's process ends in an orderly way while somebody asks: it hands over before.
//   - The holder's process crashes: the place is with its keeper (Held), for the next child or, if somebody stands
//     by, for him.
//   - The name is held by a process that does not show that it may change nf_tables: Run calls the proxy without the
//     place, and takes it as soon as it is free. Nothing is sent to such a process, and nothing accepted from it. If
//     another proxy is found there later, this one stands by.
//
// The holder and who asks check each other, by what the kernel lets them do: see meet.
type Seat struct {
	// Name is the name of the place, "verdict" for "@verdict".
	Name string
	// Socket is the netlink socket the proxy works with if it gets no better one from a former holder. It may be nil. It
	// belongs to the seat from Run on, which closes it if it is replaced, and in the end.
	Socket *os.File
	// Newcomer has the seat ask a holder to hand over; otherwise it stands by. A proxy that is started anew after a crash
	// should stand by: if the one before it has the place again, that one is the better choice.
	Newcomer bool
	// Owner, if not nil, says whether a socket is the owner of the tables. Of two sockets that is the one to use. If
	// neither is known to be, it is the holder's, since that was in use.
	Owner func(*os.File) bool
	// Patience is how long a holder may take to hand over, by default 10 seconds.
	Patience time.Duration
	// Held, if not nil, is what this process was given at its start, perhaps with the place; its keeper holds the
	// place, too.
	Held *Held
	// Holds, if not nil, is told whether this process has the place, each time it is about to call the proxy with or
	// without it and when it gets it later.
	Holds func(bool)
	// Stuck, if not nil, is called when the proxy has been told to end and has not done so for Grace, by default 20
	// seconds. It says what is wrong. It is to end the process: there is no other way to get at what the proxy holds.
	Stuck func(what string)
	Grace time.Duration
	// Log is told who takes over from whom.
	Log *slog.Logger
}

// Run calls the proxy each time this process gets the place, with the socket to be used, nil if there is none. The
// proxy must not close it. When its context ends, it finishes what is under way and returns.
//
// Run returns what the proxy returned if that ended by itself; nil if ctx ended; ErrEvicted; or why the place cannot be
// had.
func (s *Seat) Run(ctx context.Context, proxy func(ctx context.Context, socket *os.File) error) error {
	s.defaults()
	defer s.close()
	p, err := s.inherit(), error(nil)
	for request := s.firstRequest(); ; request = requestWait {
		if p == nil && err == nil {
			p, err = s.claim(ctx, request)
		}
		if squatter := (*squatted)(nil); errors.As(err, &squatter) {
			s.Log.Error("working without the place: no other proxy can take over until it is free", "err", err)
			p, err = s.without(), nil
		}
		if err == nil {
			s.holds(p.listener != nil)
			err = p.occupy(ctx, proxy)
		}
		p = nil
		switch {
		case errors.Is(err, ErrHandedOver):
			// It may be days until this process is needed again.
			debug.FreeOSMemory()
			err = nil
			continue
		case errors.Is(err, ErrEvicted):
			return ErrEvicted
		case ctx.Err() != nil && errors.Is(err, ctx.Err()):
			return nil
		}
		return err
	}
}

// Evict has the holder and all that stand by end, and holds the place while f runs, with the holder's socket, or that
// of the seat, or none. Newcomers wait for it, and take the place afterwards. That there is no holder is no error. If
// the name is held by somebody else, f is called without the place: then a proxy may be at work that has no place,
// either.
func (s *Seat) Evict(ctx context.Context, f func(ctx context.Context, socket *os.File) error) error {
	s.defaults()
	defer s.close()
	p, err := s.claim(ctx, requestEvict)
	if squatter := (*squatted)(nil); errors.As(err, &squatter) {
		s.Log.Warn("going on without the place: should a proxy be at work, it is not told to end", "err", err)
		return f(ctx, s.Socket)
	}
	if err != nil {
		return err
	}
	p.closed = true
	return p.occupy(ctx, f)
}

// Holder says who holds a place; ErrNoHolder if nobody does. The holder notices nothing of it. It is an error that
// whoever has the name does not show within some seconds that it may change nf_tables.
func Holder(name string) (Peer, error) {
	deadline := time.Now().Add(5 * time.Second)
	for {
		m, peer, err := meet(context.Background(), name, deadline)
		switch {
		case err == nil:
			m.Close()
			return peer, nil
		case errors.Is(err, unix.ECONNREFUSED):
			return Peer{}, ErrNoHolder
		case errors.Is(err, errRights):
			return peer, nil // who is not to know more
		case time.Now().After(deadline) || peer.lacksRights():
			return Peer{}, &squatted{name, peer, err}
		}
		pause(context.Background(), lookAgain)
	}
}

func (s *Seat) defaults() {
	s.Patience = cmp.Or(s.Patience, 10*time.Second)
	s.Grace = cmp.Or(s.Grace, 20*time.Second)
	if s.Log == nil {
		s.Log = slog.New(slog.DiscardHandler)
	}
}

// inherit takes the place that this process was given at its start, if it was.
func (s *Seat) inherit() *place {
	if s.Held == nil || s.Held.Place == nil {
		return nil
	}
	file := s.Held.Place
	s.Held.Place = nil
	l, err := listenerOf(file)
	if err == nil && l.Addr().String() != address(s.Name).Name {
		err = errors.Join(fmt.Errorf("keeper: it is named %.100q", l.Addr().String()), l.Close())
	}
	if err != nil {
		s.Log.Warn("what was kept is not the place", "err", err)
		return nil
	}
	return s.take(l)
}

// late gives when a proxy that is told to end now is overdue.
func (s *Seat) late() <-chan time.Time {
	if s.Stuck == nil {
		return nil
	}
	return time.After(s.Grace)
}

func (s *Seat) holds(it bool) {
	if s.Holds != nil {
		s.Holds(it)
	}
}

// keepPlace has the keeper hold the place from now on; nil has it let go.
func (s *Seat) keepPlace(l *net.UnixListener) {
	if s.Held == nil {
		return
	}
	if err := s.Held.keepPlace(l); err != nil {
		s.Log.Warn("the place will be free while this is restarted", "err", err)
	}
}

// standby tells the keeper how many stand by.
func (s *Seat) standby(n int) {
	if s.Held != nil {
		s.Held.standby(n)
	}
}

func (s *Seat) close() {
	if s.Socket != nil {
		s.Socket.Close()
		s.Socket = nil
	}
}

func (s *Seat) firstRequest() string {
	if s.Newcomer {
		return requestHandOver
	}
	return requestWait
}

// owns says whether a socket is known to be the owner of the tables.
func (s *Seat) owns(socket *os.File) bool { return socket != nil && s.Owner != nil && s.Owner(socket) }

// adopt uses another socket from now on.
func (s *Seat) adopt(socket *os.File) {
	s.close()
	s.Socket = socket
}

// What is said on a connection to the place, after the proof. Two versions of this program may talk to each other
// here: there is one request and one answer, and who does not know a request refuses it.
const (
	requestHandOver = "hand over"
	requestEvict    = "evict"
	// requestWait is mostly answered by answerEnd alone: the end of the connection is what is waited for. It comes
	// with the socket of who stands by.
	requestWait = "wait"

	// answerTake comes with the listening socket, and the netlink socket if there is one.
	answerTake   = "take"
	answerEnd    = "end"
	answerRefuse = "refused: "
)

// Who has no success with whoever has the name looks again after lookAgain, then after twice as long each time up to
// lookAgainMost.
const (
	lookAgain     = 10 * time.Millisecond
	lookAgainMost = 200 * time.Millisecond
)

// claim gets the place, or says why not. It waits as long as the request says, but no longer than Patience for
// whoever has the name to show that he is a proxy.
func (s *Seat) claim(ctx context.Context, request string) (*place, error) {
	deadline, again := time.Now().Add(s.Patience), lookAgain
	for ctx.Err() == nil {
		l, err := net.ListenUnix("unixpacket", address(s.Name))
		if err == nil {
			return s.take(l), nil
		}
		if !errors.Is(err, unix.EADDRINUSE) {
			return nil, fmt.Errorf("keeper: %w", err)
		}
		m, peer, err := meet(ctx, s.Name, deadline)
		switch {
		case err == nil:
			p, err := s.ask(ctx, m, peer, request)
			if !errors.Is(err, errMoved) {
				return p, err
			}
			deadline, again = time.Now().Add(s.Patience), lookAgain
		case ctx.Err() != nil:
			return nil, ctx.Err()
		case errors.Is(err, errRights):
			return nil, err
		case peer.looksRight() && time.Now().After(deadline):
			return nil, s.deaf(peer)
		case peer.lacksRights() || time.Now().After(deadline):
			return nil, &squatted{s.Name, peer, err}
		}
		pause(ctx, again)
		again = min(2*again, lookAgainMost)
	}
	return nil, ctx.Err()
}

// deaf says that a holder does not answer.
func (s *Seat) deaf(peer Peer) error {
	return fmt.Errorf("keeper: %s is at work and did not hand over within %v", peer, s.Patience)
}

// ask asks the holder. It gives the place, or errMoved.
func (s *Seat) ask(ctx context.Context, m *meeting, holder Peer, request string) (*place, error) {
	defer m.Close()
	var files []syscall.Conn
	if request == requestWait {
		s.Log.Info("standing by: another proxy is at work", "holder", holder)
		if s.Socket != nil {
			files = append(files, s.Socket)
		}
	} else {
		s.Log.Info("another proxy is at work: taking over", "holder", holder)
		_ = m.SetReadDeadline(time.Now().Add(s.Patience))
	}
	defer context.AfterFunc(ctx, func() { _ = m.SetDeadline(time.Unix(1, 0)) })()
	_ = send(m.UnixConn, m.secret+" "+request, files...) // the answer tells, or its absence
	text, got, err := receive(m.UnixConn)
	switch {
	case ctx.Err() != nil:
		closeFiles(got)
		return nil, ctx.Err()
	case errors.Is(err, os.ErrDeadlineExceeded):
		return nil, s.deaf(holder)
	case err != nil:
		return nil, errors.Join(errMoved, err)
	case text == answerTake && len(got) > 0:
		return s.takeOver(got)
	}
	closeFiles(got)
	if text == answerEnd {
		return nil, ErrEvicted
	}
	return nil, fmt.Errorf("keeper: %s is at work and answers: %.100q", holder, text)
}

// takeOver takes the place that a holder has sent.
func (s *Seat) takeOver(files []*os.File) (*place, error) {
	if len(files) > 1 {
		if theirs := files[1]; s.owns(s.Socket) && !s.owns(theirs) {
			theirs.Close()
		} else {
			s.adopt(theirs)
		}
	}
	l, err := listenerOf(files[0])
	if err != nil {
		return nil, fmt.Errorf("keeper: take over: %w", err)
	}
	return s.take(l), nil
}

// listenerOf makes a listener of a file, which is closed.
func listenerOf(f *os.File) (*net.UnixListener, error) {
	defer f.Close()
	l, err := net.FileListener(f)
	if err != nil {
		return nil, err
	}
	u, ok := l.(*net.UnixListener)
	if !ok {
		return nil, errors.Join(errors.New("it is no unix socket"), l.Close())
	}
	return u, nil
}

// Peer is a process at the other end of a connection.
type Peer struct {
	// PID is its process id, 0 if it is in another container, whose ids mean nothing here.
	PID int
	// UID is its user.
	UID int
}

// String is for messages.
func (p Peer) String() string {
	if p.PID == 0 {
		return "a process in another container"
	}
	return fmt.Sprintf("pid %d", p.PID)
}

// capNetAdmin is the bit of CAP_NET_ADMIN.
const capNetAdmin = 1 << unix.CAP_NET_ADMIN

// capabilities gives what a process may do now, if that can be known: a process of another container has no pid here.
func (p Peer) capabilities() (bits uint64, known bool) {
	if p.PID == 0 {
		return 0, false
	}
	status, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", p.PID))
	_, rest, ok := strings.Cut(string(status), "\nCapEff:")
	if err != nil || !ok {
		return 0, false
	}
	_, err = fmt.Sscanf(rest, "%x", &bits)
	return bits, err == nil
}

// lacksRights says that a process cannot be a proxy. This saves time, and nothing is granted by it: the pid may be
// another's by now.
func (p Peer) lacksRights() bool {
	bits, known := p.capabilities()
	return known && bits&capNetAdmin == 0
}

// looksRight says that a process may well be a proxy that has no time for us. Nothing is granted by that, either. A
// program with the set-user-ID bit may have the rights and a socket of whoever started it: so it has to be ours.
func (p Peer) looksRight() bool {
	bits, known := p.capabilities()
	if known {
		own, err := os.Executable()
		theirs, e := os.Readlink(fmt.Sprintf("/proc/%d/exe", p.PID))
		theirs = strings.TrimSuffix(theirs, " (deleted)") // it may have been replaced
		known = err == nil && e == nil && filepath.Base(own) == filepath.Base(theirs)
	}
	for _, ns := range []string{"net", "user"} {
		own, err := os.Readlink("/proc/self/ns/" + ns)
		theirs, e := os.Readlink(fmt.Sprintf("/proc/%d/ns/%s", p.PID, ns))
		known = known && err == nil && e == nil && own == theirs
	}
	return known && bits&capNetAdmin != 0
}

// squatted says that the name is held by somebody who does not show that he may change nf_tables.
type squatted struct {
	name string
	peer Peer
	err  error
}

func (e *squatted) Error() string {
	who := "a process that does not answer (ss -xlp names it)"
	if e.peer != (Peer{}) {
		who = fmt.Sprintf("%s of user %d", e.peer, e.peer.UID)
	}
	return fmt.Sprintf("keeper: the name @%s is taken by %s, which is no proxy of ours: %v", e.name, who, e.err)
}

func (e *squatted) Unwrap() error { return e.err }

func address(name string) *net.UnixAddr { return &net.UnixAddr{Name: "@" + name, Net: "unixpacket"} }

// peerOf asks the kernel who is at the other end.
func peerOf(conn *net.UnixConn) (peer Peer, err error) {
	err = withDescriptors(filesOf(conn), nil, func(fds []int) error {
		cred, err := unix.GetsockoptUcred(fds[0], unix.SOL_SOCKET, unix.SO_PEERCRED)
		if err == nil {
			peer = Peer{PID: int(cred.Pid), UID: int(cred.Uid)}
		}
		return err
	})
	if err != nil {
		return Peer{}, fmt.Errorf("keeper: who is at the other end: %w", err)
	}
	return peer, nil
}

func pause(ctx context.Context, d time.Duration) {
	if d <= 0 {
		return
	}
	select {
	case <-ctx.Done():
	case <-time.After(d):
	}
}
