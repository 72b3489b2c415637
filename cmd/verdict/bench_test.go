package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/verdict-proxy/verdict/internal/lab/labtest"
)

// Each measurement prints one JSON object, or a text; internal/lab/benchmark has the tests of what is in them.
func TestBench(t *testing.T) {
	const small = " --services 50 --endpoints 3"
	for args, title := range map[string]string{
		"cold --rounds 1" + small:                             "Cold: 50 Services with 3 endpoints each",
		"change --rounds 1 --sizes 50 --endpoints 3":          "Change: in a kernel with Services of 3 endpoints each",
		"churn --rate 500 --seconds 0.1" + small:              "Churn: 500 changes a second",
		"restart --rounds 1 --changed 5" + small:              "Restart: 50 Services",
		"flow --endpoints 3 --flows 20 --rounds 1 --sizes 20": "Flow: a new UDP flow to Services with 3 endpoints each",
	} {
		var object map[string]any
		d := json.NewDecoder(strings.NewReader(benchOutput(t, args+" --json")))
		labtest.Check(t, d.Decode(&object))
		if d.More() || object["endpoints"] != 3.0 {
			t.Errorf("%s: %v, more: %v", args, object, d.More())
		}
		out := benchOutput(t, args)
		if !strings.HasPrefix(out, "verdict ") || !strings.Contains(out, "\n"+title) || strings.Contains(out, "\x1b") {
			t.Errorf("%s: %s", args, out)
		}
	}
}

// benchOutput gives what a measurement prints.
func benchOutput(t *testing.T, args string) string {
	t.Helper()
	var out bytes.Buffer
	root := newRoot()
	root.SetArgs(append([]string{"bench"}, strings.Fields(args)...))
	root.SetOut(&out)
	root.SetErr(t.Output())
	labtest.Check(t, root.ExecuteContext(t.Context()))
	labtest.NoNamespacesLeft(t)
	return out.String()
}

func TestBenchFlags(t *testing.T) {
	for args, want := range map[string]string{
		"cold --services 0":                      "--services: 0 is not",
		"cold --services 3000000":                "--services: 3000000 is not",
		"churn --services 100000 --endpoints 42": "--endpoints: 42 is not between 1 and 41",
		"change --endpoints -1":                  "--endpoints: -1 is not",
		"change --sizes 0,10":                    "--sizes: [0 10] are not between 1 and",
		"change --sizes 100000 --endpoints 42":   "--endpoints: 42 is not between 1 and 41",
		"flow --kube-proxy /none":                "--kube-proxy: ",
		"cold --rounds 0":                        "--rounds: 0 is not",
		"change --rounds -3":                     "--rounds: -3 is not",
		"churn --rate 0":                         "--rate: 0 is not",
		"churn --rate NaN":                       "--rate: NaN is not",
		"churn --seconds Inf":                    "--seconds: +Inf is not",
		"flow --sizes -1":                        "--sizes: -1 is not",
		"flow --sizes 3000000":                   "--sizes: 3000000 is not",
		"flow --sizes 100000 --endpoints 42":     "--endpoints: 42 is not between 1 and 41",
		"flow --rounds 0":                        "--rounds: 0 is not",
		"flow --flows 0":                         "--flows: 0 is not",
		"flow --sizes 0,100":                     "--flows: 8000 is more than 64 to each of 100 Services",
		"cold 10000":                             "takes no arguments",
	} {
		root := newRoot()
		root.SetArgs(append([]string{"bench"}, strings.Fields(args)...))
		root.SetOut(t.Output())
		root.SetErr(t.Output())
		if err := root.ExecuteContext(t.Context()); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v; want %q", args, err, want)
		}
	}
}

// An interrupted measurement ends soon, prints nothing and leaves nothing.
func TestBenchInterrupted(t *testing.T) {
	for _, args := range [][]string{
		{"cold", "--services", "50", "--rounds", "1000000"},
		{"change", "--sizes", "50", "--rounds", "1000000"},
		{"churn", "--services", "50", "--seconds", "3600"},
		{"flow", "--sizes", "20", "--flows", "200", "--rounds", "1000000"},
	} {
		for _, after := range []time.Duration{10 * time.Millisecond} {
			ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
			time.AfterFunc(after, cancel)
			var out bytes.Buffer
			root := newRoot()
			root.SetArgs(append([]string{"bench"}, args...))
			root.SetOut(&out)
			root.SetErr(t.Output())
			err := root.ExecuteContext(ctx)
			var status exitStatus
			if !errors.As(err, &status) || status != exitError || out.Len() > 0 {
				t.Errorf("%v, interrupted after %v, ended with %v and printed %q", args, after, err, &out)
			}
			labtest.NoNamespacesLeft(t)
		}
	}
}

// TestProgress: who writes to a file is told of progress, too, in lines that are not many.
func TestProgress(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var out bytes.Buffer
		p := newProgress(&out)
		for i := range 100 {
			p.show(fmt.Sprintf("%d of 100", i))
			time.Sleep(progressEvery / 50)
		}
		p.clear()
		if got, want := out.String(), "0 of 100\n50 of 100\n"; got != want {
			t.Errorf("%q; want %q", got, want)
		}
	})
}
