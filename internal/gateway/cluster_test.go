//go:build peers

package gateway

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"log/slog"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
	"sigs.k8s.io/yaml"

	"github.com/verdict-proxy/verdict/internal/gateway/routes"
	"github.com/verdict-proxy/verdict/internal/lab/control"
	"github.com/verdict-proxy/verdict/internal/lab/control/peers"
	"github.com/verdict-proxy/verdict/internal/lab/labtest"
	"github.com/verdict-proxy/verdict/internal/system/testkit"
	"github.com/verdict-proxy/verdict/internal/system/wake"
)

func TestMain(m *testing.M) { labtest.Main(m) }

// cluster is a real API server, with a controller in this process.
type cluster struct {
	t      *testing.T
	plane  *control.Plane
	config *rest.Config
	raw    rest.Interface
	nodes  *nodes
	log    *lines
	// observed are how long changes took.
	mu         sync.Mutex
	observed   []time.Duration
	controller *Controller
	stop       func()
}

func newCluster(t *testing.T) *cluster {
	t.Helper()
	plane, host, _ := peers.Start(t, "../..", []string{"192.0.2.10/32", "2001:db8:2::10/128"})
	file := filepath.Join(filepath.Dir(plane.Kubeconfig()), "admin.kubeconfig")
	config, err := clientcmd.BuildConfigFromFlags("", file)
	labtest.Check(t, err)
	config.Dial = host.DialContext
	return &cluster{t: t, plane: plane, config: config, raw: plane.Client.Discovery().RESTClient(), log: &lines{},
		nodes: &nodes{lag: map[string]bool{}, asked: map[string]int{}}}
}

// lead starts a controller.
func (c *cluster) lead() {
	c.t.Helper()
	var err error
	c.controller, err = New(c.config, slog.New(slog.NewTextHandler(io.MultiWriter(c.log, c.t.Output()), nil)),
		func(d time.Duration) {
			c.mu.Lock()
			defer c.mu.Unlock()
			c.observed = append(c.observed, d)
		})
	labtest.Check(c.t, err)
	ctx, cancel := context.WithCancel(context.Background())
	var running sync.WaitGroup
	running.Go(func() { c.controller.Lead(ctx, c.nodes.ask) })
	c.stop = sync.OnceFunc(func() { cancel(); running.Wait() })
	c.t.Cleanup(c.stop)
}

// path is where an object is, or is made if it has no name.
func path(resource, namespace, name string) string {
	at := "/apis/gateway.networking.k8s.io/v1"
	switch resource {
	case services, "namespaces", "configmaps":
		at = "/api/v1"
	case endpointSlices:
		at = "/apis/discovery.k8s.io/v1"
	case "customresourcedefinitions":
		at = "/apis/apiextensions.k8s.io/v1"
	}
	if namespace != "" {
		at += "/namespaces/" + namespace
	}
	return strings.TrimSuffix(at+"/"+resource+"/"+name, "/")
}

// put makes objects of YAML, or changes their spec.
func (c *cluster) put(text string) {
	c.t.Helper()
	for _, document := range strings.Split(text, "\n---\n") {
		var o map[string]any
		labtest.Check(c.t, yaml.Unmarshal([]byte(document), &o))
		meta := o["metadata"].(map[string]any)
		namespace, _ := meta["namespace"].(string)
		resource := "customresourcedefinitions"
		for r, kind := range kinds {
			if kind == o["kind"] {
				resource = r
				o["apiVersion"] = groupOf(r, "")
			}
		}
		body, err := json.Marshal(o)
		labtest.Check(c.t, err)
		err = c.raw.Post().AbsPath(path(resource, namespace, "")).SetHeader("Content-Type", "application/json").
			Body(body).Do(c.t.Context()).Error()
		if apierrors.IsAlreadyExists(err) {
			err = c.raw.Patch(types.MergePatchType).AbsPath(path(resource, namespace, meta["name"].(string))).Body(body).
				Do(c.t.Context()).Error()
		}
		labtest.Check(c.t, err)
	}
}

// get reads an object by resource/namespace/name, and says whether it is there.
func (c *cluster) get(key string, into any) bool {
	parts := strings.Split(key, "/")
	raw, err := c.raw.Get().AbsPath(path(parts[0], parts[1], parts[2])).DoRaw(c.t.Context())
	return err == nil && json.Unmarshal(raw, into) == nil
}

// is reports whether an object has a condition.
func (c *cluster) is(key, condition string, want metav1.ConditionStatus) bool {
	var o withConditions
	if !c.get(key, &o) {
		return false
	}
	has := o.condition(condition)
	return has != nil && has.Status == want
}

