// Package wake wakes a goroutine that waits at a channel.
package wake

// Up puts a token into a channel that holds one; if it holds one already, that wakes the goroutine just as well.
func Up(c chan<- struct{}) {
	select {
	case c <- struct{}{}:
	default:
	}
}
