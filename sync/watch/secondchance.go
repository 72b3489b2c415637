package watch

import "github.com/verdict-proxy/verdict/sync/snapshot"

// annotationSecondChance says what happens to a Service's endpoints that do not answer or refuse.
const annotationSecondChance = "verdict/second-chance"

// secondChance reads what a Service asks for. Any value other than "off", "observe" and "on" is reported and ignored.
func secondChance(f *problemList, annotations map[string]string) snapshot.SecondChance {
	text, ok := annotations[annotationSecondChance]
	if !ok {
		return snapshot.SecondChanceDefault
	}
	s, known := snapshot.ParseSecondChance(text)
	if !known {
		f.add("metadata.annotations["+annotationSecondChance+"]", `%s is none of "off", "observe" and "on"`, quote(text))
	}
	return s
}
