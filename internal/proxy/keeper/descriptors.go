package keeper

import (
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"syscall"

	"golang.org/x/sys/unix"
)

// maxFiles is how many descriptors one of our messages may carry: a listener and a socket.
const maxFiles = 2

// maxText is longer than any of our messages.
const maxText = 512

// send sends one message with files. The connection must be unixpacket, which keeps messages apart.
func send(conn *net.UnixConn, text string, files ...syscall.Conn) error {
	return withDescriptors(files, nil, func(fds []int) error {
		_, _, err := conn.WriteMsgUnix([]byte(text), rights(fds), nil)
		return err
	})
}

// rights is unix.UnixRights, without a control message if there is no file.
func rights(fds []int) []byte {
	if len(fds) == 0 {
		return nil
	}
	return unix.UnixRights(fds...)
}

// receive reads one message. The caller closes the files; no child of this process inherits them. The end of the
// connection is an error.
func receive(conn *net.UnixConn) (text string, files []*os.File, err error) {
	b, oob := make([]byte, maxText), make([]byte, unix.CmsgSpace(4*maxFiles))
	n, oobn, flags, _, err := conn.ReadMsgUnix(b, oob)
	// An empty message ends the connection, too, and may carry files nevertheless.
	messages, parseErr := unix.ParseSocketControlMessage(oob[:max(oobn, 0)])
	for i := range messages {
		fds, err := unix.ParseUnixRights(&messages[i])
		if err != nil {
			continue
		}
		for _, fd := range fds {
			files = append(files, os.NewFile(uintptr(fd), "received"))
		}
	}
	switch {
	case err != nil:
	case n == 0:
		err = io.EOF
	case parseErr != nil:
		err = parseErr
	case flags&(unix.MSG_CTRUNC|unix.MSG_TRUNC) != 0:
		err = fmt.Errorf("keeper: received a truncated message: %w", unix.EMSGSIZE)
	}
	if err != nil {
		closeFiles(files)
		return "", nil, err
	}
	return string(b[:n]), files, nil
}

func closeFiles(files []*os.File) {
	for _, f := range files {
		if f != nil {
			f.Close()
		}
	}
}

// filesOf builds the argument of withDescriptors.
func filesOf(files ...syscall.Conn) []syscall.Conn { return files }

// withDescriptors calls do with the descriptors of files, which stay open meanwhile. os.File.Fd would also make the
// socket blocking, for all processes that hold it.
func withDescriptors(files []syscall.Conn, fds []int, do func(fds []int) error) error {
	if len(files) == 0 {
		return do(fds)
	}
	raw, err := files[0].SyscallConn()
	if err != nil {
		return err
	}
	var done error
	err = raw.Control(func(fd uintptr) { done = withDescriptors(files[1:], append(fds, int(fd)), do) })
	return errors.Join(err, done)
}

// sameSocket says whether two files are the same socket: each socket of a machine has an inode of its own.
func sameSocket(a, b *os.File) bool {
	x, err := a.Stat()
	if err != nil {
		return false
	}
	y, err := b.Stat()
	return err == nil && os.SameFile(x, y)
}

// checkSocket returns what is wrong with a descriptor that should be a socket, and sets close-on-exec on it.
func checkSocket(fd int) error {
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		return fmt.Errorf("descriptor %d: %w", fd, err)
	}
	if st.Mode&unix.S_IFMT != unix.S_IFSOCK {
		return fmt.Errorf("descriptor %d is not a socket", fd)
	}
	unix.CloseOnExec(fd)
	return nil
}
