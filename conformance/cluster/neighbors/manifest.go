package neighbors

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"path/filepath"
	"slices"
	"strings"

	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	yamlreader "k8s.io/apimachinery/pkg/util/yaml"
	"sigs.k8s.io/yaml"

	"github.com/verdict-proxy/verdict/conformance/cluster"
)

// program is a program in an image of a manifest.
type program struct {
	// peer is its name in conformance/peers/build; empty if it cannot be had: then no container has its image.
	peer string
	// image is a part of the image's name in the manifest.
	image string
	// at is where the image has the program. A container without a command runs the first program of its image.
	at string
	// beside is the name of a directory beside the program, which the image has in its place; empty for the program.
	beside string
	// tools says that the image has a shell, iptables and the like, too. They are those of this machine.
	tools bool
}

// adapt replaces the images in YAML documents, since there is no registry here: containers run the programs at paths,
// by their names, in the image of the tests' own.
func adapt(text string, programs []program, paths map[string]string) (string, error) {
	var out strings.Builder
	for documents := yamlreader.NewYAMLReader(bufio.NewReader(strings.NewReader(text))); ; {
		document, err := documents.Read()
		if errors.Is(err, io.EOF) {
			return out.String(), nil
		}
		if err != nil {
			return "", err
		}
		object := map[string]any{}
		if err := yaml.Unmarshal(document, &object); err != nil {
			return "", err
		}
		if len(object) == 0 {
			continue
		}
		if err := adaptObject(object, programs, paths); err != nil {
			return "", fmt.Errorf("%v: %w", object["kind"], err)
		}
		adapted, err := yaml.Marshal(object)
		if err != nil {
			return "", err
		}
		out.WriteString("---\n" + string(adapted))
	}
}

// adaptObject adapts the pods of a Deployment or a DaemonSet. Other objects stay as they are.
func adaptObject(object map[string]any, programs []program, paths map[string]string) error {
	pod, found, err := unstructured.NestedMap(object, "spec", "template", "spec")
	if err != nil || !found {
		return err
	}
	mounted := map[string]string{} // the volumes to add: names by host paths
	for _, field := range []string{"initContainers", "containers"} {
		containers, _, err := unstructured.NestedSlice(pod, field)
		if err != nil {
			return err
		}
		containers = slices.DeleteFunc(containers, func(c any) bool {
			image, _ := c.(map[string]any)["image"].(string)
			return slices.ContainsFunc(programs, func(p program) bool {
				return p.peer == "" && strings.Contains(image, p.image)
			})
		})
		for _, c := range containers {
			if err := adaptContainer(c.(map[string]any), programs, paths, mounted); err != nil {
				return err
			}
		}
		if pod[field] = containers; len(containers) == 0 {
			delete(pod, field)
		}
	}
	volumes, _, err := unstructured.NestedSlice(pod, "volumes")
	if err != nil {
		return err
	}
	for path, name := range mounted {
		volumes = append(volumes, map[string]any{"name": name, "hostPath": map[string]any{"path": path}})
	}
	pod["volumes"] = volumes
	return unstructured.SetNestedMap(object, pod, "spec", "template", "spec")
}

// toolDirs are the directories of this machine that have what an image with tools has.
var toolDirs = []string{"/usr", "/etc/alternatives", "/lib", "/lib64", "/sbin", "/bin"}

func adaptContainer(c map[string]any, programs []program, paths, mounted map[string]string) error {
	image, _ := c["image"].(string)
	var has []program
	tools := false
	for _, p := range programs {
		if strings.Contains(image, p.image) {
			has, tools = append(has, p), tools || p.tools
		}
	}
	if len(has) == 0 {
		return fmt.Errorf("%w %q", errNoImage, image)
	}
	c["image"], c["imagePullPolicy"] = cluster.WorkloadImage, "IfNotPresent"
	if c["command"] == nil {
		args, _, err := unstructured.NestedSlice(c, "args")
		if err != nil {
			return err
		}
		c["command"] = []any{has[0].at}
		if len(args) > 0 && args[0] == has[0].at { // the image has no entry point
			c["args"] = args[1:]
		}
	}
	if tools {
		env, _, err := unstructured.NestedSlice(c, "env")
		if err != nil {
			return err
		}
		if !slices.ContainsFunc(env, func(v any) bool { return v.(map[string]any)["name"] == "PATH" }) {
			c["env"] = append(env, map[string]any{"name": "PATH", "value": "/usr/sbin:/usr/bin:/sbin:/bin"})
		}
	}
	return mountPrograms(c, has, tools, paths, mounted)
}

// mountPrograms adds mounts of programs, and of the directories with tools, and the volumes that they need to mounted.
func mountPrograms(c map[string]any, has []program, tools bool, paths, mounted map[string]string) error {
	mounts, _, err := unstructured.NestedSlice(c, "volumeMounts")
	if err != nil {
		return err
	}
	mount := func(path, at string) {
		if mounted[path] == "" {
			mounted[path] = fmt.Sprintf("of-machine-%d", len(mounted))
		}
		mounts = append(mounts, map[string]any{"name": mounted[path], "mountPath": at, "readOnly": true})
	}
	for _, p := range has {
		path := paths[p.peer]
		if p.beside != "" {
			path = filepath.Join(filepath.Dir(path), p.beside)
		}
		mount(path, p.at)
	}
	if tools {
		// The kernel has no modules here, and their directory would be within one of the tools'.
		mounts = slices.DeleteFunc(mounts, func(m any) bool { return m.(map[string]any)["mountPath"] == "/lib/modules" })
		for _, dir := range toolDirs {
			mount(dir, dir)
		}
	}
	c["volumeMounts"] = mounts
	return nil
}
