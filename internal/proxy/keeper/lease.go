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

	"github.com/verdict-proxy/verdict/internal/system/clock"
)

var (
	// ErrHandedOver is the cancellation cause of a proxy's context when another proxy takes the lease.
	ErrHandedOver = errors.New("keeper: another proxy takes over")
	// ErrEvicted is the cancellation cause of a proxy's context when the proxy has to end for good. Lease.Run then returns
	// it.
	ErrEvicted = errors.New("keeper: evicted")
	// ErrNoHolder is what Holder returns if nobody holds the lease.
	ErrNoHolder = errors.New("keeper: nobody holds the lease")

	// errHeldElsewhere is the cancellation cause of a proxy that runs without the lease when another proxy holds it.
	errHeldElsewhere = errors.New("keeper: another proxy holds the lease")
	// errSocketReplaced is the cancellation cause when a standby brought the socket that owns the tables: the proxy is
	// restarted.
	errSocketReplaced = errors.New("keeper: another socket owns the tables")
	// errHolderGone says that the holder has left. The lease may be free or have another holder: retry.
	errHolderGone = errors.New("keeper: the holder has left")
)

// Lease lets one proxy at a time work in a network namespace. It is a listening unix socket with an abstract name. Such
// names belong to a network namespace, as its tables do, whatever containers the proxies run in. The kernel frees the
// name when its holder dies, however it dies.
//
// What happens:
//
//   - The lease is free: Run acquires it and calls the proxy.
//   - Another proxy holds it, and TakeOver is set: this process asks the holder to hand over. The holder cancels its
//     proxy with ErrHandedOver and then sends the lease itself, which is its listening socket, together with the
//     netlink socket. So the lease is never free, and nobody else can come in between. The former holder stands by.
//   - The holder does not hand over within HandOverTimeout: Run returns an error with the holder's pid. If the holder's
//     proxy ends later, nobody is there to take the lease, and that proxy is restarted.
//   - Another proxy holds it, and TakeOver is not set: this process stands by until the holder is gone, and then
//     acquires the lease. A former holder that stands by never asks for the lease, so two proxies do not take it from
//     each other in turn. If several stand by, the first one gets it, and the others stand by behind that one.
//   - A standby brings its own socket to the holder. If that socket owns the tables and the holder's does not (see
//     OwnsTables), the holder uses it from then on: its proxy ends and is restarted. This covers the case that a holder
//     crashed, and a process that did not have the socket acquired the lease first.
//   - Somebody evicts the holder (Evict): its proxy is cancelled with ErrEvicted, it hands over, and Run returns
//     ErrEvicted. All standbys end the same way. Evict is for callers that want nobody to write any more.
//   - The holder's process ends in an orderly way while another proxy asks: it hands over first.
//   - The holder's process crashes: its keeper holds the lease (Inheritance), for the next child or, if there is a
//     standby, for that one.
//   - The name is held by a process that does not prove that it may change nf_tables: Run calls the proxy without the
//     lease, and acquires the lease as soon as it is free. Nothing is sent to such a process, and nothing accepted from
//     it. If another proxy holds the name later, this one stands by.
//
// The holder and the claimant authenticate each other by what the kernel lets them do: see authenticate.
type Lease struct {
	// Name is the name of the lease, "verdict" for "@verdict".
	Name string
	// Socket is the netlink socket that the proxy uses unless a former holder hands over a better one. It may be nil. From
	// Run on it belongs to the lease, which closes it when it is replaced and at the end.
	Socket *os.File
	// TakeOver makes Run ask a holder to hand over; otherwise Run stands by. A proxy that is restarted after a crash
	// should stand by: if the former proxy holds the lease again, that one is the better choice.
	TakeOver bool
	// OwnsTables, if not nil, says whether a socket owns the tables. Of two sockets the owner is used. If neither owns
	// them, the holder's is used, because it was in use.
	OwnsTables func(*os.File) bool
	// HandOverTimeout is how long a holder may take to hand over, by default 10 seconds.
	HandOverTimeout time.Duration
	// Inherited, if not nil, is what this process got at its start, perhaps with the lease. Its keeper holds the lease as
	// well.
	Inherited *Inheritance
	// OnHeld, if not nil, is called with whether this process holds the lease: before each call of the proxy, and when the
	// lease is acquired later.
	OnHeld func(bool)
	// OnStuck, if not nil, is called when the proxy was cancelled and has not returned within Grace, by default 20
	// seconds. It gets what is wrong, and is to end the process: nothing else frees what the proxy holds.
	OnStuck func(what string)
	Grace   time.Duration
	// Log gets who takes over from whom.
	Log *slog.Logger
}

