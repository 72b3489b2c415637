package kernel

import (
	"encoding/binary"
	"fmt"
	"slices"

	"github.com/google/nftables/expr"
	"golang.org/x/sys/unix"

	"github.com/verdict-proxy/verdict/internal/system/ipfamily"
	"github.com/verdict-proxy/verdict/internal/system/netlink"
	"github.com/verdict-proxy/verdict/nft"
	"github.com/verdict-proxy/verdict/sync/dataplane"
	"github.com/verdict-proxy/verdict/sync/snapshot"
)

// KeepSupported asks the kernel whether it can forward packets untranslated, so that clients keep their address. It
// changes nothing, and returns nil, ErrRights, or an error that says what is missing.
func (b *Backend) KeepSupported() error {
	probe := batch{tableName: "probe-"}
	probe.restart()
	for _, f := range ipfamily.All {
		probe.table(f, &nft.TableTxn{AddSets: nft.IngressSets(), AddChains: nft.IngressChains("lo")})
	}
	refused, err := b.conn.Commit(probe.Bytes())
	if err != nil {
		return fmt.Errorf("nft: probe: %w", err)
	}
	switch {
	case len(refused) == 0:
		return nil
	case refused[0].Errno == unix.EPERM:
		return ErrRights
	}
	return fmt.Errorf("this kernel cannot forward packets at the ingress of a device: %w (it takes "+
		"CONFIG_NF_TABLES_NETDEV, CONFIG_NFT_FWD_NETDEV and CONFIG_NETFILTER_INGRESS)", probe.refusalError(refused[0]))
}

// refusedIngress reports whether the kernel refused anything at the ingress but elements.
func (b *Backend) refusedIngress(r *rejected) bool {
	return slices.ContainsFunc(r.refused, func(e netlink.Error) bool {
		return slices.ContainsFunc(b.batch.messages, func(m message) bool {
			return m.seq == e.Seq && m.ingress && len(m.elements) == 0
		})
	})
}

// forgetRefusal tries the ingress again once a state has another device there. The kernel takes a chain away with its
// device, without a word, also one that only its owner may change: so another one of the same name has the tables read
// back.
func (b *Backend) forgetRefusal(want *dataplane.State) {
	if want.Device == b.device && want.DeviceIndex == b.deviceIndex {
		return
	}
	if want.Device == b.device && b.syncState == stateInSync {
		b.syncState = stateStale
	}
	b.device, b.deviceIndex, b.model.NoIngress = want.Device, want.DeviceIndex, false
}

// leaveIngress has a transaction that makes the tables anew delete those at the ingress, if there are any.
func (b *Backend) leaveIngress(txn *nft.Txn) (*nft.Txn, error) {
	for i, f := range ipfamily.All {
		info, err := b.reader.tableAt(f, true)
		if err != nil {
			return nil, err
		}
		txn.Tables[i].DropIngress = info.exists
	}
	return txn, nil
}

// claimIngress takes the tables at the ingress that nobody owns, if this Backend owns the others.
func (b *Backend) claimIngress(port uint32) error {
	for _, f := range ipfamily.All {
		t, err := b.reader.tableAt(f, true)
		switch {
		case err != nil:
			return err
		case t.owner != 0 && t.owner != port:
			return &Owned{f, t.owner}
		case !b.options.Own || !t.exists || t.owner == port || t.flags&tablePersist == 0:
			continue
		}
		b.batch.restart()
		m := b.batch.objectAt(f, true, unix.NFT_MSG_NEWTABLE, unix.NLM_F_CREATE, "own table")
		b.batch.Big32(nftaTableFlags, b.batch.tableFlags)
		b.batch.End(m)
		b.batch.Finish()
		if err := b.send(b.batch.Bytes()); err != nil {
			return b.ownerError(err)
		}
	}
	return nil
}

// removeIngress deletes the tables at the ingress.
func (b *Backend) removeIngress() error {
	for _, f := range ipfamily.All {
		info, err := b.reader.tableAt(f, true)
		if err != nil || !info.exists {
			if err != nil {
				return err
			}
			continue
		}
		b.batch.restart()
		b.batch.dropIngress(f)
		b.batch.Finish()
		if err := b.ownerError(b.send(b.batch.Bytes())); err != nil {
			return err
		}
	}
	return nil
}

// forward is the expression fwd, which sends a packet on to a neighbour. The library has none.
type forward struct {
	expr.Any
	device, addr uint32
	family       ipfamily.Family
}

