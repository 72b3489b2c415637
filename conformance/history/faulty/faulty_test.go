package faulty

import (
	"bufio"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"k8s.io/client-go/rest"
)

// Changes come late, some not at all, and what is no change at once.
func TestSpoil(t *testing.T) {
	api := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.Header.Get("Accept") != "application/json" || r.Header.Get("Authorization") != "Bearer secret" {
			w.WriteHeader(http.StatusForbidden)
			return
		}
		for i := range before + 2 {
			for _, name := range []string{"web-0", "web-1"} {
				fmt.Fprintf(w, `{"type":"MODIFIED","object":{"metadata":{"name":%q,"generation":%d}}}`+"\n", name, i)
			}
		}
	}))
	defer api.Close()
	const delay = 300 * time.Millisecond
	h, err := Options{Delay: delay, Lose: "-1"}.handler(&rest.Config{Host: api.URL, BearerToken: "secret"})
	if err != nil {
		t.Fatal(err)
	}
	wrong := httptest.NewServer(h)
	defer wrong.Close()
	get := func(path string) (count map[string]int, took time.Duration) {
		began := time.Now()
		r, err := http.Get(wrong.URL + path)
		if err != nil {
			t.Fatal(err)
		}
		defer r.Body.Close()
		count = make(map[string]int)
		for lines := bufio.NewScanner(r.Body); lines.Scan(); {
			for _, name := range []string{"web-0", "web-1"} {
				count[name] += strings.Count(lines.Text(), name)
			}
		}
		_, _ = io.Copy(io.Discard, r.Body)
		return count, time.Since(began)
	}
	const slices = "/apis/discovery.k8s.io/v1/endpointslices"
	got, took := get(slices + "?watch=true")
	if got["web-0"] != before+2 || got["web-1"] != before || took < delay {
		t.Errorf("%v after %v", got, took)
	}
	if got, _ = get(slices); got["web-1"] != before+2 {
		t.Errorf("a list lacks something: %v", got)
	}
	if got, _ = get("/api/v1/services?watch=true"); got["web-1"] != before+2 {
		t.Errorf("changes of Services are lost: %v", got)
	}
}
