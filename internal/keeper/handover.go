package keeper

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"runtime/debug"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

var (
	// ErrHandedOver is the cause why the context of a proxy ends that another one takes over from.
	ErrHandedOver = errors.New("keeper: another proxy takes over")
	// ErrEvicted is the cause why the context of a proxy ends that has to make room for good, and what Seat.Run returns then.
	ErrEvicted = errors.New("keeper: told to make room and end")
	// ErrNoHolder is what Holder says if the place is free.
	ErrNoHolder = errors.New("keeper: nobody holds the place")

	// errReplaced is the cause why a proxy is called again: a standby brought the socket that counts.
	errReplaced = errors.New("keeper: another socket owns the tables")
	// errMoved says that the place may have another holder now, or none: look again.
	errMoved = errors.New("keeper: the holder has left")
)

// Seat is the place of the one proxy of a network namespace: a listening unix socket with an abstract name. Such names belong
// to a network namespace, as its tables do, whatever containers the proxies are in; and the kernel takes the name back when
// its holder dies, however it dies.
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
//   - The name is held by a process of another user that is not root: Run returns an error. Nothing is sent to it, and nothing
//     accepted from it.
//
// The holder and who asks check each other by the credentials that the kernel tells: root, or the same user.
type Seat struct {
	// Name is the name of the place, "verdict" for "@verdict".
	Name string
	// Socket is the netlink socket the proxy works with if it gets no better one from a former holder. It may be nil. It
	// belongs to the seat from Run on, which closes it if it is replaced, and in the end.
	Socket *os.File
	// Newcomer has the seat ask a holder to hand over; otherwise it stands by. A proxy that is started anew after a crash
	// should stand by: if the one before it has the place again, that one is the better choice.
	Newcomer bool
	// Owner, if not nil, says whether a socket is the owner of the tables. Of two sockets that is the one to use. If neither is
	// known to be, it is the holder's, since that was in use.
	Owner func(*os.File) bool
	// Patience is how long a holder may take to hand over, by default 10 seconds.
	Patience time.Duration
	// Log is told who takes over from whom.
	Log *slog.Logger
}

// Run calls the proxy each time this process gets the place, with the socket to be used, nil if there is none. The proxy must
// not close it. When its context ends, it finishes what is under way and returns.
//
// Run returns what the proxy returned if that ended by itself; nil if ctx ended; ErrEvicted; or why the place cannot be had.
func (s *Seat) Run(ctx context.Context, proxy func(ctx context.Context, socket *os.File) error) error {
	s.defaults()
	defer s.close()
	for request := s.firstRequest(); ; request = requestWait {
		p, err := s.claim(ctx, request)
		if err == nil {
			err = p.occupy(ctx, proxy)
		}
		switch {
		case errors.Is(err, ErrHandedOver):
			// It may be days until this process is needed again.
			debug.FreeOSMemory()
			continue
		case errors.Is(err, ErrEvicted):
			return ErrEvicted
		case ctx.Err() != nil && errors.Is(err, ctx.Err()):
			return nil
		}
		return err
	}
}

// Evict has the holder and all that stand by end, and holds the place while f runs, with the holder's socket, or that of the
// seat, or none. Newcomers wait for it, and take the place afterwards. That there is no holder is no error.
func (s *Seat) Evict(ctx context.Context, f func(ctx context.Context, socket *os.File) error) error {
	s.defaults()
	defer s.close()
	p, err := s.claim(ctx, requestEvict)
	if err != nil {
		return err
	}
	p.closed = true
	return p.occupy(ctx, f)
}

// Holder says who holds a place; ErrNoHolder if nobody does. The holder notices nothing of it.
func Holder(name string) (Peer, error) {
	conn, peer, err := dial(context.Background(), name)
	if errors.Is(err, unix.ECONNREFUSED) {
		return Peer{}, ErrNoHolder
	}
	if err != nil {
		return Peer{}, err
	}
	conn.Close()
	if !peer.trusted() {
		return Peer{}, stranger(name, peer)
	}
	return peer, nil
}

