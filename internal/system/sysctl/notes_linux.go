package sysctl

import (
	"errors"
	"fmt"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/verdict-proxy/verdict/internal/system/netlink"
)

// What a parameter was before is written down as the name of a chain of nf_tables, was-0-net.ipv4.vs.conntrack: it
// stays as long as the kernel's parameters do, and is there for a process in another container.

// NotePrefix is what all notes begin with.
const NotePrefix = "was-"

// NoteOf gives the note of a parameter.
func NoteOf(name string, before int) string { return fmt.Sprintf("%s%d-%s", NotePrefix, before, name) }

// Noted reads a note.
func Noted(note string) (name string, before int, ok bool) {
	number, name, ok := strings.Cut(strings.TrimPrefix(note, NotePrefix), "-")
	before, err := strconv.Atoi(number)
	return name, before, ok && err == nil
}

// Notes sets parameters of the network namespace of the calling thread for a while. What they were is in a table of
// nf_tables with this name, which has no rules.
type Notes struct {
	Table string
	Host  Host
}

// Set notes what parameters are, unless an earlier process has noted them, and sets them. Results are those of Apply;
// if nothing can be noted, nothing is set.
func (n Notes) Set(settings []Setting) (changed []Written, errs []error) {
	notes, err := n.read()
	if err != nil {
		return nil, []error{err}
	}
	known := map[string]bool{}
	for _, note := range notes {
		name, _, _ := Noted(note)
		known[name] = true
	}
	var add []string
	for _, s := range settings {
		is, err := n.Host.read(s.Path)
		if err == nil && !known[s.Name()] && is != s.Value && !(s.AtLeast && is > s.Value) {
			add = append(add, NoteOf(s.Name(), is))
		}
	}
	if len(add) > 0 {
		if err := n.write(add); err != nil {
			return nil, []error{err}
		}
	}
	changed, errs = n.Host.Apply(settings)
	if len(changed) == 0 && len(notes) == 0 && len(add) > 0 {
		errs = append(errs, n.remove())
	}
	return changed, errs
}

// Restore gives parameters their values from before, and then forgets these. It forgets none if one fails.
func (n Notes) Restore() (changed []Written, err error) {
	notes, err := n.read()
	if err != nil || len(notes) == 0 {
		return nil, err
	}
	var settings []Setting
	for _, note := range notes {
		if name, before, ok := Noted(note); ok {
			settings = append(settings, Setting{Path: "proc/sys/" + strings.ReplaceAll(name, ".", "/"), Value: before})
		}
	}
	changed, errs := n.Host.Apply(settings)
	if len(errs) > 0 {
		return changed, errors.Join(errs...)
	}
	return changed, n.remove()
}

// read returns the notes; none if there is no table.
func (n Notes) read() (notes []string, err error) {
	var w netlink.Buffer
	w.End(w.Netfilter(netlink.NFTables(unix.NFT_MSG_GETCHAIN), unix.NLM_F_DUMP, unix.NFPROTO_IPV4))
	c, err := netlink.Dial(unix.NETLINK_NETFILTER, 0)
	if err != nil {
		return nil, err
	}
	err = c.Dump(w.Bytes(), func() { notes = nil }, func(body []byte) {
		a := netlink.Decode(body[min(netlink.NetfilterLen, len(body)):])
		name := a[unix.NFTA_CHAIN_NAME].Text()
		if a[unix.NFTA_CHAIN_TABLE].Text() == n.Table && strings.HasPrefix(name, NotePrefix) {
			notes = append(notes, name)
		}
	})
	if err = errors.Join(err, c.Close()); err != nil {
		return nil, fmt.Errorf("nft: list chains: %w", err)
	}
	return notes, nil
}

// write adds notes.
func (n Notes) write(notes []string) error {
	return n.transaction(func(w *netlink.Buffer) {
		n.table(w, unix.NFT_MSG_NEWTABLE, unix.NLM_F_CREATE)
		for _, note := range notes {
			m := w.Netfilter(netlink.NFTables(unix.NFT_MSG_NEWCHAIN), unix.NLM_F_CREATE, unix.NFPROTO_IPV4)
			w.Text(unix.NFTA_CHAIN_TABLE, n.Table)
			w.Text(unix.NFTA_CHAIN_NAME, note)
			w.End(m)
		}
	})
}

// remove deletes the table.
func (n Notes) remove() error {
	return n.transaction(func(w *netlink.Buffer) { n.table(w, unix.NFT_MSG_DELTABLE, 0) })
}

func (n Notes) table(w *netlink.Buffer, typ, flags uint16) {
	m := w.Netfilter(netlink.NFTables(typ), flags, unix.NFPROTO_IPV4)
	w.Text(unix.NFTA_TABLE_NAME, n.Table)
	w.End(m)
}

func (n Notes) transaction(messages func(*netlink.Buffer)) error {
	var w netlink.Buffer
	w.Begin()
	messages(&w)
	w.Finish()
	c, err := netlink.Dial(unix.NETLINK_NETFILTER, 0)
	if err != nil {
		return err
	}
	refused, err := c.Commit(w.Bytes())
	if err == nil && len(refused) > 0 {
		err = &refused[0]
	}
	if err = errors.Join(err, c.Close()); err != nil {
		return fmt.Errorf("nft: write table %s: %w", n.Table, err)
	}
	return nil
}
