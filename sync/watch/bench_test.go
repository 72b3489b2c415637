package watch

import (
	"fmt"
	"testing"

	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// BenchmarkSlice converts an EndpointSlice, as every start does with all of them, and every change with one.
func BenchmarkSlice(b *testing.B) {
	for _, endpoints := range []int{1, 10, 100} {
		b.Run(fmt.Sprint(endpoints), func(b *testing.B) {
			o := &discoveryv1.EndpointSlice{
				ObjectMeta: metav1.ObjectMeta{
					Namespace: "shop", Name: "cart-abcde", Labels: map[string]string{discoveryv1.LabelServiceName: "cart"},
				},
				AddressType: discoveryv1.AddressTypeIPv4,
				Ports:       []discoveryv1.EndpointPort{{Name: new("http"), Port: new(int32(8080))}},
			}
			for i := range endpoints {
				o.Endpoints = append(o.Endpoints, discoveryv1.Endpoint{
					Addresses: []string{fmt.Sprintf("10.128.%d.%d", i/200, i%200+1)}, NodeName: new(fmt.Sprint("node-", i)),
				})
			}
			c := &converter{}
			b.ReportAllocs()
			for b.Loop() {
				if s, problems := c.slice(o, nil); len(s.Endpoints) != endpoints || len(problems) != 0 {
					b.Fatalf("%d endpoints, problems %v", len(s.Endpoints), problems)
				}
			}
		})
	}
}
