package blackbox

import "golang.org/x/sys/unix"

// op is an instruction of classic BPF. yes and no are labels where a condition jumps to; none means the next one.
type op struct {
	label   string
	code    uint16
	k       uint32
	yes, no string
}

const (
	ldWord    = unix.BPF_LD | unix.BPF_W | unix.BPF_ABS
	ldHalf    = unix.BPF_LD | unix.BPF_H | unix.BPF_ABS
	ldByte    = unix.BPF_LD | unix.BPF_B | unix.BPF_ABS
	ldByteAtX = unix.BPF_LD | unix.BPF_B | unix.BPF_IND
	ldHeader4 = unix.BPF_LDX | unix.BPF_B | unix.BPF_MSH // X = 4 * (byte & 0xf)
	jeq       = unix.BPF_JMP | unix.BPF_JEQ | unix.BPF_K
	jset      = unix.BPF_JMP | unix.BPF_JSET | unix.BPF_K
	jgt       = unix.BPF_JMP | unix.BPF_JGT | unix.BPF_K
	and       = unix.BPF_ALU | unix.BPF_AND | unix.BPF_K
	rsh       = unix.BPF_ALU | unix.BPF_RSH | unix.BPF_K
	addX      = unix.BPF_ALU | unix.BPF_ADD | unix.BPF_X
	subX      = unix.BPF_ALU | unix.BPF_SUB | unix.BPF_X
	store     = unix.BPF_ST
	fetchX    = unix.BPF_LDX | unix.BPF_MEM
	jump      = unix.BPF_JMP | unix.BPF_JA
	ret       = unix.BPF_RET | unix.BPF_K

	// protocolOf is where a load finds skb->protocol: SKF_AD_OFF + SKF_AD_PROTOCOL of linux/filter.h.
	protocolOf = 1<<32 - 0x1000
	// smallPayload is how long data may be that is recorded: questions and answers of clients, and no bulk.
	smallPayload = 256
)

// program lets pass, from the IP header on: of TCP, SYN, FIN, RST and little data; all UDP and SCTP; and ICMP errors.
var program = []op{
	{code: ldWord, k: protocolOf},
	{code: jeq, k: unix.ETH_P_IPV6, yes: "v6"},
	{code: jeq, k: unix.ETH_P_IP, no: "drop"},
	{code: ldHalf, k: 6},
	{code: jset, k: 0x1fff, yes: "drop"}, // a later fragment
	{code: ldHeader4},
	{code: ldByte, k: 9},
	{code: jeq, k: unix.IPPROTO_TCP, yes: "tcp4"},
	{code: jeq, k: unix.IPPROTO_ICMP, no: "datagram"},
	{code: ldByteAtX},
	{code: jeq, k: 3, yes: "keep"}, // unreachable
	{code: jeq, k: 11, yes: "keep", no: "drop"},
	{label: "tcp4", code: ldByteAtX, k: 13},
	{code: jset, k: fin | syn | rst, yes: "keep"},
	{code: ldByteAtX, k: 12},
	{code: and, k: 0xf0},
	{code: rsh, k: 2},
	{code: addX}, // both headers
	{code: store},
	{code: ldHalf, k: 2},
	{code: fetchX},
	{code: subX},
	{code: jump, yes: "data"},
	{label: "v6", code: ldByte, k: 6},
	{code: jeq, k: unix.IPPROTO_TCP, yes: "tcp6"},
	{code: jeq, k: unix.IPPROTO_ICMPV6, no: "datagram"},
	{code: ldByte, k: 40},
	{code: jgt, k: 3, yes: "drop", no: "keep"},
	{label: "tcp6", code: ldByte, k: 53},
	{code: jset, k: fin | syn | rst, yes: "keep"},
	{code: ldByte, k: 52},
	{code: and, k: 0xf0},
	{code: rsh, k: 2},
	{code: store},
	{code: ldHalf, k: 4},
	{code: fetchX},
	{code: subX},
	{label: "data", code: jeq, k: 0, yes: "drop"},
	{code: jgt, k: smallPayload, yes: "drop", no: "keep"},
	{label: "datagram", code: jeq, k: unix.IPPROTO_UDP, yes: "keep"},
	{code: jeq, k: unix.IPPROTO_SCTP, no: "drop"},
	{label: "keep", code: ret, k: captureSnap},
	{label: "drop", code: ret},
}

// assemble replaces labels by distances.
func assemble(program []op) []unix.SockFilter {
	at := map[string]int{}
	for i, o := range program {
		if o.label != "" {
			at[o.label] = i
		}
	}
	out := make([]unix.SockFilter, len(program))
	for i, o := range program {
		distance := func(label string) int {
			if label == "" {
				return 0
			}
			return at[label] - i - 1
		}
		out[i] = unix.SockFilter{Code: o.code, K: o.k, Jt: uint8(distance(o.yes)), Jf: uint8(distance(o.no))}
		if o.code == jump {
			out[i] = unix.SockFilter{Code: o.code, K: uint32(distance(o.yes))}
		}
	}
	return out
}
