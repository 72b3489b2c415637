package cluster

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// FirstProcess is the argument with which a program that uses this package must call RunFirst.
const FirstProcess = "first-process-of-node"

// diskDirs are on the node's disk: what is there, and where the node sees it.
var diskDirs = []struct{ name, at string }{
	{"kubelet", "/var/lib/kubelet"},
	{"containerd", "/var/lib/containerd"},
	{"cni-conf", "/etc/cni/net.d"},
	{"cni", "/var/lib/cni"},
	{"cni-bin", pluginDir},
	{"pod-logs", "/var/log/pods"},
	{"container-logs", "/var/log/containers"},
}

// pluginDir is where the node's runtime and CNI plugins expect the plugins; debianPlugins is where Debian has them.
const (
	pluginDir     = "/opt/cni/bin"
	debianPlugins = "/usr/lib/cni"
)

// RunFirst is the first process of a node: it mounts the node's disks, starts containerd and the kubelet, starts them
// again when they end, and waits for the children of processes that have ended. It returns only if it cannot begin.
func RunFirst(config string) error {
	var c nodeConfig
	if err := json.Unmarshal([]byte(config), &c); err != nil {
		return err
	}
	if os.Getpid() != 1 {
		return errors.New("this is for the first process of a node")
	}
	if err := errors.Join(unix.Sethostname([]byte(c.Name)), c.mount(), c.writeFiles()); err != nil {
		return err
	}
	programs := [][]string{
		{"/usr/bin/containerd", "--config", filepath.Join(c.Dir, "containerd.toml")},
		{c.Kubelet, "--kubeconfig=" + c.Kubeconfig, "--config=" + filepath.Join(c.Dir, "kubelet.yaml"),
			"--hostname-override=" + c.Name, "--node-ip=" + c.Addresses, "--cert-dir=/var/lib/kubelet/pki", "--v=2"},
	}
	pids := make([]int, len(programs))
	for {
		for i, program := range programs {
			if pids[i] == 0 {
				pids[i] = c.launch(program)
			}
		}
		pid, err := unix.Wait4(-1, nil, 0, nil)
		if errors.Is(err, unix.ECHILD) {
			time.Sleep(time.Second)
		}
		if i := slices.Index(pids, pid); i >= 0 && err == nil {
			fmt.Printf("%s has ended\n", programs[i][0])
			pids[i] = 0
			time.Sleep(time.Second)
		}
	}
}

// launch starts a program whose end Wait4 tells. It returns 0 if that fails.
func (c *nodeConfig) launch(program []string) int {
	name := filepath.Join(c.Dir, filepath.Base(program[0])+".log")
	log, err := os.OpenFile(name, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o644)
	if err == nil {
		defer log.Close()
		var p *os.Process
		p, err = os.StartProcess(program[0], program, &os.ProcAttr{
			Env: os.Environ(), Files: []*os.File{nil, log, log}, Sys: &syscall.SysProcAttr{Setsid: true}})
		if err == nil {
			return p.Pid
		}
	}
	fmt.Println(err)
	return 0
}

func (c *nodeConfig) mount() error {
	if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""); err != nil {
		return fmt.Errorf("make mounts private: %w", err)
	}
	for _, at := range []string{"/proc", "/run"} {
		fs := map[string]string{"/proc": "proc", "/run": "tmpfs"}[at]
		if err := unix.Mount(fs, at, fs, unix.MS_NOSUID|unix.MS_NODEV, ""); err != nil {
			return fmt.Errorf("mount %s: %w", at, err)
		}
	}
	for _, dir := range diskDirs {
		source := filepath.Join(c.Dir, dir.name)
		if err := errors.Join(os.MkdirAll(source, 0o755), os.MkdirAll(dir.at, 0o755)); err != nil {
			return err
		}
		if err := unix.Mount(source, dir.at, "", unix.MS_BIND|unix.MS_REC, ""); err != nil {
			return fmt.Errorf("mount %s: %w", dir.at, err)
		}
	}
	// What is mounted here is seen in containers that ask for it, and the other way round, as on a real node.
	return unix.Mount("", "/", "", unix.MS_REC|unix.MS_SHARED, "")
}

func (c *nodeConfig) writeFiles() error {
	replace := strings.NewReplacer("NODE", c.Name, "GROUP", groupName(c.Name), "DIR", c.Dir,
		"PODS4", c.Pods4, "PODS6", c.Pods6, "PAUSE", WorkloadImage)
	write := func(path, text string) error { return os.WriteFile(path, []byte(replace.Replace(text)), 0o644) }
	err := errors.Join(
		write(filepath.Join(c.Dir, "containerd.toml"), containerdConfig),
		write(filepath.Join(c.Dir, "kubelet.yaml"), kubeletConfig),
		write(filepath.Join(c.Dir, "resolv.conf"), "nameserver 192.0.2.53\n"),
		linkPlugins(),
	)
	if err == nil && c.Bridge {
		err = write("/etc/cni/net.d/10-bridge.conflist", bridgeConfig)
	}
	return err
}

// linkPlugins puts Debian's CNI plugins where neighbors add theirs.
func linkPlugins() error {
	plugins, err := os.ReadDir(debianPlugins)
	for _, p := range plugins {
		link := os.Symlink(filepath.Join(debianPlugins, p.Name()), filepath.Join(pluginDir, p.Name()))
		if !errors.Is(link, fs.ErrExist) { // of a node that starts again
			err = errors.Join(err, link)
		}
	}
	return err
}

// The kernel refuses a lower oom_score_adj to a root without SYS_RESOURCE, and runc fails then.
const containerdConfig = `version = 2
root = "/var/lib/containerd"
state = "/run/containerd"
[grpc]
address = "/run/containerd/containerd.sock"
[plugins."io.containerd.grpc.v1.cri"]
sandbox_image = "PAUSE"
restrict_oom_score_adj = true
[plugins."io.containerd.grpc.v1.cri".cni]
bin_dir = "/opt/cni/bin"
conf_dir = "/etc/cni/net.d"
[plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
runtime_type = "io.containerd.runc.v2"
[plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc.options]
SystemdCgroup = false
`

// The kubelet of a real cluster asks the API server who a caller is. This one trusts everybody who reaches it.
const kubeletConfig = `apiVersion: kubelet.config.k8s.io/v1beta1
kind: KubeletConfiguration
failCgroupV1: false
cgroupDriver: cgroupfs
cgroupRoot: /GROUP
containerRuntimeEndpoint: unix:///run/containerd/containerd.sock
authentication: {anonymous: {enabled: true}, webhook: {enabled: false}}
authorization: {mode: AlwaysAllow}
clusterDNS: [10.96.0.10]
clusterDomain: cluster.local
resolvConf: DIR/resolv.conf
failSwapOn: false
enforceNodeAllocatable: []
evictionHard: {memory.available: 100Mi, nodefs.available: 1%, imagefs.available: 1%}
imageGCHighThresholdPercent: 100
imageGCLowThresholdPercent: 99
nodeStatusUpdateFrequency: 10s
`

const bridgeConfig = `{"cniVersion": "0.4.0", "name": "bridge", "plugins": [
{"type": "bridge", "bridge": "cni0", "isGateway": true, "hairpinMode": true, "ipMasq": false,
 "ipam": {"type": "host-local", "ranges": [[{"subnet": "PODS4"}], [{"subnet": "PODS6"}]],
  "routes": [{"dst": "0.0.0.0/0"}, {"dst": "::/0"}]}},
{"type": "portmap", "capabilities": {"portMappings": true}}]}
`
