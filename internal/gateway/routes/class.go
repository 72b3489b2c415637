package routes

import (
	"cmp"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/validation"
	gatewayv1 "sigs.k8s.io/gateway-api/apis/v1"

	"github.com/verdict-proxy/verdict/internal/system/clip"
	"github.com/verdict-proxy/verdict/internal/system/nearest"
)

// class is a GatewayClass that exists.
type class struct {
	ours bool
	// params are nil if the class is not accepted.
	params *parameters
}

// parameters are what a class says of the Services of its Gateways.
type parameters struct {
	serviceType           corev1.ServiceType
	externalTrafficPolicy corev1.ServiceExternalTrafficPolicy
	loadBalancerClass     *string
	allocateNodePorts     bool
}

// The keys of a class's ConfigMap.
const (
	keyServiceType           = "serviceType"
	keyExternalTrafficPolicy = "externalTrafficPolicy"
	keyLoadBalancerClass     = "loadBalancerClass"
	keyAllocateNodePorts     = "allocateLoadBalancerNodePorts"
)

func defaultParameters() *parameters {
	return &parameters{serviceType: corev1.ServiceTypeLoadBalancer,
		externalTrafficPolicy: corev1.ServiceExternalTrafficPolicyCluster, allocateNodePorts: true}
}

// addClasses reads all classes, and plans the status of ours.
func (c *computation) addClasses() {
	version, features := c.supportedVersion(), supportedFeatures(c.hasRoutability())
	for _, o := range c.Classes {
		known := &class{ours: o.Spec.ControllerName == c.Controller}
		c.classes[o.Name] = known
		if !known.ours {
			continue
		}
		params, err := c.classParameters(o.Spec.ParametersRef)
		reason, message := gatewayv1.GatewayClassReasonAccepted, "Gateways of this class become Services"
		if err != nil {
			reason, message = gatewayv1.GatewayClassReasonInvalidParameters, err.Error()
		} else {
			known.params = params
		}
		version.ObservedGeneration = o.Generation
		c.plan.Classes = append(c.plan.Classes, ClassPlan{Object: o, Status: gatewayv1.GatewayClassStatus{
			Conditions: []metav1.Condition{condition(gatewayv1.GatewayClassConditionStatusAccepted, err == nil, reason,
				message, o.Generation), version},
			SupportedFeatures: features,
		}})
	}
}

// supportedMinors are the versions of the API whose kinds and fields are those that are read here.
var supportedMinors = []string{"v1.6", "v1.7"}

// supportedVersion is the condition about the definitions, without a generation.
func (c *computation) supportedVersion() metav1.Condition {
	has := map[string]bool{}
	supported := len(c.Bundles) > 0
	for _, b := range c.Bundles {
		has[cmp.Or(clip.Visible(b.Version, clip.Quoted), "no version")] = true
		supported = supported && slices.Contains(supportedMinors, minor(b.Version))
	}
	reason := gatewayv1.GatewayClassReasonSupportedVersion
	if !supported {
		reason = gatewayv1.GatewayClassReasonUnsupportedVersion
	}
	return condition(gatewayv1.GatewayClassConditionStatusSupportedVersion, supported, reason, fmt.Sprintf(
		"the definitions of Gateway API have %s; supported are %s", cmp.Or(strings.Join(slices.Sorted(maps.Keys(has)),
			", "), "no version"), strings.Join(supportedMinors, ", ")), 0)
}

// minor is "v1.7" of "v1.7.0"; empty for what is no version of three parts.
func minor(version string) string {
	parts := strings.SplitN(version, ".", 3)
	if len(parts) < 3 {
		return ""
	}
	return parts[0] + "." + parts[1]
}

// hasRoutability says whether the definition of a Gateway has the field: an API server drops it otherwise.
func (c *computation) hasRoutability() bool {
	return len(c.Bundles) > 0 && !slices.ContainsFunc(c.Bundles, func(b Bundle) bool {
		return b.Channel != "experimental" || minor(b.Version) != "v1.7"
	})
}

