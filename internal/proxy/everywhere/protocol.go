// Package everywhere answers "have all nodes got it?" on a node. The node holds a connection to the collector, over
// which only heartbeats are sent until somebody asks: then the collector reads what the API has of the Service, and
// asks all nodes to say when they hold it. This package has the node's side, and what both sides send.
package everywhere

import (
	"bufio"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"sync"
	"time"

	"github.com/verdict-proxy/verdict/internal/proxy/status"
	"github.com/verdict-proxy/verdict/sync/snapshot"
)

// Audience is that of the tokens by which nodes say who they are.
const Audience = "verdict-collector"

// The annotations of the collector's Lease by which nodes find the leader and know it.
const (
	AddressAnnotation     = "verdict/address"
	FingerprintAnnotation = "verdict/certificate-sha256"
)

// Bounds of what is waited for.
const (
	// DefaultTimeout is how long a request waits that does not say it, and MaxTimeout how long it can.
	DefaultTimeout = 10 * time.Second
	MaxTimeout     = time.Minute
	// MaxNamed bounds the nodes that an answer names.
	MaxNamed = 20
	// MaxAsked bounds the questions that a node holds.
	MaxAsked = 4096
	// maxLine bounds a line in bytes. The first one has a token.
	maxLine = 16 << 10
	// Beat is how often a collector sends an empty message. A node that hears nothing for two and a half of them looks
	// for the leader anew: the kernel of a stopped process goes on to answer for it.
	Beat = 15 * time.Second
)

// FromNode is a line that a node sends. One field is set.
type FromNode struct {
	Hello *Hello `json:"hello,omitempty"`
	Wait  *Wait  `json:"wait,omitempty"`
	// Cancel takes a Wait back, by its ID.
	Cancel uint64 `json:"cancel,omitempty"`
	// Have are the questions, by their IDs, whose goal the node has reached.
	Have []uint64 `json:"have,omitempty"`
}

// Hello is a node's first line.
type Hello struct {
	// Schema is status.Schema. Digests of different schemas cannot be compared.
	Schema int    `json:"schema"`
	Token  string `json:"token"`
}

// Wait asks for a Result once all nodes hold what the API has of a Service now.
type Wait struct {
	// ID is the node's own, above 0.
	ID      uint64 `json:"id"`
	Service string `json:"service"`
	// Milliseconds bound how long to wait.
	Milliseconds int64 `json:"ms"`
}

// FromCollector is a line that the collector sends. One field is set, or none: then it says that the collector lives.
type FromCollector struct {
	Welcome *Welcome `json:"welcome,omitempty"`
	// Refused says why the collector closes the connection.
	Refused string `json:"refused,omitempty"`
	Ask     *Ask   `json:"ask,omitempty"`
	// Drop is the ID of a question that nobody waits for any more.
	Drop   uint64  `json:"drop,omitempty"`
	Result *Result `json:"result,omitempty"`
}

// Welcome answers a Hello.
type Welcome struct {
	// Seconds is how long the token is valid. Then the collector closes the connection.
	Seconds int64 `json:"seconds"`
	// Beat says how often, in milliseconds, the collector sends something; 0 means that it may be silent.
	Beat int64 `json:"beatMs,omitempty"`
}

// Ask asks a node to say when it has reached a goal.
type Ask struct {
	ID             uint64           `json:"id"`
	Service        string           `json:"service"`
	Services       snapshot.Version `json:"services"`
	EndpointSlices snapshot.Version `json:"endpointSlices"`
	// Digest is 0 if the node's cannot be compared with it.
	Digest status.Digest `json:"digest"`
}

// AskOf asks for a goal.
func AskOf(id uint64, g status.Goal) *Ask {
	return &Ask{id, g.Service.String(), g.Versions.Services, g.Versions.EndpointSlices, g.Digest}
}

// goal is the inverse of AskOf.
func (a *Ask) goal() (status.Goal, error) {
	n, err := status.ParseName(a.Service)
	return status.Goal{Service: n, Versions: status.Versions{Services: a.Services, EndpointSlices: a.EndpointSlices},
		Digest: a.Digest}, err
}

// Result answers a Wait.
type Result struct {
	ID uint64 `json:"id"`
	Answer
}

// Answer says whether all nodes hold what the API had of a Service when it was asked for.
type Answer struct {
	Everywhere bool `json:"everywhere"`
	// Nodes is how many were asked; 0 if it did not come to that.
	Nodes int `json:"nodes"`
	// Missing counts those that did not answer, and MissingNodes names the first MaxNamed of them.
	Missing      int      `json:"missing"`
	MissingNodes []string `json:"missingNodes,omitempty"`
	// Gone counts those that were not waited for because their kubelets are gone, and GoneNodes names the first of them.
	Gone      int      `json:"gone,omitempty"`
	GoneNodes []string `json:"goneNodes,omitempty"`
	// Nothing says that there is no such Service, or that no node programs it: nothing was waited for.
	Nothing bool `json:"nothing,omitempty"`
	// Why says why it is not everywhere.
	Why string `json:"why,omitempty"`
}

// Stream is a connection with a line of JSON for each message. Send may be called concurrently.
type Stream struct {
	conn    net.Conn
	in      *bufio.Reader
	sending sync.Mutex
}

// NewStream uses a connection.
func NewStream(conn net.Conn) *Stream {
	return &Stream{conn: conn, in: bufio.NewReaderSize(conn, 512)} // a collector has thousands of them
}

// Send writes a message. If that takes longer than patience, it fails and closes the connection.
func (s *Stream) Send(message any, patience time.Duration) error {
	line, err := json.Marshal(message)
	if err != nil {
		return err
	}
	return s.SendLine(append(line, '\n'), patience)
}

// SendLine is Send for a message that is encoded already.
func (s *Stream) SendLine(line []byte, patience time.Duration) error {
	s.sending.Lock()
	defer s.sending.Unlock()
	err := s.conn.SetWriteDeadline(time.Now().Add(patience))
	if err == nil {
		_, err = s.conn.Write(line)
	}
	if err != nil {
		s.conn.Close() // half a line may be out
	}
	return err
}

// errLong says that a peer does not follow the protocol.
var errLong = errors.New("a line is too long")

// Receive reads a message; until the deadline, unless that is zero. Only one goroutine may call it.
func (s *Stream) Receive(message any, deadline time.Time) error {
	if err := s.conn.SetReadDeadline(deadline); err != nil {
		return err
	}
	var whole []byte
	for {
		part, err := s.in.ReadSlice('\n')
		if len(whole)+len(part) > maxLine {
			return errLong
		}
		if err == nil && whole == nil {
			return decode(part, message)
		}
		whole = append(whole, part...)
		switch {
		case err == nil:
			return decode(whole, message)
		case !errors.Is(err, bufio.ErrBufferFull):
			return err
		}
	}
}

func decode(line []byte, message any) error {
	if err := json.Unmarshal(line, message); err != nil {
		return fmt.Errorf("%.100q: %w", line, err)
	}
	return nil
}

// Close closes the connection.
func (s *Stream) Close() { s.conn.Close() }

// KeepAlive has the kernel notice within a minute that the other host is gone.
var KeepAlive = net.KeepAliveConfig{Enable: true, Idle: 30 * time.Second, Interval: 10 * time.Second, Count: 3}
