package netlink

import (
	"errors"
	"fmt"

	"golang.org/x/sys/unix"
)

// NetfilterLen is the length of the header of nfnetlink's messages, GenericLen that of generic netlink's.
const (
	NetfilterLen = 4
	GenericLen   = 4
)

// Netfilter starts a message of nfnetlink, for a family such as NFPROTO_IPV4.
func (w *Buffer) Netfilter(typ, flags uint16, family uint8) int {
	return w.Message(typ, flags, family, unix.NFNETLINK_V0, 0, 0)
}

// Generic starts a message of generic netlink: a command of a family.
func (w *Buffer) Generic(family, flags uint16, command byte) int {
	return w.Message(family, flags, command, 1, 0, 0)
}

// NFTables returns the type of a message of nf_tables.
func NFTables(message uint16) uint16 { return unix.NFNL_SUBSYS_NFTABLES<<8 | message }

// Begin writes the message that begins a transaction of nf_tables.
func (w *Buffer) Begin() { w.batch(unix.NFNL_MSG_BATCH_BEGIN) }

// Finish writes the message that ends a transaction. The kernel checks one without it, but changes nothing.
func (w *Buffer) Finish() { w.batch(unix.NFNL_MSG_BATCH_END) }

func (w *Buffer) batch(typ uint16) {
	w.End(w.Message(typ, 0, unix.AF_UNSPEC, unix.NFNETLINK_V0, 0, unix.NFNL_SUBSYS_NFTABLES))
}

// Generation returns the number of the last transaction of nf_tables in the network namespace, whoever made it.
func (c *Conn) Generation() (uint32, error) {
	var w Buffer
	w.End(w.Netfilter(NFTables(unix.NFT_MSG_GETGEN), 0, unix.AF_UNSPEC))
	body, err := c.Get(w.Bytes())
	if err != nil {
		return 0, fmt.Errorf("generation of nf_tables: %w", err)
	}
	if id := Find(body[min(NetfilterLen, len(body)):], unix.NFTA_GEN_ID); len(id) == 4 {
		return id.Big32(), nil
	}
	return 0, errors.New("generation of nf_tables: the kernel does not tell")
}

// Family returns the number of a family of generic netlink. That there is none is ENOENT. A kernel may load its module.
func (c *Conn) Family(name string) (uint16, error) {
	var w Buffer
	m := w.Generic(unix.GENL_ID_CTRL, 0, unix.CTRL_CMD_GETFAMILY)
	w.Text(unix.CTRL_ATTR_FAMILY_NAME, name)
	w.End(m)
	body, err := c.Get(w.Bytes())
	if err != nil {
		return 0, fmt.Errorf("generic netlink family %s: %w", name, err)
	}
	if id := Find(body[min(GenericLen, len(body)):], unix.CTRL_ATTR_FAMILY_ID).Native16(); id != 0 {
		return id, nil
	}
	return 0, fmt.Errorf("generic netlink family %s: the kernel does not tell its number: %w", name, unix.ENOENT)
}