// Run calls the proxy each time this process acquires the lease. The proxy gets the socket to use, nil if there is
// none, and must not close it. When its context is cancelled, it finishes what is under way and returns.
//
// Run returns the proxy's result if the proxy ended by itself; nil if ctx was cancelled; ErrEvicted; or why the lease
// cannot be acquired.
func (l *Lease) Run(ctx context.Context, proxy func(ctx context.Context, socket *os.File) error) error {
	l.defaults()
	defer l.close()
	h, err := l.restore(), error(nil)
	for request := l.firstRequest(); ; request = requestWait {
		if h == nil && err == nil {
			h, err = l.acquire(ctx, request)
		}
		if taken := (*nameTakenError)(nil); errors.As(err, &taken) {
			l.Log.Error("running without the lease: no other proxy can take over until the name is free", "err", err)
			h, err = l.withoutLease(), nil
		}
		if err == nil {
			l.reportHeld(h.listener != nil)
			err = h.run(ctx, proxy)
		}
		h = nil
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

// Evict ends the holder and all standbys, and holds the lease while f runs. f gets the holder's socket, else that of
// the lease, else nil. Proxies that want to take over wait and acquire the lease afterwards. It is no error if there is
// no holder. If another program holds the name, f runs without the lease: then a proxy may be running without the lease
// as well.
func (l *Lease) Evict(ctx context.Context, f func(ctx context.Context, socket *os.File) error) error {
	l.defaults()
	defer l.close()
	h, err := l.acquire(ctx, requestEvict)
	if taken := (*nameTakenError)(nil); errors.As(err, &taken) {
		l.Log.Warn("continuing without the lease: a running proxy, if there is one, is not stopped", "err", err)
		return f(ctx, l.Socket)
	}
	if err != nil {
		return err
	}
	h.evicting = true
	return h.run(ctx, f)
}

// Holder returns the process that holds a lease, or ErrNoHolder. The holder does not notice. It is an error if the
// process that holds the name does not prove within some seconds that it may change nf_tables.
func Holder(name string) (Peer, error) {
	deadline := time.Now().Add(5 * time.Second)
	for {
		m, peer, err := authenticate(context.Background(), name, deadline)
		switch {
		case err == nil:
			m.Close()
			return peer, nil
		case errors.Is(err, unix.ECONNREFUSED):
			return Peer{}, ErrNoHolder
		case errors.Is(err, errNotPermitted):
			return peer, nil // we may not authenticate, but somebody answers
		case time.Now().After(deadline) || peer.lacksNetAdmin():
			return Peer{}, &nameTakenError{name, peer, err}
		}
		clock.Pause(context.Background(), retryDelay)
	}
}

func (s *Lease) defaults() {
	s.HandOverTimeout = cmp.Or(s.HandOverTimeout, 10*time.Second)
	s.Grace = cmp.Or(s.Grace, 20*time.Second)
	if s.Log == nil {
		s.Log = slog.New(slog.DiscardHandler)
	}
}

// restore takes the lease that this process got at its start, if it did.
func (s *Lease) restore() *holder {
	if s.Inherited == nil || s.Inherited.Lease == nil {
		return nil
	}
	file := s.Inherited.Lease
	s.Inherited.Lease = nil
	l, err := listenerOf(file)
	if err == nil && l.Addr().String() != leaseAddress(s.Name).Name {
		err = errors.Join(fmt.Errorf("keeper: the socket's name is %.100q", l.Addr().String()), l.Close())
	}
	if err != nil {
		s.Log.Warn("ignoring the inherited lease: it is not the expected socket", "err", err)
		return nil
	}
	return s.hold(l)
}

// graceTimer fires when a proxy that is cancelled now is overdue.
func (s *Lease) graceTimer() <-chan time.Time {
	if s.OnStuck == nil {
		return nil
	}
	return time.After(s.Grace)
}

func (s *Lease) reportHeld(it bool) {
	if s.OnHeld != nil {
		s.OnHeld(it)
	}
}

// keep makes the keeper hold the lease from now on; nil makes the keeper release it.
func (s *Lease) keep(l *net.UnixListener) {
	if s.Inherited == nil {
		return
	}
	if err := s.Inherited.keepLease(l); err != nil {
		s.Log.Warn("failed to store the lease: it will be free during a restart", "err", err)
	}
}

// reportStandbys tells the keeper how many proxies stand by.
func (s *Lease) reportStandbys(n int) {
	if s.Inherited != nil {
		s.Inherited.reportStandbys(n)
	}
}

func (s *Lease) close() {
	if s.Socket != nil {
		s.Socket.Close()
		s.Socket = nil
	}
}

func (s *Lease) firstRequest() string {
	if s.TakeOver {
		return requestHandOver
	}
	return requestWait
}

// ownsTables says whether a socket is known to own the tables.
func (s *Lease) ownsTables(socket *os.File) bool {
	return socket != nil && s.OwnsTables != nil && s.OwnsTables(socket)
}

// replaceSocket closes the socket and uses another one from now on.
func (s *Lease) replaceSocket(socket *os.File) {
	s.close()
	s.Socket = socket
}

// Messages on a connection to the lease, after authentication. Two versions of this program may talk to each other
// here: there is one request and one answer, and an unknown request is refused.
const (
	requestHandOver = "hand over"
	requestEvict    = "evict"
	// requestWait is mostly answered by answerEnd alone: the standby waits for the end of the connection. The request
	// carries the standby's socket.
	requestWait = "wait"

	// answerTake carries the listening socket, and the netlink socket if there is one.
	answerTake   = "take"
	answerEnd    = "end"
	answerRefuse = "refused: "
)

// acquire retries after retryDelay, then after twice as long each time up to maxRetryDelay.
const (
	retryDelay    = 10 * time.Millisecond
	maxRetryDelay = 200 * time.Millisecond
)

// acquire returns the lease, or why it cannot be had. It waits as long as the request says, but no longer than
// HandOverTimeout for the process that holds the name to prove that it is a proxy.
func (s *Lease) acquire(ctx context.Context, request string) (*holder, error) {
	deadline, delay := time.Now().Add(s.HandOverTimeout), retryDelay
	for ctx.Err() == nil {
		l, err := net.ListenUnix("unixpacket", leaseAddress(s.Name))
		if err == nil {
			return s.hold(l), nil
		}
		if !errors.Is(err, unix.EADDRINUSE) {
			return nil, fmt.Errorf("keeper: %w", err)
		}
		m, peer, err := authenticate(ctx, s.Name, deadline)
		switch {
		case err == nil:
			h, err := s.request(ctx, m, peer, request)
			if !errors.Is(err, errHolderGone) {
				return h, err
			}
			deadline, delay = time.Now().Add(s.HandOverTimeout), retryDelay
		case ctx.Err() != nil:
			return nil, ctx.Err()
		case errors.Is(err, errNotPermitted):
			return nil, err
		case peer.looksLikeProxy() && time.Now().After(deadline):
			return nil, s.noAnswer(peer)
		case peer.lacksNetAdmin() || time.Now().After(deadline):
			return nil, &nameTakenError{s.Name, peer, err}
		}
		clock.Pause(ctx, delay)
		delay = min(2*delay, maxRetryDelay)
	}
	return nil, ctx.Err()
}

// noAnswer is the error for a holder that does not answer.
func (s *Lease) noAnswer(peer Peer) error {
	return fmt.Errorf("keeper: %s holds the lease and did not hand over within %v", peer, s.HandOverTimeout)
}

// request sends a request to the holder. It returns the lease, or errHolderGone.
func (s *Lease) request(ctx context.Context, m *session, holder Peer, request string) (*holder, error) {
	defer m.Close()
	var files []syscall.Conn
	if request == requestWait {
		s.Log.Info("standing by: another proxy is running", "holder", holder)
		if s.Socket != nil {
			files = append(files, s.Socket)
		}
	} else {
		s.Log.Info("taking over from the running proxy", "holder", holder)
		_ = m.SetReadDeadline(time.Now().Add(s.HandOverTimeout))
	}
	defer context.AfterFunc(ctx, func() { _ = m.SetDeadline(time.Unix(1, 0)) })()
	_ = send(m.UnixConn, m.secret+" "+request, files...) // a failure shows as a missing answer
	text, got, err := receive(m.UnixConn)
	switch {
	case ctx.Err() != nil:
		closeFiles(got)
		return nil, ctx.Err()
	case errors.Is(err, os.ErrDeadlineExceeded):
		return nil, s.noAnswer(holder)
	case err != nil:
		return nil, errors.Join(errHolderGone, err)
	case text == answerTake && len(got) > 0:
		return s.received(got)
	}
	closeFiles(got)
	if text == answerEnd {
		return nil, ErrEvicted
	}
	return nil, fmt.Errorf("keeper: %s holds the lease and answered: %.100q", holder, text)
}

// received holds the lease that the former holder has sent.
func (s *Lease) received(files []*os.File) (*holder, error) {
	if len(files) > 1 {
		if received := files[1]; s.ownsTables(s.Socket) && !s.ownsTables(received) {
			received.Close()
		} else {
			s.replaceSocket(received)
		}
	}
	l, err := listenerOf(files[0])
	if err != nil {
		return nil, fmt.Errorf("keeper: take over: %w", err)
	}
	return s.hold(l), nil
}

// listenerOf turns a file into a listener and closes the file.
func listenerOf(f *os.File) (*net.UnixListener, error) {
	defer f.Close()
	l, err := net.FileListener(f)
	if err != nil {
		return nil, err
	}
	u, ok := l.(*net.UnixListener)
	if !ok {
		return nil, errors.Join(errors.New("not a unix socket"), l.Close())
	}
	return u, nil
}

// Peer is a process at the other end of a connection.
type Peer struct {
	// PID is its process id. 0 means that it is in another container, whose ids mean nothing here.
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

// capabilities returns the process's effective capabilities if they can be read: a process of another container has no
// pid here.
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

// lacksNetAdmin says that a process cannot be a proxy. This only saves time and grants nothing: the pid may be another
// process's by now.
func (p Peer) lacksNetAdmin() bool {
	bits, known := p.capabilities()
	return known && bits&capNetAdmin == 0
}

// looksLikeProxy says that a process may be a proxy that is too busy to answer. This grants nothing, either. A
// set-user-ID program may have the capability and a socket of the user who started it, so the program must be ours.
func (p Peer) looksLikeProxy() bool {
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

// nameTakenError says that the name is held by a process that did not prove that it may change nf_tables.
type nameTakenError struct {
	name string
	peer Peer
	err  error
}

func (e *nameTakenError) Error() string {
	who := "a process that does not answer (ss -xlp names it)"
	if e.peer != (Peer{}) {
		who = fmt.Sprintf("%s of user %d", e.peer, e.peer.UID)
	}
	return fmt.Sprintf("keeper: the name @%s is held by %s, which is not a Verdict proxy: %v", e.name, who, e.err)
}

func (e *nameTakenError) Unwrap() error { return e.err }

func leaseAddress(name string) *net.UnixAddr {
	return &net.UnixAddr{Name: "@" + name, Net: "unixpacket"}
}

// peerOf returns the process at the other end, as the kernel knows it.
func peerOf(conn *net.UnixConn) (peer Peer, err error) {
	err = withDescriptors(filesOf(conn), nil, func(fds []int) error {
		cred, err := unix.GetsockoptUcred(fds[0], unix.SOL_SOCKET, unix.SO_PEERCRED)
		if err == nil {
			peer = Peer{PID: int(cred.Pid), UID: int(cred.Uid)}
		}
		return err
	})
	if err != nil {
		return Peer{}, fmt.Errorf("keeper: read the peer's credentials: %w", err)
	}
	return peer, nil
}
