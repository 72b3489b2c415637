package watch

import "github.com/verdict-proxy/verdict/sync/snapshot"

// annotationExternalFailover says what happens to clients from outside, with externalTrafficPolicy Local, where this
// node has no usable endpoint. The values are those of KEP-6272, and "drop".
const annotationExternalFailover = "verdict/external-failover"

// externalFailover reads what a Service asks for. Any other value is reported and ignored.
func externalFailover(f *problemList, annotations map[string]string) snapshot.ExternalFailover {
	text, ok := annotations[annotationExternalFailover]
	if !ok {
		return snapshot.FailoverDrop
	}
	e, known := snapshot.ParseExternalFailover(text)
	if !known {
		f.add("metadata.annotations["+annotationExternalFailover+"]",
			`%s is none of "cluster", "reject", "pass" and "drop"`, quote(text))
	}
	return e
}
