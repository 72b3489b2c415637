package node

import (
	"errors"
	"log/slog"
	"sync"

	"github.com/verdict-proxy/verdict/internal/proxy/backends"
	"github.com/verdict-proxy/verdict/sync/dataplane"
	"github.com/verdict-proxy/verdict/sync/reconcile"
	"github.com/verdict-proxy/verdict/sync/snapshot"
	"github.com/verdict-proxy/verdict/sync/watch"
)

// errCannotKeep is that of backends that write iptables rules.
var errCannotKeep = errors.New("iptables rules cannot keep them")

// linkAsk has the other nodes watched as neighbours while a Service, or the settings, ask for clients' addresses to be
// kept. A nil *linkAsk does nothing.
type linkAsk struct {
	link *watch.Link
	// wanted is closed once the other Nodes are to be read.
	wanted chan struct{}
	// setting is the field clientAddress, and cannot says why the backend cannot keep any address; nil if it can.
	setting func() string
	cannot  error
	log     *slog.Logger

	mu       sync.Mutex
	services map[snapshot.Name]bool // that ask
	synced   bool
	asked    bool // since the start
	told     bool // that the settings leave Services that ask for it as they are
	refused  dataplane.DeviceRefused
}

func newLinkAsk(w *configWatcher, node *nodeObject, opened *backends.Opened) *linkAsk {
	log := w.log.Logger
	a := &linkAsk{link: watch.NewLink(node.addrs, reporter(log)), wanted: make(chan struct{}), log: log,
		setting: func() string { return w.settings.Load().Document.Verdict.ClientAddress },
		cannot:  errCannotKeep, services: map[snapshot.Name]bool{}}
	if opened.KeepSupported != nil {
		a.cannot = opened.KeepSupported()
	}
	return a
}

// unable reports whether the backend cannot keep any client's address.
func (a *linkAsk) unable() bool { return a == nil || a.cannot != nil }

// take notes which Services ask.
func (a *linkAsk) take(d snapshot.Delta) {
	if a == nil || len(d.Services) == 0 {
		return
	}
	a.mu.Lock()
	for name, s := range d.Services {
		if s != nil && s.ClientAddress == snapshot.ClientAddressKeep {
			a.services[name] = true
		} else {
			delete(a.services, name)
		}
	}
	a.mu.Unlock()
	a.decide()
}

// complete is called once all Services are known.
func (a *linkAsk) complete() {
	if a == nil {
		return
	}
	a.mu.Lock()
	a.synced = true
	a.mu.Unlock()
	a.decide()
}

// committed has the clients of all Services masqueraded if the kernel takes no rules at the ingress of the device:
// without a State that says so, nobody would know.
func (a *linkAsk) committed(c reconcile.Commit) {
	r := c.Refused
	if a == nil || r == nil {
		return
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.refused.Device == r.Device && a.refused.Index == r.Index {
		return
	}
	a.refused = *r
	a.log.Warn("clients' addresses are masqueraded: the kernel takes no rules at the ingress of the node's device",
		"device", r.Device, "err", r.Err)
	a.link.Refuse(r.Device, r.Index)
}

// decide is called whenever somebody else may ask. What is missing for it is logged once.
func (a *linkAsk) decide() {
	if a == nil {
		return
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	if !a.synced {
		return
	}
	// The operator decides: every node would watch all Nodes and ask its neighbours, for one annotation of a tenant.
	setting := a.setting()
	if setting == "off" && len(a.services) > 0 && !a.told {
		a.told = true
		a.log.Info("Services ask to keep their clients' addresses; clientAddress: annotated would allow it")
	}
	asks := setting == "keep" || setting == "annotated" && len(a.services) > 0
	if asks && !a.asked {
		a.asked = true
		if a.cannot == nil {
			close(a.wanted)
		} else {
			a.log.Warn("clients' addresses are masqueraded, though Services or the settings ask to keep them",
				"err", a.cannot)
		}
	}
	a.link.Ask(asks && a.cannot == nil)
}
