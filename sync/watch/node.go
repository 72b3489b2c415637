package watch

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/rest"

	"github.com/verdict-proxy/verdict/internal/system/clip"
)

// ErrNoNode says that the Node object does not exist.
var ErrNoNode = errors.New("the Node object does not exist")

// NodeCondition is a condition in the status of a Node.
type NodeCondition struct {
	// Type names the condition. Status is True, False or Unknown; Reason is a word, Message a sentence of at most maxNote
	// bytes.
	Type, Status, Reason, Message string
}

// NodeWish is what a Node is to be like. Zero fields leave the Node as it is.
type NodeWish struct {
	Condition NodeCondition
	// WithoutTaint is the key of a taint that the Node is not to have, with any effect.
	WithoutTaint string
}

// NodeChange says what of a NodeWish had to be written.
type NodeChange struct {
	Condition, Taint bool
}

// NodeWriter changes a Node object: one condition, and one taint that it removes.
type NodeWriter struct {
	client *rest.RESTClient
	name   string
}

// NewNodeWriter returns a NodeWriter. It fails if the configuration is invalid.
func NewNodeWriter(config *rest.Config, nodeName string) (*NodeWriter, error) {
	client, err := (&Kubernetes{Config: config}).client(corev1.SchemeGroupVersion)
	if err != nil {
		return nil, fmt.Errorf("write the Node: %w", err)
	}
	return &NodeWriter{client, nodeName}, nil
}

// maxConflicts is how often a patch is made from a new reading, because the Node has changed meanwhile.
const maxConflicts = 5

// Apply reads the Node and writes what differs. The error is ErrNoNode, names the right that is missing, or is one that
// may pass.
func (w *NodeWriter) Apply(ctx context.Context, wish NodeWish) (done NodeChange, err error) {
	for range maxConflicts {
		var node *corev1.Node
		if node, err = w.read(ctx); err != nil {
			return done, err
		}
		// The taint goes first: pods wait for that.
		taint, taintErr := w.removeTaint(ctx, node, wish.WithoutTaint)
		condition, conditionErr := w.setCondition(ctx, node, wish.Condition)
		done.Taint, done.Condition = done.Taint || taint, done.Condition || condition
		if err = errors.Join(taintErr, conditionErr); !apierrors.IsConflict(taintErr) && !apierrors.IsInvalid(taintErr) {
			return done, err
		}
	}
	return done, err
}

// read reads the Node by a list, for which a proxy has the right anyway.
func (w *NodeWriter) read(ctx context.Context) (*corev1.Node, error) {
	var list corev1.NodeList
	err := w.client.Get().Resource("nodes").Param("fieldSelector",
		fields.OneTermEqualSelector(metav1.ObjectNameField, w.name).String()).Do(ctx).Into(&list)
	switch {
	case err != nil:
		return nil, fmt.Errorf("read the Node: %w", err)
	case len(list.Items) == 0:
		return nil, ErrNoNode
	}
	return &list.Items[0], nil
}

// operation is one of a JSON patch.
type operation struct {
	Op    string `json:"op"`
	Path  string `json:"path"`
	Value string `json:"value,omitempty"`
}

// removeTaint removes the taints with a key. Another taint cannot be hit, though others add and remove some meanwhile:
// the server tests the key at each place, and does everything or nothing.
func (w *NodeWriter) removeTaint(ctx context.Context, node *corev1.Node, key string) (bool, error) {
	var patch []operation
	for i, t := range slices.Backward(node.Spec.Taints) { // from the end, so that places stay what they are
		if path := fmt.Sprintf("/spec/taints/%d", i); key != "" && t.Key == key {
			patch = append(patch, operation{"test", path + "/key", key}, operation{Op: "remove", Path: path})
		}
	}
	if patch == nil {
		return false, nil
	}
	err := w.patch(ctx, types.JSONPatchType, patch)
	if err != nil {
		err = fmt.Errorf("remove the taint %s: %w", key, err)
	}
	return err == nil, err
}

// setCondition writes a condition unless the Node has it.
func (w *NodeWriter) setCondition(ctx context.Context, node *corev1.Node, want NodeCondition) (bool, error) {
	if want.Type == "" {
		return false, nil
	}
	now := metav1.NewTime(time.Now())
	c := corev1.NodeCondition{Type: corev1.NodeConditionType(want.Type), Status: corev1.ConditionStatus(want.Status),
		Reason: want.Reason, Message: clip.Cut(want.Message, maxNote), LastHeartbeatTime: now, LastTransitionTime: now}
	for _, has := range node.Status.Conditions {
		if has.Type != c.Type || has.Status != c.Status {
			continue
		}
		if has.Reason == c.Reason && has.Message == c.Message {
			return false, nil
		}
		c.LastTransitionTime = has.LastTransitionTime
	}
	patch := map[string]any{"status": map[string]any{"conditions": []corev1.NodeCondition{c}}}
	err := w.patch(ctx, types.StrategicMergePatchType, patch, "status")
	if err != nil {
		err = fmt.Errorf("write the condition %s: %w", want.Type, err)
	}
	return err == nil, err
}

// patch sends a patch of the Node or a part of it. If the right to do so is missing, the error names it.
func (w *NodeWriter) patch(ctx context.Context, how types.PatchType, patch any, part ...string) error {
	body, err := json.Marshal(patch)
	if err != nil {
		return err
	}
	err = w.client.Patch(how).Resource("nodes").Name(w.name).SubResource(part...).Body(body).Do(ctx).Error()
	if !apierrors.IsForbidden(err) || strings.Contains(err.Error(), "ValidatingAdmissionPolicy") {
		return err // a policy says itself what is wrong
	}
	resource := "nodes"
	for _, p := range part {
		resource += "/" + p
	}
	return fmt.Errorf("it needs the rule {apiGroups: [\"\"], resources: [%s], verbs: [patch]} (docs/CLUSTER.md): %w",
		resource, err)
}
