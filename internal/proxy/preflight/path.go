package preflight

import (
	"cmp"
	"errors"
	"fmt"
	"net/netip"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/verdict-proxy/verdict/internal/proxy/status"
	"github.com/verdict-proxy/verdict/internal/system/ipfamily"
	"github.com/verdict-proxy/verdict/internal/system/packets"
	"github.com/verdict-proxy/verdict/nft"
)

// Packet is the first packet of a connection to a Service.
type Packet struct {
	Source, Destination netip.AddrPort
	Protocol            packets.Protocol
	// Local says that a process of this host sends it, and Interface by which it comes in otherwise.
	Local     bool
	Interface string
}

// clientPort stands for the port of a client.
const clientPort = 40000

// NewPacket returns a packet of a client whose port makes no difference.
func NewPacket(source netip.Addr, to netip.AddrPort, p packets.Protocol, local bool, iface string) Packet {
	return Packet{netip.AddrPortFrom(source, clientPort), to, p, local, iface}
}

// Sent returns why no packet is made that rules could see: a process of this host sends it, without a route. It is nil
// if one is.
func (h *Host) Sent(p Packet) *status.Finding {
	if !p.Local {
		return nil
	}
	to := p.Destination.Addr()
	if _, _, err := h.route(to); err != nil {
		return noRoute(to, err)
	}
	return nil
}

// Before returns the rules of another program that a packet meets before Verdict's, and that send it elsewhere or
// refuse it; nil if there are none. Unclear says what is not known.
func (h *Host) Before(p Packet) (stop *status.Finding, unclear error) {
	rules, err := h.rules()
	if err != nil {
		return nil, fmt.Errorf("rules of other programs are not known: %w", err)
	}
	c, err := rules.Translate(h.walked(p, p.Destination), nft.DNATPriority)
	switch {
	case err != nil:
		return nil, fmt.Errorf("whether another program translates it first is not known: %w", err)
	case c.Untracked:
		what := fmt.Sprintf("%s keeps packets to %s from connection tracking, so nothing translates them", decider(c),
			p.Destination)
		return &status.Finding{Check: NoTrack, What: what, Advice: adviceNoTrack}, nil
	case c.Verdict != packets.Untouched:
		what := fmt.Sprintf("%s comes before Verdict's", decider(c))
		if c.Verdict == packets.Sent {
			what += fmt.Sprintf(", and sends packets to %s to %s", p.Destination, c.To)
		} else {
			what += fmt.Sprintf(", and refuses packets to %s", p.Destination)
		}
		return &status.Finding{Check: NATAhead, What: what, Advice: adviceNATAhead}, nil
	}
	return nil, nil
}

// decider names the rule of another program that decides about a packet, as nft -a lists it, or iptables-legacy -L
// --line-numbers.
func decider(c packets.Crossing) string {
	switch {
	case c.Rule == 0:
		return "the policy of the chain " + c.By
	case c.Legacy:
		return fmt.Sprintf("rule %d of the chain %s", c.Rule, c.By)
	}
	return fmt.Sprintf("the rule with handle %d of the chain %s", c.Rule, c.By)
}

// After returns what stops a packet that Verdict's rules have sent to an endpoint; Masqueraded says that it has an
// address of this host then.
func (h *Host) After(p Packet, endpoint netip.AddrPort, masqueraded bool) (stop *status.Finding, unclear error) {
	to := endpoint.Addr()
	family := ipfamily.Of(to)
	_, link, err := h.route(to)
	switch {
	case err != nil:
		return noRoute(to, err), nil
	case p.Local:
		return nil, nil
	}
	if stop = h.reversePath(p.Interface, p.Source.Addr(), to); stop != nil {
		return stop, nil
	}
	walked := h.walked(p, endpoint)
	switch {
	case h.Local(to):
		return h.refused(walked, p.Destination, InputDrop, (*packets.Rules).Input)
	case !h.forwards[family]:
		return noForwarding(family), nil
	case h.sameBridge(p.Interface, to) && !h.bridgeCallsHooks[family] && !masqueraded:
		// Whether pods reach each other past this host is theirs to say.
		f := plainBridge(p.Interface, family)
		unclear = errors.New(f.What + ": " + f.Advice)
	}
	walked.Out, walked.OutIndex = link.Name, uint32(link.Index)
	stop, why := h.refused(walked, p.Destination, ForwardDrop, (*packets.Rules).Forward)
	return stop, cmp.Or(unclear, why)
}

// refused returns the rule of another program that refuses a packet which this host forwards, or takes: follow says
// through what. Before is the destination that it had before it was translated.
func (h *Host) refused(p packets.Packet, before netip.AddrPort, check string,
	follow func(*packets.Rules, packets.Packet, netip.AddrPort) (packets.Crossing, error),
) (stop *status.Finding, unclear error) {
	rules, err := h.rules()
	if err != nil {
		return nil, fmt.Errorf("rules of other programs are not known: %w", err)
	}
	c, err := follow(rules, p, before)
	if err != nil {
		return nil, fmt.Errorf("whether another program lets it pass is not known: %w", err)
	}
	verb := map[packets.Verdict]string{packets.Dropped: "drops", packets.Rejected: "rejects"}[c.Verdict]
	switch {
	case verb == "":
		return nil, nil
	case check == InputDrop:
		what := fmt.Sprintf("%s %s what comes from %s for this host's own %s", decider(c), verb, p.Source.Addr(),
			p.Destination)
		return &status.Finding{Check: check, What: what, Advice: adviceInput(c.By, p)}, nil
	}
	what := fmt.Sprintf("%s %s what this host forwards from %s to %s", decider(c), verb, p.Source.Addr(),
		p.Destination.Addr())
	return &status.Finding{Check: check, What: what, Advice: adviceForward(c.By, rules)}, nil
}

