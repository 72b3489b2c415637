package watch

import (
	"context"
	"fmt"
	"maps"
	"net/http"
	"sync"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/verdict-proxy/verdict/internal/system/testkit"
	"github.com/verdict-proxy/verdict/sync/snapshot"
)

// podView collects what a Pods tells.
type podView struct {
	mu       sync.Mutex
	pods     map[string]string
	reported []string
}

func (v *podView) String() string {
	v.mu.Lock()
	defer v.mu.Unlock()
	return fmt.Sprint(v.pods, v.reported)
}

func watchPods(t *testing.T, s *apiServer) *podView {
	v := &podView{pods: map[string]string{}}
	p := &Pods{Config: s.config(), NodeName: "n1", Report: func(err error) {
		v.mu.Lock()
		defer v.mu.Unlock()
		v.reported = append(v.reported, err.Error())
	}}
	ctx, cancel := context.WithCancel(context.Background())
	var all sync.WaitGroup
	all.Go(func() {
		err := p.Run(ctx, func(m map[snapshot.Name]*Pod) {
			v.mu.Lock()
			defer v.mu.Unlock()
			for name, pod := range m {
				if delete(v.pods, name.String()); pod != nil {
					v.pods[name.String()] = fmt.Sprint(pod.Addrs, " ", pod.Workload)
				}
			}
		})
		if err != nil {
			t.Error(err)
		}
	})
	t.Cleanup(func() { cancel(); all.Wait() })
	return v
}

func aPod(name string, change func(*corev1.Pod)) *corev1.Pod {
	controller := true
	p := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "shop", Name: name,
		Labels:          map[string]string{"pod-template-hash": "5d4f8c7b9"},
		OwnerReferences: []metav1.OwnerReference{{Kind: "ReplicaSet", Name: "cart-5d4f8c7b9", Controller: &controller}}},
		Status: corev1.PodStatus{PodIPs: []corev1.PodIP{{IP: "10.244.1.7"}, {IP: "fd00::7"}}}}
	change(p)
	return p
}

// TestPods: pods are told with their addresses and workload. One in the node's network has no address of its own, and
// one that has ended has none any more.
func TestPods(t *testing.T) {
	both(t, func(t *testing.T, s *apiServer) {
		ended := aPod("ended", func(p *corev1.Pod) {})
		s.set(aPod("cart", func(*corev1.Pod) {}), ended,
			aPod("db-0", func(p *corev1.Pod) {
				p.OwnerReferences[0].Kind, p.OwnerReferences[0].Name = "StatefulSet", "db"
			}),
			aPod("agent", func(p *corev1.Pod) { p.Spec.HostNetwork, p.OwnerReferences = true, nil }))
		v := watchPods(t, s)
		expect := func(what string, want map[string]string) {
			t.Helper()
			testkit.Eventually(t, 10*time.Second, what, func() bool {
				v.mu.Lock()
				defer v.mu.Unlock()
				return maps.Equal(v.pods, want)
			}, v.String)
		}
		want := map[string]string{"shop/cart": "[10.244.1.7 fd00::7] shop/cart", "shop/db-0": "[10.244.1.7 fd00::7] shop/db",
			"shop/agent": "[] ", "shop/ended": "[10.244.1.7 fd00::7] shop/cart"}
		expect("first list", want)
		s.set(aPod("ended", func(p *corev1.Pod) { p.Status.Phase = corev1.PodSucceeded }))
		s.remove(aPod("agent", func(*corev1.Pod) {}))
		delete(want, "shop/ended")
		delete(want, "shop/agent")
		expect("an end", want)
		if got := s.queries["pods"]; got != "|spec.nodeName=n1" {
			t.Errorf("pods are asked for with %q", got)
		}
	})
}

// TestPodsForbidden: without the right to pods, that is said once.
func TestPodsForbidden(t *testing.T) {
	s := newAPIServer(t, true)
	s.refuses["pods"] = http.StatusForbidden
	v := watchPods(t, s)
	testkit.Eventually(t, 10*time.Second, "a report", func() bool {
		v.mu.Lock()
		defer v.mu.Unlock()
		return len(v.reported) > 0
	})
	v.mu.Lock()
	defer v.mu.Unlock()
	if len(v.reported) != 1 || len(v.pods) != 0 {
		t.Errorf("reported %q, pods %v", v.reported, v.pods)
	}
}