func (e *forward) marshal() []byte {
	const sregDev, sregAddr, nfproto = 1, 2, 3 // NFTA_FWD_*
	var w netlink.Buffer
	w.Text(unix.NFTA_EXPR_NAME, "fwd")
	d := w.Nest(unix.NFTA_EXPR_DATA)
	w.Big32(sregDev, e.device)
	w.Big32(sregAddr, e.addr)
	w.Big32(nfproto, uint32(e.family.NFProto()))
	w.Close(d)
	return w.Bytes()
}

// etherType is how a link-layer header calls a family, in network order.
var etherType = ipfamily.Per[[]byte]{{0x08, 0x00}, {0x86, 0xdd}}

// matchAtIngress are the statements that only rules at the ingress have, where one of the headers decides.
func matchAtIngress(f ipfamily.Family, s nft.Statement) []expr.Any {
	const arphrdEther = 1
	switch s := s.(type) {
	case nft.OfFamily:
		return []expr.Any{&expr.Meta{Key: expr.MetaKeyPROTOCOL, Register: register(0)}, equal(false, etherType[f])}
	case nft.NotForHere:
		return []expr.Any{&expr.Meta{Key: expr.MetaKeyPKTTYPE, Register: register(0)},
			equal(true, []byte{unix.PACKET_HOST})}
	case nft.Ethernet:
		return []expr.Any{&expr.Meta{Key: expr.MetaKeyIIFTYPE, Register: register(0)},
			equal(false, binary.NativeEndian.AppendUint16(nil, arphrdEther))}
	case nft.PriorityClassIs:
		return append(loadPool(nft.PoolClass, register(0)), equal(false, native(s.Value)))
	}
	return matchHeader(f, s)
}

// matchHeader compares fragments' headers, and those of ICMP errors.
func matchHeader(f ipfamily.Family, s nft.Statement) []expr.Any {
	nextFragment := []expr.Any{&expr.Payload{DestRegister: register(0), Base: expr.PayloadBaseNetworkHeader, Offset: 6,
		Len: 1}, equal(false, []byte{unix.IPPROTO_FRAGMENT})}
	offset := func(mask []byte) []expr.Any {
		return append(loadMasked(&expr.Payload{DestRegister: register(0), Base: expr.PayloadBaseNetworkHeader, Offset: 6,
			Len: 2}, mask), equal(true, []byte{0, 0}))
	}
	header := func(at, length uint32) expr.Any {
		return &expr.Exthdr{DestRegister: register(0), Type: unix.IPPROTO_FRAGMENT, Offset: at, Len: length,
			Op: expr.ExthdrOpIpv6}
	}
	switch s.(type) {
	case nft.FirstFragment:
		if f == ipfamily.IPv4 {
			return offset([]byte{0x20, 0})
		}
		return append(append(nextFragment, loadMasked(header(3, 1), []byte{1})...), equal(false, []byte{1}))
	case nft.LaterFragment:
		if f == ipfamily.IPv4 {
			return offset([]byte{0x1f, 0xff})
		}
		return append(append(nextFragment, loadMasked(header(2, 2), []byte{0xff, 0xf8})...), equal(true, []byte{0, 0}))
	}
	protocol, kind := snapshot.ICMP, byte(3)
	if f == ipfamily.IPv6 {
		protocol, kind = snapshot.ICMPv6, 2
	}
	return append(matchExprs(f, nft.ProtocolIs{Protocol: protocol}), transportHeader(0, 1), equal(false, []byte{kind}))
}

// loadHash hashes what a field of KeptFlows or KeptFragments stands for, which it loads behind the key.
func loadHash(f ipfamily.Family, h *nft.Hashed, mod uint32, word int) []expr.Any {
	const behind = 4 // words
	out := load(f, nft.Concat{Fields: h.Fields}, behind)
	length := uint32(nft.PaddedLen(f, h.Fields))
	base := expr.PayloadBaseTransportHeader
	if h.Network {
		base = expr.PayloadBaseNetworkHeader
	}
	for _, at := range h.Raw {
		out = append(out, &expr.Payload{DestRegister: register(behind + int(length/4)), Base: base, Offset: at[0] / 8,
			Len: at[1] / 8})
		length += (at[1]/8 + 3) &^ 3
	}
	return append(out, &expr.Hash{SourceRegister: register(behind), DestRegister: register(word), Length: length,
		Modulus: mod, Seed: h.Seed, Type: expr.HashTypeJenkins})
}
