// Package report holds what a run of the conformance suite found, and shows it: on a terminal, as JUnit XML, as one
// HTML page.
package report

import (
	"fmt"
	"time"
)

// Outcome is how a case ended for one proxy.
type Outcome string

// The outcomes.
const (
	// Pass: everything the case expects was seen.
	Pass Outcome = "pass"
	// Fail: something else was seen.
	Fail Outcome = "fail"
	// Differs: something else was seen, and the case says of this proxy that it is to be so, with a reason.
	Differs Outcome = "differs"
	// Skipped: the case does not concern this proxy or this host, and says why.
	Skipped Outcome = "skipped"
	// Broken: the case could not be judged, since the testbed failed. It counts as a failure.
	Broken Outcome = "broken"
)

// Run is one run of the suite.
type Run struct {
	Begun time.Time     `json:"begun"`
	Took  time.Duration `json:"took"` // ns
	// Host says on what it ran: "Linux 6.18.5, 2 cores, nft 1.0.6".
	Host string `json:"host"`
	// Proxies are in the order of the columns.
	Proxies []Proxy `json:"proxies"`
	Cases   []Case  `json:"cases"`
}

// Proxy is a proxy that was held to the suite.
type Proxy struct {
	// Name is that of --proxy: "kube-proxy-nftables".
	Name string `json:"name"`
	// Version is what the program says of itself.
	Version string        `json:"version"`
	Took    time.Duration `json:"took"` // ns, of all its cases
	// Witness is what came of asking its listings, too; nil if they were not asked.
	Witness *Witness `json:"witness,omitempty"`
}

// Witness counts looks of which the listing of the rules was asked, too.
type Witness struct {
	// Agree counts looks where listing, packets and expectation are the same, Disagree those where the listing says
	// something else: their cases failed.
	Agree    int `json:"agree"`
	Disagree int `json:"disagree"`
	// NotAsked counts the others by the reason why a listing has no answer.
	NotAsked []NotAsked `json:"notAsked,omitempty"`
	// Took is the time for listing, reading and asking.
	Took time.Duration `json:"took"` // ns
}

// NotAsked is a reason why the listing has no answer to some looks.
type NotAsked struct {
	Why   string `json:"why"`
	Count int    `json:"count"`
	// Example has more words about one of them, where there are more.
	Example string `json:"example,omitempty"`
}

// String gives the counts in a line: "9,312 looks agree, 0 disagree, 112 not asked, took 4 s".
func (w *Witness) String() string {
	n := 0
	for _, not := range w.NotAsked {
		n += not.Count
	}
	return fmt.Sprintf(
		"%s looks agree, %s disagree, %s not asked, took %s",
		thousands(w.Agree),
		thousands(w.Disagree),
		thousands(n),
		span(w.Took),
	)
}

// Case is one case, and what became of it for each proxy.
type Case struct {
	// Name is unique: "external-traffic-policy/local/node-without-endpoints/udp/ipv6".
	Name string `json:"name"`
	// Theme is the file it is from, Title a sentence for an operator: what is given, and what is to happen.
	Theme string `json:"theme"`
	Title string `json:"title"`
	// Source says where the expectation comes from: a section of documentation, a KEP.
	Source string `json:"source,omitempty"`
	// StandsFor are names of end-to-end tests of Kubernetes that look at the same behaviour.
	StandsFor []string `json:"standsFor,omitempty"`
	// Results has the proxies' names as keys.
	Results map[string]*Result `json:"results"`
}

// Result is what became of a case for one proxy.
type Result struct {
	Outcome Outcome       `json:"outcome"`
	Took    time.Duration `json:"took"` // ns
	// Why says, of Differs and Skipped, the reason; of Broken, the error.
	Why string `json:"why,omitempty"`
	// Right says, of Differs, whose behaviour is right in our eyes: a proxy's name, or "either".
	Right string `json:"right,omitempty"`
	// Looks are the packets that were sent, in order. Those that passed may have been left out.
	Looks []Look `json:"looks,omitempty"`
	// Objects is the YAML that was in force at the end of a case that did not pass.
	Objects string `json:"objects,omitempty"`
	// Listing is, of a case that did not pass, what the kernel held: nft list ruleset, iptables-save, ipvsadm -Sn.
	Listing string `json:"listing,omitempty"`
	// Logged are, of such a case, the lines of the proxies' logs about its Services.
	Logged string `json:"logged,omitempty"`
}

// Look is one or more packets of the same kind, with what was expected and what was seen.
type Look struct {
	// Step says at which point of the case, if it has several: "after the endpoint is gone".
	Step string `json:"step,omitempty"`
	// From and To say who asked whom: "pod a1", "10.96.0.10:80/tcp". Count is how often.
	From  string `json:"from"`
	To    string `json:"to"`
	Count int    `json:"count"`
	// Want and Got are in the same words: "one of a1, b1; source unchanged", "refused", "dropped".
	Want string `json:"want"`
	Got  string `json:"got"`
	// OK says that they agree.
	OK bool `json:"ok"`
}

// Counts counts results of one proxy.
type Counts struct{ Pass, Fail, Differs, Skipped, Broken int }

// Count gives the counts of a proxy.
func (r *Run) Count(proxy string) (c Counts) {
	for i := range r.Cases {
		c.add(r.Cases[i].Results[proxy])
	}
	return c
}

// add counts a result; nil counts nothing.
func (c *Counts) add(result *Result) {
	if result == nil {
		return
	}
	switch result.Outcome {
	case Pass:
		c.Pass++
	case Fail:
		c.Fail++
	case Differs:
		c.Differs++
	case Skipped:
		c.Skipped++
	case Broken:
		c.Broken++
	}
}