// supportedFeatures are sorted, as the API asks.
func supportedFeatures(routability bool) []gatewayv1.SupportedFeature {
	names := []gatewayv1.FeatureName{"Gateway", "GatewayAddressEmpty", "GatewayInfrastructure", "ReferenceGrant",
		"TCPRoute", "UDPRoute"}
	if routability {
		names = append(names, "GatewayAddressRoutability", "GatewayAddressRoutabilityCluster")
		slices.Sort(names)
	}
	features := make([]gatewayv1.SupportedFeature, len(names))
	for i, name := range names {
		features[i].Name = name
	}
	return features
}

// classParameters reads the ConfigMap that a class refers to. Without a reference, it returns the defaults.
func (c *computation) classParameters(ref *gatewayv1.ParametersReference) (*parameters, error) {
	if ref == nil {
		return defaultParameters(), nil
	}
	if ref.Group != "" || ref.Kind != "ConfigMap" {
		return nil, fmt.Errorf("parametersRef: %s of group %q is not supported: only ConfigMap of group \"\" is",
			ref.Kind, ref.Group)
	}
	if or(ref.Namespace, "") == "" {
		return nil, errors.New("parametersRef.namespace: a ConfigMap needs one")
	}
	name := types.NamespacedName{Namespace: string(*ref.Namespace), Name: ref.Name}
	data, exists := c.ConfigMap(name)
	if !exists {
		return nil, fmt.Errorf("parametersRef: the ConfigMap %s does not exist", name)
	}
	params, err := readParameters(data)
	if err != nil {
		return nil, fmt.Errorf("ConfigMap %s: %w", name, err)
	}
	return params, nil
}

// readParameters reads the data of a class's ConfigMap. It knows the keys above and no other.
func readParameters(data map[string]string) (*parameters, error) {
	p := defaultParameters()
	for _, key := range slices.Sorted(maps.Keys(data)) {
		value := data[key]
		wrong := func(must string) error { return fmt.Errorf("data.%s: %s is not %s", key, clip.Quote(value), must) }
		switch key {
		case keyServiceType:
			p.serviceType = corev1.ServiceType(value)
			if p.serviceType != corev1.ServiceTypeLoadBalancer && p.serviceType != corev1.ServiceTypeClusterIP {
				return nil, wrong("LoadBalancer or ClusterIP")
			}
		case keyExternalTrafficPolicy:
			p.externalTrafficPolicy = corev1.ServiceExternalTrafficPolicy(value)
			if p.externalTrafficPolicy != corev1.ServiceExternalTrafficPolicyCluster &&
				p.externalTrafficPolicy != corev1.ServiceExternalTrafficPolicyLocal {
				return nil, wrong("Cluster or Local")
			}
		case keyLoadBalancerClass:
			p.loadBalancerClass = &value
			if len(validation.IsQualifiedName(value)) > 0 {
				return nil, wrong("a name such as example.com/name")
			}
		case keyAllocateNodePorts:
			p.allocateNodePorts = value == "true"
			if value != "true" && value != "false" {
				return nil, wrong("true or false")
			}
		default:
			return nil, unknownKey(key)
		}
	}
	if p.serviceType == corev1.ServiceTypeClusterIP && len(data) > 1 {
		return nil, fmt.Errorf("data: %s ClusterIP has no use for other keys", keyServiceType)
	}
	return p, nil
}

func unknownKey(key string) error {
	keys := []string{keyServiceType, keyExternalTrafficPolicy, keyLoadBalancerClass, keyAllocateNodePorts}
	if near := nearest.Of(key, keys); near != "" {
		return fmt.Errorf("data.%s: there is no such key; is %s meant?", clip.Visible(key, clip.Quoted), near)
	}
	return fmt.Errorf("data.%s: there is no such key: %s", clip.Visible(key, clip.Quoted), strings.Join(keys, ", "))
}