func (c *cluster) eventually(condition string, keys ...string) {
	c.t.Helper()
	for _, k := range keys {
		testkit.Eventually(c.t, time.Minute, k+" is "+condition, func() bool {
			return c.is(k, condition, metav1.ConditionTrue)
		}, func() string {
			var o map[string]any
			c.get(k, &o)
			return fmt.Sprintln(o["status"], c.controller.Stats())
		})
	}
}

// define installs the definitions of Gateway API.
func (c *cluster) define() {
	c.t.Helper()
	out, err := exec.Command("go", "list", "-m", "-f", "{{.Dir}}", "sigs.k8s.io/gateway-api").Output()
	labtest.Check(c.t, err)
	for _, r := range []string{classes, gateways, tcpRoutes, udpRoutes, "referencegrants"} {
		text, err := os.ReadFile(filepath.Join(strings.TrimSpace(string(out)), "config/crd/standard",
			"gateway.networking.k8s.io_"+r+".yaml"))
		labtest.Check(c.t, err)
		c.put(string(text))
	}
	testkit.Eventually(c.t, time.Minute, "the definitions are served", func() bool {
		_, err := c.raw.Get().AbsPath(path(udpRoutes, "", "")).DoRaw(c.t.Context())
		return err == nil
	})
}

func (c *cluster) look() {
	if l := c.controller.leads(); l != nil {
		wake.Up(l.world.again)
	}
}

// writes counts the writes until there were none for a while.
func (c *cluster) writes() map[Write]uint64 {
	last := c.controller.Stats().Writes
	for quiet := 0; quiet < 10; quiet++ {
		time.Sleep(50 * time.Millisecond)
		now := c.controller.Stats().Writes
		if !maps.Equal(now, last) {
			last, quiet = now, 0
		}
	}
	return last
}

// TestObjects: a real API server takes everything that is written, keeps it as it was written, and is written to no
// more often than there is news.
func TestObjects(t *testing.T) {
	c := newCluster(t)
	c.lead()
	testkit.Eventually(t, time.Minute, "it waits for definitions", func() bool {
		return c.log.count("not installed") == 1
	})
	c.define()
	c.put(world1)
	c.look()
	c.put(shopDB(80, 20))
	c.put(edgeDB)
	c.put(strings.NewReplacer("TCP", "UDP", "5432", "5353").Replace(strings.ReplaceAll(edgeDB, "db", "dns")))
	c.eventually("Programmed", theGateway, "gateways/edge/dns")
	c.eventually("Accepted", theRoute)
	c.eventually(ProgrammedCondition, theRoute)
	c.balanced()
	c.sliced()
	before := c.writes()
	t.Logf("writes: %v", before)
	for w, n := range before {
		if w[1] != Outcomes[0] || w[0] == gateways+"/status" && n != 4 || w[0] == tcpRoutes+"/status" && n != 1 ||
			w[0] == endpointSlices && n != 1 {
			t.Errorf("%v: %d", w, n)
		}
	}

	c.stop()
	c.lead()
	testkit.Eventually(t, time.Minute, "another one leads", func() bool { return c.controller.Stats().Programmed == 2 })
	if w := c.writes(); len(w) > 0 {
		t.Errorf("another one that leads writes %v", w)
	}

	labtest.Check(t, c.plane.KillServer())
	time.Sleep(20 * time.Second)
	if w := c.writes(); len(w) > 0 {
		t.Errorf("without a server it writes %v", w)
	}
	labtest.Check(t, c.plane.StartServer(t.Context()))
	begin := time.Now()
	c.put(shopDB(50, 50))
	c.eventually("Accepted", theRoute)
	t.Logf("%v after the server came back, writes: %v; the log has %d lines", time.Since(begin), c.writes(),
		c.log.count(""))

	c.remove(theRoute)
	c.remove(theGateway)
	testkit.Eventually(t, time.Minute, "it knows that the Gateway is gone", func() bool {
		return c.controller.Stats().Objects[gateways] == 1
	})
	c.remove(theService) // nobody collects garbage here
	c.withoutDefinitions()
}

