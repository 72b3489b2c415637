package stories

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"github.com/verdict-proxy/verdict/conformance/cluster"
)

// eat takes 64 MiB of memory within a container's control group, which has 8 MiB left. The container's processes are
// the first that the kernel kills.
const eat = `
group=/sys/fs/cgroup/memory$(sed -n 's/^[0-9]*:memory://p' /proc/$1/cgroup)
for pid in "$@"; do echo 1000 > /proc/$pid/oom_score_adj; done
echo $(($(cat $group/memory.usage_in_bytes) + (8 << 20))) > $group/memory.limit_in_bytes
echo $$ > $group/cgroup.procs
head -c 64M /dev/zero | tail > /dev/null || true
`

// outOfMemory has the kernel kill the proxy and its keeper, since their container has no memory left.
func outOfMemory(ctx context.Context, b *Bed) error {
	n := b.Nodes[0] // not where others have ended a container: the kubelet would wait before it starts the next one
	keeper, proxy, err := processes(ctx, n)
	if err != nil {
		return err
	}
	// How it ends says nothing: it may be killed, too.
	_, eaten := n.Exec(ctx, "sh", "-c", eat, "sh", strconv.Itoa(keeper), strconv.Itoa(proxy))
	if err := cluster.Wait(ctx, time.Minute, "the proxy is another one", func() error {
		_, p, err := processes(ctx, n)
		if err == nil && p == proxy {
			err = fmt.Errorf("it is there still; what should take its memory says %v", eaten)
		}
		return err
	}); err != nil {
		return err
	}
	return b.ready(ctx, n)
}

// helm deletes what kustomize has applied, installs the chart, and the other way round.
func helm(ctx context.Context, b *Bed) error {
	// helm is built the first time, which must not happen while there is no proxy.
	if _, err := b.Helm(ctx, "version"); err != nil {
		return err
	}
	if err := b.DeleteOverlay(ctx); err != nil {
		return err
	}
	repository, tag, _ := strings.Cut(cluster.VerdictImage, ":")
	chart := filepath.Join(b.Source(), "deploy", "helm", "verdict")
	_, err := b.Helm(ctx, "install", "verdict", chart, "-n", system, "-f", filepath.Join(chart, "kubeadm.yaml"),
		"--set", "image.repository="+repository+",image.tag="+tag)
	if err != nil {
		return err
	}
	errs := []error{b.rolledOut(ctx, system, "daemonset/verdict")}
	_, err = b.Helm(ctx, "uninstall", "verdict", "-n", system, "--wait")
	return errors.Join(append(errs, err, b.verdict(ctx, cluster.VerdictImage, ""))...)
}
