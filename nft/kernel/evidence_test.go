package kernel

import (
	"github.com/verdict-proxy/verdict/sync/dataplane"
	"github.com/verdict-proxy/verdict/sync/snapshot"
)

// retryAll has refused connections tried again at every TCP port with two endpoints, if the state gathers evidence.
func retryAll(st *dataplane.State) {
	for _, svc := range st.Services {
		for _, sp := range svc.Ports {
			if !st.Evidence || sp.Name.Protocol != snapshot.TCP {
				continue
			}
			sp.SecondChance = snapshot.SecondChanceOn
			for _, p := range []*dataplane.Pool{sp.Cluster, sp.Local} {
				p.RetryRefused = len(p.Endpoints) > 1
			}
		}
	}
}
