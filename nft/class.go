package nft

import (
	"math/bits"
	"slices"
)

// An element of Services is data: the pool's number, and above it the class of the chain that chooses for the pool.
// Picks leads from the class to the chain. So no map with verdicts grows with the Services: whoever adds a verdict
// makes the kernel check the whole table, and whoever changes data does not.
//
// When a pool gets another class, so do the elements of its frontends. If it has more than directFrontends, they have
// no class, which leads to SharedPool, and the element of Pools has it. So it is if the pool refuses a share.
//
// There are few classes, so no tenant can use them up. Chains for up to exactSizes slots choose among exactly as many.
// Others choose among up to a quarter more, and again if they hit upon a slot that nobody has.
const (
	poolBits = 24
	// PoolMask covers the number of a pool in its data.
	PoolMask = 1<<poolBits - 1
	// firstPool is the least number of a pool: what is less may be the kind of an address, or the priority of packets that
	// IPv4 forwards.
	firstPool  = 0x100
	exactSizes = 16
	// directFrontends is how many frontends of a port have the class of their pool themselves.
	directFrontends = 4
	// sizeBits says that sizes beyond that have three significant bits, so four of them double the size.
	sizeBits = 3
	// numSizes is how many sizes there are, up to maxServiceSlots.
	numSizes = exactSizes + 13<<(sizeBits-1)
	// exactTimeout is up to how many seconds clients are remembered for exactly that long; longer times are rounded up to
	// minutes.
	exactTimeout = 1200
)

// fixedClasses are the chains that exist once; their places are their classes. Then follow those of sizedKinds, each in
// numSizes sizes, and those of hashKinds, each with one slot, or as many as hashSizes says.
var (
	fixedClasses = [...]ChainKind{SharedPool, NoEndpoints, NoLocalEndpoints, PassOn, LeftToIPVS, Restrict, Split}
	sizedKinds   = [...]ChainKind{Pick, UncountedPick, StickyPick}
	hashKinds    = [...]ChainKind{PickHash, UncountedHash, PickHashPort, UncountedHashPort, StickyHash}
)

const (
	firstSized = len(fixedClasses)
	firstHash  = firstSized + len(sizedKinds)*numSizes
	hashes     = 1 + len(hashSizes)
)

// class is the number of a chain in the data of Services and Pools.
func (c ChainID) class() uint32 {
	if i := slices.Index(sizedKinds[:], c.Kind); i >= 0 {
		return uint32(firstSized+i*numSizes) + sizeClass(c.N)
	}
	if i := slices.Index(hashKinds[:], c.Kind); i >= 0 {
		return uint32(firstHash + i*hashes + slices.Index(hashSizes[:], int(c.N)) + 1)
	}
	return uint32(max(slices.Index(fixedClasses[:], c.Kind), 0))
}

// chainOfClass is class's inverse.
func chainOfClass(class uint32) ChainID {
	n := int(class)
	switch {
	case n < firstSized:
		return fixedClasses[n].id()
	case n < firstHash:
		return ChainID{sizedKinds[(n-firstSized)/numSizes], sizeOfClass(uint32((n - firstSized) % numSizes))}
	case n >= firstHash+len(hashKinds)*hashes:
		return ChainID{}
	}
	id := ChainID{hashKinds[(n-firstHash)/hashes], 1}
	if at := (n - firstHash) % hashes; at > 0 {
		id.N = uint32(hashSizes[at-1])
	}
	return id
}

// sizeClass numbers the sizes of chains, for the smallest that has room for n slots; n is at least 1.
func sizeClass(n uint32) uint32 {
	if n <= exactSizes {
		return n - 1
	}
	shift := uint32(bits.Len32(n-1)) - sizeBits
	return exactSizes + (shift-2)<<(sizeBits-1) + (n-1)>>shift - 1<<(sizeBits-1)
}

// sizeOfClass gives the size of a class of sizes.
func sizeOfClass(class uint32) uint32 {
	if class < exactSizes {
		return class + 1
	}
	class -= exactSizes
	shift := class>>(sizeBits-1) + 2
	return (class&(1<<(sizeBits-1)-1) + 1<<(sizeBits-1) + 1) << shift
}

// roomFor gives the size of the chain for a pool with n slots.
func roomFor(n int) uint32 { return sizeOfClass(sizeClass(uint32(n))) }

// timeoutFor gives for how long clients are remembered who should be for some seconds.
func timeoutFor(seconds uint32) uint32 {
	if seconds > exactTimeout {
		seconds = (seconds + 59) / 60 * 60
	}
	return seconds
}

// hasClass reports whether the data of a map is a class and a pool.
func (s SetID) hasClass() bool { return s <= Pools }

// setPool sets the data of an element of a map that has classes.
func (e *Element) setPool(c ChainID, pool uint32) { e.setID(c.class()<<poolBits | pool) }

// Leads gives the chain to which an element of a verdict map, of a map with classes, or of Remember leads; NoChain if
// it is none of ours.
func (e *Element) Leads() ChainID {
	switch {
	case e.DataLen != 4:
		return e.Chain
	case e.Set.hasClass():
		return chainOfClass(e.Number() >> poolBits)
	case e.Set == Remember:
		return ChainID{RememberFor, e.Number()}
	}
	return ChainID{}
}

// IsIndirect reports whether an element leads to another map of frontends, which has the pool.
func (e *Element) IsIndirect() bool { return e.Leads().Kind == Split || e.Leads().Kind == Restrict }

// InPools reports whether the class of an element's pool is in Pools.
func (e *Element) InPools() bool { return e.Leads().Kind == SharedPool }

// classes returns, for each pool to which the frontends of a table lead, one element that has its class: that of Pools,
// or of a frontend.
func classes(elements *[NumSets][]Element) (out []*Element) {
	seen := map[uint32]bool{}
	for _, set := range append(frontendSets[:], Pools) {
		for i := range elements[set] {
			e := &elements[set][i]
			if id := e.PoolID(); (set == Pools || !e.IsIndirect() && !e.InPools()) && !seen[id] {
				seen[id] = true
				out = append(out, e)
			}
		}
	}
	return out
}

// leadingTo gives the elements of Picks and those like it, or of Timeouts, that lead to a chain.
func leadingTo(c ChainID) (out []Element) {
	sets, key := []SetID{Picks, SplitPicks, PoolPicks}, c.class()<<poolBits
	switch c.Kind {
	case RememberFor:
		sets, key = []SetID{Timeouts}, c.N
	case Restrict, Split: // which lead to SplitPicks
		sets = sets[:1]
	case SharedPool: // which leads to PoolPicks
		sets = sets[:2]
	}
	for _, set := range sets {
		e := idElement(set, key)
		e.Chain = c
		out = append(out, e)
	}
	return out
}
