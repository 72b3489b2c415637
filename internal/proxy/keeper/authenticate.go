package keeper

import (
	"context"
	"crypto/rand"
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"os"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// Both sides of a connection to the lease must prove that they may change nf_tables in this network namespace. The
// kernel decides: it lets a process send a netlink message to another process (not to the kernel) only if the sender,
// at that moment, has CAP_NET_ADMIN in the user namespace that the socket's network namespace belongs to. nf_tables
// requires the same of a writer. Such a message reaches sockets of the same network namespace only, and it carries the
// sender's port id.
//
//	claimant                                  holder
//	connects, with no name        ──────────▶ answers "door PORT" and closes: no state is kept for anybody
//	netlink to PORT: NAME SECRET  ══════════▶ has a ticket: the sender is privileged
//	connects from the name NAME   ──────────▶ finds the ticket of NAME, else answers as above
//	                              ◀══════════ netlink to the claimant: NAME SECRET. The holder is privileged, too
//	SECRET and its request        ──────────▶ handles it
//
// NAME is a random abstract name that the claimant's socket is bound to, so nobody else can connect from it meanwhile.
// Nobody can sit in the middle either, because the holder confirms a connection that comes from NAME. SECRET is only
// sent by netlink to the holder's port, and to the process that has proved to have it. So neither a name, nor a port id
// that becomes free, is of use to others.

var (
	// errNotPermitted says that this process cannot prove that it may change nf_tables.
	errNotPermitted = errors.New("keeper: another process holds the lease, and this one may not take over: " +
		"CAP_NET_ADMIN in the network namespace is required")
	// errUnauthenticated says that the holder of the name did not prove that it may change nf_tables.
	errUnauthenticated = errors.New("it did not prove that it may change nf_tables")
)

// Messages of the authentication. Everybody gets the port; the rest goes by netlink.
const (
	wordPort     = "verdict/2 door "
	wordAnnounce = "verdict/2 come "
	wordConfirm  = "verdict/2 here "
)

// maxTickets bounds how many claimants may be about to connect. Only privileged processes get a ticket.
const maxTickets = 64

// ticketLife is how long a claimant may take to connect after its announcement.
const ticketLife = 10 * time.Second

// ticket is a claimant's announcement.
type ticket struct {
	name, secret string
	port         uint32 // its sender's
	expires      time.Time
}

// authenticator receives the announcements of claimants. It is not safe for concurrent use.
type authenticator struct {
	*netlink
	tickets []ticket // the oldest first
}

func newAuthenticator() (*authenticator, error) {
	n, err := openNetlinkPort()
	if err != nil {
		return nil, err
	}
	return &authenticator{netlink: n}, nil
}

// redeem removes and returns the ticket of a name. It knows all that was sent before the call: netlink delivers
// synchronously.
func (a *authenticator) redeem(name string) (ticket, bool) {
	for {
		from, text, err := a.receive()
		if err != nil && !errors.Is(err, unix.ENOBUFS) {
			break
		}
		rest, ok := strings.CutPrefix(text, wordAnnounce)
		owner, secret, hasSecret := strings.Cut(rest, " ")
		if err != nil || from == 0 || !ok || !hasSecret { // 0 is the kernel
			continue
		}
		if len(a.tickets) == maxTickets {
			a.tickets = a.tickets[1:]
		}
		a.tickets = append(a.tickets, ticket{owner, secret, from, time.Now().Add(ticketLife)})
	}
	for i, t := range a.tickets {
		if t.name == name {
			a.tickets = append(a.tickets[:i:i], a.tickets[i+1:]...)
			return t, time.Now().Before(t.expires)
		}
	}
	return ticket{}, false
}

// confirm tells a claimant that the connection from its name has arrived.
func (a *authenticator) confirm(t ticket) error {
	return a.send(t.port, wordConfirm+t.name+" "+t.secret)
}

// session is a connection to the holder, after both sides have proved that they may change nf_tables.
type session struct {
	*net.UnixConn
	secret string
}

// authenticate connects to the holder of the name. It returns the peer as far as it is known, even with an error:
// errNotPermitted, one that wraps errUnauthenticated, or that of a refused or closed connection.
func authenticate(ctx context.Context, name string, deadline time.Time) (m *session, peer Peer, err error) {
	port, peer, err := askPort(ctx, name, deadline)
	if err != nil {
		return nil, peer, err
	}
	n, err := openNetlinkPort()
	if err != nil {
		return nil, peer, err
	}
	defer n.close()
	own, secret := name+"-"+randomText(), randomText()
	fd, err := newUnixSocket("@" + own)
	if err != nil {
		return nil, peer, err
	}
	announcement := own + " " + secret
	switch err := n.send(port, wordAnnounce+announcement); {
	case errors.Is(err, unix.EPERM):
		unix.Close(fd)
		return nil, peer, errNotPermitted
	case err != nil: // there is no such port, or no longer
		unix.Close(fd)
		return nil, peer, fmt.Errorf("%w: its netlink port: %w", errUnauthenticated, err)
	}
	conn, peer, err := connect(ctx, fd, name, deadline)
	if err != nil {
		return nil, peer, err
	}
	if err := n.awaitConfirmation(ctx, conn, port, wordConfirm+announcement, deadline); err != nil {
		conn.Close()
		return nil, peer, err
	}
	return &session{conn, secret}, peer, nil
}

// askPort asks the holder for the port of its authenticator.
func askPort(ctx context.Context, name string, deadline time.Time) (port uint32, peer Peer, err error) {
	fd, err := newUnixSocket("")
	if err != nil {
		return 0, Peer{}, err
	}
	conn, peer, err := connect(ctx, fd, name, deadline)
	if err != nil {
		return 0, peer, err
	}
	defer conn.Close()
	if peer.lacksNetAdmin() {
		return 0, peer, errUnauthenticated
	}
	defer context.AfterFunc(ctx, func() { _ = conn.SetReadDeadline(time.Unix(1, 0)) })()
	_ = conn.SetReadDeadline(deadline)
	if ctx.Err() != nil {
		return 0, peer, ctx.Err()
	}
	text, files, err := receive(conn)
	closeFiles(files)
	if err != nil {
		return 0, peer, err
	}
	number, ok := strings.CutPrefix(text, wordPort)
	n, err := strconv.ParseUint(number, 10, 32)
	if !ok || err != nil || n == 0 {
		return 0, peer, fmt.Errorf("%w: it answered %.40q", errUnauthenticated, text)
	}
	return uint32(n), peer, nil
}

// awaitConfirmation waits until the process behind a port confirms a connection, which it keeps open meanwhile.
func (n *netlink) awaitConfirmation(
	ctx context.Context, conn *net.UnixConn, port uint32, word string, deadline time.Time,
) error {
	for {
		from, text, err := n.receive()
		switch {
		case err == nil && from == port && text == word:
			return nil
		case err == nil:
			continue
		case !errors.Is(err, unix.EAGAIN):
			return err
		case ctx.Err() != nil:
			return ctx.Err()
		case time.Now().After(deadline):
			return errUnauthenticated
		}
		ended, err := n.poll(conn, 50*time.Millisecond)
		if err != nil {
			return err
		}
		if ended {
			return fmt.Errorf("%w: it closed the connection", errUnauthenticated)
		}
	}
}

// poll waits until there is a message to receive, and says whether a connection has ended.
func (n *netlink) poll(conn *net.UnixConn, most time.Duration) (ended bool, err error) {
	err = withDescriptors(filesOf(conn), nil, func(fds []int) error {
		p := []unix.PollFd{{Fd: int32(n.fd), Events: unix.POLLIN}, {Fd: int32(fds[0])}}
		_, err := unix.Poll(p, int(most/time.Millisecond))
		ended = p[0].Revents == 0 && p[1].Revents&unix.POLLHUP != 0
		if err == unix.EINTR {
			return nil
		}
		return err
	})
	return ended, err
}

func randomText() string {
	b := make([]byte, 16)
	_, _ = rand.Read(b) // it never fails
	return fmt.Sprintf("%x", b)
}

// newUnixSocket opens a blocking socket, bound to a name unless that is empty.
func newUnixSocket(name string) (int, error) {
	fd, err := unix.Socket(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC, 0)
	if err == nil && name != "" {
		if err = unix.Bind(fd, &unix.SockaddrUnix{Name: name}); err != nil {
			unix.Close(fd)
		}
	}
	if err != nil {
		return -1, fmt.Errorf("keeper: unix socket: %w", err)
	}
	return fd, nil
}

// connectSlice is how long a connect may block before the context is checked.
const connectSlice = 200 * time.Millisecond

// connect connects a socket, which it takes over, to a name. If the queue there is full, it waits in the kernel's
// order, so that others who connect again and again do not keep it out. The returned peer is the process that called
// listen.
func connect(ctx context.Context, fd int, name string, deadline time.Time) (*net.UnixConn, Peer, error) {
	slice := unix.NsecToTimeval(int64(connectSlice))
	_ = unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_SNDTIMEO, &slice)
	for {
		err := unix.Connect(fd, &unix.SockaddrUnix{Name: "@" + name})
		if err == nil {
			break
		}
		again := errors.Is(err, unix.EAGAIN) || errors.Is(err, unix.EINTR)
		if ctx.Err() != nil || !again || time.Now().After(deadline) {
			unix.Close(fd)
			return nil, Peer{}, errors.Join(ctx.Err(), fmt.Errorf("keeper: connect to @%s: %w", name, err))
		}
	}
	if err := unix.SetNonblock(fd, true); err != nil {
		unix.Close(fd)
		return nil, Peer{}, fmt.Errorf("keeper: %w", err)
	}
	conn, err := connOf(os.NewFile(uintptr(fd), "lease"))
	if err != nil {
		return nil, Peer{}, fmt.Errorf("keeper: %w", err)
	}
	peer, err := peerOf(conn)
	if err != nil {
		conn.Close()
	}
	return conn, peer, err
}

