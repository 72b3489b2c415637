package blackbox

import (
	"errors"
	"fmt"
	"os"
	"sync/atomic"
	"syscall"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

const (
	// captureBlocks blocks of captureBlock bytes are what the kernel may fill before it is read: some 9,000 packets.
	captureBlock  = 64 << 10
	captureBlocks = 32
	// captureRetire is after how many milliseconds a block is read although it is not full.
	captureRetire = 40
	// captureLate is how long a packet may be in a block that is not given over yet: the kernel's timer gives over what
	// has not changed since it looked last, and may itself be late.
	captureLate = 4 * captureRetire * time.Millisecond
	// captureSnap is how many bytes of a packet are kept: enough for an ICMPv6 error with the ports it is about.
	captureSnap = 96
	// capturePace bounds the processor time: in each captureWindow, no more packets are read. The kernel drops what it
	// then has no room for, and counts it.
	capturePace   = 20_000
	captureWindow = 100 * time.Millisecond
)

// capture is a packet socket of one network namespace, and the memory that it shares with the kernel.
type capture struct {
	file   *os.File
	raw    syscall.RawConn
	memory []byte
	next   int // block
	// window is when the current one began, and read how many packets were read in it.
	window time.Time
	read   int
}

// openCapture opens a packet socket in the network namespace of the calling thread.
func openCapture() (c *capture, err error) {
	fd, err := unix.Socket(unix.AF_PACKET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0)
	if err != nil {
		return nil, os.NewSyscallError("socket AF_PACKET", err)
	}
	defer func() {
		if err != nil {
			unix.Close(fd)
		}
	}()
	f := assemble(program)
	const frame = 2048
	err = errors.Join(
		unix.SetsockoptInt(fd, unix.SOL_PACKET, unix.PACKET_VERSION, unix.TPACKET_V3),
		unix.SetsockoptSockFprog(fd, unix.SOL_SOCKET, unix.SO_ATTACH_FILTER,
			&unix.SockFprog{Len: uint16(len(f)), Filter: &f[0]}),
		unix.SetsockoptTpacketReq3(fd, unix.SOL_PACKET, unix.PACKET_RX_RING, &unix.TpacketReq3{
			Block_size: captureBlock, Block_nr: captureBlocks, Frame_size: frame,
			Frame_nr: captureBlock / frame * captureBlocks, Retire_blk_tov: captureRetire,
		}),
	)
	if err != nil {
		return nil, fmt.Errorf("packet socket: %w", err)
	}
	c = &capture{}
	c.memory, err = unix.Mmap(fd, 0, captureBlock*captureBlocks, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	if err != nil {
		return nil, os.NewSyscallError("mmap", err)
	}
	if err = unix.Bind(fd, &unix.SockaddrLinklayer{Protocol: 0x0300}); err != nil { // ETH_P_ALL in network order
		return nil, errors.Join(os.NewSyscallError("bind", err), unix.Munmap(c.memory))
	}
	c.file = os.NewFile(uintptr(fd), "packets")
	if c.raw, err = c.file.SyscallConn(); err != nil {
		return nil, errors.Join(err, unix.Munmap(c.memory))
	}
	return c, nil
}

// run calls do with each packet until the capture is closed, read with the time before which it has read all that came,
// in nanoseconds, and lost with how many there was no room for.
func (c *capture) run(do func(*packet), read func(int64), lost func(uint64)) {
	defer unix.Munmap(c.memory)
	var p packet
	for {
		_ = c.file.SetReadDeadline(time.Now().Add(2 * captureWindow)) // so that what was lost is counted in time
		err := c.raw.Read(func(uintptr) bool {
			now := time.Now()
			c.blocks(&p, do)
			if c.read < capturePace {
				read(now.Add(-captureLate).UnixNano())
			}
			return c.read >= capturePace
		})
		if err != nil && !errors.Is(err, os.ErrDeadlineExceeded) {
			return
		}
		_ = c.raw.Control(func(fd uintptr) {
			s, err := unix.GetsockoptTpacketStatsV3(int(fd), unix.SOL_PACKET, unix.PACKET_STATISTICS)
			if err == nil && s.Drops > 0 {
				lost(uint64(s.Drops))
			}
		})
		time.Sleep(time.Until(c.window.Add(captureWindow)))
		c.window, c.read = time.Now(), 0
	}
}

// blocks reads the blocks that the kernel has given over, as many as the pace allows.
func (c *capture) blocks(p *packet, do func(*packet)) {
	if now := time.Now(); now.Sub(c.window) >= captureWindow {
		c.window, c.read = now, 0
	}
	for c.read < capturePace {
		block := c.memory[c.next*captureBlock:][:captureBlock]
		header := (*unix.TpacketHdrV1)(unsafe.Pointer(&block[unsafe.Offsetof(unix.TpacketBlockDesc{}.Hdr)]))
		if atomic.LoadUint32(&header.Block_status)&unix.TP_STATUS_USER == 0 {
			return
		}
		rest := block[header.Offset_to_first_pkt:]
		for range header.Num_pkts {
			h := (*unix.Tpacket3Hdr)(unsafe.Pointer(&rest[0]))
			if p.take(h, rest) {
				do(p)
			}
			c.read++
			rest = rest[h.Next_offset:]
		}
		atomic.StoreUint32(&header.Block_status, unix.TP_STATUS_KERNEL)
		c.next = (c.next + 1) % captureBlocks
	}
}

// take reads a packet from what the kernel writes: its header, the address of the link, and the packet.
func (p *packet) take(h *unix.Tpacket3Hdr, b []byte) bool {
	const headerLen = (unsafe.Sizeof(unix.Tpacket3Hdr{}) + unix.TPACKET_ALIGNMENT - 1) &^ (unix.TPACKET_ALIGNMENT - 1)
	link := (*unix.RawSockaddrLinklayer)(unsafe.Pointer(&b[headerLen]))
	*p = packet{at: int64(h.Sec)*1e9 + int64(h.Nsec), link: link.Ifindex, out: link.Pkttype == unix.PACKET_OUTGOING}
	return p.decode(b[h.Net:][:h.Snaplen])
}

func (c *capture) Close() error { return c.file.Close() }
