package watch

import "time"

// annotationDrain says how long TCP connections of a Service may last after their endpoint stopped serving.
const annotationDrain = "verdict/drain"

const maxDrain = 24 * time.Hour

// drain reads a Service's drain deadline: 0 if it has none. An invalid one is reported and ignored.
func drain(f *problemList, annotations map[string]string) time.Duration {
	text, ok := annotations[annotationDrain]
	if !ok {
		return 0
	}
	d, err := time.ParseDuration(text)
	if err != nil || d < time.Second || d > maxDrain || d%time.Second != 0 {
		f.add("metadata.annotations["+annotationDrain+"]",
			"%s is not a duration of whole seconds from 1s to 24h, such as 30s", quote(text))
		return 0
	}
	return d
}
