package collector

import (
	"context"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"

	authenticationv1 "k8s.io/api/authentication/v1"

	"github.com/verdict-proxy/verdict/internal/proxy/everywhere"
	"github.com/verdict-proxy/verdict/sync/snapshot"
)

// nodeNameKey is where the API server says on which node the pod of a token is, since Kubernetes 1.30.
const nodeNameKey = "authentication.kubernetes.io/node-name"

// reviewer says which node a token is of.
type reviewer struct {
	review func(ctx context.Context, token, audience string) (*authenticationv1.TokenReviewStatus, error)
	// account is the ServiceAccount of the DaemonSet.
	account snapshot.Name
	// slots bounds the reviews at once.
	slots chan struct{}

	mu sync.Mutex
	// refused are hosts whose last token was refused, and until when they are not listened to.
	refused map[string]time.Time
}

const (
	// maxReviewsAtOnce bounds how many reviews wait for the API server.
	maxReviewsAtOnce = 64
	// refusal is how long a host is not listened to after a token that is not valid, and maxRefused bounds the hosts.
	refusal    = 10 * time.Second
	maxRefused = 4096
)

func newReviewer(a *api, account snapshot.Name) *reviewer {
	return &reviewer{review: a.review, account: account, slots: make(chan struct{}, maxReviewsAtOnce),
		refused: map[string]time.Time{}}
}

// claims are what a token says of itself. They mean nothing before the API server has reviewed it.
type claims struct {
	Subject string `json:"sub"`
	Expires int64  `json:"exp"`
}

func claimsOf(token string) (c claims, err error) {
	parts := strings.Split(token, ".")
	if len(parts) != 3 {
		return c, errors.New("this is no token of a ServiceAccount")
	}
	text, err := base64.RawURLEncoding.DecodeString(parts[1])
	if err == nil {
		err = json.Unmarshal(text, &c)
	}
	return c, err
}

func (r *reviewer) username() string {
	return "system:serviceaccount:" + r.account.Namespace + ":" + r.account.Name
}

// errStranger is an error about a token, and not about the way to the API server.
type errStranger struct{ text string }

func (e errStranger) Error() string { return e.text }

// node returns the node that a token is of, and until when. Host is where it comes from.
func (r *reviewer) node(ctx context.Context, host, token string) (node string, until time.Time, err error) {
	if !r.listens(host) {
		return "", until, errStranger{"the last token was refused; try again later"}
	}
	node, until, err = r.check(ctx, token)
	if _, ok := errors.AsType[errStranger](err); ok {
		r.refuse(host)
	}
	return node, until, err
}

func (r *reviewer) check(ctx context.Context, token string) (node string, until time.Time, err error) {
	c, err := claimsOf(token)
	if err != nil {
		return "", until, errStranger{err.Error()}
	}
	// What is wrong by its own words is no work for the API server.
	if until = time.Unix(c.Expires, 0); c.Subject != r.username() || time.Now().After(until) {
		return "", until, errStranger{"the token is not of " + r.username() + ", or has expired"}
	}
	select {
	case r.slots <- struct{}{}:
		defer func() { <-r.slots }()
	case <-ctx.Done():
		return "", until, ctx.Err()
	}
	s, err := r.review(ctx, token, everywhere.Audience)
	if err != nil {
		return "", until, fmt.Errorf("TokenReview: %w", err)
	}
	extra := s.User.Extra[nodeNameKey]
	switch {
	case !s.Authenticated || !slices.Contains(s.Audiences, everywhere.Audience):
		return "", until, errStranger{fmt.Sprintf("the token is not valid for %s: %.200s", everywhere.Audience, s.Error)}
	case s.User.Username != r.username():
		return "", until, errStranger{"the token is not of " + r.username()}
	case len(extra) != 1 || extra[0] == "":
		return "", until, errStranger{"the API server does not say of which node the token is (Kubernetes 1.30 does)"}
	}
	return extra[0], until, nil
}

func (r *reviewer) listens(host string) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	until, refused := r.refused[host]
	return !refused || time.Now().After(until)
}

func (r *reviewer) refuse(host string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if len(r.refused) >= maxRefused {
		clear(r.refused)
	}
	r.refused[host] = time.Now().Add(refusal)
}
