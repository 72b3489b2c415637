package kernel

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/verdict-proxy/verdict/internal/system/ipfamily"
	"github.com/verdict-proxy/verdict/internal/system/netlink"
	"github.com/verdict-proxy/verdict/nft"
	"github.com/verdict-proxy/verdict/sync/dataplane"
)

// observer reads the tables while the backend writes them, as packets do: what it sees between two transactions must
// be what a frontend had before a step, or what it has after it. A nil observer sees nothing.
type observer struct {
	conn *Conn
	end  chan struct{}
	gone sync.WaitGroup

	mu sync.Mutex
	// epoch counts the changes of what may be seen.
	epoch int
	// may says, of each frontend, with which endpoints it may be seen; nil means that others wrote, and anything may
	// be there.
	may map[string][]string
	// partly says that a step may be seen midway: some endpoints of before and some of after.
	partly bool
	bad    string
	seen   int
}

// watchOver starts an observer.
func watchOver(w *walker) *observer {
	o := &observer{end: make(chan struct{})}
	w.must(w.host.Do(func() (err error) {
		o.conn, err = Dial(0)
		return err
	}))
	o.gone.Go(o.run)
	return o
}

func (o *observer) stop() {
	if o != nil {
		close(o.end)
		o.gone.Wait()
		o.conn.Close()
	}
}

// expect adds what a state asks for to what may be seen. A change that is too large for one transaction is seen in
// parts: also if a former step left the backend with little room.
func (o *observer) expect(w *walker, want *dataplane.State, change dataplane.Change) {
	if o == nil {
		return
	}
	if w.meddled {
		o.pause()
		return
	}
	frontends := frontendsOf(want)
	o.mu.Lock()
	defer o.mu.Unlock()
	o.epoch++
	if o.may == nil {
		return
	}
	for key, endpoints := range frontends {
		if !slices.Contains(o.may[key], endpoints) {
			o.may[key] = append(o.may[key], endpoints)
		}
	}
	parts := !w.backend.model.Fits(want, change.Services, w.backend.limit(writeAtOnce))
	o.partly = o.partly || parts || w.faults.most > 0 || len(w.faults.armed) > 0
}

// pause lets anything be seen, until the backend has put it right.
func (o *observer) pause() {
	if o == nil {
		return
	}
	o.mu.Lock()
	defer o.mu.Unlock()
	o.epoch++
	o.may = nil
}

// settled lets only a state be seen.
func (o *observer) settled(st *dataplane.State) {
	if o == nil {
		return
	}
	may := map[string][]string{}
	for key, endpoints := range frontendsOf(st) {
		may[key] = []string{endpoints}
	}
	o.mu.Lock()
	defer o.mu.Unlock()
	o.epoch++
	o.may, o.partly = may, false
}

// check fails the walk if something was seen that may not be.
func (o *observer) check(w *walker) {
	if o == nil {
		return
	}
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.bad != "" {
		w.fail("seen while it was written: %s", o.bad)
	}
	w.Count["frontends seen by the observer"] += o.seen
	o.seen = 0
}

// frontendsOf gives the endpoints of each frontend of a state.
func frontendsOf(st *dataplane.State) map[string]string {
	list := nft.List(st)
	out := map[string]string{}
	for i, f := range ipfamily.All {
		slots := map[uint32][]string{}
		for _, set := range [...]nft.SetID{nft.Endpoints, nft.UncountedEndpoints} {
			for _, e := range list[i].Elements[set] {
				slots[e.ID()] = append(slots[e.ID()], e.Target().String())
			}
		}
		for _, side := range sides {
			for _, e := range list[i].Elements[side[0]] {
				eps := slots[e.PoolID()]
				if e.IsIndirect() { // its pools are in the other maps
					eps = nil
				}
				out[viewKey(f, side[0], e.Key())] = endpointsText(eps)
				out[portKey(f, &e.Element)] += endpointsText(eps)
			}
		}
	}
	return out
}

// sides are the maps of frontends: counted and not.
var sides = [][2]nft.SetID{{nft.Services, nft.UncountedServices}, {nft.InsideServices, nft.UncountedInsideServices},
	{nft.OutsideServices, nft.UncountedOutsideServices}}

