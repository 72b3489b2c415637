package neighbors

import (
	"context"
	"fmt"
	"net"

	"github.com/verdict-proxy/verdict/conformance/cluster"
)

// caddy is an ingress: Caddy on the first node, behind a Service with policy Local. It forwards requests to a cluster
// IP, behind which another Caddy, on the second node, answers with the address that the first one saw, and with the one
// that it was told in X-Forwarded-For.
var caddy = Neighbor{
	Name: "caddy", ingress: "ingress",
	own:       ingress,
	programs:  []program{{peer: "caddy", image: "/caddy", at: "/caddy"}},
	workloads: [][2]string{{space, "deployment/ingress"}, {space, "deployment/web"}},
}

// ingress is both Caddys with their Services.
const ingress = `apiVersion: v1
kind: Namespace
metadata: {name: neighbors, labels: {team: neighbors}}
---
apiVersion: v1
kind: ConfigMap
metadata: {namespace: neighbors, name: ingress}
data:
  Caddyfile: |
    {
      admin off
      auto_https off
      persist_config off
    }
    :8000 {
      reverse_proxy 10.96.0.90:80 {
        header_up X-Seen {http.request.remote.host}
      }
    }
    :8001 {
      respond "{http.request.header.X-Seen} {http.request.header.X-Forwarded-For}"
    }
---
apiVersion: v1
kind: Service
metadata: {namespace: neighbors, name: ingress}
spec:
  type: LoadBalancer
  externalTrafficPolicy: Local
  ipFamilyPolicy: PreferDualStack
  selector: {app: ingress}
  ports: [{port: 80, targetPort: 8000}]
---
apiVersion: v1
kind: Service
metadata: {namespace: neighbors, name: web}
spec:
  clusterIP: 10.96.0.90
  selector: {app: web}
  ports: [{port: 80, targetPort: 8001}]
---
apiVersion: apps/v1
kind: Deployment
metadata: {namespace: neighbors, name: ingress}
spec:
  selector: {matchLabels: {app: ingress}}
  template:
    metadata: {labels: {app: ingress}}
    spec:
      nodeName: node-1
      containers:
      - name: caddy
        image: docker.io/library/caddy
        command: [/caddy, run, --config, /config/Caddyfile, --adapter, caddyfile]
        readinessProbe: {tcpSocket: {port: 8000}, periodSeconds: 2}
        volumeMounts: [{name: config, mountPath: /config}]
      volumes: [{name: config, configMap: {name: ingress}}]
---
apiVersion: apps/v1
kind: Deployment
metadata: {namespace: neighbors, name: web}
spec:
  selector: {matchLabels: {app: web}}
  template:
    metadata: {labels: {app: web}}
    spec:
      nodeName: node-2
      containers:
      - name: caddy
        image: docker.io/library/caddy
        command: [/caddy, run, --config, /config/Caddyfile, --adapter, caddyfile]
        readinessProbe: {tcpSocket: {port: 8001}, periodSeconds: 2}
        volumeMounts: [{name: config, mountPath: /config}]
      volumes: [{name: config, configMap: {name: ingress}}]
`

// requests sends requests from outside through an ingress, whose Service has policy Local: the ingress sees the
// client's own address, and tells it to the server.
func (b *Bed) requests(ctx context.Context, service string, r *Result) error {
	_, balancers, err := b.service(ctx, space, service)
	if err != nil {
		return err
	}
	for family, ip := range b.clients["outside"].ips {
		want := ip + " " + ip
		p, took, err := b.until(ctx, "http://"+net.JoinHostPort(balancers[family], "80"), func(p *cluster.Probe) bool {
			return answeredBy(p, want)
		})
		if err != nil {
			return err
		}
		r.note(fmt.Sprintf("what the ingress saw, and told the server in X-Forwarded-For, of a client at %s",
			ip), p, took, answeredBy(p, want))
	}
	return nil
}