// netlink is a socket for messages between processes.
type netlink struct {
	fd   int
	port uint32
}

// openNetlinkPort opens a socket of the protocol that the proxy needs anyway, whatever a security module permits.
func openNetlinkPort() (*netlink, error) {
	fd, err := unix.Socket(unix.AF_NETLINK, unix.SOCK_RAW|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, unix.NETLINK_NETFILTER)
	if err != nil {
		return nil, fmt.Errorf("keeper: netlink socket: %w", err)
	}
	if err := unix.Bind(fd, &unix.SockaddrNetlink{Family: unix.AF_NETLINK}); err != nil {
		unix.Close(fd)
		return nil, fmt.Errorf("keeper: netlink socket: %w", err)
	}
	name, err := unix.Getsockname(fd)
	own, ok := name.(*unix.SockaddrNetlink)
	if err != nil || !ok {
		unix.Close(fd)
		return nil, fmt.Errorf("keeper: netlink socket without an address: %w", err)
	}
	return &netlink{fd, own.Pid}, nil
}

func (n *netlink) close() { unix.Close(n.fd) }

// send sends a text to another process. If the port belongs to another program by now, that program skips the message,
// because its type is NLMSG_NOOP.
func (n *netlink) send(to uint32, text string) error {
	b := binary.NativeEndian.AppendUint32(nil, uint32(unix.NLMSG_HDRLEN+len(text)))
	b = binary.NativeEndian.AppendUint16(b, unix.NLMSG_NOOP)
	b = append(b, make([]byte, unix.NLMSG_HDRLEN-len(b))...)
	return unix.Sendto(n.fd, append(b, text...), 0, &unix.SockaddrNetlink{Family: unix.AF_NETLINK, Pid: to})
}

// receive returns the next message without waiting (EAGAIN), and the port id of its sender as the kernel reports it.
// The text is empty if the message has another type.
func (n *netlink) receive() (from uint32, text string, err error) {
	b := make([]byte, maxText)
	got, sender, err := unix.Recvfrom(n.fd, b, 0)
	if err != nil {
		return 0, "", err
	}
	if s, ok := sender.(*unix.SockaddrNetlink); ok {
		from = s.Pid
	}
	if got < unix.NLMSG_HDRLEN || binary.NativeEndian.Uint16(b[4:]) != unix.NLMSG_NOOP {
		return from, "", nil
	}
	return from, string(b[unix.NLMSG_HDRLEN:got]), nil
}