func viewKey(f ipfamily.Family, set nft.SetID, key []byte) string {
	return fmt.Sprintf("%v %v %x", f.NFT(), set, key)
}

// portKey stands for all frontends of a port: written in parts, one that is about to go may lead where those lead
// that came.
func portKey(f ipfamily.Family, e *nft.Element) string { return f.String() + " " + e.Comment }

func endpointsText(data []string) string {
	slices.Sort(data)
	return fmt.Sprintf("%q", data)
}

// run looks at a few frontends again and again.
func (o *observer) run() {
	r := rand.New(rand.NewPCG(1, 1))
	for {
		select {
		case <-o.end:
			return
		case <-time.After(200 * time.Microsecond):
		}
		err := o.look(oneOf(r, ipfamily.All[:]...), oneOf(r, sides...), r)
		if err != nil && !errors.Is(err, unix.EINTR) { // so much was written meanwhile that it saw nothing
			o.mu.Lock()
			o.bad = err.Error()
			o.mu.Unlock()
			return
		}
	}
}

// look reads all frontends with their chains, and the endpoints of one, and judges them if nothing was written
// meanwhile.
func (o *observer) look(f ipfamily.Family, side [2]nft.SetID, r *rand.Rand) error {
	o.mu.Lock()
	epoch, idle := o.epoch, o.may == nil
	o.mu.Unlock()
	before, err := o.conn.Generation()
	if err != nil || idle {
		return err
	}
	var listed []nft.Listed
	for _, set := range side {
		some, err := o.conn.Elements(f, set)
		if err != nil {
			return err
		}
		listed = append(listed, some...)
	}
	if len(listed) == 0 {
		return nil
	}
	chains := map[string]bool{}
	err = o.conn.objects(f, unix.NFT_MSG_GETCHAIN, func(attrs netlink.Attributes) {
		chains[unix.ByteSliceToString(attrs[unix.NFTA_CHAIN_NAME])] = true
	})
	if err != nil {
		return err
	}
	one := oneOf(r, listed...).Element
	pool := one
	var endpoints []string
	if one.InPools() {
		err = o.conn.get(f, nft.Pools, []nft.Element{nft.PoolKey(one.PoolID())}, func(e nft.Element) { pool = e })
	}
	if keys := pool.SlotKeys(one.FrontendKey().Protocol); err == nil && len(keys) > 0 {
		err = o.conn.get(f, keys[0].Set, keys, func(e nft.Element) { endpoints = append(endpoints, e.Target().String()) })
	}
	if err != nil && !errors.Is(err, unix.ENOENT) {
		return err
	}
	after, err := o.conn.Generation()
	if err != nil || before != after {
		return err
	}
	o.mu.Lock()
	defer o.mu.Unlock()
	if epoch != o.epoch {
		return nil
	}
	if !chains[pool.Leads().Name()] {
		return fmt.Errorf("%s leads nowhere: its pool is %s", elementText(f, &one), elementText(f, &pool))
	}
	o.seen++
	return o.judge(f, side[0], &one, &pool, endpoints)
}

// judge says whether a frontend may have the endpoints that it has.
func (o *observer) judge(f ipfamily.Family, set nft.SetID, e, pool *nft.Element, endpoints []string) error {
	if n, has := int(pool.Leads().N), len(endpoints); n < has || n > has && (n <= 16 || 4*n > 5*has+12) {
		return fmt.Errorf("%s has %d endpoints", elementText(f, pool), len(endpoints))
	}
	may := o.may[viewKey(f, set, e.Key())]
	if slices.Contains(may, endpointsText(endpoints)) {
		return nil
	}
	may = slices.Concat(may, o.may[portKey(f, e)])
	for _, ep := range endpoints {
		if !o.partly || !slices.ContainsFunc(may, func(m string) bool { return strings.Contains(m, fmt.Sprintf("%q", ep)) }) {
			return fmt.Errorf("%s has the endpoints %s; before and after it has %s",
				elementText(f, e), endpointsText(endpoints), may)
		}
	}
	return nil
}