func (s *Seat) defaults() {
	if s.Patience == 0 {
		s.Patience = 10 * time.Second
	}
	if s.Log == nil {
		s.Log = slog.New(slog.DiscardHandler)
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

// What is said on a connection to the place. Two versions of this program may talk to each other here: there is one request
// and one answer, and who does not know a request refuses it.
const (
	requestHandOver = "verdict/1 hand over"
	requestEvict    = "verdict/1 evict"
	// requestWait is never answered but by answerEnd: the end of the connection is what is waited for. It comes with the
	// socket of who stands by.
	requestWait = "verdict/1 wait"

	// answerTake comes with the listening socket, and the netlink socket if there is one.
	answerTake   = "take"
	answerEnd    = "end"
	answerRefuse = "refused: "
)

// lookAgain keeps a loop from spinning while a name is bound and not listened at yet, or a queue is full.
const lookAgain = 10 * time.Millisecond

// claim gets the place, or says why not. It waits as long as the request says.
func (s *Seat) claim(ctx context.Context, request string) (*place, error) {
	since := time.Now()
	for ctx.Err() == nil {
		began := time.Now()
		l, err := net.ListenUnix("unixpacket", address(s.Name))
		if err == nil {
			return s.take(l), nil
		}
		if !errors.Is(err, unix.EADDRINUSE) {
			return nil, fmt.Errorf("keeper: %w", err)
		}
		p, err := s.approach(ctx, request)
		if !errors.Is(err, errMoved) {
			return p, err
		}
		// A holder that has listened for some time and left is no reason to give up, only one that never listens.
		took := time.Since(began)
		if took > s.Patience/10 {
			since = time.Now()
		}
		if time.Since(since) > s.Patience {
			return nil, fmt.Errorf("keeper: the name @%s is taken by a process that does not answer (ss -xlp names it): %w", s.Name, err)
		}
		if took < lookAgain {
			pause(ctx, lookAgain-took)
		}
	}
	return nil, ctx.Err()
}

// approach asks the holder. It gives the place, or errMoved.
func (s *Seat) approach(ctx context.Context, request string) (*place, error) {
	conn, holder, err := dial(ctx, s.Name)
	if err != nil {
		if errors.Is(err, unix.ECONNREFUSED) || errors.Is(err, unix.EAGAIN) {
			return nil, errors.Join(errMoved, err)
		}
		return nil, err
	}
	defer conn.Close()
	if !holder.trusted() {
		return nil, stranger(s.Name, holder)
	}
	var files []syscall.Conn
	if request == requestWait {
		s.Log.Info("standing by: another proxy is at work", "holder", holder)
		if s.Socket != nil {
			files = append(files, s.Socket)
		}
	} else {
		s.Log.Info("another proxy is at work: taking over", "holder", holder)
		_ = conn.SetReadDeadline(time.Now().Add(s.Patience))
	}
	defer context.AfterFunc(ctx, func() { _ = conn.SetDeadline(time.Unix(1, 0)) })()
	_ = send(conn, request, files...) // the answer tells, or its absence
	text, got, err := receive(conn)
	switch {
	case ctx.Err() != nil:
		closeFiles(got)
		return nil, ctx.Err()
	case errors.Is(err, os.ErrDeadlineExceeded):
		return nil, fmt.Errorf("keeper: %s is at work and did not hand over within %v", holder, s.Patience)
	case err != nil:
		return nil, errors.Join(errMoved, err)
	case text == answerTake && len(got) > 0:
		return s.takeOver(got)
	}
	closeFiles(got)
	if text == answerEnd {
		return nil, ErrEvicted
	}
	return nil, fmt.Errorf("keeper: %s is at work and answers: %s", holder, text)
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
	l, err := net.FileListener(files[0])
	files[0].Close()
	if err != nil {
		return nil, fmt.Errorf("keeper: take over: %w", err)
	}
	u, ok := l.(*net.UnixListener)
	if !ok {
		l.Close()
		return nil, errors.New("keeper: take over: what was handed over is no unix socket")
	}
	// Who connects is told of the process that called listen last.
	err = withDescriptors([]syscall.Conn{u}, nil, func(fds []int) error { return unix.Listen(fds[0], unix.SOMAXCONN) })
	if err != nil {
		u.Close()
		return nil, fmt.Errorf("keeper: take over: %w", err)
	}
	return s.take(u), nil
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

// trusted says whether to deal with it.
func (p Peer) trusted() bool { return p.UID == 0 || p.UID == os.Geteuid() }

func stranger(name string, p Peer) error {
	return fmt.Errorf("keeper: the name @%s is taken by %s of user %d, which is no proxy of ours", name, p, p.UID)
}

func address(name string) *net.UnixAddr { return &net.UnixAddr{Name: "@" + name, Net: "unixpacket"} }

func dial(ctx context.Context, name string) (*net.UnixConn, Peer, error) {
	conn, err := (&net.Dialer{}).DialContext(ctx, "unixpacket", address(name).Name)
	if err != nil {
		return nil, Peer{}, fmt.Errorf("keeper: %w", err)
	}
	u := conn.(*net.UnixConn)
	peer, err := peerOf(u)
	if err != nil {
		u.Close()
		return nil, Peer{}, err
	}
	return u, peer, nil
}

// peerOf asks the kernel who is at the other end.
func peerOf(conn *net.UnixConn) (peer Peer, err error) {
	err = withDescriptors([]syscall.Conn{conn}, nil, func(fds []int) error {
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
	select {
	case <-ctx.Done():
	case <-time.After(d):
	}
}
