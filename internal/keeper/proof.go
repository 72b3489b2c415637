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

// Both sides of a connection to the place have to show that they may change nf_tables in this network namespace. The
// kernel is the judge: it lets a process send a netlink message to another process (not to the kernel) only if the
// sender, at that moment, has CAP_NET_ADMIN in the user namespace that the socket's network namespace belongs to.
// That is what nf_tables asks of a writer. Such a message reaches sockets of the same network namespace only, and it
// tells the sender's port id.
//
//	newcomer                                  holder
//	connects, with no name        ──────────▶ answers "door PORT" and closes: no state is kept for anybody
//	netlink to PORT: NAME SECRET  ══════════▶ has a ticket: the sender is privileged
//	connects from the name NAME   ──────────▶ finds the ticket of NAME, else answers as above
//	                              ◀══════════ netlink to the newcomer: NAME SECRET. The holder is privileged, too
//	SECRET and its request        ──────────▶ deals with it
//
// NAME is a random abstract name that the newcomer's socket is bound to, so nobody else can connect from it
// meanwhile, and nobody can sit in the middle: the holder vouches for a connection that comes from NAME. SECRET is
// only sent by netlink to who keeps the door, and to who has shown to have it. So neither a name, nor a port id that
// becomes free is of use to others.

var (
	// errRights says that this process cannot show that it may change nf_tables.
	errRights = errors.New("keeper: another process has the place, and this one has no right to take over: " +
		"it takes CAP_NET_ADMIN in the network namespace")
	// errUnproven says that whoever has the name did not show that he may change nf_tables.
	errUnproven = errors.New("it has not shown that it may change nf_tables")
)

// What is said for a proof. A "door" is told to everybody, the rest goes by netlink.
const (
	greeting = "verdict/2 door "
	wordCome = "verdict/2 come "
	wordHere = "verdict/2 here "
)

// mostTickets bounds how many newcomers may be about to connect. Only privileged processes get a ticket.
const mostTickets = 64

// ticketLife is how long a newcomer may take to connect after it has announced itself.
const ticketLife = 10 * time.Second

// ticket is a newcomer's announcement.
type ticket struct {
	name, secret string
	port         uint32 // its sender's
	until        time.Time
}

// door is where newcomers announce themselves to the holder. It is not safe for concurrent use.
type door struct {
	*netlink
	tickets []ticket // the oldest first
}

func openDoor() (*door, error) {
	n, err := openNetlinkPort()
	if err != nil {
		return nil, err
	}
	return &door{netlink: n}, nil
}

// admit gives the ticket of a name and takes it away. What was sent before the call is known to it: netlink delivers
// at once.
func (d *door) admit(name string) (ticket, bool) {
	for {
		from, text, err := d.receive()
		if err != nil && !errors.Is(err, unix.ENOBUFS) {
			break
		}
		rest, ok := strings.CutPrefix(text, wordCome)
		who, secret, both := strings.Cut(rest, " ")
		if err != nil || from == 0 || !ok || !both { // 0 is the kernel
			continue
		}
		if len(d.tickets) == mostTickets {
			d.tickets = d.tickets[1:]
		}
		d.tickets = append(d.tickets, ticket{who, secret, from, time.Now().Add(ticketLife)})
	}
	for i, t := range d.tickets {
		if t.name == name {
			d.tickets = append(d.tickets[:i:i], d.tickets[i+1:]...)
			return t, time.Now().Before(t.until)
		}
	}
	return ticket{}, false
}

// vouch tells a newcomer that the connection from its name is here.
func (d *door) vouch(t ticket) error { return d.send(t.port, wordHere+t.name+" "+t.secret) }

// meeting is a connection to the holder, after both sides have shown that they may change nf_tables.
type meeting struct {
	*net.UnixConn
	secret string
}

// meet connects to whoever has the name. The peer is who that is, as far as it is known, even if there is an error:
// errRights, one that wraps errUnproven, or that of a connection which is refused or ends.
func meet(ctx context.Context, name string, deadline time.Time) (m *meeting, peer Peer, err error) {
	port, peer, err := findDoor(ctx, name, deadline)
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
	switch err := n.send(port, wordCome+announcement); {
	case errors.Is(err, unix.EPERM):
		unix.Close(fd)
		return nil, peer, errRights
	case err != nil: // there is no such port, or no longer
		unix.Close(fd)
		return nil, peer, fmt.Errorf("%w: its door: %w", errUnproven, err)
	}
	conn, peer, err := connect(ctx, fd, name, deadline)
	if err != nil {
		return nil, peer, err
	}
	if err := n.await(ctx, conn, port, wordHere+announcement, deadline); err != nil {
		conn.Close()
		return nil, peer, err
	}
	return &meeting{conn, secret}, peer, nil
}

// findDoor asks where to announce oneself.
func findDoor(ctx context.Context, name string, deadline time.Time) (port uint32, peer Peer, err error) {
	fd, err := newUnixSocket("")
	if err != nil {
		return 0, Peer{}, err
	}
	conn, peer, err := connect(ctx, fd, name, deadline)
	if err != nil {
		return 0, peer, err
	}
	defer conn.Close()
	if peer.lacksRights() {
		return 0, peer, errUnproven
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
	number, ok := strings.CutPrefix(text, greeting)
	n, err := strconv.ParseUint(number, 10, 32)
	if !ok || err != nil || n == 0 {
		return 0, peer, fmt.Errorf("%w: it says %.40q", errUnproven, text)
	}
	return uint32(n), peer, nil
}

// await waits until the keeper of the door vouches for a connection, which that keeps open meanwhile.
func (n *netlink) await(ctx context.Context, conn *net.UnixConn, port uint32, word string, deadline time.Time) error {
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
			return errUnproven
		}
		ended, err := n.poll(conn, 50*time.Millisecond)
		if err != nil {
			return err
		}
		if ended {
			return fmt.Errorf("%w: it closes the connection", errUnproven)
		}
	}
}

// poll waits until there is something to receive, and says whether a connection has ended.
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

// newUnixSocket gives a socket that blocks, bound to a name unless that is empty.
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

// connectSlice is how long a connect may block until the context is looked at.
const connectSlice = 200 * time.Millisecond

// connect connects a socket, which it takes over, to a name. While the queue there is full it waits in the kernel's
// order, so that others who connect again and again do not keep it out. A process that connects is told who called
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
	conn, err := connOf(os.NewFile(uintptr(fd), "place"))
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

// openNetlinkPort opens a socket of the protocol that the proxy needs anyway, whatever a security module grants.
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

// send sends a text to another process. Should the port be somebody else's, he passes the message over: such is
// NLMSG_NOOP.
func (n *netlink) send(to uint32, text string) error {
	b := binary.NativeEndian.AppendUint32(nil, uint32(unix.NLMSG_HDRLEN+len(text)))
	b = binary.NativeEndian.AppendUint16(b, unix.NLMSG_NOOP)
	b = append(b, make([]byte, unix.NLMSG_HDRLEN-len(b))...)
	return unix.Sendto(n.fd, append(b, text...), 0, &unix.SockaddrNetlink{Family: unix.AF_NETLINK, Pid: to})
}

// receive gives the next message without waiting (EAGAIN), and the port id of its sender as the kernel tells it. The
// text is empty if it is no such message.
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
