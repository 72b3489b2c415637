package neighbors

import (
	"errors"
	"strings"
	"testing"

	"sigs.k8s.io/yaml"

	"github.com/verdict-proxy/verdict/conformance/cluster"
)

const daemonSet = `
# a comment alone
---
kind: Namespace
metadata: {name: router}
---
kind: DaemonSet
metadata: {name: router}
spec:
  template:
    spec:
      hostNetwork: true
      initContainers:
      - {name: install, image: "example.org/router-cni:v1", command: [cp], args: [/plugin, /opt/cni/bin/plugin]}
      containers:
      - name: router
        image: example.org/router:v2
        args: [--masquerade]
        volumeMounts: [{name: run, mountPath: /run/router}, {name: modules, mountPath: /lib/modules}]
      - {name: bare, image: "example.org/bare:v3", args: [/bin/bare, --all]}
      volumes: [{name: run, hostPath: {path: /run/router}}, {name: modules, hostPath: {path: /lib/modules}}]
`

var daemonPrograms = []program{
	{peer: "router", image: "/router:", at: "/opt/router", tools: true},
	{peer: "plugin", image: "/router-cni:", at: "/plugin"},
	{peer: "bare", image: "/bare:", at: "/bin/bare"},
}

func TestAdapt(t *testing.T) {
	text, err := adapt(daemonSet, daemonPrograms, map[string]string{"router": "/cache/router", "plugin": "/cache/plugin",
		"bare": "/cache/bare"})
	if err != nil {
		t.Fatal(err)
	}
	documents := strings.Split(text, "---\n")[1:]
	if len(documents) != 2 || !strings.Contains(documents[0], "kind: Namespace") {
		t.Fatalf("got documents %q", documents)
	}
	var got struct {
		Spec struct{ Template struct{ Spec podSpec } }
	}
	if err := yaml.Unmarshal([]byte(documents[1]), &got); err != nil {
		t.Fatal(err)
	}
	pod := got.Spec.Template.Spec
	if len(pod.InitContainers) != 1 || len(pod.Containers) != 2 {
		t.Fatalf("got %+v", pod)
	}
	const tools = " /usr:/usr /etc/alternatives:/etc/alternatives /lib:/lib /lib64:/lib64 /sbin:/sbin /bin:/bin"
	for _, test := range []struct {
		name                      string
		c                         container
		command, args, env, mount string
	}{
		{"a command stays", pod.InitContainers[0], "cp", "/plugin /opt/cni/bin/plugin", "", "/cache/plugin:/plugin"},
		{"tools are of this machine", pod.Containers[0], "/opt/router", "--masquerade", "PATH",
			"/run/router:/run/router /cache/router:/opt/router" + tools},
		{"an image without entry point", pod.Containers[1], "/bin/bare", "--all", "", "/cache/bare:/bin/bare"},
	} {
		t.Run(test.name, func(t *testing.T) {
			if test.c.Image != cluster.WorkloadImage {
				t.Errorf("image %q", test.c.Image)
			}
			got := [4]string{strings.Join(test.c.Command, " "), strings.Join(test.c.Args, " "), test.c.env(),
				test.c.mounts(pod)}
			if want := [4]string{test.command, test.args, test.env, test.mount}; got != want {
				t.Errorf("got  %q\nwant %q", got, want)
			}
		})
	}
}

type podSpec struct {
	InitContainers, Containers []container
	Volumes                    []struct {
		Name     string
		HostPath struct{ Path string }
	}
}

type container struct {
	Image         string
	Command, Args []string
	Env           []struct{ Name, Value string }
	VolumeMounts  []struct{ Name, MountPath string }
}

// env returns the names of variables.
func (c *container) env() string {
	var names []string
	for _, v := range c.Env {
		names = append(names, v.Name)
	}
	return strings.Join(names, " ")
}

// mounts returns host paths and where they are in the container.
func (c *container) mounts(pod podSpec) string {
	var all []string
	for _, m := range c.VolumeMounts {
		for _, v := range pod.Volumes {
			if v.Name == m.Name {
				all = append(all, v.HostPath.Path+":"+m.MountPath)
			}
		}
	}
	return strings.Join(all, " ")
}

func TestAdaptMissing(t *testing.T) {
	programs := []program{daemonPrograms[0], {image: "/router-cni:"}, daemonPrograms[2]}
	text, err := adapt(daemonSet, programs, nil)
	if err != nil || strings.Contains(text, "install") {
		t.Errorf("got %v, %s", err, text)
	}
}

func TestAdaptUnknownImage(t *testing.T) {
	_, err := adapt(daemonSet, daemonPrograms[:2], nil)
	if !errors.Is(err, errNoImage) || !strings.Contains(err.Error(), "example.org/bare:v3") {
		t.Errorf("got %v", err)
	}
}
