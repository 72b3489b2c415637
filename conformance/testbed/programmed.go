package testbed

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"time"

	"github.com/verdict-proxy/verdict/sync/snapshot"
)

// statusURL is where Verdict says how far it is, to processes on its node.
const statusURL = "http://127.0.0.1:10256/status"

// versions are resourceVersions, as /status has them.
type versions struct {
	Services       snapshot.Version `json:"services"`
	EndpointSlices snapshot.Version `json:"endpointSlices"`
}

// reached reports whether both versions are those of o or newer.
func (v versions) reached(o versions) bool {
	return v.Services.Reached(o.Services) && v.EndpointSlices.Reached(o.EndpointSlices)
}

// programmed waits until the proxy of a node says that it has programmed everything up to some versions, if it is one
// that says so. Verdict writes small Services before large ones, so the canary may go ahead of what came earlier.
func (tb *Testbed) programmed(ctx context.Context, node string, goal versions) error {
	p := tb.Proxies[node]
	if p == nil || !p.Kind.status || p.Ended() {
		return nil
	}
	client := &http.Client{
		Timeout:   tb.Slow.Times(time.Second),
		Transport: &http.Transport{DialContext: tb.Host(node).DialContext, DisableKeepAlives: true},
	}
	return until(ctx, tb.Slow.Times(syncLimit), func() error {
		said, err := readProgrammed(ctx, client)
		if err != nil && !p.Ended() {
			return fmt.Errorf("%s: %w\n%s", node, err, p.Tail())
		}
		if err == nil && said != nil && !said.reached(goal) {
			return fmt.Errorf("%s has programmed %+v and not yet %+v", node, *said, goal)
		}
		return nil
	})
}

// readProgrammed returns up to which versions a proxy has programmed everything; nil if it does not say, like versions
// of Verdict before there was a status.
func readProgrammed(ctx context.Context, client *http.Client) (*versions, error) {
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, statusURL, nil)
	if err != nil {
		return nil, err
	}
	response, err := client.Do(request)
	if err != nil {
		return nil, err
	}
	defer response.Body.Close()
	switch response.StatusCode {
	case http.StatusOK:
	case http.StatusNotFound:
		return nil, nil
	default:
		return nil, fmt.Errorf("%s: %s", statusURL, response.Status)
	}
	var said struct {
		Programmed versions `json:"programmed"`
	}
	if err := json.NewDecoder(response.Body).Decode(&said); err != nil {
		return nil, fmt.Errorf("%s: %w", statusURL, err)
	}
	return &said.Programmed, nil
}