// sliced: the Gateway's Service has one EndpointSlice, whose endpoints are the backends' cluster IPs.
func (c *cluster) sliced() {
	c.t.Helper()
	list, err := c.plane.Client.DiscoveryV1().EndpointSlices("").List(c.t.Context(), metav1.ListOptions{
		LabelSelector: discoveryv1.LabelManagedBy + "=" + routes.ManagedBy})
	labtest.Check(c.t, err)
	var want, got []string
	for _, name := range []string{"db", "db-next"} {
		s, err := c.plane.Client.CoreV1().Services("shop").Get(c.t.Context(), name, metav1.GetOptions{})
		labtest.Check(c.t, err)
		want = append(want, s.Spec.ClusterIP)
	}
	for _, s := range list.Items {
		for _, e := range s.Endpoints {
			got = append(got, e.Addresses...)
		}
	}
	if len(list.Items) != 1 || !slices.Equal(got, want) {
		c.t.Errorf("%d EndpointSlices with %v, want %v", len(list.Items), got, want)
	}
}

// balanced has a class with load balancers: the Gateway is programmed once somebody gave the Service an address.
func (c *cluster) balanced() {
	c.t.Helper()
	c.put("kind: GatewayClass\nmetadata: {name: balanced}\nspec: {controllerName: verdict-proxy.github.io/gateway}")
	const key = "gateways/shop/lb"
	c.put(`kind: Gateway
metadata: {namespace: shop, name: lb}
spec:
  gatewayClassName: balanced
  listeners: [{name: db, port: 5432, protocol: TCP}]`)
	testkit.Eventually(c.t, time.Minute, "it has no address", func() bool {
		return c.is(key, "Programmed", metav1.ConditionFalse)
	})
	s, err := c.plane.Client.CoreV1().Services("shop").Get(c.t.Context(), "lb-verdict", metav1.GetOptions{})
	labtest.Check(c.t, err)
	s.Status.LoadBalancer.Ingress = []corev1.LoadBalancerIngress{{IP: "198.51.100.7"}}
	_, err = c.plane.Client.CoreV1().Services("shop").UpdateStatus(c.t.Context(), s, metav1.UpdateOptions{})
	labtest.Check(c.t, err)
	c.eventually("Programmed", key)
	c.remove(key)
}

// remove deletes an object by resource/namespace/name.
func (c *cluster) remove(key string) {
	c.t.Helper()
	parts := strings.Split(key, "/")
	labtest.Check(c.t, c.raw.Delete().AbsPath(path(parts[0], parts[1], parts[2])).Do(c.t.Context()).Error())
}

// withoutDefinitions takes the definitions away, and gives them back.
func (c *cluster) withoutDefinitions() {
	c.t.Helper()
	for _, r := range []string{gateways, tcpRoutes} {
		labtest.Check(c.t, c.raw.Delete().AbsPath(path("customresourcedefinitions", "", r+".gateway.networking.k8s.io")).
			Do(c.t.Context()).Error())
	}
	testkit.Eventually(c.t, 2*time.Minute, "it notices", func() bool { return c.log.count("not installed") == 2 })
	lines := c.log.count("")
	time.Sleep(5 * time.Second)
	if n := c.log.count("") - lines; n > 0 {
		c.t.Errorf("without definitions, %d lines were logged in five seconds", n)
	}
	c.define()
	c.look()
	c.put(edgeDB)
	c.put(shopDB(80, 20))
	c.eventually("Programmed", theGateway)
	c.eventually("Accepted", theRoute)
}

// TestSize: 1,000 routes on 100 Gateways.
func TestSize(t *testing.T) {
	c := newCluster(t)
	c.define()
	c.put(world1)
	c.put(manyRoutes(100, 10))
	before := rss(t)
	begin := time.Now()
	c.lead()
	testkit.Eventually(t, 5*time.Minute, "all are programmed", func() bool {
		s := c.controller.Stats()
		return s.Programmed == 100 && s.Writes[Write{tcpRoutes + "/status", Outcomes[0]}] >= 1000
	})
	took := time.Since(begin)
	t.Logf("all programmed after %v; writes %v; memory %d MB, %d MB more than before", took, c.writes(), rss(t),
		rss(t)-before)
	for i := range 20 {
		c.put(strings.ReplaceAll(manyRoute(0, i%10), "port: 80}", fmt.Sprintf("port: 80, weight: %d}", i+2)))
		c.eventually("Accepted", fmt.Sprintf("tcproutes/shop/r0-%d", i%10))
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	t.Logf("after 20 changes: %v; a change took %v", c.controller.Stats().Writes, c.observed[len(c.observed)-20:])
}

// rss is this process's resident memory in MB.
func rss(t *testing.T) int {
	t.Helper()
	text, err := os.ReadFile("/proc/self/status")
	labtest.Check(t, err)
	_, after, _ := strings.Cut(string(text), "VmRSS:")
	kb, err := strconv.Atoi(strings.Fields(after)[0])
	labtest.Check(t, err)
	return kb >> 10
}