// walked returns a packet as package packets follows it.
func (h *Host) walked(p Packet, to netip.AddrPort) packets.Packet {
	out := packets.Packet{Source: p.Source, Destination: to, Protocol: p.Protocol, Interface: p.Interface}
	if p.Local {
		out.Interface = ""
	} else if link, err := h.handle.LinkByName(p.Interface); err == nil {
		out.Index = uint32(link.Attrs().Index)
	}
	return out
}

func noRoute(to netip.Addr, err error) *status.Finding {
	why := err.Error()
	if errors.Is(err, unix.ENETUNREACH) {
		why = "network is unreachable"
	}
	return &status.Finding{Check: NoRoute, What: fmt.Sprintf("this host has no route to %s (%s)", to, why),
		Advice: "without a default route, the kernel lets no process of this host send to a Service, whatever rules " +
			"there are: add one, or a route to the range of Services and to the pods of other nodes"}
}

func noForwarding(f ipfamily.Family) *status.Finding {
	what := fmt.Sprintf("this host forwards no %s packets: %s is 0", f, forwarding[f])
	return &status.Finding{Check: NoForwarding, What: what,
		Advice: "pods and clients outside reach no endpoint elsewhere: sysctl -w " + forwarding[f] + "=1"}
}

func plainBridge(bridge string, f ipfamily.Family) *status.Finding {
	why := bridgeCalls[f] + " is 0"
	if sysctl(bridgeCalls[f]) == "" {
		why = "the module br_netfilter is not loaded"
	}
	what := fmt.Sprintf("the bridge %s does not show netfilter its %s packets: %s", bridge, f, why)
	return &status.Finding{Check: PlainBridge, What: what,
		Advice: "the answer of an endpoint at the client's own bridge may pass by this host, untranslated, so that the " +
			"client drops it: modprobe br_netfilter, and sysctl -w " + bridgeCalls[f] + "=1"}
}

// reversePath finds that the kernel drops what comes in by a device; nil if it does not.
func (h *Host) reversePath(iface string, source, to netip.Addr) *status.Finding {
	if !h.refuses(iface, source, to) {
		return nil
	}
	_, by, _ := h.Route(source)
	name := reversePathOf(iface)
	if sysctl(name) != "1" {
		name = reversePathOf("all")
	}
	return &status.Finding{Check: ReversePath,
		What: fmt.Sprintf("%s is 1, and this host's route to %s is by %s: the kernel drops what comes from there by %s",
			name, source, by, iface),
		Advice: "sysctl -w " + reversePathOf(iface) + "=2 lets such packets in; or route the answers back by " + iface}
}

// adviceNATAhead says what to do about a chain that translates first.
const adviceNATAhead = "the first chain that translates a connection decides: have its program leave the addresses " +
	"and node ports of Services alone"

// adviceNoTrack says what to do about rules that keep packets from connection tracking.
const adviceNoTrack = "NodeLocal DNSCache has such rules for the address of the cluster's DNS, at which it listens " +
	"itself: if it runs on this host, all is well; if not, remove its rules"

// adviceForward says what to do about a chain that refuses what is forwarded. Rules are all of other programs: Docker
// and ufw share the chain FORWARD.
func adviceForward(chain string, rules *packets.Rules) string {
	switch {
	case strings.Contains(chain, "firewalld"):
		return "have firewalld trust the pods: firewall-cmd --permanent --zone=trusted --add-source=RANGE, and --reload"
	case !strings.HasSuffix(chain, " filter FORWARD") && !strings.Contains(chain, "DOCKER") &&
		!strings.Contains(chain, " filter ufw"):
	case rules.HasChain("DOCKER-USER"):
		return "Docker sets the policy of FORWARD to drop: accept the pods' range there (iptables -I DOCKER-USER -s " +
			"RANGE -j ACCEPT, and -d RANGE); it does not if net.ipv4.ip_forward is 1 before it starts"
	case rules.HasChain("ufw-user-forward"):
		return "have ufw forward what pods send and get: ufw route allow from RANGE, and ufw route allow to RANGE"
	default:
		return "accept the pods' range in FORWARD: iptables -I FORWARD -s RANGE -j ACCEPT, and -d RANGE"
	}
	return "an accept of Verdict does not count there: have that chain accept the pods' range"
}

// adviceInput says what to do about a chain that refuses what comes for an endpoint on this host's own network.
func adviceInput(chain string, p packets.Packet) string {
	port := fmt.Sprintf("%d/%s", p.Destination.Port(), p.Protocol)
	switch {
	case strings.HasSuffix(chain, " ts-input"):
		return "Tailscale takes 100.64.0.0/10 for its own: give pods another range, or its nodes the attribute " +
			"disable-linux-cgnat-drop-rule"
	case strings.Contains(chain, "firewalld"):
		return "the endpoint is on the host's network: firewall-cmd --permanent --add-port=" + port + ", and --reload"
	case strings.Contains(chain, " filter ufw"):
		return "the endpoint is on the host's network: ufw allow " + port
	}
	return "the endpoint is on the host's network: have that chain accept " + port
}
