package watch

import (
	"bytes"
	"strings"

	"google.golang.org/protobuf/encoding/protowire"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/rest"
)

// Servers before 1.34 mostly do not stream their lists but send each in one piece. Where apimachinery decodes 10,000
// Services and 100,000 endpoints in one piece, the process has 203 MiB at its peak; with items that are split here and
// converted one by one, it is 105 MiB (TestKubernetesMemory).

// convertedList is a list whose items are already converted.
type convertedList struct {
	metav1.TypeMeta
	metav1.ListMeta
	Items []runtime.Object
}

// DeepCopyObject returns the list itself: nobody changes it.
func (l *convertedList) DeepCopyObject() runtime.Object { return l }

// GetObjectKind returns nothing, as for all objects that did not come from a decoder.
func (c *converted[Out]) GetObjectKind() schema.ObjectKind { return schema.EmptyObjectKind }

// DeepCopyObject returns the object itself: nobody changes it.
func (c *converted[Out]) DeepCopyObject() runtime.Object { return c }

// decodeList decodes the answer to a list request; item converts the message of one object.
func decodeList(r rest.Result, item func([]byte) (runtime.Object, error)) (runtime.Object, error) {
	body, err := r.Raw()
	if err != nil {
		return nil, r.Error()
	}
	if raw, ok := listMessage(body); ok {
		list := &convertedList{}
		err := eachField(raw, func(number protowire.Number, value []byte) error {
			switch number {
			case 1:
				return list.ListMeta.Unmarshal(value)
			case 2:
				o, err := item(value)
				list.Items = append(list.Items, o)
				return err
			}
			return nil
		})
		return list, err
	}
	return r.Get()
}

// listMessage returns the message of a list from the envelope that objects are sent in, runtime.Unknown ("Kubernetes
// Protobuf encoding" in the API concepts). ok is false for anything else, which is left to apimachinery's decoders.
func listMessage(body []byte) (raw []byte, ok bool) {
	body, ok = bytes.CutPrefix(body, []byte("k8s\x00"))
	if !ok {
		return nil, false
	}
	list, plain := false, true
	err := eachField(body, func(number protowire.Number, value []byte) error {
		switch number {
		case 1: // apiVersion and kind
			return eachField(value, func(number protowire.Number, value []byte) error {
				list = list || number == 2 && strings.HasSuffix(string(value), "List")
				return nil
			})
		case 2:
			raw = value
		case 3: // an encoding such as gzip
			plain = len(value) == 0
		}
		return nil
	})
	return raw, err == nil && list && plain
}

// eachField calls f with each string, bytes or message field, and skips the others.
func eachField(b []byte, f func(number protowire.Number, value []byte) error) error {
	for len(b) > 0 {
		number, kind, n := protowire.ConsumeTag(b)
		if n < 0 {
			return protowire.ParseError(n)
		}
		b = b[n:]
		if kind != protowire.BytesType {
			if n = protowire.ConsumeFieldValue(number, kind, b); n < 0 {
				return protowire.ParseError(n)
			}
			b = b[n:]
			continue
		}
		value, n := protowire.ConsumeBytes(b)
		if n < 0 {
			return protowire.ParseError(n)
		}
		if err := f(number, value); err != nil {
			return err
		}
		b = b[n:]
	}
	return nil
}
